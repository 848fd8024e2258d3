"""Finds the final answer in a completion, so that answers can be compared: by a verifier, and in a majority vote.

Also defines the text of a reference answer, which a row may have as any JSON value.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any, Final

ANSWER_VALUE: Final = "answer_value"
"""Metadata field with the reference answer of a row that has another JSON value than a text."""

# Full-width forms, which models write between East Asian characters, and the minus sign of mathematics, also as a dash.
_MINUS: Final = dict.fromkeys([*range(0x2010, 0x2014), 0x2212], "-")
_PLAIN: Final = {ord(c) + 0xFEE0: c for c in "0123456789.,-"} | _MINUS
# Other marks than a comma between groups of thousands: of LaTeX, Switzerland, Python, SI; points from two on.
# A plain space separates numbers. The number of groups is bounded, as the time is quadratic in it.
_GROUPED: Final = re.compile(
    r"(?<![A-Za-z0-9_.,])[0-9]{1,3}(?:(?P<mark>\{,\}|,\\!|\\,|['\u2019_\u00a0\u2009\u202f])[0-9]{3}(?:(?P=mark)[0-9]{3}){0,9}"
    r"|(?:\.[0-9]{3}){2,9})(?![0-9A-Za-z_]|[.,][0-9]{3})"
)
# A sign of a currency before a number, and the dollar between a minus and its number.
_CURRENCY: Final = re.compile(
    r"(?<![A-Za-z0-9.])[\u00a3\u00a5\u20ac\u20b9] ?(?=-?\.?[0-9])|(?<=-)(?<![A-Za-z0-9_.)\]}$]-)\\?\$(?=\.?[0-9])"
)
_SUPERSCRIPTS: Final = str.maketrans(
    "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207b", "0123456789+-"
)
_RAISED: Final = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b]+")
_TEN: Final = re.compile(rf"(?:(?<=[*\u00d7xX] 10)|(?<=[*\u00d7xX]10)){_RAISED.pattern}")
_DEGREES: Final = re.compile(r"\u00b0(?: ?[CF]\b)?")
_ROOT: Final = re.compile(r"\u221a ?(?:([0-9]+|[a-z])|\(([^()]*)\))")
# A minus with a space behind it is a sign where no operand can stand before it. At the beginning of a later line it is
# the mark of a list.
_SPACED_MINUS: Final = re.compile(r"(\A\s*|[=:,;({\[$*>][ \t]*|\b(?:is|are|equals)[ \t]+)-[ \t]+(?=\.?[0-9])")
# The limit of nine digits is that of `Decimal`.
_EXPONENT: Final = r"[+-]?[0-9]{1,9}(?!\.?[0-9])"
# A minus after a letter, a digit or a closing bracket is an operator. Commas may group thousands, in India also
# hundreds (12,34,567). A power of ten follows as an exponent (1e-07) or as a factor (1.5 x 10^11).
_NUMBER: Final = re.compile(
    r"(?P<digits>(?:(?<![A-Za-z0-9_.)\]])-)?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,2}(?:,[0-9]{2}){1,9},[0-9]{3}(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+))"
    rf"(?:[eE](?P<exponent>{_EXPONENT})"
    rf"| ?(?:[*\u00d7xX]|\\times|\\cdot) ?10 ?(?:\^|\*\*) ?(?:(?P<power>{_EXPONENT})|\{{(?P<braced>{_EXPONENT})\}}))?"
)
_SCIENTIFIC: Final = re.compile(rf"(?<![A-Za-z0-9_.,])[0-9]+(?:\.[0-9]+)?[eE]{_EXPONENT}(?![A-Za-z])")
_BOX: Final = re.compile(r"\\boxed\s*\{")  # some models write two backslashes before it
_BRACE: Final = re.compile(r"\\\\|\\?[{}]")  # two backslashes are a line break; one before a brace escapes it
_HASHES: Final = "####"
_TAG: Final = r"(?:think|thinking|thought|reasoning|seed:think)(?:\s[^<>]*)?>"
_OPENS: Final = rf"(?:<{_TAG}|\[THINK\]|\u25c1think\u25b7|<\|begin_of_thought\|>)"
_OPENED: Final = re.compile(rf"{_OPENS}\s*\Z", re.IGNORECASE)
_REASONING: Final = re.compile(
    rf"(?P<opens>{_OPENS})|</{_TAG}|\[/THINK\]|\u25c1/think\u25b7|<\|end_of_thought\|>", re.IGNORECASE
)
_MAX_ZEROS: Final = 1000  # a number with more of them is written with an exponent


def answer_text(value: Any) -> str:
    """Return a reference answer as text: a text as it is, an empty one for null, any other value as JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False, default=str)


