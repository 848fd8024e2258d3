"""Computes log-probabilities of given tokens, and entropies, without the [tokens, vocabulary] matrix of a whole batch.

    z = softcap(hidden @ weight.T + bias) / temperature          logits of one row
    logprob = z[target] - logsumexp(z)                           d logprob / dz = onehot(target) - pi
    entropy = logsumexp(z) - sum(pi * z),  pi = softmax(z)       d entropy / dz = -pi * (log pi + entropy)
    energy = |onehot(target) - pi|^2 = 1 - 2 pi[target] + sum(pi^2)

Rows are processed in chunks, in the forward pass and again in the backward pass, which recomputes the logits. Between
the two only `hidden` and two numbers per row stay in memory. The logits have the dtype of the weights, as in the
engines, or are float32 (`model.head_dtype`); everything after them is in float32 (float64 for float64 weights): here,
or in logprob_kernels.py on CUDA. Their gradient has the dtype of the weights, with which it is multiplied.

A row may have several targets with gradients g: its logits are computed once, and d / dz = scatter(g) - sum(g) * pi.

Legend: k rows, r of them in a chunk; h hidden size, v vocabulary size; m targets of a row. "Wide" is the dtype after
the product.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

# Logits of one chunk: 256 MiB in float32. The kernels need no float32 copy, so they can afford larger chunks, and fewer
# cost less: every chunk reads and writes the gradient of the whole embedding.
_CHUNK_ELEMENTS: Final = 1 << 26
_KERNEL_CHUNK_BYTES: Final = 1 << 30
_KERNEL_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperatures: Tensor,
    *,
    softcap: float = 0.0,
    entropy: bool = False,
    float32_logits: bool = False,
    chunk_rows: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Return the natural-log probability of `targets`, and the entropy of their distributions.

    Args:
        hidden: [k, h], last hidden states at the rows that predict the targets.
        weight: [v, h] of the output embedding, in the dtype of `hidden`.
        bias: [v], or None.
        targets: [k] or [k, m], int64, each in [0, v). The ids of a row differ, but the first may be one of the others.
        temperatures: [k], float32, above 0.
        softcap: logits become softcap * tanh(logits / softcap); 0: no cap.
        entropy: also return entropies. Their backward pass costs something only if they get a gradient.
        float32_logits: do not round logits to the dtype of narrower weights; the sums of products are float32 anyway.
        chunk_rows: rows per chunk; 0: as many as keep its logits at 256 MiB, or 1 GiB with the kernels.

    Returns:
        Log-probabilities of the shape of `targets`, and [k] entropies or None, in nats; float32, or float64 for float64
        weights. Differentiable in hidden, weight and bias.
    """
    dtype, rows = _chunks(hidden, weight, float32_logits)
    logprobs, entropies = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, temperatures, softcap, entropy, dtype, chunk_rows or rows
    )
    return logprobs, entropies


