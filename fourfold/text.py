"""Text from other processes, made safe for terminals, logs and files.

A string of a peer can hold escape sequences that steer a terminal, line ends that forge log
lines, marks that reverse the reading direction, or a megabyte of letters. `fourfold.rpc.responses`
cleans every string of a response; what programs compare (reasons, names of metrics) has an
alphabet of its own here.
"""

from __future__ import annotations

import re
from typing import Final

MAX_TEXT: Final = 4096
"""Characters of a string in a response; the rest is cut off."""
MAX_ERROR: Final = 1000
"""Characters of an error's text, as `SampleError.message` promises."""
MAX_NAME: Final = 200
"""Characters of the name of a scorer or a model."""

MAX_COMPONENTS: Final = 64
"""Named parts of one score."""

# CSI sequences ("\x1b[31m"), OSC sequences up to their end ("\x1b]0;title\x07"), and other two-letter escapes.
_ESCAPE: Final = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]")
_REASON: Final = re.compile(r"[A-Z][A-Z0-9_]{0,62}")
_KEY: Final = re.compile(r"[\w.:/@+-][ \w.:/@+-]{0,63}")


def clean(text: str, limit: int = MAX_TEXT) -> str:
    """Return `text` on one line, without control characters, and at most `limit` characters long.

    Escape sequences, marks of direction, unpaired surrogates and unassigned letters are removed. White space of any
    kind becomes a space.
    """
    if not text.isprintable():
        if len(text) > 4 * limit:  # what is cut off below need not be searched
            text = text[: 4 * limit]
        text = "".join(c if c.isprintable() else " " * c.isspace() for c in _ESCAPE.sub("", text))
    return text if len(text) <= limit else text[: max(limit - 3, 0)] + "..."


def is_reason(text: str) -> bool:
    """Whether `text` is UPPER_SNAKE_CASE of at most 63 characters."""
    return _REASON.fullmatch(text) is not None


def is_metric_name(text: str) -> bool:
    """Whether `text` is a name of 1 to 64 letters, digits and ._:/@+- with spaces inside: a metric, or part of a score.

    Letters may be of any language.
    """
    return _KEY.fullmatch(text) is not None


def printable(text: str) -> str:
    """Replace characters that could steer a terminal; line feeds and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def format_duration(seconds: float) -> str:
    """Return e.g. "42 s", "3:07 min" or "1:02 h"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
