"""Client of `RunFileService`: what a run has recorded, for viewers on other machines."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import cached_property
from typing import BinaryIO, Final

from fourfold.coordinator.v1 import run_file_service_pb2 as pb
from fourfold.coordinator.v1 import run_file_service_pb2_grpc as pb_grpc
from fourfold.rpc.client import AsyncClient, SyncClient, blocking_stream

TAIL_BYTES: Final = 1 << 16
"""Bytes before `ReadFileRequest.offset` whose SHA-256 the request has, unless the reader has fewer."""


def tail_sha256(file: BinaryIO, offset: int) -> bytes:
    """Return `ReadFileRequest.tail_sha256` for a reader that has the first `offset` bytes of a file."""
    begin = max(offset - TAIL_BYTES, 0)
    file.seek(begin)
    return hashlib.sha256(file.read(offset - begin)).digest() if offset else b""


class AsyncRunFileClient(AsyncClient):
    """Reads the files of a run from its coordinator, with asyncio. All methods raise FourfoldError."""

    _role = "coordinator"
    _caller_role = "viewer"

    @cached_property
    def _stub(self) -> pb_grpc.RunFileServiceAsyncStub:
        return pb_grpc.RunFileServiceStub(self._open())

    async def read_file(
        self, file: pb.RunFile.ValueType, *, offset: int = 0, tail: bytes = b"", timeout: float | None = None
    ) -> AsyncGenerator[tuple[int, bytes], None]:
        """Yield parts of a file with their offsets, from `offset` to its present end.

        The first part begins at 0 instead if the bytes before `offset` do not have the `tail_sha256` that is given as
        `tail`: then the file was replaced, or is missing. `timeout` is in seconds; the default is the client's.
        """
        request = pb.ReadFileRequest(file=file, offset=offset, tail_sha256=tail)
        expected = {0, offset}
        async with aclosing(self._stream(self._stub.ReadFile, request, self._seconds(timeout))) as responses:
            async for response in responses:
                rule = f"offset is {response.offset}; the next byte is at {' or '.join(map(str, sorted(expected)))}"
                self._check(response).require(response.offset in expected, rule)
                yield response.offset, response.data
                expected = {response.offset + len(response.data)}


class RunFileClient(SyncClient[AsyncRunFileClient]):
    """Reads the files of a run from its coordinator; each method blocks."""

    _async_type = AsyncRunFileClient
    read_file = blocking_stream(AsyncRunFileClient.read_file)
