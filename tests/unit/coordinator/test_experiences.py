"""Groups that are durable when `put` returns, and come back as they were."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fourfold.rpc.codec import Buffer
from fourfold.sample import Sample, VersionSpan
from fourfold_coordinator.data.prompts import Prompt
from fourfold_coordinator.state.experiences import ExperienceStore
from fourfold_coordinator.state.files import DiskWriter
from fourfold_coordinator.state.ledger import Ledger, RecordPlace, SampleState
from fourfold_coordinator.state.run_board import RunBoard
from fourfold_coordinator.state.samples import SampleGroup, Trajectory
from fourfold_coordinator.state.segments import SegmentFiles

PROMPT = Prompt(index=0, text="?", token_ids=np.arange(4, dtype=np.int32), answer="", metadata_json="{}", group_key="0")


class Shop:
    """A store, its ledger and its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = Ledger(folder / "ledger.sqlite")
        self.files = SegmentFiles(folder / "experiences")
        disk = DiskWriter(folder, RunBoard(name="t", step_count=9), wait_seconds=1.0)
        self.store = ExperienceStore(self.files, self.ledger, disk)

    def group(self, position: int, *, step: int = 1, count: int = 3) -> SampleGroup:
        """Issue the samples of a group, and sample them; the last is dropped."""
        issued = self.ledger.issue(step=step, position=position, count=count)
        self.ledger.move(issued.sample_ids, SampleState.RUNNING)
        self.ledger.move(issued.sample_ids, SampleState.ROLLED)
        self.ledger.drop(issued.sample_ids[-1:], "NO_IDEA")
        made = [trajectory(name, issued.group_id, seed=position + i) for i, name in enumerate(issued.sample_ids)]
        made[-1] = made[-1].with_drop_reason("NO_IDEA", abstained=True)
        return SampleGroup(position=position, seed=0, trajectories=tuple(made))

    async def load(self) -> list[SampleGroup]:
        found = await self.store.load(vocabulary_size=1000, max_tokens=64)
        return [
            SampleGroup(
                position=position,
                seed=0,
                trajectories=tuple(
                    Trajectory(
                        prompt=PROMPT,
                        segments=record.segments,
                        completion="",
                        dropped=row.dropped,
                        abstained=record.abstained,
                    )
                    for row, record in stored
                ),
            )
            for position, stored in found
        ]

    def record_count(self) -> int:
        """Count the rows of records; any thread may call this."""
        with contextlib.closing(sqlite3.connect(self.folder / "ledger.sqlite")) as db:
            return int(db.execute("SELECT COUNT(*) FROM records").fetchone()[0])

    def segments(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "experiences").iterdir())


def trajectory(sample_id: str, group_id: str, *, seed: int) -> Trajectory:
    rng = np.random.default_rng(seed)
    mask = np.arange(10) >= 4
    sample = Sample(
        sample_id=sample_id,
        group_id=group_id,
        token_ids=rng.integers(0, 1000, 10, dtype=np.int32),
        behavior_logprobs=np.where(mask, -rng.random(10), np.nan).astype(np.float32),
        action_mask=mask,
        loss_mask=mask,
        version_spans=(VersionSpan(policy_version=-1, token_count=4), VersionSpan(policy_version=3, token_count=6)),
        temperature=0.5,
        truncated=True,
        score=0.3,
        scorer="last_number@1",
        reference_logprobs=-rng.random(10).astype(np.float32),
        baseline_score=0.7,
    )
    return Trajectory(prompt=PROMPT, segments=(sample,), completion="")


def same(one: SampleGroup, other: SampleGroup) -> bool:
    """Return whether two groups have the same values, to the bit."""

    def facts(group: SampleGroup) -> list[object]:
        return [
            (t.dropped, t.abstained, {name: _plain(getattr(t.sample, name)) for name in Sample.__slots__})
            for t in group.all_trajectories()
        ]

    return facts(one) == facts(other)


def _plain(value: object) -> object:
    return value.tobytes() if isinstance(value, np.ndarray) else value


