"""Reads the layers of a recipe into one set of tables: included files, the file itself, keys of the command line.

    include = "base.toml"     -> read first, relative to the folder of the file that includes it
    recipe.toml               -> its keys replace those of the included files
    --set steps=3             -> replaces the key of all files

Tables are joined key by key. Every other value, also an array and a list of tables, replaces the one before it. A file
that several others include is read once, and counts where it is included last.
"""

from __future__ import annotations

import argparse
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from fourfold.errors import ConfigError

INCLUDE: Final = "include"
_Keys = tuple[str, ...]
_HEADER: Final = re.compile(r"^\s*(\[\[?)\s*([^\[\]]+?)\s*\]")
_KEY: Final = re.compile(r"^\s*([A-Za-z0-9_\-.\"' ]+?)\s*=")
# Keys in the text of a rule: with a value, in backticks, or with a table.
_MENTIONED: Final = (re.compile(r"([\w.-]+) = "), re.compile(r"`([\w.-]+)`"), re.compile(r"(\w+\.[\w.-]+)"))


@dataclass(slots=True)
class Layers:
    """The tables of all layers so far, and where each key was set."""

    tables: dict[str, Any] = field(default_factory=dict)
    places: dict[_Keys, str] = field(default_factory=dict)
    """By key path: "file:line", or "--set KEY"."""
    start: str = ""
    """The place of what has no line: the first line of the recipe."""

    def locate(self, keys: _Keys) -> str:
        """Return where a key was set, or else the innermost of its tables."""
        keys = self._as_written(keys)
        found = (self.places[keys[:depth]] for depth in range(len(keys), 0, -1) if keys[:depth] in self.places)
        return next(found, self.start)

    def _as_written(self, keys: _Keys) -> _Keys:
        """Return a key path without the number of a list that is written as one plain table."""
        number = next((depth for depth, key in enumerate(keys) if key.isdecimal()), None)
        if number is None or keys[: number + 1] in self.places:
            return keys
        return (*keys[:number], *keys[number + 1 :])

    def locate_mention(self, table: _Keys, text: str) -> str:
        """Return where the first key that a rule about `table` mentions was set, or else one of its tables."""
        table = self._as_written(table)
        paths = [tuple(name.split(".")) for pattern in _MENTIONED for name in pattern.findall(text)]
        for path in paths:
            for keys in ((*table, *path), path):
                if keys in self.places:
                    return self.places[keys]
            for keys in self.places:  # in a table of the table
                if keys[: len(table)] == table and keys[-len(path) :] == path:
                    return self.places[keys]
        parents = (path[:depth] for path in paths for depth in range(len(path) - 1, 0, -1))
        return next((self.places[keys] for keys in parents if keys in self.places), self.locate(table))

    def add(self, tables: Mapping[str, Any], places: Mapping[_Keys, str]) -> None:
        """Let the keys of another layer replace those of the ones before it."""
        self._join(self.tables, tables, ())
        self.places |= places

    def _join(self, old: dict[str, Any], new: Mapping[str, Any], path: _Keys) -> None:
        for key, value in new.items():
            before, keys = old.get(key), (*path, key)
            if isinstance(value, Mapping) and isinstance(before, dict):
                self._join(before, value, keys)
                continue
            self.forget(keys)
            old[key] = value

    def forget(self, keys: _Keys) -> None:
        """Forget where a key, and all inside it, was set."""
        self.places = {path: place for path, place in self.places.items() if path[: len(keys)] != keys}


def read_layers(path: Path, assignments: Sequence[str]) -> Layers:
    """Read a recipe with the files that it includes, and then assignments `KEY=VALUE`.

    Raises:
        ConfigError: a file cannot be read, or is no TOML, or includes itself; an assignment is malformed.
    """
    layers = Layers(start=f"{path}:1")
    try:
        for layer in _read_file(path, (), {}):
            layers.add(layer.tables, layer.places)
        for text in assignments:
            _assign(text, layers)
    except RecursionError:
        raise ConfigError(f"{path}: its values, tables or included files nest too deeply; nest them less") from None
    return layers


class _Layer(NamedTuple):
    """One file without those that it includes."""

    path: Path
    tables: dict[str, Any]
    places: dict[_Keys, str]


