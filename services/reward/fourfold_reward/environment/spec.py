"""Names the environment and the tools that each worker process loads, with the text of users' files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from fourfold.errors import ConfigError
from fourfold_reward.loader import Verifier, VerifierError, find, run_file

if TYPE_CHECKING:  # workers need no configuration schema
    from fourfold.config import Config

PYTHON_TOOL: Final = "builtin:python"
# These kinds name a class or function of a file; the others name an environment of a library, or an address.
FILE_KINDS: Final = ("python", "openrlhf", "gymnasium")
# Their programs open connections: to the gateway's HTTP API, or to the environment's server.
NETWORK_KINDS: Final = ("verifiers", "openenv")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSpec:
    """The environment and tools for a worker. It crosses the pipe as JSON."""

    kind: str
    source: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    file: Mapping[str, str] | None = None
    """Path, text and name of the object, for the kinds with a file; see `load_object`."""
    tools: tuple[Mapping[str, str], ...] = ()
    model: str = ""
    """`model.source` of the recipe; only agent files that tokenize for themselves read it."""
    date: str = ""
    """`data.date` of the recipe, for their chat templates."""
    chat_template: str = ""
    """`data.chat_template` of the recipe."""
    max_context_tokens: int = 0
    max_new_tokens: int = 0
    temperature: float = 1.0

    @classmethod
    def from_config(cls, recipe: Config, *, directory: Path) -> EnvironmentSpec:
        """Read the files that a recipe names; relative paths start from `directory`. Runs no code of them.

        Raises ConfigError: a name is malformed, a file cannot be read, or the network is off and needed.
        """
        config = recipe.environment
        if config.kind in NETWORK_KINDS and not config.network:
            raise ConfigError(
                f'environment.kind = "{config.kind}" opens network connections, and environment.network = false; set '
                f"it to true"
            )
        has_file = config.kind in FILE_KINDS and bool(config.source)
        if config.kind == "gymnasium" and ".py:" not in config.source:
            has_file = False  # the id of a registered environment
        if config.kind != "python" and not config.source:
            raise ConfigError(f'environment.source is empty, and environment.kind = "{config.kind}" needs one')
        return cls(
            kind=config.kind,
            source=config.source,
            options=config.options,
            file=_read(config.source, "environment.source", directory) if has_file else None,
            tools=tuple(_read(name, "environment.tools", directory) for name in config.tools if name != PYTHON_TOOL),
            model=recipe.model.source,
            date=recipe.data.date,
            chat_template=recipe.data.chat_template,
            max_context_tokens=recipe.model.max_context_tokens,
            max_new_tokens=recipe.sampling.max_new_tokens,
            temperature=recipe.sampling.temperature,
        )


def _read(name: str, key: str, directory: Path) -> dict[str, str]:
    place, _, thing = name.rpartition(":")
    if not place.endswith(".py") or not thing.isidentifier():
        raise ConfigError(f"{key} = {name!r} is not FILE.py:NAME; give the path of a file and a name in it")
    try:
        found = find(name, directory=directory)
    except VerifierError as error:
        raise ConfigError(f"{key}: {error}") from None
    return {"file": found.file, "text": found.source, "name": thing, "version": found.version}


def load_object(file: Mapping[str, str]) -> tuple[Any, ModuleType]:
    """Run a user's file and return the named object and the module. Any exception may be raised.

    Raises VerifierError: the file does not define the name.
    """
    name = file["name"]
    module = run_file(Verifier(name=name, file=file["file"], source=file["text"], version=file["version"]))
    if not hasattr(module, name):
        raise VerifierError(f"{file['file']} defines no {name!r}")
    return getattr(module, name), module
