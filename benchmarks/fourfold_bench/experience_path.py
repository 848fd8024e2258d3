"""Measures the way of one step's samples from the rollout service through the coordinator to the trainer.

    this process (coordinator)      rollout, reward processes     trainer process
    each group, beside the others:
    Generate                     -> servicer; its engine has
    packed completions           <- all samples ready
    check, join, decode the text
    Score                        -> answers at once
    arrays to a segment file, synced; rows to the ledger
    the whole batch:
    lease, encode
    TrainStep, 1 MiB chunks      ------------------------------>  decode, check every sample
    metrics, acknowledge, samples.jsonl, release

The servicers, clients, channels, ledger and store are the real ones, over loopback; there is no vLLM, no DeepSpeed, no
sampling, no scoring and no training. A run lasts from the first Generate to the released segment.

The CPU time of the coordinator per sample and the longest gap of its event loop are those of all of this.

    python -m fourfold_bench.experience_path [--group-size 25]
"""

from __future__ import annotations

import asyncio
import gc
import json
import string
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import psutil

from fourfold.config import Config
from fourfold.errors import ConfigError, Internal
from fourfold.host.disk import append_lines
from fourfold.host.process_tree import die_with_parent
from fourfold.model.tokenizer import Tokenizer
from fourfold.reward.client import AsyncRewardClient
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold.reward.v1 import reward_service_pb2_grpc as reward_grpc
from fourfold.rollout.client import AsyncRolloutClient
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rollout.v1 import rollout_service_pb2_grpc as rollout_grpc
from fourfold.rpc.channel import open_channel
from fourfold.rpc.limits import Quotas
from fourfold.rpc.server import Server
from fourfold.sample.columns import Samples
from fourfold.security.principal import UNLIMITED
from fourfold.trainer.client import AsyncTrainerClient
from fourfold.trainer.v1 import trainer_service_pb2 as trainer
from fourfold.trainer.v1 import trainer_service_pb2_grpc as trainer_grpc
from fourfold_bench.harness import Benchmark, BenchmarkRun, BenchmarkSettings, option, run_script
from fourfold_bench.processes import BenchProcesses
from fourfold_bench.record import medians
from fourfold_coordinator.data.prompts import Prompt
from fourfold_coordinator.data.texts import TextDecoder
from fourfold_coordinator.reporting.batch_metrics import compute_batch_metrics
from fourfold_coordinator.rewards.deployment_calls import score_item
from fourfold_coordinator.routing.replica import ScorerInputs
from fourfold_coordinator.state.experiences import ExperienceStore
from fourfold_coordinator.state.files import DiskWriter
from fourfold_coordinator.state.group_commit import GroupCommit
from fourfold_coordinator.state.ledger import Ledger, SampleState
from fourfold_coordinator.state.run_board import RunBoard
from fourfold_coordinator.state.samples import (
    SampleGroup,
    StepBatch,
    Trajectory,
    build_sample,
    check_completions,
    to_lines,
)
from fourfold_coordinator.state.segments import SegmentFiles
from fourfold_coordinator.training.producer import GROUPS_PER_TURN
from fourfold_rollout.engine import EngineDescription, EngineLoad, EngineSample, Finish, SampleOutput, SampleRequest
from fourfold_rollout.generate.admission import GenerateLimits
from fourfold_rollout.generate.servicer import RolloutServicer, ServedModel
from fourfold_rollout.update.controller import WeightController
from fourfold_trainer.checkpoint.store import StepAnswer
from fourfold_trainer.service.servicer import TrainerServicer

