"""Computes the checksums of weights, as defined in digest.py, on a GPU.

One launch computes any number of spans, and reads each once at memory bandwidth.

Program (p, l) takes blocks l, l + LANES, ... of part p. Word j of its i-th block has the index

    l * BLOCK + i * LANES * BLOCK + j        in the part

so sum((index + 1) * w) costs one 16 by 15 bit product per word; the other terms are computed once at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_LANES = 128
_MAX_BLOCKS = 1 << 15  # of one program: i * w must fit 31 bits


def add_sums_(sums: Tensor, values: Sequence[Tensor], starts: Sequence[int], rows: Sequence[int]) -> None:
    """Add both sums of every part to a row of `sums`, modulo 2**64, on the current stream.

    Args:
        sums: int64 [n, 2], on the GPU.
        values: parts, each 1-D, contiguous, of 16-bit elements, on the same GPU, with at most 2**33 elements. The
            caller keeps them alive until the kernel has run.
        starts: index of each part's first element in its tensor.
        rows: row of `sums` that each part belongs to.
    """
    assert max(len(v) for v in values) <= _MAX_BLOCKS * _LANES * _BLOCK, "cut into smaller parts"
    # Triton loads 16 bytes at once only where it is compiled for that alignment.
    aligned = [index for index, v in enumerate(values) if v.data_ptr() % 16 == 0]
    others = [index for index, v in enumerate(values) if v.data_ptr() % 16]
    for chosen, alignment in ((aligned, 16), (others, 2)):
        if not chosen:
            continue
        table = [(values[i].data_ptr(), len(values[i]), starts[i], rows[i]) for i in chosen]
        on_device = torch.tensor(table, dtype=torch.int64).to(sums.device, non_blocking=True)
        with torch.cuda.device(sums.device):
            kernel: Any = _sum_parts
            kernel[(len(chosen), _LANES)](on_device, sums, ALIGNMENT=alignment, LANES=_LANES, BLOCK=_BLOCK, num_warps=4)


@triton.jit
def _sum_parts(table, sums, ALIGNMENT: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr):
    part = tl.program_id(0)
    lane = tl.program_id(1)
    words = tl.load(table + 4 * part).to(tl.pointer_type(tl.uint16))
    words = tl.multiple_of(words, ALIGNMENT)
    count = tl.load(table + 4 * part + 1)
    start = tl.load(table + 4 * part + 2)
    row = tl.load(table + 4 * part + 3)
    first = lane.to(tl.int64) * BLOCK
    if first < count:
        inside = tl.arange(0, BLOCK)
        plain = tl.zeros([BLOCK], tl.int64)
        by_block = tl.zeros([BLOCK], tl.int64)
        block = 0
        for base in range(first, count, LANES * BLOCK):
            index = base + inside
            word = tl.load(words + index, mask=index < count, other=0).to(tl.int32)
            plain += word.to(tl.int64)
            by_block += (word * block).to(tl.int64)
            block += 1  # noqa: SIM113  (enumerate is Python's, this is triton's)
        total = tl.sum(plain)
        weighted = tl.sum(plain * (inside.to(tl.int64) + (first + start + 1))) + LANES * BLOCK * tl.sum(by_block)
        tl.atomic_add(sums + 2 * row, total)
        tl.atomic_add(sums + 2 * row + 1, weighted)
