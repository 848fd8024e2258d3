"""Forks a runner for each test: `python -c BOOTSTRAP PARENT_PID SOCKET PACKAGE...` (`verifier._start_zygote`).

A new interpreter takes 50 ms, a fork one. The zygote starts before its worker has seen a sample and gets no tests, so
that no runner inherits an expected result. It kills a runner when the worker says STOP or asks for the next one; its
own deadline is for a worker that says nothing more.
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
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from fourfold import sandbox
from fourfold.host.process_tree import die_with_parent
from fourfold.sandbox import seccomp
from fourfold_reward.code import runner

MAX_REQUEST_BYTES: Final = 4096
START_SECONDS: Final = 60.0
"""Longest time until the zygote is ready, or a runner is in its sandbox; it does not count for the test."""
STOP: Final = b"stop"
_OPEN_FILES: Final = 64
_ADDRESSES: Final = 2  # address space per byte of memory: libraries reserve more than they use
_CPU_SECONDS: Final = 60  # of the zygote itself, whose worker gave it a limit, until the next request


def main(arguments: list[str]) -> int:
    """Serve requests until the worker ends or closes the socket."""
    die_with_parent(int(arguments[0]))
    control = socket.socket(fileno=int(arguments[1]))
    seccomp.offered()  # loads libseccomp once for all runners
    policy = _policy()
    control.send(b"ready")
    running: _Runner | None = None
    while True:
        if running is not None and not running.wait_for(control):
            running.kill()
            running = None
            continue
        message, descriptors, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 1)
        if running is not None:
            running.kill()
            running = None
        if not message:
            return 0
        if message == STOP:
            continue
        sandbox.allow_cpu(_CPU_SECONDS)
        running = _Runner(json.loads(message), descriptors[0], control, policy)
        os.close(descriptors[0])


class _Runner:
    """A forked process that runs the code of one test."""

    def __init__(
        self, request: dict[str, Any], connection: int, control: socket.socket, policy: sandbox.Policy
    ) -> None:
        self._deadline = time.monotonic() + START_SECONDS + request["seconds"]
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                die_with_parent(parent)
                control.close()
                size = request["memory_mib"] << 20
                limits = {"memory_bytes": size, "address_bytes": _ADDRESSES * size}
                own = replace(policy, **limits, cpu_seconds=int(request["seconds"]) + 1)
                runner.run(request["mode"], connection, lambda: sandbox.enter(own))
            finally:
                os._exit(1)
        self._descriptor = os.pidfd_open(self._pid)

    def wait_for(self, control: socket.socket) -> bool:
        """Return true as soon as the worker asks for something; false if the runner ended or must end."""
        waiting = select.poll()
        waiting.register(control, select.POLLIN)
        waiting.register(self._descriptor, select.POLLIN)
        ready = waiting.poll(max(self._deadline - time.monotonic(), 0) * 1000)
        return any(descriptor == control.fileno() for descriptor, _ in ready)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._descriptor)


def _policy() -> sandbox.Policy:
    return sandbox.Policy(
        read=(*sandbox.python_paths(), str(Path(__file__).parents[1])),
        write=("/dev/null",),
        memory_bytes=0,
        cpu_seconds=0,
        open_files=_OPEN_FILES,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
