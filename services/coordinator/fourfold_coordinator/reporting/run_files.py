"""`RunFileService`: sends the files of a run to `fourfold view` on another machine.

Files are read in threads, and all calls together send at most `_BYTES_PER_SECOND`, so that viewers of a large run slow
no step.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import grpc

from fourfold.coordinator.client import TAIL_BYTES, tail_sha256
from fourfold.coordinator.v1 import run_file_service_pb2 as pb
from fourfold.coordinator.v1 import run_file_service_pb2_grpc as pb_grpc
from fourfold.errors import InvalidInput

from ..launch.copied_files import FILES
from ..launch.run_names import LEDGER_FILE
from ..state.ledger import read_evals

Context = grpc.aio.ServicerContext[Any, Any]

_CHUNK_BYTES: Final = 1 << 18
# 100 MB take about 1 s of CPU of the coordinator's process, so that all readers together use a sixth of a core.
_BYTES_PER_SECOND: Final = 16 << 20


class RunFileServicer(pb_grpc.RunFileServiceServicer):
    """Serves the files of the run in a folder."""

    def __init__(self, folder: Path, tokenizer_file: Path) -> None:
        self._folder, self._tokenizer_file = folder, tokenizer_file
        self._one_chunk = asyncio.Lock()

    async def ReadFile(self, request: pb.ReadFileRequest, context: Context) -> AsyncIterator[pb.ReadFileResponse]:
        """Yield the file in chunks, up to the size that it has at the call."""
        if request.offset < 0 or bool(request.offset) != bool(request.tail_sha256):
            raise InvalidInput(
                f"offset = {request.offset} with {len(request.tail_sha256)} bytes of tail_sha256: the offset must be "
                f"at least 0, and above 0 it needs the SHA-256 of the last {TAIL_BYTES} bytes before it"
            )
        opening = asyncio.get_running_loop().run_in_executor(None, self._open, request)
        try:
            file, offset, end = await asyncio.shield(opening)
        except asyncio.CancelledError:  # the viewer is gone; let the thread finish
            opening.add_done_callback(_close)
            raise
        with file:
            while True:
                async with self._one_chunk:
                    data = await asyncio.to_thread(file.read, min(_CHUNK_BYTES, end - offset))
                    await asyncio.sleep(len(data) / _BYTES_PER_SECOND)
                yield pb.ReadFileResponse(offset=offset, data=data)
                offset += len(data)
                if not data or offset >= end:
                    return

    def _open(self, request: pb.ReadFileRequest) -> tuple[BinaryIO, int, int]:
        """Return the file, positioned where sending begins; that position; and the size of the file."""
        file = self._content(request.file)
        size = file.seek(0, io.SEEK_END)
        begin = request.offset
        if begin > size or tail_sha256(file, begin) != request.tail_sha256:
            begin = 0  # replaced
        file.seek(begin)
        return file, begin, size

    def _content(self, kind: pb.RunFile.ValueType) -> BinaryIO:
        if kind == pb.RUN_FILE_EVALUATIONS:
            return io.BytesIO(_evaluations(self._folder / LEDGER_FILE))
        if kind == pb.RUN_FILE_TOKENIZER:
            path = self._tokenizer_file
        elif kind in FILES:
            path = self._folder / FILES[kind]
        else:
            raise InvalidInput(
                f"file = {kind}: this release has no such file; the known ones are 1 to {max(pb.RunFile.values())}"
            )
        try:
            return path.open("rb")
        except FileNotFoundError:
            return io.BytesIO()


def _close(opening: asyncio.Future[tuple[BinaryIO, int, int]]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result()[0].close()


def _evaluations(ledger: Path) -> bytes:
    """Return the evaluations as JSON lines; none before the run has a ledger."""
    try:
        rows = read_evals(ledger)
    except sqlite3.Error:
        return b""
    return b"".join(json.dumps(dataclasses.asdict(row)).encode() + b"\n" for row in rows)
