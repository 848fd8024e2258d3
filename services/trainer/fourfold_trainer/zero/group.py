"""The ranks of a process group meet: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import logging
import warnings
from datetime import timedelta
from pathlib import Path

import deepspeed
import deepspeed.ops
import torch
from deepspeed.comm import comm as deepspeed_comm

from fourfold.config import Config


def device_of(config: Config, gpu: int) -> torch.device:
    """Return the device of a rank that has this GPU, where there are GPUs."""
    return torch.device(f"cuda:{gpu}" if config.trainer.device == "cuda" else "cpu")


def join(config: Config, *, rank: int, rank_count: int, gpu: int, rendezvous: Path) -> None:
    """Join the process group: gloo or NCCL, over loopback alone (see `processes.environment`).

    Args:
        config: of the run.
        rank: of this process.
        rank_count: number of ranks.
        gpu: of this process.
        rendezvous: path of a file that all ranks see, in a folder of this run alone.
    """
    if config.trainer.device == "cuda":
        torch.cuda.set_device(device_of(config, gpu))
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # torch 2.13 has new names for two collectives, and says so at every call of DeepSpeed's.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    # DeepSpeed would compile an all-reduce through shared memory at its first use: 20 s, a compiler, and all ranks at
    # once. Only its inference calls it. With no operator known as compatible it looks for no compiler either.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(
        dist_backend="nccl" if config.trainer.device == "cuda" else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=rank_count,
        timeout=timedelta(seconds=config.trainer.step_timeout_seconds),
        auto_mpi_discovery=False,
        verbose=False,
    )


def leave() -> None:
    """Leave the process group."""
    deepspeed_comm.destroy_process_group()
    deepspeed_comm.cdb = None  # so that a later `join` of this process starts afresh
