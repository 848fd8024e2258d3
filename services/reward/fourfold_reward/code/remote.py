"""Stand-ins for the functions and objects of a runner, with which tests call the code.

A test gets plain values (numbers, texts, lists, tuples, sets, dictionaries of these), and `Remote` for anything else. A
Remote never takes part in a comparison: its process could claim that it equals whatever the test expects.
"""

from __future__ import annotations

import builtins
import keyword
import socket
from collections.abc import Iterator
from typing import Any, NoReturn

from fourfold_reward.code import wire


class Connection:
    """Calls a runner until a deadline (of time.monotonic()). All methods raise WireError."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection, self._deadline = connection, deadline

    def names(self) -> dict[str, Any]:
        """Return the names of the code, which the runner has, with their values. It raises what the code raises."""
        answer = self._answer()
        names = answer.get("names")
        if not isinstance(names, dict):
            raise wire.WireError("the code sent no names")
        return {
            name: wire.decode(value, self._remote)
            for name, value in names.items()
            # Names of Python itself stay what they are: a test that calls `sorted` must not ask the code.
            if name.isidentifier() and not name.startswith("__") and not hasattr(builtins, name)
            if not keyword.iskeyword(name)
        }

    def ask(self, request: dict[str, Any], *arguments: Any, **named: Any) -> Any:
        """Send one request about an object; return the value, or raise what the code raised."""
        request["args"] = [wire.encode(value, _number) for value in arguments]
        request["kwargs"] = {name: wire.encode(value, _number) for name, value in named.items()}
        return wire.decode(self._ask(request).get("value"), self._remote)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        wire.send(self._connection, request, deadline=self._deadline)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        answer = wire.receive(self._connection, deadline=self._deadline)
        if "raised" in answer:
            _raise(answer["raised"])
        return answer

    def _remote(self, number: int) -> Remote:
        return Remote(self, number)


class Remote:
    """An object of the runner."""

    __slots__ = ("_connection", "_target")

    def __init__(self, connection: Connection, target: int) -> None:
        self._connection, self._target = connection, target

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._ask("call", *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        # Protocols of Python, such as copying, would ask for a hundred names, and before __init__ for a slot.
        if name.startswith("__") or name in self.__slots__:
            raise AttributeError(name)
        return self._connection.ask({"op": "attr", "target": self._target, "name": name})

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._plain("list", list))

    def __len__(self) -> int:
        return int(self._plain("len", int))

    def __str__(self) -> str:
        return str(self._plain("str", str))

    def __repr__(self) -> str:
        return str(self._plain("repr", str))

    def __bool__(self) -> bool:
        return bool(self._plain("bool", bool))

    def __eq__(self, other: object) -> bool:
        raise wire.WireError("the code returned an object that is no plain value, and a test cannot compare it")

    def __hash__(self) -> int:
        return self._target

    def _ask(self, operation: str, *arguments: Any, **named: Any) -> Any:
        return self._connection.ask({"op": operation, "target": self._target}, *arguments, **named)

    def _plain(self, operation: str, kind: type) -> Any:
        value = self._ask(operation)
        if type(value) is not kind:
            raise wire.WireError(f"the code sent a {type(value).__name__} for {operation}")
        return value


def _number(value: Any) -> int:
    if isinstance(value, Remote):
        return value._target
    raise wire.WireError(f"a {type(value).__name__} cannot be passed to the code")


def _raise(raised: Any) -> NoReturn:
    """Raise the built-in exception that the code raised."""
    if not isinstance(raised, list) or len(raised) != 2:
        raise wire.WireError("the code sent a malformed exception")
    kind = getattr(builtins, str(raised[0]), None)
    # An AssertionError of the code is no failed test, and a StopIteration would end a loop of the test.
    if isinstance(kind, type) and issubclass(kind, Exception) and kind not in (AssertionError, StopIteration):
        try:
            error = kind(str(raised[1]))
        except TypeError:  # such as UnicodeDecodeError, which takes five arguments
            error = RuntimeError(f"{kind.__name__}: {raised[1]}")
        raise error
    raise RuntimeError(f"{raised[0]}: {raised[1]}")
