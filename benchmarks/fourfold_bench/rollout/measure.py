"""Measures the service with its callers, then vLLM alone, and compares both."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fourfold.config import Config, from_tables
from fourfold.errors import Internal
from fourfold_bench.gpus import GpuMemory, visible
from fourfold_bench.harness import BenchmarkRun
from fourfold_bench.processes import BenchProcesses, say
from fourfold_bench.profiling import Profile
from fourfold_bench.rollout.benchmark import RolloutSettings, seconds_by_row

_START_SECONDS: Final = 900.0
_SERVICE: Final = "rollout"
_MEMORY_SECONDS: Final = 0.05
# Largest mean of |service - LLM.generate| over the tokens that both chose, in nats: kernels for other batch sizes round
# differently in bfloat16.
_NOISE: Final = 0.05
# The service's warning if the worker cannot compute log-probabilities.
_FALLS_BACK: Final = "log-probabilities come from vLLM itself"


def measure(settings: RolloutSettings, run: BenchmarkRun) -> dict[str, Any]:
    """Measure both sides; return JSON values.

    Raises:
        Unavailable: a process died; with the end of its log.
        Internal: the samples are wrong.
    """
    with BenchProcesses(run.folder) as processes:
        given = settings.write(run.folder / "settings.json")
        model = processes.write_model(settings.shape, context=settings.context)
        say("measuring the service")
        service = _service(settings, processes, given, model, run.profile)
        processes.end(_SERVICE)
        result: dict[str, Any] = {"service": service}
        if settings.alone:
            say("measuring vLLM alone")
            result["alone"] = _vllm_alone(settings, processes, given, model)
    return result | {"summary": summarise(settings, result)}


def _service(
    settings: RolloutSettings, processes: BenchProcesses, given: Path, model: Path, profile: Profile | None
) -> dict[str, Any]:
    folder, names = processes.folder, [f"client-{index}" for index in range(settings.clients)]
    with GpuMemory([settings.device], every=_MEMORY_SECONDS) as memory:
        before, began = memory.used(), time.perf_counter()
        processes.serve(_SERVICE, processes.write_recipe(recipe(settings, model)), env=visible(settings.device))
        (target,) = processes.ready(_SERVICE, timeout=_START_SECONDS)
        started = time.perf_counter() - began
        outs = [folder / f"{name}.json" for name in names]
        for index, (name, out) in enumerate(zip(names, outs, strict=True)):
            words = ("-m", "fourfold_bench.rollout.client", str(given), str(index), target, str(out))
            processes.start(name, *words, env=visible("cpu"))
        watch = _ProfileOneRound(settings, processes, profile)
        processes.wait(*names, timeout=_all_rounds(settings), until=watch.poll)
        watch.poll()  # the clients may have ended between two polls
        peak = memory.peak()
    clients = [json.loads(out.read_text(encoding="utf-8")) for out in outs]
    warnings = warnings_of(processes.log(_SERVICE))
    check_service(settings, [fault for client in clients for fault in client["faults"]], warnings)
    first = clients[0]
    return {
        "start_seconds": started,
        "seconds": round_seconds([client["rounds"] for client in clients]),
        "beside_seconds": round_seconds([client["beside"] for client in clients]) if settings.streams else [],
        "first_token": first["first_token"],
        "streams": first.get("streams", {}),
        "greedy": first["greedy"],
        "samples": sum(client["samples"] for client in clients),
        "tokens": sum(client["tokens"] for client in clients),
        "gpu_mib": {device: round(peak[device] - before[device]) for device in before},
        "warnings": warnings,
    }


def warnings_of(log: Path) -> list[str]:
    """Return the different warnings and errors in the log of a service."""
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
    serious = [str(line["message"]) for line in lines if line.get("level") in ("warning", "error", "critical")]
    return list(dict.fromkeys(serious))


def check_service(settings: RolloutSettings, faults: Sequence[str], warnings: Sequence[str]) -> None:
    """Check the samples of the service, and with --packed the source of its log-probabilities.

    Raises:
        Internal: samples have faults, or the service falls back to vLLM's log-probabilities.
    """
    if faults:
        raise Internal(f"the service's samples are wrong: {faults[0]}")
    fallback = next((text for text in warnings if text.startswith(_FALLS_BACK)), "")
    if settings.packed and fallback:
        raise Internal(f"--packed forbids the fallback of which the service warned: {fallback}")


class _ProfileOneRound:
    """Profiles the service in the last round without streams; the files by which the clients meet show its begin."""

    def __init__(self, settings: RolloutSettings, processes: BenchProcesses, profile: Profile | None) -> None:
        self._profile, self._processes = profile, processes
        self._begin = processes.folder / f"round-{settings.plain_rounds - 1}.0"
        self._end = processes.folder / ("streams.0" if settings.streams else "client-0.json")
        self._recording = False

    def poll(self) -> bool:
        """Begin or end the profile if it is time; return False, so that `wait` goes on."""
        if self._profile is None:
            return False
        if self._recording and self._end.exists():
            self._profile.end()
            self._profile = None
        elif not self._recording and self._begin.exists():
            self._profile.begin(_SERVICE, self._processes.pid(_SERVICE))
            self._begin.with_suffix(".profile").touch()  # the clients wait for it: py-spy takes a while to start
            self._recording = True
        return False


def _vllm_alone(settings: RolloutSettings, processes: BenchProcesses, given: Path, model: Path) -> dict[str, Any]:
    out = processes.folder / "alone.json"
    with GpuMemory([settings.device], every=_MEMORY_SECONDS) as memory:
        before, began = memory.used(), time.perf_counter()
        words = ("-m", "fourfold_bench.rollout.vllm_alone", str(given), str(model), str(out))
        processes.run("alone", *words, timeout=_START_SECONDS + len(settings.alone) * _all_rounds(settings))
        peak = memory.peak()
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    result["start_seconds"] = result.pop("ready_at") - began  # includes the start of the process, as the service's
    return result | {"gpu_mib": {device: round(peak[device] - before[device]) for device in before}}


def recipe(settings: RolloutSettings, model: Path) -> Config:
    """Return the recipe of the service.

    Raises:
        ConfigError: the settings break a rule of recipes.
    """
    return from_tables(
        {
            "name": "bench-rollout",
            "steps": 1,
            "model": {"source": str(model), "max_context_tokens": settings.context},
            "data": {"train": {"path": "none.jsonl"}, "chat": False},
            "sampling": {"max_new_tokens": settings.new_tokens, "temperature": settings.temperature},
            "batch": {
                "prompts_per_step": settings.prompts,
                "group_size": max(2, settings.group_size),
                "tokens_per_micro_batch": max(4096, settings.context),
            },
            "rollout": {
                "gpus_per_replica": int(settings.on_gpu),
                "gpu_memory_utilization": settings.engine_memory,
                "kv_cache_gib": None if settings.on_gpu else settings.kv_cache_gib,
                "max_concurrent_samples": max(2, settings.samples + settings.streams),  # groups have at least two
                "enforce_eager": settings.eager,
                **({"max_batched_tokens": settings.batched_tokens} if settings.batched_tokens else {}),
            },
        },
        source="the benchmark's recipe",
    )


def round_seconds(rounds: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """Return the seconds of each round: from the first client's begin to the last one's end.

    Args:
        rounds: [clients][rounds] of (begin, end).
    """
    return [max(end for _, end in each) - min(begin for begin, _ in each) for each in zip(*rounds, strict=True)]


def summarise(settings: RolloutSettings, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return speeds by row, their ratios to vLLM alone, and the difference of the log-probabilities.

    Raises:
        Internal: rounding does not explain the difference.
    """
    service, alone = result["service"], result.get("alone", {"seconds": {}})
    tokens, rows = settings.samples * settings.new_tokens, seconds_by_row(service, alone["seconds"])
    speeds = {name: tokens / statistics.median(seconds) for name, seconds in rows.items() if seconds}
    summary: dict[str, Any] = {"tokens_per_second": {name: round(speed, 1) for name, speed in speeds.items()}}
    if plain := speeds.get("LLM.generate, plain"):
        summary["ratio"] = {name: round(speed / plain, 4) for name, speed in speeds.items()}
    if "greedy" in alone:
        summary["greedy"] = compare_greedy(service["greedy"], alone["greedy"])
    return summary


def compare_greedy(ours: Mapping[str, Sequence[float]], theirs: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the difference of two greedy continuations, up to and including the first token that differs.

    That token may differ where two tokens are equally likely; its log-probabilities are as close as the others.

    Raises:
        Internal: rounding does not explain the difference.
    """
    pairs = zip(ours["token_ids"], theirs["token_ids"], strict=True)
    same = next((at for at, (a, b) in enumerate(pairs) if a != b), len(ours["token_ids"]))
    values = zip(ours["logprobs"], theirs["logprobs"], strict=True)
    apart = [abs(a - b) for a, b in values][: same + 1]
    if statistics.mean(apart) > _NOISE:
        raise Internal(
            f"greedy decoding: log-probabilities of the service and of LLM.generate differ by "
            f"{statistics.mean(apart):.3f} nats in the mean; rounding explains {_NOISE}"
        )
    return {"equal_tokens": same, "tokens": len(ours["token_ids"]), "largest_difference": max(apart)}


def _all_rounds(settings: RolloutSettings) -> float:
    return settings.timeout * (settings.plain_rounds + (settings.rounds if settings.streams else 0) + 1)
