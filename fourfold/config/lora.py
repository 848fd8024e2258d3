"""`[trainer.lora]`: train low-rank adapters in place of the weights."""

from __future__ import annotations

import math
from typing import Any, Final, Self

from pydantic import Field, field_validator, model_validator

from fourfold.config.table import Table

ALL_LINEAR: Final = "all-linear"


class LoraConfig(Table):
    """Low-rank adapters (LoRA, arXiv 2106.09685): of a linear layer W [out, in] only B [out, rank] and A [rank, in]
    are trained, and the layer is W + scale * B A. There is no dropout: log-probabilities of one policy must not depend
    on chance. Engines and exports get the sum, under the names of the model."""

    rank: int = Field(default=0, ge=0, le=4096)
    """Rank of every adapter; 0: all weights are trained."""
    alpha: float = Field(default=32.0, gt=0)
    """scale = alpha / rank, so that a learning rate that is right for one rank is about right for others."""
    target_modules: tuple[str, ...] = Field(default=(ALL_LINEAR,), min_length=1, strict=False)  # TOML has lists
    """Layers that get an adapter: ends of module names, such as ["q_proj", "v_proj"], or "all-linear", every linear
    layer but the output embedding."""
    use_rslora: bool = False
    """scale = alpha / sqrt(rank) (arXiv 2312.03732), which keeps high ranks from learning more slowly."""

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    @field_validator("target_modules", mode="before")
    @classmethod
    def _one_name(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if ALL_LINEAR in self.target_modules and len(self.target_modules) > 1:
            raise ValueError(f'`target_modules` has "{ALL_LINEAR}" and other names; keep one or the other')
        changed = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
        if not self.rank and changed:
            raise ValueError(f"`{changed[0]}` means nothing without adapters; give a `rank` above 0, such as 16")
        return self
