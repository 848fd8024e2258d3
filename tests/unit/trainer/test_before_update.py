"""Old log-probabilities come from the micro-batches of the updates, and penalties are where the recipe puts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from fourfold import metrics as m
from fourfold.algorithm.state import AlgorithmState
from fourfold.arrays import Float32Array, Int64Array
from fourfold.config import Config
from fourfold.nn.batching import TokenBatch
from fourfold.sample import Sample
from fourfold_trainer.service import metrics
from fourfold_trainer.step.shadow import compare_gradients
from fourfold_trainer.step.step_result import StepResult
from fourfold_trainer.step.train_step import train_step
from tests.fakes.toy_engine import ToyEngine
from tests.fakes.trainer_engine import group_of
from tests.unit.trainer.test_train_step import batch, recipe, run

MINI_BATCHES = {"mini_batches_per_step": 2, "epochs_per_step": 2}


class RecordingEngine(ToyEngine):
    """Keeps the micro-batches of passes without a gradient."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.logprob_shares: list[Sequence[Sequence[TokenBatch]]] = []

    def compute_logprobs(self, shares: Sequence[Sequence[TokenBatch]], **kwargs: Any) -> list[list[Float32Array]]:
        self.logprob_shares.append([list(share) for share in shares])
        return super().compute_logprobs(shares, **kwargs)


def recorded(samples: Sequence[Sample], config: Config) -> tuple[RecordingEngine, StepResult]:
    engine = RecordingEngine(config)
    state = AlgorithmState()
    measure = partial(compare_gradients, engine, state)  # type: ignore[arg-type]
    return engine, train_step(engine, samples, config, step=1, state=state, measure=measure)  # type: ignore[arg-type]


