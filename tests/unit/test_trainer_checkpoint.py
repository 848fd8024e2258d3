"""Checkpoints on disk: complete or not there, whatever happens in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fourfold.errors import NotFound, Unavailable, WrongState
from fourfold_trainer import checkpoint
from fourfold_trainer.checkpoint import CheckpointStore, StepAnswer, TrainerState, whole

LAYOUT = {"ranks": 1, "dtype": "float32"}


def store(folder: Path, *, keep: int = 2, **layout: object) -> CheckpointStore:
    return CheckpointStore(folder / "checkpoints", keep=keep, layout={**LAYOUT, **layout})


def state(step: int, **more: object) -> TrainerState:
    answer = StepAnswer(step=step, policy_version=step, metrics={"train/grad_norm": float("inf"), "train/lr": 0.1})
    fields = {"policy_version": step, "lineage": f"lineage-{step}", "answer": answer, **more}
    return TrainerState(step=step, **fields)  # type: ignore[arg-type]


def write(folder: Path) -> None:
    checkpoint.write_tensors(folder / checkpoint.rank_file("policy", 0), {"master.0": torch.arange(4.0)})


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    store(tmp_path).save(state(12, skipped_step_count=3, batch_sha256="ab"), write)
    other = store(tmp_path)
    assert other.newest_step == 12
    found, folder = other.read(12)
    assert found == state(12, skipped_step_count=3, batch_sha256="ab")
    assert folder == tmp_path / "checkpoints/step-000012"
    assert checkpoint.read_tensors(folder / "policy-000.safetensors")["master.0"].tolist() == [0, 1, 2, 3]


def test_a_folder_without_its_last_file_is_no_checkpoint(tmp_path: Path) -> None:
    ours = store(tmp_path)
    ours.save(state(1), write)
    ours.save(state(2), write)
    (tmp_path / "checkpoints/step-000002/trainer.json").unlink()
    assert ours.newest_step == 1
    with pytest.raises(NotFound, match="there are: 1"):
        ours.read(2)


def test_another_layout_and_damage_are_told_apart(tmp_path: Path) -> None:
    store(tmp_path).save(state(1), write)
    with pytest.raises(WrongState, match="written with dtype = float32, the trainer runs with bfloat16"):
        store(tmp_path, dtype="bfloat16").read(1)
    (tmp_path / "checkpoints/step-000001/policy-000.safetensors").unlink()
    with pytest.raises(WrongState, match="damaged"):
        store(tmp_path).read(1)
    (tmp_path / "checkpoints/step-000001/trainer.json").write_text('{"format"')
    with pytest.raises(WrongState, match=r"trainer\.json is damaged"):
        store(tmp_path).read(1)
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(b"\0" * 16)
    with pytest.raises(WrongState, match="cannot be read"):
        checkpoint.read_tensors(torn)


def test_old_ones_and_those_of_a_lost_future_go(tmp_path: Path) -> None:
    ours = store(tmp_path, keep=2)
    for step in (2, 4, 6, 8):
        ours.save(state(step), write)
    assert [ours.newest_step, *(step for step in (2, 4, 6, 8) if _there(ours, step))] == [8, 6, 8]
    ours.save(state(7, lineage="after a restore of 6"), write)
    assert [step for step in (6, 7, 8) if _there(ours, step)] == [6, 7]


def test_the_same_step_is_written_again_only_when_it_is_another_state(tmp_path: Path) -> None:
    ours, written = store(tmp_path), []

    def counted(folder: Path) -> None:
        written.append(folder)
        write(folder)

    for lineage, version in (("a", 1), ("a", 1), ("b", 1), ("b", 5), ("b", 5)):
        ours.save(state(1, lineage=lineage, policy_version=version), counted)
    assert len(written) == 3
    assert ours.read(1)[0].policy_version == 5


def test_a_process_killed_while_it_writes_leaves_the_one_before(tmp_path: Path) -> None:
    store(tmp_path).save(state(1), write)
    program = """
import sys, time
from pathlib import Path
from fourfold_trainer.checkpoint import CheckpointStore, TrainerState, write_text

def write(folder):
    write_text(folder / "policy-000.safetensors", "half of it")
    print("half", flush=True)
    time.sleep(60)

CheckpointStore(Path(sys.argv[1]), keep=1, layout={"ranks": 1, "dtype": "float32"}).save(TrainerState(step=2), write)
"""
    argv = [sys.executable, "-c", program, str(tmp_path / "checkpoints")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None and process.stdout.readline() == b"half\n"
        process.send_signal(signal.SIGKILL)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names[0].startswith(".partial-") and names[1:] == ["step-000001"]
    ours = store(tmp_path)  # as after a restart
    assert ours.newest_step == 1 and ours.read(1)[0].step == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def test_a_folder_is_replaced_in_one_step(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for text in ("old", "new"):
        with whole(target) as partial:
            (partial / "config.json").write_text(text)
            if text == "new":
                assert (target / "config.json").read_text() == "old"
    assert (target / "config.json").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_error_leaves_the_old_folder(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with whole(target) as partial:
        (partial / "config.json").write_text("old")
    with pytest.raises(ZeroDivisionError), whole(target) as partial:
        (partial / "config.json").write_text(str(1 // 0))
    assert (target / "config.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_another_process_left_behind_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".partial-model-99").mkdir()
    with whole(tmp_path / "model") as partial:
        (partial / "config.json").write_text("{}")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_disk_that_refuses_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(Unavailable, match=r"cannot be written .*; nothing was changed: make room"):
        store(tmp_path).save(state(1), write)


def _there(ours: CheckpointStore, step: int) -> bool:
    try:
        return ours.read(step)[0].step == step
    except NotFound:
        return False
