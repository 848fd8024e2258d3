"""Turn-level advantages and discounts, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fourfold.algorithm.advantages import Gae, Grpo, Reinforce, ScoredSamples, TurnGrpo
from fourfold.algorithm.comparison import ScoredTurns
from fourfold.algorithm.packed import PackedRewards


def packed(
    rewards: list[float], gaps: list[int], lengths: list[int], values: list[float] | None = None
) -> PackedRewards:
    return PackedRewards(
        rewards=np.array(rewards, np.float64),
        values=None if values is None else np.array(values, np.float64),
        lengths=np.array(lengths, np.int64),
        gaps=np.array(gaps, np.int64),
    )


def turns(rewards: list[float], counts: list[int], groups: str) -> ScoredTurns:
    return ScoredTurns(rewards=np.array(rewards, np.float64), counts=np.array(counts, np.int64), groups=list(groups))


def test_a_turn_ends_at_a_hole_and_at_the_end_of_a_trajectory() -> None:
    # Two turns of 2 and 1 tokens; a trajectory without tokens; one turn of 3.
    rewards = packed([1, 2, 3, 4, 5, 6], [1, 4, 9, 1, 1, 1], [3, 0, 3])
    assert rewards.turn_ends().tolist() == [1, 2, 5]
    assert rewards.turn_counts().tolist() == [2, 0, 1]
    assert rewards.turn_sums().tolist() == [3, 3, 15]
    assert rewards.repeat_turns(np.array([7.0, 8.0, 9.0])).tolist() == [7, 7, 8, 9, 9, 9]
    nothing = packed([], [], [0, 0])
    assert nothing.turn_sums().tolist() == [] and nothing.turn_counts().tolist() == [0, 0]


def test_the_return_of_a_turn_discounts_later_turns_of_its_own_trajectory() -> None:
    batch = turns([1, 2, 4, 10, 8, 16], [3, 1, 0, 2], "aaaa")
    assert batch.returns(0.5).tolist() == [1 + 0.5 * 2 + 0.25 * 4, 2 + 0.5 * 4, 4, 10, 8 + 0.5 * 16, 16]
    assert batch.returns(0.0).tolist() == [1, 2, 4, 10, 8, 16]


def test_turns_are_compared_with_the_turns_of_the_same_index() -> None:
    # Group a: first turns 3 and 5, and one second turn; group b: first turns 1 and 1.
    batch = turns([1, 2, 5, 1, 1], [2, 1, 1, 1], "aabb")
    found = TurnGrpo(epsilon=0.0).compare_turns(batch)
    half = 1 / math.sqrt(2)  # distance 1 to the mean 4; std of 3 and 5 is sqrt(2)
    assert found == pytest.approx([-half, 0, half, 0, 0])


def test_a_long_trajectory_weighs_as_much_as_a_short_one_in_the_baseline_of_the_group() -> None:
    batch = turns([0, 0, 0, 0, 6], [4, 1], "aa")
    found = TurnGrpo(baseline="group", turn_discount=0.0, epsilon=0.0).compare_turns(batch)
    # The mean is 3, not 6 / 5; the variance (9 + 9) / (2 - 1).
    assert found == pytest.approx([-3 / math.sqrt(18)] * 4 + [3 / math.sqrt(18)])


@pytest.mark.parametrize("baseline", ["turn", "group"])
def test_with_one_turn_and_no_rewards_of_turns_it_is_grpo(baseline: str) -> None:
    scores, groups = np.array([0.1, 0.7, 3.0, 0.1, 0.1, 0.1, 5.0]), list("aaabbbc")
    wanted = Grpo().compare(ScoredSamples(scores=scores, groups=groups, lengths=np.ones(7, np.int64)))
    estimator = TurnGrpo.model_validate({"baseline": baseline, "turn_discount": 0.5})
    found = estimator.compare_turns(turns(scores.tolist(), [1] * 7, "aaabbbc"))
    assert found == pytest.approx(wanted, rel=1e-12) and found[3:].tolist() == [0] * 4


def test_the_discount_of_turns_counts_turns_and_not_tokens() -> None:
    rewards = packed([0, 0, 1, 0, 8], [1, 1, 5, 1, 1], [5])  # turns of 3 and 2 tokens
    found, _ = Reinforce(turn_discount=0.5).spread(rewards)
    assert found.tolist() == [1 + 4, 1 + 4, 1 + 4, 8, 8]
    found, _ = Reinforce(turn_discount=0.5, gamma=0.5).spread(rewards)
    assert found.tolist() == [0.25 * 2, 0.5 * 2, 1 + 0.25 * 4, 4, 8]


def test_gae_discounts_the_value_of_the_next_turn() -> None:
    rewards = packed([0, 1, 8], [1, 3, 1], [3], values=[1, 2, 4])  # turns of 2 tokens and 1
    found, returns = Gae(turn_discount=0.5, lam=0.5).spread(rewards)
    last = 8 - 4
    border = 1 + 0.5 * 4 - 2 + 0.5 * 0.5 * last
    first = 0 + 2 - 1 + 0.5 * border
    assert found == pytest.approx([first, border, last])
    assert returns == pytest.approx([first + 1, border + 2, last + 4])


def test_the_formulas_name_the_discount() -> None:
    assert "0.9^(m - j) R_m over the turns m from j on" in TurnGrpo(turn_discount=0.9).formula()
    assert "G_j = R_j, " in TurnGrpo(turn_discount=0.0).formula()
    assert "all turns, each sample weighing the same" in TurnGrpo(baseline="group").formula()
    assert Reinforce(turn_discount=0.9).formula().endswith("; what follows a turn is multiplied by 0.9")
