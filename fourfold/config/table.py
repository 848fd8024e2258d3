"""What every table of a recipe has in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


class Table(BaseModel):
    """A table of the recipe: unknown keys are errors, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
