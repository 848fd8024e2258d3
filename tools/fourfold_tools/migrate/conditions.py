"""Decides which branches of a shell script run, as far as the values of its variables are known.

True: the branch runs. False: it does not. None: only a running shell could know.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

KEYWORDS: Final = ("if", "then", "elif", "else", "fi", "for", "while", "until", "do", "done", "case", "esac", "{", "}")
LOOPS: Final = ("for", "while", "until")
_NUMBERS: Final[Mapping[str, Callable[[int, int], bool]]] = {
    f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_WHOLE: Final = re.compile(r"\s*[-+]?\d{1,18}\s*")
_UNKNOWN: Final = re.compile(r"<[A-Za-z0-9_?!#$@-]+>")  # a placeholder


@dataclass(slots=True)
class Block:
    """An `if`, `case`, loop or pair of braces that is open."""

    keyword: str
    outer: bool | None
    """Whether it runs itself."""
    runs: bool | None = True
    """Whether the part that is read now (a condition or a branch) runs."""
    taken: bool | None = False
    """Whether one of the branches before it runs."""
    subject: str = ""
    """Word of a `case`."""

    def advance(self, keyword: str, status: bool | None) -> None:
        """Begin the part after `keyword`, such as `then`. `status` is that of the condition before it."""
        if keyword in ("then", "do"):
            self.take(invert(status) if self.keyword == "until" else True if self.keyword == "for" else status)
        else:  # elif, else
            self.runs = invert(self.taken)

    def take(self, holds: bool | None) -> None:
        """Begin a branch, whose condition holds or not, unless an earlier one runs."""
        self.runs = both(invert(self.taken), holds)
        self.taken = either(self.taken, holds)


def invert(value: bool | None) -> bool | None:
    """Return the negation."""
    return None if value is None else not value


def both(first: bool | None, second: bool | None) -> bool | None:
    """Return the conjunction."""
    return False if first is False or second is False else None if None in (first, second) else True


def either(first: bool | None, second: bool | None) -> bool | None:
    """Return the disjunction."""
    return invert(both(invert(first), invert(second)))


def matches(text: str, pattern: str) -> bool | None:
    """Return whether a pattern of the shell matches a text."""
    known = pattern == "*" or not (_UNKNOWN.search(text) or _UNKNOWN.search(pattern))
    return fnmatchcase(text, pattern) if known else None


def command_status(words: Sequence[str]) -> bool | None:
    """Return whether a command succeeds: a test, `true`, `false`, or an assignment (without words, or `export`)."""
    match words:
        case ["!", *rest]:
            return invert(command_status(rest))
        case [] | ["true" | ":"] | ["export" | "local" | "readonly" | "declare" | "typeset", *_]:
            return True
        case ["false"]:
            return False
        case ["((", value]:
            return None if _UNKNOWN.search(value) else value != "0"
        case ["[", *rest, "]"] | ["[[", *rest, "]]"] | ["test", *rest]:
            return _test(rest)
    return None


def _test(words: Sequence[str]) -> bool | None:
    for names, combine in ((("||", "-o"), either), (("&&", "-a"), both)):
        if at := next((index for index, word in enumerate(words) if word in names and index), 0):
            return combine(_test(words[:at]), _test(words[at + 1 :]))
    match words:
        case ["!", *rest]:
            return invert(_test(rest))
        case [text]:
            return None if _UNKNOWN.search(text) else bool(text)
        case ["-n" | "-z" as name, text]:
            return None if _UNKNOWN.search(text) else bool(text) == (name == "-n")
        case [text, "=" | "==", pattern]:
            return matches(text, pattern)
        case [text, "!=", pattern]:
            return invert(matches(text, pattern))
        case [first, name, second] if name in _NUMBERS and _WHOLE.fullmatch(first) and _WHOLE.fullmatch(second):
            return _NUMBERS[name](int(first), int(second))
    return None
