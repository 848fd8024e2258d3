"""Runs many small samples through the coordinator's store, and shows that its memory and its time per sample stay flat.

    issue, RUNNING, ROLLED  ->  arrays to a segment, synced; READY  ->  lease, encode for the trainer, acknowledge
                            ->  samples.jsonl  ->  checkpoint, release

Everything is in one process, with the coordinator's own ledger, store and files; there is no rollout, reward or trainer
service.

    python -m fourfold_bench.store_soak [--samples 1000000]
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from fourfold.arrays import Sample, VersionSpan
from fourfold.errors import ConfigError
from fourfold.host.disk import append_lines
from fourfold.rpc.codec import encode_parts, encode_stream
from fourfold.trainer.v1.trainer_service_pb2 import TrainStepRequest
from fourfold_bench.harness import Benchmark, BenchmarkRun, BenchmarkSettings, option, run_script
from fourfold_coordinator.data.prompts import Prompt
from fourfold_coordinator.reporting.batch_metrics import compute_batch_metrics
from fourfold_coordinator.state.experiences import ExperienceStore
from fourfold_coordinator.state.files import DiskWriter
from fourfold_coordinator.state.group_commit import GroupCommit
from fourfold_coordinator.state.ledger import Ledger, SampleState
from fourfold_coordinator.state.run_board import RunBoard
from fourfold_coordinator.state.samples import SampleGroup, StepBatch, Trajectory, to_lines
from fourfold_coordinator.state.segments import SegmentFiles

_POINTS: Final = 10
_PROMPT_TOKENS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakSettings(BenchmarkSettings):
    """The options of the soak of the store."""

    samples: int = option("samples in all", default=1_000_000, least=1)
    step_samples: int = option("samples of one step", default=1000, least=1)
    group_size: int = option("samples of one group", default=8, least=1)
    tokens: int = option("tokens of one sample, prompt and completion", default=64, above=_PROMPT_TOKENS)

    def check(self) -> None:
        if self.step_samples % self.group_size:
            raise ConfigError(f"--step-samples {self.step_samples}: it must be a multiple of --group-size")
        if self.samples % (_POINTS * self.step_samples):
            raise ConfigError(f"--samples {self.samples}: it must be a multiple of {_POINTS} times --step-samples")


class _Store:
    """The coordinator's store in a folder of its own."""

    def __init__(self, settings: SoakSettings, folder: Path) -> None:
        self._settings, self._folder = settings, folder
        self._ledger = Ledger(folder / "ledger.sqlite")
        disk = DiskWriter(folder, RunBoard(name="soak", step_count=1), wait_seconds=60.0)
        self._changes = GroupCommit(self._ledger, disk)
        self._store = ExperienceStore(SegmentFiles(folder / "experiences"), self._ledger, disk)
        ids = np.arange(_PROMPT_TOKENS, dtype=np.int32)
        self._prompt = Prompt(index=0, text="?", token_ids=ids, answer="", metadata_json="{}", group_key="0")
        self._rng = np.random.default_rng(0)

    async def step(self, step: int) -> None:
        """Move the samples of one step from ISSUED to TRAINED and out of the store."""
        count = self._settings.step_samples // self._settings.group_size
        groups = await asyncio.gather(*(self._collect(step, count * (step - 1) + index) for index in range(count)))
        batch = StepBatch(groups=list(groups), groups_accepted=count, prompts_drawn=count)
        self._ledger.lease(step, batch.sample_ids())
        number = TrainStepRequest.EXPERIENCES_FIELD_NUMBER
        for _ in encode_stream(TrainStepRequest(step=step), number, map(encode_parts, batch.experiences())):
            pass  # the trainer would get it
        lines = await asyncio.to_thread(to_lines, step, batch.trajectories())
        await asyncio.to_thread(append_lines, self._folder / "samples.jsonl", lines, sync=True)
        await asyncio.to_thread(compute_batch_metrics, batch, policy_version=0)
        self._ledger.acknowledge(step, policy_version=step, skipped_reason="", data_position=count * step)
        self._ledger.commit_checkpoint(step=step, data_position=count * step, policy_version=step)
        await self._store.release(step)

    async def _collect(self, step: int, position: int) -> SampleGroup:
        size = self._settings.group_size
        issued = await self._changes.write(self._ledger.issue, step=step, position=position, count=size)
        await self._changes.write(self._ledger.move, issued.sample_ids, SampleState.RUNNING)
        await self._changes.write(self._ledger.move, issued.sample_ids, SampleState.ROLLED)
        trajectories = tuple(self._trajectory(name, issued.group_id) for name in issued.sample_ids)
        group = SampleGroup(position=position, seed=0, trajectories=trajectories)
        await self._store.put(group)
        return group

    def _trajectory(self, sample_id: str, group_id: str) -> Trajectory:
        tokens = self._settings.tokens
        mask = np.arange(tokens) >= _PROMPT_TOKENS
        behavior = np.where(mask, np.float32(-1.0), np.float32(np.nan))
        sample = Sample(
            sample_id=sample_id,
            group_id=group_id,
            token_ids=self._rng.integers(0, 1000, tokens, dtype=np.int32),
            behavior_logprobs=behavior,
            action_mask=mask,
            loss_mask=mask,
            version_spans=(
                VersionSpan(policy_version=-1, token_count=_PROMPT_TOKENS),
                VersionSpan(policy_version=0, token_count=tokens - _PROMPT_TOKENS),
            ),
            temperature=1.0,
            score=float(int(sample_id[-1]) % 2),
            scorer="soak@1",
        )
        return Trajectory(prompt=self._prompt, sample=sample, completion=sample_id * 8)


