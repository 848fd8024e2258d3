"""Describes the speed of a recipe for `fourfold plan`, from the rates of a run or from its devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fourfold.config import Config
from fourfold.host.hardware import Gpu
from fourfold.model.folder import ModelShape
from fourfold.plan.models import ModelSizes
from fourfold.plan.preflight import Preflight
from fourfold.plan.speed import Speed
from fourfold.text import align_columns, format_duration
from fourfold_tools.step_time.cost import Prediction, predict
from fourfold_tools.step_time.guess import device_of, guess_text
from fourfold_tools.step_time.rates import RunRates, read_rates, workload

_LAGS: Final = (0, 1, 2, 4)
_NO_RATES: Final = (
    "`fourfold plan RECIPE --rates runs/NAME` predicts it from the metrics of a run that has done a step."
)
_LONG_SECONDS: Final = 2 * 3600.0


class StepTimePredictor:
    """Predicts the step time from the rates of a run; without a run, guesses it."""

    def __init__(self, rates: Path | None) -> None:
        """Read the rates of the run in a folder; errors as in `read_rates`."""
        self._run = read_rates(rates) if rates else None

    def predict(self, config: Config, sizes: ModelSizes, gpus: Sequence[Gpu], found: Preflight) -> Speed:
        """Return the speed of a recipe; see `fourfold.plan.speed.SpeedPredictor`."""
        if not config.needs_engines:
            return Speed(text="not predicted for runs of rows.")
        if self._run is None:
            return _guess(config, sizes, gpus, found)
        return Speed(text=_rates_text(self._run), table=_speed_table(config, sizes.policy, self._run))


def _guess(config: Config, sizes: ModelSizes, gpus: Sequence[Gpu], found: Preflight) -> Speed:
    elsewhere = config.trainer.device == "cpu" and found.prompt_tokens is None  # its data are not on this machine
    # Of agents, the number of turns is unknown.
    if elsewhere or config.agents.source != "none" or (device := device_of(config, gpus)) is None:
        return Speed(text=f"unknown. {_NO_RATES}")
    text, seconds = guess_text(config, sizes, device, found.prompt_tokens)
    warning = (
        f"The run takes about {format_duration(seconds)} on this CPU, more than two hours, by the guess below: lower "
        f"steps, batch.prompts_per_step or sampling.max_new_tokens, or train on a GPU."
    )
    is_long = config.trainer.device == "cpu" and seconds > _LONG_SECONDS  # runs on GPUs may take days
    return Speed(text=f"{text} {_NO_RATES}", warnings=[warning] * is_long)


def _rates_text(run: RunRates) -> str:
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


def _speed_table(config: Config, shape: ModelShape, run: RunRates) -> list[str]:
    """Return the lines of a table with one line per policy lag: step time, speed-up, and what waits for what."""
    lags = sorted({*_LAGS, config.asynchrony.max_policy_lag})
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
