"""Read and check a recipe; name file, line and the nearest known key when something is wrong."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pydantic

from fourfold.config.schema import Config
from fourfold.config.table import Table
from fourfold.errors import ConfigError


def load(path: str | Path) -> Config:
    """Read and check a recipe.

    Raises:
        ConfigError: file, line, value, rule, and the nearest known key for a typo.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the recipe ({error.strerror}); give the path of a TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 (byte {error.start}); save the recipe as UTF-8") from None
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    lines = _line_numbers(text)

    def where(loc: tuple[str, ...]) -> str:
        return f"{path}:{next((lines[loc[:i]] for i in range(len(loc), 0, -1) if loc[:i] in lines), 1)}"

    return _checked(data, where)


def from_tables(tables: Mapping[str, Any], *, source: str) -> Config:
    """Check a recipe that a program has made.

    Args:
        tables: of the recipe.
        source: who made it, for people.

    Raises:
        ConfigError: as `load`, with `source` in the place of file and line.
    """
    return _checked(tables, lambda _loc: source)


def _checked(tables: Mapping[str, Any], where: Callable[[tuple[str, ...]], str]) -> Config:
    try:
        return Config.model_validate(tables)
    except pydantic.ValidationError as error:
        raise ConfigError("\n".join(_explain(e, where) for e in error.errors())) from None


def _explain(error: Any, where_of: Callable[[tuple[str, ...]], str]) -> str:
    """Return one line of the form `file:line  key = value`, then the rule and the fix."""
    loc = tuple(str(part) for part in error["loc"])
    where, key = where_of(loc), ".".join(loc) or "the recipe"
    if error["type"] == "extra_forbidden":
        return f"{where}  {key}: no such key.{_suggest(loc)}"
    if error["type"] == "missing":
        return f"{where}  {key}: missing; it has no default. Add it."
    rule = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{where}  {key}: {rule}"
    return f"{where}  {key} = {error['input']!r}: {rule[:1].lower()}{rule[1:]}"


def _suggest(loc: tuple[str, ...]) -> str:
    known = _known_keys(loc[:-1])
    close = difflib.get_close_matches(loc[-1], known, n=1, cutoff=0.6)
    if close:
        return f" Did you mean `{close[0]}`?"
    elsewhere = [f"{table}.{loc[-1]}" for table in Config.model_fields if loc[-1] in _known_keys((table,))]
    if elsewhere:
        return f" Did you mean `{elsewhere[0]}`?"
    return f" Known here: {', '.join(sorted(known))}." if known else ""


def _known_keys(table: tuple[str, ...]) -> list[str]:
    model: Any = Config
    for part in table:
        field = model.model_fields.get(part)
        if field is None:
            return []
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
        model = next((c for c in candidates if isinstance(c, type) and issubclass(c, Table)), None)
        if model is None:
            return []
    return list(model.model_fields)


_HEADER = re.compile(r"^\s*\[\s*([^\[\]]+?)\s*\]")
_KEY = re.compile(r"^\s*([A-Za-z0-9_\-.\"' ]+?)\s*=")


def _line_numbers(text: str) -> dict[tuple[str, ...], int]:
    """Map each key path of a TOML text to its line. Enough for error messages: multi-line strings may add strays."""
    table: tuple[str, ...] = ()
    lines: dict[tuple[str, ...], int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = tuple(part.strip().strip("\"'") for part in header.group(1).split("."))
            lines.setdefault(table, number)
        elif key := _KEY.match(line):
            lines.setdefault((*table, *(part.strip().strip("\"'") for part in key.group(1).split("."))), number)
    return lines
