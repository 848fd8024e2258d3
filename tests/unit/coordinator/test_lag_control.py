"""The controller of the policy lag, on a simulated queue: mismatch = floor + slope * lag, with noise."""

from __future__ import annotations

import json
import math
import random
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from fourfold import metrics as m
from fourfold.config.schema import AsynchronyConfig
from fourfold_coordinator.state.ledger import StepRow
from fourfold_coordinator.training.lag_control import LagController

TARGET = 0.02
START = 16


def controller(max_lag: int, target: float = TARGET) -> LagController:
    return LagController(AsynchronyConfig(max_policy_lag=max_lag, target_mismatch=target))


@dataclass
class Plant:
    """A run whose engines sample `limit` batches ahead, and trained batches in order of admission."""

    max_lag: int
    floor: float
    slope: float
    noise: float = 0.05  # standard deviation, as a share of the mismatch
    seed: int = 0
    reach: int = 64  # batches that the engines manage to sample ahead
    reasons: list[tuple[int, str]] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)
    rows: list[StepRow] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.control = controller(self.max_lag)
        self._random, self._queue, self._admitted = random.Random(self.seed), deque[int](), 0

    def run(self, steps: int) -> Plant:
        for _ in range(steps):
            version = len(self.limits)
            while self._admitted < min(self.control.limit, self.reach) + version + 1:
                self._queue.append(version)
                self._admitted += 1
            lag = version - self._queue.popleft()
            mismatch = (self.floor + self.slope * lag) * self._random.gauss(1, self.noise)
            self.step({m.MISMATCH_MEAN: mismatch, m.EFFECTIVE_SAMPLE_SIZE: 0.95, m.TOKEN_LAG_MAX: lag, m.UPDATES: 1})
        return self

    def step(self, metrics: dict[str, Any]) -> None:
        step = len(self.limits) + 1
        if reason := self.control.observe(step, metrics):
            self.reasons.append((step, reason))
        self.limits.append(self.control.limit)
        self.rows.append(row(step, metrics))

    @property
    def visited(self) -> list[int]:
        """The limits in order, each change once."""
        return [limit for i, limit in enumerate(self.limits) if i == 0 or limit != self.limits[i - 1]]


def row(step: int, metrics: dict[str, Any]) -> StepRow:
    return StepRow(step, 0, "", 0, 1.0, json.loads(json.dumps(metrics)))


def measured(mismatch: float, **changes: Any) -> dict[str, Any]:
    metrics = {m.MISMATCH_MEAN: mismatch, m.EFFECTIVE_SAMPLE_SIZE: 0.95}
    return metrics | {name.replace("__", "/"): value for name, value in changes.items()}


def observe(control: LagController, first: int, values: list[dict[str, Any]]) -> list[str]:
    """Observe steps; the first one is `first` steps after the start-up, in which the lag grows."""
    return [control.observe(START + step, metrics) for step, metrics in enumerate(values, first)]


@pytest.mark.parametrize("max_lag", [0, 4])
def test_without_a_target_the_limit_is_constant(max_lag: int) -> None:
    control = controller(max_lag, target=0)
    assert observe(control, 1, [measured(9.0, mismatch__ess=0.01)] * 50) == [""] * 50
    assert control.limit == max_lag


def test_four_steps_above_the_target_lower_the_limit_with_the_reason() -> None:
    control = controller(4)
    values = [measured(0.026, mismatch__ess=0.83)] * 4
    assert observe(control, 1, values) == ["", "", "", REASON]
    assert control.limit == 3


REASON = "policy lag limit 4 -> 3: mean |old - behavior| 0.026 over 4 steps is above target_mismatch 0.02 (ess 0.83)"


def test_the_first_steps_in_which_the_lag_grows_do_not_count() -> None:
    control = controller(4)
    assert [control.observe(step, measured(0.026)) for step in range(1, 8)] == [""] * 7
    assert control.observe(8, measured(0.026))


def test_one_unusual_step_changes_nothing() -> None:
    control = controller(4)
    assert not any(observe(control, 1, [measured(0.01), measured(5.0), measured(0.01), measured(0.01)] * 5))


