"""A sample as numpy arrays of n tokens each. Arrays of a sample are read-only and token-aligned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from fourfold.arrays import EMPTY_FLOATS, EMPTY_INTS, BoolArray, Float32Array, Int32Array
from fourfold.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """`token_count` consecutive tokens sampled by `policy_version`; -1 for tokens that the policy did not sample."""

    policy_version: int
    token_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTerm:
    """One term of a score, which is the sum of weight * score."""

    name: str  # of the scorer in the recipe
    scorer: str  # "name@version"
    score: float
    weight: float  # 0: another term has switched it off


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """A trajectory, or a segment of one; score, reference log-probabilities and token rewards are empty until known."""

    sample_id: str
    group_id: str
    token_ids: Int32Array  # [n]
    behavior_logprobs: Float32Array  # [n], NaN where action_mask is False; [0]: no engine sampled the tokens
    action_mask: BoolArray  # [n]
    loss_mask: BoolArray  # [n], subset of action_mask
    version_spans: tuple[VersionSpan, ...]  # empty: no engine sampled the tokens
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    truncated: bool = False
    score: float | None = None
    scorer: str = ""
    reference_logprobs: Float32Array = field(default_factory=lambda: EMPTY_FLOATS)  # [n] or [0]
    token_rewards: Float32Array = field(default_factory=lambda: EMPTY_FLOATS)  # [n] or [0]
    baseline_score: float | None = None
    trajectory_id: str = ""  # empty: sample_id
    segment_index: int = 0
    segment_count: int = 1
    terms: tuple[ScoreTerm, ...] = ()  # of the score; empty: it is not a sum
    shadow_score: float | None = None  # of a scorer that is compared with the live one
    teacher_ids: Int32Array = field(default_factory=lambda: EMPTY_INTS)  # [n, k] or [0], a teacher's likeliest tokens
    teacher_logprobs: Float32Array = field(default_factory=lambda: EMPTY_FLOATS)  # [n, k] or [0]

    @property
    def trajectory(self) -> str:
        """The id of the trajectory that the tokens belong to."""
        return self.trajectory_id or self.sample_id

    @property
    def oldest_version(self) -> int:
        """The lowest policy version that sampled a token; -1 without sampled tokens."""
        return min((s.policy_version for s in self.version_spans if s.policy_version >= 0), default=-1)


def shortest(score: float) -> float:
    """Return the shortest decimal that gives the same float32: 0.3 instead of 0.30000001192092896."""
    return float(str(np.float32(score)))


def check_unique(ids: Iterable[str]) -> None:
    """Raise InvalidInput when a sample id occurs twice."""
    seen: set[str] = set()
    for sample_id in ids:
        if sample_id in seen:
            raise InvalidInput(f"sample {sample_id} occurs twice in one request; sample ids must be unique")
        seen.add(sample_id)
