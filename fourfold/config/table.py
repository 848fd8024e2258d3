"""Defines types of values that several tables of a recipe share."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator, Field

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
GpuType = Annotated[str, Field(pattern=r"^[A-Za-z0-9 ._-]{0,64}$")]
"""Type of a GPU, such as "L40S"; empty: any."""
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Temperature = Annotated[float, Field(gt=0, le=2), AfterValidator(_check_temperature)]
