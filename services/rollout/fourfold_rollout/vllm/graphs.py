"""How many sequences the engine is set up for, so that a full batch runs in a CUDA graph.

vLLM captures the sizes 1, 2, 4, the multiples of 8 up to 256 and then those of 16, up to twice max_num_seqs but at most
512; and whole decode steps only up to max_num_seqs. A batch is padded to the next size, and runs without a graph when
that was not captured: 100 of 100 sequences would, as 104 are more than 100, and 600 would, as 512 is the largest.
"""

from __future__ import annotations

from typing import Final

_FINE: Final = 256
_LARGEST: Final = 512


def graph_limits(concurrent_samples: int) -> tuple[int, int | None]:
    """Return `max_num_seqs`, and `max_cudagraph_capture_size` where vLLM's own does not do.

    One sequence more than samples has room: a probe waits for nobody.
    """
    sequences = concurrent_samples + 1
    stride = 8 if sequences <= _FINE else 16
    sequences = -(-sequences // stride) * stride
    return sequences, sequences if sequences > _LARGEST else None
