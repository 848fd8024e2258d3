"""Group baselines, returns, GAE and whitening, against arithmetic by hand and sums written out over positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.algorithm.advantages import (
    AdvantageEstimator,
    DrGrpo,
    Gae,
    Gdpo,
    Grpo,
    Opo,
    Reinforce,
    ReinforceBaseline,
    Rloo,
    ScoredSamples,
    group_members,
)
from fourfold.algorithm.packed import PackedRewards, whiten
from fourfold.arrays import Float64Array, Int64Array

Baseline = Callable[[Float64Array, list[str]], Float64Array]


def compare(
    estimator: AdvantageEstimator, scores: Float64Array, groups: list[str], lengths: Int64Array | None = None
) -> Float64Array:
    """Compare the samples of each group; without lengths, sample i has 3 + i tokens."""
    lengths = np.arange(3, 3 + len(scores)) if lengths is None else lengths
    return estimator.compare(ScoredSamples(scores=scores, groups=groups, lengths=lengths))


def baseline_of(estimator: AdvantageEstimator) -> Baseline:
    return lambda scores, groups: compare(estimator, scores, groups)


BASELINES: dict[str, Baseline] = {
    "normalised": baseline_of(Grpo(epsilon=0.0)),
    "centred": baseline_of(DrGrpo()),
    "reinforce": baseline_of(ReinforceBaseline()),
    "leave_one_out": baseline_of(Rloo()),
    "length_weighted": baseline_of(Opo()),
    "one_term": baseline_of(Gdpo(epsilon=0.0, normalize_batch=False)),
}
# In float64 the mean of three 0.1 is not 0.1, in float32 not that of eight: whoever divides by the deviation of such a
# group gives every member the same large advantage.
CONSTANT = [(0.1, 3), (0.2, 6), (0.7, 7), (0.9, 9), (0.1, 8), (0.3, 6), (0.7, 16), (1e6, 3), (-0.1, 7), (0.0, 2)]

every_baseline = pytest.mark.parametrize("baseline", BASELINES.values(), ids=BASELINES)


def f64(values: list[float]) -> Float64Array:
    return np.array(values, np.float64)


def i64(values: list[int]) -> Int64Array:
    return np.array(values, np.int64)


def normalised(scores: list[float], groups: str, epsilon: float) -> list[float]:
    return [float(a) for a in compare(Grpo(epsilon=epsilon), f64(scores), list(groups))]


def packed(
    rewards: Float64Array, values: Float64Array | None, lengths: Int64Array, gaps: Int64Array | None
) -> tuple[PackedRewards, str]:
    """Return packed rewards, and the hole mode of an estimator that reads these gaps."""
    ones = np.ones(len(rewards), np.int64) if gaps is None else gaps
    mode = "skip" if gaps is None else "decay"
    return PackedRewards(rewards=rewards, values=values, lengths=lengths, gaps=ones), mode


def discounted_returns(
    rewards: Float64Array, lengths: Int64Array, gaps: Int64Array | None, *, gamma: float
) -> Float64Array:
    batch, mode = packed(rewards, None, lengths, gaps)
    # A recipe's gamma is above 0; the recursion holds at 0, too.
    advantages, returns = Reinforce.model_construct(gamma=gamma, hole_mode=mode).spread(batch)
    assert returns is None
    return advantages


def gae(
    rewards: Float64Array,
    values: Float64Array,
    lengths: Int64Array,
    gaps: Int64Array | None,
    *,
    gamma: float,
    lam: float,
) -> tuple[Float64Array, Float64Array]:
    batch, mode = packed(rewards, values, lengths, gaps)
    advantages, returns = Gae.model_construct(gamma=gamma, lam=lam, hole_mode=mode).spread(batch)
    assert returns is not None
    return advantages, returns


# Group baselines


def test_members_keep_the_order_in_which_groups_and_samples_come() -> None:
    assert group_members(["b", "a", "b", "c", "a"]) == [[0, 2], [1, 4], [3]]
    assert group_members([]) == []


def test_grpo_divides_by_the_unbiased_deviation() -> None:
    # mean 2, deviations -2 -1 0 3, squares 4 + 1 + 0 + 9 = 14, s = sqrt(14 / 3)
    s = math.sqrt(14 / 3)
    assert normalised([0, 1, 2, 5], "aaaa", 0.0) == pytest.approx([-2 / s, -1 / s, 0, 3 / s], abs=1e-15)
    by_hand = [-2 / (s + 0.5), -1 / (s + 0.5), 0, 3 / (s + 0.5)]
    assert normalised([0, 1, 2, 5], "aaaa", 0.5) == pytest.approx(by_hand, abs=1e-15)


def test_a_group_without_tokens_has_no_weighted_baseline() -> None:
    # group a has no tokens at all; b: (2 * 1 + 2 * 5) / 4 = 3
    result = compare(Opo(), f64([6, 2, 1, 5]), list("aabb"), i64([0, 0, 2, 2]))
    assert result.tolist() == [0, 0, -2, 2]


@every_baseline
@pytest.mark.parametrize(("value", "count"), [*CONSTANT, (5.0, 1)])
def test_a_constant_group_is_exactly_zero(baseline: Baseline, value: float, count: int) -> None:
    assert baseline(f64([value] * count), ["a"] * count).tolist() == [0.0] * count


@every_baseline
def test_differences_too_small_to_square_stay_finite(baseline: Baseline) -> None:
    assert np.isfinite(baseline(f64([1e-200, 2e-200, 3e-200]), list("aaa"))).all()


SCORES = st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(0, 3)), max_size=20)


@given(SCORES)
def test_advantages_are_finite_and_as_the_formulas_say(rows: list[tuple[float, int]]) -> None:
    scores, groups = [r for r, _ in rows], [str(g) for _, g in rows]
    results = {name: baseline(f64(scores), groups) for name, baseline in BASELINES.items()}
    for index, (score, group) in enumerate(zip(scores, groups, strict=True)):
        members = [i for i, g in enumerate(groups) if g == group]
        values = [scores[i] for i in members]
        if min(values) == max(values):
            assert all(result[index] == 0 for result in results.values())
            continue
        mean = math.fsum(values) / len(values)
        others = [scores[i] for i in members if i != index]
        weighted = math.fsum((3 + i) * scores[i] for i in members) / sum(3 + i for i in members)
        tolerance = 1e-9 * (1 + max(abs(value) for value in values))
        assert results["centred"][index] == pytest.approx(score - mean, abs=tolerance)
        assert results["leave_one_out"][index] == pytest.approx(score - math.fsum(others) / len(others), abs=tolerance)
        assert results["length_weighted"][index] == pytest.approx(score - weighted, abs=tolerance)
        # |deviation| <= (n - 1) / sqrt(n) unbiased standard deviations, whatever the scores
        assert abs(results["normalised"][index]) <= len(members) ** 0.5
        assert results["one_term"][index] == results["normalised"][index]


# Terms (GDPO)

NAN = math.nan


def of_terms(
    terms: Sequence[Sequence[float]],
    weights: Sequence[Sequence[float]],
    groups: str,
    *,
    epsilon: float = 0.0,
    batch: bool = False,
) -> list[float]:
    """Compare samples by their terms; the score is the weighted sum."""
    found, factors = np.array(terms, np.float64), np.array(weights, np.float64)
    samples = ScoredSamples(
        scores=np.nansum(found * factors, 1),
        groups=list(groups),
        lengths=np.arange(1, len(terms) + 1),
        terms=found,
        weights=factors,
    )
    return list(Gdpo(epsilon=epsilon, normalize_batch=batch).compare(samples))


def test_terms_are_normalised_one_by_one_and_then_added() -> None:
    # term 1: 0, 1, 2, 5, as above; term 2: 30, 10, 10, 10 has mean 15, squares 225 + 3 * 25 = 300, s = 10
    s = math.sqrt(14 / 3)
    found = of_terms([[0, 30], [1, 10], [2, 10], [5, 10]], [[2, 0.5]] * 4, "aaaa")
    assert found == pytest.approx([-4 / s + 0.75, -2 / s - 0.25, -0.25, 6 / s - 0.25], abs=1e-15)
    found = of_terms([[0, 30], [1, 10], [2, 10], [5, 10]], [[2, 0.5]] * 4, "aaaa", epsilon=0.5)
    wanted = [-4 / (s + 0.5) + 7.5 / 10.5, -2 / (s + 0.5) - 2.5 / 10.5, -2.5 / 10.5, 6 / (s + 0.5) - 2.5 / 10.5]
    assert found == pytest.approx(wanted, abs=1e-15)


def test_equal_sums_of_different_terms_are_told_apart() -> None:
    # Term 1: 1 1 1 0, mean 3/4, s = 1/2; term 2: 1 0 0 0, mean 1/4, s = 1/2.
    assert of_terms([[1, 1], [1, 0], [1, 0], [0, 0]], [[1, 1]] * 4, "aaaa") == pytest.approx([2, 0, 0, -2], abs=1e-15)
    # Two answers, of which each is better in one term: they cancel exactly, also where the division could enlarge the
    # rounding error, unless a weight decides.
    assert of_terms([[1, 0], [0, 9]], [[1, 1]] * 2, "aa", batch=True) == [0, 0]
    assert of_terms([[1, 0], [0, 9]], [[1, 1]] * 2, "aa") == [0, 0]
    assert of_terms([[1, 0], [0, 9]], [[3, 1]] * 2, "aa") == pytest.approx([2 / 2**0.5, -2 / 2**0.5], abs=1e-15)


def test_the_sums_are_divided_by_their_deviation_over_the_batch() -> None:
    # Sums: 1, -1 (times 1 / sqrt 2), then 2 in both terms, and a constant group: s^2 = (2 * .5 + 2 * 2 + 0) / 5 = 1
    terms = [[1, 7], [0, 7], [8, 4], [6, 2], [3, 3], [3, 3]]
    root = math.sqrt(0.5)
    assert of_terms(terms, [[1, 1]] * 6, "aabbcc") == pytest.approx([root, -root, 2 * root, -2 * root, 0, 0])
    found = of_terms(terms, [[1, 1]] * 6, "aabbcc", batch=True)
    assert found == pytest.approx([root, -root, 2 * root, -2 * root, 0, 0]) and found[4:] == [0, 0]
    doubled = of_terms(terms, [[2, 2]] * 6, "aabbcc", batch=True)
    assert doubled == pytest.approx(found)  # but not without `normalize_batch`
    assert of_terms(terms, [[2, 2]] * 6, "aabbcc")[0] == pytest.approx(2 * root)


def test_a_term_that_does_not_count_adds_nothing_and_moves_no_mean() -> None:
    # Term 2 counts for the last two samples of group a only, and for one of b.
    terms: list[list[float]] = [[0, NAN], [1, 99], [1, 5], [1, 3], [2, 1], [2, NAN]]
    weights = [[1, 0], [1, 0], [1, 1], [1, 1], [1, 1], [1, 0]]
    root = 1 / math.sqrt(2)
    by_hand = [-1.5, 0.5, 0.5 + root, 0.5 - root, 0, 0]  # 0 1 1 1: mean 3/4, s = 1/2; 5 and 3: a pair
    assert of_terms(terms, weights, "aaaabb") == pytest.approx(by_hand, abs=1e-15)
    alone = of_terms([[0.0, NAN], [1.0, 5.0]], [[1, 0], [1, 1]], "aa")
    assert alone == pytest.approx([-root, root], abs=1e-15)


def test_a_term_that_counts_for_no_sample_changes_nothing() -> None:
    alone = of_terms([[0], [1], [5]], [[1]] * 3, "aaa", batch=True)
    assert of_terms([[0, NAN], [1, 99], [5, 3]], [[1, 0]] * 3, "aaa", batch=True) == alone
    assert of_terms([[NAN], [99]], [[0], [0]], "aa", batch=True) == [0, 0]


def test_without_terms_the_score_is_the_only_one() -> None:
    scores, groups = f64([0, 1, 2, 5, 1, 1]), list("aaaabb")
    assert compare(Gdpo(normalize_batch=False), scores, groups).tolist() == compare(Grpo(), scores, groups).tolist()
    found = compare(Gdpo(epsilon=0.0), scores, groups)
    assert found.std(ddof=1) == pytest.approx(1) and found[4:].tolist() == [0, 0]
    assert compare(Gdpo(), f64([3]), ["a"]).tolist() == [0]


# Returns and GAE


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A random batch in packed form, and the position of every action in its sample."""

    lengths: Int64Array
    gaps: Int64Array
    positions: list[list[int]]
    rewards: Float64Array
    values: Float64Array

    def samples(self) -> list[slice]:
        ends = np.cumsum(self.lengths)
        return [slice(int(end - n), int(end)) for n, end in zip(self.lengths, ends, strict=True)]


