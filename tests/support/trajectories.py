"""Cuts a trajectory of several turns into segments, as a gateway does when an agent opens new ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fourfold.arrays import EMPTY_FLOATS, BoolArray
from fourfold.sample import Sample, VersionSpan


def spans_of(mask: BoolArray) -> tuple[VersionSpan, ...]:
    starts = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=2))
    lengths = np.diff(starts, append=len(mask))
    return tuple(
        VersionSpan(policy_version=0 if mask[s] else -1, token_count=int(n))
        for s, n in zip(starts, lengths, strict=True)
    )


def cut(whole: Sample, ends: Sequence[int]) -> list[Sample]:
    """Return a trajectory as segments that repeat the history: segment k ends with the turn `ends[k] - 1`."""
    position = np.arange(len(whole.token_ids))
    starts = np.flatnonzero(whole.action_mask[1:] & ~whole.action_mask[:-1]) + 1
    stops = np.append(starts[1:], len(position))
    segments, first = list[Sample](), 0
    for index, end in enumerate(ends):
        own = (position >= starts[first]) & (position < stops[end - 1]) & whole.action_mask
        stop, first = int(np.flatnonzero(own)[-1]) + 1, end
        segments.append(
            replace(
                whole,
                sample_id=whole.sample_id if index == 0 else f"{whole.sample_id}-seg{index}",
                token_ids=whole.token_ids[:stop],
                behavior_logprobs=np.where(own, whole.behavior_logprobs, np.nan)[:stop].astype(np.float32),
                action_mask=own[:stop],
                loss_mask=(whole.loss_mask & own)[:stop],
                version_spans=spans_of(own[:stop]),
                reference_logprobs=whole.reference_logprobs[:stop],
                token_rewards=np.where(own, whole.token_rewards, 0)[:stop].astype(np.float32)
                if len(whole.token_rewards)
                else EMPTY_FLOATS,
                truncated=whole.truncated and index == 0,
                trajectory_id=whole.sample_id,
                segment_index=index,
                segment_count=len(ends),
            )
        )
    return segments
