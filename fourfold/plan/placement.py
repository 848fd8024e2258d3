"""Who is on which GPU, and whether what shares one fits: a formula, before anything runs.

While it samples a GPU holds the engine, the reference, and of the trainer what it keeps between steps (weights,
gradients, optimizer); while it trains all of the trainer, the reference, and the engine: without `rollout.sleep_mode`
as before, with it only what no sleep gives up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fourfold.config import Config, gpu_count, gpu_places
from fourfold.errors import ConfigError
from fourfold.model import folder
from fourfold.plan.adapters import adapter_plan
from fourfold.plan.memory import GIB, MemoryRow, memory_plan

# CUDA context and captured graphs of an engine, and context of the others: about, on an H200.
_ENGINE_REST: Final = 1 * GIB


def gpu_plan(config: Config, rows: Sequence[MemoryRow]) -> list[str]:
    """Return who is on which GPU and, where they share them, what the fullest one holds; nothing without GPUs."""
    count = gpu_count(config)
    if not count:
        return []
    places = gpu_places(config)
    names = [", ".join(name for name, place in places.items() if gpu in place) for gpu in range(count)]
    listed = "; ".join(f"GPU {gpu}: {who}" for gpu, who in enumerate(names))
    many = f"{count} GPU{'s' if count > 1 else ''}"
    if config.placement.colocated:
        sampling, training = (max(sizes) for sizes in zip(*_phases(config, rows), strict=True))
        engine = "asleep" if config.rollout.sleep_mode else "awake"
        return [
            f"{many}, shared: {listed}.",
            f"The fullest GPU holds about {sampling / GIB:.1f} GiB while it samples and {training / GIB:.1f} GiB while "
            f"it trains, with the engine {engine}.",
        ]
    fewer = " A machine with fewer lets them share." if config.placement.colocated is None and count > 1 else ""
    return [f"{many}, one service on each: {listed}.{fewer}"]


def refuse_unless_fits(config: Config, gpu_bytes: int) -> None:
    """Check that weights, gradients, optimizer and KV caches that share a GPU have room on it; activations are extra.

    Args:
        config: of the run.
        gpu_bytes: of the smallest GPU.

    Raises:
        ConfigError: they are more than a GPU has.
    """
    if not config.placement.colocated:
        return
    phases = zip(*_phases(config, _rows(config), kept_alone=True), strict=True)
    for what, needed in zip(("sampling", "training"), map(max, phases), strict=True):
        if needed <= gpu_bytes:
            continue
        sleep = "" if config.rollout.sleep_mode else ", set rollout.sleep_mode = true"
        raise ConfigError(
            f"placement.colocated = true: while {what} a GPU must hold at least {needed / GIB:.1f} GiB of weights, "
            f"gradients, optimizer and KV cache, and has {gpu_bytes / GIB:.1f}; lower rollout.kv_cache_gib = "
            f"{config.rollout.kv_cache_gib}, raise trainer.ranks{sleep}, or set placement.colocated = false "
            f"(`fourfold plan` shows the parts)"
        )


def _rows(config: Config) -> list[MemoryRow]:
    shape, adapters = folder.shape(config.model.source), adapter_plan(config)
    own_critic = config.algorithm.needs_critic and config.critic.source
    critic = folder.shape(config.critic.source) if own_critic else shape
    return memory_plan(config, shape, critic, trained=adapters.parameter_count if adapters else None)


def _phases(config: Config, rows: Sequence[MemoryRow], *, kept_alone: bool = False) -> list[tuple[int, int]]:
    """Return bytes while sampling and while training, of each GPU; `kept_alone`: without what is there for a moment."""
    by_role = {row.role: row for row in rows if row.on_gpu}
    places = gpu_places(config)
    engines = {gpu for name, place in places.items() if name.startswith("rollout") for gpu in place}
    references = {gpu for name, place in places.items() if name.startswith("reference") for gpu in place}

    def of(role: str, *, between_steps: bool = False) -> int:
        row = by_role.get(role)
        if row is None:
            return 0
        kept = row.weights - row.gathered + row.gradients + row.optimizer + row.kv_cache
        passing = 0 if between_steps else row.activations + row.gathered
        return kept if kept_alone else kept + passing + row.programs

    sizes = []
    for gpu in range(gpu_count(config)):
        is_policy = gpu < config.trainer.ranks
        critics = ["critic"] if not config.critic_apart or not is_policy else []
        trainer = [*(["trainer"] if is_policy else []), *critics] if gpu < config.trainer_processes else []
        rest = 0 if kept_alone else _ENGINE_REST
        engine = of("rollout") + rest if gpu in engines else 0
        asleep = rest if gpu in engines and config.rollout.sleep_mode else engine
        reference = of("reference") if gpu in references else 0
        sampling = engine + reference + sum(of(role, between_steps=True) for role in trainer)
        sizes.append((sampling, asleep + reference + sum(of(role) for role in trainer)))
    return sizes
