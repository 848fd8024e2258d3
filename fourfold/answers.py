"""Finds the final answer in a completion, so that answers can be compared: by a verifier, and in a majority vote."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

# A minus after a letter, a digit or a closing bracket is an operator. Commas may group thousands.
_NUMBER: Final = re.compile(
    r"(?:(?<![A-Za-z0-9_.)\]])[-\u2212])?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
_BRACE: Final = re.compile(r"\\boxed\{|[{}]")
_HASHES: Final = "####"


def find_last_number(text: str) -> Decimal | None:
    """Return the last integer or decimal number of a text, or None."""
    found = None
    for found in _NUMBER.finditer(text):  # noqa: B007 - only the last match is needed
        pass
    return _to_number(found[0]) if found else None


def find_tagged(text: str) -> str | None:
    """Return the text in the last `<answer>...</answer>`, without surrounding spaces, or None."""
    for part in reversed(text.split("</answer>")[:-1]):
        _, tag, inside = part.partition("<answer>")
        if tag:
            return inside.strip()
    return None


def final_answer(completion: str, reference: str = "") -> str:
    r"""Return the final answer of a completion in a form in which equal answers are equal texts; empty: it has none.

    It is the first of these that the completion has:

    1. the text in the last `<answer>...</answer>`,
    2. the text in the last `\boxed{...}` whose braces are closed,
    3. the rest of the line after the last `####`,
    4. the last number, if the reference answer has a number or there is none,
    5. the whole completion.

    Surrounding spaces and dollar signs are removed. A number is written without group separators, leading or trailing
    zeros: `1,200.50` is `1200.5`.
    """
    for marked in (find_tagged(completion), _find_boxed(completion), _find_hashed(completion)):
        if marked is not None:
            return _normalize(marked)
    if not reference or find_last_number(reference) is not None:
        number = find_last_number(completion)
        if number is not None:
            return _number_text(number)
    return _normalize(completion)


def _find_boxed(text: str) -> str | None:
    open_braces: list[int] = []  # where the content of each box begins that is open; -1: of another brace
    last = range(0)
    for brace in _BRACE.finditer(text):  # one pass: a completion may have thousands of boxes that are never closed
        if brace[0] != "}":
            open_braces.append(-1 if brace[0] == "{" else brace.end())
        elif open_braces and (start := open_braces.pop()) > last.start:
            last = range(start, brace.start())
    return text[last.start : last.stop] if last.start else None


def _find_hashed(text: str) -> str | None:
    _, mark, rest = text.rpartition(_HASHES)
    return rest.strip().partition("\n")[0] if mark else None


def _normalize(text: str) -> str:
    text = text.strip().strip("$").strip()
    return _number_text(_to_number(text)) if _NUMBER.fullmatch(text) else text


def _to_number(text: str) -> Decimal:
    return Decimal(text.replace(",", "").replace("\u2212", "-"))


def _number_text(number: Decimal) -> str:
    text = format(number, "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text in ("-0", "") else text
