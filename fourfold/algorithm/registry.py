"""Registers losses and advantage estimators: a recipe's `kind` selects a class, whose fields are the recipe keys.

A definition is one class in one file. It has the recipe keys (pydantic fields), the computation, and `formula`, the
text that `fourfold plan` and docs/algorithms.md print. The definitions of Fourfold are registered by a decorator. A
definition of another distribution is registered by an entry point that has the kind as its name:

    [project.entry-points."fourfold.losses"]
    clipped-mean = "my_package.losses:ClippedMean"

Every service reads the whole recipe, so that distribution must be installed beside each of them. A kind may also be a
class of a file, `FILE.py:NAME`, which every process that reads the recipe runs.
"""

from __future__ import annotations

import sys
import types
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

from fourfold.errors import ConfigError
from fourfold.table import Table
from fourfold.text import choices, clean

_may_run_files = True


def refuse_files() -> None:
    """Refuse kinds of files in this process: it reads recipes of others, as `fourfold view` does, and runs none."""
    global _may_run_files
    _may_run_files = False


@contextmanager
def foreign_code(what: str, fix: str = "repair or remove the distribution that has it") -> Iterator[None]:
    """Raise ConfigError with the reason, "WHAT (reason); FIX", if code of others raises anything."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: "
        raise ConfigError(f"{what} ({clean(f'{kind}{error}', 300)}); {fix}") from None


def load_entry(point: EntryPoint) -> Any:
    """Return the object of an entry point. Raises ConfigError: its module cannot be imported, or has no such object."""
    with foreign_code(f"entry point {point.group}: {point.name} = {point.value} cannot be loaded"):
        return point.load()


class Definition(Table):
    """A loss or an advantage estimator. A subclass sets `kind: Literal["NAME"] = "NAME"`."""

    kind: str
    source: ClassVar[str]
    """Publication of the formula, for example `arXiv 1707.06347, eq. 7`."""

    @abstractmethod
    def formula(self) -> str:
        """Return the formula as plain text, with the values of the keys."""


D = TypeVar("D", bound=Definition)


class Registry(Generic[D]):
    """The definitions of one recipe table, by kind."""

    def __init__(self, key: str, base: type[D]) -> None:
        """Create an empty registry of subclasses of `base`; `fourfold.KEY` is the group of the entry points."""
        self.group = f"fourfold.{key}"
        self._base = base
        self._own: dict[str, type[D]] = {}

    def register(self, definition: type[D]) -> type[D]:
        """Add a definition of this distribution, as a decorator."""
        self._own[definition.model_fields["kind"].default] = definition
        return definition

    def kinds(self) -> list[str]:
        """Return every kind by name: those of Fourfold, then those of other distributions."""
        others = {point.name for point in entry_points(group=self.group)} - self._own.keys()
        return [*sorted(self._own), *sorted(others)]

    def find(self, kind: str) -> type[D]:
        """Return the definition of a kind.

        Raises:
            ValueError: no such kind, or an entry point that cannot be loaded or is not a definition.
        """
        if kind in self._own:
            return self._own[kind]
        if ".py:" in kind:
            file, _, name = kind.rpartition(":")
            try:
                return self._checked(_class_of_file(Path(file).absolute(), name, kind), f"kind = {kind!r}")
            except ConfigError as error:
                raise ValueError(error.message) from None
        # Entry points are searched last: reading the metadata of all distributions takes 15 ms.
        for point in entry_points(group=self.group, name=kind):
            try:
                definition = load_entry(point)
            except ConfigError as error:
                raise ValueError(error.message) from None
            return self._checked(definition, f"entry point {self.group}: {kind} = {point.value}")
        raise ValueError(
            f"kind = {kind!r} is unknown; {choices(kind, self.kinds())}, or install the distribution that has it as an "
            f"entry point of {self.group}"
        )

    def _checked(self, definition: Any, where: str) -> type[D]:
        """Return a definition of other code. Raises ValueError: it is no subclass of the base, or lacks a method."""
        if not (isinstance(definition, type) and issubclass(definition, self._base)):
            raise ValueError(f"{where} is not a subclass of {self._base.__name__}")
        if missing := sorted(getattr(definition, "__abstractmethods__", ())):
            raise ValueError(f"{where} has no method {missing[0]}; define it")
        return definition

    def parse(self, given: object) -> object:
        """Return the definition that a table of the recipe stands for: the validator of the field.

        Raises:
            ValueError: the kind is unknown, or has no such key.
        """
        if isinstance(given, Definition):
            return given
        if not isinstance(given, Mapping) or not isinstance(given.get("kind"), str):
            raise ValueError(f"{given!r} names no kind; write a table such as {{ kind = {next(iter(self._own))!r} }}")
        definition = self.find(given["kind"])
        if unknown := [key for key in given if key not in definition.model_fields]:
            keys = ", ".join(name for name in definition.model_fields if name != "kind") or "none"
            raise ValueError(f"{unknown[0]}: no such key for kind = {given['kind']!r}. Its keys: {keys}.")
        return definition.model_validate(given)


@cache
def _class_of_file(path: Path, name: str, kind: str) -> Any:
    """Return a class of a file with `kind` as its kind, so that a written recipe names the file.

    Raises:
        ValueError: there is no such file, or this process runs none.
        ConfigError: the file fails, or has no such name.
    """
    if not _may_run_files:
        raise ValueError(f"kind = {kind!r}: this command reads recipes of others, and runs none of their files")
    if not path.is_file():
        raise ValueError(f"kind = {kind!r}: no file {path}; a relative path starts from the folder of the command")
    with foreign_code(f"kind = {kind!r}: {path} cannot be used", "correct the file"):
        module = _run_file(path)
        found = getattr(module, name)
        if not (isinstance(found, type) and issubclass(found, Definition)):
            return found
        keys: dict[str, Any] = {"__annotations__": {"kind": Literal[kind]}, "kind": kind, "__module__": module.__name__}
        keys |= {"__doc__": found.__doc__, "source": getattr(found, "source", kind)}
        return types.new_class(name, (found,), exec_body=lambda names: names.update(keys))


@cache
def _run_file(path: Path) -> types.ModuleType:
    """Run a file, once in a process."""
    spec = spec_from_file_location(f"fourfold_file_{hash(path):x}", path)
    assert spec is not None and spec.loader is not None, "the name ends with .py"
    module = sys.modules[spec.name] = module_from_spec(spec)  # pydantic looks up the names of annotations there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # the file may import its neighbours, which hide no installed package
    spec.loader.exec_module(module)
    return module
