"""Checks the parsers of a recipe before a process is started; see `fourfold.plan.preflight`."""

from __future__ import annotations

import ast
import importlib.util
from contextlib import suppress
from pathlib import Path

from fourfold.errors import ConfigError
from fourfold.plan.preflight import Preflight
from fourfold.text import choices, clean


def check_parsers(preflight: Preflight) -> None:
    """Look up the parsers that the recipe names in the files of the installed vLLM, whose import takes 10 s.

    Raises ConfigError: it has no parser of that name.
    """
    rollout, spec = preflight.config.rollout, importlib.util.find_spec("vllm")
    folders = (spec.submodule_search_locations if spec else None) or []
    for key, name, package in (
        ("tool_parser", rollout.tool_parser, "tool_parsers"),
        ("reasoning_parser", rollout.reasoning_parser, "reasoning"),
    ):
        known = [found for folder in folders if name for found in _names(Path(folder, package))]
        if known and name not in known:
            raise ConfigError(
                f"rollout.{key} = {clean(name, 100)!r}: the installed vLLM has no such parser; {choices(name, known)}"
            )


def _names(package: Path) -> list[str]:
    """Return the keys of the table of parsers in a package of vLLM; [] if this version of vLLM has no such table."""
    names = list[str]()
    with suppress(OSError, SyntaxError):
        for node in ast.parse((package / "__init__.py").read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                names += [str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)]
    return names
