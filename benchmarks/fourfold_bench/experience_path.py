"""What it costs to bring one step's samples from rollout through the coordinator to the trainer.

    this process (coordinator)      rollout process               trainer process
    Generate, one call per group -> servicer; an engine that
    packed completions           <- has its samples ready
    check, join, encode
    TrainStep, 1 MiB chunks      ------------------------------>  decode, check every sample
    answer                       <------------------------------

Real servicers, clients and channel settings over loopback; neither vLLM nor DeepSpeed is needed. A run is timed from
the first Generate to the answer of TrainStep; nothing overlaps that a real step would not overlap, and no sampling or
training is in it. Run it alone on the machine:

    python -m fourfold_bench.experience_path [--group-size 25]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from fourfold.arrays import Sample
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
from fourfold_bench import record
from fourfold_coordinator.data.prompts import Prompt
from fourfold_coordinator.state.samples import build_sample, check_completions
from fourfold_rollout.engine import EngineDescription, EngineSample, Finish, SampleOutput, SampleRequest
from fourfold_rollout.generate.admission import GenerateLimits
from fourfold_rollout.generate.servicer import RolloutServicer, ServedModel
from fourfold_rollout.update.controller import WeightController
from fourfold_trainer.checkpoint.store import StepAnswer
from fourfold_trainer.service.servicer import TrainerServicer

VOCABULARY_SIZE: Final = 49_152
PROMPT_TOKENS: Final = 128
TIMEOUT: Final = 60.0
LIBRARIES: Final = ("grpcio", "protobuf", "numpy")


class ReadyEngine:
    """Answers at once."""

    def __init__(self, context_tokens: int) -> None:
        rng = np.random.default_rng(0)
        count = context_tokens - PROMPT_TOKENS
        self._outputs = [
            SampleOutput(
                token_ids=rng.integers(0, VOCABULARY_SIZE, count, dtype=np.int32),
                logprobs=-rng.exponential(size=count).astype(np.float32),
                finish=Finish.LENGTH,
            )
            for _ in range(64)
        ]
        self._given = 0
        # As in the middle of a step: an idle engine would wait some milliseconds for calls to come together.
        self.running_count = 1
        self.description = EngineDescription(
            version="ready",
            device_type="cpu",
            device_uuids=(),
            backends=(),
            worker_count=1,
            vocabulary_size=VOCABULARY_SIZE,
            max_context_tokens=context_tokens,
            kv_cache_tokens=0,
        )

    async def submit(self, requests: Sequence[SampleRequest]) -> Sequence[EngineSample]:
        for request in requests:
            self._given += 1
            request.sink.put(request.index, self._outputs[self._given % len(self._outputs)])
        return []

    async def abandon(self, samples: Sequence[EngineSample]) -> None:
        return None


async def serve_rollout(server: Server, options: argparse.Namespace) -> None:
    """Put the real rollout servicer before an engine that is ready."""
    engine: Any = ReadyEngine(options.tokens)
    limits = GenerateLimits(
        max_context_tokens=options.tokens,
        vocabulary_size=VOCABULARY_SIZE,
        max_concurrent_samples=2 * options.samples,
        kv_cache_tokens=0,
        stop_token_ids=(),
    )
    model = ServedModel(name="ready", tokenizer_sha256=bytes(32), limits=limits)
    quotas = Quotas(lambda _principal: UNLIMITED)
    servicer = RolloutServicer(model, engine, WeightController(engine, update_timeout=TIMEOUT), quotas)
    service = rollout.DESCRIPTOR.services_by_name["RolloutService"]
    server.add(service, rollout_grpc.add_RolloutServiceServicer_to_server, servicer)


class ReadyCore:
    """Trains nothing: the batch has arrived, checked and as arrays."""

    def __init__(self, context_tokens: int) -> None:
        self.config = ConfigView(model=ModelView(max_context_tokens=context_tokens))
        self.vocabulary_size = VOCABULARY_SIZE

    async def train_step(self, step: int, samples: list[Sample], batch_sha256: str, *, timeout: float) -> StepAnswer:
        tokens = sum(len(sample.token_ids) for sample in samples)
        return StepAnswer(
            step=step, policy_version=step, skipped_reason="", metrics={"train/tokens_per_step": float(tokens)}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """What the servicer reads of config.model."""

    max_context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigView:
    """What the servicer reads of the recipe."""

    model: ModelView


async def serve_trainer(server: Server, options: argparse.Namespace) -> None:
    """Put the real trainer servicer before a core that trains nothing."""
    core: Any = ReadyCore(options.tokens)
    service = trainer.DESCRIPTOR.services_by_name["TrainerService"]
    server.add(service, trainer_grpc.add_TrainerServiceServicer_to_server, TrainerServicer(core))


async def serve(options: argparse.Namespace) -> None:
    """Be one of the two services until the parent ends it."""
    die_with_parent()
    server = Server(listen="127.0.0.1:0", security=None)
    await {"rollout": serve_rollout, "trainer": serve_trainer}[options.serve](server, options)
    target = await server.start()
    server.set_ready(True)
    print(target, flush=True)
    await asyncio.Event().wait()


@dataclass(slots=True)
class Timings:
    """Milliseconds of every run."""

    phases: dict[str, list[float]] = field(default_factory=dict)

    def add(self, **seconds: float) -> None:
        for name, value in seconds.items():
            self.phases.setdefault(name, []).append(1000 * value)


class Coordinator:
    """Drives the path with the coordinator's own functions."""

    def __init__(self, options: argparse.Namespace, rollout_target: str, trainer_target: str) -> None:
        self._options = options
        self._rollout = AsyncRolloutClient(open_channel(rollout_target, None), peer="rollout")
        self._trainer = AsyncTrainerClient(open_channel(trainer_target, None), peer="trainer")
        ids = np.arange(PROMPT_TOKENS, dtype=np.int32)
        self._prompt = Prompt(index=0, text="", token_ids=ids, answer="", metadata_json="{}", group_key="0")

    async def run(self, step: int, timings: Timings) -> None:
        """One step's samples, all the way."""
        options = self._options
        start = time.perf_counter()
        groups = await asyncio.gather(
            *(self._generate(f"{step}-{i}") for i in range(options.samples // options.group_size))
        )
        generated = time.perf_counter()
        # Packed one by one, while the ones before travel, as the coordinator's loop does.
        experiences = (encode(sample) for group in groups for sample in group)
        response = await self._trainer.train_step(step, experiences, timeout=TIMEOUT)
        end = time.perf_counter()
        trained = response.metrics["train/tokens_per_step"]
        if trained != options.samples * options.tokens:
            raise RuntimeError(f"{trained:.0f} tokens arrived; {options.samples} x {options.tokens} were sent")
        timings.add(generate=generated - start, train=end - generated, total=end - start)

    async def _generate(self, request_id: str) -> list[Sample]:
        """One group, from the request to its samples."""
        request = rollout.GenerateRequest(
            request_id=request_id,
            prompt_token_ids=self._prompt.token_ids.tolist(),
            sampling_params=rollout.SamplingParams(temperature=1.0, max_tokens=self._options.tokens - PROMPT_TOKENS),
            sample_count=self._options.group_size,
        )
        completions = await self._rollout.complete(request, timeout=TIMEOUT)
        check_completions(completions, peer="rollout", vocabulary_size=VOCABULARY_SIZE, newest_version=0)
        return [
            # A reward service has answered.
            replace(
                build_sample(
                    self._prompt,
                    completion,
                    sample_id=f"{request_id}-{completion.sample_index}",
                    group_id=request_id,
                    temperature=1.0,
                ),
                score=float(completion.sample_index % 2),
                scorer="ready@1",
            )
            for completion in completions
        ]


@dataclass(slots=True, kw_only=True)
class Child:
    """One service process."""

    process: subprocess.Popen[str]
    target: str

    def cpu_seconds(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system


def start(role: str, options: argparse.Namespace) -> Child:
    """Start one service and wait until it listens."""
    sizes = [f"--samples={options.samples}", f"--tokens={options.tokens}"]
    command = [sys.executable, "-m", "fourfold_bench.experience_path", "--serve", role, *sizes]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).resolve().parents[2])
    assert process.stdout is not None
    target = process.stdout.readline().strip()
    if not target:
        raise RuntimeError(f"the {role} process ended with exit code {process.wait(10)} before it listened")
    return Child(process=process, target=target)


async def measure(options: argparse.Namespace, children: dict[str, Child]) -> dict[str, Any]:
    """Do all runs; return the results."""
    coordinator = Coordinator(options, children["rollout"].target, children["trainer"].target)
    gc.collect()
    gc.freeze()
    for step in range(options.warmup):
        await coordinator.run(step + 1, Timings())
    timings, before = Timings(), cpu_seconds(children)
    for step in range(options.runs):
        await coordinator.run(options.warmup + step + 1, timings)
    after = cpu_seconds(children)
    phases = {name: record.summary(values) for name, values in timings.phases.items()}
    cpu = {name: round(1000 * (after[name] - before[name]) / options.runs, 1) for name in after}
    return {"phases": phases, "cpu_ms_per_run": cpu}


def cpu_seconds(children: dict[str, Child]) -> dict[str, float]:
    """Return the CPU seconds of all three processes."""
    return {name: child.cpu_seconds() for name, child in children.items()} | {"coordinator": own_cpu()}


def own_cpu() -> float:
    """Return the CPU seconds of this process."""
    times = psutil.Process().cpu_times()
    return times.user + times.system


def main() -> int:
    """Run the benchmark, or one of its services."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=1024, help="of one sample, prompt and completion")
    parser.add_argument("--group-size", type=int, default=8, help="samples of one Generate call")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    parser.add_argument("--serve", choices=["rollout", "trainer"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options))
        return 0
    if options.samples % options.group_size or options.tokens <= PROMPT_TOKENS + 1:
        parser.error(f"--samples must be a multiple of --group-size, and --tokens above {PROMPT_TOKENS + 1}")
    children: dict[str, Child] = {}
    try:
        for role in ("rollout", "trainer"):
            children[role] = start(role, options)
        results = asyncio.run(measure(options, children))
    finally:
        for child in children.values():
            child.process.kill()
    for name, phase in results["phases"].items():
        print(f"{name:10} median {phase['median_ms']:7.1f} ms   best {phase['min_ms']:7.1f} ms")
    print("CPU per run:", ", ".join(f"{name} {value:.0f} ms" for name, value in results["cpu_ms_per_run"].items()))
    if options.save:
        parameters = {k: getattr(options, k) for k in ("samples", "tokens", "group_size", "runs", "warmup")}
        parameters["prompt_tokens"] = PROMPT_TOKENS
        print(record.write("experience_path", parameters=parameters, results=results, libraries=LIBRARIES))
    return 0


if __name__ == "__main__":
    sys.exit(main())
