"""The cost model: exact where the schedule can be computed by hand, and within the stated errors of measurements.

Measured on two H200 (engine on one, trainer on the other), 0.43B, 32 prompts of 64 tokens x 8 samples, geometric
lengths with a mean of 768 tokens, at most 4,096. The model is within

    5 %    of 512 x 510 tokens in 3.24 s, and of 128 x 4,032 tokens in 20.4 s (`MEASURED`)
    the range measured at lag 0: generation 8.7 to 10.5 s of a step of 10.4 to 11.8 s
    5 %    of the speed-ups 1.73, 2.3 and 3.0 at lags 1, 2 and 4 that another simulation gave, with `FLAT`, in which the
           time of an engine step depends on the number of samples alone, as it does there
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fourfold.rollout.engine_step import EngineStep
from fourfold_tools.step_time.cost import Prediction, Rates, Workload, full_load_tokens_per_second, predict

MEASURED = EngineStep(base=1.51e-3, per_sample=6.1e-6, per_context_token=1.04e-8)
FLAT = EngineStep(base=2e-3, per_sample=9.4e-6)
RATES = Rates(
    engine_step=FLAT,
    prefill_tokens_per_second=500_000,
    train_tokens_per_second=137_000,
    publish_seconds=0.1,
    pause_seconds=0.01,
)
LONG_TAIL = Workload(
    groups_per_step=32,
    group_size=8,
    prompt_tokens=64,
    mean_new_tokens=768,
    max_new_tokens=4096,
    concurrent_samples=1024,
)
# Every sample has 100 tokens, and the engine takes 10 ms per step whatever it has: a generation of a second.
EQUAL = replace(LONG_TAIL, groups_per_step=4, group_size=2, prompt_tokens=0, mean_new_tokens=100, max_new_tokens=100)
STEADY = Rates(engine_step=EngineStep(base=0.01, per_sample=0.0), train_tokens_per_second=1600, publish_seconds=0.25)


def at(lag: int, rates: Rates = RATES, workload: Workload = LONG_TAIL, **changes: Any) -> Prediction:
    return predict(rates, replace(workload, **changes), lag)


def test_lag_0_alternates() -> None:
    rates = replace(STEADY, reward_seconds=0.5, other_seconds=0.125)
    result = at(0, rates, EQUAL)
    assert result.step_seconds == pytest.approx(1 + 0.5 + 0.5 + 0.125 + 0.25)
    assert result.trained_tokens_per_second == pytest.approx(800 / 2.375)
    assert result.trainer_wait == pytest.approx(1.5 / 2.375)
    assert result.engine_wait == 1 and result.mean_token_lag == 0


def test_prompts_are_computed_once_per_group() -> None:
    rates = replace(STEADY, prefill_tokens_per_second=1000, train_tokens_per_second=4000)
    result = at(0, rates, EQUAL, prompt_tokens=50)
    assert result.step_seconds == pytest.approx(4 * 0.05 + 1 + (8 * 150) / 4000 + 0.25)


def test_the_context_costs_time_as_it_grows() -> None:
    rates = replace(STEADY, engine_step=EngineStep(base=0.01, per_sample=0.0, per_context_token=1e-5))
    result = at(0, rates, EQUAL, prompt_tokens=50, mean_new_tokens=100)
    context = sum(8 * (50 + tick) for tick in range(100))
    assert result.step_seconds == pytest.approx(1 + 1e-5 * context + 1200 / 1600 + 0.25, rel=0.01)


def test_the_longest_phase_hides_the_others() -> None:
    trainer_bound = at(1, STEADY, EQUAL, mean_new_tokens=20, max_new_tokens=20)
    assert trainer_bound.step_seconds == pytest.approx(160 / 1600 + 0.25)
    assert trainer_bound.trainer_wait == pytest.approx(0, abs=1e-6) and trainer_bound.limit == "the trainer"
    # Two steps are in flight: each takes a second of sampling, then half a second of training and a quarter to publish.
    assert at(1, STEADY, EQUAL).step_seconds == pytest.approx(1.75 / 2)
    assert at(1, STEADY, EQUAL).limit == "the longest samples"
    assert at(2, STEADY, EQUAL).step_seconds == pytest.approx(0.75)


def test_full_engines_bound_the_step() -> None:
    slow = replace(STEADY, engine_step=EngineStep(base=0.0, per_sample=0.01), train_tokens_per_second=1e9)
    result = at(4, slow, EQUAL, concurrent_samples=8)
    assert result.step_seconds == pytest.approx(8.0) and result.limit == "full engines"
    assert result.engine_utilisation == pytest.approx(1) and result.engine_wait == pytest.approx(0, abs=1e-6)
    assert at(4, slow, EQUAL, concurrent_samples=64, kv_cache_tokens=800).step_seconds == pytest.approx(8.0)
    assert at(4, slow, EQUAL, concurrent_samples=4, replicas=2).step_seconds == pytest.approx(4.0)


@pytest.mark.parametrize("pause", ["keep", "recompute", "wait", "abort"])
@pytest.mark.parametrize("lag", [0, 1, 2, 4])
def test_no_token_lags_by_more_than_the_lag(lag: int, pause: Any) -> None:
    result = at(lag, pause=pause)
    assert 0 <= result.mean_token_lag <= lag
    for share in (result.engine_utilisation, result.trainer_wait, result.engine_wait):
        assert 0 <= share <= 1.0001


def test_waiting_for_running_samples_undoes_the_gain() -> None:
    base = at(0).step_seconds
    assert base / at(4, pause="wait").step_seconds < 1.25
    assert at(2).step_seconds < at(2, pause="recompute").step_seconds < at(2, pause="wait").step_seconds


def test_engines_stand_still_while_they_are_updated() -> None:
    # With one step in flight beside the one that trains, each update of half a second delays the next step by as much.
    paused = replace(STEADY, pause_seconds=0.5, publish_seconds=0.5)
    assert at(1, paused, EQUAL).step_seconds == pytest.approx((1 + 0.5 + 0.5 + 0.5) / 2)
    assert at(0, paused, EQUAL).step_seconds == pytest.approx(1 + 0.5 + 0.5), "nothing runs at lag 0"


@pytest.mark.parametrize("lag", [5, 6, 8])
def test_the_lag_of_a_long_sample_counts_each_of_its_versions(lag: int) -> None:
    # A step takes half a second, and the 225 tokens of a sample 2.25 s: four versions sample 50 tokens, a fifth 25.
    rates = replace(STEADY, train_tokens_per_second=8 * 225 / 0.25)
    result = at(lag, rates, EQUAL, mean_new_tokens=225, max_new_tokens=225)
    assert result.step_seconds == pytest.approx(0.5)
    assert result.mean_token_lag == pytest.approx(lag - (50 * (0 + 1 + 2 + 3) + 25 * 4) / 225)


def test_shared_devices_gain_less() -> None:
    separate, shared = at(2), at(2, shared_devices=True)
    assert shared.step_seconds > separate.step_seconds * 1.2
    assert at(0, shared_devices=True) == at(0)
    # Nothing is gained if the engines are as fast with few samples as with many: the device is never idle.
    linear = replace(STEADY, engine_step=EngineStep(base=0.0, per_sample=0.00125), publish_seconds=0.0)
    assert at(0, linear, EQUAL).step_seconds == pytest.approx(1.5)
    assert at(1, linear, EQUAL, shared_devices=True).step_seconds == pytest.approx(1.5, rel=0.01)


def test_filtered_groups_are_sampled_and_not_trained() -> None:
    result = at(0, STEADY, EQUAL, groups_per_step=8, trained_share=0.5)
    assert result.step_seconds == pytest.approx(1 + 0.5 + 0.25)
    assert result.trained_tokens_per_second == pytest.approx(800 / 1.75)


def test_a_large_run_is_predicted_from_a_part_of_it() -> None:
    part = at(1, STEADY, EQUAL, groups_per_step=64, group_size=8, replicas=4)
    rates = replace(STEADY, train_tokens_per_second=16 * STEADY.train_tokens_per_second)
    whole = at(1, rates, EQUAL, groups_per_step=1024, group_size=8, replicas=64)
    assert whole.step_seconds == pytest.approx(part.step_seconds)
    assert whole.trained_tokens_per_second == pytest.approx(16 * part.trained_tokens_per_second)


def test_the_same_seed_gives_the_same_prediction() -> None:
    assert predict(RATES, LONG_TAIL, 2, seed=3) == predict(RATES, LONG_TAIL, 2, seed=3)
    assert predict(RATES, LONG_TAIL, 2, seed=3) != predict(RATES, LONG_TAIL, 2, seed=4)


def test_impossible_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="mean_new_tokens = 5000 must be from 1 to max_new_tokens = 4096"):
        replace(LONG_TAIL, mean_new_tokens=5000)


@pytest.mark.parametrize(("samples", "tokens", "seconds"), [(512, 510, 3.24), (128, 4032, 20.4)])
def test_generation_of_equal_lengths_takes_the_measured_time(samples: int, tokens: int, seconds: float) -> None:
    rates = replace(RATES, engine_step=MEASURED, train_tokens_per_second=1e12, publish_seconds=0.0)
    result = at(0, rates, groups_per_step=samples, group_size=1, mean_new_tokens=tokens, max_new_tokens=tokens)
    assert result.step_seconds == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize("step", [MEASURED, FLAT])
def test_a_synchronous_step_takes_the_measured_time(step: EngineStep) -> None:
    result = at(0, replace(RATES, engine_step=step))
    assert 10.4 <= result.step_seconds <= 11.8
    assert 8.7 <= result.step_seconds * result.trainer_wait <= 10.5


@pytest.mark.parametrize(("lag", "speed_up"), [(1, 1.73), (2, 2.3), (4, 3.0)])
def test_speed_ups_are_those_of_an_earlier_simulation(lag: int, speed_up: float) -> None:
    assert at(0).step_seconds / at(lag).step_seconds == pytest.approx(speed_up, rel=0.05)


def test_long_contexts_lower_the_speed_up() -> None:
    rates = replace(RATES, engine_step=MEASURED)
    speed_ups = [at(0, rates).step_seconds / at(lag, rates).step_seconds for lag in (1, 2, 4)]
    assert speed_ups == pytest.approx([1.6, 2.0, 2.35], rel=0.05)


def test_full_load_is_that_of_the_engine() -> None:
    rates = replace(RATES, engine_step=MEASURED)
    # 512 samples of 64 + 510 tokens ran at 77,000 to 81,000 tokens per second.
    equal = replace(LONG_TAIL, concurrent_samples=512, mean_new_tokens=510, max_new_tokens=510)
    assert full_load_tokens_per_second(rates, equal) == pytest.approx(79_000, rel=0.05)
    assert full_load_tokens_per_second(rates, replace(equal, replicas=3)) == pytest.approx(3 * 79_000, rel=0.05)
