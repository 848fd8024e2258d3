"""Estimators that compare the samples of a prompt in other ways than GRPO, against arithmetic by hand."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from fourfold.algorithm.advantages import (
    AdvantageEstimator,
    Gae,
    Gpg,
    GrpoLeaveOneOut,
    MaxRl,
    PassAtK,
    Rloo,
    ScoredSamples,
)
from fourfold.algorithm.packed import PackedRewards

NEW: list[AdvantageEstimator] = [Gpg(), GrpoLeaveOneOut(epsilon=0.0), MaxRl(), PassAtK()]


def compare(estimator: AdvantageEstimator, scores: list[float], groups: str) -> list[float]:
    batch = ScoredSamples(
        scores=np.array(scores, np.float64), groups=list(groups), lengths=np.arange(3, 3 + len(scores))
    )
    return [float(a) for a in estimator.compare(batch)]


def near(values: list[float]) -> object:
    return pytest.approx(values, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("estimator", NEW, ids=lambda e: e.kind)
@pytest.mark.parametrize(("value", "count"), [(0.1, 3), (0.7, 7), (1e6, 3), (0.0, 2), (1.0, 1)])
def test_equal_scores_and_single_samples_have_no_advantage(
    estimator: AdvantageEstimator, value: float, count: int
) -> None:
    assert compare(estimator, [value] * count, "a" * count) == [0.0] * count


def test_gpg_enlarges_by_the_share_of_useful_samples() -> None:
    # b has no spread: 5 samples, 3 of them in useful groups. a: mean 1 / 3
    expected = [5 / 3 * (1 - 1 / 3), 0, 5 / 3 * -1 / 3, 0, 5 / 3 * -1 / 3]
    assert compare(Gpg(), [1, 2, 0, 2, 0], "ababa") == near(expected)


def test_max_rl_divides_by_the_mean() -> None:
    assert compare(MaxRl(), [1, 0, 0, 3], "aaaa") == near([0, -1, -1, 2])
    assert compare(MaxRl(), [1, -1, -3, 2, 4], "aaabb") == near([0, 0, 0, -1 / 3, 1 / 3])  # a mean below 0


def test_leave_one_out_takes_mean_and_deviation_of_the_others() -> None:
    scores = [1.0, 0.0, 0.5, 2.0]
    others = [[s for j, s in enumerate(scores) if j != i] for i in range(4)]
    by_hand = [(s - statistics.mean(o)) / (statistics.stdev(o) + 0.1) for s, o in zip(scores, others, strict=True)]
    assert compare(GrpoLeaveOneOut(epsilon=0.1), scores, "aaaa") == near(by_hand)
    # Others that are equal, or one alone, have no deviation: 0.1 three times, whose mean is not 0.1 in float64
    assert compare(GrpoLeaveOneOut(), [1.0, 0.1, 0.1, 0.1], "aaaa")[0] == 0.9
    assert compare(GrpoLeaveOneOut(), [1.0, 0.25], "aa") == [0.75, -0.75]


def test_pass_at_k_trains_on_the_best_sample_alone() -> None:
    deviation = statistics.stdev([0.2, 1.0, 0.5])
    assert compare(PassAtK(epsilon=0.0), [0.2, 1.0, 0.5], "aaa") == near([0, 0.5 / deviation, 0])
    assert compare(PassAtK(normalize=False), [0.2, 1.0, 0.5, 3, 4], "aaabb") == near([0, 0.5, 0, 0, 1])
    assert compare(PassAtK(), [1.0, 1.0, 0.5], "aaa") == [0, 0, 0]  # two are the best


def test_pass_at_k_is_the_gradient_of_the_best_of_k() -> None:
    # Two answers with probability q and 1 - q and scores 1 and 0, k = 3: E[max] = 1 - (1 - q)^3, and its derivative is
    # that of the sum over samples of A * d log p / dq.
    q, total = 0.3, 0.0
    for bits in np.ndindex(2, 2, 2):
        scores = [float(b) for b in bits]
        probability = math.prod(q if b else 1 - q for b in bits)
        slopes = [1 / q if b else -1 / (1 - q) for b in bits]
        advantages = compare(PassAtK(normalize=False), scores, "aaa")
        total += probability * sum(a * s for a, s in zip(advantages, slopes, strict=True))
    assert total == pytest.approx(3 * (1 - q) ** 2, rel=1e-12)


def test_only_rloo_has_the_kl_penalty_in_its_baseline() -> None:
    assert Rloo().compares_kl and not Rloo(kl_in_score=False).compares_kl
    assert not any(estimator.compares_kl for estimator in NEW)


# GAE with a lambda for each sample

VALUES, REWARDS, LENGTHS = [0.5, 0.2, -0.1, 0.7, 0.4], [0.0, 0.0, 1.0, 0.0, -1.0], [3, 2]


def advantages_by_hand(lam: list[float]) -> list[float]:
    found, start = list[float](), 0
    for length, own in zip(LENGTHS, lam, strict=True):
        following, ahead = 0.0, 0.0
        part = []
        for t in reversed(range(start, start + length)):
            following = REWARDS[t] + ahead - VALUES[t] + own * following
            ahead = VALUES[t]
            part.append(following)
        found += reversed(part)
        start += length
    return found


@pytest.mark.parametrize(
    ("keys", "policy", "critic"),
    [
        ({"lam": 0.9}, [0.9, 0.9], [0.9, 0.9]),
        ({"lam": 0.9, "lam_critic": 1.0}, [0.9, 0.9], [1.0, 1.0]),
        ({"lam": 0.9, "lam_critic": 0.0}, [0.9, 0.9], [0.0, 0.0]),
        ({"lam_length_factor": 0.6}, [1 - 1 / 1.8, 1 - 1 / 1.2], [1 - 1 / 1.8, 1 - 1 / 1.2]),
        ({"lam_length_factor": 0.4, "lam_critic": 1.0}, [1 - 1 / 1.2, 0.0], [1.0, 1.0]),  # 0.4 * 2 < 1
    ],
)
def test_lambdas_of_policy_and_critic(keys: dict[str, float], policy: list[float], critic: list[float]) -> None:
    batch = PackedRewards(
        rewards=np.array(REWARDS), values=np.array(VALUES), lengths=np.array(LENGTHS), gaps=np.ones(5, np.int64)
    )
    advantages, returns = Gae.model_validate({"kind": "gae", **keys}).spread(batch)
    assert advantages.tolist() == near(advantages_by_hand(policy))
    assert returns is not None
    assert (returns - VALUES).tolist() == near(advantages_by_hand(critic))
