"""Predicts the step time of a run at each policy lag from measured rates, by a simulation of its schedule.

    admission   groups are admitted in order while fewer than (lag + 1) * groups_per_step are admitted and not yet
                published. A group goes whole to the replica with the fewest samples. One without room waits, and so
                do all after it.
    engine      all samples of an engine get one token per engine step (`fourfold.rollout.engine_step`). Prompts are
                computed at `prefill_tokens_per_second`, once per group; decoding stops meanwhile.
    trainer     step k starts when every group of step k is scored and step k - 1 is published. It takes its tokens /
                `train_tokens_per_second` and `other_seconds`, then `publish_seconds`.

Lag 0 needs no case of its own: the groups of a step are admitted when the step before is published.

Assumptions:
- Lengths are geometric (each token ends a sample with the same probability), cut at `max_new_tokens`.
- A KV cache of T tokens holds T / (prompt + mean completion) samples. Preemption costs nothing.
- Every group is ready `reward_seconds` after its last sample. Filtered groups only add to the groups of a step.
- Services on different devices do not slow each other. With `shared_devices`, each runs at half its speed while both
  engines and trainer work.
- Evaluations, checkpoints, failures and agents' samples are left out.

`tests/unit/tools/step_time/test_cost.py` compares the predictions with measurements; its docstring has the errors.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from fourfold.rollout.engine_step import EngineStep

# Samples that are simulated after the start, in a number of steps that averages the random lengths.
_SAMPLES: Final = 16_384
_MAX_STEPS: Final = 32
# With several replicas, more samples in a step change its time by less than random lengths do.
_ENOUGH_PER_STEP: Final = 2_048

Pause = Literal["keep", "recompute", "wait", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Measured or assumed rates of the services."""

    engine_step: EngineStep
    prefill_tokens_per_second: float = math.inf  # of one replica
    train_tokens_per_second: float  # prompts included
    publish_seconds: float = 0.0
    pause_seconds: float = 0.0  # part of it in which engines stand still
    reward_seconds: float = 0.0  # from the last sample of a group to its scores and reference log-probabilities
    other_seconds: float = 0.0  # the coordinator's own work per step, while the trainer stands still


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes of a step and of the engines."""

    groups_per_step: int  # including those that a filter replaces
    group_size: int
    prompt_tokens: float
    mean_new_tokens: float
    max_new_tokens: int
    trained_share: float = 1.0  # of the groups: those that the filter keeps
    replicas: int = 1
    concurrent_samples: int = 1024  # of one replica
    kv_cache_tokens: float = math.inf  # of one replica
    pause: Pause = "keep"
    shared_devices: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.mean_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"mean_new_tokens = {self.mean_new_tokens:g} must be from 1 to max_new_tokens = {self.max_new_tokens}"
            )

    @property
    def running_samples(self) -> int:
        """Most samples that one replica decodes at the same time."""
        in_cache = self.kv_cache_tokens / (self.prompt_tokens + self.mean_new_tokens)
        return max(self.group_size, int(min(self.concurrent_samples, in_cache)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A steady state of the run."""

    lag: int  # asynchrony.max_policy_lag
    step_seconds: float
    trained_tokens_per_second: float  # sampled tokens in the loss
    engine_utilisation: float  # tokens per second, relative to engines that are always full
    trainer_wait: float  # share of time in which the trainer waits for samples, as async/trainer_wait_fraction
    engine_wait: float  # share of time in which the lag admits no more groups, as async/rollout_wait_fraction
    mean_token_lag: float  # policy versions

    @property
    def limit(self) -> str:
        """Name the part that limits the step time."""
        if self.trainer_wait < 0.05:
            return "the trainer"
        return "full engines" if self.engine_wait < 0.05 else "the longest samples"


def predict(rates: Rates, workload: Workload, lag: int, *, seed: int = 0) -> Prediction:
    """Simulate the schedule at `max_policy_lag = lag` until its steps repeat; the same seed gives the same result."""
    part = _representative(workload)
    ratio = part.groups_per_step / workload.groups_per_step
    rates = replace(rates, train_tokens_per_second=rates.train_tokens_per_second * ratio)
    result = _Simulation(rates, part, lag, seed).run()
    return replace(result, trained_tokens_per_second=result.trained_tokens_per_second / ratio)


