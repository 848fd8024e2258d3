"""Reads the parameters of a request: JSON bodies within limits, and checked values out of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, NoReturn

from fourfold.text import clean, nearest_name
from fourfold_gateway.http.errors import RequestError

# The parser holds the interpreter lock: 500,000 empty arrays block all threads for 0.1 s.
MAX_JSON_VALUES: Final = 500_000


def parse_json(body: bytes) -> dict[str, Any]:
    """Return the object in a body.

    Raises:
        RequestError: it is not UTF-8, not JSON, has NaN or Infinity, nests too deeply, or has too many values.
    """
    if not body:
        raise RequestError("the body is empty; send a JSON object")
    if len(body) > MAX_JSON_VALUES and sum(map(body.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES:
        raise RequestError(f"the body has more than {MAX_JSON_VALUES} values; send a smaller request", status=413)
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8 (byte {error.start}); encode it as UTF-8") from None
    except RecursionError:
        raise RequestError("the body nests too deeply for JSON of this API; send flatter JSON") from None
    except RequestError:
        raise
    except ValueError as error:  # JSONDecodeError, or a number of more than 4,300 digits
        raise RequestError(f"the body is not JSON: {clean(str(error), 200)}; send a JSON object") from None
    if not isinstance(value, dict):
        raise RequestError(f"the body is a JSON {type(value).__name__}; send an object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise RequestError(f"the body has the number {name}, which JSON does not allow; send finite numbers")


class Fields:
    """The parameters of a request, or of an object in it. A parameter that is null counts as absent."""

    __slots__ = ("_values", "_where")

    def __init__(self, values: Any, where: str = "") -> None:
        if not isinstance(values, dict):
            raise RequestError(f"{where} is {_show(values)}; send an object", param=where)
        self._values: dict[str, Any] = values
        self._where = where

    def path(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def raw(self, name: str) -> Any:
        return self._values.get(name)

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string; without `default` it must be there."""
        value = self._values.get(name)
        if value is None:
            if default is None:
                self.refuse(name, "is missing; send a string")
            return default
        if not isinstance(value, str):
            self.refuse(name, f"is {_show(value)}; send a string")
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.refuse(name, f"is {_show(value)}; send an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            self.refuse(name, f"is {_show(value)}; send a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._values.get(name)
        if value is not None and not isinstance(value, bool):
            self.refuse(name, f"is {_show(value)}; send true or false")
        return bool(value)

    def items(self, name: str) -> list[Any]:
        """Return an array; empty when it is absent."""
        value = self._values.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            self.refuse(name, f"is {_show(value)}; send an array")
        return value

    def table(self, name: str) -> Fields | None:
        value = self._values.get(name)
        return None if value is None else Fields(value, self.path(name))

    def tables(self, name: str) -> list[Fields]:
        return [Fields(value, f"{self.path(name)}[{i}]") for i, value in enumerate(self.items(name))]

    def texts(self, name: str) -> list[str]:
        """Return an array of strings; a single string counts as one."""
        value = self._values.get(name)
        found = [value] if isinstance(value, str) else self.items(name)
        if not all(isinstance(text, str) for text in found):
            self.refuse(name, "has an element that is not a string; send strings")
        return found

    def refuse(self, name: str, text: str) -> NoReturn:
        path = self.path(name)
        raise RequestError(f"{path} {text}", param=path)

    def check_known(self, used: frozenset[str], ignored: frozenset[str], refused: Mapping[str, Refusal]) -> None:
        """Raise RequestError for a parameter that the API does not take."""
        for name, value in self._values.items():
            if name in used or name in ignored or value is None:
                continue
            refusal = refused.get(name)
            if refusal is None:
                near = nearest_name(name[:64], [*used, *ignored])
                hint = f"did you mean {near!r}?" if near else "remove it"
                path = clean(self.path(name), 100)
                raise RequestError(f"{path} is not a parameter of this API; {hint}", param=path)
            if value not in refusal.neutral:
                self.refuse(name, f"is {_show(value)}, which {refusal.text}")


class Refusal:
    """A parameter that the gateway does not support, because it would change the result."""

    __slots__ = ("neutral", "text")

    def __init__(self, text: str, neutral: Iterable[Any] = ()) -> None:
        """Make a refusal. `text` is reason and fix; `neutral` are values that change nothing and are accepted."""
        self.text = text
        self.neutral = tuple(neutral)


def _show(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    if isinstance(value, float) and not math.isfinite(value):
        return "too large a number"
    try:
        return clean(json.dumps(value, ensure_ascii=False), 60)
    except ValueError:  # an integer of more than 4,300 digits
        return "too large a number"
