"""Describes what `asynchrony.max_policy_lag` means for a recipe, and predicts its step time at several lags."""

from __future__ import annotations

from typing import Final

from fourfold.config import Config, RolloutPool
from fourfold.model.folder import ModelShape
from fourfold.plan.batch import engine_limits, groups_in_flight
from fourfold.plan.cost import Prediction, predict
from fourfold.plan.memory import GIB, kv_bytes_per_token, kv_cache_tokens
from fourfold.plan.rates import RunRates, workload
from fourfold.text import align_columns

LAGS: Final = (0, 1, 2, 4)
NO_RATES: Final = "`fourfold plan RECIPE --rates runs/NAME` predicts it from the metrics of a run that has done a step."


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


def rates_text(run: RunRates) -> str:
    """Describe the rates of a run and where they come from."""
    rates, (first, last) = run.rates, run.steps
    steps = f"steps {first} to {last}" if first < last else f"step {last}"
    return (
        f"from {run.folder}, {steps} ({_time(run.step_seconds)} each at a policy lag of {run.lag}, without evaluations "
        f"and checkpoints, which the predictions leave out, too): {_engine(run)}; the trainer trains "
        f"{rates.train_tokens_per_second:,.0f} tokens/s; publish {_time(rates.publish_seconds)}, scoring "
        f"{_time(rates.reward_seconds)}, other {_time(rates.other_seconds)}. Prompts of {run.prompt_tokens:,.0f} and "
        f"completions of {run.mean_new_tokens:,.0f} tokens on average, at most {run.longest_new_tokens:,}."
    )


def _engine(run: RunRates) -> str:
    step = run.rates.engine_step
    if not run.step_is_measured:
        return (
            f"an engine samples {1 / step.per_sample:,.0f} tokens/s. How this depends on the samples at once was not "
            f"measured (generations of a few seconds are too short), so that it is assumed not to, and the speed-ups "
            f"are lower bounds"
        )
    terms = ((step.base, ""), (step.per_sample, " per sample"), (step.per_context_token, " per token in the KV cache"))
    return f"an engine step takes {' + '.join(f'{_time(value)}{what}' for value, what in terms if value)}"


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds > 0 else "0 s"


def speed_table(config: Config, shape: ModelShape, run: RunRates) -> list[str]:
    """Return the lines of a table with one line per policy lag: step time, speed-up, and what waits for what."""
    lags = sorted({*LAGS, config.asynchrony.max_policy_lag})
    results = [predict(run.rates, workload(config, shape, run, lag), lag) for lag in lags]
    head = ["policy lag", "s per step", "speed-up", "tokens/s", "engine load", "trainer waits", "token lag", "bound by"]
    return align_columns([head, *(_row(result, results[0]) for result in results)])


def _row(result: Prediction, synchronous: Prediction) -> list[str]:
    return [
        str(result.lag),
        f"{result.step_seconds:.3g}",
        f"{synchronous.step_seconds / result.step_seconds:.2f}",
        f"{result.trained_tokens_per_second:,.0f}",
        f"{result.engine_utilisation:.0%}",
        f"{result.trainer_wait:.0%}",
        f"{result.mean_token_lag:.1f}",
        result.limit,
    ]
