"""Where a run has stopped, as `fourfold watch` says it."""

from __future__ import annotations

import argparse
import errno
import fcntl
import json
import re
import threading
from pathlib import Path
from typing import IO, Any

import pytest

from fourfold import config as configuration
from fourfold.coordinator.v1 import run_service_pb2 as pb
from fourfold.host.program import resume_command
from fourfold_coordinator.cli import watch
from fourfold_coordinator.cli.watch import stopped_lines
from fourfold_coordinator.launch.run_folder import is_locked, locked, write_stop_reason
from fourfold_coordinator.launch.run_names import COORDINATOR_LOCK, LEDGER_FILE, STOP_FILE
from fourfold_coordinator.state.ledger import Ledger, Progress

CONFIG: Any = configuration.load("recipes/quickstart.toml", ["steps=30"])


def do_steps(ledger: Ledger, first: int, last: int) -> None:
    for step in range(first, last + 1):
        group = ledger.issue(step=step, position=step, count=1)
        ledger.drop(group.sample_ids, "TEST")
        ledger.lease(step, [])
        ledger.acknowledge(step, policy_version=step, skipped_reason="", data_position=step)


def test_a_run_that_has_stopped_says_what_is_repeated(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / LEDGER_FILE)
    do_steps(ledger, 1, 10)
    ledger.commit_checkpoint(step=10, data_position=10, policy_version=10)
    do_steps(ledger, 11, 12)
    ledger.close()
    first, second, third, last = stopped_lines(tmp_path, CONFIG)
    assert first == f"{tmp_path} does not run: it stopped after step 12 of 30."
    assert second == "It continues from the checkpoint of step 10, and repeats 2 steps:"
    assert third == f"  {resume_command(tmp_path)}"
    assert last.endswith("/logs/coordinator-0.log")


def test_a_run_that_a_signal_stopped_names_the_signal(tmp_path: Path) -> None:
    write_stop_reason(tmp_path, "SIGINT (Ctrl-C)")
    first, *_, last = stopped_lines(tmp_path, CONFIG)
    assert first == f"{tmp_path} does not run: it was stopped by SIGINT (Ctrl-C) after step 0 of 30."
    assert "log" not in last
    (tmp_path / STOP_FILE).write_bytes(b"\x1b[2J\xffSIGTERM" + b"x" * 10_000)  # a damaged file
    assert len(first := stopped_lines(tmp_path, CONFIG)[0]) < 300 + len(str(tmp_path)) and first.isprintable()
    write_stop_reason(tmp_path, "")
    assert stopped_lines(tmp_path, CONFIG)[0].endswith("it stopped after step 0 of 30.")


@pytest.mark.parametrize(
    ("phase", "steps", "code", "output"),
    [
        (pb.RUN_PHASE_STOPPED, 0, 1, r"^\S+ does not run: it stopped after step 0.*run --resume \S+"),
        (
            pb.RUN_PHASE_FAILED,
            0,
            1,
            r"^rollout-0 died\nNo step was done\. Its logs are in \S+/logs, or in \S+\.failed/logs",
        ),
        (pb.RUN_PHASE_FAILED, 10, 1, r"^rollout-0 died\n.*run --resume \S+"),  # the report of 10 steps, before 30
        (pb.RUN_PHASE_DONE, 30, 0, r"^\nquickstart is done: 30 steps"),
        (pb.RUN_PHASE_DONE, 0, 0, r"^$"),  # its report is on another machine
    ],
)
def test_a_watcher_sees_how_a_run_ends(
    phase: pb.RunPhase.ValueType, steps: int, code: int, output: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    async def show(_address: str, _security: Any, dashboard: Any) -> None:
        dashboard.update(pb.RunStatus(phase=phase, failure="rollout-0 died" * (phase == pb.RUN_PHASE_FAILED)))

    monkeypatch.setattr(watch, "_show", show)
    monkeypatch.setattr(watch, "last_progress", lambda _folder: Progress(steps, None))
    (tmp_path / "config.toml").write_text(configuration.dump(CONFIG))
    (tmp_path / "coordinator.address").write_text("127.0.0.1:1")
    report = {"name": "quickstart", "steps": steps, "seconds": 9.0, "seed": 1, "peak_memory_bytes": 1e9}
    if steps:
        (tmp_path / "report.json").write_text(json.dumps(report))
    assert watch.main(argparse.Namespace(run_dir=tmp_path)) == code
    assert re.search(output, capsys.readouterr().out, re.DOTALL)


def test_a_run_without_a_checkpoint_starts_again(tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    first, second, third, _ = stopped_lines(folder, CONFIG)
    assert first.endswith("it stopped after step 0 of 30.")
    assert (second, third) == ("The run has no checkpoint. To start it again:", f"  {resume_command(folder)}")
    assert resume_command(folder).endswith(f" run --resume '{folder}'")


def test_a_coordinator_that_lives_holds_its_lock(tmp_path: Path) -> None:
    file = tmp_path / COORDINATOR_LOCK
    assert not is_locked(file)
    with locked(file, "coordinator"):
        assert is_locked(file)
    assert not is_locked(file)


def test_a_lock_on_nfs_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: IO[str], operation: int, real: Any = fcntl.flock) -> None:
        if operation & fcntl.LOCK_EX and not file.writable():  # as flock(2) says of NFS
            raise OSError(errno.EBADF, "Bad file descriptor")
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path / COORDINATOR_LOCK, "coordinator"):
        assert is_locked(tmp_path / COORDINATOR_LOCK)


def test_two_that_look_at_a_lock_do_not_see_each_other(tmp_path: Path) -> None:
    file = tmp_path / COORDINATOR_LOCK
    with file.open("w") as probe:
        fcntl.flock(probe, fcntl.LOCK_SH)
        assert not is_locked(file)


def test_a_look_at_a_lock_stops_no_process_that_starts(tmp_path: Path) -> None:
    file = tmp_path / COORDINATOR_LOCK
    with file.open("w") as probe:
        fcntl.flock(probe, fcntl.LOCK_EX)
        threading.Timer(0.1, lambda: fcntl.flock(probe, fcntl.LOCK_UN)).start()
        with locked(file, "coordinator"):
            assert is_locked(file)
