"""The reward service of examples/typescript as a process."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.example_builds import Command

NAME = "short-is-better@1"
SECONDS = 30.0


class RewardProcess:
    """A running service."""

    def __init__(self, process: subprocess.Popen[str], target: str) -> None:
        self._process, self.target = process, target

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal; return the exit code."""
        self.send(number)
        return self.wait()[0]

    def wait(self) -> tuple[int, str]:
        """Wait for the end; return exit code and stderr."""
        _, errors = self._process.communicate(timeout=SECONDS)
        return self._process.returncode, errors


@contextmanager
def serving(example: tuple[Path, Command], *words: str, program: str = "reward/main") -> Iterator[RewardProcess]:
    """Start a service, `words` being its arguments; kill it at the end of the block."""
    folder, command = example
    with subprocess.Popen(
        [*command(program), *words],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "NODE_OPTIONS": ""},
        text=True,
    ) as process:
        watchdog = threading.Timer(SECONDS, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None and process.stderr is not None
            ready = process.stdout.readline().split()
            watchdog.cancel()
            assert ready[:1] == ["READY"], f"the service did not start: {ready} {process.stderr.read()}"
            yield RewardProcess(process, ready[1])
        finally:
            watchdog.cancel()
            process.kill()
