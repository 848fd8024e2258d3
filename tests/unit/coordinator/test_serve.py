"""Tests the input that the coordinator refuses before it begins."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import ConfigError
from fourfold.service.lifecycle import ServeOptions
from fourfold_coordinator import serve
from fourfold_coordinator.launch.run_folder import is_locked, locked, read_stop_reason, write_stop_reason
from fourfold_coordinator.reporting.run_totals import MemoryMeter, pss_bytes
from fourfold_coordinator.routing.registry import Member
from fourfold_coordinator.state.files import replace_file
from tests.fakes.toy import make_config


def test_one_run_folder_has_one_coordinator(tmp_path: Path) -> None:
    file = tmp_path / "coordinator.lock"
    with locked(file, "coordinator"):
        with pytest.raises(ConfigError, match=r"coordinator .* uses this folder"), locked(file, "coordinator"):
            pass
    with locked(file, "coordinator"):
        pass


def test_the_process_that_holds_a_folder_is_named(tmp_path: Path) -> None:
    file, process = tmp_path / ".lock", rf"\(process {os.getpid()} on {re.escape(socket.gethostname())}\)"
    with locked(file, "`fourfold run`, which is longer"):
        pass
    with locked(file, "`fourfold eval`"):
        for _ in range(2):  # the one that is refused leaves the name
            with pytest.raises(ConfigError, match=rf"{tmp_path}: `fourfold eval` {process} uses this folder; wait"):
                with locked(file, "`fourfold run`"):
                    pass
        assert is_locked(file)
        file.write_bytes(b"")  # as an earlier release, or before the holder has written
        with pytest.raises(ConfigError, match="another `fourfold run` uses this folder"):
            with locked(file, "`fourfold run`"):
                pass


def test_on_a_terminal_the_folder_comes_first_and_the_result_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, folder = make_config(tmp_path), tmp_path / "run"
    options = ServeOptions(
        role="coordinator", recipe=tmp_path, config=config, member_id="coordinator-0", run_dir=folder
    )
    scores = {name: {"score": score, "n": 8} for name, score in (("eval_before", 0.25), ("eval_after", 0.75))}
    report = {"name": "toy", "steps": 4, "seconds": 9.0, "seed": 3, "peak_memory_bytes": 1e9, **scores}

    class Coordinator:
        def __init__(self, *_arguments: object) -> None:
            pass

        async def run(self) -> int:
            replace_file(folder / "report.json", [json.dumps(report)])
            return 0

    monkeypatch.setattr(serve, "Coordinator", Coordinator)
    assert serve.main(options) == 0 and capsys.readouterr().out == "", "a service manager has the log"
    (folder / "report.json").unlink()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert serve.main(options) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Run folder: {folder} (log: {folder}/logs/coordinator-0.log)\n\ntoy is done: 4 steps")
    assert "Held-out score: 0.25 (8 answers) before, 0.75 (8 answers) after" in out


def test_a_start_that_fails_forgets_what_stopped_the_run_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ServeOptions(
        role="coordinator", recipe=tmp_path, config=make_config(tmp_path), member_id="c", run_dir=tmp_path
    )

    def fail(*_arguments: object) -> None:
        raise ConfigError("the ledger is damaged")

    monkeypatch.setattr(serve, "Coordinator", fail)
    write_stop_reason(tmp_path, "SIGTERM")
    with pytest.raises(ConfigError, match="damaged"):
        serve.main(options)
    assert read_stop_reason(tmp_path) == ""
    write_stop_reason(tmp_path, "SIGTERM")
    (tmp_path / "report.json").write_text(json.dumps({"steps": options.config.steps}))
    assert serve.main(options) == 0 and read_stop_reason(tmp_path) == "SIGTERM", "nothing was started"


def test_memory_is_the_sum_over_the_processes_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FOURFOLD_PARENT_PID", raising=False)
    meter = MemoryMeter()
    blob = bytearray(b"x" * 50_000_000)
    assert meter.sample() > len(blob)
    assert pss_bytes(2**22 + 1) == 0, "a process that is gone"
    assert MemoryMeter(pss=lambda pid: 7).sample() % 7 == 0


def test_memory_counts_services_that_were_started_by_hand_and_names_those_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve = (
        "import socket, sys; server = socket.create_server(('127.0.0.1', 0)); "
        "print(server.getsockname()[1], flush=True); sys.stdin.read()"
    )
    with (
        subprocess.Popen([sys.executable, "-c", serve], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as service,
        subprocess.Popen([sys.executable, "-c", serve], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher,
    ):
        assert service.stdout is not None
        port = int(service.stdout.readline())
        monkeypatch.setenv("FOURFOLD_PARENT_PID", str(launcher.pid))  # which the service is not below
        meter = MemoryMeter(pss=lambda pid: 7)
        assert meter.sample() == 7
        here, there = member("reward-0", f"127.0.0.1:{port}"), member("trainer-0", f"gpu-node.invalid:{port}")
        assert meter.sample([here, there]) == 14
        assert meter.sample([there]) == 7, "its pid may be another's by now"
        assert meter.uncounted == ["trainer-0"]
        for process in (service, launcher):
            process.kill()


def member(member_id: str, target: str) -> Member:
    role = Role.ROLE_REWARD
    return Member(member_id=member_id, incarnation="0" * 32, role=role, target=target, tokenizer_sha256=b"")
