"""Prints the tables of docs/migration/*.md: every flag of another system and its conversion.

python -m fourfold_tools.migrate.pages openrlhf
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

from fourfold_tools.migrate import openrlhf, trl, verl
from fourfold_tools.migrate.flags import Flag

TABLES: Final[Mapping[str, Mapping[str, Flag]]] = {"openrlhf": openrlhf.TABLE, "trl": trl.TABLE, "verl": verl.TABLE}
_PREFIXES: Final = {"openrlhf": "--"}


def markdown(system: str) -> str:
    """Return the tables of a system: flags with a key of the recipe, and those without."""
    table, prefix = TABLES[system], _PREFIXES.get(system, "")
    older = any(flag.older for flag in table.values())
    head = ["flag", *(["older name"] if older else []), "default", "recipe", "conversion"]
    lines = _header(head)
    for flag in table.values():
        if flag.to:
            names = [_code(prefix, flag.name), *([_code("", *flag.older.split())] if older else [])]
            keys = _code("", *(key.strip() for key in flag.to.split(",")))
            lines.append(_row([*names, _default(flag.default), keys, flag.how]))
    lines += ["", *_header([*head[: 1 + older], "why there is no key"])]
    reasons: dict[str, list[Flag]] = {}
    for flag in table.values():
        if not flag.to:
            reasons.setdefault(flag.how, []).append(flag)
    for reason, flags in reasons.items():
        names = [_code(prefix, *(flag.name for flag in flags))]
        lines.append(_row([*names, *([_code("", *" ".join(f.older for f in flags).split())] if older else []), reason]))
    if system == "verl":
        for pattern, reason in verl.PATTERNS:
            lines.append(_row([f"names with `{pattern.pattern}`", "", reason]))
    return "\n".join(lines) + "\n"


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
    return str(value)


if __name__ == "__main__":
    if sys.argv[1:2] not in ([name] for name in TABLES):
        sys.exit(f"usage: python -m fourfold_tools.migrate.pages {'|'.join(TABLES)}")
    sys.stdout.write(markdown(sys.argv[1]))
