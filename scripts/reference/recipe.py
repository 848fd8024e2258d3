"""The page of the recipe: every table and key, from the models of fourfold/config and the registries of algorithms."""

from __future__ import annotations

import ast
import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from fourfold.algorithm.advantages import ADVANTAGES, AdvantageEstimator
from fourfold.algorithm.losses import LOSSES
from fourfold.algorithm.registry import Definition
from fourfold.config import rows, rules
from fourfold.config.algorithm import ALL_PRESETS
from fourfold.config.rollout import EngineConfig, RolloutPool
from fourfold.config.schema import Config
from fourfold.table import Table
from scripts.reference.page import cell, error_texts, escape, field_docs, page, paragraphs, table

_TYPES: Final = {int: "integer", float: "number", bool: "boolean", str: "text", Any: "any value"}
_UNITS: Final = {
    "seconds": "seconds",
    "tokens": "tokens",
    "gib": "GiB",
    "mib": "MiB",
    "usd": "US dollars",
    "steps": "steps",
    "million": "US dollars",
}
_BOUNDS: Final = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
_LENGTHS: Final = {"min_length": "at least {} long", "max_length": "at most {} long", "pattern": "matches `{}`"}
_LISTS: Final = ("reward", "rollout.pool", "data.train")
_INTRODUCTION: Final = """\
A recipe is a TOML file. Unknown keys are errors; errors name the file, the line and the nearest known key. `fourfold
plan RECIPE.toml` checks a recipe and starts nothing. A recipe may `include = ["other.toml"]` (paths relative to its
folder): its own keys go on top of those of the other file, key by key. `--set KEY=VALUE` of `fourfold run` and
`fourfold plan` goes on top of both.

The ending of a key is its unit: `_seconds`, `_tokens`, `_gib`. A key with the default *required* must be given if its
table is given. *Unset* as a default means that the key is absent; its text says what happens then. Values are strict:
`steps = "3"` is an error.

The rules under a table are the errors of `fourfold plan` for it, with `...` in place of values."""


@dataclass(frozen=True, slots=True)
class Section:
    """A table of the recipe."""

    model: type[Table]
    paths: list[str] = field(default_factory=list)  # "trainer.lora"; several if several tables have the same keys


def recipe_page() -> str:
    """Return docs/reference/recipe.md."""
    blocks = [_section(section) for section in sections()]
    shared = [f"- {escape(text)}" for module in (rules, rows) for text in error_texts(inspect.getsource(module))]
    rules_of_all = "## Rules of several tables\n\n" + "\n".join(shared)
    return page("Recipe", "fourfold/config", _INTRODUCTION, *blocks, rules_of_all)


def sections() -> list[Section]:
    """Return every table of a recipe, the recipe itself first."""
    found: dict[type[Table], Section] = {}
    for path, model in _walk("", Config):
        found.setdefault(model, Section(model)).paths.append(path)
    return list(found.values())


def _walk(path: str, model: type[Table]) -> Iterator[tuple[str, type[Table]]]:
    yield path, model
    for name, info in model.model_fields.items():
        if (inner := _inner_table(info.annotation)) is not None:
            yield from _walk(f"{path}.{name}".lstrip("."), inner)


def _inner_table(annotation: Any) -> type[Table] | None:
    """Return the table that a field holds, or a list of which it holds."""
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return annotation
    return next((t for a in get_args(annotation) if (t := _inner_table(a)) is not None), None)


def keys_of(model: type[Table]) -> list[str]:
    """Return the keys of a table, without tables inside it."""
    inherited = EngineConfig.model_fields if model is RolloutPool else ()
    return [
        name
        for name, info in model.model_fields.items()
        if name not in inherited and _inner_table(info.annotation) is None
    ]


def title_of(path: str) -> str:
    """Return the heading of a table."""
    if not path:
        return "Top level"
    return f"`[[{path}]]`" if path in _LISTS else f"`[{path}]`"


def _section(section: Section) -> str:
    model = section.model
    head = "## " + " and ".join(title_of(path) for path in section.paths)
    blocks = [head, paragraphs(model.__doc__ or "")]
    if issubclass(model, Definition):
        blocks.append(_kinds(model))
    else:
        blocks.append(_keys(model, keys_of(model)))
        blocks.append(_rules(model))
    if model is RolloutPool:
        names = ", ".join(f"`{name}`" for name in EngineConfig.model_fields)
        blocks.append(f"A pool may also set these keys, whose defaults are those of `[rollout]`: {names}.")
    if section.paths == ["algorithm"]:
        names = ", ".join(f"`{name}`" for name in ALL_PRESETS)
        blocks.append(f"Presets: {names}. `fourfold plan` prints the values and formulas that follow from one.")
    return "\n\n".join(block for block in blocks if block)


