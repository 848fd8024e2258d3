"""Tests that sinks which hang, crash or refuse cost the run nothing, with real processes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fourfold.config import Config
from fourfold_coordinator.sinks import supervisor
from fourfold_coordinator.sinks.supervisor import SinkProcesses
from fourfold_coordinator.state.run_board import RunBoard

from .conftest import RunFolder

StartSinks = Callable[..., tuple[SinkProcesses, RunBoard]]

# A module in place of the process of a sink: the name of the sink selects what it does.
SINK = """
import os, sys, time
from pathlib import Path
folder, name = Path(sys.argv[1]), sys.argv[2]
with open(folder / f"{name}.started", "a") as file:
    print(os.getpid(), file=file)
match name:
    case "mlflow":
        sys.exit("the tracker refused: no such project")
    case "trackio":
        while True:
            time.sleep(1)
sys.stdin.read()
(folder / f"{name}.finished").touch()
"""


@pytest.fixture
def start(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StartSinks:
    (tmp_path / "toy_sink.py").write_text(SINK)
    monkeypatch.setattr(supervisor, "_MODULE", "toy_sink")
    monkeypatch.setattr(supervisor, "_RESTART_SECONDS", (0.05,))
    monkeypatch.setattr(supervisor, "_FINISH_SECONDS", 2.0)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")

    def make(*names: str) -> tuple[SinkProcesses, RunBoard]:
        tables = run.config.model_dump() | {"logging": {"sinks": list(names)}}
        board = RunBoard(name="demo", step_count=3)
        return SinkProcesses(Config.model_validate(tables), run.folder, board), board

    return make


def pids(run: RunFolder, name: str) -> list[int]:
    path = run.folder / f"{name}.started"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def is_alive(run: RunFolder, name: str) -> bool:
    return Path(f"/proc/{pids(run, name)[0]}").exists()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.02)


async def test_a_sink_that_fails_is_a_condition_and_started_again(run: RunFolder, start: StartSinks) -> None:
    sinks, board = start("mlflow", "wandb")
    task = asyncio.create_task(sinks.run())
    await until(lambda: len(pids(run, "mlflow")) >= 3 and bool(pids(run, "wandb")))
    (condition,) = board.status.conditions
    assert condition.subject == "sink mlflow"
    assert "the tracker refused: no such project" in condition.text
    assert f"fourfold log {run.folder} mlflow" in condition.text
    await sinks.finish()
    assert (run.folder / "wandb.finished").exists()
    await task


async def test_a_sink_that_hangs_delays_the_end_by_its_limit(
    run: RunFolder, start: StartSinks, caplog: pytest.LogCaptureFixture
) -> None:
    sinks, _ = start("trackio")
    task = asyncio.create_task(sinks.run())
    await until(lambda: bool(pids(run, "trackio")))
    began = time.monotonic()
    await sinks.finish()
    assert 2.0 <= time.monotonic() - began < 20.0
    assert "Send what is missing with: fourfold log" in caplog.text
    assert not is_alive(run, "trackio")
    await task


async def test_a_signal_kills_the_sinks_at_once(run: RunFolder, start: StartSinks) -> None:
    sinks, _ = start("trackio", "wandb")
    task = asyncio.create_task(sinks.run())
    await until(lambda: bool(pids(run, "trackio") and pids(run, "wandb")))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for name in ("trackio", "wandb"):
        assert not is_alive(run, name)


async def test_a_run_without_sinks_starts_nothing(start: StartSinks) -> None:
    sinks, _ = start()
    task = asyncio.create_task(sinks.run())
    await asyncio.sleep(0)
    assert not task.done()  # its end would be that of a background task of the coordinator
    await sinks.finish()
    await task


async def test_the_index_of_a_large_run_is_written_during_the_run(
    run: RunFolder, start: StartSinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_INDEX_SECONDS", 0.05)
    monkeypatch.setattr(supervisor, "_INDEXED_BYTES", 100)
    sinks, _ = start()
    task = asyncio.create_task(sinks.run())
    await asyncio.sleep(0.3)
    assert not pids(run, "index")
    (run.folder / "samples.jsonl").write_text("x" * 101)
    await until(lambda: bool(pids(run, "index")))
    await sinks.finish()
    assert (run.folder / "index.finished").exists()
    await task


async def test_a_folder_that_cannot_be_written_is_a_condition(run: RunFolder, start: StartSinks) -> None:
    (run.folder / "logs").write_text("in the place of a folder")
    sinks, board = start("wandb")
    task = asyncio.create_task(sinks.run())
    await until(lambda: bool(board.status.conditions))
    assert "its process cannot be started" in board.status.conditions[0].text
    (run.folder / "logs").unlink()
    await until(lambda: bool(pids(run, "wandb")))
    await sinks.finish()
    await task


async def test_a_fault_of_the_supervisor_ends_no_run(start: StartSinks, caplog: pytest.LogCaptureFixture) -> None:
    sinks, board = start("mlflow")
    board.report_condition = None  # type: ignore[method-assign, assignment]
    task = asyncio.create_task(sinks.run())
    await until(lambda: "sinks are not supervised any more" in caplog.text)
    assert not task.done()  # its end would be that of a background task of the coordinator
    await sinks.finish()
    await task
