"""The log-probability of each row's sampled token, written where it is wanted: one CUDA kernel, no synchronisation.

It reads the logits once, in their own dtype, and computes in float32. The destination is the service's memory
(`cuda_table.py`).
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK: Final = 4096
_WARPS: Final = 8


def write_logprobs(
    logits: Tensor,
    sampled: Tensor,
    *,
    states: Tensor,
    slots: Tensor,
    prompt_lengths: Tensor,
    prefill_lengths: Tensor,
    positions: Tensor,
    table: Tensor,
) -> None:
    """Enqueue the write of log_softmax(logits)[row, sampled[row]] for each row that has a slot and a token.

    Legend: r rows of this step, s requests of the runner. All but the logits are integers, of any width.

    Args:
        logits: [r, vocabulary], as they were sampled from; rows may be further apart.
        sampled: [r].
        states: [r], which request a row belongs to; -1: to none.
        slots: [s], rows of the table; -1: nobody asks.
        prompt_lengths: [s].
        prefill_lengths: [s], prompt and what was sampled before a preemption; before its end no token is sampled.
        positions: [r], of the last token that went in.
        table: float32 [slots, width]. Token i of a request goes to [slot, i].
    """
    slot_count, width = table.shape
    arguments: tuple[Any, ...] = (logits, sampled, states, slots, prompt_lengths, prefill_lengths, positions, table)
    _write[(len(logits),)](
        *arguments, logits.stride(0), logits.shape[1], slot_count, width, BLOCK=_BLOCK, num_warps=_WARPS
    )


# Numbers and addresses that are not alike in every step: specialised, the kernel would be compiled again in the middle
# of sampling, for a view at an odd address or a single row of padded logits.
@triton.jit(
    do_not_specialize=["sampled", "states", "slots", "prompt_lengths", "prefill_lengths", "positions", "stride"]
)
def _write(
    logits,
    sampled,
    states,
    slots,
    prompt_lengths,
    prefill_lengths,
    positions,
    table,
    stride,
    vocabulary,
    slot_count,
    width,
    BLOCK: tl.constexpr,
):
    """One row: each lane keeps its own maximum and sum, so that lanes meet once, at the end."""
    row = tl.program_id(0).to(tl.int64)
    state = tl.load(states + row).to(tl.int64)
    owned = state >= 0
    slot = tl.load(slots + state, mask=owned, other=-1).to(tl.int64)
    prompt_length = tl.load(prompt_lengths + state, mask=owned, other=0).to(tl.int64)
    prefill_length = tl.load(prefill_lengths + state, mask=owned, other=0).to(tl.int64)
    length = tl.load(positions + row).to(tl.int64) + 1
    index = length - prompt_length
    if (slot >= 0) & (slot < slot_count) & (length >= prefill_length) & (index >= 0) & (index < width):
        line = logits + row * stride
        # Finite, so that rows that top-k and top-p have filled with -inf make no NaN.
        highest = tl.full([BLOCK], -1e30, tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocabulary, BLOCK):
            cells = start + tl.arange(0, BLOCK)
            z = tl.load(line + cells, mask=cells < vocabulary, other=float("-inf")).to(tl.float32)
            m = tl.maximum(highest, z)
            total = total * tl.exp(highest - m) + tl.exp(z - m)
            highest = m
        top = tl.max(highest, 0)
        normaliser = tl.log(tl.sum(total * tl.exp(highest - top), 0))
        token = tl.load(sampled + row).to(tl.int64)
        chosen = tl.load(line + token).to(tl.float32)
        tl.store(table + slot * width + index, chosen - top - normaliser)


def check_table(table: Tensor, host: Any, vocabulary: int, dtype: torch.dtype) -> str:
    """Write one value as the sampler will, and look whether it has arrived; return why it has not, or nothing.

    It compiles the kernel, too.

    Args:
        table: as above; cell [0, 0] is overwritten.
        host: the same memory as the host sees it.
        vocabulary: of the logits to come.
        dtype: of the logits to come.
    """
    logits = torch.zeros((1, vocabulary), dtype=dtype, device=table.device)
    zero, one = (torch.full((1,), number, dtype=torch.int32, device=table.device) for number in (0, 1))
    host[0, 0] = 1.0
    write_logprobs(
        logits,
        zero.to(torch.int64),
        states=zero,
        slots=zero,
        prompt_lengths=one,
        prefill_lengths=one,
        positions=zero.to(torch.int64),
        table=table,
    )
    torch.cuda.synchronize(table.device)
    expected = -float(torch.tensor(float(vocabulary)).log())
    if abs(float(host[0, 0]) - expected) > 1e-3:
        return f"the GPU wrote {expected:.4f} to the service's memory, and there is {float(host[0, 0]):.4f}"
    return ""
