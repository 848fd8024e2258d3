"""Collects the lines of a recipe with the flags that they come from, and writes the recipe and the report."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from fourfold import config
from fourfold.algorithm.registry import Definition
from fourfold.config import toml_value
from fourfold.errors import ConfigError
from fourfold.table import Table
from fourfold.text import clean
from fourfold_tools.migrate.flags import Flags

_WIDTH: Final = 120
_SHOWN: Final = 40
_LIST: Final = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class _Line:
    value: Any
    comment: str
    default: bool
    """True if the configuration sets none of its flags."""


# Keys whose default depends on the device. A default of another system, which runs on GPUs alone, is that of Fourfold
# there; on CPUs `enforce_eager = false` would compile for minutes.
_BY_DEVICE: Final = (("rollout", "enforce_eager"),)


@dataclass(slots=True)
class Draft:
    """A recipe that is being converted."""

    flags: Flags
    lines: dict[tuple[str, ...], dict[str, _Line]] = field(default_factory=dict)
    """Lines by table; the last part of ("data", "train", "0") is the number of a table in a list."""
    converted: set[str] = field(default_factory=set)
    left: dict[str, str] = field(default_factory=dict)
    """Reason of each flag that this run does not need, or that has no equivalent with these values."""
    checks: list[str] = field(default_factory=list)

    def set(self, key: str, value: Any, *names: str, note: str = "") -> None:
        """Set a key of the recipe; it comes from the flags `names`, given or by default."""
        *table, last = key.split(".")
        comment = "; ".join(filter(None, [", ".join(self._origin(name, value) for name in names), note]))
        default = bool(names) and not any(map(self.flags.given, names))
        self.lines.setdefault(tuple(table), {})[last] = _Line(value, clean(comment, 400), default)
        self.converted.update(names)

    def leave(self, reason: str, *names: str) -> None:
        """Record the reason why flags have no line in this recipe."""
        self.left.update(dict.fromkeys(names, reason))

    def check(self, text: str) -> None:
        """Add a point that the user must check before the first run."""
        if text not in self.checks:
            self.checks.append(text)

    def check_placeholders(self, placeholders: Mapping[str, str]) -> None:
        """Add the placeholders of the recipe, whose values only a running shell could know, with the reason of each."""
        texts = [str(line.value) for lines in self.lines.values() for line in lines.values()] + self.checks
        for name, reason in placeholders.items():
            if any(f"<{name}>" in text for text in texts):
                self.check(f"<{name}>: {name} {reason}; replace it, or import again with --define {name}=VALUE")

    def copy(self) -> None:
        """Set the keys that have the value of one flag."""
        for flag in self.flags.table.values():
            value = self.flags[flag.name]
            if flag.to and not flag.how and value is not None and flag.name not in self.left:
                self.set(flag.to, value, flag.name)

    def _origin(self, name: str, value: Any) -> str:
        title = self.flags.title(name)
        if not self.flags.given(name):
            return f"{title} (default)"
        given = self.flags[name]
        shown = " ".join(map(str, given)) if isinstance(given, tuple) else str(given)
        plain = given == value or given is True or isinstance(given, str) or len(shown) > _SHOWN
        return title if plain else f"{title} {shown}"

    def reasons(self) -> list[tuple[str, str]]:
        """Return every given flag that is not converted, with its reason."""
        flags = self.flags
        found = []
        for name in flags.values:
            if name not in self.converted:
                reason = self.left.get(name) or (flags.table[name].how if not flags.table[name].to else "")
                if flags.values[name] in (None, "", ()):
                    reason = reason or "not needed: it is empty"
                found.append((flags.title(name), reason or "UNEXPLAINED: please report this"))
        return found

    def text(self, title: str) -> str:
        """Return the recipe, with comments."""
        lines = [
            f"# {clean(title, 300)}",
            "# The comment of a line names what it comes from. What is not here has the same default in both systems.",
        ]
        if self.checks:
            lines += ["#", "# Check before the first run:"]
            lines += [f"# {number}. {clean(text, 600)}" for number, text in enumerate(self.checks, 1)]
        listed = list[str]()
        for table in self._tables():
            entries = self._entries(table)
            if table and entries:
                in_list = _LIST.fullmatch(table[-1])
                header = ".".join(part for part in table if not _LIST.fullmatch(part))
                listed += ["", f"[[{header}]]" if in_list else f"[{header}]"]
            listed += entries
        if found := self.reasons():
            listed += ["", "# Not converted:", *(f"#   {name}: {clean(reason, 400)}" for name, reason in found)]
        return "\n".join([*lines, *listed]) + "\n"

    def _entries(self, table: tuple[str, ...]) -> list[str]:
        """Return the lines of a table that change a default, in the order of the schema."""
        schema, entries = _schema(table), list[str]()
        fields = schema.model_fields if schema else {}
        order = list(fields)
        lines = self.lines[table]
        for key in sorted(lines, key=lambda key: order.index(key) if key in order else len(order)):
            line = lines[key]
            if line.default and key in fields and table[:1] != ("algorithm",) and line.value == fields[key].default:
                continue
            if line.default and (*table, key) in _BY_DEVICE:
                continue
            entry = f"{key} = {toml_value(line.value)}"
            short = len(entry) + len(line.comment) + 4 <= _WIDTH
            if not line.comment:
                entries.append(entry)
            else:
                entries += [f"{entry}  # {line.comment}"] if short else [f"# {line.comment}", entry]
        return entries

    def _tables(self) -> Iterable[tuple[str, ...]]:
        order = list(config.Config.model_fields)
        first = [table for table in self.lines if not table]
        places = {table: (order.index(table[0]), table[1:]) for table in self.lines if table}
        return [*first, *sorted(places, key=lambda table: places[table])]

    def checked(self, text: str, source: str) -> str:
        """Return the text of the recipe if it is valid.

        Raises:
            ConfigError: it is not; with the rule and the fix.
        """
        try:
            config.from_tables(tomllib.loads(text), source=f"recipe converted from {source}")
        except ConfigError as error:
            raise ConfigError(
                f"{error.message}\nThe values above break a rule of Fourfold; change them in {source} and import again"
            ) from None
        return text

    def report(self, source: str) -> str:
        """Return the report beside the recipe: counts, flags that were not converted, and points to check."""
        found = self.reasons()
        given, strange = len(self.flags.values), self.flags.unknown_count
        converted, other = given - len(found), f" ({strange} of them unknown, see below)" if strange else ""
        lines = [
            f"{source}: {given + strange} flags, {converted} converted, {len(found) + strange} not converted{other}"
        ]
        width = min(max((len(name) for name, _ in found), default=0), 48)
        lines += [f"  {name:{width}}  {clean(reason, 300)}" for name, reason in found]
        if self.checks:
            lines += ["Check before the first run:"]
            lines += [f"  {number}. {clean(text, 600)}" for number, text in enumerate(self.checks, 1)]
        return "\n".join(lines) + "\n"


def _schema(table: tuple[str, ...]) -> type[Table] | None:
    """Return the class of a table of the recipe; None for those of a kind, as [algorithm.loss]."""
    found: type[Table] = config.Config
    for part in table:
        if part.isdecimal():
            continue
        field_info = found.model_fields.get(part)
        kinds = _classes(field_info.annotation) if field_info else []
        if not kinds or issubclass(kinds[0], Definition):
            return None
        found = kinds[0]
    return found


def _classes(annotation: Any) -> list[type[Table]]:
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return [annotation]
    return [found for part in getattr(annotation, "__args__", ()) for found in _classes(part)]