VOCABULARY_SIZE: Final = 49_152
PROMPT_TOKENS: Final = 128
_TIMEOUT: Final = 60.0
_READY_SECONDS: Final = 60.0
_READY_SAMPLES: Final = 64
_SERVE: Final = "--serve"
_ROLES: Final = ("rollout", "reward", "trainer")
_PHASES: Final = ("collect", "train", "record")
_WATCH_SECONDS: Final = 0.002
_FLUSH_SECONDS: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class PathSettings(BenchmarkSettings):
    """The options of the experience path."""

    samples: int = option("samples of one step", default=1000, least=1)
    tokens: int = option("tokens of one sample, prompt and completion", default=1024, above=PROMPT_TOKENS + 1)
    group_size: int = option("samples of one Generate call", default=8, least=2)
    flushes: int = option("messages with tokens of unfinished samples in one Generate call", default=0, least=0)
    runs: int = option(default=15, least=1)
    warmup: int = option(default=3, least=0)
    prompt_tokens: int = PROMPT_TOKENS

    def check(self) -> None:
        if self.samples % self.group_size:
            raise ConfigError(f"--samples {self.samples}: it must be a multiple of --group-size {self.group_size}")


class ReadyEngine:
    """A `RolloutEngine` that answers at once; with flushes, in parts a few milliseconds apart."""

    def __init__(self, settings: PathSettings) -> None:
        rng = np.random.default_rng(0)
        count = settings.tokens - PROMPT_TOKENS
        self._outputs = [
            SampleOutput(
                token_ids=rng.integers(0, VOCABULARY_SIZE, count, dtype=np.int32),
                logprobs=-rng.exponential(size=count).astype(np.float32),
                finish=Finish.LENGTH,
            )
            for _ in range(_READY_SAMPLES)
        ]
        self._given, self._flushes = 0, settings.flushes
        self._tasks: set[asyncio.Task[None]] = set()
        # As in the middle of a step: for an idle engine the servicer waits some milliseconds to coalesce calls.
        self.running_count = 1
        self.description = EngineDescription(
            version="ready",
            device_type="cpu",
            device_uuids=(),
            backends=(),
            worker_count=1,
            vocabulary_size=VOCABULARY_SIZE,
            max_context_tokens=settings.tokens,
            kv_cache_tokens=0,
        )

    def load(self) -> EngineLoad:
        return EngineLoad(running_samples=0, sampled_tokens=0, held_tokens=0)

    async def submit(self, requests: Sequence[SampleRequest]) -> Sequence[EngineSample]:
        outputs = []
        for request in requests:
            self._given += 1
            outputs.append((request, self._outputs[self._given % _READY_SAMPLES]))
        if not self._flushes:
            for request, output in outputs:
                request.sink.put(request.index, output)
        else:
            self._tasks.add(task := asyncio.create_task(self._put_parts(outputs)))
            task.add_done_callback(self._tasks.discard)
        return []

    async def _put_parts(self, outputs: Sequence[tuple[SampleRequest, SampleOutput]]) -> None:
        """Put equal parts of all samples, `flushes` times before the last; those of one time leave in one message."""
        for part in range(self._flushes + 1):
            for request, output in outputs:
                ids = np.array_split(output.token_ids, self._flushes + 1)[part]
                logprobs = np.array_split(output.logprobs, self._flushes + 1)[part]
                finish = output.finish if part == self._flushes else None
                request.sink.put(request.index, SampleOutput(token_ids=ids, logprobs=logprobs, finish=finish))
            await asyncio.sleep(_FLUSH_SECONDS)

    async def abandon(self, samples: Sequence[EngineSample]) -> None:
        """Do nothing: no sample runs."""


class ReadyCore:
    """A core of the trainer service that trains nothing: the batch arrives, checked and as arrays."""

    def __init__(self, settings: PathSettings) -> None:
        self.engine = SimpleNamespace(vocabulary_size=VOCABULARY_SIZE)
        self.config = Config.model_validate(
            {
                "name": "path",
                "steps": 1,
                "model": {"source": "none", "max_context_tokens": settings.tokens},
                "data": {"train": {"path": "none.jsonl"}},
                "sampling": {"max_new_tokens": settings.tokens - PROMPT_TOKENS},
                "batch": {
                    "prompts_per_step": settings.samples // settings.group_size,
                    "group_size": settings.group_size,
                    "tokens_per_micro_batch": settings.tokens,
                },
            }
        )

    def check_step(self, step: int, *, running: Collection[int] = ()) -> bool:
        """Return that the step is new."""
        return True

    async def run(self, _phase: object, _timeout: float, method: Callable[..., StepAnswer], *args: Any) -> StepAnswer:
        """Call a method of the core at once; the real core calls it in the engine's thread."""
        return method(*args)

    def train_step(self, step: int, samples: Samples, _batch_sha256: str) -> StepAnswer:
        tokens = float(samples.starts[-1])
        return StepAnswer(step=step, policy_version=step, skipped_reason="", metrics={"train/tokens_per_step": tokens})


