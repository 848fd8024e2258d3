"""The program of the text processes: a parent loads the libraries and has one fork per descriptor.

    service --{"parse": ...} or {"grammar": ...}--> fork --{"result": ...} or {"invalid": text}--> service
                                                      '-- killed by a limit: the parent answers {"died": text}
                                                          and forks again

A parser may run a regular expression that never returns, and a grammar may take hours to compile. Python cannot end a
thread, and the interpreter's lock would stop the service's event loop meanwhile. The kernel ends a fork at its limit of
CPU time, wall time or memory, and the next fork is ready in milliseconds.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fourfold.errors import ConfigError, InvalidInput
from fourfold.host.imports import fast_imports
from fourfold.host.process_tree import die_with_parent
from fourfold.workers import frames
from fourfold_rollout.engine import GrammarConstraint

CPU_SECONDS: Final = {"parse": 2.0, "grammar": 8.0}
MAX_FRAME_BYTES: Final = 16 << 20
"""Bytes of one message: a text of 1 MiB whose every character JSON escapes, twice."""
_WALL_FACTOR: Final = 4.0  # of a limit of CPU seconds, for busy machines
_MEMORY_BYTES: Final = 2 << 30  # besides that of the parent


class Work:
    """Loads the libraries and answers requests."""

    def __init__(self, folder: Path, tool_parser: str, reasoning_parser: str) -> None:
        """Raises ConfigError: see `Parsers`."""
        from fourfold_rollout.vllm.text.grammar import GrammarCompiler

        self._parsers: Any = None
        if tool_parser or reasoning_parser:  # the import of vLLM takes seconds
            from fourfold_rollout.vllm.text.parsers import Parsers

            self._parsers = Parsers(folder, tool_parser=tool_parser, reasoning_parser=reasoning_parser)
        self._grammars = GrammarCompiler(folder, threads=1)

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to a request, within the limits of its kind."""
        (kind,) = request.keys() & CPU_SECONDS.keys()
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS[kind])
        signal.setitimer(signal.ITIMER_REAL, CPU_SECONDS[kind] * _WALL_FACTOR)
        try:
            if kind == "parse":
                return {"result": self._parsers.parse(*request[kind])}
            name, text, stops, accepted = request[kind]
            self._grammars.start(GrammarConstraint(kind=name, text=text), stops, accepted)
            return {"result": {}}
        except InvalidInput as error:
            return {"invalid": str(error)}
        except (MemoryError, RecursionError) as error:
            return {"died": f"{type(error).__name__}"}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)


def main(arguments: list[str]) -> int:
    """Serve a process on descriptors. Arguments: its pid, the model folder, two names of parsers, the descriptors."""
    parent, folder, tool_parser, reasoning_parser, *rest = arguments
    die_with_parent(int(parent))
    descriptors = [int(argument) for argument in rest]
    try:
        with fast_imports():
            work = Work(Path(folder), tool_parser, reasoning_parser)
    except ConfigError as error:
        _send(descriptors[0], {"config_error": str(error)})
        return 1
    _send(descriptors[0], {"result": {}})
    forks = {_fork(work, descriptor): descriptor for descriptor in descriptors}
    while True:
        pid, status = os.wait()
        if pid not in forks:
            continue
        code = os.waitstatus_to_exitcode(status)
        if code == 0:  # the service closed its end
            return 0
        descriptor = forks.pop(pid)
        _send(descriptor, {"died": signal.Signals(-code).name if code < 0 else f"exit code {code}"})
        forks[_fork(work, descriptor)] = descriptor


def _fork(work: Work, descriptor: int) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent(parent)
        # Parsers log what they cannot parse: a caller could fill the disk.
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        _limit_memory()
        with os.fdopen(os.dup(descriptor), "rb") as requests:
            while (request := frames.read(requests, max_bytes=MAX_FRAME_BYTES)) is not None:
                _send(descriptor, work.answer(request))
        code = 0
    finally:
        os._exit(code)


def _limit_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _send(descriptor: int, message: Mapping[str, Any]) -> None:
    data = memoryview(frames.pack(message))
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
