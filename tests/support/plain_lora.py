"""Plain LoRA for tests: a model whose linear layers are W + scale * B A, and adapters read from a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fourfold.weights.base_fingerprint import fingerprint, sampled

Pairs = dict[str, tuple[Tensor, Tensor]]
"""A [r, in] and B [out, r] by the name of the layer."""


class _Added(nn.Module):
    """W -> W + scale * B A."""

    def __init__(self, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Parameter(a), nn.Parameter(b), scale

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * (self.b @ self.a)


def read_pairs(folder: Path) -> Pairs:
    """Return the adapters of a PEFT folder."""
    tensors = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    names = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]
    assert len(tensors) == 2 * len(names)
    return {
        name.removeprefix("base_model.model."): (tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"])
        for name in names
    }


def fingerprint_of(folder: Path) -> str:
    """Return the fingerprint of the weights of a model folder; a tied output embedding counts once."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    if json.loads((folder / "config.json").read_text()).get("tie_word_embeddings", True):
        tensors.pop("lm_head.weight", None)
    return fingerprint({n: (tuple(t.shape), t.flatten()[sampled(t.numel())]) for n, t in tensors.items()})


def plain_lora(folder: Path, pairs: Pairs, *, scale: float, dtype: torch.dtype = torch.float64) -> Any:
    """Return the model of a folder, with only these adapters trainable."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    put_in(model, {name: (a.to(dtype), b.to(dtype)) for name, (a, b) in pairs.items()}, scale=scale)
    return model


def put_in(model: nn.Module, pairs: Pairs, *, scale: float) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
    """Add adapters to a model, in place, and freeze all other parameters; return the adapters' parameters."""
    model.requires_grad_(False)
    found = {}
    for name, (a, b) in pairs.items():
        added = _Added(a.clone(), b.clone(), scale)
        parametrize.register_parametrization(model.get_submodule(name), "weight", added)
        found[name] = added.a, added.b
    return found


def by_hand(folder: Path, pairs: Pairs, *, scale: float) -> dict[str, Tensor]:
    """Return the merged weights of a folder, in float64."""
    weights = {n: w.double() for n, w in safetensors.torch.load_file(folder / "model.safetensors").items()}
    for name, (a, b) in pairs.items():
        weights[f"{name}.weight"] += scale * (b.double() @ a.double())
    return weights