@torch.no_grad()
def token_energies(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperatures: Tensor,
    *,
    softcap: float = 0.0,
    float32_logits: bool = False,
    chunk_rows: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of `targets` and its energy, the squared norm of its gradient in the logits.

    Arguments and log-probabilities are those of `token_logprobs`. No kernel computes energies.

    Returns:
        [k] log-probabilities and [k] energies in [0, 2], without a gradient; float32, or float64 for float64 weights.
    """
    dtype, rows = _chunks(hidden, weight, float32_logits)
    temperatures = temperatures.to(torch.promote_types(weight.dtype, torch.float32))
    logprobs, energies = (torch.empty(len(hidden), dtype=temperatures.dtype, device=hidden.device) for _ in range(2))
    few = max(1, _CHUNK_ELEMENTS // weight.shape[0])
    row_statistics, _ = _functions(hidden)
    for part in _slices(len(hidden), chunk_rows or rows):
        logits = _logits_of(hidden[part], weight, bias, dtype)
        chosen, scale = targets[part], temperatures[part]
        energies[part] = torch.cat(
            [_energies(logits[i], chosen[i], scale[i], softcap) for i in _slices(len(logits), few)]
        )
        logprobs[part], _, _ = row_statistics(logits, chosen, scale, softcap, entropy=False)
    return logprobs, energies


@torch.no_grad()
def top_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperatures: Tensor,
    *,
    count: int,
    ids_below: int,
    softcap: float = 0.0,
    float32_logits: bool = False,
    chunk_rows: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probability of `targets`, [k], and the ids and log-probabilities of the `count` likeliest tokens.

    Arguments and log-probabilities are those of `token_logprobs` with targets [k]. Likely tokens have ids in
    [0, ids_below), at least `count`: an embedding may have more rows than the tokenizer has tokens.

    Returns:
        Log-probabilities [k], ids int64 [k, count], and their log-probabilities [k, count], the likeliest first.
    """
    dtype, rows = _chunks(hidden, weight, float32_logits)
    temperatures = temperatures.to(torch.promote_types(weight.dtype, torch.float32))
    row_statistics, _ = _functions(hidden)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for part in _slices(len(hidden), chunk_rows or rows):
        logits = _logits_of(hidden[part], weight, bias, dtype)
        found, ids = logits[:, :ids_below].topk(count, dim=1)  # neither softcap nor temperature changes the order
        logprobs, normalisers, _ = row_statistics(logits, targets[part], temperatures[part], softcap, entropy=False)
        top = _scale(found, temperatures[part], softcap).sub_(normalisers[:, None])
        parts.append((logprobs, ids, top.clamp_(max=0.0)))  # rounding may exceed 0 by an ulp
    logprobs, ids, top = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return logprobs, ids, top


def _energies(logits: Tensor, targets: Tensor, temperatures: Tensor, softcap: float) -> Tensor:
    """Return the energies of targets [r]. The logits [r, v] stay as they are."""
    z = _scale(logits.clone(), temperatures, softcap)
    logs = z.sub_(torch.logsumexp(z, dim=1, keepdim=True))
    chosen = logs.gather(1, targets[:, None]).squeeze(1)
    others = logs.exp_().scatter_(1, targets[:, None], 0.0).square_().sum(1)
    return chosen.expm1().square() + others  # (1 - pi)^2, not rounded as 1 - 2 pi would be


def _chunks(hidden: Tensor, weight: Tensor, float32_logits: bool) -> tuple[torch.dtype, int]:
    """Return the dtype of the logits, and the rows of a chunk."""
    dtype = torch.promote_types(weight.dtype, torch.float32) if float32_logits else weight.dtype
    elements = _KERNEL_CHUNK_BYTES // dtype.itemsize if _has_kernels(hidden) else _CHUNK_ELEMENTS
    return dtype, max(1, elements // weight.shape[0])


def _slices(count: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]


def _has_kernels(hidden: Tensor) -> bool:
    return hidden.is_cuda and hidden.dtype in _KERNEL_DTYPES and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _functions(hidden: Tensor) -> tuple[Callable[..., Any], Callable[..., Tensor]]:
    """Return `_row_statistics` and `_logit_gradient`, or the kernels that compute the same."""
    if _has_kernels(hidden):
        from fourfold.nn.logprob_kernels import logit_gradient_, row_statistics  # needs triton

        return row_statistics, logit_gradient_
    return _row_statistics, _logit_gradient


def _logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return hidden @ weight.T + bias in `dtype`, that of the weights or a wider one."""
    if dtype == weight.dtype:
        return functional.linear(hidden, weight, bias)
    if not hidden.is_cuda:
        return functional.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    logits: Tensor = torch.mm(hidden, weight.t(), out_dtype=dtype)  # no copy of the weights
    return logits if bias is None else logits.add_(bias)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperatures: Tensor,
        softcap: float,
        entropy: bool,
        dtype: torch.dtype,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor | None]:
        temperatures = temperatures.to(torch.promote_types(weight.dtype, torch.float32))
        normalisers = torch.empty(len(hidden), dtype=temperatures.dtype, device=hidden.device)
        logprobs = torch.empty(targets.shape, dtype=temperatures.dtype, device=hidden.device)
        entropies = torch.empty_like(normalisers) if entropy else None
        row_statistics, _ = _functions(hidden)
        for part in _slices(len(hidden), chunk_rows):
            logits, chosen = _logits_of(hidden[part], weight, bias, dtype), targets[part]
            one, several = (chosen, None) if chosen.dim() == 1 else (_first(chosen), logits.gather(1, chosen))
            found, normaliser, spread = row_statistics(logits, one, temperatures[part], softcap, entropy=entropy)
            if several is not None:
                found = _scale(several, temperatures[part], softcap).sub_(normaliser[:, None])
            logprobs[part], normalisers[part] = found, normaliser
            if entropies is not None and spread is not None:
                entropies[part] = spread
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, normalisers, entropies)
        ctx.softcap, ctx.dtype, ctx.chunk_rows = softcap, dtype, chunk_rows
        ctx.set_materialize_grads(False)  # keeps None for an output that nothing depends on
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden, weight and bias, then None for the other arguments of `forward`."""
        hidden, weight, bias, targets, temperatures, normalisers, entropies = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        one_chunk = 0 < len(hidden) <= ctx.chunk_rows
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Sums over chunks are in float32, because bfloat16 would lose small terms.
        wide = temperatures.dtype
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight and not one_chunk else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if needs_bias else None
        _, logit_gradient = _functions(hidden)
        if targets.dim() == 2:
            logit_gradient = functools.partial(_gradient_of_several, logit_gradient)
        for part in _slices(len(hidden), ctx.chunk_rows):
            of_logprobs, of_entropies = (None if g is None else g[part].contiguous() for g in gradients)
            grad_logits = logit_gradient(
                _logits_of(hidden[part], weight, bias, ctx.dtype),
                targets[part],
                temperatures[part],
                ctx.softcap,
                dtype=weight.dtype,
                normalisers=normalisers[part],
                of_logprobs=of_logprobs,
                entropies=None if entropies is None else entropies[part],
                of_entropies=of_entropies,
            )
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0, dtype=wide)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight += torch.mm(grad_logits.T, hidden[part])
            elif needs_weight:
                grad_weight = torch.mm(grad_logits.T, hidden)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 6,
        )