def test_few_effective_tokens_lower_the_limit_though_the_mean_is_low() -> None:
    control = controller(4)
    *_, reason = observe(control, 1, [measured(0.004, mismatch__ess=0.4)] * 4)
    assert reason == "policy lag limit 4 -> 3: ess 0.40 over 4 steps is below 0.5 (mean |old - behavior| 0.004)"
    observe(control, 20, [measured(0.004, mismatch__ess=0.55)] * 40)
    assert control.limit == 3, "not raised either: the ess has little room"


def test_steps_that_train_samples_of_the_old_limit_do_not_count() -> None:
    control = controller(8)
    observe(control, 1, [measured(0.04)] * 4)
    assert control.limit == 4
    assert observe(control, 5, [measured(0.04)] * 8) == [""] * 8, "eight steps were admitted before"
    assert observe(control, 13, [measured(0.025)] * 4)[-1].startswith("policy lag limit 4 -> 3")


def test_a_low_mismatch_raises_the_limit_after_twelve_steps() -> None:
    control = controller(8)
    observe(control, 1, [measured(0.04)] * 4)
    reasons = observe(control, 5, [measured(0.01)] * (8 + 12))
    assert reasons[:-1] == [""] * 19
    assert reasons[-1] == (
        "policy lag limit 4 -> 5: mean |old - behavior| 0.01 over 12 steps is at most 80% of target_mismatch 0.02 "
        "(ess 0.95)"
    )
    assert not any(observe(control, 25, [measured(0.017)] * 50)), "between 80 % and the target nothing changes"
    assert not any(observe(control, 75, [measured(TARGET)] * 50))


def test_the_limit_that_failed_is_not_tried_again_for_a_while() -> None:
    control = controller(2)
    observe(control, 1, [measured(0.022)] * 4)
    reasons = observe(control, 5, [measured(0.01)] * 60)
    assert [step for step, reason in enumerate(reasons, 5) if reason] == [4 + 32]


def test_where_engines_lag_less_than_the_limit_the_limit_begins_at_their_lag() -> None:
    control = controller(16)
    observe(control, 1, [measured(0.022, async__token_lag_max=lag) for lag in (4, 4, 3, 4)])
    assert control.limit == 3
    control = controller(16)
    assert not any(observe(control, 1, [measured(0.5, async__token_lag_max=0)] * 20)), "the lag adds nothing"


@pytest.mark.parametrize(
    "broken",
    [
        {m.MISMATCH_MEAN: math.nan},
        {m.MISMATCH_MEAN: None},
        {m.EFFECTIVE_SAMPLE_SIZE: math.inf},
        {m.EFFECTIVE_SAMPLE_SIZE: None},
        {m.UPDATES: 0.0},
    ],
)
def test_steps_without_a_measurement_are_ignored(broken: dict[str, Any]) -> None:
    control = controller(4)
    bad = measured(1.0) | broken
    assert not any(observe(control, 1, [bad] * 30))
    assert not any(observe(control, 31, [{}] * 30))
    observe(control, 61, [measured(0.026), bad, measured(0.026), bad, measured(0.026), bad])
    assert control.limit == 4, "three measurements"
    observe(control, 67, [measured(0.026)])
    assert control.limit == 3


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.15])
@pytest.mark.parametrize(
    ("max_lag", "floor", "slope", "best"),
    [(4, 0.004, 0.006, 2), (8, 0.003, 0.003, 5), (16, 0.002, 0.0015, 12), (4, 0.001, 0.05, 0), (3, 0.002, 0.002, 3)],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_limit_settles_near_the_largest_that_meets_the_target(
    max_lag: int, floor: float, slope: float, best: int, noise: float, seed: int
) -> None:
    plant = Plant(max_lag, floor, slope, noise, seed).run(1000)
    late = plant.limits[200:]
    assert 0.6 * best <= sum(late) / len(late) <= best + 0.1
    assert sum(limit > best for limit in late) < 0.05 * len(late), "trials of a higher limit are short and rare"


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.1])
def test_a_run_between_two_limits_changes_ever_more_rarely(noise: float) -> None:
    """At 2 the mismatch is far below the target, at 3 it is above: each raise is taken back."""
    plant = Plant(4, floor=0.0, slope=0.007, noise=noise).run(2000)
    raised = [step for step, reason in plant.reasons if "at most" in reason]
    pauses = [after - before for before, after in pairwise(raised)]
    assert pauses[-1] >= 512 and all(after > 1.5 * before or after > 512 for before, after in pairwise(pauses)), pauses
    assert len(plant.reasons) <= 16


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("max_lag", [1, 2, 4, 16])
def test_a_numerical_floor_above_the_target_does_not_cost_the_lag(max_lag: int, noise: float) -> None:
    plant = Plant(max_lag, floor=0.03, slope=0.0, noise=noise).run(1000)
    assert sum(plant.limits[100:]) / 900 > 0.85 * max_lag
    restored = [reason for _, reason in plant.reasons if "not the lag" in reason]
    assert 1 <= len(restored) <= 5
    assert restored[0].endswith("; compare the precisions of engine and trainer, or raise target_mismatch 0.02")
    assert (
        f"-> {max_lag}: the cause is not the lag, as mean |old - behavior| was 0.03 and is 0.03" in restored[0] or noise
    )


