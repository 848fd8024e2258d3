"""Trajectories of several segments: one weight and one place in every statistic, however they are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold import metrics as m
from fourfold.algorithm.state import AlgorithmState
from fourfold.arrays import EMPTY_FLOATS
from fourfold.config import PRESETS, Config
from fourfold.errors import InvalidInput
from fourfold.sample import Sample
from fourfold_trainer.service import metrics
from fourfold_trainer.step.advantages import ModelOutputs, TokenTargets
from fourfold_trainer.step.batch import TrainBatch
from fourfold_trainer.step.micro_batches import LossTokens, mini_batches
from fourfold_trainer.step.sample_checks import check_samples
from fourfold_trainer.step.step_result import StepResult
from fourfold_trainer.step.train_step import train_step
from tests.fakes.toy_engine import ToyEngine
from tests.support.recipes import make_recipe
from tests.support.trajectories import cut, spans_of


def recipe(*, ranks: int = 1, budget: int = 1000, batch: dict[str, Any] | None = None, **tables: Any) -> Config:
    rates = {"trainer": {"ranks": ranks, "learning_rate": 0.5}, "critic": {"learning_rate": 0.1}}
    lengths = {"model": {"max_context_tokens": 64}, "sampling": {"max_new_tokens": 12}}
    return make_recipe(batch={"tokens_per_micro_batch": budget, **(batch or {})}, **(lengths | rates | tables))


def trajectory(name: str, group: str, turns: Sequence[tuple[int, int]], rng: np.random.Generator) -> Sample:
    """Return a sample of several turns, each of some observation and some action tokens; the loss mask has holes."""
    mask = np.concatenate([np.arange(o + a) >= o for o, a in turns])
    n, temperature = len(mask), float(rng.choice([0.5, 1.0]))
    return Sample(
        sample_id=name,
        group_id=group,
        token_ids=rng.integers(0, 100, n, dtype=np.int32),
        behavior_logprobs=np.where(mask, -5 * rng.random(n), np.nan).astype(np.float32),
        action_mask=mask,
        loss_mask=mask & (rng.random(n) < 0.8),
        version_spans=spans_of(mask),
        temperature=temperature,
        truncated=bool(rng.random() < 0.2),
        score=float(rng.integers(0, 3)),
        reference_logprobs=np.where(np.arange(n) > 0, -5 * rng.random(n), np.nan).astype(np.float32),
        token_rewards=np.where(mask & (rng.random(n) < 0.3), rng.integers(-2, 3, n), 0).astype(np.float32),
        baseline_score=0.5,
    )


def batches(seed: int) -> tuple[list[Sample], list[Sample]]:
    """Make trajectories, and the same ones cut into segments, whose order in the batch is any."""
    rng = np.random.default_rng(seed)
    wholes, firsts, others = list[Sample](), list[Sample](), list[Sample]()
    for index in range(rng.integers(2, 7)):
        turns = [(int(rng.integers(1, 4)), int(rng.integers(1, 5))) for _ in range(rng.integers(1, 5))]
        wholes.append(trajectory(f"s{index}", f"g{index % 2}", turns, rng))
        inner = [i for i in range(1, len(turns)) if rng.random() < 0.6]
        first, *rest = cut(wholes[-1], [*inner, len(turns)])
        firsts.append(first)
        others += rest
    return wholes, [*firsts, *(others[i] for i in rng.permutation(len(others)))]


ALGORITHMS: dict[str, dict[str, Any]] = {
    **{name: {"preset": name} for name in PRESETS},
    "turns": {"advantage": {"kind": "turn-grpo", "turn_discount": 0.5}, "kl": {"coef": 0.1, "placement": "reward"}},
    "turns of the group": {"advantage": {"kind": "turn-grpo", "baseline": "group"}, "whiten": "full"},
    "discounted turns": {"advantage": {"kind": "reinforce", "gamma": 0.9, "turn_discount": 0.7, "hole_mode": "decay"}},
    "gae of turns": {"advantage": {"kind": "gae", "lam": 0.8, "turn_discount": 0.7, "hole_mode": "decay"}},
    "remax": {"advantage": {"kind": "remax"}, "aggregation": "sequence-sum", "loss": {"kind": "gspo"}},
    "opo": {"advantage": {"kind": "opo"}, "aggregation": "constant-length"},
    "sequence mask": {"correction": {"kind": "sequence-mask-tis", "low": 0.1, "high": 9.0}},
    "shaped": {
        "shaping": {"overlong_buffer": 0.5, "truncated": 0.5, "normalize": True},
        "aggregation": "sequence-mean",
    },
    "left out": {"shaping": {"mask_truncated": True}, "aggregation": "sequence-mean", "entropy_coef": 0.1},
    "adaptive": {"kl": {"coef": 0.1, "target": 0.01, "placement": "reward"}},
}


def run(samples: Sequence[Sample], config: Config) -> tuple[ToyEngine, StepResult]:
    engine = ToyEngine(config)
    return engine, train_step(engine, samples, config, step=1, state=AlgorithmState())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(deadline=None, max_examples=6)
@given(
    st.integers(0, 10_000), st.sampled_from([{}, {"mini_batches_per_step": 2, "epochs_per_step": 2}]), st.integers(1, 3)
)
def test_cutting_a_trajectory_changes_no_gradient_no_advantage_and_no_metric(
    name: str, seed: int, updates: dict[str, int], ranks: int
) -> None:
    wholes, segments = batches(seed)
    tables: dict[str, Any] = {"algorithm": ALGORITHMS[name], "batch": updates}
    check_samples(segments, recipe(**tables), policy_version=0)
    one, wanted = run(wholes, recipe(**tables))
    # Gradients of losses of single tokens do not need the segments of a trajectory in one micro-batch.
    config = recipe(ranks=ranks, budget=1000 if recipe(**tables).algorithm.needs_whole_trajectories else 64, **tables)
    other, found = run(segments, config)
    for trajectory_index, whole in enumerate(wanted.targets.advantages):
        parts = slice(*found.batch.bounds[trajectory_index : trajectory_index + 2])
        joined = np.concatenate(list(found.targets.advantages[parts]))
        assert joined == pytest.approx(whole, rel=1e-9, abs=1e-12)
    assert found.algorithm_state.scores == wanted.algorithm_state.scores
    assert (found.algorithm_state.kl_coef or 0) == pytest.approx(wanted.algorithm_state.kl_coef or 0, rel=1e-6)
    assert len(one.gradients) == len(other.gradients)
    for a, b in zip(one.gradients + one.critic_gradients, other.gradients + other.critic_gradients, strict=True):
        assert float((a - b).norm()) <= 1e-6 * float(a.norm()) + 1e-9 or (a.isnan().all() and b.isnan().all())
    before, after = metrics.summarise(wanted, recipe(**tables)), metrics.summarise(found, config)
    after[m.TRAINED_SEGMENTS] = 1.0
    cost = {m.PADDING_FRACTION, m.DUMMY_FRACTION}
    assert before.keys() == after.keys()
    for key in before.keys() - cost:
        assert after[key] == pytest.approx(before[key], rel=1e-4, abs=1e-6, nan_ok=True), key


# ---- weights -----------------------------------------------------------------------------------------------------


def test_a_trajectory_is_in_one_mini_batch() -> None:
    bounds = np.array([0, 3, 4, 6, 7])  # trajectories of 3, 1, 2 and 1 segments
    parts = mini_batches(bounds, recipe(batch={"mini_batches_per_step": 2}), step=1)
    assert len(parts) == 2 and sorted(parts[0] + parts[1]) == list(range(7))
    for first, last in ((0, 2), (4, 5)):
        assert any({first, last} <= set(part) for part in parts)


def test_segments_are_split_only_where_a_loss_of_single_tokens_allows_it() -> None:
    whole = trajectory("s", "g", [(3, 5), (3, 5), (3, 5)], np.random.default_rng(0))
    samples = cut(whole, [1, 2, 3])  # 8, 16 and 24 tokens
    counts = {}
    for kind in ("ppo", "gspo"):
        config = recipe(ranks=2, budget=64, algorithm={"loss": {"kind": kind}})
        batch = TrainBatch.of(samples, config.algorithm)
        advantages = [np.ones(n) for n in batch.lengths]
        targets = TokenTargets(advantages=advantages, returns=None, outputs=ModelOutputs(), kl=None)
        for budget in (64, 24):
            tight = config.model_copy(
                update={"batch": config.batch.model_copy(update={"tokens_per_micro_batch": budget})}
            )
            tokens = LossTokens(config=tight, batch=batch, targets=targets, kl_in_loss=False)
            if (kind, budget) == ("gspo", 24):
                with pytest.raises(
                    InvalidInput, match=r"s: the 3 segments of trajectory s have 48 tokens, more than a"
                ):
                    check_samples(samples, tight, policy_version=0)
                continue
            check_samples(samples, tight, policy_version=0)
            shares = tokens.policy_micro_batches([0, 1, 2], tokens.weights([0, 1, 2]))
            real = [micro for share in shares for micro in share if not micro.is_dummy]
            counts[kind, budget] = len(real)
            assert all(set(micro.trajectories.tolist()) == {0} for micro in real)
    assert counts == {("ppo", 64): 1, ("ppo", 24): 2, ("gspo", 64): 1}


# ---- tokens that a grammar forced -------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [0.0, 1e-3])
def test_a_forced_token_is_in_no_kl_penalty_no_coefficient_and_no_metric_of_it(target: float) -> None:
    """The policy did not choose it: one that is likelier under the reference would reward the tokens before it."""
    kl = {"coef": 0.5, "placement": "reward", "estimator": "k1", "target": target, "horizon": 100}
    config = recipe(algorithm={"advantage": {"kind": "reinforce"}, "kl": kl})
    rng, found = np.random.default_rng(0), []
    whole = replace(trajectory("s", "g", [(2, 4), (1, 3)], rng), token_rewards=EMPTY_FLOATS)
    forced = np.flatnonzero(whole.action_mask)[[1, -1]]
    loss_mask = whole.action_mask.copy()
    loss_mask[forced] = False
    for distance in (0.0, -0.5, -9.0):
        reference = whole.reference_logprobs.copy()
        reference[forced] += distance
        _, result = run([replace(whole, loss_mask=loss_mask, reference_logprobs=reference)], config)
        coef = result.algorithm_state.kl_coef
        found.append((result.targets.advantages[0].tolist(), coef, metrics.summarise(result, config)[m.REWARD_KL]))
    assert found[0] == found[1] == found[2]
    free = loss_mask[whole.action_mask]
    assert result.targets.kl is not None
    assert found[0][2] == pytest.approx(result.targets.kl[0][free].mean()) and not result.targets.kl[0][~free].any()


# ---- refused batches ---------------------------------------------------------------------------------------------


def test_a_trajectory_with_missing_doubled_or_different_segments_is_refused() -> None:
    one, two, three = cut(trajectory("s", "g", [(1, 1), (1, 1), (1, 2)], np.random.default_rng(0)), [1, 2, 3])
    check_samples([two, one, three], recipe(), policy_version=0)
    wrong = {
        "sample s: its trajectory s has 3 segments, and segment 1 is missing": [one, three],
        "sample s-seg1: its trajectory s has 3 segments, and segment 0 is missing": [two, three],
        "sample x is segment 1 of trajectory s, as is sample s-seg1": [one, two, three, replace(two, sample_id="x")],
        "sample s-seg1 has group_id = 'h', and sample s of": [one, replace(two, group_id="h"), three],
        "sample s-seg2 has score = 9.0, and sample s of": [one, two, replace(three, score=9.0)],
        "sample s-seg2 has segment_count = 4, and sample s of": [one, two, replace(three, segment_count=4)],
        "sample s has 2147483647 segments": [replace(one, segment_count=2**31 - 1)],
    }
    for message, samples in wrong.items():
        with pytest.raises(InvalidInput, match=message.replace("sample s has 2", "trajectory s has 2")):
            check_samples(samples, recipe(), policy_version=0)


def test_a_trajectory_that_a_budget_ended_is_left_out_with_all_of_its_segments() -> None:
    one, two = cut(trajectory("s", "g", [(1, 2), (1, 2)], np.random.default_rng(0)), [1, 2])
    algorithm = recipe(algorithm={"shaping": {"mask_truncated": True}}).algorithm
    batch = TrainBatch.of([replace(one, truncated=False), replace(two, truncated=True)], algorithm)
    assert batch.left_out.tolist() == [True, True] and batch.loss_lengths.tolist() == [0, 0]
