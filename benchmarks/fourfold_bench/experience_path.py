"""Measures the way of one step's samples from the rollout service through the coordinator to the trainer.

    this process (coordinator)      rollout process               trainer process
    Generate, one call per group -> servicer; its engine has
    packed completions           <- all samples ready
    check, join, encode
    TrainStep, 1 MiB chunks      ------------------------------>  decode, check every sample
    answer                       <------------------------------

The servicers, clients and channels are the real ones, over loopback; there is no vLLM, no DeepSpeed, no sampling and no
training. A run lasts from the first Generate to the answer of TrainStep.

    python -m fourfold_bench.experience_path [--group-size 25]
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import psutil

from fourfold.arrays import Sample
from fourfold.config import Config
from fourfold.errors import ConfigError, Internal
from fourfold.host.process_tree import die_with_parent
from fourfold.rollout.client import AsyncRolloutClient
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rollout.v1 import rollout_service_pb2_grpc as rollout_grpc
from fourfold.rpc.channel import open_channel
from fourfold.rpc.codec import encode
from fourfold.rpc.limits import Quotas
from fourfold.rpc.server import Server
from fourfold.security.principal import UNLIMITED
from fourfold.trainer.client import AsyncTrainerClient
from fourfold.trainer.v1 import trainer_service_pb2 as trainer
from fourfold.trainer.v1 import trainer_service_pb2_grpc as trainer_grpc
from fourfold_bench.harness import Benchmark, BenchmarkRun, BenchmarkSettings, option, run_script
from fourfold_bench.processes import BenchProcesses
from fourfold_bench.record import medians
from fourfold_coordinator.data.prompts import Prompt
from fourfold_coordinator.state.samples import build_sample, check_completions
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PathSettings(BenchmarkSettings):
    """The options of the experience path."""

    samples: int = option("samples of one step", default=1000, least=1)
    tokens: int = option("tokens of one sample, prompt and completion", default=1024, above=PROMPT_TOKENS + 1)
    group_size: int = option("samples of one Generate call", default=8, least=2)
    runs: int = option(default=15, least=1)
    warmup: int = option(default=3, least=0)
    prompt_tokens: int = PROMPT_TOKENS

    def check(self) -> None:
        if self.samples % self.group_size:
            raise ConfigError(f"--samples {self.samples}: it must be a multiple of --group-size {self.group_size}")


class ReadyEngine:
    """A `RolloutEngine` that answers at once."""

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
        self._given = 0
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
        for request in requests:
            self._given += 1
            request.sink.put(request.index, self._outputs[self._given % _READY_SAMPLES])
        return []

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

    def check_step(self, step: int) -> bool:
        """Return that the step is new."""
        return True

    async def run(self, _phase: object, _timeout: float, method: Callable[..., StepAnswer], *args: Any) -> StepAnswer:
        """Call a method of the core at once; the real core calls it in the engine's thread."""
        return method(*args)

    def train_step(self, step: int, samples: list[Sample], _batch_sha256: str) -> StepAnswer:
        tokens = float(sum(len(sample.token_ids) for sample in samples))
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


async def _serve(role: str, settings: PathSettings) -> None:
    """Serve one of the two services until the parent ends this process."""
    die_with_parent()
    server = Server(listen="127.0.0.1:0", security=None)
    {"rollout": _add_rollout, "trainer": _add_trainer}[role](server, settings)
    target = await server.start()
    server.set_ready(True)
    print(f"READY {target}", flush=True)
    await asyncio.Event().wait()


