"""Makes functions into tools that the model may call: JSON schemas, arguments, and results as text."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from fourfold.text import printable
from fourfold_reward.environment.spec import EnvironmentSpec, load_object
from fourfold_reward.loader import VerifierError

MAX_RESULT_CHARACTERS: Final = 16_384
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ARGUMENT: Final = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?:\s*(.+)$")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function of a user, and the model of its arguments."""

    name: str
    description: str
    function: Callable[..., Any]
    arguments: type[BaseModel]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """Read name, description and arguments of a function from its signature, type hints and docstring.

        The first paragraph of the docstring describes the tool, and the lines "NAME: TEXT" below "Args:" describe its
        arguments. Raises VerifierError: an argument has no type hint, or the name is not valid.
        """
        name = getattr(function, "__name__", "")
        if not _NAME.fullmatch(name):
            raise VerifierError(f"a tool is named {name!r:.100}; it must be 1 to 64 letters, digits, _ and -")
        hints = get_type_hints(function, include_extras=True)
        text = inspect.getdoc(function) or ""
        described = _described_arguments(text)
        fields: dict[str, Any] = {}
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise VerifierError(f"tool {name!r}: {parameter} cannot be passed by name; use plain arguments")
            if parameter.name not in hints:
                raise VerifierError(f"tool {name!r}: argument {parameter.name!r} has no type hint; add one")
            default = ... if parameter.default is parameter.empty else parameter.default
            info = Field(default, description=described.get(parameter.name))
            fields[parameter.name] = (hints[parameter.name], info)
        model: type[BaseModel] = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        return cls(name, text.partition("\n\n")[0].replace("\n", " "), function, model)

    def describe(self) -> dict[str, str]:
        """Return the tool for the model: name, description and parameters_json."""
        schema = self.arguments.model_json_schema()
        schema.pop("title", None)
        for value in schema.get("properties", {}).values():
            value.pop("title", None)
        return {"name": self.name, "description": self.description, "parameters_json": json.dumps(schema)}

    def parse(self, arguments_json: str) -> dict[str, Any]:
        """Return the arguments of a call by name; raise ValueError with a text for the model."""
        try:
            parsed = self.arguments.model_validate_json(arguments_json or "{}")
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors()[:5]
            )
            raise ValueError(f"{self.name}: {problems}") from None
        return {key: getattr(parsed, key) for key in self.arguments.model_fields}


def load(spec: EnvironmentSpec) -> list[Tool]:
    """Load the tools of a service. Users' code runs and may raise any exception.

    Raises VerifierError: a name is no function, or two tools have the same name.
    """
    found: dict[str, Tool] = {}
    for file in spec.tools:
        function, _ = load_object(file)
        if not callable(function):
            raise VerifierError(f"{file['file']}:{file['name']} is no function")
        tool = Tool.of(function)
        if tool.name in found:
            raise VerifierError(f"two tools are named {tool.name!r}; rename one")
        found[tool.name] = tool
    return list(found.values())


def result_text(result: object) -> str:
    """Return the result of a tool as text for the model: cut to its limit, without control characters."""
    if isinstance(result, str):
        text = result
    else:
        try:
            text = json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            text = str(result)
    if len(text) <= MAX_RESULT_CHARACTERS:
        return printable(text)
    return f"{printable(text[:MAX_RESULT_CHARACTERS])}\n[cut: {len(text)} characters in all]"


def error_text(text: str) -> str:
    """Return an error for the model."""
    return result_text(f"Error: {text}")


def _described_arguments(text: str) -> dict[str, str]:
    _, found, section = text.partition("Args:\n")
    matches = (_ARGUMENT.match(line) for line in section.split("\n\n")[0].splitlines()) if found else ()
    return {match[1]: match[2] for match in matches if match}