async def _measure(settings: SoakSettings, folder: Path) -> dict[str, Any]:
    store, process, points = _Store(settings, folder), psutil.Process(), list[dict[str, float]]()
    steps = settings.samples // settings.step_samples
    before, began = time.process_time(), time.monotonic()
    for step in range(1, steps + 1):
        await store.step(step)
        if step % (steps // _POINTS) == 0 or step == steps // _POINTS // 10:  # one early point, after the first steps
            gc.collect()
            points.append(
                {
                    "samples": step * settings.step_samples,
                    "rss_mib": round(process.memory_info().rss / 2**20, 1),
                    "cpu_us_per_sample": round(
                        1e6 * (time.process_time() - before) / (step * settings.step_samples - _last(points)), 1
                    ),
                    "seconds": round(time.monotonic() - began, 1),
                    "segment_files": len(list((folder / "experiences").iterdir())),
                    "ledger_mib": round((folder / "ledger.sqlite").stat().st_size / 2**20, 1),
                }
            )
            before = time.process_time()
            print(points[-1], flush=True)
    return {"points": points, "growth_mib": round(points[-1]["rss_mib"] - points[1]["rss_mib"], 1)}


def _last(points: list[dict[str, float]]) -> float:
    return points[-1]["samples"] if points else 0


class SoakBenchmark(Benchmark[SoakSettings]):
    """Memory of the coordinator's process over the samples."""

    name = "store_soak"
    summary = "memory of the coordinator's store over a million samples"
    settings = SoakSettings
    libraries = ("protobuf", "numpy")

    def measure(self, settings: SoakSettings, run: BenchmarkRun) -> dict[str, Any]:
        return asyncio.run(_measure(settings, run.folder))

    def table(self, document: Mapping[str, Any]) -> list[str]:
        results = document["results"]
        lines = [
            f"{p['samples']:9.0f} samples  {p['rss_mib']:7.1f} MiB  {p['cpu_us_per_sample']:6.1f} us of CPU a sample  "
            f"ledger {p['ledger_mib']:6.1f} MiB"
            for p in results["points"]
        ]
        return [*lines, f"growth after the first tenth: {results['growth_mib']:.1f} MiB"]


if __name__ == "__main__":
    sys.exit(run_script(SoakBenchmark()))
