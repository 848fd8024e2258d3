"""Parses JSON of another process or release into types; every reader of such a file uses `parse`."""

from __future__ import annotations

import json
import reprlib
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

T = TypeVar("T")

# Fits into SQLite's 64 bits; sums and differences of a few such numbers are finite.
Whole = Annotated[int, Field(ge=-(2**62), le=2**62)]
Finite = Annotated[float, Field(ge=-1e300, le=1e300)]


def parse(adapter: TypeAdapter[T], text: str | bytes) -> T:
    """Return the value of a JSON text; raise ValueError as `check` does."""
    return check(adapter, load(text))


def load(text: str | bytes) -> Any:
    """Return the value of a JSON text; raise ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its arrays or objects are nested too deeply") from None


def check(adapter: TypeAdapter[T], value: object) -> T:
    """Return a value as a type; raise ValueError with the place, the value and the rule, in one line."""
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place[:80] or 'it'} is {reprlib.repr(first['input'])}: {first['msg'][:200]}") from None
