"""Sequence parallelism: DeepSpeed's attention over the slices of a group of ranks (see fourfold/nn/sequence.py)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor

from fourfold.config import Config
from fourfold.nn.sequence import Kernel

# Of [1, t, h, d]: the all-to-all deals the heads and collects the tokens, and the other way round on the way back.
_BATCH: Final = 0
_TOKENS: Final = 1
_HEADS: Final = 2


class Ulysses:
    """The `Exchange` of one rank."""

    def __init__(self, group: Any) -> None:
        """Take the process group of the ranks that share a row, in the order of their slices."""
        # Imported here: with its operators it is for those who share rows alone.
        from deepspeed.sequence.layer import DistributedAttention

        self._group = group
        self.rank: int = torch.distributed.get_rank(group)
        self.size: int = torch.distributed.get_world_size(group)
        self._attention = DistributedAttention(_call, group, scatter_idx=_HEADS, gather_idx=_TOKENS)

    def attend(self, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return [1, t / n, h, d] of the slice; the kernel sees the whole row of h / n heads."""
        result: Tensor = self._attention(query, key, value, _BATCH, kernel=kernel)
        return result

    def add(self, numbers: Tensor) -> None:
        """Make of `numbers` their sum over the group, in place."""
        torch.distributed.all_reduce(numbers, group=self._group)


def make_exchange(config: Config, *, rank: int) -> Ulysses | None:
    """Make the groups of consecutive ranks and return this rank's; None: every row is one rank's.

    A collective of all ranks, after `join`. ZeRO is told nothing of the groups: it shards over all ranks and averages
    over all of them, and each has the gradient of its own slice.
    """
    size = config.trainer.sequence_parallel_size
    if size == 1:
        return None
    timeout = timedelta(seconds=config.trainer.step_timeout_seconds)
    starts = range(0, config.trainer.ranks, size)
    groups = [torch.distributed.new_group([*range(start, start + size)], timeout=timeout) for start in starts]
    return Ulysses(groups[rank // size])


def _call(query: Tensor, key: Tensor, value: Tensor, *, kernel: Kernel) -> Tensor:
    return kernel(query, key, value)