def random_case(seed: int) -> Case:
    """Holes of 0 to 3 positions, samples without actions, and nonsense in the gaps that nobody may read."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 7, random.integers(1, 6)).astype(np.int64)
    gaps, positions = [], []
    for n in lengths:
        steps = random.choice([1, 1, 2, 3, 4], n)
        positions.append([int(p) for p in 2 + np.cumsum(np.r_[0, steps[:-1]])[:n]])  # the prompt has 2
        gaps.append(np.r_[steps[:-1], random.choice([-3, 0, 1, 10**12])][-n:] if n else steps)
    count = int(lengths.sum())
    return Case(
        lengths=lengths,
        gaps=np.concatenate(gaps).astype(np.int64),
        positions=positions,
        rewards=random.normal(size=count),
        values=random.normal(size=count),
    )


def spread(numbers: Float64Array, positions: list[int]) -> list[float]:
    """Return one number per position of a sample, 0 wherever the policy did not write, and some positions after it."""
    row = [0.0] * (positions[-1] + 4)
    for number, position in zip(numbers, positions, strict=True):
        row[position] = float(number)
    return row


def paper_returns(rewards: list[float], gamma: float) -> list[float]:
    """G_t = sum over k >= t of gamma^(k - t) R_k."""
    return [
        sum(gamma ** (later - now) * rewards[later] for later in range(now, len(rewards)))
        for now in range(len(rewards))
    ]


def paper_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A_t = sum over l of (gamma lam)^l delta_{t+l}; delta_t = R_t + gamma V_{t+1} - V_t (1506.02438, eq. 16)."""
    ahead = [*values, 0.0][1:]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, ahead, strict=True)]
    return paper_returns(deltas, gamma * lam)


