"""Runs the asserts of one test against a runner, in a process of its own that can be killed at the deadline.

The expression of a test may never end, also inside C code, where no signal handler runs: a huge power, a regular
expression on a long text that the code returned.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Final

from fourfold_reward.code import remote, wire

# Modules that a test may use without an import, besides the names that the code defines.
_MODULES: Final = ("collections", "functools", "itertools", "json", "math", "operator", "re", "string")


def run(runner: int, verdict: int, seconds: float, start_seconds: float, enter_sandbox: Callable[[], None]) -> None:
    """Receive a test and the code, run the code in the runner, and send the verdict.

    Args:
        runner: descriptor of the socket to the runner.
        verdict: descriptor of the socket to the scoring process.
        seconds: time of the test, which begins when both processes are in their sandboxes.
        start_seconds: longest time until then; after it, the process exits without a verdict.
        enter_sandbox: gives up all rights.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):  # the output of a test could fill the disk through the service's log
        os.dup2(null, descriptor)
    connection, scorer = socket.socket(fileno=runner), socket.socket(fileno=verdict)
    latest = time.monotonic() + start_seconds
    test, code = wire.receive(scorer, deadline=latest)["test"], wire.receive(scorer, deadline=latest)
    modules = {name: __import__(name) for name in _MODULES}
    # Without `optimize`, `python -O` would remove the asserts.
    check = compile(test, "<test>", "exec", optimize=0)
    enter_sandbox()
    wire.send(connection, code, deadline=latest)
    wire.wait_until_ready(connection, deadline=latest)
    wire.report_ready(scorer.fileno())
    deadline = time.monotonic() + seconds
    try:
        names = remote.Connection(connection, deadline).names()
        exec(check, {**names, **modules, "__name__": "test"})
        passed = time.monotonic() < deadline
    except (Exception, SystemExit):
        # The code or the test raised, or the code sent nonsense, too much, or nothing until the deadline.
        passed = False
    wire.send(scorer, {"passed": passed}, deadline=deadline)