def _add_rollout(server: Server, settings: PathSettings) -> None:
    engine: Any = ReadyEngine(settings)
    limits = GenerateLimits(
        max_context_tokens=settings.tokens,
        vocabulary_size=VOCABULARY_SIZE,
        max_concurrent_samples=2 * settings.samples,
        kv_cache_tokens=0,
        stop_token_ids=(),
    )
    model = ServedModel(name="ready", tokenizer_sha256=bytes(32), limits=limits)
    quotas = Quotas(lambda _principal: UNLIMITED)
    servicer = RolloutServicer(model, engine, WeightController(engine, update_timeout=_TIMEOUT), quotas)
    service = rollout.DESCRIPTOR.services_by_name["RolloutService"]
    server.add(service, rollout_grpc.add_RolloutServiceServicer_to_server, servicer)


def _add_trainer(server: Server, settings: PathSettings) -> None:
    core: Any = ReadyCore(settings)
    service = trainer.DESCRIPTOR.services_by_name["TrainerService"]
    server.add(service, trainer_grpc.add_TrainerServiceServicer_to_server, TrainerServicer(core))


class ReadyScorer(reward_grpc.RewardServiceServicer):
    """A reward service that scores at once."""

    async def GetInfo(self, request: reward.GetInfoRequest, context: Any) -> reward.GetInfoResponse:
        """Return that there are no limits."""
        return reward.GetInfoResponse(name="ready@1")

    async def Score(self, request: reward.ScoreRequest, context: Any) -> reward.ScoreResponse:
        """Return the score 0 or 1 for each sample."""
        names = [item.experience.sample_id for item in request.items]
        return reward.ScoreResponse(
            scores=[reward.SampleScore(sample_id=name, score=float(int(name[-1]) % 2)) for name in names]
        )


def _add_reward(server: Server, _settings: PathSettings) -> None:
    service = reward.DESCRIPTOR.services_by_name["RewardService"]
    server.add(service, reward_grpc.add_RewardServiceServicer_to_server, ReadyScorer())


async def _serve(role: str, settings: PathSettings) -> None:
    """Serve one of the services until the parent ends this process."""
    die_with_parent()
    server = Server(listen="127.0.0.1:0", security=None)
    {"rollout": _add_rollout, "reward": _add_reward, "trainer": _add_trainer}[role](server, settings)
    target = await server.start()
    server.set_ready(True)
    print(f"READY {target}", flush=True)
    await asyncio.Event().wait()


