"""Starts and calls the trainer ranks of the weight benchmark, which are processes with a `WeightSender` each.

Calls are lines of JSON over a socket pair that the child inherits, with bytes in hexadecimal. `abort` overtakes others.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from fourfold.errors import Unavailable
from fourfold.weights.manifest import Manifest
from fourfold.weights.sender import SendResult
from fourfold.weights.worker_control import error_reply, unwrap
from fourfold_bench.gpus import visible
from fourfold_bench.weights.benchmark import WeightSettings

_START_SECONDS: Final = 300.0
_STOP_SECONDS: Final = 5.0
_GONE: Final = "a trainer process of the benchmark ended; its output is above"


class TrainerRank:
    """One rank. Implements `local.PublishSender`."""

    def __init__(self, settings: WeightSettings, folder: Path, rank: int, rendezvous: Path) -> None:
        """Start the process; `wait` returns when it has its weights."""
        ours, theirs = socket.socketpair()
        words = {
            "folder": str(folder),
            "rank": rank,
            "rank_count": len(settings.trainer_devices),
            "zero3": settings.zero3,
            "device": "cuda:0" if settings.on_gpus else "cpu",
            "rendezvous": str(rendezvous),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fourfold_bench.weights.rank_process", str(theirs.fileno()), json.dumps(words)],
            env={**os.environ, **visible(settings.trainer_devices[rank])},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._socket = ours
        self._numbers = itertools.count()
        self._answers: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None
        self._manifest: Manifest | None = None

    def wait(self) -> None:
        """Return when the weights are there. Starts a thread, so call it after the engine has forked."""
        self._reader = threading.Thread(target=self._read, name="rank-answers", daemon=True)
        self._reader.start()
        self._manifest = Manifest.from_bytes(bytes.fromhex(self.call("manifest", timeout=_START_SECONDS)))

    def manifest(self) -> Manifest:
        """Return the manifest of the weights; call `wait` before."""
        assert self._manifest is not None, "wait first"
        return self._manifest

    def make_offer(self, epoch: int, backend: str, receiver_count: int, *, timeout: float) -> bytes:
        return bytes.fromhex(self.call("make_offer", epoch, backend, receiver_count, timeout, timeout=2 * timeout))

    def open(self, epoch: int, *, timeout: float) -> None:
        self.call("open", epoch, timeout, timeout=2 * timeout)

    def send(self, epoch: int, policy_version: int, *, skip_sums: bool, timeout: float) -> SendResult:
        sums, sent_bytes = self.call("send", epoch, policy_version, skip_sums, timeout, timeout=2 * timeout)
        return SendResult(partial_sums=bytes.fromhex(sums), sent_bytes=sent_bytes)

    def abort(self, epoch: int) -> None:
        self.call("abort", epoch, timeout=30)

    def call(self, method: str, *args: Any, timeout: float) -> Any:
        """Call a method of the process and return its answer.

        Raises:
            FourfoldError: the error of the method; `Unavailable` if the process has ended.
        """
        return self.begin(method, *args)(timeout)

    def begin(self, method: str, *args: Any) -> Callable[[float], Any]:
        """Send a call; return a function that waits for the answer, with a timeout in seconds."""
        with self._lock:
            if self._process.poll() is not None:
                raise Unavailable(_GONE)
            number = next(self._numbers)
            answer = self._answers[number] = Future()
            self._socket.sendall(json.dumps([number, method, args]).encode() + b"\n")
        return lambda timeout: unwrap([answer.result(timeout)])[0]

    def stop(self) -> None:
        """Close the socket, which ends the process."""
        with suppress(OSError):  # the process has closed its side
            self._socket.shutdown(socket.SHUT_RDWR)  # `close` alone does not wake the reader
        self._socket.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_STOP_SECONDS)

    def _read(self) -> None:
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    number, answer = json.loads(line)
                    with self._lock:
                        future = self._answers.pop(number)
                    future.set_result(answer)
        except (OSError, ValueError):
            pass
        with self._lock:
            for future in self._answers.values():
                future.set_result(error_reply(Unavailable(_GONE)))
