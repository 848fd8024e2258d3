"""Lists which services share each GPU, and checks by formula that they fit on it before anything runs.

While it samples, a GPU holds the engine, the reference, reward models, and what the trainer keeps between steps
(weights, gradients, optimizer). While it trains, it holds the whole trainer, these models, and the engine; with
`rollout.sleep_mode` only the part of the engine that no sleep frees. With `asynchrony.max_policy_lag` above 0 it does
both at the same time: this takes what training takes with the engine awake.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fourfold.config import Config, gpu_count, gpu_places
from fourfold.errors import ConfigError
from fourfold.plan.memory import GIB, MemoryRow, memory_plan, weight_bytes
from fourfold.plan.models import ModelSizes, model_sizes

# A model of this size is worth a warning if every rank holds all of it.
_LARGE_WEIGHTS: Final = 8 * GIB
_MOST_RANKS: Final = 4096


def gpu_plan(
    config: Config, rows: Sequence[MemoryRow], gpu_bytes: int | None = None, *, here: int | None = None
) -> list[str]:
    """Return the services on each GPU and, if they share GPUs, their memory, as sentences; [] without GPUs.

    `gpu_bytes` is the memory of the smallest GPU of this machine, and `here` their number; None: unknown.
    """
    count = gpu_count(config)
    if not count:
        return []
    places = gpu_places(config)
    names = [", ".join(name for name, place in places.items() if gpu in place) for gpu in range(count)]
    listed = "; ".join(f"GPU {gpu}: {services}" for gpu, services in enumerate(names)) + "."
    if here is not None and here < count:
        listed += f" This machine has {here or 'none'}."
    many = f"{count} GPU{'s' if count > 1 else ''}"
    if config.placement.colocated:
        sampling, training = (max(sizes) for sizes in zip(*_bytes_by_gpu(config, rows), strict=True))
        if config.asynchrony.max_policy_lag:
            return [f"{many}, shared: {listed}", _overlap(config, rows, training, gpu_bytes)]
        engine = "asleep" if config.rollout.sleep_mode else "awake"
        return [
            f"{many}, shared: {listed}",
            f"The fullest GPU holds about {sampling / GIB:.1f} GiB while it samples and {training / GIB:.1f} GiB while "
            f"it trains, with the engine {engine}.",
        ]
    fewer = " On a machine with fewer GPUs they share." if config.placement.colocated is None and count > 1 else ""
    return [f"{many}, one service on each: {listed}{fewer}"]


def node_plan(config: Config, sizes: ModelSizes) -> list[str]:
    """Return how the trainer is divided among nodes, and what it holds with the fewest ranks; [] on one machine."""
    nodes, ranks, fewest = config.placement.trainer_nodes, config.trainer.ranks, config.trainer.min_ranks
    rows, found = memory_plan(config, sizes), []
    if nodes > 1:
        held = ranks // nodes
        named = (f"{first}-{first + held - 1}" if held > 1 else f"{first}" for first in range(0, ranks, held))
        found.append(
            f"{nodes} nodes hold {held} of the trainer's ranks each ({'; '.join(named)}). For them a node needs "
            f"{f'{held} GPUs and ' if config.trainer.device == 'cuda' else ''}about "
            f"{_ranks_on_host(rows, held) / GIB:.1f} GiB of main memory, besides that of other services on it."
        )
    if fewest and fewest < ranks:
        fewer = _with_ranks(config, fewest)
        if config.trainer.device == "cuda":
            needed, usual = _fullest(fewer, memory_plan(fewer, sizes)), _fullest(config, rows)
            what = "the fullest GPU holds"
        else:
            needed, usual = _ranks_on_host(memory_plan(fewer, sizes), 1), _ranks_on_host(rows, 1)
            what = "a rank takes"
        found.append(
            f"Without the machines that are missing after {config.trainer.attach_seconds:g} s it goes on with at least "
            f"{fewest} of {ranks} ranks: {what} about {needed / GIB:.1f} GiB instead of {usual / GIB:.1f}."
        )
    return found


def _with_ranks(config: Config, ranks: int) -> Config:
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"ranks": ranks})})


def _ranks_on_host(rows: Sequence[MemoryRow], ranks: int) -> int:
    """Return the bytes of main memory of so many of the trainer's ranks."""
    return ranks * sum(row.total for row in rows if not row.on_gpu and row.role.startswith(("trainer", "critic")))


