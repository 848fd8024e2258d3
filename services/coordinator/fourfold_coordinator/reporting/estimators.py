"""Estimates what an evaluation measures: means with 95 % intervals, pass@k and maj@k. Pure functions.

pass@k is the probability that at least one of k sampled answers is a success, maj@k the probability that the answer
given most often by k of them is one.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import NormalDist
from typing import Final

from ..state.eval_results import Interval

# Two-sided 95 % quantiles of Student's t for degrees of freedom at which the expansion below is coarse.
_SMALL_T: Final = {1: 12.706205, 2: 4.302653, 3: 3.182446, 4: 2.776445, 5: 2.570582, 6: 2.446912}
_PRIOR_CLUSTERS: Final = 0.01
_NO_SQUARES: Final = 1e-12  # the residuals of equal scores are rounding


def clustered_interval(scores: Sequence[float], clusters: Sequence[str]) -> tuple[float, Interval | None]:
    """Return the mean of `scores` and its 95 % interval; only the clusters count as independent.

    With G clusters, n scores and the sum r_g of the residuals in cluster g, the variance v of the mean is
    G / (G - 1) * sum_g r_g^2 / n^2. With t of Student's t for G - 1 degrees of freedom, the interval is
    mean +- t sqrt(v), or Wilson's for scores in [0, 1]: it stays inside, and is not empty where all scores are equal.
    None with a single cluster, which has no spread, and for equal scores outside of [0, 1], whose range is unknown.
    """
    count = len(scores)
    mean = math.fsum(scores) / count
    residuals: defaultdict[str, float] = defaultdict(float)
    for score, cluster in zip(scores, clusters, strict=True):
        residuals[cluster] += score - mean
    groups = len(residuals)
    if groups < 2:
        return mean, None
    squares, t = groups / (groups - 1) * math.fsum(r * r for r in residuals.values()), student_t(groups - 1)
    if not (min(scores) >= 0 and max(scores) <= 1):
        half_width = t * math.sqrt(squares) / count
        return mean, None if squares < _NO_SQUARES else (mean - half_width, mean + half_width)
    spread = mean * (1 - mean)
    a = t * t * _answers_per_effective(squares, scores, mean, groups) / count
    center, half_width = (mean + a / 2) / (1 + a), math.sqrt(a * spread + a * a / 4) / (1 + a)
    # Rounding: the interval contains the mean, and ends at 0 and 1.
    return mean, (min(max(center - half_width, 0.0), mean), max(min(center + half_width, 1.0), mean))


def _answers_per_effective(squares: float, scores: Sequence[float], mean: float, groups: int) -> float:
    """Return the number of scores with the information of one toss of a coin with this mean; n / G without variance.

    The variance of the mean is `squares` / n^2, and p (1 - p) / n for independent answers of a coin. A hundredth of a
    cluster that fails as a whole is added to both: near 0 and 1, few clusters fail, and a single failed answer says
    nothing of how answers correlate. Scores between 0 and 1 vary less than a coin, and so does that cluster. In
    simulations, intervals of 11 x 8, 50 x 4 and 200 x 1 answers cover 93 to 98 %.
    """
    count = len(scores)
    size = count / groups
    if squares < _NO_SQUARES:
        return size
    binomial = count * mean * (1 - mean)
    share = math.fsum((score - mean) ** 2 for score in scores) / binomial
    return (squares + _PRIOR_CLUSTERS * size * size * share) / (binomial + _PRIOR_CLUSTERS * size)


def student_t(degrees: int) -> float:
    """Return the two-sided 95 % quantile of Student's t, to 3 digits or better."""
    if degrees in _SMALL_T:
        return _SMALL_T[degrees]
    z = NormalDist().inv_cdf(0.975)
    terms = (  # Fisher's expansion around the normal quantile
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return math.fsum(term / degrees**power for power, term in enumerate(terms))


def sample_sizes(most: int) -> list[int]:
    """Return the k of pass@k and maj@k for so many answers to a prompt: 1, 2, 4, ... and `most`."""
    return [2**power for power in range(most.bit_length()) if 2**power < most] + [most]


def pass_at_k(successes: int, answers: int, k: int) -> float:
    """Return the unbiased estimate of pass@k for a prompt: 1 - C(n - c, k) / C(n, k).

    That is the share of the subsets of k of the n answers that contain one of the c successes (Chen et al. 2021,
    arXiv:2107.03374, equation 1). Needs k <= n.
    """
    return 1.0 - math.comb(answers - successes, k) / math.comb(answers, k)


def majority_at_k(answers: Sequence[str], successes: Sequence[bool], k: int) -> float:
    """Return the unbiased estimate of maj@k for a prompt: the mean over the n // k blocks of k answers in order.

    In each block the final answers vote (Wang et al. 2022, arXiv:2203.11171). Of several that are given equally often,
    the one that was given first wins. The block counts 1 if the first sample with that answer is a success, else 0.
    Samples without a final answer (an empty text) do not vote; a block without votes counts 0. Needs k <= n.
    """
    blocks = range(0, len(answers) - k + 1, k)
    return sum(_majority_succeeds(answers[b : b + k], successes[b : b + k]) for b in blocks) / len(blocks)


def _majority_succeeds(answers: Sequence[str], successes: Sequence[bool]) -> bool:
    votes = Counter(answer for answer in answers if answer)  # keeps the order of the first votes
    if not votes:
        return False
    return successes[answers.index(votes.most_common(1)[0][0])]
