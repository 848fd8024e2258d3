"""Prints the tables of docs/migration/*.md: every flag of another system and its conversion.

python -m fourfold_tools.migrate.pages openrlhf
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Mapping
from typing import Any, Final

from fourfold_tools.migrate import openrlhf, openrlhf_rows, trl, trl_rows, verl
from fourfold_tools.migrate.flags import Flag

TABLES: Final[Mapping[str, Mapping[str, Flag]]] = {"openrlhf": openrlhf.TABLE, "trl": trl.TABLE, "verl": verl.TABLE}
ROW_TABLES: Final[Mapping[str, Mapping[str, Mapping[str, Flag]]]] = {
    "openrlhf": openrlhf_rows.TABLES,
    "trl": trl_rows.TABLES,
}
"""The tables of the trainers whose data has the answers, by system and trainer."""
_PREFIXES: Final = {"openrlhf": "--"}


def markdown(system: str) -> str:
    """Return the tables of a system: flags with a key of the recipe, and those without."""
    flags = list(TABLES[system].values())
    older = any(flag.older for flag in flags)
    lines = _tables(flags, _PREFIXES.get(system, ""), older=older)
    if system == "verl":
        for pattern, reason in verl.PATTERNS:
            lines.append(_row([f"names with `{pattern.pattern}`", "", reason]))
    if trainers := ROW_TABLES.get(system):
        lines += ["", f"### {', '.join(trainers)}", "", "These have flags of the tables above, and:", ""]
        lines += _tables(_of_rows(trainers, flags), _PREFIXES.get(system, ""), older=older)
    return "\n".join(lines) + "\n"


def _of_rows(trainers: Mapping[str, Mapping[str, Flag]], known: Collection[Flag]) -> list[Flag]:
    """Return the flags that are not `known`; a default that not all trainers have is followed by their names."""
    found: dict[Flag, dict[str, list[str]]] = {}
    for trainer, table in trainers.items():
        for flag in (flag for flag in table.values() if flag not in known):
            defaults = found.setdefault(dataclasses.replace(flag, default=""), {})
            defaults.setdefault(_default(flag.default), []).append(trainer)
    return [
        dataclasses.replace(flag, default="; ".join(
            text if len(names) == len(trainers) else f"{text} ({', '.join(names)})" for text, names in defaults.items()
        )) for flag, defaults in found.items()
    ]  # fmt: skip


def _tables(flags: Collection[Flag], prefix: str, *, older: bool) -> list[str]:
    head = ["flag", *(["older name"] if older else []), "default", "recipe", "conversion"]
    lines = _header(head)
    for flag in flags:
        if flag.to:
            names = [_code(prefix, flag.name), *([_code("", *flag.older.split())] if older else [])]
            keys = _code("", *(key.strip() for key in flag.to.split(",")))
            lines.append(_row([*names, _default(flag.default), keys, flag.how]))
    lines += ["", *_header([*head[: 1 + older], "why there is no key"])]
    reasons: dict[str, dict[str, Flag]] = {}
    for flag in flags:
        if not flag.to:
            reasons.setdefault(flag.how, {})[flag.name] = flag
    for reason, found in reasons.items():
        names = [_code(prefix, *found)]
        more = [_code("", *" ".join(f.older for f in found.values()).split())] if older else []
        lines.append(_row([*names, *more, reason]))
    return lines


def _header(cells: list[str]) -> list[str]:
    return [_row(cells), "|" + "---|" * len(cells)]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _code(prefix: str, *names: str) -> str:
    return ", ".join(f"`{prefix}{name}`" for name in names)


def _default(value: Any) -> str:
    match value:
        case None | ():
            return "none"
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}"
        case tuple():
            return " ".join(map(str, value))
    return str(value).replace("\n", "\\n")  # a row of a table is one line


if __name__ == "__main__":
    if sys.argv[1:2] not in ([name] for name in TABLES):
        sys.exit(f"usage: python -m fourfold_tools.migrate.pages {'|'.join(TABLES)}")
    sys.stdout.write(markdown(sys.argv[1]))