class _Coordinator:
    """Moves the samples with the coordinator's own functions."""

    def __init__(self, settings: PathSettings, folder: Path, targets: Mapping[str, str]) -> None:
        self._settings, self._folder = settings, folder
        self._rollout = AsyncRolloutClient(open_channel(targets["rollout"], None), peer="rollout")
        self._reward = AsyncRewardClient(open_channel(targets["reward"], None), peer="reward")
        self._trainer = AsyncTrainerClient(open_channel(targets["trainer"], None), peer="trainer")
        self._texts = TextDecoder(Tokenizer.load(_make_tokenizer(folder)).decode_batch)
        self._ledger = Ledger(folder / "ledger.sqlite")
        disk = DiskWriter(folder, RunBoard(name="path", step_count=1), wait_seconds=_TIMEOUT)
        self._changes = GroupCommit(self._ledger, disk)
        self._store = ExperienceStore(SegmentFiles(folder / "experiences"), self._ledger, disk)
        ids = np.arange(PROMPT_TOKENS, dtype=np.int32)
        self._prompt = Prompt(index=0, text="?", token_ids=ids, answer="", metadata_json="{}", group_key="0")

    async def run(self, step: int) -> dict[str, float]:
        """Move the samples of one step; return milliseconds by phase."""
        times, settings = [time.perf_counter()], self._settings
        count = settings.samples // settings.group_size
        tasks = []
        for index in range(count):
            tasks.append(asyncio.create_task(self._collect(step, count * step + index)))
            if len(tasks) % GROUPS_PER_TURN == 0:  # as the producer of the coordinator
                await asyncio.sleep(0)
        batch = StepBatch(groups=await asyncio.gather(*tasks), groups_accepted=count, prompts_drawn=count)
        times.append(time.perf_counter())
        self._ledger.lease(step, batch.sample_ids())
        # A generator: samples are encoded while the ones before them are sent, as in the coordinator's loop.
        response = await self._trainer.train_step(step, batch.experiences(), timeout=_TIMEOUT)
        times.append(time.perf_counter())
        await self._record(step, batch)
        times.append(time.perf_counter())
        trained = response.metrics["train/tokens_per_step"]
        if trained != settings.samples * settings.tokens:
            raise Internal(f"{trained:.0f} tokens arrived; {settings.samples} x {settings.tokens} were sent")
        phases = dict(zip(_PHASES, np.diff(times).tolist(), strict=True))
        return {name: 1e3 * seconds for name, seconds in (phases | {"total": times[-1] - times[0]}).items()}

    async def _collect(self, step: int, position: int) -> SampleGroup:
        """Return one group, sampled, scored and durable."""
        group = await self._score(await self._generate(step, position))
        await self._store.put(group)
        return group

    async def _generate(self, step: int, position: int) -> SampleGroup:
        """Return the samples of one group, without scores."""
        count = self._settings.group_size
        issued = await self._changes.write(self._ledger.issue, step=step, position=position, count=count)
        await self._changes.write(self._ledger.move, issued.sample_ids, SampleState.RUNNING)
        request = rollout.GenerateRequest(
            request_id=issued.group_id,
            prompt_token_ids=self._prompt.token_ids.tolist(),
            sampling_params=rollout.SamplingParams(temperature=1.0, max_tokens=self._settings.tokens - PROMPT_TOKENS),
            sample_count=self._settings.group_size,
        )
        completions = await self._rollout.complete(request, timeout=_TIMEOUT)
        check_completions(completions, peer="rollout", vocabulary_size=VOCABULARY_SIZE, newest_version=0)
        await self._changes.write(self._ledger.move, issued.sample_ids, SampleState.ROLLED)
        texts = await self._texts.decode([c.token_ids for c in completions])
        trajectories = []
        for name, completion, text in zip(issued.sample_ids, completions, texts, strict=True):
            sample = build_sample(self._prompt, completion, sample_id=name, group_id=issued.group_id, temperature=1.0)
            trajectories.append(Trajectory(prompt=self._prompt, segments=(sample,), completion=text))
        return SampleGroup(position=position, seed=0, trajectories=tuple(trajectories))

    async def _score(self, group: SampleGroup) -> SampleGroup:
        items = [score_item(t, ScorerInputs()) for t in group.trajectories]
        scores = await self._reward.score(items, timeout=_TIMEOUT)
        pairs = zip(group.trajectories, scores, strict=True)
        return replace(group, trajectories=tuple(t.with_values(score=s.score, scorer="ready@1") for t, s in pairs))

    async def _record(self, step: int, batch: StepBatch) -> None:
        """Do what the coordinator does with a trained batch; its checkpoint is that of the step."""
        await asyncio.to_thread(compute_batch_metrics, batch, policy_version=0)
        lines = await asyncio.to_thread(to_lines, step, batch.trajectories())
        self._ledger.acknowledge(step, policy_version=step, skipped_reason="", data_position=batch.prompts_drawn)
        await asyncio.to_thread(append_lines, self._folder / "samples.jsonl", lines, sync=True)
        await self._store.release(step)


