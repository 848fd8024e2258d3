"""Measures the memory that one rank of many takes to load its part of a model, alone on this machine.

    rank R of W, the real loader and a process group in which no other rank exists
    read the headers of the files    parameters on the meta device
    read this rank's partitions      <- safetensors files, here sparse ones: headers and holes, which read as zeros
    with --engine: the real policy   probe of the architecture, DeepSpeed's engine, float32 masters

The peak is compared with a limit: this rank's part of the weights, plus the largest parameter, plus 1 GB for the
program and its libraries. `--fault whole` loads as if there were one rank, which must be above the limit.

    python -m fourfold_bench.sharded_start --shape 70b --world 64 --save
"""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fourfold.config import Config
from fourfold.errors import ConfigError, Unavailable
from fourfold.host.process_tree import die_with_parent
from fourfold.model.folder import tensor_entries
from fourfold_bench.harness import Benchmark, BenchmarkRun, BenchmarkSettings, option, run_script
from fourfold_bench.models import SHAPE_NAMES, write_sparse_model

_PROGRAM_BYTES: Final = 10**9
_RANK: Final = "--one-rank"
_TIMEOUT: Final = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSettings(BenchmarkSettings):
    """The options of the start of one rank."""

    shape: str = option(default="70b", choices=SHAPE_NAMES)
    world: int = option("ranks of the trainer", default=64, least=1)
    rank: int = option("number of the rank that starts", default=0, least=0)
    zero_stage: int = option(default=3)
    engine: bool = option("make the whole policy, with its optimizer", default=False)
    fault: str = option("what the loader does wrong", default="", choices=("", "whole"))

    def check(self) -> None:
        if self.rank >= self.world:
            raise ConfigError(f"--rank {self.rank}: it must be below --world {self.world}")


def start(settings: StartSettings, folder: Path) -> dict[str, Any]:
    """Load the model in this process, and return what that took. `DS_ACCELERATOR` must be set before."""
    import torch
    from deepspeed.comm import comm
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from fourfold_trainer.zero import load_model, partition
    from fourfold_trainer.zero.models import DeepSpeedPolicy

    config = _recipe(settings, folder)
    store: Any = FakeStore()
    torch.distributed.init_process_group("fake", store=store, rank=settings.rank, world_size=settings.world)
    comm.init_distributed(dist_backend="fake", auto_mpi_discovery=False, verbose=False)
    if settings.fault == "whole":
        load_model.Zero3Placement = lambda _config, device: partition.WholePlacement(device)  # type: ignore
        # It must not take the memory of the machine to be found out.
        limit = _memory("VmSize") + 2 * _limit(settings, folder)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before, began = _memory("VmRSS"), time.perf_counter()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak of the imports
    try:
        if settings.engine:
            model: Any = DeepSpeedPolicy(config, folder, rank=settings.rank, rank_count=settings.world)
        else:
            model = load_model.load_model(config, folder, torch.device("cpu"))
    except (MemoryError, RuntimeError) as error:
        if settings.fault:
            return {"peak_bytes": limit, "error": str(error)[:200]}
        raise
    del model
    return {
        "seconds": round(time.perf_counter() - began, 2),
        "program_bytes": before,
        "peak_bytes": _memory("VmHWM"),
        "anonymous_bytes": _memory("RssAnon"),
    }


def _recipe(settings: StartSettings, folder: Path) -> Config:
    return Config.model_validate(
        {
            "name": "sharded-start",
            "steps": 1,
            "model": {"source": str(folder), "max_context_tokens": 64},
            "data": {"train": {"path": "train.jsonl"}},
            "sampling": {"max_new_tokens": 32},
            "batch": {"prompts_per_step": 64, "group_size": 2, "tokens_per_micro_batch": 64},
            "trainer": {"device": "cpu", "ranks": settings.world, "zero_stage": settings.zero_stage},
        }
    )


def _memory(name: str) -> int:
    """Return a size of this process in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _sizes(folder: Path) -> list[int]:
    """Return the bytes of all tensors."""
    return [2 * math.prod(entry.shape) for entry in tensor_entries(folder).values()]


def _limit(settings: StartSettings, folder: Path) -> int:
    """Return the bytes that the rank may take."""
    sizes = _sizes(folder)
    partitions = sum(-(-size // settings.world) for size in sizes) if settings.zero_stage == 3 else sum(sizes)
    if settings.engine:
        # The masters are float32; and DeepSpeed copies the partitions into one buffer.
        partitions += partitions + 2 * sum(-(-size // settings.world) for size in sizes)
    return partitions + max(sizes) + _PROGRAM_BYTES


class StartBenchmark(Benchmark[StartSettings]):
    """Memory of one rank's start."""

    name = "sharded_start"
    summary = "memory that one rank of many takes to load its part of a model"
    settings = StartSettings
    libraries = ("torch", "transformers", "deepspeed")

    def label(self, settings: StartSettings) -> str:
        return f"{settings.shape}-{settings.rank}-of-{settings.world}{'-engine' if settings.engine else ''}"

    def measure(self, settings: StartSettings, run: BenchmarkRun) -> dict[str, Any]:
        folder = write_sparse_model(run.folder / "model", settings.shape)
        files = list(folder.glob("*.safetensors"))
        child = subprocess.run(
            [
                sys.executable,
                "-m",
                "fourfold_bench.sharded_start",
                _RANK,
                str(settings.write(run.folder / "s")),
                folder,
            ],
            env={**os.environ, "DS_ACCELERATOR": "cpu", "WORLD_SIZE": str(settings.world), "LOCAL_RANK": "0"},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
        if child.returncode:
            raise Unavailable(f"the rank failed with exit code {child.returncode}:\n{child.stderr[-3000:]}")
        sizes = _sizes(folder)
        return {
            "weights_bytes": sum(sizes),
            "files": len(files),
            "disk_bytes": sum(path.stat().st_blocks * 512 for path in files),
            "largest_parameter_bytes": max(sizes),
            "limit_bytes": _limit(settings, folder),
            # Of all parameters: masters and both moments of Adam, and DeepSpeed's flat copy of the gradients.
            "optimizer_bytes_after_first_step": sum(-(-size // settings.world) for size in sizes) // 2 * 16,
            **json.loads(child.stdout.splitlines()[-1]),
        }

    def failures(self, document: Mapping[str, Any]) -> list[str]:
        results = document["results"]
        if results["peak_bytes"] <= results["limit_bytes"]:
            return []
        return [f"the rank took {results['peak_bytes'] / 1e9:.2f} GB; the limit is {results['limit_bytes'] / 1e9:.2f}"]

    def table(self, document: Mapping[str, Any]) -> list[str]:
        results = document["results"]
        gb = {name: f"{size / 1e9:.2f} GB" for name, size in results.items() if name.endswith("_bytes")}
        more = ", ".join(f"{key} {results[key]}" for key in ("seconds", "error") if key in results)
        return [
            f"{gb['weights_bytes']} of weights in {results['files']} files ({gb['disk_bytes']} on disk); largest "
            f"parameter {gb['largest_parameter_bytes']}",
            f"peak {gb['peak_bytes']}, limit {gb['limit_bytes']} ({more})",
        ]


if __name__ == "__main__":
    if sys.argv[1:2] == [_RANK]:
        die_with_parent()
        print(json.dumps(start(StartSettings.read(Path(sys.argv[2])), Path(sys.argv[3]))))
        sys.exit(0)
    sys.exit(run_script(StartBenchmark()))
