"""Makes text from other processes safe for terminals, logs and files, formats durations, and compares names.

A string of a peer can contain escape sequences that control a terminal, line ends that forge log lines, marks that
reverse the reading direction, or a megabyte of letters. `fourfold.rpc.responses` cleans every string of a response.
Strings that programs compare (reasons, metric names) must match a pattern instead.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Container, Iterable, Sequence
from typing import Final
from urllib.parse import urlsplit

# Limits in characters.
MAX_TEXT: Final = 4096
"""A string in a response; the rest is cut off."""
MAX_ERROR: Final = 1000
"""The text of an error; `SampleError.message` documents this limit."""
MAX_NAME: Final = 200
"""The name of a scorer or a model."""

MAX_COMPONENTS: Final = 64
"""Named components of one score."""

# CSI sequences ("\x1b[31m"), OSC sequences up to their end ("\x1b]0;title\x07"), and other two-character escapes.
_ESCAPE: Final = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]")
_REASON: Final = re.compile(r"[A-Z][A-Z0-9_]{0,62}")
_METRIC_NAME: Final = re.compile(r"[\w.:/@+-][ \w.:/@+-]{0,63}")


def clean(text: str, limit: int = MAX_TEXT) -> str:
    """Return `text` on one line without control characters, cut to `limit` characters.

    Escape sequences, direction marks, unpaired surrogates and unassigned characters are removed. White space of any
    kind becomes a space.
    """
    if not text.isprintable():
        if len(text) > 4 * limit:  # bounds the time of the search
            text = text[: 4 * limit]
        text = "".join(c if c.isprintable() else " " * c.isspace() for c in _ESCAPE.sub("", text))
    return text if len(text) <= limit else text[: max(limit - 3, 0)] + "..."


def is_reason(text: str) -> bool:
    """Return whether `text` is UPPER_SNAKE_CASE of at most 63 characters."""
    return _REASON.fullmatch(text) is not None


def is_metric_name(text: str) -> bool:
    """Return whether `text` has 1 to 64 letters (of any language), digits and ._:/@+-, with spaces inside."""
    return _METRIC_NAME.fullmatch(text) is not None


def printable(text: str) -> str:
    """Replace characters that could control a terminal by "?"; line feeds and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def public_url(url: str) -> str:
    """Return scheme, host, port and path of an address; its password, query and fragment may hold keys."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return "a malformed address"
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}{f':{port}' if port else ''}{parts.path}"


def format_duration(seconds: float) -> str:
    """Return e.g. "42 s", "3:07 min" or "1:02 h"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"


def format_interval(value: float, spread: float | Sequence[float] | None, digits: int) -> str:
    """Return a value with the bounds of its interval, "0.95 [0.84, 0.99]", or half of its length, "0.45 +- 0.13"."""
    if isinstance(spread, Sequence):
        return f"{value:.{digits}f} [{', '.join(f'{bound:.{digits}f}' for bound in spread)}]"
    return f"{value:.{digits}f}" + ("" if spread is None or math.isnan(spread) else f" +- {spread:.{digits}f}")


def format_score(
    score: float, spread: float | Sequence[float] | None, scored: int, missing: int = 0, *, measure: str = "score"
) -> str:
    """Return a held-out score with its interval and its answers, e.g. "0.45 +- 0.13 (160 answers)".

    Args:
        score: Mean over the scored answers.
        spread: Bounds of the 95 % interval, or half of its length; None or NaN if unknown.
        scored: Answers with a score.
        missing: Answers without one; with any, the text is e.g. "1.00 (1 of 240 answers; 239 without a score)".
        measure: see `of_measure`.
    """
    score, spread = of_measure(score, spread, measure)
    return f"{format_interval(score, spread, 2)} ({format_answers(scored, missing, measure)})"


def of_measure(
    score: float, spread: float | Sequence[float] | None, measure: str
) -> tuple[float, float | Sequence[float] | None]:
    """Return the value and the spread to show; of a `measure` that is a loss, the score is the negative."""
    if not measure.endswith("loss"):
        return score, spread
    return -score, [-bound for bound in reversed(spread)] if isinstance(spread, Sequence) else spread


def format_short_score(score: float, scored: int, missing: int, *notes: str, measure: str = "score") -> str:
    """Return a held-out score with notes in parentheses; the number of its answers if some have no score.

    Example: "1.00 (step 0; 1 of 240 answers; 239 without a score)". `measure` is that of `of_measure`.
    """
    score, _ = of_measure(score, None, measure)
    words = [*notes, *([format_answers(scored, missing, measure)] if missing else [])]
    return f"{score:.2f}" + (f" ({'; '.join(words)})" if words else "")


def unit_of(measure: str) -> str:
    """Return what a measure counts: "pair", "step" or "answer"."""
    return {"accuracy": "pair", "pair loss": "pair", "step accuracy": "step"}.get(measure, "answer")


def format_answers(scored: int, missing: int, measure: str = "score") -> str:
    """Return the number of answers with a score and, if there are any, of those without one, as text.

    Examples: "160 answers", "1 of 240 answers; 239 without a score"; "20 pairs" by `measure`, as of `of_measure`.
    """
    word = unit_of(measure)
    if missing:
        return f"{scored} of {scored + missing} {word}s; {missing} without a score"
    return f"{scored} {word}{'s' * (scored != 1)}"


def format_bytes(count: int) -> str:
    """Return a size in MB, or in GB from 10 MB on."""
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2f} MB"


def align_columns(rows: Sequence[Sequence[str]], *, left: Container[int] = (0,)) -> list[str]:
    """Return the lines of a table; the columns with the numbers in `left` are left-aligned, others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(widths[i]) if i in left else cell.rjust(widths[i]) for i, cell in enumerate(cells)
        ).rstrip()
        for cells in rows
    ]


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most similar to a misspelt one in any case; empty if none is similar."""
    names = {one.casefold(): one for one in known}
    return next((names[near] for near in difflib.get_close_matches(name.casefold(), list(names), n=1)), "")


def choices(name: object, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: the nearest one, and all that are known."""
    names = list(known)
    near = nearest_name(name, names) if isinstance(name, str) else ""
    return (f"did you mean `{near}`? Known are " if near else "choose one of ") + ", ".join(names)
