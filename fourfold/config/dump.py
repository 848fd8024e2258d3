"""Write a resolved configuration as TOML, every default spelled out."""

from __future__ import annotations

import re
from datetime import date, time
from typing import Any

from fourfold.config.schema import Config
from fourfold.errors import ConfigError


def dump(config: Config) -> str:
    """Return the resolved recipe as TOML, every default written out; `load` reads it back to an equal Config."""
    return "\n".join(_dump_table(config.model_dump(exclude_none=True), ())) + "\n"


def _dump_table(table: dict[str, Any], path: tuple[str, ...]) -> list[str]:
    scalars = {k: v for k, v in table.items() if not isinstance(v, dict)}
    lines = [f"{_dump_key(key)} = {_dump_value(value)}" for key, value in scalars.items()]
    if path and (lines or not table):
        lines = [f"[{'.'.join(_dump_key(p) for p in path)}]", *lines]
    for key, value in table.items():
        if isinstance(value, dict):
            lines += ["", *_dump_table(value, (*path, key))]
    return lines


def _dump_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _dump_value(key)


def _dump_value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case date() | time():
            return value.isoformat()
        case str():
            escaped = value.replace("\\", "\\\\").replace('"', '\\"')
            return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
        case list() | tuple():
            return "[" + ", ".join(_dump_value(v) for v in value) + "]"
        case dict():
            return "{" + ", ".join(f"{_dump_key(k)} = {_dump_value(v)}" for k, v in value.items()) + "}"
    raise ConfigError(f"{value!r} cannot be written as TOML")
