"""Computes the row-wise half of logprobs.py in two CUDA kernels, each of which reads the logits once.

Without them, float32 copies of the logits pass through memory a dozen times, which costs more than the products that
make the logits. Definitions and arguments are those of the functions in logprobs.py.

Legend: r rows, v vocabulary size.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_WARPS = 8


def row_statistics(
    logits: Tensor, targets: Tensor, temperatures: Tensor, softcap: float, *, entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return log-probabilities of the targets, logsumexp(z), and entropies or None: float32 [r] each."""
    count, width = logits.shape
    logprobs, normalisers, entropies = (torch.empty(count, device=logits.device) for _ in range(3))
    results = logprobs, normalisers, entropies
    _launch(_row_statistics_kernel, logits, targets, temperatures, *results, logits.stride(0), width, softcap)
    return logprobs, normalisers, entropies if entropy else None


def logit_gradient_(
    logits: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    softcap: float,
    *,
    dtype: torch.dtype,
    normalisers: Tensor,
    of_logprobs: Tensor | None,
    entropies: Tensor | None,
    of_entropies: Tensor | None,
) -> Tensor:
    """Return the gradient of the logits [r, v] in `dtype`. It overwrites logits of that dtype."""
    gradient = logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)
    rows = torch.zeros_like(normalisers)
    with_entropy = entropies is not None and of_entropies is not None
    columns = (
        normalisers,
        rows if of_logprobs is None else of_logprobs,
        entropies if with_entropy else rows,
        of_entropies if with_entropy else rows,
    )
    arguments = targets, temperatures, *columns, gradient, logits.stride(0), logits.shape[1], softcap
    _launch(_logit_gradient_kernel, logits, *arguments)
    return gradient


def _launch(kernel: Any, logits: Tensor, *arguments: Any) -> None:
    with torch.cuda.device_of(logits):
        kernel[(len(logits),)](logits, *arguments, BLOCK=_BLOCK, num_warps=_WARPS)


@triton.jit
def _scaled(logits, cells, width, softcap, temperature):
    """Load logits as float32 with softcap and temperature applied; -inf outside of the row."""
    z = tl.load(logits + cells, mask=cells < width, other=0.0).to(tl.float32)
    if softcap > 0:
        z = (2 * tl.sigmoid(2 * z / softcap) - 1) * softcap  # tanh(x) = 2 sigmoid(2x) - 1
    return tl.where(cells < width, z / temperature, float("-inf"))


@triton.jit
def _row_statistics_kernel(
    logits, targets, temperatures, logprobs, normalisers, entropies, stride, width, softcap, BLOCK: tl.constexpr
):
    """Process one row in one pass: running maximum m, sum of exp(z - m), and sum of exp(z - m) * z.

    Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", arXiv 1805.02867.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    temperature = tl.load(temperatures + row)
    highest = float("-inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, width, BLOCK):
        cells = start + tl.arange(0, BLOCK)
        z = _scaled(logits, cells, width, softcap, temperature)
        m = tl.maximum(highest, tl.max(z, 0))
        shrink = tl.exp(highest - m)
        weights = tl.exp(z - m)
        total = total * shrink + tl.sum(weights, 0)
        weighted = weighted * shrink + tl.sum(tl.where(cells < width, weights * z, 0.0), 0)
        highest = m
    normaliser = highest + tl.log(total)
    target = tl.load(targets + row)
    chosen = _scaled(logits, target, width, softcap, temperature)
    tl.store(logprobs + row, chosen - normaliser)
    tl.store(normalisers + row, normaliser)
    tl.store(entropies + row, normaliser - weighted / total)


@triton.jit
def _logit_gradient_kernel(
    logits,
    targets,
    temperatures,
    normalisers,
    of_logprobs,
    entropies,
    of_entropies,
    gradient,
    stride,
    width,
    softcap,
    BLOCK: tl.constexpr,
):
    """Process one row: (g * (onehot - pi) - e * pi * (log pi + entropy)) / temperature, times d softcap."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    gradient += row * stride
    temperature = tl.load(temperatures + row)
    normaliser = tl.load(normalisers + row)
    target = tl.load(targets + row)
    g = tl.load(of_logprobs + row)
    entropy = tl.load(entropies + row)
    e = tl.load(of_entropies + row)
    for start in range(0, width, BLOCK):
        cells = start + tl.arange(0, BLOCK)
        inside = cells < width
        z = _scaled(logits, cells, width, softcap, temperature)
        log = tl.where(inside, z - normaliser, 0.0)
        grad = -tl.exp(log) * (g + e * (log + entropy))
        grad = (grad + tl.where(cells == target, g, 0.0)) / temperature
        if softcap > 0:
            ratio = z * temperature / softcap
            grad *= 1 - ratio * ratio
        tl.store(gradient + cells, grad.to(gradient.dtype.element_ty), mask=inside)
