"""Keeps finished samples on the disk from the time they are READY until a durable checkpoint includes them.

    group is sampled, scored, has its reference --> put --> arrays in a segment file, synced --> READY in the ledger
                                                             | groups that finish meanwhile share the next sync
    checkpoint of a step is durable ------------> release --> segments without live samples are deleted
    restore, new coordinator -------------------> load ----> groups that are not trained yet, as they were

A record is one byte of flags and the `Experience` that the trainer would get. The text of a sample is not stored: it is
decoded again from the token ids. The record of an agent's attempt is the flags, the length of a `LeasedTask` with the
problem (little-endian u32), that message, and the `Trajectory` with all segments. It is stored when the attempt
arrives (`keep`), and once more with its score when its group is READY.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from google.protobuf.message import DecodeError

from fourfold.arrays import Sample
from fourfold.coordinator.v1.experience_service_pb2 import LeasedTask
from fourfold.coordinator.v1.experience_service_pb2 import Trajectory as TrajectoryMessage
from fourfold.errors import FourfoldError
from fourfold.rpc.codec import Buffer, decode, encode, encode_parts
from fourfold.types.v1.experience_pb2 import Experience

from ..data.prompts import Prompt, own_prompt
from .files import DiskWriter
from .ledger import Ledger, RecordedSample, RecordPlace
from .samples import SampleGroup, Trajectory, shortest
from .segments import BadRecord, SegmentFiles

log = logging.getLogger("fourfold.coordinator")

FOLDER: Final = "experiences"
_ABSTAINED: Final = 1  # flag: the scorer abstained
_AGENT: Final = 2  # flag: the attempt of an agent
_LENGTH: Final = struct.Struct("<I")
_BATCH_GROUPS: Final = 256  # of one sync: the transaction for more of them would block the event loop for long


@dataclass(slots=True)
class _Batch:
    """Groups that are written with one sync."""

    groups: list[SampleGroup] = field(default_factory=list)
    written: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample:
    """A sample as it was stored, without its prompt and its text."""

    sample: Sample
    dropped: str
    abstained: bool
    more_segments: tuple[Sample, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    problem: Prompt | None = None  # of an agent's attempt


class ExperienceStore:
    """The finished samples of a run. `put`, `release` and `load` may run concurrently."""

    def __init__(self, files: SegmentFiles, ledger: Ledger, disk: DiskWriter) -> None:
        self._files, self._ledger, self._disk = files, ledger, disk
        self._lock = asyncio.Lock()  # held by the writer of a batch
        self._batch = _Batch()  # the one that a group may still join

    def close(self) -> None:
        self._files.close()

    async def put(self, group: SampleGroup) -> None:
        """Make a group durable, and its samples READY; raise DiskFull. Cancelled while it waits, it changes nothing."""
        if len(self._batch.groups) == _BATCH_GROUPS:
            self._batch = _Batch()
        batch = self._batch
        batch.groups.append(group)
        try:
            async with self._lock:  # the first of a batch writes it; the others find it written
                if batch.written:
                    return
                if batch is self._batch:
                    self._batch = _Batch()
                await self._write(tuple(batch.groups))
                batch.written = True
        except BaseException:
            # A restore drops the samples of a cancelled call: with them, the batch could never become READY.
            batch.groups = [other for other in batch.groups if other is not group]
            raise

    async def keep(self, trajectory: Trajectory) -> None:
        """Make the attempt of an agent durable, before its group is READY; raise DiskFull, or WrongState if it is lost.

        The sample becomes ROLLED. It needs the rest of its group: a new coordinator issues the whole group again.
        """
        async with self._lock:  # `release` must not delete a segment that has no row yet
            places = await self._disk.write_in_thread(self._append, [trajectory])
            await self._disk.write(self._ledger.keep, places)
            await self._disk.write_in_thread(self._ledger.sync)

    async def _write(self, groups: Sequence[SampleGroup]) -> None:
        trajectories = [t for group in groups for t in group.all_trajectories()]
        places = await self._disk.write_in_thread(self._append, trajectories)
        ready = [sample.sample_id for group in groups for sample in group.samples]
        # After the segment: a row never refers to a record that a power loss can take.
        await self._disk.write(self._ledger.make_ready, ready, places)
        await self._disk.write_in_thread(self._ledger.sync)

    def _append(self, trajectories: Sequence[Trajectory]) -> list[RecordPlace]:
        places = self._files.append([_to_record(t) for t in trajectories])
        return [RecordPlace(t.sample.sample_id, *place) for t, place in zip(trajectories, places, strict=True)]

    async def release(self, step: int) -> None:
        """Delete what the trainer's durable checkpoint of `step`, which the ledger has, makes unnecessary."""
        # A power loss must not take the row of the checkpoint that replaces what is deleted.
        await self._disk.write_in_thread(self._ledger.sync)
        async with self._lock:  # a segment that is being written has no rows in the ledger yet
            more = True
            while more:
                more = await self._disk.write(self._ledger.release, step)
                await asyncio.sleep(0)  # the event loop has other work between two transactions
            await self._disk.write_in_thread(self._files.keep_only, self._ledger.segments())

    async def load(self, *, vocabulary_size: int, max_tokens: int) -> list[tuple[int, str, list[StoredSample]]]:
        """Return position, id and samples of the groups that are READY or leased.

        A group whose records are damaged is left out, with a warning.
        """

        def read() -> list[tuple[int, str, list[StoredSample]]]:
            groups = []
            for (position, name), rows in itertools.groupby(recorded, key=lambda row: (row.position, row.group_id)):
                try:
                    samples = [_from_record(row, self._files, vocabulary_size, max_tokens) for row in rows]
                except FourfoldError as error:
                    log.warning("group cannot be recovered, its prompt is issued again: group=%s: %s", name, error)
                    continue
                groups.append((position, name, samples))
            return groups

        async with self._lock:
            recorded = self._ledger.recorded()
            return await asyncio.to_thread(read)


