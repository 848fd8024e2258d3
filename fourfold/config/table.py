"""Defines the base class of all recipe tables, and the value types that several tables use."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MIN_TEMPERATURE: Final = 0.01
"""vLLM raises a temperature between 0 and this to it, and the trainer would divide its logits by another number."""


def _check_temperature(temperature: float) -> float:
    if temperature < MIN_TEMPERATURE:
        raise ValueError(
            f"{temperature} is below {MIN_TEMPERATURE}: the engine would sample at {MIN_TEMPERATURE}, and every "
            f"importance ratio would be wrong; raise it to {MIN_TEMPERATURE} or more"
        )
    return temperature


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Temperature = Annotated[float, Field(gt=0, le=2), AfterValidator(_check_temperature)]


class Table(BaseModel):
    """A table of the recipe. Unknown keys are errors, and values never change."""

    # Strict, so that `steps = "3"` is an error. Tuple fields say strict=False, because TOML has only lists.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
