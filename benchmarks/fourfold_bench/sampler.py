"""A sampling profiler inside every Python process of a benchmark, switched on and off by a signal.

    parent                                   child, and every process that it starts
    writes sitecustomize.py   --start-->     arm(): waits for SIGUSR2, says so by a file `armed-PID`
    SIGUSR2                   ---------->    a thread notes the stacks of all the others, a hundred times a second
    SIGUSR2                   ---------->    writes NAME-PID.folded and, last, NAME-PID.txt

`.folded` is what flamegraph.pl and speedscope read: stack and count. `.txt` has the functions that were on top, and
those that were anywhere in a stack, thread by thread. With kernels, a process that uses CUDA also writes
NAME-PID.kernels, the GPU's time by kernel, from torch's profiler. Stacks are seen where the interpreter is: a
thread that waits in C shows the call that waits. A small cost: the threads hold still while they are looked at.
"""

from __future__ import annotations

import collections
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final

from fourfold.errors import DeadlinePassed
from fourfold.host.process_tree import descendants

FOLDER_VARIABLE: Final = "FOURFOLD_PROFILE"
KERNELS_VARIABLE: Final = "FOURFOLD_PROFILE_KERNELS"
_EVERY_SECONDS: Final = 0.01
# How long a thread goes on when another one waits; the interpreter's 5 ms are longer than most of what is looked for.
_SWITCH_SECONDS: Final = 1e-4
_LINES: Final = 40
_WRITE_SECONDS: Final = 120.0
_POLL_SECONDS: Final = 0.05
_CUSTOMIZE: Final = "from fourfold_bench import sampler\n\nsampler.arm()\n"

Stacks = collections.Counter[str]
"""How often each stack was seen: frames from the outermost on, joined by ";", the thread's name first."""