def _to_record(trajectory: Trajectory) -> list[Buffer]:
    flags = _ABSTAINED if trajectory.abstained else 0
    if not trajectory.by_agent:
        return [bytes([flags]), *encode_parts(trajectory.sample)]
    prompt = trajectory.prompt
    problem = LeasedTask(text=prompt.text, answer=prompt.answer, metadata_json=prompt.metadata_json).SerializeToString()
    attempt = TrajectoryMessage(
        task_id=trajectory.sample.sample_id,
        segments=[encode(segment) for segment in trajectory.segments],
        metrics=trajectory.metrics,
    )
    return [bytes([flags | _AGENT]), _LENGTH.pack(len(problem)), problem, attempt.SerializeToString()]


def _from_record(row: RecordedSample, files: SegmentFiles, vocabulary_size: int, max_tokens: int) -> StoredSample:
    """Return the sample of a row of the ledger; raise BadRecord, or InvalidInput for a sample of another recipe."""
    body = files.read(row.segment, row.offset)
    where = f"segment {row.segment}, record at byte {row.offset}"
    problem: Prompt | None = None
    try:
        if body[0] & _AGENT:
            (size,) = _LENGTH.unpack_from(body, 1)
            start = 1 + _LENGTH.size
            problem = _to_prompt(LeasedTask.FromString(body[start : start + size]))
            attempt = TrajectoryMessage.FromString(body[start + size :])
        else:
            attempt = TrajectoryMessage(segments=[Experience.FromString(body[1:])])
    except (DecodeError, struct.error) as error:
        raise BadRecord(f"{where}: {error}") from None
    names = [(message.sample_id, message.group_id) for message in attempt.segments]
    if (row.sample_id, row.group_id) not in names[:1]:
        raise BadRecord(f"{where}: it is of sample {names[0][0] if names else 'none'!r}")
    first, *more = (
        _with_short_scores(decode(message, vocabulary_size=vocabulary_size, max_tokens=max_tokens))
        for message in attempt.segments
    )
    return StoredSample(
        sample=first,
        dropped=row.dropped,
        abstained=bool(body[0] & _ABSTAINED),
        more_segments=tuple(more),
        metrics=dict(attempt.metrics),
        problem=problem,
    )


def _to_prompt(task: LeasedTask) -> Prompt:
    return own_prompt(task.text, answer=task.answer, metadata_json=task.metadata_json)


def _with_short_scores(sample: Sample) -> Sample:
    if sample.score is not None:
        sample = replace(sample, score=shortest(sample.score))
    if sample.baseline_score is not None:
        sample = replace(sample, baseline_score=shortest(sample.baseline_score))
    return sample