def test_a_limit_is_restored_if_the_lag_adds_less_than_a_quarter() -> None:
    assert Plant(4, floor=0.0296, slope=0.0016, noise=0.0).run(30).visited == [4, 2, 4]
    assert Plant(4, floor=0.024, slope=0.003, noise=0.0).run(30).visited == [4, 2]


def test_a_limit_is_not_restored_while_the_mismatch_grows_by_itself() -> None:
    control = controller(4)
    observe(control, 1, [measured(0.025)] * 4)
    observe(control, 5, [measured(0.05)] * 40)
    assert control.limit == 3
    reasons = observe(control, 45, [measured(0.09)] * 4)
    assert any(reason.startswith("policy lag limit 3 -> 0: mean") for reason in reasons), "it grew by more than a half"


def test_above_a_floor_the_lag_is_lowered_while_that_helps_and_not_to_0_for_nothing() -> None:
    plant = Plant(8, floor=0.025, slope=0.003, noise=0.0).run(1000)
    assert plant.visited[:4] == [8, 3, 1, 0]
    assert plant.limits.count(0) < 30, "0 would remove a tenth of the mismatch, and is tried rarely"


def test_the_held_limit_is_left_when_the_mismatch_grows() -> None:
    plant = Plant(4, floor=0.03, slope=0.0, noise=0.0).run(30)
    assert plant.control.limit == 4
    plant.floor, plant.slope = 0.03, 0.006
    plant.run(30)
    assert plant.control.limit < 4


def test_a_target_that_is_met_only_later_raises_the_limit_again() -> None:
    plant = Plant(8, floor=0.002, slope=0.01).run(200)
    assert plant.control.limit == 1
    plant.slope = 0.002
    plant.run(400)
    assert plant.control.limit == 8


def test_a_restart_continues_as_if_nothing_had_happened() -> None:
    plant = Plant(4, floor=0.004, slope=0.006, noise=0.1)
    plant.run(57)
    plant.step(measured(math.nan))
    plant.step(measured(0.5) | {m.UPDATES: 0})
    plant.run(80)
    rows = [row(r.step, {k: None if v != v else v for k, v in r.metrics.items()}) for r in plant.rows]
    for count in (0, 3, 10, 50, 100, len(rows)):
        again = controller(4)
        observe(again, 1, [measured(3.0)] * 20)
        again.replay(rows[:count])
        limits = [again.limit] if count else []
        for r in rows[count:]:
            again.observe(r.step, r.metrics)
            limits.append(again.limit)
        assert limits == (plant.limits[count - 1 :] if count else plant.limits)


@pytest.mark.parametrize(
    ("load", "limit"), [(1.0, 16), (1.01, 12), (1.2, 12), (1.32, 12), (1.34, 11), (1.6, 10), (2.0, 8), (16.5, 0)]
)
def test_a_load_a_little_above_1_lowers_the_limit_by_a_quarter(load: float, limit: int) -> None:
    control = controller(START)
    observe(control, 1, [measured(load * TARGET)] * 4)
    assert control.limit == limit
