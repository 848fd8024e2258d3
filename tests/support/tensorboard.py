"""Reads event files of TensorBoard, by its own rules for runs that were resumed."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event, SessionLog


def shown_by_tensorboard(folder: Path, tag: str) -> dict[int, tuple[float, float]]:
    """Return value and wall-clock time of a scalar by step; a step must not be there twice."""
    shown: dict[int, tuple[float, float]] = {}
    for event in _events(folder):
        if event.session_log.status == SessionLog.START:  # drops this step and all after it
            shown = {step: value for step, value in shown.items() if step < event.step}
        for value in event.summary.value:
            if value.tag == tag:
                assert event.step not in shown
                shown[event.step] = value.simple_value, event.wall_time
    return shown


def _events(folder: Path) -> Iterator[Event]:
    """Yield the events of all files, the oldest file first."""
    for path in sorted(folder.glob("events.*"), key=lambda path: path.stat().st_mtime_ns):
        data, at = path.read_bytes(), 0
        while at < len(data):  # each record: size, checksum of the size, data, checksum of the data
            (size,) = struct.unpack_from("<Q", data, at)
            yield Event.FromString(data[at + 12 : at + 12 + size])
            at += 12 + size + 4
