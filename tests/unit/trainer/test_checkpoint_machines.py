"""Tests which files of a checkpoint are copied between machines, and the copies themselves between two processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fourfold.errors import InvalidInput
from fourfold_trainer.checkpoint import machines
from fourfold_trainer.checkpoint.machines import FileCopy, copies_to_keep, copies_to_read, newest_complete
from fourfold_trainer.checkpoint.store import STATE_FILE

RANKS = [range(0, 1), range(1, 2), range(2, 3)]


def test_a_file_of_one_machine_gets_to_a_second_one() -> None:
    seen = [{"p-0": 5}, {"p-1": 6}, {"p-2": 7}]
    assert copies_to_keep(seen, RANKS) == [
        FileCopy("p-0", 5, 0, 1),  # rank 0's file to the next machine
        FileCopy("p-1", 6, 1, 0),  # the others to rank 0's, which lists and restores them
        FileCopy("p-2", 7, 2, 0),
    ]


def test_on_shared_storage_nothing_is_copied() -> None:
    files = {"p-0": 5, "p-1": 6, "p-2": 7}
    assert copies_to_keep([files] * 3, RANKS) == []
    assert copies_to_read([files] * 3, RANKS, files) == []


def test_to_read_every_machine_gets_what_it_lacks() -> None:
    seen: list[dict[str, int]] = [{}, {"a": 1, "b": 2}, {"b": 9}]
    copies = copies_to_read(seen, RANKS, {"a": 1, "b": 2})
    assert copies == [
        FileCopy("a", 1, 1, 0),
        FileCopy("a", 1, 1, 2),
        FileCopy("b", 2, 1, 0),
        FileCopy("b", 2, 1, 2),  # its own one is torn
    ]


def test_the_ranks_of_a_machine_share_the_work() -> None:
    names = [f"policy-{rank:03d}" for rank in range(4, 8)]
    copies = copies_to_keep([{}, dict.fromkeys(names, 1)], [range(4), range(4, 8)])
    assert len({copy.source for copy in copies}) == len({copy.target for copy in copies}) == 4


def test_a_checkpoint_is_complete_when_all_files_are_somewhere_in_full() -> None:
    record = json.dumps({"files": {"p-0": 5, "p-1": 6}})
    seen = [{"step-000003/p-0": 5, "step-000004/p-0": 5}, {"step-000003/p-1": 6, "step-000004/p-1": 3}]
    records = [{"step-000003": record, "step-000004": record, "step-000005": "{}", "step-000006": "torn"}, {}]
    found = newest_complete(seen, records)
    assert found is not None and (found.name, found.stale) == ("step-000003", [])
    assert newest_complete([{}, {}], records) is None


def test_a_machine_that_was_away_may_have_another_checkpoint_of_the_same_step() -> None:
    def record(lineage: str, score: float | None = None, **files: int) -> dict[str, str]:
        return {"step-3": json.dumps({"files": files, "score": score, "state": {"lineage": lineage}})}

    mine, other = {"step-3/p0": 9, "step-3/trainer.json": 4}, {"step-3/p0": 5, "step-3/p1": 5, "step-3/trainer.json": 4}
    found = newest_complete([mine, other], [record("new", p0=9), record("old", p0=5, p1=5)])
    assert found is not None and (found.files, found.stale) == (mine, [1])
    found = newest_complete([{}, other], [record("new", p0=9), record("old", p0=5, p1=5)])  # rank 0's disk was lost
    assert found is not None and (found.files, found.stale) == (other, [0])
    found = newest_complete([mine, mine], [record("new", p0=9, score=0.5), record("new", p0=9)])
    assert found is not None and found.stale == [], "a score that was added later makes no difference"


def test_a_machine_with_its_own_disk_commits_what_it_has(tmp_path: Path) -> None:
    partial, target = tmp_path / ".partial-step-000001-7", tmp_path / "step-000001"
    partial.mkdir()
    (partial / "policy-001.safetensors").write_text("x")
    machines.commit(partial, target, "{}")
    assert (target / STATE_FILE).read_text() == "{}" and (target / "policy-001.safetensors").exists()
    assert not partial.exists()


def test_a_machine_that_sees_rank_zeros_folder_leaves_it_alone(tmp_path: Path) -> None:
    partial, target = tmp_path / ".partial-step-000001-7", tmp_path / "step-000001"
    partial.mkdir()
    (partial / STATE_FILE).write_text("{}")
    machines.commit(partial, target, "{}")
    assert partial.exists() and not target.exists()


def test_old_checkpoints_are_removed(tmp_path: Path) -> None:
    for name in ("step-000001", "step-000002"):
        (tmp_path / name).mkdir()
        (tmp_path / name / STATE_FILE).write_text("{}")
    machines.keep_only(tmp_path, ["step-000002"])
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def test_a_name_cannot_leave_the_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="leaves"):
        machines.copy_files(tmp_path, [FileCopy("../x", 1, 0, 1)], rank=1, group=None)
