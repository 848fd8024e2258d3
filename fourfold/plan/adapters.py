"""Which layers of a model get a LoRA adapter, and how much is trained then: by names and sizes alone."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fourfold.config import Config, LoraConfig
from fourfold.config.lora import ALL_LINEAR
from fourfold.errors import ConfigError
from fourfold.model import folder


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPlan:
    """What LoRA trains of a model."""

    layers: int
    """Linear layers that get an adapter."""
    kinds: tuple[str, ...]
    """Their names inside of their blocks, such as `q_proj`."""
    parameter_count: int
    """Elements of all adapters."""


def adapter_plan(config: Config) -> AdapterPlan | None:
    """Return what the adapters of a recipe are; None where all weights are trained.

    Raises:
        ConfigError: the model is not there, or has no layer of a name that the recipe gives.
    """
    lora = config.trainer.lora
    if not lora.rank:
        return None
    shapes = linear_shapes(config.model.source)
    chosen = select(shapes, lora)
    return AdapterPlan(
        layers=len(chosen),
        kinds=tuple(sorted({name.rpartition(".")[2] for name in chosen})),
        parameter_count=sum(lora.rank * sum(shapes[name]) for name in chosen),
    )


def linear_shapes(source: str) -> Mapping[str, tuple[int, int]]:
    """Return [out, in] of a model's linear layers by name: the matrices inside of its numbered blocks.

    Experts are left out: in a checkpoint they look like layers, but in the model they are one tensor.
    """
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in folder.tensor_shapes(source).items()
        if name.endswith(".weight")
        and len(shape) == 2
        and any(part.isdecimal() for part in name.split("."))
        and ".experts." not in name
    }


def select(names: Collection[str], lora: LoraConfig) -> list[str]:
    """Return the layers that get an adapter, in their order.

    Args:
        names: of all linear layers of the body.
        lora: names the ends of those that are meant.

    Raises:
        ConfigError: nothing ends in one of them; says which name is nearest.
    """
    if lora.target_modules == (ALL_LINEAR,):
        if not names:
            raise ConfigError("trainer.lora.target_modules: the model has no linear layer; set trainer.lora.rank = 0")
        return list(names)
    known = sorted({name.rpartition(".")[2] for name in names})
    for target in lora.target_modules:
        if not any(_ends(name, target) for name in names):
            near = difflib.get_close_matches(target.rpartition(".")[2], known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ConfigError(
                f"trainer.lora.target_modules: the model has no linear layer {target!r}{hint} Its linear layers are "
                f"{', '.join(known)}: give some of these, or {ALL_LINEAR!r}"
            )
    return [name for name in names if any(_ends(name, target) for target in lora.target_modules)]


def _ends(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")