def without_reasoning(completion: str, prompt: str = "") -> str:
    """Return a completion without its blocks of reasoning, as `<think>...</think>`.

    A block without an end reaches to the end of the completion. One without a beginning starts with the completion:
    `prompt`, with the chat template applied, may have opened it.
    """
    inside = _OPENED.search(prompt[-64:]) is not None
    kept, at = list[str](), 0
    for tag in _REASONING.finditer(completion):
        if not tag["opens"]:
            kept, at, inside = kept if inside else [], tag.end(), False
        elif not inside:
            kept.append(completion[at : tag.start()])
            inside = True
    return "".join(kept) + ("" if inside else completion[at:])


def find_last_number(text: str) -> Decimal | None:
    """Return the last number of a text, or None. It may have a sign, groups of thousands, and a power of ten."""
    found = None
    for found in _NUMBER.finditer(_plain(text)):  # noqa: B007 - only the last match is needed
        pass
    return _to_number(found) if found else None


def write_out_numbers(text: str) -> str:
    """Return a text in which readers of mathematics find its numbers: `-5` for `- 5`, 0.0000001 for 1e-07.

    Powers, roots and degrees of Unicode are LaTeX.
    """
    text = _SCIENTIFIC.sub(lambda found: _number_text(Decimal(found[0])), _plain(text))
    return _RAISED.sub(_caret, _ROOT.sub(r"\\sqrt{\1\2}", _DEGREES.sub(r"^{\\circ}", text)))


def find_tagged(text: str) -> str | None:
    """Return the text in the last `<answer>...</answer>`, without surrounding spaces, or None.

    A last one without an end is empty: the answer was cut off, and an earlier one is not the final one.
    """
    _, tag, inside = text.rpartition("<answer>")
    inside, closed, _ = inside.partition("</answer>")
    return (inside.strip() if closed else "") if tag else None


def find_boxed(text: str) -> str | None:
    r"""Return the text in the last `\boxed{...}`, or None. A last one without an end is empty, as in `find_tagged`."""
    starts = [box.end() for box in _BOX.finditer(text)]
    depth = 1
    for brace in _BRACE.finditer(text, starts[-1]) if starts else ():
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            return text[starts[-1] : brace.start()].strip()
    return "" if starts else None


def final_answer(completion: str, reference: str = "", *, prompt: str = "") -> str:
    r"""Return the final answer of a completion in a form in which equal answers are equal texts; empty: it has none.

    Blocks of reasoning do not count (`without_reasoning`). It is the first of these that the rest has:

    1. the text in the last `<answer>...</answer>`,
    2. the text in the last `\boxed{...}`,
    3. the rest of the line after the last `####`,
    4. the last number, if the reference answer has a number or there is none,
    5. the whole rest.

    A last tag or box without an end is an empty answer. Surrounding spaces and dollar signs are removed. A number is
    written without group separators, exponent, leading or trailing zeros: `1,200.50` is `1200.5`.
    """
    completion = without_reasoning(completion, prompt)
    for marked in (find_tagged(completion), find_boxed(completion), _find_hashed(completion)):
        if marked is not None:
            return _normalize(marked)
    if not reference or find_last_number(reference) is not None:
        number = find_last_number(completion)
        if number is not None:
            return _number_text(number)
    return _normalize(completion)


def _find_hashed(text: str) -> str | None:
    _, mark, rest = text.rpartition(_HASHES)
    return rest.strip().partition("\n")[0] if mark else None


def _normalize(text: str) -> str:
    text = text.strip().strip("$").strip()
    found = _NUMBER.fullmatch(_plain(text))
    return _number_text(_to_number(found)) if found else text


def _plain(text: str) -> str:
    text = _GROUPED.sub(lambda found: re.sub(r"[^0-9]", "", found[0]), text.translate(_PLAIN))
    return _CURRENCY.sub("", _SPACED_MINUS.sub(r"\1-", _TEN.sub(_caret, text)))


def _caret(raised: re.Match[str]) -> str:
    return f"^{{{raised[0].translate(_SUPERSCRIPTS)}}}"


def _to_number(found: re.Match[str]) -> Decimal:
    power = found["exponent"] or found["power"] or found["braced"] or "0"
    return Decimal(f"{found['digits'].replace(',', '')}e{power}")


def _number_text(number: Decimal) -> str:
    if not number:
        return "0"
    if abs(number.adjusted()) > _MAX_ZEROS:
        digits = "".join(map(str, number.as_tuple().digits)).rstrip("0")
        return f"{'-' if number < 0 else ''}{digits}E{number.adjusted()}"
    text = format(number, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text
