"""Measures the memory that one rank of many takes to load its part of a model, alone on this machine.

    rank R of W, the real loader and a process group in which no other rank exists
    read the headers of the files    parameters on the meta device
    read this rank's partitions      <- safetensors files, here sparse ones: headers and holes, which read as zeros
    with `engine`: the real policy   probe of the architecture, DeepSpeed's engine, float32 masters

The limit is this rank's part of the weights, plus the largest parameter, plus 1 GB for the program; with `engine`, four
parts and 0.5 GB more. Pages of the files of its libraries do not count.
With `fault` the rank loads as if there were one rank, which must be above the limit.
"""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from fourfold.config import Config
from fourfold.host.process_tree import die_with_parent
from fourfold.model.folder import tensor_entries
from fourfold_bench.models import write_config, write_tokenizer

_PROGRAM_BYTES: Final = 10**9
_BUSY_BYTES: Final = 5 * 10**8
_TIMEOUT: Final = 1800.0
_ROOT: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The start of one rank at ZeRO stage 3."""

    shape: str
    world: int
    rank: int = 0
    engine: bool = False
    """Make the whole policy, with its optimizer."""
    fault: bool = False
    """Read the whole model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes that the start took."""

    peak: int
    limit: int
    disk: int


def measure(start: Start, folder: Path) -> Memory:
    """Start the rank in a process of its own."""
    model = _write_sparse_model(folder / "model", start.shape)
    words = [sys.executable, "-m", "tests.support.sharded_start", json.dumps(asdict(start)), str(model)]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "WORLD_SIZE": str(start.world), "LOCAL_RANK": "0"}
    child = subprocess.run(words, cwd=_ROOT, env=env, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    assert child.returncode == 0, child.stderr[-3000:]
    disk = sum(path.stat().st_blocks * 512 for path in model.glob("*.safetensors"))
    return Memory(peak=int(child.stdout.splitlines()[-1]), limit=_limit(start, model), disk=disk)


def _write_sparse_model(folder: Path, shape: str) -> Path:
    """Write a model whose weights are all 0, as holes of sparse files that take no space; return the folder."""
    import torch
    import transformers

    from fourfold_trainer.checkpoint.model_export import WeightsWriter

    write_config(folder, shape)
    write_tokenizer(folder, shape)
    make: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = make.from_config(transformers.AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    WeightsWriter(folder, {name: (p.dtype, tuple(p.shape)) for name, p in model.named_parameters()}).write_zeros()
    return folder


def _load(start: Start, folder: Path) -> int:
    """Load the model in this process, and return its peak in bytes. `DS_ACCELERATOR` must be set before."""
    import deepspeed.ops
    import torch
    from deepspeed.comm import comm
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from fourfold_trainer.zero import load_model, partition
    from fourfold_trainer.zero.models import DeepSpeedPolicy

    config = _recipe(start, folder)
    # As the trainer does: otherwise DeepSpeed compiles, for a minute, a shared-memory all-reduce that is never called.
    deepspeed.ops.__compatible_ops__ = {}
    store: Any = FakeStore()
    torch.distributed.init_process_group("fake", store=store, rank=start.rank, world_size=start.world)
    comm.init_distributed(dist_backend="fake", auto_mpi_discovery=False, verbose=False)
    if start.fault:
        load_model.Zero3Placement = lambda _config, device: partition.WholePlacement(device)  # type: ignore
        # It must not take the memory of the machine to be found out.
        limit = _memory("VmSize") + 2 * _limit(start, folder)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak of the imports
    # Pages of libraries, of which the kernel maps and drops some hundred MB as it likes.
    libraries = _memory("RssFile")
    try:
        if start.engine:
            DeepSpeedPolicy(config, folder, rank=start.rank, rank_count=start.world)
        else:
            load_model.load_model(config, folder, torch.device("cpu"))
    except (MemoryError, RuntimeError):
        if start.fault:
            return limit
        raise
    return _memory("VmHWM") - libraries


def _recipe(start: Start, folder: Path) -> Config:
    return Config.model_validate(
        {
            "name": "sharded-start",
            "steps": 1,
            "model": {"source": str(folder), "max_context_tokens": 64},
            "data": {"train": {"path": "train.jsonl"}},
            "sampling": {"max_new_tokens": 32},
            "batch": {"prompts_per_step": 64, "group_size": 2, "tokens_per_micro_batch": 64},
            "trainer": {"device": "cpu", "ranks": start.world, "zero_stage": 3},
        }
    )


def _memory(name: str) -> int:
    """Return a size of this process in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _limit(start: Start, folder: Path) -> int:
    """Return the bytes that the rank may take."""
    sizes = [2 * math.prod(entry.shape) for entry in tensor_entries(folder).values()]
    partitions = sum(-(-size // start.world) for size in sizes)
    if start.engine:
        # The masters are float32; and DeepSpeed copies the partitions into one buffer. On a busy machine the peak was
        # up to 360 MB higher than on an idle one. The whole model in bfloat16 has 3 GB.
        partitions = 4 * partitions + _BUSY_BYTES
    return partitions + max(sizes) + _PROGRAM_BYTES


if __name__ == "__main__":
    die_with_parent()
    sys.stdout.write(f"{_load(Start(**json.loads(sys.argv[1])), Path(sys.argv[2]))}\n")