def _kinds(model: type[Table]) -> str:
    """Return the kinds of a registry with their formulas and keys."""
    registry = ADVANTAGES if issubclass(model, AdvantageEstimator) else LOSSES
    blocks = []
    for kind in registry.kinds():
        definition: type[Definition] = registry.find(kind)
        if not definition.__module__.startswith("fourfold."):
            continue  # of another distribution, which this machine happens to have
        instance = definition.model_validate({"kind": kind})
        formula = instance.formula()
        if isinstance(instance, AdvantageEstimator) and not instance.per_token:
            formula = f"A = {formula}"
        keys = [name for name in keys_of(definition) if name != "kind"]
        blocks += [
            f'### `kind = "{kind}"`',
            paragraphs(definition.__doc__ or ""),
            f"    {formula}",
            f"Source: {definition.source}.",
            _keys(definition, keys) or "No keys.",
        ]
    return "\n\n".join(block for block in blocks if block)


def _keys(model: type[Table], names: list[str]) -> str:
    docs = field_docs(model)
    rows = []
    for name in names:
        info = model.model_fields[name]
        rows.append([f"`{name}`", cell(_type_and_limits(name, info)), _default(info), cell(docs.get(name, ""))])
    return table(["key", "type and limits", "default", "meaning"], rows)


def _rules(model: type[Table]) -> str:
    """Return the errors that a table and the functions that it calls raise."""
    classes = [base for base in model.__mro__ if issubclass(base, Table) and base is not Table]
    if model is RolloutPool:
        classes = [model]
    texts: dict[str, None] = {}
    for base in classes:
        for source in (inspect.getsource(base), *_sources_of_helpers(base)):
            texts |= dict.fromkeys(error_texts(source))
    return "Rules:\n\n" + "\n".join(f"- {escape(text)}" for text in texts) if texts else ""


def _sources_of_helpers(model: type[Table]) -> Iterator[str]:
    """Yield the source of each function of fourfold.config that the methods of a table call."""
    names = vars(sys.modules[model.__module__])
    for node in ast.walk(ast.parse(inspect.getsource(model))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            function: Any = names.get(node.func.id)
            # The rules of several tables have a section of their own.
            module = function.__module__ if inspect.isfunction(function) else ""
            if module.startswith("fourfold.config") and module != rules.__name__:
                yield inspect.getsource(function)


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "*required*"
    value = info.get_default(call_default_factory=True)
    if isinstance(value, tuple) and any(isinstance(entry, Table) for entry in value):
        return "one table of defaults"
    return "*unset*" if value is None else f"`{_toml(value)}`"


def _toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return f'"{value}"'.replace("|", "\\|")
        case list() | tuple():
            return f"[{', '.join(map(_toml, value))}]"
    return repr(value)


def _type_and_limits(name: str, info: FieldInfo) -> str:
    parts = [_type(info.annotation), *_limits(info.metadata)]
    if (unit := _UNITS.get(name.rpartition("_")[2])) and _is_number(info.annotation):
        parts.insert(1, unit)
    return ", ".join(parts)


def _is_number(annotation: Any) -> bool:
    return annotation in (int, float) or any(_is_number(argument) for argument in get_args(annotation))


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return ", ".join([_type(arguments[0]), *_limits(arguments[1:])])
    if origin is Literal:
        return " or ".join(f"`{_toml(value)}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(argument) for argument in arguments if argument is not type(None))
    if origin in (list, tuple):
        inner = [_type(argument) for argument in arguments if argument is not Ellipsis]
        return f"list of {inner[0]}" if len(set(inner)) == 1 else f"list of {' and '.join(inner)}"
    if origin is dict or origin is Mapping:
        return f"table of {_type(arguments[1])}"
    return _TYPES[annotation]


def _limits(metadata: Any) -> list[str]:
    found = []
    for entry in metadata:
        for name, text in (_BOUNDS | _LENGTHS).items():
            value = getattr(entry, name, None)
            if value is not None:
                found.append(text.format(f"{value:g}" if isinstance(value, float) else value))
        if inner := getattr(entry, "metadata", None):  # a Field inside of Annotated
            found += _limits(inner)
    return found