def _overlap(config: Config, rows: Sequence[MemoryRow], needed: int, gpu_bytes: int | None) -> str:
    """Describe whether engine and trainer fit on a GPU while both work."""
    pools = {pool.member_prefix for pool in config.rollout_pools}
    engine = max((row for row in rows if row.role in pools), key=lambda row: row.total)
    text = (
        f"Engine and trainer work at the same time: the fullest GPU holds about {needed / GIB:.1f} GiB, "
        f"{engine.total / GIB:.1f} of them the engine ({engine.kv_cache / GIB:.1f} KV cache). "
    )
    if gpu_bytes is None:
        return f"{text}Every GPU must have at least that much."
    has = f"this machine's have {gpu_bytes / GIB:.1f}"
    if needed <= gpu_bytes:
        return f"{text}It fits: {has}."
    return f"{text}It does not fit: {has}. To make it fit, {memory_advice(config)}."


def check_gpu_memory(config: Config, gpu_bytes: int) -> str:
    """Check that weights, gradients, optimizer and KV caches of services that share a GPU fit on the smallest one.

    Returns a warning if they do not fit together with the activations of full micro-batches, which depend on the
    samples; else an empty text.
    """
    if not config.placement.colocated:
        return ""
    rows = memory_plan(config, model_sizes(config))
    phases = zip(*_bytes_by_gpu(config, rows, only_persistent=True), strict=True)
    for phase, needed in zip(("sampling", "training"), map(max, phases), strict=True):
        if needed <= gpu_bytes:
            continue
        raise ConfigError(
            f"placement.colocated = true: while {phase} a GPU must hold at least {needed / GIB:.1f} GiB of weights, "
            f"gradients, optimizer and KV cache, and has {gpu_bytes / GIB:.1f}; "
            f"{memory_advice(config, of_passes=False)}, or set placement.colocated = false (`fourfold plan` shows the "
            f"parts)"
        )
    if (needed := _fullest(config, rows)) <= gpu_bytes:
        return ""
    return (
        f"A GPU must hold about {needed / GIB:.1f} GiB with full micro-batches, and has {gpu_bytes / GIB:.1f}: it may "
        f"run out of memory. To prevent it, {memory_advice(config)} (`fourfold plan` shows the parts)."
    )


def memory_advice(config: Config, *, of_passes: bool = True) -> str:
    """Return the keys that lower the memory of a GPU with a rank of the trainer, with their values.

    `of_passes` includes those that lower the memory of forward and backward passes alone.
    """
    colocated = config.placement.colocated
    keys = [f"batch.tokens_per_micro_batch = {config.batch.tokens_per_micro_batch}"] if of_passes else []
    if colocated:
        keys += [f"{pool.key('kv_cache_gib')} = {pool.kv_cache_gib}" for pool in config.rollout_pools]
    if colocated and of_passes:
        keys += [f"reference.tokens_per_batch = {config.reference.tokens_per_batch}"] * config.reference_on_gpus
        keys += [
            f"[[reward]] {table.name!r}.model.tokens_per_batch = {model.tokens_per_batch}"
            for table, model in config.reward_models_on_gpus
            if not model.own_gpus
        ]
    parts = [f"lower {' or '.join(keys)}", *([] if of_passes else ["raise trainer.ranks"])]
    if of_passes and not config.trainer.gradient_checkpointing:
        parts.append("set trainer.gradient_checkpointing = true")
    if colocated and not config.rollout.sleep_mode:
        lag = " and asynchrony.max_policy_lag = 0" if config.asynchrony.max_policy_lag else ""
        parts.append(f"set rollout.sleep_mode = true{lag}")
    return ", or ".join(parts)


