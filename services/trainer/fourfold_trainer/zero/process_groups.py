"""Joins the process group of a model's ranks, and makes the groups of ranks that share rows (sequence parallelism)."""

from __future__ import annotations

import logging
import warnings
from datetime import timedelta
from typing import Any, Final

import deepspeed
import deepspeed.ops
import torch
from deepspeed.comm import comm as deepspeed_comm
from torch import Tensor

from fourfold.config import Config
from fourfold.nn.sequence import Kernel
from fourfold_trainer.zero.rendezvous_store import store_of

# Dimensions of [1, tokens, heads, head size]. The all-to-all scatters the heads and gathers the tokens.
_BATCH: Final = 0
_TOKENS: Final = 1
_HEADS: Final = 2


def device_of(config: Config, gpu: int) -> torch.device:
    """Return the device of a rank: this GPU, or the CPU if the trainer runs on CPUs."""
    return torch.device(f"cuda:{gpu}" if config.trainer.device == "cuda" else "cpu")


def join(config: Config, *, rank: int, rank_count: int, gpu: int, store_address: str) -> None:
    """Join the process group: NCCL on GPUs, gloo on CPUs. `rank_environment` names the network of both.

    All ranks pass the same `store_address`, from `rendezvous_store.py`.
    """
    if config.trainer.device == "cuda":
        torch.cuda.set_device(device_of(config, gpu))
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # torch 2.13 renamed two collectives and warns at every call that DeepSpeed makes under the old names.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    # DeepSpeed would compile an all-reduce through shared memory at its first use: 20 s, a compiler, and all ranks at
    # once. Only its inference calls it. With no operator known as compatible it looks for no compiler either.
    deepspeed.ops.__compatible_ops__ = {}
    backend, timeout = "nccl" if config.trainer.device == "cuda" else "gloo", config.trainer.step_timeout_seconds
    torch.distributed.init_process_group(
        backend,
        store=store_of(store_address, rank_count, timeout=timeout),
        rank=rank,
        world_size=rank_count,
        timeout=timedelta(seconds=timeout),
    )
    # DeepSpeed takes over the group that exists.
    deepspeed.init_distributed(
        dist_backend=backend, timeout=timedelta(seconds=timeout), auto_mpi_discovery=False, verbose=False
    )


def leave() -> None:
    """Leave the process group, so that this process can join another one."""
    deepspeed_comm.destroy_process_group()
    deepspeed_comm.cdb = None  # DeepSpeed does not reset it, and a second `init_distributed` would then do nothing


class UlyssesExchange:
    """Implements the `Exchange` of `fourfold.nn.sequence` with DeepSpeed-Ulysses attention."""

    def __init__(self, group: Any) -> None:
        """Take the process group of the ranks that share a row, in the order of their slices."""
        # Imported here: the module loads DeepSpeed's operators, which only sequence parallelism needs.
        from deepspeed.sequence.layer import DistributedAttention

        self._group = group
        self.rank: int = torch.distributed.get_rank(group)
        self.size: int = torch.distributed.get_world_size(group)
        self._attention = DistributedAttention(_call, group, scatter_idx=_HEADS, gather_idx=_TOKENS)

    def attend(self, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention of this rank's slice, [1, t / n, h, d]: t tokens, n ranks, h heads of size d.

        The kernel computes the whole row for h / n heads.
        """
        result: Tensor = self._attention(query, key, value, _BATCH, kernel=kernel)
        return result

    def add(self, numbers: Tensor) -> None:
        """Replace `numbers` by their sum over the group, in place."""
        torch.distributed.all_reduce(numbers, group=self._group)


def make_exchange(config: Config, *, rank: int) -> UlyssesExchange | None:
    """Group consecutive ranks and return this rank's exchange; None without sequence parallelism.

    A collective of all ranks, after `join`. ZeRO ignores these groups: it shards and averages over all ranks, and each
    rank contributes the gradient of its own slice.
    """
    size = config.trainer.sequence_parallel_size
    if size == 1:
        return None
    timeout = timedelta(seconds=config.trainer.step_timeout_seconds)
    starts = range(0, config.trainer.ranks, size)
    # Every rank must create every group, in the same order, also those that it is not in.
    groups = [torch.distributed.new_group([*range(start, start + size)], timeout=timeout) for start in starts]
    return UlyssesExchange(groups[rank // size])


def make_file_group(config: Config) -> Any:
    """Return a gloo group of all ranks, which files are copied over. A collective of all ranks, after `join`."""
    timeout = timedelta(seconds=config.trainer.step_timeout_seconds)
    return torch.distributed.new_group(backend="gloo", timeout=timeout)


def _call(query: Tensor, key: Tensor, value: Tensor, *, kernel: Kernel) -> Tensor:
    # DistributedAttention takes its kernel once, at construction, but ours differs between layers and calls.
    return kernel(query, key, value)
