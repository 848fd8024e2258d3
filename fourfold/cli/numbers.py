"""Parses numbers of the command line, as types of argparse whose errors name the value and the rule."""

from __future__ import annotations

import argparse
from typing import Final

_MAX: Final = 1e12
_MAX_DIGITS: Final = 12


def number(text: str) -> float:
    """Return a number; the command checks its range."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number, such as 0.5") from None


def whole(text: str) -> int:
    """Return a whole number; the command checks its range."""
    try:
        return int(text)
    except ValueError:  # also of thousands of digits
        raise argparse.ArgumentTypeError(f"{text[:80]!r} must be a whole number, such as 8") from None


def positive(text: str) -> float:
    """Return a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= _MAX:  # false for NaN, too
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, at most {_MAX:g}")
    return value


def positive_whole(text: str) -> int:
    """Return a whole number above 0."""
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number above 0, of at most {_MAX_DIGITS} digits")
    return int(text)
