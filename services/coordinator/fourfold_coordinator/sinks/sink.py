"""Defines the `Sink` interface, the facts about a run for a sink, and the table of all sinks."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from fourfold.config import Config, flatten
from fourfold.errors import ConfigError
from fourfold.install import install_command
from fourfold.plan.preflight import Preflight

from .rows import MetricRow

FOLDER: Final = "sinks"
"""Folder of a run with the files of its sinks."""
INDEX: Final = "index"
"""The index of the samples, in place of a sink's name."""
_LIBRARIES: Final = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts about a run for a tracker, in addition to the metrics."""

    folder: Path
    config: Config
    run_id: str  # of this run in this tracker, the same after a restart
    last_step: int  # last step that the tracker has; -1: none

    @property
    def sink_folder(self) -> Path:
        """Folder for the files of sinks."""
        return self.folder / FOLDER

    def recipe(self) -> Mapping[str, Any]:
        """Return the keys of the recipe, such as `trainer.learning_rate`, with their values.

        The keys of [logging] are left out: an address there may contain a password of another tracker.
        """
        return flatten(self.config.model_dump(exclude_none=True, exclude={"logging"}))


class Sink(Protocol):
    """One run in one tracker. Any call may block, and may raise what the tracker's library raises."""

    def log(self, row: MetricRow) -> None:
        """Send the metrics of a step; a repeated step replaces the old one and all steps after it."""

    def finish(self) -> None:
        """Send buffered metrics, and end the run in the tracker."""


def open_sink(name: str, run: RunFacts) -> Sink:
    """Open a sink: it imports the tracker's library, and may connect to a server."""
    module = importlib.import_module(f".{name}_sink", __package__)
    sink: Sink = module.TrackerSink(run)
    return sink


def check_logging(preflight: Preflight) -> None:
    """Raise ConfigError if the library of a sink of the recipe is not installed (`fourfold.plan.preflight`)."""
    check_sinks(preflight.config.logging.sinks)


def check_sinks(names: Iterable[str]) -> None:
    """Raise ConfigError if the library of a sink is not installed."""
    for name in names:
        if importlib.util.find_spec(_LIBRARIES[name]) is None:
            raise ConfigError(
                f'logging.sinks: the sink "{name}" needs the module {_LIBRARIES[name]!r}, which is not installed; '
                f"{install_command(f'fourfold-coordinator[{name}]')}, or remove it from logging.sinks"
            )
