"""Keeps finished samples on the disk from the time they are READY until a durable checkpoint includes them.

    group is sampled, scored, has its reference --> put --> arrays in a segment file, synced --> READY in the ledger
                                                             | groups that finish meanwhile share the next sync
    checkpoint of a step is durable ------------> release --> segments without live samples are deleted
    restore, new coordinator -------------------> load ----> groups that are not trained yet, as they were

`fourfold.sample.record` defines the records. That of an agent's attempt is stored when the attempt arrives (`keep`),
and once more with its score when its group is READY.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from fourfold.errors import FourfoldError
from fourfold.sample.record import DamagedRecord, TrajectoryRecord, decode_record, encode_record

from .files import DiskWriter
from .ledger import Ledger, RecordedSample, RecordPlace
from .samples import SampleGroup, Trajectory
from .segments import BadRecord, SegmentFiles

log = logging.getLogger("fourfold.coordinator")

FOLDER: Final = "experiences"
StoredTrajectory = tuple[RecordedSample, TrajectoryRecord]  # with the reason in the row, if it was dropped
_BATCH_GROUPS: Final = 256  # of one sync: the transaction for more of them would block the event loop for long


@dataclass(slots=True)
class _Batch:
    """Groups that are written with one sync."""

    groups: list[SampleGroup] = field(default_factory=list)
    written: bool = False


class ExperienceStore:
    """The finished samples of a run. `put`, `release` and `load` may run concurrently."""

    def __init__(self, files: SegmentFiles, ledger: Ledger, disk: DiskWriter) -> None:
        self._files, self._ledger, self._disk = files, ledger, disk
        self._lock = asyncio.Lock()  # held by the task that writes a batch
        self._batch = _Batch()  # the batch that accepts further groups

    def close(self) -> None:
        self._files.close()

    async def put(self, group: SampleGroup) -> None:
        """Make a group durable and its samples READY; raise DiskFull. A cancelled wait changes nothing."""
        if len(self._batch.groups) == _BATCH_GROUPS:
            self._batch = _Batch()
        batch = self._batch
        batch.groups.append(group)
        try:
            async with self._lock:  # the first call of a batch writes it for all
                if batch.written:
                    return
                if batch is self._batch:
                    self._batch = _Batch()
                await self._write(tuple(batch.groups))
                batch.written = True
        except BaseException:
            # Leave out cancelled calls: a restore drops their samples, and the whole batch could not become READY.
            batch.groups = [other for other in batch.groups if other is not group]
            raise

    async def keep(self, trajectory: Trajectory) -> None:
        """Make the attempt of an agent durable, before its group is READY, and its sample ROLLED.

        The record is read only if its group becomes READY; otherwise a new coordinator issues the group again. Raises
        DiskFull, or WrongState if the ledger has dropped the attempt meanwhile.
        """
        async with self._lock:  # `release` must not delete a segment that has no row yet
            places = await self._disk.write_in_thread(self._append, [trajectory])
            await self._disk.write(self._ledger.keep, places)
            await self._disk.write_in_thread(self._ledger.sync)

    async def _write(self, groups: Sequence[SampleGroup]) -> None:
        trajectories = [t for group in groups for t in group.all_trajectories()]
        places = await self._disk.write_in_thread(self._append, trajectories)
        ready = [sample.sample_id for group in groups for sample in group.samples]
        # After the segment is synced, so that no row refers to a record that a power loss can remove.
        await self._disk.write(self._ledger.make_ready, ready, places)
        await self._disk.write_in_thread(self._ledger.sync)

    def _append(self, trajectories: Sequence[Trajectory]) -> list[RecordPlace]:
        places = self._files.append([encode_record(t) for t in trajectories])
        return [RecordPlace(t.sample.sample_id, *place) for t, place in zip(trajectories, places, strict=True)]

    async def release(self, step: int) -> None:
        """Delete segments that the durable checkpoint of `step`, which the ledger has, makes unnecessary."""
        # The row of the checkpoint must be durable before the segments that it replaces are deleted.
        await self._disk.write_in_thread(self._ledger.sync)
        async with self._lock:  # a segment that is being written has no rows in the ledger yet
            more = True
            while more:
                more = await self._disk.write(self._ledger.release, step)
                await asyncio.sleep(0)  # let the event loop run between two transactions
            await self._disk.write_in_thread(self._files.keep_only, self._ledger.segments())

    async def load(self, *, vocabulary_size: int, max_tokens: int) -> list[tuple[int, list[StoredTrajectory]]]:
        """Return position and trajectories of the groups that are READY or leased.

        A group whose records are damaged is left out, with a warning.
        """

        def read() -> list[tuple[int, list[StoredTrajectory]]]:
            groups = []
            for (position, name), rows in itertools.groupby(recorded, key=lambda row: (row.position, row.group_id)):
                try:
                    found = [(row, _read_record(row, self._files, vocabulary_size, max_tokens)) for row in rows]
                except FourfoldError as error:
                    log.warning("group cannot be recovered, its prompt is issued again: group=%s: %s", name, error)
                    continue
                groups.append((position, found))
            return groups

        async with self._lock:
            recorded = self._ledger.recorded()
            return await asyncio.to_thread(read)


def _read_record(row: RecordedSample, files: SegmentFiles, vocabulary_size: int, max_tokens: int) -> TrajectoryRecord:
    """Return the record of a row of the ledger; raise BadRecord, or InvalidInput for a sample of another recipe."""
    body = files.read(row.segment, row.offset)
    try:
        return decode_record(
            body,
            sample_id=row.sample_id,
            group_id=row.group_id,
            vocabulary_size=vocabulary_size,
            max_tokens=max_tokens,
        )
    except DamagedRecord as error:
        raise BadRecord(f"segment {row.segment}, record at byte {row.offset}: {error}") from None
