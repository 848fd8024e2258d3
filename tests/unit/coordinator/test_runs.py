"""`fourfold runs`: what it lists, and what it deletes."""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from fourfold import config as configuration
from fourfold.errors import ConfigError
from fourfold_coordinator.cli import runs
from fourfold_coordinator.launch.run_folder import is_locked, link_latest, locked
from fourfold_coordinator.launch.run_names import COORDINATOR_LOCK, LEDGER_FILE, RUN_LOCK
from fourfold_coordinator.state.eval_results import EvalRow
from fourfold_coordinator.state.ledger import Ledger
from tests.support.eval_results import make_result

QUICKSTART = configuration.load("recipes/quickstart.toml")
CONFIG = configuration.dump(QUICKSTART)
REPORT = json.dumps({"steps": QUICKSTART.steps})


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("old", "new", "start.failed"):
        folder = tmp_path / "runs" / name
        (folder / "checkpoints" / "step-1").mkdir(parents=True)
        (folder / "checkpoints" / "step-1" / "weights").write_bytes(b"x" * 3_000_000)
        (folder / "config.toml").write_text(CONFIG)
    ledger = Ledger(tmp_path / "runs" / "new" / LEDGER_FILE)
    ledger.add_eval(EvalRow(0, 0.25, None, 8, 0, []))
    ledger.close()
    (tmp_path / "runs" / "new" / "report.json").write_text(REPORT)
    for path in (tmp_path / "runs" / "old", *(tmp_path / "runs" / "old").iterdir()):
        os.utime(path, (time.time() - 40 * 86_400,) * 2)
    link_latest(tmp_path / "runs" / "new")
    return tmp_path / "runs"


def call(*words: str) -> int:
    parser = argparse.ArgumentParser()
    runs.add_arguments(parser)
    return runs.main(parser.parse_args(list(words)))


def test_the_list_has_state_score_and_size(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert list(lines)[:2] == ["run", "runs/old"] and len(lines) == 4
    assert "stopped" in lines["runs/old"] and "3.00 MB" in lines["runs/old"] and "40 days ago" in lines["runs/old"]
    assert "finished" in lines["runs/new"] and "0.25" in lines["runs/new"]
    assert "failed" in lines["runs/start.failed"]


def test_the_list_has_the_last_score_with_its_step_and_its_answers(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = Ledger(root / "old" / LEDGER_FILE)
    ledger.acknowledge(1, policy_version=1, skipped_reason="", data_position=8)
    ledger.add_eval(EvalRow(0, 1.0, None, 1, 239, []))
    ledger.close()
    assert call() == 0
    assert "1.00 (step 0; 1 of 240 answers; 239 without a score)" in capsys.readouterr().out


def test_the_list_has_the_loss_of_held_out_rows(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger(root / "old" / LEDGER_FILE)
    ledger.add_eval(EvalRow(0, -1.5, None, 8, 0, [], (replace(make_result("rows", score=-1.5), measure="loss"),)))
    ledger.close()
    assert call() == 0
    assert "1.50 (loss)" in capsys.readouterr().out


def test_a_file_that_a_run_replaces_meanwhile_is_no_obstacle(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: [*listed(path), path / "report.json.new"])
    assert {run.folder.name for run in runs.find_runs(root)} == {"old", "new", "start.failed"}


def test_a_deletion_says_what_it_deletes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("delete", "runs/new", "runs/start.failed", "--yes") == 0
    output = capsys.readouterr().out
    assert "runs/new" in output and "runs/start.failed" in output and "deleted 2 folders, 6.0" in output
    assert [path.name for path in root.iterdir()] == ["old"]  # without the link to a folder that is gone


def test_old_runs_are_deleted_by_their_age(root: Path) -> None:
    with locked(root / "start.failed" / COORDINATOR_LOCK, "coordinator"):
        assert call("delete", "--older-than", "30", "--yes") == 0
    assert sorted(path.name for path in root.iterdir()) == ["latest", "new", "start.failed"]


def test_all_exports_of_a_run_are_deleted_together(root: Path) -> None:
    exports = ("model", "model-ema", "model-step-4", "critic")
    for name in (*exports, "models-of-mine"):
        (root / "new" / name).mkdir(exist_ok=True)
    assert call("delete", "runs/new", "--only", "model", "--yes") == 0
    assert not any((root / "new" / name).exists() for name in exports)
    assert (root / "new" / "models-of-mine").exists() and (root / "new" / "config.toml").exists()


def test_nothing_is_deleted_without_an_answer(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="add --yes"):
        call("delete", "runs/new")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda _: "")
    assert call("delete", "runs/new") == 1
    assert (root / "new").is_dir()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["delete"], "needs folders of runs, or --older-than"),
        (["delete", "runs/latest", "--yes"], "is a link to new; name the folder itself"),
        (["delete", "runs", "--yes"], "not the folder of a run"),
        (["delete", ".", "--yes"], "not the folder of a run"),
        (["delete", "--older-than", "-5", "--yes"], "--older-than -5: it must be a number of days, at least 0"),
        (["delete", "--older-than", "nan", "--yes"], "--older-than nan: it must be"),
        (["list", "runs/new"], "to delete runs: fourfold runs delete"),
    ],
)
def test_what_is_no_run_is_refused(root: Path, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(*words)
    assert len(list(root.iterdir())) == 4


def test_a_run_is_finished_after_the_steps_of_its_recipe(root: Path) -> None:
    assert runs.read_run(root / "new").state == "finished"
    longer = QUICKSTART.model_copy(update={"steps": QUICKSTART.steps + 1})
    (root / "new" / "config.toml").write_text(configuration.dump(longer))
    assert runs.read_run(root / "new").state == "stopped", "it was extended, and has the report of its first end"
    with locked(root / "new" / COORDINATOR_LOCK, "coordinator"):
        assert runs.read_run(root / "new").state == "running"


@pytest.mark.parametrize(
    ("lock", "user"), [(COORDINATOR_LOCK, "a run"), (RUN_LOCK, "a run"), ("evaluations/e/.lock", "`fourfold eval`")]
)
def test_a_run_in_use_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch, lock: str, user: str) -> None:
    (root / "new" / "evaluations" / "e").mkdir(parents=True)
    with locked(root / "new" / lock, "it"), pytest.raises(ConfigError, match=f"is in use by {user}"):
        call("delete", "runs/old", "runs/new", "--yes")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    with ExitStack() as stack:

        def start(_: str) -> str:
            stack.enter_context(locked(root / "new" / lock, "it"))
            return "y"

        monkeypatch.setattr("builtins.input", start)
        with pytest.raises(ConfigError, match=f"is in use by {user}"):
            call("delete", "runs/old", "runs/new")
    assert len(list(root.iterdir())) == 4


def test_no_run_is_started_in_a_folder_that_is_deleted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, rename = list[Path](), Path.rename

    def take(path: Path, target: Path) -> Path:
        assert is_locked(path / RUN_LOCK)
        taken.append(path)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", take)
    assert call("delete", "runs/old", "runs/old", "runs/new", "--yes") == 0
    assert taken == [Path("runs/old"), Path("runs/new")]
    assert not any(path.name.endswith(".deleted") for path in root.iterdir())


def test_the_deletion_of_a_part_is_no_change_of_a_run(root: Path) -> None:
    assert call("delete", "runs/old", "--only", "checkpoints", "--yes") == 0
    assert call("delete", "--older-than", "30", "--yes") == 0
    assert not (root / "old").exists()
