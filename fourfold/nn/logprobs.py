"""Log-probabilities of given tokens, without a [tokens, vocabulary] matrix of a whole batch.

    z = softcap(hidden @ weight.T + bias) / temperature          logits of one row
    logprob = z[target] - logsumexp(z)

Rows are done in chunks, in the forward and again in the backward pass, which recomputes the
logits: what lives between the two is `hidden` and one float32 per row. The product is made in
the dtype of the weights, as the engines do it, and everything after it in float32.

Legend: k rows, h hidden size, v vocabulary size.
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
    chunk_rows: int = 0,
) -> Tensor:
    """Return the natural-log probability of `targets`.

    Args:
        hidden: [k, h], last hidden states at the rows that predict the targets.
        weight: [v, h], of the output embedding, same dtype as `hidden`.
        bias: [v], or None.
        targets: [k], int64, each in [0, v).
        temperatures: [k], float32, above 0.
        softcap: logits become softcap * tanh(logits / softcap); 0: they stay.
        chunk_rows: rows done at once; 0: as many as keep a chunk's logits at 256 MiB.

    Returns:
        [k] float32; differentiable in hidden, weight and bias.
    """
    rows = chunk_rows or max(1, _CHUNK_ELEMENTS // weight.shape[0])
    result: Tensor = _TokenLogprobs.apply(hidden, weight, bias, targets, temperatures, softcap, rows)  # type: ignore[no-untyped-call]
    return result


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperatures: Tensor, softcap: float) -> Tensor:
    """Return float32 [rows, v], softcapped and divided by the temperature."""
    logits = functional.linear(hidden, weight, bias).float()
    if softcap:
        logits.div_(softcap).tanh_().mul_(softcap)
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
        chunk_rows: int,
    ) -> Tensor:
        log_normalisers = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        logprobs = torch.empty_like(log_normalisers)
        for start in range(0, len(hidden), chunk_rows):
            part = slice(start, start + chunk_rows)
            logits = _logits(hidden[part], weight, bias, temperatures[part], softcap)
            chosen = logits.gather(1, targets[part, None]).squeeze(1)
            torch.logsumexp(logits, dim=1, out=log_normalisers[part])
            logprobs[part] = chosen - log_normalisers[part]
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, log_normalisers)
        ctx.softcap, ctx.chunk_rows = softcap, chunk_rows
        return logprobs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        hidden, weight, bias, targets, temperatures, log_normalisers = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        one_chunk = 0 < len(hidden) <= ctx.chunk_rows
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Sums over chunks are kept in float32: bfloat16 would lose the small ones.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight and not one_chunk else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        for start in range(0, len(hidden), ctx.chunk_rows):
            part = slice(start, start + ctx.chunk_rows)
            grad_logits = _grad_logits(
                _logits(hidden[part], weight, bias, temperatures[part], ctx.softcap),
                gradient[part] / temperatures[part],
                targets[part],
                temperatures[part],
                log_normalisers[part],
                ctx.softcap,
            )
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
            None,
            None,
            None,
            None,
        )


def _grad_logits(
    logits: Tensor, gradient: Tensor, targets: Tensor, temperatures: Tensor, log_normalisers: Tensor, softcap: float
) -> Tensor:
    """Return the gradient of the raw logits: gradient * (onehot - softmax) * softcap's slope. Overwrites `logits`."""
    slope = 1 - (logits * (temperatures[:, None] / softcap)).square_() if softcap else None
    grad = logits.sub_(log_normalisers[:, None]).exp_().mul_(-gradient[:, None])
    grad[torch.arange(len(grad), device=grad.device), targets] += gradient
    return grad if slope is None else grad.mul_(slope)
