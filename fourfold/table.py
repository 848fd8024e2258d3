"""Defines the base class of every table of a recipe."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Table(BaseModel):
    """A table of the recipe. Unknown keys are errors, and values never change."""

    # Strict, so that `steps = "3"` is an error. Tuple fields say strict=False, because TOML has only lists.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
