"""What every table of a recipe has in common."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MIN_TEMPERATURE: Final = 0.01
"""vLLM raises what is above 0 and below this to it, and the trainer would divide its logits by another number."""


def _sampled_as_it_is(temperature: float) -> float:
    if temperature < MIN_TEMPERATURE:
        raise ValueError(
            f"{temperature} is below {MIN_TEMPERATURE}, at which the engine would sample instead, so that every "
            f"importance ratio would be wrong; raise it to {MIN_TEMPERATURE} or more"
        )
    return temperature


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Temperature = Annotated[float, Field(gt=0, le=2), AfterValidator(_sampled_as_it_is)]


class Table(BaseModel):
    """A table of the recipe: unknown keys are errors, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
