"""Finds the predictor of step times, which the distribution `fourfold-tools` has, for `fourfold plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold.host.hardware import Gpu
from fourfold.install import find_tool
from fourfold.plan.models import ModelSizes
from fourfold.plan.preflight import Preflight


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The predicted speed of a run, as a plan shows it."""

    text: str
    warnings: Sequence[str] = ()
    table: Sequence[str] = ()
    """Lines of a table with one row per policy lag; empty: none was predicted."""


class SpeedPredictor(Protocol):
    """Predicts the speed of a recipe."""

    def predict(self, config: Config, sizes: ModelSizes, gpus: Sequence[Gpu], found: Preflight) -> Speed:
        """Return the speed of a recipe. `gpus`: those of this machine; `found`: from the checks of the recipe."""


class _Missing:
    def __init__(self, reason: str) -> None:
        self._reason = reason

    def predict(self, config: Config, sizes: ModelSizes, gpus: Sequence[Gpu], found: Preflight) -> Speed:
        return Speed(text=f"unknown: {self._reason}")


def load_predictor(rates: Path | None = None) -> SpeedPredictor:
    """Return a predictor that uses the rates of the run in a folder; None: it guesses rates from the devices.

    Raises:
        ConfigError: the folder has no rates, or `fourfold-tools` is missing. Without a folder, a missing distribution
            is no error: the predicted text then has the command that installs it.
    """
    try:
        tool = find_tool("step-time", "a prediction of the step time")
    except ConfigError as error:
        if rates:
            raise
        return _Missing(error.message)
    predictor: SpeedPredictor = tool.load()(rates)
    return predictor
