"""Replaces the norms and the middle of the MLPs of a model by functions that read and write memory once.

In transformers, an RMSNorm is six kernels, four of them in float32, and silu(gate) * up is two. On an H100 these take
about a third of the time of a forward pass of a model of 1B parameters. A module is replaced only if the result for a
few random inputs equals its own up to rounding, so that an unknown variant stays as it is.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

_log = logging.getLogger(__name__)
_PROBE_ROWS: Final = 4
_ULPS: Final = 4
Forward = Callable[[Tensor], Tensor]


def fuse(model: nn.Module) -> int:
    """Replace the `forward` of norms and gated MLPs of a model in place; return the number of replaced modules."""
    replaced = 0
    for module in model.modules():
        if hasattr(module, "_hf_hook"):  # a hook of accelerate is in this module's `forward`
            continue
        candidates = _norms(module) if type(module).__name__.endswith("RMSNorm") else _gated_mlp(module)
        replaced += any(_replace(module, forward, width) for forward, width in candidates)
    return replaced


def _replace(module: nn.Module, forward: Forward, width: int) -> bool:
    """Replace `forward` if it computes the same from rows of `width` numbers."""
    weight = next(module.parameters())
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, _PROBE_ROWS, width, generator=generator).to(weight.device, weight.dtype)
    try:
        with torch.inference_mode():
            own, found = module(rows).float(), forward(rows).float()
    except Exception as error:  # also one of the compiler of a kernel
        _log.warning("kernel not used: module=%s error=%s", type(module).__name__, error)
        return False
    scale = float(own.abs().max())
    if not float((own - found).abs().max()) <= _ULPS * torch.finfo(weight.dtype).eps * scale:
        return False
    module.forward = forward
    return True


def _norms(module: nn.Module) -> list[tuple[Forward, int]]:
    """Return an RMSNorm that is scaled by its weight. (Gemma's, by 1 + weight in float32, stays as it is.)"""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float):
        return []
    return [(functools.partial(_rms_norm, weight=weight, eps=eps), len(weight))]


def _rms_norm(rows: Tensor, *, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(rows, (len(weight),), weight, eps)  # one kernel on CUDA since torch 2.9


def _gated_mlp(module: nn.Module) -> list[tuple[Forward, int]]:
    gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    if not all(isinstance(each, nn.Linear) for each in (gate, up, down)):
        return []
    assert isinstance(gate, nn.Linear)
    product = _silu_mul_kernel() if gate.weight.is_cuda else _silu_mul
    if product is None:
        return []

    def forward(rows: Tensor) -> Tensor:
        result: Tensor = module.down_proj(product(module.gate_proj(rows), module.up_proj(rows)))  # type: ignore[operator]
        return result

    return [(forward, gate.in_features)]


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


@functools.cache
def _silu_mul_kernel() -> Callable[[Tensor, Tensor], Tensor] | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from fourfold_reward.models.kernels import silu_mul  # needs triton

    product: Any = silu_mul
    return product  # type: ignore[no-any-return]
