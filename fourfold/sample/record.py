"""The form of a finished trajectory on the disk, in a record of the run's segment files.

    record of a sample              flags (1 byte), its `Experience`, as the trainer would get it
    record of an agent's attempt    flags, length of the task (little-endian u32), `LeasedTask`, `Trajectory` with all
                                    segments

The text of a sample is not stored: it is decoded again from the token ids.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from google.protobuf.message import DecodeError

from fourfold.coordinator.v1.experience_service_pb2 import LeasedTask
from fourfold.coordinator.v1.experience_service_pb2 import Trajectory as TrajectoryMessage
from fourfold.rpc.codec import Buffer
from fourfold.sample.sample import Sample, shortest
from fourfold.sample.wire import decode, encode, encode_parts
from fourfold.types.v1.experience_pb2 import Experience

_ABSTAINED: Final = 1  # flag: the scorer abstained
_AGENT: Final = 2  # flag: the attempt of an agent
_LENGTH: Final = struct.Struct("<I")


class DamagedRecord(ValueError):
    """The bytes of a record are not those that were written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTask:
    """The task of an agent's attempt, which no data set has."""

    text: str
    answer: str
    metadata_json: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrajectoryRecord:
    """A finished trajectory as the disk has it."""

    segments: tuple[Sample, ...]  # at least one; without a task exactly one
    abstained: bool = False  # whether the scorer abstained
    task: AgentTask | None = None  # of an agent's attempt
    metrics: Mapping[str, float] = field(default_factory=dict)  # numbers of the agent


def encode_record(record: TrajectoryRecord) -> list[Buffer]:
    """Return the bytes of a record in parts; the arrays of the samples are not copied without need."""
    flags, task, (first, *_) = _ABSTAINED if record.abstained else 0, record.task, record.segments
    if task is None:
        return [bytes([flags]), *encode_parts(first)]
    head = LeasedTask(text=task.text, answer=task.answer, metadata_json=task.metadata_json).SerializeToString()
    attempt = TrajectoryMessage(
        task_id=first.sample_id, segments=[encode(segment) for segment in record.segments], metrics=record.metrics
    )
    return [bytes([flags | _AGENT]), _LENGTH.pack(len(head)), head, attempt.SerializeToString()]


def decode_record(
    body: bytes, *, sample_id: str, group_id: str, vocabulary_size: int, max_tokens: int
) -> TrajectoryRecord:
    """Return the record of a sample.

    Raises:
        DamagedRecord: the bytes are damaged, or those of another sample.
        InvalidInput: a sample breaks a rule of the wire, such as one of another recipe.
    """
    task: AgentTask | None = None
    try:
        if body[0] & _AGENT:
            (size,) = _LENGTH.unpack_from(body, 1)
            start = 1 + _LENGTH.size
            found = LeasedTask.FromString(body[start : start + size])
            task = AgentTask(text=found.text, answer=found.answer, metadata_json=found.metadata_json)
            attempt = TrajectoryMessage.FromString(body[start + size :])
        else:
            attempt = TrajectoryMessage(segments=[Experience.FromString(body[1:])])
    except (DecodeError, struct.error) as error:
        raise DamagedRecord(str(error)) from None
    names = [(message.sample_id, message.group_id) for message in attempt.segments]
    if (sample_id, group_id) not in names[:1]:
        raise DamagedRecord(f"it is of sample {names[0][0] if names else 'none'!r}")
    segments = (decode(message, vocabulary_size=vocabulary_size, max_tokens=max_tokens) for message in attempt.segments)
    return TrajectoryRecord(
        segments=tuple(map(_with_short_scores, segments)),
        abstained=bool(body[0] & _ABSTAINED),
        task=task,
        metrics=dict(attempt.metrics),
    )


def _with_short_scores(sample: Sample) -> Sample:
    if sample.score is not None:
        sample = replace(sample, score=shortest(sample.score))
    if sample.baseline_score is not None:
        sample = replace(sample, baseline_score=shortest(sample.baseline_score))
    return sample
