"""Runs test programs in processes that are forked from one in which torch, DeepSpeed and transformers are imported.

The imports take 5 s of a processor, in every driver of trainer engines and in every rank that it starts. The session of
tests has one server, `python -m tests.support.fork_server`; the first program starts it.

    test --command--> server --fork--> program --fork, before it has threads--> its ranks
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import runpy
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from fourfold.host import process
from fourfold.host.imports import fast_imports
from fourfold.host.process_tree import PARENT_PID_VARIABLE, die_with_parent
from tests.support.plain_trainer import Arrays
from tests.support.trainer_driver import REPOSITORY, Case, trainer_environment, write_cases

_RANK_PROGRAM: Final = "fourfold_trainer.ranks.main"
_IMPORTED: Final = (
    "deepspeed.sequence.layer",
    "transformers.models.llama.modeling_llama",
    "fourfold_trainer.zero.models",
    _RANK_PROGRAM,
    "tests.support.lora_driver",
    "tests.support.sequence_cases",
)
_SHOWN: Final = 4000  # characters of a failed program's output


def run_cases(
    cases: Sequence[Case], folder: Path, *, driver: str = "tests.support.trainer_driver", first: Path | None = None
) -> dict[str, Arrays]:
    """Run cases one after another in one process of a driver; return what each wrote. `first`: see `run_modules`."""
    write_cases(folder / "cases.json", cases)
    command = [driver, str(folder / "cases.json"), str(folder)]
    if any(case.device != "cpu" for case in cases):  # DeepSpeed chooses the device when it is imported
        subprocess.run(
            [sys.executable, "-m", *command], env=trainer_environment(), cwd=REPOSITORY, timeout=280, check=True
        )
    else:
        # A case that resumes makes two engines.
        ranks = sum((case.ranks - 1 + case.critic_ranks) * (1 + (case.does == "resume")) for case in cases)
        run_modules([command], folder / "driver.log", ranks=ranks, first=first)
    written = {case.name: folder / f"{case.name}.npz" for case in cases}
    return {name: np.load(path) for name, path in written.items() if path.exists()}


def run_modules(
    commands: Sequence[Sequence[str]], output: Path, *, ranks: int = 0, first: Path | None = None, seconds: float = 280
) -> None:
    """Run each command, as `python -m` would, side by side; assert that all end with exit code 0.

    Args:
        commands: module and arguments of each program.
        output: file for what the programs write.
        ranks: number of rank processes that each program starts in all.
        first: a Python file that each program runs before.
        seconds: until the programs and the server are killed.
    """
    job = {"commands": commands, "output": str(output), "ranks": ranks, "first": str(first or "")}
    codes = _Server.running().run(job, seconds)
    text = output.read_text(errors="replace")[-_SHOWN:] if output.exists() else ""
    assert codes is not None, f"{commands} took more than {seconds} s, or their fork server died: {text}"
    assert not any(codes), f"{commands} ended with {codes}: {text}"


class _Server:
    """The tests' end of the server."""

    _running: _Server | None = None

    def __init__(self) -> None:
        # With more threads, an import starts some, which a fork would lose.
        alone = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", PARENT_PID_VARIABLE: str(os.getpid())}
        environment = trainer_environment() | alone
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server"],
            env=environment,
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    @classmethod
    def running(cls) -> _Server:
        """Return the server of this process; start another one if it has ended."""
        if cls._running is None or cls._running._process.poll() is not None:
            cls._running = cls()
        return cls._running

    def run(self, job: Mapping[str, object], seconds: float) -> list[int] | None:
        """Return the exit codes of a job; None if the server died, or was killed because it took too long."""
        assert self._process.stdin is not None and self._process.stdout is not None, "they are pipes"
        answer = b""
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
            if select.select([self._process.stdout], [], [], seconds)[0]:
                answer = self._process.stdout.readline()
        finally:
            if not answer:  # its programs end with it, and an answer that comes late belongs to no other job
                self._process.kill()
                self._process.wait()
        return list(json.loads(answer)) if answer else None


# ---- in the server -----------------------------------------------------------------------


def _serve() -> None:
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print when they are imported
    _import_libraries()
    tasks = list(Path("/proc/self/task").iterdir())
    assert len(tasks) == 1, "a library started threads, which a fork would lose"
    for line in sys.stdin:
        job = json.loads(line)
        pids = [_fork(partial(_run_module, command, job)) for command in job["commands"]]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        answers.write(json.dumps(codes) + "\n")
        answers.flush()


def _import_libraries() -> None:
    # As a rank does, see fourfold_trainer/ranks/loading.py.
    with fast_imports(without="mlflow"):
        for name in _IMPORTED:
            importlib.import_module(name)


def _fork(program: Callable[[], int | None]) -> int:
    """Run a program in a forked process that ends with this one; return its pid."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    code = 1
    try:
        die_with_parent(parent)
        os.setsid()
        code = program() or 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _write_to(path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _run_module(command: Sequence[str], job: Mapping[str, Any]) -> None:
    _write_to(job["output"])
    faulthandler.enable()
    if job["first"]:
        runpy.run_path(job["first"])
    spares = [_ForkedRank() for _ in range(job["ranks"])]
    start: Any = subprocess.Popen

    def start_or_fork(argv: Sequence[str], **options: Any) -> Any:
        return spares.pop().start(argv, **options) if _RANK_PROGRAM in argv else start(argv, **options)

    subprocess.Popen = start_or_fork  # type: ignore[assignment, misc]
    process.Supervisor.start_guard = lambda self: None  # type: ignore[method-assign]  # spares end with this process
    sys.argv = list(command)
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


class _ForkedRank:
    """A process that waits until it is started as a rank. `Popen` has the same attributes."""

    def __init__(self) -> None:
        reading, self._writing = os.pipe()
        self.pid = _fork(partial(self._wait_and_run, reading))
        os.close(reading)
        self._ended = False

    def start(self, argv: Sequence[str], *, stdout: Any, env: Mapping[str, str], **_: Any) -> _ForkedRank:
        """Give the process what a new one would get."""
        start = {"argv": argv, "log": stdout.name, "env": dict(env)}
        with os.fdopen(self._writing, "w") as pipe:
            pipe.write(json.dumps(start) + "\n")
        return self

    def wait(self, timeout: float) -> None:
        """Reap the process. Any number of times. Raises TimeoutExpired if it lives."""
        end = time.monotonic() + timeout
        while not self._ended:
            self._ended = bool(os.waitpid(self.pid, os.WNOHANG)[0])
            if not self._ended:
                if time.monotonic() > end:
                    raise subprocess.TimeoutExpired(_RANK_PROGRAM, timeout)
                time.sleep(0.01)

    @staticmethod
    def _wait_and_run(reading: int) -> int:
        from fourfold_trainer.ranks.main import main

        with os.fdopen(reading) as pipe:
            start = json.loads(pipe.readline())
        os.environ.clear()
        os.environ.update(start["env"])
        _write_to(start["log"])
        sys.argv = start["argv"][2:]  # without the interpreter's -m
        return main()


if __name__ == "__main__":
    _serve()
