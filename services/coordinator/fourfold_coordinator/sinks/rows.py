"""Reads the steps of metrics.jsonl that a sink does not have yet.

sinks/NAME.sent has the checksum of each line that was sent. A resumed run repeats the steps after its checkpoint, and
an evaluation may add values to the last step: the first line that differs is new, and so are all lines after it.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from fourfold import metrics as m
from fourfold.host.disk import append_lines

from ..state.ledger import read_evals

_SENT_LINE: Final = re.compile(r"^(\d+) ([0-9a-f]{8})$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class MetricRow:
    """The numbers of one step."""

    step: int  # 0: the evaluation before training
    time: float  # when the step ended, in seconds since 1970; 0: not known
    values: dict[str, float]  # finite; in the units of fourfold/metrics.py


class NewRows:
    """The lines of metrics.jsonl that a sink does not have."""

    def __init__(self, metrics: Path, ledger: Path, sent: Path) -> None:
        """`sent` is the file with the checksums of what the sink has; it need not exist."""
        self._metrics, self._ledger, self._sent_path = metrics, ledger, sent
        self._seen: tuple[int, int, int] | None = None  # inode, size and time of change of metrics.jsonl
        self._sent = _read_sent(sent)
        self.last_step = max(self._sent, default=-1)
        """Last step that the sink has; -1: none."""

    def __iter__(self) -> Iterator[MetricRow]:
        """Yield the rows that are new now, in the order of their steps.

        A row counts as sent when the next one is asked for, or the iteration ends.
        """
        try:
            stat = self._metrics.stat()
        except FileNotFoundError:
            return
        if self._seen == (seen := (stat.st_ino, stat.st_size, stat.st_mtime_ns)):
            return
        if 0 not in self._sent and (baseline := self._baseline()) is not None:
            yield baseline
            self._mark(0, 0)
        with self._metrics.open("rb") as lines:
            changed = False
            for line in lines:
                row, checksum = _parse(line), zlib.crc32(line)
                if row is None:
                    continue
                changed = changed or self._sent.get(row.step) != checksum
                if changed:
                    yield row
                    self._mark(row.step, checksum)
        self._seen = seen

    def _mark(self, step: int, checksum: int) -> None:
        append_lines(self._sent_path, b"%d %08x\n" % (step, checksum))
        self._sent[step] = checksum
        self.last_step = step

    def _baseline(self) -> MetricRow | None:
        """Return the evaluation before training, which is no step."""
        try:
            row = next((row for row in read_evals(self._ledger) if row.step == 0), None)
        except sqlite3.Error:  # busy, or of another release: the steps are more important
            return None
        if row is None:
            return None
        values = {m.EVAL_SCORE: row.score} | row.set_metrics()
        return MetricRow(0, 0.0, values if row.half_width is None else values | {m.EVAL_HALF_WIDTH: row.half_width})


def _read_sent(path: Path) -> dict[int, int]:
    if not path.is_file():
        return {}
    lines = _SENT_LINE.findall(path.read_text(encoding="ascii", errors="replace"))
    return {int(step): int(checksum, 16) for step, checksum in lines}


def _parse(line: bytes) -> MetricRow | None:
    """Return the numbers of a line; None for one that is not written in full yet, or has no step."""
    try:
        row: dict[str, Any] = json.loads(line)
        step = row.pop("step")
    except (ValueError, KeyError, TypeError):
        return None
    if not line.endswith(b"\n") or type(step) is not int:
        return None
    values = {key: float(value) for key, value in row.items() if type(value) in (int, float) and math.isfinite(value)}
    return MetricRow(step, _seconds(row.get("end_time")), values)


def _seconds(text: object) -> float:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return 0.0