SEEDS = range(40)
DISCOUNTS = [(1.0, 1.0), (1.0, 0.95), (0.9, 0.8), (0.97, 1.0), (0.9, 0.0), (0.0, 0.5), (0.0, 0.0)]


@pytest.mark.parametrize(("gamma", "lam"), DISCOUNTS)
def test_decaying_through_holes_is_the_sum_over_all_positions(gamma: float, lam: float) -> None:
    for case in map(random_case, SEEDS):
        returns = discounted_returns(case.rewards, case.lengths, case.gaps, gamma=gamma)
        advantages, targets = gae(case.rewards, case.values, case.lengths, case.gaps, gamma=gamma, lam=lam)
        for sample, positions in zip(case.samples(), case.positions, strict=True):
            if not positions:
                continue
            rewards, values = spread(case.rewards[sample], positions), spread(case.values[sample], positions)
            by_hand = np.array(paper_returns(rewards, gamma))[positions]
            np.testing.assert_allclose(returns[sample], by_hand, rtol=0, atol=1e-12)
            by_hand = np.array(paper_gae(rewards, values, gamma, lam))[positions]
            np.testing.assert_allclose(advantages[sample], by_hand, rtol=0, atol=1e-12)
            np.testing.assert_allclose(targets[sample], by_hand + case.values[sample], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("gamma", "lam"), DISCOUNTS)
