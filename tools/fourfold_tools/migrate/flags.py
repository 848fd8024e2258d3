"""Defines the flags of another system, and reads their values from a command line or a document."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from fourfold.errors import ConfigError
from fourfold.text import choices, clean, nearest_name

Kind = Literal["int", "float", "bool", "text", "pair", "texts", "any"]
_KINDS: Final[dict[Kind, str]] = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "text": "a text",
    "pair": "two numbers",
    "texts": "a list of texts",
    "any": "a value",
}
_TRUE: Final = ("true", "yes", "on", "1")
_FALSE: Final = ("false", "no", "off", "0")
_NONE: Final = ("none", "null", "~", "")
_PLACEHOLDER: Final = re.compile(r"<([A-Za-z0-9_?!#$@-]+)>")
_SHOWN: Final = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A row of a table: a flag and its conversion."""

    name: str
    kind: Kind
    default: Any
    to: str = ""
    """Key of the recipe, or several with commas. Empty: there is none, and `how` gives the reason."""
    how: str = ""
    """Conversion; empty: the value is copied. Without `to`: the reason, which begins with "not needed" or "no
    equivalent"."""
    values: tuple[str, ...] = ()
    """All values; empty: any."""
    older: str = ""
    """Older names of the flag, with spaces."""


@dataclass(slots=True)
class Flags:
    """The values that a configuration gives to the flags of a table."""

    table: Mapping[str, Flag]
    prefix: str
    """The prefix of a name, such as --."""
    values: dict[str, Any] = field(default_factory=dict)
    spellings: dict[str, str] = field(default_factory=dict)
    """The name that the configuration uses, by the name in the table."""
    unknown_count: int = 0
    """Names of the configuration that are not in the table; `problems` has a sentence about each."""
    problems: list[str] = field(default_factory=list)
    """Sentences about words of the configuration that are no flag of the table."""

    def __getitem__(self, name: str) -> Any:
        """Return the value of a flag; its default if it has none, or is null and its row does not say what null is."""
        flag, value = self.table[name], self.values.get(name)
        known = name in self.values and (value is not None or flag.how.startswith("None:"))
        return value if known else flag.default

    def given(self, name: str) -> bool:
        """Return whether the configuration sets a flag."""
        return name in self.values

    def title(self, name: str) -> str:
        """Return a flag as the configuration writes it."""
        return self.prefix + self.spellings.get(name, name)

    def add(self, spelling: str, name: str, raw: Any) -> None:
        """Set a flag from a text of the command line, a list of texts, or a value of a document."""
        flag = self.table[name]
        self.values[name] = read_value(flag, raw, self.prefix + spelling)
        self.spellings[name] = spelling

    def add_unknown(self, name: str) -> None:
        """Count a name that is not in the table, and report the most similar one."""
        near = nearest_flag(name, names_of(self.table))
        hint = f"; did you mean {self.prefix}{near}?" if near else ""
        self.unknown_count += 1
        self.problems.append(f"{clean(self.prefix + name, _SHOWN)} is unknown, and not converted{hint}")


def row(
    name: str, kind: Kind, default: Any, to: str = "", how: str = "", *, older: str = "", values: tuple[str, ...] = ()
) -> Flag:
    """Return a flag; tables are easier to read without the names of the first fields."""
    return Flag(name=name, kind=kind, default=default, to=to, how=how, older=older, values=values)


def unconverted(reason: str, names: str) -> list[Flag]:
    """Return flags of any kind that have no line in a recipe, for one reason; `names` have spaces between them."""
    return [row(name, "any", None, "", reason) for name in names.split()]


def table_of(rows: Iterable[Flag]) -> dict[str, Flag]:
    """Return the rows by name."""
    return {row.name: row for row in rows}


def names_of(table: Mapping[str, Flag]) -> dict[str, str]:
    """Return the name in the table for every name, including older names."""
    return {name: flag.name for flag in table.values() for name in (flag.name, *flag.older.split())}


def nearest_flag(name: str, known: Iterable[str]) -> str:
    """Return the known flag that is meant by an unknown one; empty if none is similar.

    A dotted name is compared with those of its own table, also in part (`decay`) and by its initials (`learning_rate`
    is `lr`; one letter alone says nothing): the long names of a table resemble each other whatever their last word is.
    """
    names, (table, dot, last) = list(known), name.rpartition(".")
    siblings = {one.rpartition(".")[2]: one for one in names if dot and one.rpartition(".")[0] == table}
    if siblings:
        initials = "".join(word[:1] for word in last.split("_"))
        near = initials if len(initials) > 1 and initials in siblings else nearest_name(last, siblings)
        return siblings.get(near) or next((one for key, one in siblings.items() if last in key.split("_")), "")
    without_table = next((one for one in names if one.endswith(f".{name}")), "")
    return without_table or nearest_name(name, names) or nearest_name(last, names)


