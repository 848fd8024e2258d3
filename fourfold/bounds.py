"""Bounds of the numbers that count on through a run: steps, policy versions, epochs, parts.

They travel as int64. Services add 1 to them, and a number at the end of int64 would make every later answer fail. No
run comes near 2^53, up to which other languages' numbers (JSON, JavaScript, Lua) are exact, too.
"""

from __future__ import annotations

from typing import Final

from fourfold.errors import InvalidInput

MAX_NUMBER: Final = 2**53
MAX_RAISED_VERSION: Final = 2**52
"""Highest version that a caller may give the weights: what comes after it stays below MAX_NUMBER."""


def check_number(value: int, name: str, *, least: int = 0, most: int = MAX_NUMBER) -> int:
    """Return a number of a request.

    Raises:
        InvalidInput: it is not in [least, most].
    """
    if value < least:
        raise InvalidInput(f"{name} is {value}; it must be at least {least}")
    if value > most:
        raise InvalidInput(f"{name} is {value}; it must be at most {most}")
    return value
