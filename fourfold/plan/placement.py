"""Lists which services share each GPU, and checks by formula that they fit on it before anything runs.

While it samples, a GPU holds the engine, the reference, and what the trainer keeps between steps (weights, gradients,
optimizer). While it trains, it holds the whole trainer, the reference, and the engine; with `rollout.sleep_mode` only
the part of the engine that no sleep frees. With `asynchrony.max_policy_lag` above 0 it does both at the same time: this
takes what training takes with the engine awake.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fourfold.config import Config, gpu_count, gpu_places
from fourfold.errors import ConfigError
from fourfold.plan.memory import GIB, MemoryRow, memory_plan
from fourfold.plan.models import model_sizes

# CUDA context and captured graphs of an engine, and the contexts of the other services: about 1 GiB on an H200.
_ENGINE_REST: Final = 1 * GIB


def gpu_plan(config: Config, rows: Sequence[MemoryRow], gpu_bytes: int | None = None) -> list[str]:
    """Return the services on each GPU and, if they share GPUs, their memory, as sentences; [] without GPUs.

    `gpu_bytes` is the memory of the smallest GPU of this machine, None if unknown.
    """
    count = gpu_count(config)
    if not count:
        return []
    places = gpu_places(config)
    names = [", ".join(name for name, place in places.items() if gpu in place) for gpu in range(count)]
    listed = "; ".join(f"GPU {gpu}: {services}" for gpu, services in enumerate(names))
    many = f"{count} GPU{'s' if count > 1 else ''}"
    if config.placement.colocated:
        sampling, training = (max(sizes) for sizes in zip(*_bytes_by_gpu(config, rows), strict=True))
        if config.asynchrony.max_policy_lag:
            return [f"{many}, shared: {listed}.", _overlap(config, rows, training, gpu_bytes)]
        engine = "asleep" if config.rollout.sleep_mode else "awake"
        return [
            f"{many}, shared: {listed}.",
            f"The fullest GPU holds about {sampling / GIB:.1f} GiB while it samples and {training / GIB:.1f} GiB while "
            f"it trains, with the engine {engine}.",
        ]
    fewer = " On a machine with fewer GPUs they share." if config.placement.colocated is None and count > 1 else ""
    return [f"{many}, one service on each: {listed}.{fewer}"]


def _overlap(config: Config, rows: Sequence[MemoryRow], needed: int, gpu_bytes: int | None) -> str:
    """Describe whether engine and trainer fit on a GPU while both work."""
    engine = next(row for row in rows if row.role == "rollout")
    text = (
        f"Engine and trainer work at the same time: the fullest GPU holds about {needed / GIB:.1f} GiB, "
        f"{engine.total / GIB:.1f} of them the engine ({engine.kv_cache / GIB:.1f} KV cache). "
    )
    if gpu_bytes is None:
        return f"{text}Every GPU must have at least that much."
    has = f"this machine's have {gpu_bytes / GIB:.1f}"
    if needed <= gpu_bytes:
        return f"{text}It fits: {has}."
    return (
        f"{text}It does not fit: {has}. Lower rollout.kv_cache_gib or batch.tokens_per_micro_batch, raise "
        f"trainer.ranks, or set asynchrony.max_policy_lag = 0 and rollout.sleep_mode = true."
    )


def check_gpu_memory(config: Config, gpu_bytes: int) -> None:
    """Check that weights, gradients, optimizer and KV caches of services that share a GPU fit on the smallest one.

    Activations are left out: they depend on the samples.
    """
    if not config.placement.colocated:
        return
    rows = memory_plan(config, model_sizes(config))
    phases = zip(*_bytes_by_gpu(config, rows, only_persistent=True), strict=True)
    for phase, needed in zip(("sampling", "training"), map(max, phases), strict=True):
        if needed <= gpu_bytes:
            continue
        sleep = "" if config.rollout.sleep_mode else ", set rollout.sleep_mode = true"
        if config.asynchrony.max_policy_lag:
            sleep += " and asynchrony.max_policy_lag = 0"
        raise ConfigError(
            f"placement.colocated = true: while {phase} a GPU must hold at least {needed / GIB:.1f} GiB of weights, "
            f"gradients, optimizer and KV cache, and has {gpu_bytes / GIB:.1f}; lower rollout.kv_cache_gib = "
            f"{config.rollout.kv_cache_gib}, raise trainer.ranks{sleep}, or set placement.colocated = false "
            f"(`fourfold plan` shows the parts)"
        )


def _bytes_by_gpu(config: Config, rows: Sequence[MemoryRow], *, only_persistent: bool = False) -> list[tuple[int, int]]:
    """Return the bytes on each GPU while sampling and while training.

    `only_persistent` leaves out activations, gathered weights and programs.
    """
    by_role = {row.role: row for row in rows if row.on_gpu}
    places = gpu_places(config)
    engines = {gpu for name, place in places.items() if name.startswith("rollout") for gpu in place}
    references = {gpu for name, place in places.items() if name.startswith("reference") for gpu in place}

    def size(role: str, *, between_steps: bool = False) -> int:
        row = by_role.get(role)
        if row is None:
            return 0
        persistent = row.weights - row.gathered + row.gradients + row.optimizer + row.kv_cache
        passing = 0 if between_steps else row.activations + row.gathered
        return persistent if only_persistent else persistent + passing + row.programs

    result = []
    for gpu in range(gpu_count(config)):
        is_policy = gpu < config.trainer.ranks
        critics = ["critic"] if not config.critic_apart or not is_policy else []
        trainer = [*(["trainer"] if is_policy else []), *critics] if gpu < config.trainer_processes else []
        rest = 0 if only_persistent else _ENGINE_REST
        engine = size("rollout") + rest if gpu in engines else 0
        asleep = rest if gpu in engines and config.rollout.sleep_mode else engine
        reference = size("reference") if gpu in references else 0
        sampling = engine + reference + sum(size(role, between_steps=True) for role in trainer)
        result.append((sampling, asleep + reference + sum(size(role) for role in trainer)))
    return result
