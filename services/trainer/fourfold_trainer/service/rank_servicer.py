"""Implements RankService: carries the byte streams of the ranks on other machines between gRPC and the engine.

request stream  --data of rank 8--> its socket --> engine thread (RankChannel)
response stream <--data of rank 8-- its socket <--
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

import grpc

from fourfold.errors import DeadlinePassed, InvalidInput, Unavailable
from fourfold.text import MAX_ERROR, clean
from fourfold.trainer.v1 import rank_service_pb2 as pb
from fourfold.trainer.v1 import rank_service_pb2_grpc as pb_grpc
from fourfold_trainer.ranks.remote_ranks import AttachedRanks, RemoteRanks

_log = logging.getLogger("fourfold.trainer")

PART_BYTES: Final = 1 << 20
MAX_PART_BYTES: Final = 4 << 20
_HELLO_SECONDS: Final = 30.0
_PARTS_AHEAD: Final = 4  # of each rank

T = TypeVar("T")
# A stream may end in either way when a process is killed.
_GONE: Final = "its process has ended, or its connection broke"
Context = grpc.aio.ServicerContext[Any, Any]


class RankServicer(pb_grpc.RankServiceServicer):
    """Attaches ranks as long as their calls last."""

    def __init__(self) -> None:
        self.remote: RemoteRanks | None = None
        """The ranks that are expected; None: not yet known."""
        self.on_notice: Callable[[], Awaitable[None]] = _nothing
        """Called when a machine is about to leave; saves a checkpoint."""

    async def AttachRanks(
        self, requests: AsyncIterator[pb.AttachRanksRequest], context: Context
    ) -> AsyncIterator[pb.AttachRanksResponse]:
        """Carry the streams of one machine's ranks until either end leaves."""
        hello, remote = await _hello(requests), self.remote
        if remote is None:
            raise Unavailable("rank 0 prepares the model; try again in a second", retry_after=1.0)
        attached = remote.attach(hello)
        _log.info("ranks attached: %s", attached.title)
        parts: asyncio.Queue[pb.AttachRanksResponse | None] = asyncio.Queue(_PARTS_AHEAD * len(attached.ranks))
        to_engine = asyncio.create_task(_then_end(_write_streams(requests, attached, lambda: self._save(parts)), parts))
        from_engine = asyncio.create_task(_then_end(_read_streams(attached, parts), parts))
        loop = asyncio.get_running_loop()
        leaving = pb.AttachRanksResponse(leaving=True)
        remote.on_close.append(lambda: loop.call_soon_threadsafe(_put_if_room, parts, leaving))
        reason = _GONE
        try:
            yield pb.AttachRanksResponse(hello=pb.RankZeroHello(host=socket.gethostname()))
            while (part := await parts.get()) is not None:
                yield part
            reason = to_engine.result() if to_engine.done() else "rank 0 has left"
        except InvalidInput as error:
            reason = f"the machine broke the protocol: {error.message}"
            raise
        finally:
            to_engine.cancel()
            from_engine.cancel()
            try:
                await asyncio.gather(to_engine, from_engine, return_exceptions=True)
            finally:
                remote.detach(attached, reason)
            _log.info("ranks left: %s: %s", attached.title, reason)

    async def _save(self, parts: asyncio.Queue[pb.AttachRanksResponse | None]) -> None:
        await self.on_notice()
        with suppress(TimeoutError):  # the call has ended, so the parts have no reader
            async with asyncio.timeout(_HELLO_SECONDS):
                await parts.put(pb.AttachRanksResponse(saved=True))


async def _nothing() -> None:
    pass


def _put_if_room(parts: asyncio.Queue[pb.AttachRanksResponse | None], part: pb.AttachRanksResponse) -> None:
    with suppress(asyncio.QueueFull):
        parts.put_nowait(part)


async def _hello(requests: AsyncIterator[pb.AttachRanksRequest]) -> pb.RanksHello:
    try:
        async with asyncio.timeout(_HELLO_SECONDS):
            first = await anext(aiter(requests), None)
    except TimeoutError:
        raise DeadlinePassed(f"no hello came within {_HELLO_SECONDS:g} s; send it at once") from None
    if first is None or first.WhichOneof("message") != "hello":
        raise InvalidInput("the first message must be a hello")
    return first.hello


async def _write_streams(
    requests: AsyncIterator[pb.AttachRanksRequest], attached: AttachedRanks, on_notice: Callable[[], Awaitable[None]]
) -> str:
    """Give the machine's bytes to the engine; return why the stream ended, for users."""
    loop, saving = asyncio.get_running_loop(), None
    async for request in requests:
        kind = request.WhichOneof("message")
        if kind == "failure":
            return clean(request.failure, MAX_ERROR)
        if kind == "notice":
            if saving is None:
                _log.warning("%s: the machine is about to leave", attached.title)
                saving = asyncio.ensure_future(on_notice())
            continue
        if kind != "bytes" or request.bytes.rank not in attached.streams:
            raise InvalidInput(f"a message has {kind or 'nothing'}; after the hello come bytes of attached ranks")
        if not 1 <= len(request.bytes.data) <= MAX_PART_BYTES:
            raise InvalidInput(f"a part has {len(request.bytes.data)} bytes; it may have 1 to {MAX_PART_BYTES}")
        try:
            await loop.sock_sendall(attached.streams[request.bytes.rank], request.bytes.data)
        except OSError:  # the engine has closed its end
            return "rank 0 has ended"
    return _GONE


async def _read_streams(attached: AttachedRanks, parts: asyncio.Queue[pb.AttachRanksResponse | None]) -> None:
    """Queue the engine's bytes until it has closed all of its ends."""
    await asyncio.gather(*(_read_stream(rank, stream, parts) for rank, stream in attached.streams.items()))


async def _read_stream(rank: int, stream: socket.socket, parts: asyncio.Queue[pb.AttachRanksResponse | None]) -> None:
    loop = asyncio.get_running_loop()
    with suppress(OSError):
        while data := await loop.sock_recv(stream, PART_BYTES):
            await parts.put(pb.AttachRanksResponse(bytes=pb.RankBytes(rank=rank, data=data)))


async def _then_end(work: Awaitable[T], parts: asyncio.Queue[pb.AttachRanksResponse | None]) -> T:
    """Await `work`, then end the response stream. After a cancellation the queue has no reader."""
    try:
        result = await work
    except Exception:
        await parts.put(None)
        raise
    await parts.put(None)
    return result
