"""Options of vLLM that a recipe gives by their own names, checked against the vLLM that is installed.

    recipe: [rollout.vllm]  ->  names and types of `AsyncEngineArgs`  ->  what vLLM makes of the values

vLLM checks values, and how they go together, when it makes its configuration; it would take an unknown name or a text
in place of a number for a bug of ours.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Final, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from vllm.engine.arg_utils import AsyncEngineArgs

from fourfold.errors import ConfigError

# A step that ends within the prompt of a sample with a seed ends vLLM's core on a CPU: it sets the generator's offset
# back, which generators of CPUs do not have.
_SPLITTING: Final = ("enable_chunked_prefill", "long_prefill_token_threshold")
_NAMES: Final[Mapping[type, str]] = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for `AsyncEngineArgs`.

    Raises:
        ConfigError: this vLLM has no option of a name, or it takes another type.
    """
    known = {field.name: field.type for field in dataclasses.fields(AsyncEngineArgs)}
    taken: dict[str, Any] = {}
    for name, value in options.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean `{close[0]}`?" if close else "see its documentation of engine arguments"
            raise ConfigError(f"rollout.vllm.{name}: the installed vLLM has no such option; {hint}")
        wanted = _alternatives(known[name])
        if wanted and not any(_fits(value, kind) for kind in wanted):
            rule = " or ".join(dict.fromkeys(_describe(kind) for kind in wanted if kind is not types.NoneType))
            raise ConfigError(f"rollout.vllm.{name} = {value!r}: the rule is {rule}; change or remove it")
        taken[name] = next((_member(kind, value) for kind in wanted if _is_enum(kind) and _fits(value, kind)), value)
    return taken


def check_whole_prompts(options: Mapping[str, Any]) -> None:
    """Refuse, for a CPU, what has prompts computed in pieces; raises ConfigError."""
    for name in _SPLITTING:
        if options.get(name):
            raise ConfigError(
                f"rollout.vllm.{name} = {options[name]!r}: on CPU prompts are computed whole, as vLLM cannot sample "
                "with a seed after a part of one; remove it"
            )


def refuse_values(error: ValidationError, options: Mapping[str, Any]) -> None:
    """Say which option of the recipe has a value that vLLM refused; raises ConfigError when one has."""
    for refused in error.errors(include_url=False):
        # The place of a list's item, or of one type of several, has more parts than the option's name.
        if name := next((str(part) for part in refused["loc"] if part in options), ""):
            raise ConfigError(
                f"rollout.vllm.{name} = {options[name]!r}: {refused['msg']}, says vLLM; change or remove it"
            ) from None


def _alternatives(hint: Any) -> list[Any]:
    """Return the types that a hint allows; none: it allows something that only vLLM can check."""
    if get_origin(hint) in (Union, types.UnionType):
        parts = [_alternatives(part) for part in get_args(hint)]
        return [kind for part in parts for kind in part] if all(parts) else []
    origin = get_origin(hint) or hint
    if origin in (*_NAMES, list, set, types.NoneType, Literal) or _is_table(origin) or _is_enum(origin):
        return [hint]
    return []


def _fits(value: Any, kind: Any) -> bool:
    origin = get_origin(kind) or kind
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(kind))
    if _is_enum(origin):
        return isinstance(value, str) and value.upper() in origin.__members__
    if origin in (list, set):
        items = get_args(kind)
        return isinstance(value, list) and all(
            not items or not (wanted := _alternatives(items[0])) or any(_fits(one, k) for k in wanted) for one in value
        )
    if origin is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    return type(value) is origin


def _member(kind: Any, name: str) -> Enum:
    member: Enum = kind[name.upper()]
    return member


def _describe(kind: Any) -> str:
    origin = get_origin(kind) or kind
    if origin is Literal:
        return _one_of([str(choice) for choice in get_args(kind)])
    if _is_enum(origin):
        return _one_of(list(origin.__members__))
    if origin in (list, set):
        items = get_args(kind)
        return f"a list, each {_describe(items[0])}" if items and items[0] in _NAMES else "a list"
    return "a table, which a recipe cannot give" if _is_table(origin) else _NAMES[origin]


def _one_of(names: Sequence[str]) -> str:
    return f"one of {', '.join(names)}" if len(names) > 1 else names[0]


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _is_table(kind: Any) -> bool:
    return kind is dict or dataclasses.is_dataclass(kind)
