"""Samples whose bytes on the wire and on the disk are committed in `data/`. At least one of them sets each field."""

from __future__ import annotations

from typing import Final

import numpy as np

from fourfold.sample import Sample, ScoreTerm, VersionSpan

VOCABULARY: Final = 1 << 17
MAX_TOKENS: Final = 512


def make(sample_id: str, spans: tuple[tuple[int, int], ...], **changes: object) -> Sample:
    """Return a sample with `spans` of (policy version, tokens)."""
    mask = np.repeat([version >= 0 for version, _ in spans], [count for _, count in spans])
    n = len(mask)
    values: dict[str, object] = {
        "sample_id": sample_id,
        "group_id": "p0000003-0",
        "token_ids": (np.arange(n, dtype=np.int32) * 7919 + 11) % VOCABULARY,
        "behavior_logprobs": np.where(mask, -np.arange(n) / 8, np.nan).astype(np.float32),
        "action_mask": mask,
        "loss_mask": mask,
        "version_spans": tuple(VersionSpan(policy_version=v, token_count=count) for v, count in spans),
        "temperature": 0.75,
    }
    return Sample(**(values | changes))  # type: ignore[arg-type]


def plain() -> Sample:
    return make("p0000003-0-0", ((-1, 3), (0, 4)), score=0.5, scorer="last_number@0.1.0")


def full() -> Sample:
    """Return a sample with every field that a single segment can have."""
    spans = ((-1, 3), (5, 2), (6, 3))
    mask = np.array([0, 0, 0, 1, 1, 1, 1, 1], np.bool_)
    return make(
        "p0000003-0-1",
        spans,
        loss_mask=np.array([0, 0, 0, 1, 0, 1, 1, 1], np.bool_),
        top_p=0.5,
        top_k=20,
        truncated=True,
        score=1.25,
        scorer="mixed@2",
        reference_logprobs=np.where(np.arange(8) > 0, -np.arange(8) / 4, np.nan).astype(np.float32),
        token_rewards=np.where(mask, np.arange(8) / 2, 0).astype(np.float32),
        baseline_score=0.25,
        terms=(
            ScoreTerm(name="reward", scorer="last_number@0.1.0", score=1.0, weight=1.0),
            ScoreTerm(name="length", scorer="length@1", score=0.5, weight=0.5),
        ),
        shadow_score=0.0,
    )


def segments() -> tuple[Sample, Sample]:
    """Return the two segments of an agent's trajectory."""
    one = make("p0000003-0-2", ((-1, 2), (5, 2), (-1, 2), (5, 1)), trajectory_id="p0000003-0-2", segment_count=2)
    two = make(
        "p0000003-0-2-seg1",
        ((-1, 5), (6, 2)),
        trajectory_id="p0000003-0-2",
        segment_index=1,
        segment_count=2,
        truncated=True,
    )
    return one, two


def long() -> Sample:
    """Return a sample whose fields have sizes of two bytes, and whose version needs six."""
    return make("p0000003-0-3", ((-1, 60), (1 << 40, 240)), temperature=1.0)


def row() -> Sample:
    """Return a sample of data, whose tokens no engine sampled: the second of two turns is in the loss."""
    mask = np.array([0, 0, 1, 1, 0, 1, 1], np.bool_)
    later = np.array([0, 0, 0, 0, 0, 1, 1], np.bool_)
    empty = np.empty(0, np.float32)
    return make(
        "r7-1", ((-1, 7),), behavior_logprobs=empty, action_mask=mask, loss_mask=later, version_spans=(), score=2.0
    )


def every() -> list[Sample]:
    return [plain(), full(), *segments(), long()]
