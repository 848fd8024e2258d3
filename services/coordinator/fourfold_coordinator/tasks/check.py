"""Checks the trajectories of gateways as hostile input; accepted ones can be trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fourfold.bounds import MAX_FLOAT32, MAX_TRAJECTORY_BYTES, MAX_TRAJECTORY_METRICS, TRAJECTORY_METRIC
from fourfold.coordinator.v1 import experience_service_pb2 as pb
from fourfold.errors import InvalidInput
from fourfold.sample import Sample
from fourfold.sample.wire import decode
from fourfold.types.v1.experience_pb2 import Experience


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRules:
    """The limits of the run for a trajectory."""

    vocabulary_size: int
    max_tokens: int
    max_segments: int
    newest_version: int  # highest policy version that an engine may have received
    temperature: float
    needs_reward: bool
    max_total_tokens: int = 0
    """Most tokens of all segments together; 0: no limit. A loss or a correction with one ratio per trajectory needs all
    segments in one micro-batch; otherwise the trainer refuses the whole batch."""


def check_trajectory(message: pb.Trajectory, *, group_id: str, rules: TrajectoryRules) -> tuple[Sample, ...]:
    """Return the segments of a trajectory; InvalidInput names the task, the value and the rule."""
    task = message.task_id
    count = len(message.segments)
    if not 1 <= count <= rules.max_segments:
        raise InvalidInput(f"task {task}: {count} segments; it must have 1 to {rules.max_segments}")
    if message.ByteSize() > MAX_TRAJECTORY_BYTES:
        raise InvalidInput(f"task {task}: {message.ByteSize()} bytes; a trajectory has at most {MAX_TRAJECTORY_BYTES}")
    if message.turn_count < 1:
        raise InvalidInput(f"task {task}: turn_count is {message.turn_count}; it must be at least 1")
    if rules.needs_reward and not message.HasField("reward"):
        raise InvalidInput(
            f'task {task}: no reward, and the run has no scorer for agents; send one, or set agents.reward = "service"'
        )
    if not abs(message.reward) <= MAX_FLOAT32:  # also for NaN
        raise InvalidInput(f"task {task}: reward is {message.reward}; it must be a finite float32")
    _check_metrics(message)
    segments = tuple(_check_segment(s, k, count, task, group_id, rules) for k, s in enumerate(message.segments))
    tokens = sum(len(segment.token_ids) for segment in segments)
    if rules.max_total_tokens and tokens > rules.max_total_tokens:
        raise InvalidInput(
            f"task {task}: its {count} segments have {tokens} tokens, more than a micro-batch, and algorithm.loss or "
            f"algorithm.correction has one ratio for the whole trajectory: raise batch.tokens_per_micro_batch above "
            f"{rules.max_total_tokens}, lower agents.max_segments, or use a loss and a correction of single tokens, "
            f"such as `ppo` and `tis`"
        )
    return segments


def _check_metrics(message: pb.Trajectory) -> None:
    if len(message.metrics) > MAX_TRAJECTORY_METRICS:
        raise InvalidInput(
            f"task {message.task_id}: {len(message.metrics)} metrics; it may have {MAX_TRAJECTORY_METRICS}"
        )
    for name, value in message.metrics.items():
        if not TRAJECTORY_METRIC.fullmatch(name) or not math.isfinite(value):
            raise InvalidInput(
                f"task {message.task_id}: metric {name[:80]!r} is {value}; names are 1 to 63 characters of "
                f"[A-Za-z0-9_./-], and values are finite"
            )


def _check_segment(
    message: Experience, index: int, count: int, task: str, group_id: str, rules: TrajectoryRules
) -> Sample:
    where = f"task {task}, segment {index}"
    expected = task if index == 0 else f"{task}-seg{index}"
    names: Sequence[tuple[str, object, object]] = (
        ("sample_id", message.sample_id, expected),
        ("group_id", message.group_id, group_id),
        ("trajectory_id", message.trajectory_id or message.sample_id, task),
        ("segment_index", message.segment_index, index),
        ("segment_count", message.segment_count or 1, count),
    )
    for name, value, wanted in names:
        if value != wanted:
            raise InvalidInput(f"{where}: {name} is {str(value)[:140]!r}; it must be {wanted!r}")
    sample = decode(message, vocabulary_size=rules.vocabulary_size, max_tokens=rules.max_tokens)
    if not sample.action_mask.any():
        raise InvalidInput(f"{where}: no sampled token; leave the segment out")
    if not sample.version_spans:
        raise InvalidInput(f"{where}: no behavior_logprobs and version_spans; send those of the engine")
    if np.isneginf(sample.behavior_logprobs[sample.loss_mask]).any():
        raise InvalidInput(f"{where}: behavior_logprobs has -inf for a trained token, which cannot have been sampled")
    if sample.oldest_version < 0:
        raise InvalidInput(f"{where}: no version_spans of sampled tokens")
    newest = max(span.policy_version for span in sample.version_spans)
    if newest > rules.newest_version:
        raise InvalidInput(
            f"{where}: tokens of policy_version {newest}; {rules.newest_version} is the newest that was sent"
        )
    if abs(sample.temperature - rules.temperature) > 1e-6 or sample.top_p != 1.0 or sample.top_k:
        raise InvalidInput(
            f"{where}: sampled with temperature {sample.temperature:g}, top_p {sample.top_p:g}, top_k {sample.top_k}; "
            f"trained turns need {rules.temperature:g}, 1 and 0"
        )
    if sample.score is not None or sample.scorer or sample.baseline_score is not None or sample.reference_logprobs.size:
        raise InvalidInput(f"{where}: it has a score or reference_logprobs, which the run adds; leave them out")
    return sample