def test_skipping_holes_is_the_sum_over_actions(gamma: float, lam: float) -> None:
    for case in map(random_case, SEEDS):
        returns = discounted_returns(case.rewards, case.lengths, None, gamma=gamma)
        advantages, targets = gae(case.rewards, case.values, case.lengths, None, gamma=gamma, lam=lam)
        for sample in case.samples():
            rewards, values = case.rewards[sample].tolist(), case.values[sample].tolist()
            np.testing.assert_allclose(returns[sample], paper_returns(rewards, gamma), rtol=0, atol=1e-12)
            by_hand = np.array(paper_gae(rewards, values, gamma, lam))
            np.testing.assert_allclose(advantages[sample], by_hand, rtol=0, atol=1e-12)
            np.testing.assert_allclose(targets[sample], by_hand + case.values[sample], rtol=0, atol=1e-12)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_a_batch_without_actions_is_empty(lengths: list[int]) -> None:
    nothing, no_gaps = f64([]), i64([])
    for gaps in (None, no_gaps):
        assert len(discounted_returns(nothing, i64(lengths), gaps, gamma=0.9)) == 0
        assert [len(part) for part in gae(nothing, nothing, i64(lengths), gaps, gamma=0.9, lam=0.9)] == [0, 0]


def test_inputs_are_left_as_they_were() -> None:
    case = random_case(3)
    copies = [case.rewards.copy(), case.values.copy(), case.gaps.copy(), case.lengths.copy()]
    gae(case.rewards, case.values, case.lengths, case.gaps, gamma=0.9, lam=0.8)
    for before, after in zip(copies, [case.rewards, case.values, case.gaps, case.lengths], strict=True):
        np.testing.assert_array_equal(before, after)