def _read_file(path: Path, including: tuple[Path, ...], known: dict[Path, list[_Layer]]) -> list[_Layer]:
    """Return the layers of a file, itself the last. A file that several include is one layer, at its last place.

    `known` has the layers of the files that were read.
    """
    own = Path(os.path.realpath(path))  # `resolve` raises RuntimeError for links in a circle
    if own in known:
        return known[own]
    tables, lines = _parse(path)
    includes = tables.pop(INCLUDE, [])
    where = f"{path}:{lines.get((INCLUDE,), 1)}  {INCLUDE} = {includes!r}"
    names = [includes] if isinstance(includes, str) else includes
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"{where}: must be the path of a TOML file, or a list of paths")
    chain = (*including, own)
    found: dict[Path, _Layer] = {}
    for name in names:
        included = path.parent / name
        if Path(os.path.realpath(included)) in chain:
            raise ConfigError(f"{where}: the files include each other in a circle; remove one of these lines")
        try:
            for layer in _read_file(included, chain, known):
                found.pop(layer.path, None)
                found[layer.path] = layer
        except ConfigError as error:
            raise ConfigError(f"{where}: {error.message}") from None
    known[own] = [*found.values(), _Layer(own, tables, {keys: f"{path}:{number}" for keys, number in lines.items()})]
    return known[own]


def _parse(path: Path) -> tuple[dict[str, Any], dict[_Keys, int]]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors of Windows write a byte order mark
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the recipe ({error.strerror}); give the path of a TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 (byte {error.start}); save the recipe as UTF-8") from None
    try:
        return tomllib.loads(text), line_numbers(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _assign(text: str, layers: Layers) -> None:
    """Set one key of the layers before."""
    key, equals, value = text.partition("=")
    keys = _key_path(key) if equals else ()
    if not keys:
        raise ConfigError(f"--set {text}: must be KEY=VALUE, such as trainer.learning_rate=1e-5")
    if keys[0] == INCLUDE:
        raise ConfigError(f"--set {text}: only files include others; write it into the recipe")
    path: _Keys = ()
    table: Any = layers.tables
    for depth, name in enumerate(keys):
        if isinstance(table, list):
            # A list of one table needs no number.
            index = int(name) if name.isdecimal() else 0 if len(table) == 1 else len(table)
            if index >= len(table):
                raise ConfigError(f"--set {text}: {'.'.join(path)} has {len(table)} tables; give a number from 0")
            path, table = (*path, str(index)), table[index]
            if name.isdecimal() and depth == len(keys) - 1:
                element = ".".join(path)
                raise ConfigError(f"--set {text}: {element} is an element of a list; set the list, or a key of it")
            if name.isdecimal():
                continue
        if not isinstance(table, dict):
            raise ConfigError(f"--set {text}: {'.'.join(path)} is no table; set the key itself")
        path = (*path, name)
        if depth < len(keys) - 1:
            table = table.setdefault(name, {})
    layers.forget(path)
    table[keys[-1]] = _value(value)
    layers.places[path] = f"--set {key.strip()}"


def add_set_option(parser: argparse.ArgumentParser, example: str, note: str = "") -> None:
    """Add `--set KEY=VALUE` to a command that reads a recipe; its values are the `assignments` of `load`."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"set a key of the recipe, such as {example}{note}; may be repeated",
    )


def _key_path(text: str) -> _Keys:
    """Return the parts of a dotted key; none if it is malformed."""
    try:
        tables: Any = tomllib.loads(f"{text} = 0")
    except tomllib.TOMLDecodeError:
        return ()
    keys: list[str] = []
    while isinstance(tables, dict) and len(tables) == 1:
        keys += tables
        tables = tables[keys[-1]]
    return () if tables != 0 else tuple(keys)


def _value(text: str) -> Any:
    """Return a TOML value. What is none is a string, so that shells need no second pair of quotes."""
    try:
        found = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return found["value"] if len(found) == 1 else text


def line_numbers(text: str) -> dict[_Keys, int]:
    """Map each key path of a TOML text to its line.

    tomllib gives no lines. This reads line by line, so a line of a multi-line string that looks like a key is a key.
    """
    table: _Keys = ()
    lines: dict[_Keys, int] = {}
    counts: dict[_Keys, int] = {}  # tables of each list so far
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            parts = [part.strip().strip("\"'") for part in header.group(2).split(".")]
            table = ()
            for index, part in enumerate(parts, 1):
                table = (*table, part)
                if header.group(1) == "[[" and index == len(parts):
                    counts[table] = counts.get(table, 0) + 1
                if table in counts:
                    table = (*table, str(counts[table] - 1))
            lines.setdefault(table, number)
        elif key := _KEY.match(line):
            lines.setdefault((*table, *(part.strip().strip("\"'") for part in key.group(1).split("."))), number)
    return lines
