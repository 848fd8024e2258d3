"""Log-probabilities of given tokens and entropies, without a [tokens, vocabulary] matrix of a whole batch.

    z = softcap(hidden @ weight.T + bias) / temperature          logits of one row
    logprob = z[target] - logsumexp(z)                           d logprob / dz = onehot(target) - pi
    entropy = logsumexp(z) - sum(pi * z),  pi = softmax(z)       d entropy / dz = -pi * (log pi + entropy)

Rows are done in chunks, in the forward and again in the backward pass, which recomputes the
logits: what lives between the two is `hidden` and two numbers per row. The product is made in
the dtype of the weights, as the engines do it, and everything after it in float32 (in float64
where the weights are float64).

Legend: k rows, h hidden size, v vocabulary size, a the dtype after the product.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

# Logits of one chunk: 2^26 float32 are 256 MiB.
_CHUNK_ELEMENTS: Final = 1 << 26


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperatures: Tensor,
    *,
    softcap: float = 0.0,
    entropy: bool = False,
    chunk_rows: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Return the natural-log probability of `targets`, and the entropy of the distributions they come from.

    Args:
        hidden: [k, h], last hidden states at the rows that predict the targets.
        weight: [v, h], of the output embedding, same dtype as `hidden`.
        bias: [v], or None.
        targets: [k], int64, each in [0, v).
        temperatures: [k], float32, above 0.
        softcap: logits become softcap * tanh(logits / softcap); 0: they stay.
        entropy: ask for entropies. Backward they cost something only where a gradient arrives at them.
        chunk_rows: rows done at once; 0: as many as keep a chunk's logits at 256 MiB.

    Returns:
        [k] log-probabilities and [k] entropies in nats, or None in their place; float32, or float64
        for float64 weights; differentiable in hidden, weight and bias.
    """
    rows = chunk_rows or max(1, _CHUNK_ELEMENTS // weight.shape[0])
    logprobs, entropies = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, temperatures, softcap, entropy, rows
    )
    return logprobs, entropies


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperatures: Tensor, softcap: float) -> Tensor:
    """Return [rows, v] in the dtype of `temperatures`, softcapped and divided by the temperature."""
    logits = functional.linear(hidden, weight, bias).to(temperatures.dtype)
    if softcap:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    return logits.div_(temperatures[:, None])


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
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor | None]:
        temperatures = temperatures.to(torch.promote_types(weight.dtype, torch.float32))
        normalisers = torch.empty(len(hidden), dtype=temperatures.dtype, device=hidden.device)
        logprobs = torch.empty_like(normalisers)
        entropies = torch.empty_like(normalisers) if entropy else None
        for start in range(0, len(hidden), chunk_rows):
            part = slice(start, start + chunk_rows)
            logits = _logits(hidden[part], weight, bias, temperatures[part], softcap)
            chosen = logits.gather(1, targets[part, None]).squeeze(1)
            torch.logsumexp(logits, dim=1, out=normalisers[part])
            logprobs[part] = chosen - normalisers[part]
            if entropies is not None:
                logs = logits.sub_(normalisers[part, None])
                entropies[part] = -logs.exp().mul_(logs).sum(1)
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, normalisers, entropies)
        ctx.softcap, ctx.chunk_rows = softcap, chunk_rows
        ctx.set_materialize_grads(False)  # None says that nothing depends on an output
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return gradients of hidden, weight and bias; see `forward` for the order."""
        hidden, weight, bias, targets, temperatures, normalisers, entropies = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        one_chunk = 0 < len(hidden) <= ctx.chunk_rows
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Sums over chunks are kept in float32: bfloat16 would lose the small ones.
        wide = temperatures.dtype
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight and not one_chunk else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if needs_bias else None
        for start in range(0, len(hidden), ctx.chunk_rows):
            part = slice(start, start + ctx.chunk_rows)
            of_logprobs, of_entropies = (None if g is None else g[part] / temperatures[part] for g in gradients)
            logits = _logits(hidden[part], weight, bias, temperatures[part], ctx.softcap)
            slope = 1 - (logits * (temperatures[part, None] / ctx.softcap)).square_() if ctx.softcap else None
            logs = logits.sub_(normalisers[part, None])
            entropy = None if entropies is None else entropies[part]
            grad_logits = _grad_logits(logs, targets[part], of_logprobs, entropy, of_entropies)
            if slope is not None:
                grad_logits.mul_(slope)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            grad_logits = grad_logits.to(weight.dtype)
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
            *[None] * 5,
        )


def _grad_logits(
    logs: Tensor,
    targets: Tensor,
    of_logprobs: Tensor | None,
    entropies: Tensor | None,
    of_entropies: Tensor | None,
) -> Tensor:
    """Return the gradient of the logits: g * (onehot - pi) - g_entropy * pi * (log pi + entropy).

    Args:
        logs: [rows, v], log pi; overwritten.
        targets: [rows].
        of_logprobs: g [rows], gradient of the log-probabilities; None: zero.
        entropies: [rows], where `of_entropies` is given.
        of_entropies: [rows], gradient of the entropies; None: zero.
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