class _Coordinator:
    """Moves the samples with the coordinator's own functions."""

    def __init__(self, settings: PathSettings, rollout_target: str, trainer_target: str) -> None:
        self._settings = settings
        self._rollout = AsyncRolloutClient(open_channel(rollout_target, None), peer="rollout")
        self._trainer = AsyncTrainerClient(open_channel(trainer_target, None), peer="trainer")
        ids = np.arange(PROMPT_TOKENS, dtype=np.int32)
        self._prompt = Prompt(index=0, text="", token_ids=ids, answer="", metadata_json="{}", group_key="0")

    async def run(self, step: int) -> dict[str, float]:
        """Move the samples of one step; return milliseconds by phase."""
        settings, start = self._settings, time.perf_counter()
        calls = (self._generate(f"{step}-{i}") for i in range(settings.samples // settings.group_size))
        groups = await asyncio.gather(*calls)
        generated = time.perf_counter()
        # A generator: samples are encoded while the ones before them are sent, as in the coordinator's loop.
        experiences = (encode(sample) for group in groups for sample in group)
        response = await self._trainer.train_step(step, experiences, timeout=_TIMEOUT)
        end = time.perf_counter()
        trained = response.metrics["train/tokens_per_step"]
        if trained != settings.samples * settings.tokens:
            raise Internal(f"{trained:.0f} tokens arrived; {settings.samples} x {settings.tokens} were sent")
        return {"generate": 1e3 * (generated - start), "train": 1e3 * (end - generated), "total": 1e3 * (end - start)}

    async def _generate(self, request_id: str) -> list[Sample]:
        """Return the samples of one group."""
        request = rollout.GenerateRequest(
            request_id=request_id,
            prompt_token_ids=self._prompt.token_ids.tolist(),
            sampling_params=rollout.SamplingParams(temperature=1.0, max_tokens=self._settings.tokens - PROMPT_TOKENS),
            sample_count=self._settings.group_size,
        )
        completions = await self._rollout.complete(request, timeout=_TIMEOUT)
        check_completions(completions, peer="rollout", vocabulary_size=VOCABULARY_SIZE, newest_version=0)
        samples = []
        for completion in completions:
            name = f"{request_id}-{completion.sample_index}"
            sample = build_sample(self._prompt, completion, sample_id=name, group_id=request_id, temperature=1.0)
            # The score stands for the answer of a reward service.
            samples.append(replace(sample, score=float(completion.sample_index % 2), scorer="ready@1"))
        return samples


async def _measure(settings: PathSettings, processes: BenchProcesses, targets: Sequence[str]) -> dict[str, Any]:
    coordinator = _Coordinator(settings, *targets)
    pids = {role: processes.pid(role) for role in ("rollout", "trainer")} | {"coordinator": psutil.Process().pid}
    gc.collect()
    gc.freeze()
    for step in range(settings.warmup):
        await coordinator.run(step + 1)
    before = {name: _cpu_seconds(pid) for name, pid in pids.items()}
    runs = [await coordinator.run(settings.warmup + step + 1) for step in range(settings.runs)]
    cpu = {name: round(1000 * (_cpu_seconds(pid) - before[name]) / settings.runs, 1) for name, pid in pids.items()}
    return {"phases": {name: medians([run[name] for run in runs]) for name in runs[0]}, "cpu_ms_per_run": cpu}


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
            for role in ("rollout", "trainer"):
                processes.start(role, "-m", "fourfold_bench.experience_path", _SERVE, role, str(given))
            targets = processes.ready("rollout", "trainer", timeout=_READY_SECONDS)
            return asyncio.run(_measure(settings, processes, targets))

    def table(self, document: Mapping[str, Any]) -> list[str]:
        phases, cpu = document["results"]["phases"], document["results"]["cpu_ms_per_run"]
        lines = [
            f"{name:10} median {phase['median_ms']:7.1f} ms   best {phase['min_ms']:7.1f} ms"
            for name, phase in phases.items()
        ]
        return [*lines, "CPU per run: " + ", ".join(f"{name} {value:.0f} ms" for name, value in cpu.items())]


if __name__ == "__main__":
    if sys.argv[1:2] == [_SERVE]:
        asyncio.run(_serve(sys.argv[2], PathSettings.read(Path(sys.argv[3]))))
    sys.exit(run_script(PathBenchmark()))
