"""Append-only segment files of records, each with its length and its checksum.

    runs/NAME/experiences/00000007.segment  =  magic, record, record, ...
    record                                  =  length and CRC-32 of the body (little-endian u32), body

A record is never changed. An append is one write and one sync. If a kill or a power loss tears the last append, the
next start cuts it off. A new process never appends to a segment of an earlier one.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from fourfold.errors import Internal
from fourfold.rpc.codec import Buffer

log = logging.getLogger("fourfold.coordinator")

SEGMENT_BYTES: Final = 64 << 20
"""A segment that has reached this size gets no further append."""
_MAGIC: Final = b"FFX1"
_HEADER: Final = struct.Struct("<II")
_SUFFIX: Final = ".segment"
_MAX_PARTS: Final = 1024  # most buffers of one writev: IOV_MAX of Linux


class BadRecord(Internal):
    """A record is missing, or its bytes are not those that were written."""


class SegmentFiles:
    """The segment files in one folder. Thread-safe; every method blocks on the disk."""

    def __init__(self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Open or create the folder, and cut off the torn end that a kill left."""
        self._folder, self._segment_bytes = folder, segment_bytes
        self._lock = threading.Lock()
        folder.mkdir(exist_ok=True)
        self._number = max(self._numbers(), default=0)
        self._descriptor = -1  # of the segment that is appended to; -1 until the first append
        self._end = 0  # its size
        if self._number:
            self._cut_torn_tail(self._number)

    def close(self) -> None:
        """Close the open segment; a later append begins a new one."""
        with self._lock:
            self._close()

    def append(self, bodies: Sequence[Sequence[Buffer]]) -> list[tuple[int, int]]:
        """Append records, and return the segment and the offset of each; all are on the disk, or none if it raises.

        Each body is given in parts, which are written as they are: a copy of a batch would take as much memory again.
        """
        parts: list[Buffer] = []
        with self._lock:
            if self._end >= self._segment_bytes:
                self._close()
            if self._descriptor < 0:
                self._open_next()
            if not self._end:
                parts.append(_MAGIC)
            offset, places = self._end or len(_MAGIC), []
            for body in bodies:
                places.append((self._number, offset))
                size, checksum = 0, 0
                for part in body:
                    size, checksum = size + len(part), zlib.crc32(part, checksum)
                parts += (_HEADER.pack(size, checksum), *body)
                offset += _HEADER.size + size
            self._write(parts, offset)
        return places

    def read(self, number: int, offset: int) -> bytes:
        """Return the body of a record; raise BadRecord."""
        path = self._path(number)
        try:
            with path.open("rb") as file:
                file.seek(offset)
                header = file.read(_HEADER.size)
                length, checksum = _HEADER.unpack(header)
                if length > os.fstat(file.fileno()).st_size:
                    raise ValueError(f"length {length}, which is beyond the end of the file")
                body = file.read(length)
            if len(body) != length or zlib.crc32(body) != checksum:
                raise ValueError(f"{len(body)} of {length} bytes, or another checksum")
        except (OSError, ValueError, struct.error) as error:
            raise BadRecord(f"{path}: record at byte {offset}: {error}") from None
        return body

    def keep_only(self, numbers: Iterable[int]) -> None:
        """Delete all segments but these."""
        kept = set(numbers)
        with self._lock:
            if self._number not in kept:
                self._close()
            for number in set(self._numbers()) - kept:
                self._path(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}{_SUFFIX}"

    def _numbers(self) -> list[int]:
        return [int(path.stem) for path in self._folder.glob(f"*{_SUFFIX}") if path.stem.isdecimal()]

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._end = -1, 0

    def _open_next(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self._path(self._number + 1), flags, 0o666)
        self._number, self._end = self._number + 1, 0
        folder = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)  # sync the folder, so that a power loss does not lose the name of the file
        finally:
            os.close(folder)

    def _write(self, parts: Sequence[Buffer], end: int) -> None:
        """Append the parts, which make the file `end` bytes long, and sync."""
        try:
            for start in range(0, len(parts), _MAX_PARTS):
                some = parts[start : start + _MAX_PARTS]
                written = os.writev(self._descriptor, some)
                if written < sum(map(len, some)):  # a signal, or an almost full disk, made the write short
                    rest = memoryview(b"".join(some))[written:]
                    while rest:
                        rest = rest[os.write(self._descriptor, rest) :]
            os.fdatasync(self._descriptor)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
                if not self._end:  # the caller tries again every second
                    self._path(self._number).unlink()
            self._close()  # after a failed sync the file's pages are in an unknown state: continue in a new file
            raise
        self._end = end

    def _cut_torn_tail(self, number: int) -> None:
        path = self._path(number)
        size, end = path.stat().st_size, _end_of_records(path)
        if end < size:
            os.truncate(path, end)
            log.warning("experiences: cut off a torn record: file=%s offset=%d bytes=%d", path, end, size - end)


def _end_of_records(path: Path) -> int:
    """Return the offset after the last whole record of a segment."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if file.read(len(_MAGIC)) != _MAGIC:
            return 0
        end = len(_MAGIC)
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            length, checksum = _HEADER.unpack(header)
            if not length:  # a power loss may leave zeros
                break
            if end + _HEADER.size + length > size or zlib.crc32(file.read(length)) != checksum:
                break
            end += _HEADER.size + length
    return end
