"""Makes a real ZeRO-3 engine for a trainer rank. No other module of the benchmarks imports DeepSpeed."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
import torch
import transformers


def join(rank: int, rank_count: int, device: torch.device, rendezvous: Path) -> None:
    """Join the process group of the trainer's ranks."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    os.environ["LOCAL_RANK"] = "0"  # every rank sees only its own device
    # As in the trainer: otherwise every rank compiles an all-reduce that is never called, for 30 s.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(
        dist_backend="nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=rank_count,
        auto_mpi_discovery=False,
        verbose=False,
    )


def make_engine(config: Any) -> Any:
    """Return an engine whose model is never whole on a rank. SGD has no state, so a big one fits beside an engine."""
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 40,
    }
    with deepspeed.zero.Init(config_dict_or_path=settings, dtype=torch.bfloat16):
        make: Any = transformers.AutoModelForCausalLM
        model = make.from_config(config, dtype=torch.bfloat16)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3), config=settings
    )
    return engine


def gathered(parameter: Any) -> Any:
    """Return a context in which the parameter is whole on all ranks."""
    return deepspeed.zero.GatheredParameters([parameter])
