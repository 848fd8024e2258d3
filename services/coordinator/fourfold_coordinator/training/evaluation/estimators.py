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

# Two-sided 95 % quantiles of Student's t for degrees of freedom at which the expansion below is coarse.
_SMALL_T: Final = {1: 12.706205, 2: 4.302653, 3: 3.182446, 4: 2.776445, 5: 2.570582, 6: 2.446912}


def clustered_interval(scores: Sequence[float], clusters: Sequence[str]) -> tuple[float, float | None]:
    """Return the mean of `scores` and the half width of its 95 % interval; only the clusters count as independent.

    With G clusters, n scores and the sum r_g of the residuals in cluster g, the variance is
    G / (G - 1) * sum_g r_g^2 / n^2. The interval uses Student's t with G - 1 degrees of freedom. The half width is
    None with a single cluster, which has no spread.
    """
    count = len(scores)
    mean = math.fsum(scores) / count
    residuals: defaultdict[str, float] = defaultdict(float)
    for score, cluster in zip(scores, clusters, strict=True):
        residuals[cluster] += score - mean
    groups = len(residuals)
    if groups < 2:
        return mean, None
    variance = groups / (groups - 1) * math.fsum(r * r for r in residuals.values()) / count**2
    return mean, student_t(groups - 1) * math.sqrt(variance)


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


def mean_of_sets(rows: Sequence[tuple[float, float | None]]) -> tuple[float, float | None]:
    """Return the unweighted mean of the means of independent sets, and the half width of its interval.

    The half width is sqrt(sum of the squared half widths) / (number of sets); None if a set has none.
    """
    half_widths = [half_width for _, half_width in rows if half_width is not None]
    mean = math.fsum(score for score, _ in rows) / len(rows)
    return mean, math.hypot(*half_widths) / len(rows) if len(half_widths) == len(rows) else None


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