def parse_arguments(table: Mapping[str, Flag], words: Sequence[str]) -> Flags:
    """Read `--name value` and `--name=value`, as argparse does.

    Raises:
        ConfigError: a value is missing, or not of the flag's kind.
    """
    flags, known = Flags(table, "--"), names_of(table)
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            flags.problems.append(_stray(word))
            continue
        spelling, equals, value = word[2:].partition("=")
        values = [value] if equals else []
        while not equals and rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        name = known.get(spelling) or known.get(spelling.replace("-", "_"))
        if name is None and spelling[:3] == "no_" and spelling[3:] in known:  # as HfArgumentParser
            name, values = known[spelling[3:]], ["false"]
        if name is None:
            flags.add_unknown(spelling)
            continue
        flag, extra = table[name], []
        if flag.kind == "bool" and values and values[0].lower() not in (*_TRUE, *_FALSE):
            values, extra = [], values
        elif flag.kind not in ("pair", "texts", "bool") or (flag.kind == "bool" and len(values) > 1):
            values, extra = values[:1], values[1:]
        elif flag.kind == "pair":
            values, extra = values[:2], values[2:]
        if not values and flag.kind not in ("bool", "texts", "any"):
            raise ConfigError(f"--{spelling} has no value and must be {_KINDS[flag.kind]}; correct it in the file")
        flags.add(spelling, name, values if flag.kind in ("pair", "texts") else values[0] if values else None)
        flags.problems += [_stray(word) for word in extra]
    return flags


def _stray(word: str) -> str:
    if match := _PLACEHOLDER.fullmatch(word):
        return (
            f"the command has ${match[1]}, which may stand for more flags and is not set in the script; import again "
            f"with --define {match[1]}='...'"
        )
    return f"{clean(word, _SHOWN)!r} stands between the flags and belongs to none of them; it is left out"


def read_value(flag: Flag, raw: Any, title: str) -> Any:
    """Return a value of the flag's kind.

    Raises:
        ConfigError: with value, rule and fix.
    """
    value = _convert(flag.kind, raw)
    if value is _WRONG:
        shown = clean(" ".join(map(str, raw)) if isinstance(raw, list) else str(raw), _SHOWN)
        if found := _PLACEHOLDER.search(shown):
            raise ConfigError(
                f"{title} = {shown} must be {_KINDS[flag.kind]}, and {found[1]} is not known without running the "
                f"script; give it with --define {found[1]}=VALUE, or take it from the environment with --environment"
            )
        raise ConfigError(
            f"{title} = {shown if raw is not None else 'nothing'} must be {_KINDS[flag.kind]}; correct it in the file"
        )
    if flag.values and value is not None and value not in flag.values:
        raise ConfigError(f"{title} = {clean(str(value), _SHOWN)} is unknown; {choices(str(value), flag.values)}")
    return value


_WRONG: Final = object()


def _convert(kind: Kind, raw: Any) -> Any:
    if kind not in ("pair", "texts", "any") and isinstance(raw, list) and len(raw) == 1:
        raw = raw[0]
    match kind:
        case "any":
            return raw
        case "bool":
            word = "true" if raw is None else str(raw).lower()
            return True if word in _TRUE else False if word in _FALSE else _WRONG
        case "text":
            return _WRONG if isinstance(raw, list | dict) else None if raw is None else str(raw)
        case "texts":
            return _texts(raw)
        case "pair":
            numbers = [_number(part) for part in (raw if isinstance(raw, list | tuple) else [raw])]
            return tuple(numbers) if len(numbers) == 2 and None not in numbers else _WRONG
    if raw is None or (isinstance(raw, str) and raw.strip().lower() in _NONE[:-1]):
        return None
    number = _number(raw)
    if number is None or (kind == "int" and number != int(number)):
        return _WRONG
    return int(number) if kind == "int" else number


def _texts(raw: Any) -> Any:
    parts = raw if isinstance(raw, list | tuple) else [] if raw is None else [raw]
    if len(parts) == 1 and isinstance(parts[0], str) and parts[0].startswith("["):
        try:
            parts = json.loads(parts[0].replace("'", '"'))
        except ValueError:
            parts = [part.strip(" '\"") for part in parts[0].strip("[]").split(",")]
    return _WRONG if any(isinstance(part, list | dict) for part in parts) else tuple(str(part) for part in parts)


def _number(raw: Any) -> float | None:
    if isinstance(raw, bool):
        return None
    try:
        number = float(raw)
    except (TypeError, ValueError):
        return None
    return number if abs(number) < 1e15 else None
