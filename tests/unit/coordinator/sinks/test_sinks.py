"""Tests each sink with the real library of its tracker, and reads back what the tracker has."""

from __future__ import annotations

import argparse
import re
import sqlite3
from pathlib import Path

import pytest

from fourfold.errors import ConfigError
from fourfold.install import install_command
from fourfold_coordinator.cli import log as command
from fourfold_coordinator.sinks import sink as sink_module
from tests.support.tensorboard import shown_by_tensorboard

from .conftest import RunFolder


def log(run: RunFolder, *words: str) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.main(parser.parse_args([str(run.folder), *words])) == 0


def test_tensorboard_shows_each_step_once_after_a_resume(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    log(run, "tensorboard")
    assert "tensorboard: sent 4 steps" in capsys.readouterr().out
    run.write_steps([0.25, 0.5, 1.0], minute=9)
    log(run, "tensorboard")
    shown = shown_by_tensorboard(run.folder / "sinks" / "tensorboard", "reward/mean")
    assert {step: value for step, (value, _) in shown.items()} == {1: 0.25, 2: 0.5, 3: 1.0}
    assert shown[1][1] == 1795655341.0  # when the step ended


@pytest.mark.slow
def test_wandb_keeps_a_run_offline_without_an_account(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", "/nonexistent")
    log(run, "wandb")
    (file,) = (run.folder / "sinks" / "wandb").glob("offline-run-*/run-*.wandb")
    data = file.read_bytes()
    assert b"reward/mean" in data
    assert b"trainer.learning_rate" in data
    run.write_steps([0.25, 0.5, 0.75, 1.0])
    log(run, "wandb")
    ids = {path.name.rpartition("-")[2] for path in (run.folder / "sinks" / "wandb").glob("offline-run-*")}
    assert len(ids) == 1  # the second part belongs to the same run


@pytest.mark.slow
def test_trackio_continues_a_run(run: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:

    folder = tmp_path / "trackio"
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", folder)
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", folder)
    log(run, "trackio")
    run.write_steps([0.25, 0.5, 0.75, 1.0])
    log(run, "trackio")
    database = sqlite3.connect(next(folder.glob("*.db")))
    steps = database.execute("SELECT step, run_name FROM metrics ORDER BY step").fetchall()
    assert [step for step, _ in steps] == [0, 1, 2, 3, 4]
    assert len({name for _, name in steps}) == 1


@pytest.mark.slow
def test_mlflow_continues_a_run(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    log(run, "mlflow", "--set", 'logging.tags=["nightly"]')
    run.write_steps([0.25, 0.5, 0.75, 1.0])
    log(run, "mlflow")
    client = MlflowClient(f"sqlite:///{run.folder.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found.info.run_id, "reward/mean")
    assert [(each.step, each.value) for each in history] == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    assert history[0].timestamp == 1795654801000
    assert found.data.params["trainer.learning_rate"] == "1e-05"
    assert found.data.params["reward.reward.function"] == "last_number"
    assert not any(key.startswith("logging.") for key in found.data.params)
    assert (found.info.status, found.data.tags["nightly"]) == ("FINISHED", "true")


def test_a_missing_library_names_its_package(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sink_module._LIBRARIES, "wandb", "no_such_module")
    with pytest.raises(ConfigError, match=re.escape(install_command("fourfold-coordinator[wandb]"))):
        log(run, "wandb")


def test_a_run_without_sinks_needs_a_name(run: RunFolder) -> None:
    with pytest.raises(ConfigError, match=r"name one: fourfold log .* tensorboard"):
        log(run)


def test_a_tracker_that_refuses_is_an_error(run: RunFolder) -> None:
    blocked = run.folder / "blocked"
    blocked.write_text("")
    with pytest.raises(ConfigError, match="tensorboard failed"):
        log(run, "tensorboard", "--set", f"logging.tensorboard_dir={blocked}")