# Whitening


def test_whitening_uses_the_population_variance_of_the_selected_tokens() -> None:
    # of 1 2 3 6: mean 3, deviations -2 -1 0 3, squares 14, variance 14 / 4
    s = math.sqrt(14 / 4)
    advantages = f64([1, math.nan, 2, 3, math.inf, 6])
    selected = np.array([True, False, True, True, False, True])
    by_hand = [-2 / s, 0, -1 / s, 0, 0, 3 / s]
    assert whiten(advantages, selected, scale=True).tolist() == pytest.approx(by_hand, abs=1e-15)
    assert whiten(advantages, selected, scale=False).tolist() == [-2, 0, -1, 0, 0, 3]


def test_a_tiny_variance_is_taken_as_one_hundred_millionth() -> None:
    # deviations +-5e-6, variance 2.5e-11: divided by sqrt(1e-8) = 1e-4, not by 5e-6
    result = whiten(f64([0, 1e-5]), np.array([True, True]), scale=True)
    assert result.tolist() == pytest.approx([-0.05, 0.05], rel=1e-12)


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize(("value", "count"), CONSTANT)
def test_equal_advantages_become_exactly_zero(value: float, count: int, scale: bool) -> None:
    assert whiten(f64([value] * count), np.ones(count, np.bool_), scale=scale).tolist() == [0.0] * count


@pytest.mark.parametrize("scale", [True, False])
def test_fewer_than_two_tokens_stay_as_they_are(scale: bool) -> None:
    assert whiten(f64([5, 3]), np.array([False, True]), scale=scale).tolist() == [0, 3]
    assert whiten(f64([5, 3]), np.array([False, False]), scale=scale).tolist() == [0, 0]
    assert whiten(f64([]), np.array([], np.bool_), scale=scale).tolist() == []


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.booleans()), max_size=20), st.booleans())
def test_whitened_tokens_are_finite(rows: list[tuple[float, bool]], scale: bool) -> None:
    advantages, selected = f64([a for a, _ in rows]), np.array([s for _, s in rows], np.bool_)
    assert np.isfinite(whiten(advantages, selected, scale=scale)).all()
