"""Runs code of the policy in a process of its own: as a program, or as functions that the scoring process calls."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import itertools
import keyword
import os
import socket
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, Final

from fourfold_reward.code import wire

_FILE: Final = "<solution>"
_MAX_ITEMS: Final = 100_000
_MAX_NAMES: Final = 1000


def run(mode: str, descriptor: int, enter_sandbox: Callable[[], None]) -> None:
    """Run the untrusted code that the scoring process sends over a socket; never return normally.

    Args:
        mode: "program" or "functions".
        descriptor: of the socket.
        enter_sandbox: gives up all rights; called before any of the code runs.
    """
    connection = socket.socket(fileno=os.dup(descriptor))
    os.close(descriptor)
    request = wire.receive(connection)
    stdin = os.memfd_create("stdin")
    with os.fdopen(os.dup(stdin), "wb") as file:
        file.write(str(request.get("stdin", "")).encode(errors="replace"))
    os.lseek(stdin, 0, os.SEEK_SET)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(stdin, 0)
    os.dup2(connection.fileno() if mode == "program" else null, 1)
    os.dup2(null, 2)
    if mode == "program":
        connection.detach()
        os.closerange(3, 1 << 12)
    else:
        os.dup2(connection.detach(), 3)
        os.closerange(4, 1 << 12)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, way, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        for number, way in enumerate("rww")
    )
    atexit._clear()  # functions of the process that forked this one
    enter_sandbox()
    wire.report_ready(1 if mode == "program" else 3)
    module = types.ModuleType("__main__" if mode == "program" else "solution")
    sys.modules[module.__name__] = module
    sys.argv = ["solution.py"]
    try:
        if mode == "program":
            exec(compile(request["code"], _FILE, "exec"), module.__dict__)
        else:
            _serve(request["code"], module, socket.socket(fileno=3))
    except BaseException:
        pass
    # As an interpreter ends: programs may write in a thread or in an exit handler.
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.__stdout__):
        with contextlib.suppress(BaseException):
            stream.flush()  # type: ignore[union-attr]
    os._exit(0)


def _serve(code: str, module: types.ModuleType, connection: socket.socket) -> None:
    """Execute the code, send its names, then answer calls."""
    objects: list[Any] = []

    def handle(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    answer: dict[str, Any]
    request: dict[str, Any] = {"op": "load"}
    while True:
        try:
            if request["op"] == "load":
                exec(compile(code, _FILE, "exec"), module.__dict__)
                answer = {"names": _names(module, handle)}
            else:
                answer = {"value": wire.encode(_perform(request, objects), handle)}
        except BaseException as error:
            text = ""
            with contextlib.suppress(BaseException):  # of a broken __str__
                text = str(error)[:500]
            answer = {"raised": [_builtin_name(error), text]}
        wire.send(connection, answer)
        request = wire.receive(connection)


def _names(module: types.ModuleType, handle: Callable[[Any], int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in list(vars(module).items())[:_MAX_NAMES]:
        plain = name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("__")
        if plain and not hasattr(builtins, name) and not isinstance(value, types.ModuleType):
            with contextlib.suppress(Exception):
                found[name] = wire.encode(value, handle)
    return found


def _perform(request: dict[str, Any], objects: list[Any]) -> Any:
    target = objects[request["target"]]
    arguments = [wire.decode(value, objects.__getitem__) for value in request.get("args", ())]
    match request["op"]:
        case "call":
            named = {name: wire.decode(v, objects.__getitem__) for name, v in request.get("kwargs", {}).items()}
            return target(*arguments, **named)
        case "attr":
            return getattr(target, str(request["name"]))
        case "item":
            return target[arguments[0]]
        case "list":
            return list(itertools.islice(target, _MAX_ITEMS))
        case "len":
            return len(target)
        case "str":
            return str(target)
        case "repr":
            return repr(target)
        case "bool":
            return bool(target)
    raise ValueError(request["op"])


def _builtin_name(error: BaseException) -> str:
    """Return the name of the nearest class of an exception that every Python has."""
    return next(c.__name__ for c in type(error).__mro__ if c.__module__ == "builtins")