def _representative(workload: Workload) -> Workload:
    """Return a part of a large run with the same load on each replica: fewer replicas, their share of the groups."""
    samples = workload.groups_per_step * workload.group_size
    replicas = (
        max(1, workload.replicas * _ENOUGH_PER_STEP // samples) if samples > _ENOUGH_PER_STEP else workload.replicas
    )
    groups = max(1, round(workload.groups_per_step * replicas / workload.replicas))
    return replace(workload, replicas=replicas, groups_per_step=groups) if replicas < workload.replicas else workload


def full_load_tokens_per_second(rates: Rates, workload: Workload) -> float:
    """Return the tokens per second of all replicas together if each always runs as many samples as it can."""
    mean, square = _moments(_end_probability(workload), workload.max_new_tokens)
    # A running sample is seen in proportion to its length, at a random place of it.
    context = workload.prompt_tokens + square / (2 * mean)
    samples = workload.running_samples
    prefill = workload.prompt_tokens / workload.group_size / mean / rates.prefill_tokens_per_second
    return workload.replicas / (rates.engine_step.seconds(samples, samples * context) / samples + prefill)


def _moments(end: float, longest: int) -> tuple[float, float]:
    """Return mean and mean square of a geometric length with end probability `end`, cut at `longest`."""
    if end == 0:
        return float(longest), float(longest) ** 2
    cut = math.exp(longest * math.log1p(-end)) if end < 1 else 0.0  # P(the length before the cut > longest)
    mean = (1 - cut) / end
    return mean, 2 * (mean - longest * cut) / end - mean


def _end_probability(workload: Workload) -> float:
    """Return the probability with which a token ends a sample, so that the mean length is as given."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if _moments(middle, workload.max_new_tokens)[0] > workload.mean_new_tokens:
            low = middle
        else:
            high = middle
    return high if high > 1e-9 else 0.0


class _Engine:
    """One replica. Its clock `tick` counts engine steps: a sample of n tokens ends n ticks after its start."""

    def __init__(self, step: EngineStep, prompt_tokens: float, lag: int) -> None:
        self.tick = self.time = 0.0
        self.stall = 0.0  # seconds until it decodes again
        self.due = math.inf  # when its next sample ends
        self.publish_ticks: deque[float] = deque(maxlen=lag)  # no sample sees more updates
        self.running: list[tuple[float, float, int]] = []  # heap of (last tick, first tick, group)
        self._started = 0.0  # sum of the first ticks of all running samples
        self._step, self._prompt_tokens = step, prompt_tokens

    @property
    def context(self) -> float:
        """Tokens in the KV cache."""
        return len(self.running) * (self._prompt_tokens + self.tick) - self._started

    def add(self, length: int, group: int) -> None:
        heapq.heappush(self.running, (self.tick + length, self.tick, group))
        self._started += self.tick

    def pop_done(self) -> Iterator[tuple[float, float, int]]:
        """Remove and yield the samples that have ended."""
        while self.running and self.running[0][0] <= self.tick + 1e-6:
            self._started -= self.running[0][1]
            yield heapq.heappop(self.running)

    def advance(self, now: float, speed: float) -> None:
        """Decode until `now`."""
        seconds, self.time = (now - self.time) * speed, now
        waited = min(self.stall, seconds)
        self.stall -= waited
        if not self.running or seconds <= waited:
            return
        linear, square = self._cost()
        rest = seconds - waited
        # The positive root of square x^2 + linear x = rest, in the form that stays exact for square = 0.
        self.tick += 2 * rest / (linear + math.sqrt(linear * linear + 4 * square * rest))

    def schedule(self, speed: float) -> float:
        """Compute and return `due`."""
        self.due = math.inf
        if self.running:
            (linear, square), ticks = self._cost(), max(self.running[0][0] - self.tick, 0.0)
            self.due = self.time + (self.stall + linear * ticks + square * ticks * ticks) / speed
        return self.due

    def _cost(self) -> tuple[float, float]:
        """Return l and s: the next x ticks take l x + s x^2 seconds. The context grows by one token per sample."""
        samples = len(self.running)
        return self._step.seconds(samples, self.context), self._step.per_context_token * samples / 2


@dataclass(slots=True)
class _Totals:
    """Sums since the start."""

    time: float = 0.0
    trainer_waited: float = 0.0
    engines_waited: float = 0.0
    tokens: int = 0  # sampled in published steps
    lags: float = 0.0  # sum over these tokens


@dataclass(slots=True)
class _Step:
    """The groups of one step."""

    missing: int = 0  # samples that have not ended
    tokens: int = 0
    lags: float = 0.0
    ready: float = math.inf


@dataclass(slots=True)
class _Trainer:
    phase: Literal["wait", "train", "drain", "publish"] = "wait"
    left: float = math.inf  # seconds of its phase, at full speed


class _Simulation:
    def __init__(self, rates: Rates, workload: Workload, lag: int, seed: int) -> None:
        self.rates, self.work, self.lag = rates, workload, lag
        self.random, self.end = random.Random(seed), _end_probability(workload)
        self.engines = [_Engine(rates.engine_step, workload.prompt_tokens, lag) for _ in range(workload.replicas)]
        self.due: list[tuple[float, int]] = []  # heap of the engines' `due`; entries that changed since are ignored
        self.trainer, self.totals, self.speed = _Trainer(), _Totals(), 1.0
        self.version = self.admitted = 0
        self.queue: deque[int] = deque()  # admitted groups without room
        self.steps: dict[int, _Step] = {}

    def run(self) -> Prediction:
        # At the start lag + 1 steps are admitted at once. Three times as many steps later, their traces are gone.
        warm_up = 3 * (self.lag + 1)
        samples = self.work.groups_per_step * self.work.group_size
        count = max(min(_SAMPLES // samples, _MAX_STEPS), 2 * (self.lag + 1))
        self._admit()
        self._run_until(warm_up)
        before = replace(self.totals)
        self._run_until(warm_up + count)
        after, kept = self.totals, self.work.trained_share
        seconds, tokens = after.time - before.time, after.tokens - before.tokens
        return Prediction(
            lag=self.lag,
            step_seconds=seconds / count,
            trained_tokens_per_second=tokens * kept / seconds,
            engine_utilisation=tokens / seconds / full_load_tokens_per_second(self.rates, self.work),
            trainer_wait=(after.trainer_waited - before.trainer_waited) / seconds,
            engine_wait=(after.engines_waited - before.engines_waited) / seconds,
            mean_token_lag=(after.lags - before.lags) / tokens,
        )

    def _run_until(self, version: int) -> None:
        while self.version < version:
            while self.due and self.due[0][0] != self.engines[self.due[0][1]].due:
                heapq.heappop(self.due)
            engine_due, index = self.due[0] if self.due else (math.inf, -1)
            trainer_due = self.totals.time + self.trainer.left / self.speed
            self._pass_time(min(engine_due, trainer_due))
            if trainer_due <= engine_due:
                self._end_phase()
            else:
                self._end_samples(self.engines[index])
            self._set_speed()

    def _pass_time(self, now: float) -> None:
        seconds = now - self.totals.time
        if self.trainer.phase in ("wait", "drain"):
            self.totals.trainer_waited += seconds
        if not self.queue:
            self.totals.engines_waited += seconds
        self.trainer.left -= seconds * self.speed
        self.totals.time = now

    def _set_speed(self) -> None:
        """With shared devices, halve the speed of all while both trainer and engines work."""
        sampling = any(engine.running for engine in self.engines)
        both = self.work.shared_devices and sampling and self.trainer.phase == "train"
        speed = 0.5 if both else 1.0
        if speed == self.speed:
            return
        for engine in self.engines:
            engine.advance(self.totals.time, self.speed)
        self.speed = speed
        self._schedule(self.engines)

    def _schedule(self, engines: Iterable[_Engine]) -> None:
        for engine in engines:
            due = engine.schedule(self.speed)
            if due < math.inf:
                heapq.heappush(self.due, (due, self.engines.index(engine)))

    # -- engines ---------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Admit the groups that the lag allows, and start those with room in an engine."""
        work = self.work
        while self.admitted < (self.version + self.lag + 1) * work.groups_per_step:
            self.queue.append(self.admitted)
            step = self.steps.setdefault(self.admitted // work.groups_per_step + 1, _Step())
            step.missing += work.group_size
            self.admitted += 1
        changed = set()
        while self.queue and self.trainer.phase != "drain":
            engine = min(self.engines, key=lambda engine: len(engine.running))
            if len(engine.running) + work.group_size > work.running_samples:
                break
            engine.advance(self.totals.time, self.speed)
            engine.stall += work.prompt_tokens / self.rates.prefill_tokens_per_second
            group = self.queue.popleft()
            for _ in range(work.group_size):
                engine.add(self._draw_length(), group)
            changed.add(engine)
        self._schedule(changed)

    def _draw_length(self) -> int:
        if self.end == 0 or self.end == 1:
            return 1 if self.end else self.work.max_new_tokens
        length = 1 + int(math.log1p(-self.random.random()) / math.log1p(-self.end))
        return min(length, self.work.max_new_tokens)

    def _end_samples(self, engine: _Engine) -> None:
        now, work = self.totals.time, self.work
        engine.advance(now, self.speed)
        engine.tick = max(engine.tick, engine.running[0][0])  # the time is rounded, the number of tokens is not
        for last, first, group in engine.pop_done():
            number = group // work.groups_per_step + 1
            step = self.steps[number]
            later = sum(last - tick for tick in engine.publish_ticks if tick > first)  # tokens of newer versions
            started = self.version - sum(tick > first for tick in engine.publish_ticks)
            step.lags += (number - 1 - started) * (last - first) - later
            step.tokens += round(last - first)
            step.missing -= 1
            if not step.missing:
                step.ready = now + self.rates.reward_seconds
        if self.trainer.phase == "drain" and not any(engine.running for engine in self.engines):
            self.trainer.left = 0.0
        self._admit()
        self._schedule([engine])
        self._await_samples()

    # -- trainer ---------------------------------------------------------------------------------------------------

    def _await_samples(self) -> None:
        if self.trainer.phase == "wait" and (step := self.steps.get(self.version + 1)) is not None:
            self.trainer.left = max(step.ready - self.totals.time, 0.0)

    def _end_phase(self) -> None:
        trainer, rates = self.trainer, self.rates
        if trainer.phase == "wait":
            step = self.steps[self.version + 1]
            samples = self.work.groups_per_step * self.work.group_size
            tokens = (step.tokens + samples * self.work.prompt_tokens) * self.work.trained_share
            trainer.phase, trainer.left = "train", rates.other_seconds + tokens / rates.train_tokens_per_second
        elif trainer.phase == "train" and self.work.pause == "wait" and any(e.running for e in self.engines):
            trainer.phase, trainer.left = "drain", math.inf
        elif trainer.phase in ("train", "drain"):
            trainer.phase, trainer.left = "publish", rates.publish_seconds
            self._stop_engines(rates.pause_seconds)
        else:
            self._end_step()

    def _stop_engines(self, seconds: float) -> None:
        """Let engines stand still for an update; with recompute and abort they compute all contexts again."""
        for engine in self.engines:
            engine.advance(self.totals.time, self.speed)
            engine.stall += seconds
            if self.work.pause in ("recompute", "abort"):
                engine.stall += engine.context / self.rates.prefill_tokens_per_second
        self._schedule(self.engines)

    def _end_step(self) -> None:
        self.trainer.phase, self.trainer.left = "wait", math.inf
        self.version += 1
        step = self.steps.pop(self.version)
        self.totals.tokens += step.tokens
        self.totals.lags += step.lags
        for engine in self.engines:
            engine.advance(self.totals.time, self.speed)
            engine.publish_ticks.append(engine.tick)
        self._admit()
        self._schedule(self.engines)
        self._await_samples()
