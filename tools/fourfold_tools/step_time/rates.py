"""Reads the rates of the cost model from the metrics of a run: `fourfold plan RECIPE --rates runs/NAME`.

The run may be another one than the recipe's, and still running. Sizes come from the recipe. Rates and lengths come
from the last steps of the run, without its first step, which includes warm-ups and compilation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

from fourfold import config as configuration
from fourfold import metrics as m
from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold.model.folder import ModelShape
from fourfold.plan.batch import engine_limits
from fourfold.plan.memory import kv_cache_tokens
from fourfold.rollout.engine_step import EngineStep
from fourfold_tools.step_time.cost import Pause, Rates, Workload

METRICS_FILE: Final = "metrics.jsonl"
CONFIG_FILE: Final = "config.toml"
_STEPS: Final = 20
_NEEDED: Final = (m.RESPONSE_LENGTH, m.RESPONSE_LENGTH_MAX, m.TOTAL_LENGTH, m.TRAIN_SPEED, m.ROLLOUT_SPEED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """Rates and lengths that a prediction starts from."""

    rates: Rates
    prompt_tokens: float
    mean_new_tokens: float
    longest_new_tokens: int
    accepted: float = 1.0  # share of the groups that the filter keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRates(Basis):
    """Rates and lengths of a run."""

    folder: Path
    steps: tuple[int, int]  # first and last step that they are from
    lag: int  # largest that they were sampled at
    step_seconds: float  # without evaluation and checkpoint
    step_is_measured: bool  # False: `rates.engine_step` is assumed from the tokens per second


def read_rates(folder: Path) -> RunRates:
    """Read the rates of a run from its folder.

    Raises:
        ConfigError: the folder has no metrics, or none of a whole step.
    """
    rows = _last_rows(folder)

    def typical(name: str, default: float = 0.0) -> float:
        return median(values) if (values := _values(rows, name)) else default

    measured = _engine_step(rows)
    lengths = {name: fmean(_values(rows, name)) for name in (m.RESPONSE_LENGTH, m.TOTAL_LENGTH)}
    rates = Rates(
        engine_step=measured or EngineStep(base=0.0, per_sample=_replicas(folder) / typical(m.ROLLOUT_SPEED)),
        train_tokens_per_second=typical(m.TRAIN_SPEED),
        publish_seconds=typical(m.TIME_PUBLISH, typical(m.PUBLISH_SECONDS)),
        pause_seconds=typical(m.PAUSE_SECONDS),
        reward_seconds=typical(m.TIME_REWARD) + typical(m.TIME_REFERENCE),
        other_seconds=max(typical(m.TIME_OTHER), 0.0),
    )
    return RunRates(
        folder=folder,
        steps=(int(rows[0]["step"]), int(rows[-1]["step"])),
        lag=round(max(_values(rows, m.LAG_LIMIT), default=0.0)),
        step_seconds=typical(m.TIME_STEP) - typical(m.TIME_EVALUATE) - typical(m.TIME_CHECKPOINT),
        rates=rates,
        step_is_measured=measured is not None,
        prompt_tokens=max(lengths[m.TOTAL_LENGTH] - lengths[m.RESPONSE_LENGTH], 0.0),
        mean_new_tokens=max(lengths[m.RESPONSE_LENGTH], 1.0),
        longest_new_tokens=math.ceil(max(_values(rows, m.RESPONSE_LENGTH_MAX))),
        accepted=max(typical(m.FILTER_ACCEPT_RATE, 1.0), 0.01),
    )


def workload(config: Config, shape: ModelShape, run: Basis, lag: int) -> Workload:
    """Return the work of a recipe with given lengths, at `asynchrony.max_policy_lag = lag`."""
    asynchrony = config.asynchrony.model_copy(update={"max_policy_lag": lag})
    config = config.model_copy(update={"asynchrony": asynchrony})
    longest = max(min(config.sampling.max_new_tokens, run.longest_new_tokens), 1)
    pools = config.rollout_pools
    on_cpu = config.trainer.device == "cpu" and not any(pool.gpus_per_replica for pool in pools)
    # The cost model has equal replicas: those of several pools count as their mean.
    samples = sum(engine_limits(config, pool).concurrent_samples * pool.services for pool in pools)
    tokens = sum((kv_cache_tokens(pool, shape) or math.inf) * pool.services for pool in pools)
    replicas = config.rollout_replicas
    pause: Pause = config.pause_mode
    return Workload(
        groups_per_step=max(round(config.batch.prompts_per_step / run.accepted), 1),
        group_size=config.batch.group_size,
        prompt_tokens=run.prompt_tokens,
        mean_new_tokens=min(run.mean_new_tokens, longest),
        max_new_tokens=longest,
        trained_share=run.accepted,
        replicas=replicas,
        concurrent_samples=samples // replicas,
        kv_cache_tokens=tokens / replicas,
        pause=pause,
        shared_devices=on_cpu or bool(config.placement.colocated),
    )


def _last_rows(folder: Path) -> list[Mapping[str, Any]]:
    """Return the last rows of metrics.jsonl that have what is needed, without that of the run's first step."""
    path, rows = folder / METRICS_FILE, list[Mapping[str, Any]]()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"--rates {folder}: cannot read {METRICS_FILE} ({reason}); give a folder of runs/") from None
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # the last line of a run that is writing it
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int) and all(_value(row, name) for name in _NEEDED):
            rows.append(row)
    if not rows:
        raise ConfigError(
            f"--rates {folder}: none of the {len(lines)} lines of {METRICS_FILE} has {', '.join(_NEEDED)} above 0; "
            f"give a run that has finished a step"
        )
    return rows[1:][-_STEPS:] or rows


def _engine_step(rows: Sequence[Mapping[str, Any]]) -> EngineStep | None:
    """Return the newest fit of the engines' step; None if the run has none."""
    for row in reversed(rows):
        base, sample = _value(row, m.ENGINE_STEP_BASE), _value(row, m.ENGINE_STEP_SAMPLE)
        context = _value(row, m.ENGINE_STEP_CONTEXT) or 0.0
        if base is not None and sample is not None and base + sample > 0:
            return EngineStep(base=base, per_sample=sample, per_context_token=context)
    return None


def _replicas(folder: Path) -> int:
    """Return how many replicas of the engine a run has, at least 1; those started by hand are not known."""
    path = folder / CONFIG_FILE
    return configuration.load(path).rollout_replicas if path.is_file() else 1


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [value for row in rows if (value := _value(row, name)) is not None]


def _value(row: Mapping[str, Any], name: str) -> float | None:
    """Return a metric that is a finite number from 0, or None."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None
    return float(value)