def memory_warnings(
    config: Config,
    sizes: ModelSizes,
    *,
    gpu_count: int = 0,
    gpu_bytes: int | None = None,
    host_bytes: int | None = None,
) -> list[str]:
    """Return why a trainer on GPUs does not fit, as sentences with what helps; [] if it does, or sizes are unknown.

    Args:
        gpu_count: GPUs of this machine, which counts as one of the nodes; 0: unknown.
        gpu_bytes: memory of the smallest GPU of this machine; None: unknown.
        host_bytes: free main memory of this machine; None: unknown.
    """
    if config.trainer.device != "cuda":
        return []
    rows, trainer, found = memory_plan(config, sizes), config.trainer, []
    needed = _fullest(config, rows)
    weights = weight_bytes(config, sizes.policy)
    if trainer.zero_stage < 3 and trainer.ranks > 1 and weights > _LARGE_WEIGHTS:
        found.append(
            f"Each rank holds all {weights / GIB:.1f} GiB of weights, because trainer.zero_stage = "
            f"{trainer.zero_stage}; at stage 3 it holds its part."
        )
    in_gpu_plan = config.placement.colocated and config.asynchrony.max_policy_lag
    if gpu_bytes is not None and needed > gpu_bytes and not in_gpu_plan:
        ranks = _ranks_that_fit(config, sizes, gpu_bytes)
        more = f"raise rollout.gpus_per_replica, use trainer.offload, or {memory_advice(config)}"
        helps = f"use at least {ranks} ranks" if ranks else more
        found.append(
            f"A GPU must hold about {needed / GIB:.1f} GiB, and this machine's have {gpu_bytes / GIB:.1f}: {helps}."
        )
    nodes, held = config.placement.trainer_nodes, trainer.ranks // config.placement.trainer_nodes
    if nodes > 1 and 0 < gpu_count < held:
        found.append(
            f"A node must have {held} GPUs for its ranks, and this machine has {gpu_count}: raise "
            f"placement.trainer_nodes if the others are like it."
        )
    fewer = _with_ranks(config, trainer.min_ranks or trainer.ranks)
    fewest = _fullest(fewer, memory_plan(fewer, sizes))
    if gpu_bytes is not None and needed <= gpu_bytes < fewest:
        found.append(
            f"With trainer.min_ranks = {trainer.min_ranks} a GPU must hold about {fewest / GIB:.1f} GiB, and this "
            f"machine's have {gpu_bytes / GIB:.1f}: raise it."
        )
    whole = sum(row.total * row.count for row in rows if not row.on_gpu)
    in_main_memory = whole if nodes == 1 else _ranks_on_host(rows, held)
    if host_bytes is not None and in_main_memory > host_bytes:
        what, fix = "All processes together take", "spread the ranks over several machines"
        if nodes > 1:
            what, fix = "The ranks of a node take", "raise placement.trainer_nodes"
        found.append(
            f"{what} about {in_main_memory / GIB:.1f} GiB of main memory, and this machine has "
            f"{host_bytes / GIB:.1f} free: {fix}."
        )
    return found


def _fullest(config: Config, rows: Sequence[MemoryRow]) -> int:
    """Return the most bytes that a GPU holds in either phase."""
    if config.placement.colocated:
        return max((max(phases) for phases in _bytes_by_gpu(config, rows)), default=0)
    within = () if config.critic_apart else ("trainer", "critic")  # ranks that hold both
    together = sum(row.total for row in rows if row.on_gpu and row.role in within)
    return max(together, *(row.total for row in rows if row.on_gpu))


def _ranks_that_fit(config: Config, sizes: ModelSizes, gpu_bytes: int) -> int | None:
    """Return the smallest multiple of the ranks, by doubling, with which every GPU has enough; None if none has."""
    ranks = config.trainer.ranks
    while ranks < _MOST_RANKS:
        ranks *= 2
        wider = _with_ranks(config, ranks)
        if _fullest(wider, memory_plan(wider, sizes)) <= gpu_bytes:
            return ranks
    return None


def _bytes_by_gpu(config: Config, rows: Sequence[MemoryRow], *, only_persistent: bool = False) -> list[tuple[int, int]]:
    """Return the bytes on each GPU while sampling and while training.

    `only_persistent` leaves out activations, gathered weights and programs.
    """
    by_role = {row.role: row for row in rows if row.on_gpu}
    engines = {pool.member_prefix for pool in config.rollout_pools}
    # By the prefix of members, without the trainer.
    roles = {table.member_prefix: f"reward model {table.name}" for table, _ in config.reward_models_on_gpus}
    roles |= {prefix: prefix for prefix in ("reference", *engines)}
    places = {name: place for name, place in gpu_places(config).items() if name.rpartition("-")[0] in roles}

    def size(role: str, *, between_steps: bool = False, asleep: bool = False) -> int:
        row = by_role.get(role)
        if row is None:
            return 0
        persistent = 0 if asleep else row.weights - row.gathered + row.gradients + row.optimizer + row.kv_cache
        passing = 0 if asleep or between_steps else row.activations + row.gathered
        return persistent if only_persistent else persistent + passing + row.programs

    result = []
    for gpu in range(gpu_count(config)):
        is_policy = gpu < config.trainer.ranks
        critics = ["critic"] if not config.critic_apart or not is_policy else []
        trainer = [*(["trainer"] if is_policy else []), *critics] if gpu < config.trainer_processes else []
        others = [roles[name.rpartition("-")[0]] for name, place in places.items() if gpu in place]
        sleeping = engines if config.rollout.sleep_mode else ()
        sampling = sum(map(size, others)) + sum(size(role, between_steps=True) for role in trainer)
        training = sum(size(role, asleep=role in sleeping) for role in others) + sum(map(size, trainer))
        result.append((sampling, training))
    return result
