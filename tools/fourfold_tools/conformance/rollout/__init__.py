"""Checks that a rollout service keeps the contract. No check depends on the model's texts."""

from __future__ import annotations

from typing import Final

from fourfold_tools.conformance.checks import Checks
from fourfold_tools.conformance.rollout.calls import CALLS
from fourfold_tools.conformance.rollout.probe import RolloutProbe
from fourfold_tools.conformance.rollout.sampling import SAMPLING

CHECKS: Final = Checks(SAMPLING, CALLS)

__all__ = ["CHECKS", "RolloutProbe"]
