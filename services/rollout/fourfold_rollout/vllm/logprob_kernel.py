"""Writes log-probabilities of sampled tokens from a GPU into the service's memory: the mapping, and a Triton kernel.

The kernel reads the logits once, in their own dtype, computes in float32, and does not synchronise with the host.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

from fourfold.arrays import Float32Array

_BLOCK: Final = 4096
_WARPS: Final = 8
_PORTABLE_AND_MAPPED: Final = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped


def map_on_gpu(host: Float32Array, device: torch.device) -> tuple[Tensor | None, str]:
    """Lock host memory and map it on a GPU; return it as a tensor of that GPU, or None and the reason.

    All its pages are allocated now and stay locked until the process ends.
    """
    cells = torch.from_numpy(host)
    with torch.cuda.device(device):
        runtime = torch.cuda.cudart()
        size = cells.numel() * cells.element_size()
        code = int(runtime.cudaHostRegister(cells.data_ptr(), size, _PORTABLE_AND_MAPPED))
        if code:
            return None, f"CUDA cannot map {size >> 20} MiB of the service's memory (error {code})"
        view = get_accelerator_view_from_cpu_tensor(cells)
    if view.device.type != "cuda" or view.shape != cells.shape:
        return None, "vLLM gives no view of host memory on a GPU"
    return view, ""


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

    r: rows of this step; s: requests of the runner. All arrays but the logits hold integers, of any width.

    Args:
        logits: [r, vocabulary], after temperature, top-k and top-p; the row stride may be larger.
        sampled: [r], token ids.
        states: [r], the request of each row; -1: none.
        slots: [s], rows of the table; -1: the request has none.
        prompt_lengths: [s].
        prefill_lengths: [s], prompt and tokens sampled before a preemption; no token is sampled before its end.
        positions: [r], of the last input token.
        table: float32 [slots, width]. Token i of a request goes to [slot, i].
    """
    slot_count, width = table.shape
    arguments: tuple[Any, ...] = (logits, sampled, states, slots, prompt_lengths, prefill_lengths, positions, table)
    _write[(len(logits),)](
        *arguments, logits.stride(0), logits.shape[1], slot_count, width, BLOCK=_BLOCK, num_warps=_WARPS
    )


# These arguments differ between steps. Specialised on them, Triton would compile the kernel again in the middle of
# sampling, for a view at an odd address or for a single row of padded logits.
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
    """Process one row. Each lane keeps its own maximum and sum, so lanes are reduced once, at the end."""
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
        # Finite: lanes that see only the -inf of top-k and top-p would compute NaN from -inf.
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
    """Compile the kernel, write one value and check that it arrived; return the reason if not, or an empty text.

    `table` is `host` as mapped on the GPU; cell [0, 0] is overwritten. The logits to come have `vocabulary` columns of
    `dtype`.
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
        return f"the GPU wrote {expected:.4f} to the service's memory, but it holds {float(host[0, 0]):.4f}"
    return ""
