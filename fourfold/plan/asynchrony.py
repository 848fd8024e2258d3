"""Describes the effects of `asynchrony.max_policy_lag` in a recipe."""

from __future__ import annotations

from fourfold.config import Config, RolloutPool
from fourfold.model.folder import ModelShape
from fourfold.plan.batch import engine_limits, groups_in_flight
from fourfold.plan.memory import GIB, kv_bytes_per_token, kv_cache_tokens


def lag_plan(config: Config, shape: ModelShape) -> list[str]:
    """Return one paragraph on the policy lag, one on the room that it needs in engines, and one per warning."""
    lag, batch = config.asynchrony.max_policy_lag, config.batch
    if not lag:
        return ["0: the weights of each step sample the next one."]
    too_old = {"drop": "dropped (STALE)", "train": "trained on"}[config.asynchrony.stale]
    text = (
        f"at most {lag}: engines sample while the trainer trains. At most {lag + 1} x {batch.prompts_per_step} = "
        f"{groups_in_flight(config):,} groups are between admission and the update that trains on them, and up to "
        f"{lag * batch.prompts_per_step:,} of them run while a step trains. Groups are trained in the order of "
        f"admission. Those with tokens of weights more than {lag} version{'s' if lag > 1 else ''} old, as after a "
        f"failure, are {too_old}."
    )
    if target := config.asynchrony.target_mismatch:
        text += (
            f" The lag is lowered while |o - u| of trained tokens (u: their log-probability in the engine) is above "
            f"{target:g} nats on average, and raised again below."
        )
    return [text, *_room(config, shape), *_warnings(config)]


def _room(config: Config, shape: ModelShape) -> list[str]:
    """Return one paragraph for each pool: its samples in flight, those at lag 0, and the room in an engine."""
    batch, replicas = config.batch, config.rollout_replicas
    before, wanted = (-(-g // replicas) * batch.group_size for g in (batch.prompts_per_step, groups_in_flight(config)))
    return [_pool_room(config, pool, shape, before, wanted) for pool in config.rollout_pools]


def _pool_room(config: Config, pool: RolloutPool, shape: ModelShape, before: int, wanted: int) -> str:
    """Describe an engine whose share is `wanted` samples in flight, and `before` at lag 0."""
    context, limit = config.model.max_context_tokens, engine_limits(config, pool).concurrent_samples
    samples = min(wanted, limit)
    needed = samples * context * kv_bytes_per_token(pool, shape)
    waiting = f"; of {wanted:,}, the others wait in the coordinator" if wanted > limit else ""
    text = (
        f"Each engine{f' of {pool.name}' if pool.name else ''} has up to {samples:,} samples in flight "
        f"({min(before, limit):,} at lag 0{waiting}). At full length their KV cache takes {needed / GIB:.1f} GiB"
    )
    tokens = kv_cache_tokens(pool, shape)
    if tokens is None:
        return f"{text} of the engine's share of its GPUs."
    if tokens >= samples * context:
        return f"{text}, which the engine has."
    return f"{text}; the engine has room for {tokens // context:,} of them, and the others wait in its queue."


def _warnings(config: Config) -> list[str]:
    algorithm = config.algorithm
    found = []
    if algorithm.correction.kind == "none" and not algorithm.loss.corrects_lag:
        found.append(
            f'Warning: algorithm.correction.kind = "none" trains tokens of older weights as if those of the step had '
            f"sampled them (loss.kind = `{algorithm.loss.kind}` compares with o alone); set correction.kind = "
            f'"tis", or a preset that has one, such as `decoupled` or `cispo`.'
        )
    if config.pause_mode == "wait":
        found.append(
            'Warning: weights.pause = "wait" lets every update wait for the longest running sample, so that little is '
            'gained; set it to "keep".'
        )
    return found
