"""Tests the recording of stacks with py-spy."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from fourfold.errors import ConfigError, Unavailable
from fourfold_bench import profiling
from fourfold_bench.processes import BenchProcesses
from fourfold_bench.profiling import Profile

_WORK = """
import multiprocessing, time
def busy_work(end):
    while time.monotonic() < end:
        sum(range(1000))
if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=busy_work, args=(time.monotonic() + 60,))
    child.start()
    print("READY 127.0.0.1:1", flush=True)
    busy_work(time.monotonic() + 60)
"""


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    try:
        return Profile(tmp_path)
    except ConfigError as error:
        if "ptrace_scope" in error.message:
            pytest.skip(error.message)
        raise


def _start(processes: BenchProcesses, folder: Path) -> int:
    """Start a busy process with a busy fork; return its pid."""
    (folder / "work.py").write_text(_WORK)
    processes.start("work", str(folder / "work.py"))
    processes.ready("work", timeout=30)
    return processes.pid("work")


def test_a_profile_has_the_stacks_of_a_process_and_of_its_fork(profile: Profile, tmp_path: Path) -> None:
    with BenchProcesses(tmp_path) as processes:
        pid = _start(processes, tmp_path)
        profile.begin("work", pid)
        time.sleep(1.0)
        profile.end()
    lines = (tmp_path / "work.folded").read_text().splitlines()
    busy = [line for line in lines if "busy_work (work.py" in line]
    assert len({line.partition("thread (")[2].partition(")")[0] for line in busy}) == 2, "both processes"
    assert all("MainThread" in line and line.rpartition(" ")[2].isdigit() for line in busy)


def test_a_profile_of_a_process_that_has_ended_is_an_error(profile: Profile, tmp_path: Path) -> None:
    with BenchProcesses(tmp_path) as processes:
        pid = _start(processes, tmp_path)
    profile.begin("work", pid)
    with pytest.raises(Unavailable, match=r"py-spy ended with exit code 1; its log is .*work\.log"):
        profile.end()


def _fake_py_spy(folder: Path, text: str) -> Path:
    program = folder / "py-spy"
    program.write_text(f"#!{sys.executable}\n{text}\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize("scope", ["1\n", None])
def test_a_refusal_of_the_kernel_comes_before_the_measurement(
    scope: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses = _fake_py_spy(tmp_path, "raise SystemExit('Permission Denied: Try running again with sudo')")
    monkeypatch.setattr(profiling, "find_py_spy", lambda: refuses)
    monkeypatch.setattr(profiling, "_PTRACE_SCOPE", tmp_path / "scope")
    if scope is not None:
        (tmp_path / "scope").write_text(scope)
    with pytest.raises(ConfigError) as error:
        Profile(tmp_path)
    value = "1" if scope else "not set"
    assert (
        f"(Permission Denied: Try running again with sudo; kernel.yama.ptrace_scope is {value}" in error.value.message
    )
    assert "--cap-add SYS_PTRACE" in error.value.message and "sysctl kernel.yama.ptrace_scope=0" in error.value.message


def test_a_missing_py_spy_is_named_with_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"py-spy, which is not installed; .*pip install .*py-spy"):
        profiling.find_py_spy()
