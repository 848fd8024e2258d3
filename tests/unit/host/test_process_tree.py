"""Processes that end with another one, however that one ends. The processes are real, and killed by kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from fourfold.host.process_tree import PARENT_PID_VARIABLE, kill_group, parent_of

_SLEEP = "import time; print(os.getpid(), flush=True); time.sleep(60)"
_HEAD = "import os, subprocess, sys; from fourfold.host.process_tree import *; "


@contextmanager
def _python(code: str, process_count: int) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """Run `code`, which prints the pids of `process_count` processes."""
    child = subprocess.Popen([sys.executable, "-c", _HEAD + code], stdout=subprocess.PIPE, text=True)
    processes: list[psutil.Process] = []
    try:
        assert child.stdout is not None
        for _ in range(process_count):
            processes.append(psutil.Process(int(child.stdout.readline())))
        yield child, processes
    finally:
        child.kill()
        child.wait()
        for process in processes:
            if process.is_running():
                process.kill()
        if child.stdout is not None:
            child.stdout.close()


def _spawn(code: str) -> str:
    return f"subprocess.Popen([sys.executable, '-c', {_HEAD + code!r}])"


def _are_gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=5)
    return not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_a_child_dies_with_its_parent() -> None:
    with _python(_spawn("die_with_parent(os.getppid()); " + _SLEEP) + ".wait()", 1) as (parent, processes):
        parent.kill()
        parent.wait()
        assert _are_gone(processes)


def test_a_child_whose_parent_has_ended_ends_at_once() -> None:
    code = "print(os.getpid(), flush=True); sys.stdin.readline(); die_with_parent(999999999); " + _SLEEP
    child = subprocess.Popen(
        [sys.executable, "-c", _HEAD + code], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    try:
        child.communicate("\n", timeout=10)
        assert child.returncode == -9
    finally:
        child.kill()


def test_a_grandchild_ends_its_parent_and_itself_when_the_service_dies() -> None:
    worker = "die_with(parent_of(os.getppid()), os.getppid()); " + _SLEEP
    core = f"core = {_spawn(worker)}; " + _SLEEP  # does not watch the service
    with _python(_spawn(core) + ".wait()", 2) as (service, processes):
        service.kill()
        service.wait()
        assert _are_gone(processes)


def test_a_child_reads_its_supervisor_from_the_environment() -> None:
    code = _HEAD + "die_with_parent(); print('alive')"
    for parent, output in (("1", ""), (None, "alive\n")):
        env = {name: value for name, value in os.environ.items() if name != PARENT_PID_VARIABLE}
        env |= {"PYTHONPATH": os.pathsep.join(sys.path)} | ({PARENT_PID_VARIABLE: parent} if parent else {})
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=20, check=False)
        assert (done.returncode, done.stdout) == (0 if output else -signal.SIGKILL, output)


def test_the_parent_of_a_process_is_read_from_proc() -> None:
    assert parent_of(os.getpid()) == os.getppid()
    assert parent_of(2**22 + 1) == 0


def test_a_process_that_may_not_be_killed_keeps_no_other_one_of_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    children = [subprocess.Popen(["sleep", "60"], process_group=0)]
    children.append(subprocess.Popen(["sleep", "60"], process_group=children[0].pid))
    kill = os.kill

    def refuse_the_first(pid: int, number: int) -> None:
        if pid == children[0].pid:
            raise PermissionError  # as for one that has become another user's
        kill(pid, number)

    monkeypatch.setattr(os, "kill", refuse_the_first)
    try:
        kill_group(children[0].pid)
        assert children[1].wait(5) == -signal.SIGKILL and children[0].poll() is None
    finally:
        monkeypatch.undo()
        for child in children:
            child.kill()
            child.wait()
