"""Checks the data, models and reward functions of a recipe before a process is started.

Each distribution registers its checks by entry points of the group `fourfold.checks`. A check has the name of the table
of the recipe that it is about; checks run in the order of their names, so that `reward` can use rows that `data` read.
A distribution that is not installed here checks nothing.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fourfold import config as configuration
from fourfold.algorithm.registry import load_entry
from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold.plan.chain import check_run_sources

_GROUP: Final = "fourfold.checks"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleRow:
    """A training row with a reference answer, to try reward functions with."""

    index: int  # from 0
    prompt: str  # with the chat template
    answer: str
    metadata_json: str
    messages_json: str
    scorers: tuple[str, ...]  # names of the tables [[reward]] that score it


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedRow:
    """A row to train on, as text."""

    title: str
    parts: tuple[tuple[str, bool], ...]
    """Texts, and whether their tokens are in the loss."""


@dataclass(slots=True)
class Preflight:
    """The results of the checks of one recipe."""

    config: Config
    """The recipe; the check of its data sets the steps that `data.passes` asks for."""
    examples: Sequence[ExampleRow] = ()
    rendered: Sequence[RenderedRow] = ()
    """The first rows of step 1, of a run of rows."""
    prompt_tokens: float | None = None  # mean of the training prompts; None: they were not read
    notes: dict[str, list[str]] = field(default_factory=dict)
    """Facts by paragraph of `fourfold plan`, such as `data`."""
    warnings: list[str] = field(default_factory=list)
    """Probable mistakes that no rule forbids."""

    def note(self, paragraph: str, text: str) -> None:
        """Add a fact to a paragraph of the plan."""
        self.notes.setdefault(paragraph, []).append(text)


Check = Callable[[Preflight], None]


def check_recipe(config: Config, recipe: Path, assignments: Sequence[str] = ()) -> Preflight:
    """Run all checks of a recipe that was read from a file with keys of the command line.

    Raises ConfigError: a check failed; the message begins with the line of the key.
    """
    found = Preflight(config, warnings=check_run_sources(config))
    for entry in sorted(importlib.metadata.entry_points(group=_GROUP), key=lambda entry: entry.name):
        check: Check = load_entry(entry)
        try:
            check(found)
        except ConfigError as error:
            place = configuration.locate(recipe, assignments, table=entry.name, text=error.message)
            raise ConfigError(f"{place}  {error.message}") from None
    return found