def _row_statistics(
    logits: Tensor, targets: Tensor, temperatures: Tensor, softcap: float, *, entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return log-probabilities of the targets, logsumexp(z), and entropies or None: [r] each, in the wide dtype."""
    z = _scale(logits, temperatures, softcap)
    normalisers = torch.logsumexp(z, dim=1)
    logprobs = z.gather(1, targets[:, None]).squeeze(1) - normalisers
    if not entropy:
        return logprobs, normalisers, None
    logs = z.sub_(normalisers[:, None])
    return logprobs, normalisers, -logs.exp().mul_(logs).sum(1)


def _logit_gradient(
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
    """Return the gradient of the logits, (g * (onehot - pi) - e * pi * (log pi + entropy)) / T: [r, v] in `dtype`.

    g is `of_logprobs`, e is `of_entropies`: the gradients of the results, [r], None for zero. The logits are those
    before softcap and temperature T, and may be overwritten.
    """
    of_logprobs, of_entropies = (None if g is None else g / temperatures for g in (of_logprobs, of_entropies))
    z = _scale(logits, temperatures, softcap)
    of_softcap = 1 - (z * (temperatures[:, None] / softcap)).square_() if softcap else None
    grad = _grad_scaled(z.sub_(normalisers[:, None]), targets, of_logprobs, entropies, of_entropies)
    if of_softcap is not None:
        grad.mul_(of_softcap)
    return grad.to(dtype)


def _gradient_of_several(
    logit_gradient: Callable[..., Tensor],
    logits: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    softcap: float,
    *,
    of_logprobs: Tensor | None,
    **columns: Any,
) -> Tensor:
    """Return the gradient of the logits as `logit_gradient`, [r, v], for targets and `of_logprobs` [r, m]."""
    z = _scale(logits.gather(1, targets), temperatures, softcap)  # before the logits are overwritten
    total = None if of_logprobs is None else of_logprobs.sum(1)
    grad = logit_gradient(logits, _first(targets), temperatures, softcap, of_logprobs=total, **columns)
    if of_logprobs is None or total is None:
        return grad
    # The difference of g and sum(g) * pi is small where a distribution is learned: it is rounded once, not twice. The
    # first target may be one of the others, too: both columns get the same number, so that their order does not matter.
    same = targets[:, 1:] == targets[:, :1]
    first, rest = of_logprobs[:, :1], of_logprobs[:, 1:]
    own = torch.cat([first + (same * rest).sum(1, keepdim=True), rest + same * first], 1)
    logs = z - columns["normalisers"][:, None]
    factor = total[:, None]
    if (of_entropies := columns["of_entropies"]) is not None and columns["entropies"] is not None:
        factor = factor + of_entropies[:, None] * (logs + columns["entropies"][:, None])
    exact = (own - logs.exp() * factor) / temperatures[:, None]
    if softcap:
        exact *= 1 - (z * (temperatures[:, None] / softcap)).square_()
    return grad.scatter_(1, targets, exact.to(grad.dtype))


def _first(targets: Tensor) -> Tensor:
    """Return the first target of each row, [r], as neighbours in memory, which the kernels need."""
    return targets[:, 0].contiguous()


def _scale(logits: Tensor, temperatures: Tensor, softcap: float) -> Tensor:
    """Return the logits [r, v] in the dtype of `temperatures`, softcapped and divided by the temperature."""
    z = logits.to(temperatures.dtype)
    if softcap:
        z = z.div_(softcap).tanh_().mul_(softcap)
    return z.div_(temperatures[:, None])


def _grad_scaled(
    logs: Tensor,
    targets: Tensor,
    of_logprobs: Tensor | None,
    entropies: Tensor | None,
    of_entropies: Tensor | None,
) -> Tensor:
    """Return the gradient of the scaled logits: g * (onehot - pi) - e * pi * (log pi + entropy), [r, v].

    `logs`, [r, v], is log pi, and is overwritten; the other arguments are those of `_logit_gradient`.
    """
    factor = None
    if entropies is not None and of_entropies is not None:
        factor = (logs + entropies[:, None]).mul_(-of_entropies[:, None])
        if of_logprobs is not None:
            factor.sub_(of_logprobs[:, None])
    elif of_logprobs is not None:
        factor = -of_logprobs[:, None]
    grad = logs.exp_()
    grad = grad.zero_() if factor is None else grad.mul_(factor)
    if of_logprobs is not None:
        grad[torch.arange(len(grad), device=grad.device), targets] += of_logprobs
    return grad
