"""Registers losses and advantage estimators: a recipe's `kind` selects a class, whose fields are the recipe keys.

A definition is one class in one file. It has the recipe keys (pydantic fields), the computation, and `formula`, the
text that `fourfold plan` and docs/algorithms.md print. The definitions of Fourfold are registered by a decorator. A
definition of another distribution is registered by an entry point that has the kind as its name:

    [project.entry-points."fourfold.losses"]
    clipped-mean = "my_package.losses:ClippedMean"

Every service reads the whole recipe, so that distribution must be installed beside each of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Generic, TypeVar

from fourfold.errors import ConfigError
from fourfold.table import Table
from fourfold.text import choices, clean


@contextmanager
def foreign_code(what: str) -> Iterator[None]:
    """Raise ConfigError with the reason, "WHAT (reason)", if code of another distribution raises anything."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: "
        raise ConfigError(
            f"{what} ({clean(f'{kind}{error}', 300)}); repair or remove the distribution that has it"
        ) from None


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
        # Entry points are searched last: reading the metadata of all distributions takes 15 ms.
        for point in entry_points(group=self.group, name=kind):
            try:
                definition = load_entry(point)
            except ConfigError as error:
                raise ValueError(error.message) from None
            if not (isinstance(definition, type) and issubclass(definition, self._base)):
                raise ValueError(
                    f"entry point {self.group}: {kind} = {point.value} is not a subclass of {self._base.__name__}"
                )
            return definition
        raise ValueError(
            f"kind = {kind!r} is unknown; {choices(kind, self.kinds())}, or install the distribution that has it as an "
            f"entry point of {self.group}"
        )

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
