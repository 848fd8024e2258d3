"""Measures the memory that one TrainStep takes in the process that sends it and in the trainer's.

    this process                       trainer process, rank 0                 other ranks
    a batch of samples in memory
    TrainStep, encoded chunk by chunk  ---->  decode, check, advantages
                                              micro-batches, read there  --->  and here

The client, the servicer and the channels of the ranks are the real ones, over loopback. Each rank reads its
micro-batches and forgets them, as a rank with a GPU does. Memory is the peak of the resident memory minus what was
resident before, as a multiple of the bytes of the batch on the wire. That of several ranks is the sum of their peaks.

    python -m fourfold_bench.step_memory [--samples 32768] [--ranks 2]
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from fourfold.algorithm.state import AlgorithmState
from fourfold.arrays import Sample, VersionSpan
from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold.host.process_tree import die_with_parent
from fourfold.rpc.channel import open_channel
from fourfold.rpc.codec import encode_parts
from fourfold.rpc.server import Server
from fourfold.trainer.client import AsyncTrainerClient
from fourfold.trainer.v1 import trainer_service_pb2 as trainer
from fourfold.trainer.v1 import trainer_service_pb2_grpc as trainer_grpc
from fourfold_bench.experience_path import PROMPT_TOKENS, VOCABULARY_SIZE, PathSettings, ReadyCore
from fourfold_bench.harness import Benchmark, BenchmarkRun, BenchmarkSettings, option, run_script
from fourfold_bench.processes import BenchProcesses
from fourfold_trainer.batches import PolicyBatch, ReceivedBatches
from fourfold_trainer.checkpoint.store import StepAnswer
from fourfold_trainer.engine import UpdateSettings, UpdateSums
from fourfold_trainer.ranks.main import run_rank
from fourfold_trainer.ranks.placement import place_ranks
from fourfold_trainer.ranks.rank_channel import RankMessage
from fourfold_trainer.ranks.rank_processes import RankProcesses
from fourfold_trainer.ranks.worker import ANSWER
from fourfold_trainer.service.metrics import summarise
from fourfold_trainer.service.servicer import TrainerServicer
from fourfold_trainer.step.batch import check_samples
from fourfold_trainer.step.train_step import train_step

_TIMEOUT: Final = 500.0
_SERVE: Final = "--serve"
_RANK: Final = "--rank"
_GROUP: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings(BenchmarkSettings):
    """The options of the memory of a step."""

    samples: int = option("samples of the step", default=32_768, least=_GROUP)
    tokens: int = option("tokens of one sample, prompt and completion", default=1024, above=PROMPT_TOKENS + 1)
    ranks: int = option("processes of the trainer", default=1, least=1)

    def check(self) -> None:
        if self.samples % _GROUP:
            raise ConfigError(f"--samples {self.samples}: it must be a multiple of {_GROUP}")


class _Reader:
    """A `RankWorker` that reads its micro-batches and trains nothing."""

    def handle(self, command: RankMessage) -> RankMessage:
        tokens = sum(len(batch.advantages) for batch in ReceivedBatches(PolicyBatch, command.batches))
        return RankMessage(name=ANSWER, fields={"token_count": tokens})


def _make_reader(*_start: object) -> Any:
    return _Reader()


class _Ranks(RankProcesses):
    """Ranks that do the same."""

    _program = ("-m", "fourfold_bench.step_memory", _RANK)

    def load_local_rank(self) -> None:
        self.worker = _make_reader()


class _Engine:
    """An engine of these ranks."""

    vocabulary_size = VOCABULARY_SIZE

    def __init__(self, config: Config, folder: Path) -> None:
        places = place_ranks(config, critic=False)
        self._ranks = _Ranks(
            config, folder, places, has_local_rank=True, run_dir=folder, name="trainer", on_death=sys.exit
        )
        self._ranks.load_local_rank()
        self._ranks.wait_loaded()

    def update_policy(self, shares: Sequence[Sequence[PolicyBatch]], settings: UpdateSettings) -> UpdateSums:
        answers = self._ranks.call_on_shares("update_policy", shares, fields=asdict(settings))
        return UpdateSums(loss=0.0, token_count=sum(a.fields["token_count"] for a in answers), grad_norm=1.0)


class _Core(ReadyCore):
    """The core of a trainer with that engine."""

    def __init__(self, settings: MemorySettings, folder: Path) -> None:
        super().__init__(PathSettings(samples=settings.samples, tokens=settings.tokens, group_size=_GROUP))
        tables = {"trainer": {"ranks": settings.ranks, "device": "cpu"}}
        self.config = Config.model_validate(self.config.model_dump(mode="json", exclude_unset=True) | tables)
        self.engine: Any = _Engine(self.config, folder)

    def train_step(self, step: int, samples: list[Sample], _batch_sha256: str) -> StepAnswer:
        check_samples(samples, self.config, policy_version=0)
        result = train_step(self.engine, samples, self.config, step=step, state=AlgorithmState())
        return StepAnswer(step=step, policy_version=step, metrics=summarise(result, self.config))


async def _serve(settings: MemorySettings, folder: Path) -> None:
    """Serve the trainer until the parent ends this process."""
    die_with_parent()
    core: Any = _Core(settings, folder)
    server = Server(listen="127.0.0.1:0", security=None)
    service = trainer.DESCRIPTOR.services_by_name["TrainerService"]
    server.add(service, trainer_grpc.add_TrainerServiceServicer_to_server, TrainerServicer(core))
    target = await server.start()
    server.set_ready(True)
    print(f"READY {target}", flush=True)
    await asyncio.Event().wait()


def _samples(settings: MemorySettings) -> list[Sample]:
    """Return scored samples, each with arrays of its own as the coordinator's have."""
    rng, count, prompt = np.random.default_rng(0), settings.tokens, PROMPT_TOKENS
    found = []
    for index in range(settings.samples):
        mask = np.arange(count) >= prompt
        behavior = -rng.random(count, dtype=np.float32)
        behavior[:prompt] = np.nan
        sample = Sample(
            sample_id=f"p{index // _GROUP:07d}-0-{index % _GROUP}",
            group_id=f"p{index // _GROUP:07d}-0",
            token_ids=rng.integers(0, VOCABULARY_SIZE, count, dtype=np.int32),
            behavior_logprobs=behavior,
            action_mask=mask,
            loss_mask=mask,
            version_spans=(
                VersionSpan(policy_version=-1, token_count=prompt),
                VersionSpan(policy_version=0, token_count=count - prompt),
            ),
            temperature=1.0,
            score=float(index % 2),
            scorer="memory@1",
        )
        found.append(sample)
    return found