def described(tokens: TokenBatch) -> tuple[list[int], list[int], list[int]]:
    return tokens.token_ids.tolist(), tokens.lengths.tolist(), tokens.rows.tolist()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"preset": "reinforce++"},  # the penalty is needed for the advantages
        {"kl": {"coef": 0.1, "target": 0.1}},
        {"shaping": {"mask_truncated": True}},
    ],
)
def test_the_micro_batches_are_those_of_the_first_epoch(algorithm: dict[str, Any], ranks: int) -> None:
    config = recipe(ranks=ranks, budget=24, algorithm=algorithm, batch=MINI_BATCHES)
    samples = [replace(s, truncated=i == 1) for i, s in enumerate(batch())]
    engine, result = recorded(samples, config)
    computed, _ = engine.logprob_shares  # the second is that of the noise
    updates = engine.policy_shares[: len(engine.policy_shares) // 2]
    assert len(updates) == 2
    for rank in range(ranks):
        trained = [described(policy.tokens) for update in updates for policy in update[rank]]
        assert [described(tokens) for tokens in computed[rank]][: len(trained)] == trained
    assert metrics.summarise(result, config)[m.LOGPROB_NOISE] < 1e-6  # the toy computes in float64, and o is float32


def test_only_samples_with_an_advantage_are_passed_twice() -> None:
    config = recipe(batch=MINI_BATCHES)
    engine, result = recorded(batch(), config)
    computed, _ = engine.logprob_shares
    tokens = sum(batch_.token_count for batch_ in computed[0])
    constant = {i for i, s in enumerate(batch()) if s.group_id == "c"}
    assert tokens == sum(len(s.token_ids) for i, s in enumerate(batch()) if i not in constant)
    assert result.targets.outputs.old_logprobs is not None
    unknown = [np.isnan(row).all() for row in result.targets.outputs.old_logprobs]
    assert [bool(u) for u in unknown] == [i in constant for i in range(len(batch()))]


def test_with_one_update_a_step_there_is_no_pass_and_no_noise() -> None:
    engine, result = recorded(batch(), recipe())
    assert engine.logprob_shares == []
    assert m.LOGPROB_NOISE not in metrics.summarise(result, recipe())


def test_noise_is_the_largest_difference_of_the_first_update(monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe(batch=MINI_BATCHES)
    original = ToyEngine.compute_logprobs

    def rounded(self: ToyEngine, shares: Sequence[Sequence[TokenBatch]], **kwargs: Any) -> list[list[Float32Array]]:
        found = original(self, shares, **kwargs)
        found[0][0][0] += np.float32(0.25)
        found[0][-1][-1] -= np.float32(0.125)
        return found

    monkeypatch.setattr(ToyEngine, "compute_logprobs", rounded)
    _, result = run(batch(), config)
    assert metrics.summarise(result, config)[m.LOGPROB_NOISE] == pytest.approx(0.25, rel=1e-5)


def first_run(rows: Int64Array) -> int:
    """Return the number of neighbours at the start of `rows`: tokens of one sample."""
    ends = np.flatnonzero(np.abs(np.diff(rows)) != 1)
    return int(ends[0]) + 1 if len(ends) else len(rows)


class NoisyEngine(RecordingEngine):
    """Rounds the second pass of a step differently."""

    def compute_logprobs(self, shares: Sequence[Sequence[TokenBatch]], **kwargs: Any) -> list[list[Float32Array]]:
        found = super().compute_logprobs(shares, **kwargs)
        if len(self.logprob_shares) == 2:
            found[0][0][0] += np.float32(0.25)
            found[-1][0][-1] -= np.float32(0.5)
        return found


def test_the_noise_of_later_epochs_is_that_of_one_micro_batch_of_each_rank_before_the_first_update() -> None:
    config = recipe(ranks=2, budget=16, batch=MINI_BATCHES)

    twins = [replace(s, sample_id=f"{s.sample_id}-twin", group_id=f"{s.group_id}-twin") for s in batch()]

    def noisy(step: int) -> tuple[NoisyEngine, StepResult]:
        engine = NoisyEngine(config)
        return engine, train_step(engine, [*batch(), *twins], config, step=step, state=AlgorithmState())  # type: ignore[arg-type]

    engine, result = noisy(201)
    _, computed = engine.logprob_shares
    assert max(len(share) for share in engine.policy_shares[2]) > 1
    for rank, share in enumerate(computed):
        assert [described(tokens) for tokens in share] == [described(engine.policy_shares[2][rank][0].tokens)]
    found = metrics.summarise(result, config)
    assert found[m.LATER_NOISE] == pytest.approx(0.5, rel=1e-5)
    counts = first_run(computed[0][0].rows), first_run(computed[1][0].rows[::-1])
    assert found[m.LATER_SAMPLE_NOISE] == pytest.approx(max(0.25 / counts[0], 0.5 / counts[1]), rel=1e-5)
    assert found[m.LOGPROB_NOISE] < 1e-6
    engine, result = noisy(202)
    assert len(engine.logprob_shares) == 1 and m.LATER_NOISE not in metrics.summarise(result, config)


def test_steps_that_train_the_critic_alone_need_no_pass_of_the_policy() -> None:
    algorithm = {"preset": "ppo", "kl": {"coef": 0}}  # a penalty in the reward needs the pass in every step
    config = recipe(algorithm=algorithm, critic={"policy_starts_at_step": 3}, batch=MINI_BATCHES)

    def measured(step: int) -> tuple[int, bool]:
        engine = RecordingEngine(config)
        result = train_step(engine, batch(), config, step=step, state=AlgorithmState())  # type: ignore[arg-type]
        return len(engine.logprob_shares), m.LATER_NOISE in metrics.summarise(result, config)

    assert [measured(step) for step in (1, 2, 3, 4, 203)] == [(0, False), (0, False), (2, True), (1, False), (2, True)]


def test_later_epochs_of_one_mini_batch_have_the_micro_batches_of_the_first_and_no_noise() -> None:
    config = recipe(ranks=2, budget=24, batch={"epochs_per_step": 2})
    engine, result = recorded(batch(), config)
    first, second = ([[described(b.tokens) for b in share] for share in shares] for shares in engine.policy_shares)
    assert first == second
    assert len(engine.logprob_shares) == 1 and result.later_noise is None


# ---- the KL penalty ------------------------------------------------------------------------------------------------


def test_the_baseline_of_rloo_has_the_kl_penalty() -> None:
    kl = {"coef": 0.5, "placement": "reward", "estimator": "k1"}
    samples = group_of([0, 1, 3], reference=True)
    config = recipe(algorithm={"advantage": {"kind": "rloo"}, "kl": kl})
    _, result = run(samples, config)
    assert result.targets.kl is not None
    penalised = [
        s.score - 0.5 * row.sum() for s, row in zip(samples, result.targets.kl, strict=True) if s.score is not None
    ]
    assert min(abs(row.sum()) for row in result.targets.kl) > 0.01
    for i, row in enumerate(result.targets.advantages):
        others = [score for j, score in enumerate(penalised) if j != i]
        assert row.tolist() == pytest.approx([penalised[i] - sum(others) / 2] * len(row))
    # As OpenRLHF: the scores are compared, and each token loses what is still to come.
    config = recipe(algorithm={"advantage": {"kind": "rloo", "kl_in_score": False}, "kl": kl})
    _, result = run(samples, config)
    assert result.targets.kl is not None
    for i, difference in enumerate([0 - 2, 1 - 1.5, 3 - 0.5]):
        to_come = np.cumsum(result.targets.kl[i][::-1])[::-1]
        assert result.targets.advantages[i].tolist() == pytest.approx((difference - 0.5 * to_come).tolist())


def test_an_importance_weighted_k3_has_the_gradient_of_the_log_ratio() -> None:
    # At p = o the slope of exp(p - o) k3 is k3 + 1 - exp(-d) = d, that of k2.
    def gradient(**keys: Any) -> list[float]:
        config = recipe(algorithm={"kl": {"coef": 0.7, **keys}})
        found: list[float] = run(batch(), config)[0].gradients[0].tolist()
        return found

    assert gradient(estimator="k3", importance_weighted=True) == pytest.approx(gradient(estimator="k2"), rel=1e-5)
    assert gradient(estimator="k3") != pytest.approx(gradient(estimator="k2"), rel=1e-2)


# ---- masked samples ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aggregation", "counted", "divisor"),
    [("token-mean", False, 4), ("token-mean", True, 6), ("sequence-mean", True, 2 * 3)],
)
def test_masked_samples_stay_in_their_group_and_count_where_the_recipe_says_so(
    aggregation: str, counted: bool, divisor: int
) -> None:
    shaping = {"mask_truncated": True, "count_masked": counted}
    config = recipe(algorithm={"advantage": {"kind": "dr-grpo"}, "shaping": shaping, "aggregation": aggregation})
    samples = group_of([0, 1, 2])
    samples[2] = replace(samples[2], truncated=True)
    engine, result = run(samples, config)
    assert result.trained == {0}  # 0 - 1, 1 - 1; the third is masked
    assert engine.policy_shares[0][0][0].weights.tolist() == pytest.approx([1 / divisor] * 2)
