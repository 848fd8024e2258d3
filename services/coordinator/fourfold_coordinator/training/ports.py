"""Declares what the training loop and its parts use of the objects that `serve.py` gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fourfold.config.schema import Config

from ..routing.replica import ReplicaKey
from ..state.eval_results import Evaluation


class ChangingRecipe(Protocol):
    """The recipe of a run, which its user may edit (`live_recipe.py`)."""

    @property
    def config(self) -> Config:
        """The recipe as it was read last."""

    async def update(self) -> bool:
        """Read the file if it changed; return whether [asynchrony] did. A recipe with a mistake changes nothing."""


class RecipeRecord(Protocol):
    """The recipes with which a run was trained (`state/recipe_history.py`)."""

    async def record(self, config: Config) -> None:
        """Record `config`, with which the next step runs; log the keys that differ from the recipe before."""


class HeldOutEvaluator(Protocol):
    """Evaluates the policy on the held-out sets of the run (`evaluation/evaluator.py`)."""

    async def run(
        self, *, step: int, version: int, engine: ReplicaKey | None, on_progress: Callable[[int, int], None]
    ) -> Evaluation | None:
        """Evaluate the weights of `version` after `step` steps; None: there is no held-out set, or one has no score.

        `engine` answers as long as it is usable; then, or if it is None, any engine with this version or a later one.
        `on_progress` is called with the answers that are done, and with the number of all.
        """