class Profile:
    """The parent's side."""

    def __init__(self, folder: Path, *, kernels: bool = False) -> None:
        """Prepare `folder`, made if missing; nothing is profiled yet."""
        self._folder = folder.absolute()
        self._kernels = kernels
        self._profiled: list[int] = []
        (self._folder / "hook").mkdir(parents=True, exist_ok=True)
        (self._folder / "hook" / "sitecustomize.py").write_text(_CUSTOMIZE, encoding="utf-8")

    def environment(self) -> dict[str, str]:
        """Return what a child needs to be profiled, with all that it starts."""
        path = os.pathsep.join(filter(None, [str(self._folder / "hook"), os.environ.get("PYTHONPATH", "")]))
        kernels = {KERNELS_VARIABLE: "1"} if self._kernels else {}
        return {FOLDER_VARIABLE: str(self._folder), "PYTHONPATH": path} | kernels

    def begin(self, pid: int) -> int:
        """Begin to profile a process and its descendants; return how many there are."""
        armed = {int(path.name.removeprefix("armed-")) for path in self._folder.glob("armed-*")}
        self._profiled = [each for each in armed & ({pid} | descendants({pid})) if _catches(each)]
        for each in self._profiled:
            os.kill(each, signal.SIGUSR2)
        return len(self._profiled)

    def end(self) -> int:
        """End it, and wait until all that still live have written theirs: kernels take a while; return how many."""
        alive = [each for each in self._profiled if _catches(each)]
        for each in alive:
            os.kill(each, signal.SIGUSR2)
        deadline = time.monotonic() + _WRITE_SECONDS
        while waited := [each for each in alive if _catches(each) and not list(self._folder.glob(f"*-{each}.txt"))]:
            if time.monotonic() > deadline:
                raise DeadlinePassed(f"{self._folder}: no profile of process {waited[0]} after {_WRITE_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)
        return len(alive)


def _catches(pid: int) -> bool:
    """Whether a process has a handler: one that became another program would die of the signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:  # gone
        return False
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (signal.SIGUSR2 - 1) & 1)


def arm() -> None:
    """Wait for the signal in this process, and in those forked from it."""
    signal.signal(signal.SIGUSR2, _on_signal)
    os.register_at_fork(after_in_child=_announce)
    _announce()


def _announce() -> None:
    global _sampling
    _sampling = None  # a fork has no thread of its parent
    (Path(os.environ[FOLDER_VARIABLE]) / f"armed-{os.getpid()}").touch()


def _on_signal(_number: int, _frame: FrameType | None) -> None:
    global _sampling
    if _sampling is None:
        _sampling = _Sampling(Path(os.environ[FOLDER_VARIABLE]), kernels=KERNELS_VARIABLE in os.environ)
        _sampling.start()
    else:
        _sampling.done.set()
        _sampling = None


class _Sampling(threading.Thread):
    """Notes stacks until `done` is set, then writes them."""

    def __init__(self, folder: Path, *, kernels: bool) -> None:
        super().__init__(name="sampler", daemon=True)
        self.done = threading.Event()
        self._folder, self._kernels = folder, kernels

    def run(self) -> None:
        """Sample."""
        kernels = _Kernels(wanted=self._kernels)
        # Else the sampler would find the others mostly where they give the interpreter up by themselves: in calls to C.
        before = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
        stacks, began, cpu = Stacks(), time.perf_counter(), time.process_time()
        while not self.done.wait(_EVERY_SECONDS):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            for ident, frame in sys._current_frames().items():
                if ident != self.ident:
                    stacks[stack(frame, names.get(ident, str(ident)))] += 1
        seconds, busy = time.perf_counter() - began, time.process_time() - cpu
        sys.setswitchinterval(before)
        name = f"{_process_name()}-{os.getpid()}"
        self._write(f"{name}.folded", "".join(f"{s} {n}\n" for s, n in stacks.items()))
        if text := kernels.stop(seconds):
            self._write(f"{name}.kernels", text)
        head = f"{name}: {seconds:.3f} s, {busy:.3f} s of them on a CPU\n"
        self._write(f"{name}.txt", head + "\n".join(summary(stacks)) + "\n")

    def _write(self, name: str, text: str) -> None:
        """Write it so that who sees the file sees all of it."""
        (self._folder / f"{name}.part").write_text(text, encoding="utf-8")
        (self._folder / f"{name}.part").rename(self._folder / name)


_sampling: _Sampling | None = None


def stack(frame: FrameType | None, thread: str) -> str:
    """Return a stack as one line: the thread, then functions from the outermost on."""
    found = []
    while frame is not None:
        code = frame.f_code
        found.append(f"{code.co_qualname} ({'/'.join(Path(code.co_filename).parts[-2:])}:{frame.f_lineno})")
        frame = frame.f_back
    return ";".join([thread, *reversed(found)]).replace("\n", " ")


def summary(stacks: Mapping[str, int]) -> list[str]:
    """Return, for each thread, the functions that were on top most often, and those that were in a stack."""
    by_thread: dict[str, list[tuple[list[str], int]]] = {}
    for line, count in stacks.items():
        thread, *frames = line.split(";")
        by_thread.setdefault(thread, []).append((frames, count))
    lines = []
    for thread, seen in sorted(by_thread.items()):
        total = sum(count for _, count in seen)
        top, anywhere = Stacks(), Stacks()
        for frames, count in seen:
            top[frames[-1] if frames else "?"] += count
            for frame in {frame.rpartition(":")[0] for frame in frames}:
                anywhere[frame] += count
        lines += ["", f"thread {thread}: {total} samples", "  on top:"]
        lines += [f"    {count / total:6.1%}  {name}" for name, count in top.most_common(_LINES)]
        lines += ["  in the stack:"]
        lines += [f"    {count / total:6.1%}  {name})" for name, count in anywhere.most_common(_LINES)]
    return lines


def _process_name() -> str:
    """Return what tells people which process it is: `serve-rollout`, or the name that a library gave it."""
    own, program = multiprocessing.current_process().name, Path(sys.argv[0])
    if own != "MainProcess":
        return own.replace("/", "_")
    return "-".join(sys.argv[1:3]) if program.name == "__main__.py" else program.stem or "python"


class _Kernels:
    """The GPU's kernels while it is alive, where this process has any. What fails is written, never raised."""

    def __init__(self, *, wanted: bool) -> None:
        torch = sys.modules.get("torch")
        self._profiler: Any = None
        self._trouble = ""
        if not wanted or torch is None or not torch.cuda.is_initialized():
            return
        try:
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profiler.start()
        except RuntimeError:  # a profile that fails must not end what is profiled
            self._trouble = traceback.format_exc()

    def stop(self, seconds: float) -> str:
        """Return the time of each kernel, or why there is none; empty: nothing was looked at."""
        if self._profiler is None or self._trouble:
            return self._trouble
        try:
            self._profiler.stop()
            events = self._profiler.key_averages()
            busy = sum(event.self_device_time_total for event in events) / 1e6
            table: str = events.table(sort_by="self_device_time_total", row_limit=_LINES, max_name_column_width=100)
        except RuntimeError:  # as above
            return traceback.format_exc()
        return f"{busy:.3f} s of kernels in {seconds:.3f} s\n{table}\n"
