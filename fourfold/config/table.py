"""Defines types of values that several tables of a recipe share."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator, Field

MIN_TEMPERATURE: Final = 0.01
"""vLLM raises a temperature between 0 and this to it, and the trainer would divide its logits by another number."""


def check_gpu_type(gpu: str, device: str) -> None:
    """Refuse a type of GPU for a service on the CPU."""
    if gpu and device != "cuda":
        raise ValueError(f'gpu = "{gpu}" needs a GPU; set device = "cuda", or remove it')


def _check_temperature(temperature: float) -> float:
    if temperature < MIN_TEMPERATURE:
        raise ValueError(
            f"{temperature} is below {MIN_TEMPERATURE}: the engine would sample at {MIN_TEMPERATURE}, and every "
            f"importance ratio would be wrong; raise it to {MIN_TEMPERATURE} or more"
        )
    return temperature


def _check_eval_temperature(temperature: float) -> float:
    if 0 < temperature < MIN_TEMPERATURE:
        raise ValueError(
            f"{temperature} is below {MIN_TEMPERATURE}, at which the engine would sample; set it to 0 for greedy "
            f"decoding, or to {MIN_TEMPERATURE} or more"
        )
    return temperature


NAME_PATTERN: Final = r"^[A-Za-z0-9_-]{1,64}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
GpuType = Annotated[str, Field(pattern=r"^[A-Za-z0-9 ._-]{0,64}$")]
"""Type of a GPU, such as "L40S"; empty: any."""
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Temperature = Annotated[float, Field(gt=0, le=2), AfterValidator(_check_temperature)]
EvalTemperature = Annotated[float, Field(ge=0, le=2), AfterValidator(_check_eval_temperature)]
"""Temperature of answers that are not trained on; 0: greedy decoding."""