def _make_tokenizer(folder: Path) -> Path:
    """Write the tokenizer of a model: byte-level, with words of four letters on average."""
    rng = np.random.default_rng(0)
    words = {"".join(rng.choice(list(string.ascii_lowercase), rng.integers(3, 6))) for _ in range(VOCABULARY_SIZE)}
    words |= {f"w{index:06d}" for index in range(VOCABULARY_SIZE - len(words))}
    vocabulary = {word: index for index, word in enumerate(sorted(words))}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, "decoder": decoder}))
    return folder


class _LoopGap:
    """The longest time that the event loop did nothing else."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def watch(self) -> None:
        """Measure until cancelled."""
        while True:
            began = time.perf_counter()
            await asyncio.sleep(_WATCH_SECONDS)
            self.seconds = max(self.seconds, time.perf_counter() - began - _WATCH_SECONDS)


async def _measure(
    settings: PathSettings, folder: Path, processes: BenchProcesses, targets: Mapping[str, str]
) -> dict[str, Any]:
    coordinator = _Coordinator(settings, folder, targets)
    pids = {role: processes.pid(role) for role in _ROLES} | {"coordinator": psutil.Process().pid}
    gc.collect()
    gc.freeze()
    for step in range(settings.warmup):
        await coordinator.run(step + 1)
    before = {name: _cpu_seconds(pid) for name, pid in pids.items()}
    gap = _LoopGap()
    watch = asyncio.create_task(gap.watch())
    runs = [await coordinator.run(settings.warmup + step + 1) for step in range(settings.runs)]
    watch.cancel()
    cpu = {name: round(1000 * (_cpu_seconds(pid) - before[name]) / settings.runs, 1) for name, pid in pids.items()}
    return {
        "phases": {name: medians([run[name] for run in runs]) for name in runs[0]},
        "cpu_ms_per_run": cpu,
        "coordinator_us_per_sample": round(1000 * cpu["coordinator"] / settings.samples),
        "longest_loop_gap_ms": round(1e3 * gap.seconds, 1),
    }


def _cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


class PathBenchmark(Benchmark[PathSettings]):
    """Milliseconds for the samples of one step."""

    name = "experience_path"
    summary = "the way of one step's samples from the rollout service to the trainer"
    settings = PathSettings
    libraries = ("grpcio", "protobuf", "numpy")

    def measure(self, settings: PathSettings, run: BenchmarkRun) -> dict[str, Any]:
        given = settings.write(run.folder / "settings.json")
        with BenchProcesses(run.folder) as processes:
            for role in _ROLES:
                processes.start(role, "-m", "fourfold_bench.experience_path", _SERVE, role, str(given))
            targets = processes.ready(*_ROLES, timeout=_READY_SECONDS)
            by_role = dict(zip(_ROLES, targets, strict=True))
            return asyncio.run(_measure(settings, run.folder, processes, by_role))

    def table(self, document: Mapping[str, Any]) -> list[str]:
        results = document["results"]
        phases, cpu = results["phases"], results["cpu_ms_per_run"]
        lines = [
            f"{name:10} median {phase['median_ms']:7.1f} ms   best {phase['min_ms']:7.1f} ms"
            for name, phase in phases.items()
        ]
        return [
            *lines,
            "CPU per run: " + ", ".join(f"{name} {value:.0f} ms" for name, value in cpu.items()),
            f"coordinator: {results['coordinator_us_per_sample']} us of CPU per sample; "
            f"longest gap of its event loop {results['longest_loop_gap_ms']:.0f} ms",
        ]


if __name__ == "__main__":
    if sys.argv[1:2] == [_SERVE]:
        asyncio.run(_serve(sys.argv[2], PathSettings.read(Path(sys.argv[3]))))
    sys.exit(run_script(PathBenchmark()))
