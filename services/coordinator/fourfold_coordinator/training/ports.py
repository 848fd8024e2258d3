"""Declares what the training loop and its parts use of the objects that `serve.py` gives them."""

from __future__ import annotations

from typing import Protocol

from fourfold.config.schema import Config


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