class _Memory:
    """The resident memory of a process, in bytes."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")

    def now(self) -> int:
        return self._read("VmRSS")

    def peak(self) -> int:
        """Return the highest value since `reset`."""
        return self._read("VmHWM")

    def reset(self) -> None:
        (self._folder / "clear_refs").write_text("5")

    def _read(self, name: str) -> int:
        lines = (self._folder / "status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


async def _measure(settings: MemorySettings, target: str, pid: int) -> dict[str, Any]:
    client = AsyncTrainerClient(open_channel(target, None), peer="trainer")
    process, sender = psutil.Process(pid), _Memory(psutil.Process().pid)
    # Among its children is one that rotates logs.
    ranks = [_Memory(pid), *(_Memory(child.pid) for child in process.children() if _RANK in child.cmdline())]
    gc.collect()
    empty = sender.now()
    samples = _samples(settings)
    wire = sum(len(part) for sample in samples[:_GROUP] for part in encode_parts(sample)) * settings.samples // _GROUP
    held, idle = sender.now(), [rank.now() for rank in ranks]
    for memory in (sender, *ranks):
        memory.reset()
    began = time.perf_counter()
    await client.train_step(1, samples, timeout=_TIMEOUT)
    seconds = time.perf_counter() - began
    peaks = [rank.peak() - before for rank, before in zip(ranks, idle, strict=True)]
    return {
        "wire_mib": round(wire / 2**20, 1),
        "seconds": round(seconds, 1),
        "sender_batch": round((held - empty) / wire, 2),
        "sender_peak": round((sender.peak() - empty) / wire, 2),
        "trainer_peak": round(sum(peaks) / wire, 2),
        "rank_peaks": [round(peak / wire, 2) for peak in peaks],
    }


class MemoryBenchmark(Benchmark[MemorySettings]):
    """Peak memory of a step, as a multiple of its bytes on the wire."""

    name = "step_memory"
    summary = "memory of one TrainStep, in the sender and in the trainer"
    settings = MemorySettings
    libraries = ("grpcio", "protobuf", "numpy")

    def measure(self, settings: MemorySettings, run: BenchmarkRun) -> dict[str, Any]:
        given = settings.write(run.folder / "settings.json")
        with BenchProcesses(run.folder) as processes:
            processes.start("trainer", "-m", "fourfold_bench.step_memory", _SERVE, str(given), str(run.folder))
            (target,) = processes.ready("trainer", timeout=60.0)
            return asyncio.run(_measure(settings, target, processes.pid("trainer")))

    def table(self, document: Mapping[str, Any]) -> list[str]:
        results = document["results"]
        return [
            f"{results['wire_mib']:.0f} MiB on the wire, {results['seconds']:.1f} s",
            f"sender: {results['sender_batch']:.2f} times that for the batch, {results['sender_peak']:.2f} at most",
            f"trainer: {results['trainer_peak']:.2f} times that at most; by rank: {results['rank_peaks']}",
        ]


if __name__ == "__main__":
    if sys.argv[1:2] == [_SERVE]:
        asyncio.run(_serve(MemorySettings.read(Path(sys.argv[2])), Path(sys.argv[3])))
    if sys.argv[1:2] == [_RANK]:
        sys.exit(run_rank(_make_reader))
    sys.exit(run_script(MemoryBenchmark()))
