"""Reads names and values from YAML files, and from keyword arguments in Python files. Nothing is executed."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any, Final

import yaml

from fourfold.errors import ConfigError
from fourfold.text import clean

_MAX_VALUES: Final = 20_000
_MAX_DEPTH: Final = 20


def read_yaml(text: str, source: str) -> dict[str, Any]:
    """Return the mapping of a YAML file.

    Raises:
        ConfigError: it is no YAML, no mapping, or too large.
    """
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{source}: not valid YAML: {clean(str(error), 200)}; correct the file") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{source}: a {type(found).__name__} in place of names with values; give a run configuration")
    return found


def flatten(tables: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return values by dotted name. Lists, and empty mappings, are values.

    Raises:
        ConfigError: the mapping is too deep or too large, as with aliases that repeat each other.
    """
    found: dict[str, Any] = {}
    for count, (name, value) in enumerate(_leaves(tables, (), source)):
        if count > _MAX_VALUES:
            raise ConfigError(f"{source}: more than {_MAX_VALUES:,} values; give a run configuration")
        found[name] = value
    return found


def _leaves(table: Mapping[str, Any], path: tuple[str, ...], source: str) -> Iterator[tuple[str, Any]]:
    if len(path) > _MAX_DEPTH:
        raise ConfigError(f"{source}: mappings are nested more than {_MAX_DEPTH} deep; give a run configuration")
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*path, str(key)), source)
        else:
            yield ".".join((*path, str(key))), value


def read_keywords(text: str, source: str, calls: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
    """Return the keyword arguments of the calls of some classes in a Python file, and the names of those that vary.

    A name that is assigned a literal in the file stands for it. `reward_funcs` are returned as MODULE.NAME.

    Raises:
        ConfigError: the file is no Python, or has no such call.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{source}: not valid Python: {clean(str(error), 200)}; correct the file") from None
    literals: dict[str, Any] = {}
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            whole = node.value.value if isinstance(node.value, ast.Subscript) else node.value
            loads = isinstance(whole, ast.Call) and _name(whole.func) == "load_dataset"
            value = _data_set(node.value, literals) if loads else _literal(node.value, literals)
            if value is not _VARIES:
                literals[node.targets[0].id] = value
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            modules.setdefault(node.name, f"{source}:{node.name}")
    found: dict[str, Any] = {}
    varying: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) in calls:
            for keyword in node.keywords:
                _read_keyword(keyword, literals, modules, found, varying)
    if not found and not varying:
        raise ConfigError(f"{source}: no call of {' or '.join(calls)} with arguments; give a file that has one")
    return found, varying


_VARIES: Final = object()
_NESTED: Final = ("args", "peft_config", "train_dataset", "eval_dataset", "processing_class", "callbacks")


def _read_keyword(
    keyword: ast.keyword,
    literals: Mapping[str, Any],
    modules: Mapping[str, str],
    found: dict[str, Any],
    varying: list[str],
) -> None:
    name = keyword.arg or ""
    if name in _NESTED:
        if name.endswith("_dataset") and isinstance(text := _data_set(keyword.value, literals), str):
            found[name] = text
        return
    if name == "reward_funcs":
        parts = keyword.value.elts if isinstance(keyword.value, ast.List | ast.Tuple) else [keyword.value]
        found[name] = [modules.get(_name(part), _name(part)) or str(_literal(part, literals)) for part in parts]
        return
    value = _literal(keyword.value, literals)
    if value is _VARIES:
        varying.append(name or "**")
    else:
        found[name] = value


def _data_set(node: ast.expr, literals: Mapping[str, Any]) -> Any:
    """Return the value of an expression without its split; of `load_dataset(...)` its `data_files`, or the name."""
    if isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Call) and node.args:
        node = next((keyword.value for keyword in node.keywords if keyword.arg == "data_files"), node.args[0])
    return _literal(node, literals)


def _name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=function):
            return _name(function)
    return ""


def _literal(node: ast.expr, literals: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return literals.get(node.id, _VARIES)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return _VARIES
