"""Starts reward services and calls them as the coordinator does: whole batches, then groups at fixed times.

The CPU time of the scorer is that of the service and its workers, from the kernel's counters. The CPU time of the
coordinator is that of this process, which scores trajectories with the coordinator's own code: routing, items, calls,
checks, mixing.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import string
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import psutil

from fourfold.config import Config, from_tables
from fourfold.errors import FourfoldError, Internal
from fourfold.reward.client import AsyncRewardClient
from fourfold.reward.v1 import reward_service_pb2 as pb
from fourfold.types.v1.experience_pb2 import Experience
from fourfold_bench.harness import BenchmarkRun
from fourfold_bench.processes import BenchProcesses, say
from fourfold_bench.reward.benchmark import HERE, RewardSettings
from fourfold_bench.reward.coordinator import ScoringCoordinator, coordinator_of, trajectories_of
from fourfold_coordinator.state.samples import Trajectory

_FUNCTION: Final = """
import time

def reward(sample):
    if sample.completion.startswith("hang"):
        time.sleep(1000)
    return float(len(sample.completion))
"""
_START_SECONDS: Final = 60.0
_CALL_SECONDS: Final = 60.0
_WATCH_SECONDS: Final = 0.25
_WARM_UP_CALLS: Final = 3
_WARM_UP_SECONDS: Final = 8.0  # of the open loop, until the first samples have hung for their whole time
_HANGING: Final = "hanging"
_QUIET: Final = "none hang"
_SEED: Final = 7


@dataclass(frozen=True, slots=True)
class _Side:
    """One service that is measured."""

    name: str
    client: AsyncRewardClient
    coordinator: ScoringCoordinator
    process: psutil.Process

    def cpu_seconds(self) -> tuple[float, float]:
        """Return the CPU time of the service, and of its workers, also of those that have ended."""
        times = self.process.cpu_times()
        workers = times.children_user + times.children_system
        for worker in self.process.children(recursive=True):
            try:
                each = worker.cpu_times()
            except psutil.NoSuchProcess:
                continue
            workers += each.user + each.system
        return times.user + times.system, workers


def measure(settings: RewardSettings, run: BenchmarkRun) -> dict[str, Any]:
    """Measure each side; return JSON values.

    Raises:
        Unavailable: a service died; with the end of its log.
        DeadlinePassed: a service did not start in time.
    """
    with BenchProcesses(run.folder) as processes:
        (run.folder / "function.py").write_text(_FUNCTION, encoding="utf-8")
        path = processes.write_recipe(_recipe(settings, run))
        targets = {}
        for number, (side, variables) in enumerate(settings.sides.items()):
            name = f"reward-{number}"
            listen = ("--listen", "127.0.0.1:0", "--run-dir", str(run.folder / f"run-{number}"))
            processes.start(name, "-m", "fourfold", "serve", "reward", path, *listen, env=variables)
            (targets[side],) = processes.ready(name, timeout=_START_SECONDS)
        pids = {side: processes.pid(f"reward-{number}") for number, side in enumerate(targets)}
        return asyncio.run(_measure(settings, run, targets, pids))


def _recipe(settings: RewardSettings, run: BenchmarkRun) -> Config:
    return from_tables(
        {
            "name": "bench-reward",
            "steps": 1,
            "model": {"source": "none"},
            "data": {"train": {"path": "none.jsonl"}},
            "sampling": {"max_new_tokens": 1},
            "batch": {"prompts_per_step": 1, "group_size": 2},
            "reward": {
                "function": f"{run.folder / 'function.py'}:reward",
                "processes": settings.processes,
                "timeout_seconds": settings.timeout_seconds,
            },
        },
        source="the benchmark's recipe",
    )


async def _measure(
    settings: RewardSettings, run: BenchmarkRun, targets: Mapping[str, str], pids: Mapping[str, int]
) -> dict[str, Any]:
    texts = _texts(settings)
    async with AsyncExitStack() as stack:
        sides = []
        for name, target in targets.items():
            client = AsyncRewardClient(target)
            stack.push_async_callback(client.aclose)
            coordinator = await stack.enter_async_context(coordinator_of(target, batch=settings.batch))
            sides.append(_Side(name, client, coordinator, psutil.Process(pids[name])))
        cpu = await _measure_cpu(settings, sides, texts)
        if run.profile is not None:
            side = next(side for side in sides if side.name == HERE)
            run.profile.begin("reward", side.process.pid)
            for _ in range(5):
                await _run_calls(settings, side, texts)
            run.profile.end()
        return {"cpu": cpu, "open_loop": await _measure_open_loop(settings, sides, texts) if settings.seconds else {}}


def _texts(settings: RewardSettings) -> list[tuple[str, str]]:
    """Return prompts and completions: lines of words, with a few characters outside of ASCII."""
    generator = random.Random(_SEED)
    words = ["".join(generator.choices(string.ascii_lowercase, k=generator.randint(2, 9))) for _ in range(500)]
    words += ["\n", '"x"', "\u00e9", "= 12.5", "\\frac{1}{2}"] * 4

    def text(characters: int) -> str:
        return " ".join(generator.choices(words, k=characters))[:characters]

    return [(text(settings.prompt_chars), text(settings.completion_chars)) for _ in range(settings.batch)]


def make_item(number: int, prompt: str, completion: str) -> pb.ScoreItem:
    """Return an item with what the coordinator puts into one."""
    return pb.ScoreItem(
        experience=Experience(sample_id=f"s{number}", group_id=f"g{number // 8}"),
        prompt_text=prompt,
        completion_text=completion,
        answer="42",
        metadata_json="{}",
        prompt_messages_json="",
    )


# -- CPU time ---------------------------------------------------------------------------------------------------------


async def _measure_cpu(
    settings: RewardSettings, sides: Sequence[_Side], texts: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    runs: dict[str, list[dict[str, float]]] = {side.name: [] for side in sides}
    for side in sides:
        for _ in range(_WARM_UP_CALLS):
            await _call(side, trajectories_of(texts))
    for number in range(settings.runs):
        say(f"run {number + 1} of {settings.runs}")
        for side in sides:
            runs[side.name].append(await _run_calls(settings, side, texts))
    return {
        name: {key: round(statistics.median(each[key] for each in found), 2) for key in found[0]} | {"runs": found}
        for name, found in runs.items()
    }


async def _run_calls(settings: RewardSettings, side: _Side, texts: Sequence[tuple[str, str]]) -> dict[str, float]:
    trajectories = trajectories_of(texts)
    service, workers = side.cpu_seconds()
    coordinator, began = time.process_time(), time.monotonic()
    for _ in range(settings.calls):
        await _call(side, trajectories)
    coordinator, took = time.process_time() - coordinator, time.monotonic() - began
    after = side.cpu_seconds()
    per_sample = 1e6 / (settings.calls * len(texts))
    service, workers = (after[0] - service) * per_sample, (after[1] - workers) * per_sample
    return {
        "scorer_us": round(service + workers, 2),
        "service_us": round(service, 2),
        "workers_us": round(workers, 2),
        "coordinator_us": round(coordinator * per_sample, 2),
        "samples_per_second": round(settings.calls * len(texts) / took, 1),
    }


async def _call(side: _Side, trajectories: Sequence[Trajectory]) -> None:
    async with asyncio.timeout(_CALL_SECONDS):
        scored = await side.coordinator.score(trajectories)
    if wrong := [t for t in scored if t.sample.score != len(t.completion)]:
        raise Internal(f"{side.name}: a score is not that of the function: {wrong[0].sample.score}")


# -- open loop --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Load:
    """What one kind of load did to one side, over all rounds."""

    latencies: list[float] = field(default_factory=list)  # seconds; of groups without a hanging sample
    samples: int = 0
    wrong: int = 0
    cpu_seconds: float = 0.0
    service_bytes: list[list[int]] = field(default_factory=list)  # over time, for each round
    worker_bytes: list[int] = field(default_factory=list)
    workers_max: int = 0

    def document(self) -> dict[str, Any]:
        ordered = sorted(self.latencies)
        thirds = [(each[: len(each) // 3 or 1], each[-(len(each) // 3 or 1) :]) for each in self.service_bytes]
        return {
            "groups": len(ordered),
            "samples": self.samples,
            "wrong": self.wrong,
            "p50_ms": round(1e3 * statistics.median(ordered), 2),
            "p99_ms": round(1e3 * ordered[round(0.99 * (len(ordered) - 1))], 2),
            "max_ms": round(1e3 * ordered[-1], 2),
            "cpu_us_per_sample": round(1e6 * self.cpu_seconds / max(self.samples, 1), 1),
            "service_mib_first": round(max(statistics.median(first) for first, _ in thirds) / 2**20, 2),
            "service_mib_last": round(max(statistics.median(last) for _, last in thirds) / 2**20, 2),
            "workers_max": self.workers_max,
            "worker_mib": round(statistics.median(self.worker_bytes) / 2**20, 2),
        }


async def _measure_open_loop(
    settings: RewardSettings, sides: Sequence[_Side], texts: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    loads = {side.name: {_QUIET: _Load(), _HANGING: _Load()} for side in sides}
    for number in range(settings.rounds):
        for side in sides:
            for name, share in ((_QUIET, 0.0), (_HANGING, settings.hang_share)):
                say(f"open loop, round {number + 1} of {settings.rounds}: {side.name}, {name}")
                await _run_open_loop(settings, side, texts, share, loads[side.name][name], seed=number)
    return {side: {name: load.document() for name, load in found.items()} for side, found in loads.items()}


async def _run_open_loop(
    settings: RewardSettings, side: _Side, texts: Sequence[tuple[str, str]], share: float, load: _Load, *, seed: int
) -> None:
    """Send groups at fixed times, whether or not the ones before have been answered."""
    generator = random.Random(seed)
    loop = asyncio.get_running_loop()
    load.service_bytes.append([])
    watch = loop.create_task(_watch(side, load))
    calls: list[asyncio.Task[None]] = []
    interval = settings.group / settings.rate
    began, cpu = loop.time(), sum(side.cpu_seconds())
    for number in range(round((settings.seconds + _WARM_UP_SECONDS) / interval)):
        await asyncio.sleep(began + number * interval - loop.time())
        counted = number * interval >= _WARM_UP_SECONDS
        hangs = [generator.random() < share for _ in range(settings.group)]
        calls.append(loop.create_task(_call_group(settings, side, texts, number, hangs, load if counted else _Load())))
        load.samples += settings.group
    await asyncio.gather(*calls)
    load.cpu_seconds += sum(side.cpu_seconds()) - cpu
    watch.cancel()


async def _call_group(
    settings: RewardSettings,
    side: _Side,
    texts: Sequence[tuple[str, str]],
    number: int,
    hangs: Sequence[bool],
    load: _Load,
) -> None:
    wanted = [texts[(number * settings.group + at) % len(texts)] for at in range(settings.group)]
    items = [
        make_item(number * settings.group + at, prompt, "hang" if hangs[at] else completion)
        for at, (prompt, completion) in enumerate(wanted)
    ]
    began = time.monotonic()
    try:
        scores = await side.client.score(items, timeout=settings.timeout_seconds + 10)
    except FourfoldError as error:
        say(f"{side.name}: a call failed: {error.message}")
        load.wrong += settings.group
        return
    if not any(hangs):
        load.latencies.append(time.monotonic() - began)
    for score, (_, completion), hung in zip(scores, wanted, hangs, strict=True):
        load.wrong += score.error.reason != "TIMEOUT" if hung else score.score != len(completion)


async def _watch(side: _Side, load: _Load) -> None:
    """Record the memory of the service and of its workers until this is cancelled."""
    while True:
        load.service_bytes[-1].append(side.process.memory_info().rss)
        workers = side.process.children()
        load.workers_max = max(load.workers_max, len(workers))
        for worker in workers:
            try:
                load.worker_bytes.append(worker.memory_info().rss)
            except psutil.NoSuchProcess:
                continue
        await asyncio.sleep(_WATCH_SECONDS)
