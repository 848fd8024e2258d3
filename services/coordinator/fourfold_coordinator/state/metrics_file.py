"""Writes metrics.jsonl from a thread of its own."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import numbers
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from fourfold.host.disk import append_lines

log = logging.getLogger("fourfold.coordinator")

_QUEUE_RECORDS: Final = 1024
_STOP: Final = None
_RETRY_SECONDS: Final = 1.0


class MetricsWriter:
    """Appends records to a JSONL file from a thread of its own; `write` never waits and never raises.

    writer: queue -> file. A record that cannot be written is tried again until it can, and the reason is logged once.
    When the disk stands still the queue fills up; further records are dropped and counted.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._queue: queue.Queue[bytes | None] = queue.Queue(_QUEUE_RECORDS)
        self.dropped_count = 0
        """Records that never reached the file."""
        self._closed = threading.Event()
        self._told = False  # that the file cannot be written
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def write(self, record: Mapping[str, object]) -> None:
        """Append one record; NaN and infinities become null, because JSON has none."""
        try:
            self._queue.put_nowait(json.dumps(_finite(record), default=str).encode() + b"\n")
        except queue.Full:
            self.dropped_count += 1
        except (TypeError, ValueError, RecursionError) as error:
            self.dropped_count += 1
            log.warning("a metrics record cannot be written: %s", error)

    def close(self, *, timeout: float = 5.0) -> bool:
        """Write what is left, for at most `timeout` seconds; return whether the file has every record. Idempotent."""
        self._closed.set()
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._queue.put(_STOP, timeout=timeout)
                self._thread.join(timeout)
        return not self._thread.is_alive() and not self.dropped_count

    def _run(self) -> None:
        while (line := self._queue.get()) is not _STOP:
            self._append(line)

    def _append(self, line: bytes) -> None:
        """Append one line. After `close`, a disk that still refuses gets one more try for each line."""
        while True:
            closed = self._closed.is_set()
            try:
                # Opened each time: the file may be rotated or, in a resumed run, cut back by another writer.
                append_lines(self._path, line)
                self._told = False
                return
            except OSError as error:
                if not self._told:
                    self._told = True
                    log.warning("%s: metrics wait until it can be written (%s)", self._path, error.strerror)
            if closed:
                self.dropped_count += 1
                return
            self._closed.wait(_RETRY_SECONDS)


def _finite(value: object) -> object:
    match value:
        case bool() | int() | str() | None:
            return value
        case numbers.Integral():  # numpy's
            return int(value)
        case numbers.Real():
            return float(value) if math.isfinite(value) else None
        case Mapping():
            return {str(key): _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case _:
            return value
