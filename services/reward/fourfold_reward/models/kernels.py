"""A CUDA kernel for the middle of a gated MLP. Needs triton, which comes with PyTorch's CUDA build."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up of two contiguous tensors of one shape; computed in float32, in their dtype."""
    out = torch.empty_like(up)
    count = out.numel()
    if count:
        with torch.cuda.device_of(out):
            _silu_mul_kernel[(triton.cdiv(count, _BLOCK),)](gate, up, out, count, BLOCK=_BLOCK)
    return out


# Without divisibility hints on the count, every size of a pass is the same program.
@triton.jit(do_not_specialize=["count"])
def _silu_mul_kernel(gate, up, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)
