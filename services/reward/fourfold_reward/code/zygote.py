"""Forks the processes of each test: `python -c BOOTSTRAP PARENT_PID SOCKET PACKAGE...` (`verifier._start_zygote`).

A test has a runner, which runs the code. A test with asserts also has a checker, which runs these. A new interpreter
takes 50 ms, a fork one. The zygote starts before its worker has seen a sample and gets no tests, so that no runner
inherits an expected result. It kills the processes when the worker says STOP or asks for the next test; its own
deadline is for a worker that sends nothing more.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from fourfold import sandbox
from fourfold.host.process_tree import die_with_parent
from fourfold.sandbox import seccomp
from fourfold_reward.code import checker, runner

MAX_REQUEST_BYTES: Final = 4096
START_SECONDS: Final = 60.0
"""Longest time until the zygote is ready, or a runner is in its sandbox; it does not count for the test."""
STOP: Final = b"stop"
_OPEN_FILES: Final = 64
_MAX_SOCKETS: Final = 3  # of one request
_CHECKER_MIB: Final = 2048  # a test may expect a larger value than its code may have
_ADDRESSES: Final = 2  # address space per byte of memory: libraries reserve more than they use
_CPU_SECONDS: Final = 60  # of the zygote itself, whose worker gave it a limit, until the next request


def main(arguments: list[str]) -> int:
    """Serve requests until the worker ends or closes the socket."""
    die_with_parent(int(arguments[0]))
    control = socket.socket(fileno=int(arguments[1]))
    seccomp.offered()  # loads libseccomp once for all runners
    paths = sandbox.interpreter_paths()
    control.send(b"ready")
    running: _Processes | None = None
    while True:
        if running is not None:
            running.wait_for(control)
            running.kill()
            running = None
        message, descriptors, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, _MAX_SOCKETS)
        if not message:
            return 0
        if message == STOP:
            continue
        sandbox.allow_cpu(_CPU_SECONDS)
        running = _Processes(json.loads(message), descriptors, control, paths)
        for descriptor in descriptors:
            os.close(descriptor)


class _Processes:
    """The forked processes of one test."""

    def __init__(
        self, request: dict[str, Any], descriptors: list[int], control: socket.socket, paths: tuple[str, ...]
    ) -> None:
        """Fork them.

        Args:
            request: mode, seconds, and memory_mib of the runner.
            descriptors: of the socket from a program to the worker; or from the checker to the worker, and of both ends
                of a socket between checker and runner.
            control: the zygote's own socket.
            paths: that the processes may read.
        """
        seconds = request["seconds"]
        self._deadline = time.monotonic() + START_SECONDS + seconds

        def enter_sandbox(memory_mib: int) -> None:
            policy = sandbox.Policy(
                read=paths,
                write=("/dev/null",),
                memory_bytes=memory_mib << 20,
                address_bytes=_ADDRESSES * (memory_mib << 20),
                cpu_seconds=int(seconds) + 1,
                open_files=_OPEN_FILES,
            )
            sandbox.enter(policy)

        def run() -> None:
            runner.run(request["mode"], descriptors[-1], partial(enter_sandbox, request["memory_mib"]))

        def check() -> None:
            os.close(descriptors[2])  # otherwise it would not see that the runner ended
            checker.run(descriptors[1], descriptors[0], seconds, START_SECONDS, partial(enter_sandbox, _CHECKER_MIB))

        works = (run, check) if len(descriptors) > 1 else (run,)
        self._pids = [_fork(work, control) for work in works]

    def wait_for(self, control: socket.socket) -> None:
        """Wait until the worker sends a request, or until the deadline."""
        waiting = select.poll()
        waiting.register(control, select.POLLIN)
        waiting.poll(max(self._deadline - time.monotonic(), 0) * 1000)

    def kill(self) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _fork(work: Callable[[], None], control: socket.socket) -> int:
    """Run `work` in a fork without the zygote's socket; return its process id."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent(parent)
            control.close()
            work()
        finally:
            os._exit(1)
    return pid


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