async def test_groups_come_back_as_they_were(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    groups = [shop.group(position) for position in range(5)]
    await asyncio.gather(*(shop.store.put(group) for group in groups))
    assert shop.ledger.counts() == {SampleState.READY: 10, SampleState.DROPPED: 5}
    shop.ledger.lease(1, [s.sample_id for group in groups[:2] for s in group.samples])
    again = Shop(tmp_path)
    loaded = await again.load()
    assert [group.position for group in loaded] == list(range(5)), "READY and leased ones"
    assert all(same(*pair) for pair in zip(loaded, groups, strict=True))


async def test_a_group_of_which_a_part_was_never_finished_is_not_loaded(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    shop.group(0)
    await shop.store.put(shop.group(1))
    old = shop.ledger.issue(step=1, position=2, count=2)  # READY without a record, as in a ledger of version 0
    for state in (SampleState.RUNNING, SampleState.ROLLED, SampleState.READY):
        shop.ledger.move(old.sample_ids, state)
    assert [group.position for group in await shop.load()] == [1]


async def test_no_sample_is_ready_before_its_arrays_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop(tmp_path)
    groups = [shop.group(position) for position in range(40)]
    events: list[str] = []

    def note(name: str, function: object) -> object:
        def call(*arguments: object) -> object:
            events.append(name)
            return function(*arguments)  # type: ignore[operator]

        return call

    monkeypatch.setattr(os, "fdatasync", note("segment", os.fdatasync))
    monkeypatch.setattr(shop.ledger, "make_ready", note("ready", shop.ledger.make_ready))
    monkeypatch.setattr(shop.ledger, "sync", note("ledger", shop.ledger.sync))

    async def put(group: SampleGroup) -> None:
        await shop.store.put(group)
        events.append("told")

    await asyncio.gather(*(put(group) for group in groups))
    written = ["segment", "ready", "ledger"]
    assert [e for e in events if e != "told"] == written * 2, "39 groups finished while the first was written"
    assert events[:3] == written and events[-39:] == ["told"] * 39
    await put(shop.group(50))
    assert events[-4:] == [*written, "told"]


async def test_an_attempt_of_an_agent_is_rolled_on_the_disk_when_keep_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway then forgets it: a power loss must leave the record, and the row that names it."""
    shop = Shop(tmp_path)
    issued = shop.ledger.issue(step=1, position=0, count=2)
    shop.ledger.move(issued.sample_ids, SampleState.RUNNING)
    monkeypatch.setattr(SegmentFiles, "append", _then_copy(SegmentFiles.append, tmp_path, "segment"))
    monkeypatch.setattr(Ledger, "sync", _then_copy(Ledger.sync, tmp_path, "disk"))
    for name in issued.sample_ids:
        await shop.store.keep(trajectory(name, issued.group_id, seed=1))
        kept = Shop(tmp_path / "disk")  # as it was on the disk when the last flush had ended
        assert kept.ledger.state(name) is SampleState.ROLLED
        before = Shop(tmp_path / "segment")
        assert before.ledger.state(name) is SampleState.RUNNING, "no row names a record that is not on the disk"
        assert kept.record_count() == before.record_count() + 1
    assert shop.record_count() == 2


def _then_copy(function: Callable[..., Any], folder: Path, name: str) -> Callable[..., Any]:
    """Return a function after whose calls `folder/NAME` is a copy of the ledger."""

    def call(*arguments: Any) -> Any:
        result = function(*arguments)
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
        for path in folder.glob("ledger.sqlite*"):
            if path.suffix != ".sqlite-shm":
                shutil.copy(path, folder / name / path.name)
        return result

    return call


async def test_a_writer_that_is_cancelled_leaves_the_work_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop(tmp_path)
    groups = [shop.group(position) for position in range(3)]
    append, calls = shop.files.append, list[int]()

    def slow(bodies: Sequence[Sequence[Buffer]]) -> list[tuple[int, int]]:
        calls.append(len(bodies))
        time.sleep(0.1)
        return append(bodies)

    monkeypatch.setattr(shop.files, "append", slow)
    tasks = [asyncio.create_task(shop.store.put(group)) for group in groups]
    while len(calls) < 2:  # the first group is written; the second one writes itself and the third
        await asyncio.sleep(0.001)
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert calls == [3, 6, 3] and tasks[1].cancelled() and not tasks[2].cancelled()
    assert shop.ledger.counts()[SampleState.READY] == 4
    assert all(same(*pair) for pair in zip(await shop.load(), (groups[0], groups[2]), strict=True))


async def test_groups_of_cancelled_calls_are_not_written_with_later_ones(tmp_path: Path) -> None:
    """A trainer's restart cancels all calls, and drops their samples."""
    shop = Shop(tmp_path)
    calls = [asyncio.create_task(shop.store.put(shop.group(position))) for position in range(2)]
    await asyncio.sleep(0)  # the first call writes, the second has joined the next batch
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    shop.ledger.restore(0)
    await shop.store.put(shop.group(2))
    assert [group.position for group in await shop.load()] == [2]


async def test_a_place_that_has_the_record_of_another_sample_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shop = Shop(tmp_path)
    groups = [shop.group(position) for position in range(2)]
    for group in groups:
        await shop.store.put(group)
    rows = shop.ledger.recorded()
    shop.ledger.make_ready([], [RecordPlace(rows[0].sample_id, rows[3].segment, rows[3].offset)])
    assert [group.position for group in await shop.load()] == [1]
    assert f"it is of sample '{rows[3].sample_id}'" in caplog.text


async def test_a_damaged_record_costs_its_group_and_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop(tmp_path)
    groups = [shop.group(position) for position in range(3)]
    for group in groups:
        await shop.store.put(group)
    (path,) = (tmp_path / "experiences").iterdir()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1  # in the second of three groups of one size
    path.write_bytes(data)
    assert [group.position for group in await shop.load()] == [0, 2]
    assert "group cannot be recovered, its prompt is issued again: group=p0000001-0: " in caplog.text
    assert "record at byte" in caplog.text
    assert shop.ledger.restore(0, keep=["p0000000-0", "p0000002-0"]) == 2
    assert shop.ledger.counts() == {SampleState.READY: 4, SampleState.DROPPED: 5}


async def test_segments_are_deleted_when_a_checkpoint_has_their_samples(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    first, second = shop.group(0), shop.group(1)
    await shop.store.put(first)
    await shop.store.put(second)
    shop.ledger.lease(1, [s.sample_id for s in first.samples])
    shop.ledger.acknowledge(1, policy_version=1, skipped_reason="", data_position=2)
    await shop.store.release(0)
    assert shop.segments() == ["00000001.segment"], "no checkpoint includes the step"
    await shop.store.release(1)
    assert shop.segments() == ["00000001.segment"], "the other group is not trained"
    shop.ledger.drop([s.sample_id for s in second.samples], "STALE")
    await shop.store.release(1)
    assert shop.segments() == [] and shop.ledger.segments() == set()
    await shop.store.put(shop.group(2, step=2))
    assert len(await shop.load()) == 1


@pytest.mark.slow
def test_what_was_told_is_there_after_kill_9_at_any_moment(tmp_path: Path) -> None:
    known: set[str] = set()
    for round_ in range(6):
        command = [sys.executable, "-m", __name__, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.02 + 0.03 * round_)
            process.send_signal(signal.SIGKILL)
            known |= {line.strip() for line in process.stdout.readlines() if line.endswith("\n")}
        shop = Shop(tmp_path)
        loaded = {group.trajectories[0].sample.group_id: group for group in asyncio.run(shop.load())}
        assert known <= loaded.keys()
        for name, group in loaded.items():
            made = [
                trajectory(t.sample.sample_id, name, seed=group.position + i) for i, t in enumerate(group.trajectories)
            ]
            made[-1] = made[-1].with_drop_reason("NO_IDEA", abstained=True)
            assert same(group, replace(group, trajectories=tuple(made)))
        shop.ledger.close()
    assert len(known) > 10  # a busy machine stores 42


async def _work(folder: Path) -> None:
    """Store groups until killed; print the id of each when it is durable."""
    shop = Shop(folder)
    os.write(1, b"ready\n")
    position = max((group.position for group in await shop.load()), default=-1) + 1_000

    async def put(group: SampleGroup) -> None:
        await shop.store.put(group)
        os.write(1, f"{group.trajectories[0].sample.group_id}\n".encode())

    while True:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(7):
                tasks.create_task(put(shop.group(position)))
                position += 1


if __name__ == "__main__":
    asyncio.run(_work(Path(sys.argv[1])))


async def test_the_row_of_a_checkpoint_is_on_the_disk_before_anything_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop(tmp_path)
    group = shop.group(0)
    await shop.store.put(group)
    shop.ledger.lease(1, [s.sample_id for s in group.samples])
    shop.ledger.acknowledge(1, policy_version=1, skipped_reason="", data_position=1)
    shop.ledger.commit_checkpoint(step=1, data_position=1, policy_version=1)
    sync, loop_thread = shop.ledger.sync, threading.current_thread()
    seen: list[tuple[int, int]] = []

    def note() -> None:
        assert threading.current_thread() is not loop_thread, "a sync takes milliseconds"
        seen.append((len(shop.segments()), shop.record_count()))
        sync()

    monkeypatch.setattr(shop.ledger, "sync", note)
    await shop.store.release(1)
    assert seen == [(1, 3)] and not shop.segments()
