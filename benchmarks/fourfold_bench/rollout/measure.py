"""Both sides, one after the other: the service with its callers, then vLLM alone."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fourfold import config as configuration
from fourfold.config import Config
from fourfold.errors import Internal
from fourfold_bench.children import Children
from fourfold_bench.devices import visible
from fourfold_bench.memory import GpuMemory
from fourfold_bench.rollout.settings import Settings
from fourfold_bench.sampler import Profile

_MODEL_SECONDS: Final = 600.0
_START_SECONDS: Final = 900.0
_SERVICE: Final = "rollout"
_MEMORY_SECONDS: Final = 0.05
# Mean of |service - LLM.generate| over the tokens that both chose, in nats: kernels of other batch sizes round
# differently in bfloat16.
_NOISE: Final = 0.05
# What the service warns of when it cannot take them in the worker.
_FALLS_BACK: Final = "log-probabilities come from vLLM itself"


def run(settings: Settings, folder: Path, profile: Profile | None = None) -> dict[str, Any]:
    """Measure; returns JSON values.

    Args:
        settings: what to measure.
        folder: of its own.
        profile: of the service, in the round that the settings have for it.

    Raises:
        Unavailable: a process died; with the end of its log.
        Internal: the samples are not what was asked for.
    """
    children = Children(folder)
    try:
        given, model = settings.write(folder / "settings.json"), folder / "model"
        words = ("-m", "fourfold_bench.model", str(model), settings.shape, str(settings.context))
        children.run("model", *words, timeout=_MODEL_SECONDS)
        _say("the service")
        service = _service(settings, children, given, model, profile)
        children.end(_SERVICE)
        result: dict[str, Any] = {"service": service}
        if settings.alone:
            _say("vLLM alone")
            result["alone"] = _alone(settings, children, given, model)
    finally:
        children.stop()
    return result | {"summary": summarise(settings, result)}


def _service(
    settings: Settings, children: Children, given: Path, model: Path, profile: Profile | None
) -> dict[str, Any]:
    memory = GpuMemory([settings.device], every=_MEMORY_SECONDS)
    try:
        before, began = memory.used(), time.perf_counter()
        path = children.folder / "recipe.toml"
        path.write_text(configuration.dump(recipe(settings, model)), encoding="utf-8")
        env = visible(settings.device) | (profile.environment() if profile else {})
        service = ("-m", "fourfold", "serve", "rollout", str(path), "--listen", "127.0.0.1:0")
        children.start(_SERVICE, *service, "--run-dir", str(children.folder / "run"), env=env)
        target = children.ready(_SERVICE, timeout=_START_SECONDS)
        started = time.perf_counter() - began
        outs = [children.folder / f"client-{index}.json" for index in range(settings.clients)]
        for index, out in enumerate(outs):
            words = ("-m", "fourfold_bench.rollout.client", str(given), str(index), target, str(out))
            children.start(f"client-{index}", *words, env=visible("cpu"))
        names = [f"client-{index}" for index in range(settings.clients)]
        watch = _Watch(settings, children, profile)
        children.wait(*names, timeout=_all_rounds(settings), until=watch.look)
        peak = memory.peak()
    finally:
        memory.stop()
    clients = [json.loads(out.read_text(encoding="utf-8")) for out in outs]
    warnings = warnings_of(children.log(_SERVICE))
    _refuse(settings, [fault for client in clients for fault in client["faults"]], warnings)
    first = clients[0]
    return {
        "start_seconds": started,
        "seconds": together([client["rounds"] for client in clients]),
        "beside_seconds": together([client["beside"] for client in clients]) if settings.streams else [],
        "first_token": first["first_token"],
        "streams": first.get("streams", {}),
        "greedy": first["greedy"],
        "samples": sum(client["samples"] for client in clients),
        "tokens": sum(client["tokens"] for client in clients),
        "gpu_mib": {device: round(peak[device] - before[device]) for device in before},
        "warnings": warnings,
    }


def warnings_of(log: Path) -> list[str]:
    """Return what a service warned of, each once."""
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
    serious = [str(line["message"]) for line in lines if line.get("level") in ("warning", "error", "critical")]
    return list(dict.fromkeys(serious))


def _refuse(settings: Settings, faults: Sequence[str], warnings: Sequence[str]) -> None:
    if faults:
        raise Internal(f"the service's samples are wrong: {faults[0]}")
    fallback = next((text for text in warnings if text.startswith(_FALLS_BACK)), "")
    if settings.packed and fallback:
        raise Internal(f"--packed, but the service says: {fallback}")


class _Watch:
    """Profiles the service in the last round of the batch alone: its clients leave a file when they begin one."""

    def __init__(self, settings: Settings, children: Children, profile: Profile | None) -> None:
        folder, profiled = children.folder, settings.plain_rounds - 1
        self._steps: list[tuple[Path, Callable[[], object]]] = []
        if profile is not None:
            begin = folder / f"round-{profiled}.0"
            end = folder / ("streams.0" if settings.streams else "client-0.json")
            self._steps = [(begin, lambda: profile.begin(children.pid(_SERVICE))), (end, profile.end)]

    def look(self) -> bool:
        """Look once; there is always more to come."""
        if self._steps and self._steps[0][0].exists():
            self._steps.pop(0)[1]()
        return False


def _alone(settings: Settings, children: Children, given: Path, model: Path) -> dict[str, Any]:
    memory, out = GpuMemory([settings.device], every=_MEMORY_SECONDS), children.folder / "alone.json"
    try:
        before, began = memory.used(), time.perf_counter()
        words = ("-m", "fourfold_bench.rollout.alone", str(given), str(model), str(out))
        children.run("alone", *words, timeout=_START_SECONDS + len(settings.alone) * _all_rounds(settings))
        peak = memory.peak()
    finally:
        memory.stop()
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    result["start_seconds"] = result.pop("ready_at") - began  # of the process, as the service's
    return result | {"gpu_mib": {device: round(peak[device] - before[device]) for device in before}}


def recipe(settings: Settings, model: Path) -> Config:
    """Return the recipe that the service is started with.

    Raises:
        ConfigError: no recipe may say what the settings ask for.
    """
    rollout = {
        "gpus_per_replica": int(settings.on_gpu),
        "gpu_memory_utilization": settings.engine_memory,
        "kv_cache_gib": None if settings.on_gpu else settings.kv_cache_gib,
        "max_concurrent_samples": max(2, settings.samples + settings.streams),  # a recipe has groups of two at least
        "enforce_eager": settings.eager,
    }
    if settings.batched_tokens:
        rollout["max_batched_tokens"] = settings.batched_tokens
    return configuration.from_tables(
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
            "rollout": rollout,
        },
        source="the benchmark's recipe",
    )


def together(rounds: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """Return the seconds of each round: from the first client's begin to the last one's end.

    Args:
        rounds: [clients][rounds] of (begin, end).
    """
    return [max(end for _, end in each) - min(begin for begin, _ in each) for each in zip(*rounds, strict=True)]


def summarise(settings: Settings, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return speeds by row, the ratio to vLLM alone, and how far the log-probabilities are apart.

    Raises:
        Internal: they are further apart than rounding explains.
    """
    service, alone = result["service"], result.get("alone", {"seconds": {}})
    rows = {"service": service["seconds"], "service beside streams": service["beside_seconds"]}
    rows |= {f"LLM.generate, {way}": seconds for way, seconds in alone["seconds"].items()}
    speeds = {name: settings.tokens / statistics.median(seconds) for name, seconds in rows.items() if seconds}
    summary: dict[str, Any] = {"tokens_per_second": {name: round(speed, 1) for name, speed in speeds.items()}}
    plain = speeds.get("LLM.generate, plain")
    if plain:
        summary["ratio"] = {name: round(speed / plain, 4) for name, speed in speeds.items()}
    if "greedy" in alone:
        summary["greedy"] = compare(service["greedy"], alone["greedy"])
    return summary


def compare(ours: Mapping[str, Sequence[float]], theirs: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return how far two greedy continuations are apart, up to the token at which they part.

    They may part where two tokens are equally likely; the log-probabilities of what each chose are still as close.

    Raises:
        Internal: they are further apart than rounding explains.
    """
    pairs = zip(ours["token_ids"], theirs["token_ids"], strict=True)
    same = next((at for at, (a, b) in enumerate(pairs) if a != b), len(ours["token_ids"]))
    values = zip(ours["logprobs"], theirs["logprobs"], strict=True)
    apart = [abs(a - b) for a, b in values][: same + 1]
    found = {"equal_tokens": same, "tokens": len(ours["token_ids"]), "largest_difference": max(apart)}
    if statistics.mean(apart) > _NOISE:
        raise Internal(
            f"greedy decoding: log-probabilities of the service and of LLM.generate differ by "
            f"{statistics.mean(apart):.3f} nats in the mean; rounding explains {_NOISE}"
        )
    return found


def _all_rounds(settings: Settings) -> float:
    return settings.timeout * (settings.plain_rounds + (settings.rounds if settings.streams else 0) + 1)


def _say(what: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {what}\n")
