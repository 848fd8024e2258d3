"""Text of other processes and of models, made fit for a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Replace characters that could steer a terminal; line feeds and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def one_line(text: str) -> str:
    """Return the text on one line, without anything that could steer a terminal."""
    return printable(" ".join(text.split()))


def clock(seconds: float) -> str:
    """Return e.g. "42 s", "3:07 min" or "1:02 h"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
