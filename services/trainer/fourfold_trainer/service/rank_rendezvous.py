"""Gathers the ranks that other machines hold, before rank 0's process loads its models.

engine thread    gather() --waits------------------------------------> all ranks attached --> OtherMachines
event loop           '-> OfferRendezvous, renewed     AttachRanks (RankServicer) -----^

With trainer.min_ranks a trainer begins again by itself, with the ranks that are there, when a machine was lost, and
after a checkpoint when more ranks could train. The program then replaces itself (exec): a collective that never returns
and the state of NCCL, gloo and DeepSpeed end with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import grpc

from fourfold.coordinator.client import RendezvousClient
from fourfold.errors import ConfigError, DeadlinePassed, FourfoldError, InvalidInput, Unavailable
from fourfold.model import folder
from fourfold.rpc.channel import open_channel, split_target
from fourfold.security.access import COORDINATOR
from fourfold.service.lifecycle import ServeOptions, ServiceHost
from fourfold.text import MAX_ERROR, clean
from fourfold.trainer.v1 import rank_service_pb2 as pb
from fourfold.trainer.v1 import rank_service_pb2_grpc as pb_grpc
from fourfold_trainer.ranks.placement import INTERFACE_VARIABLE, collective_interface
from fourfold_trainer.ranks.rank_processes import OtherMachines
from fourfold_trainer.ranks.remote_ranks import AttachedRanks, RemoteRanks
from fourfold_trainer.zero.rendezvous_store import TcpRendezvous

_log = logging.getLogger("fourfold.trainer")

PART_BYTES: Final = 1 << 20
MAX_PART_BYTES: Final = 4 << 20
_HELLO_SECONDS: Final = 30.0
_PARTS_AHEAD: Final = 4  # of each rank
_CALL_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = 1.0
# A collective breaks a moment before the stream of the machine that is lost.
_LOSS_SECONDS: Final = 5.0
# In the environment of a program that replaced itself: how often it did so after a failure, without a checkpoint since.
_FAILURES_VARIABLE: Final = "FOURFOLD_TRAINER_FAILURES"

T = TypeVar("T")
# A stream may end in either way when a process is killed.
_GONE: Final = "its process has ended, or its connection broke"
Context = grpc.aio.ServicerContext[Any, Any]


class RankServicer(pb_grpc.RankServiceServicer):
    """Attaches ranks as long as their calls last: carries the streams of ranks elsewhere between gRPC and the engine.

    request stream  --data of rank 8--> its socket --> engine thread (RankChannel)
    response stream <--data of rank 8-- its socket <--
    """

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


class RankRendezvous:
    """The rendezvous of the ranks of one trainer. Make it before the server of `host` starts."""

    def __init__(self, options: ServeOptions, host: ServiceHost) -> None:
        """Serve RankService. `options.ranks`: the ranks of this machine, from 0."""
        assert options.ranks is not None
        self._options, self._host, self._held = options, host, options.ranks
        self.servicer = RankServicer()
        self._remote: RemoteRanks | None = None
        self._growing = False
        self._failures = int(os.environ.get(_FAILURES_VARIABLE, "0"))
        self._store: TcpRendezvous | None = None  # its server lives as long as the process
        host.server.add(
            pb.DESCRIPTOR.services_by_name["RankService"], pb_grpc.add_RankServiceServicer_to_server, self.servicer
        )

    def gather(self, model_folder: Path, loop: asyncio.AbstractEventLoop) -> OtherMachines | None:
        """Wait for the ranks of the other machines; called in the engine thread while `loop` serves.

        Returns None if this machine's ranks train alone (trainer.min_ranks).

        Raises:
            ConfigError: this machine's address has no network interface.
            DeadlinePassed: too few ranks are there after trainer.attach_seconds.
        """
        trainer, address = self._options.config.trainer, split_target(self._host.target)[0]
        os.environ[INTERFACE_VARIABLE] = collective_interface(address, self._options.interface)
        remote = RemoteRanks(
            self._held.stop,
            trainer.ranks,
            least=trainer.min_ranks,
            unit=trainer.rank_unit,
            version=version("fourfold"),
            model_sha256=folder.fingerprint(model_folder),
            on_death=self._host.fatal,
        )
        self.servicer.remote = self._remote = remote
        with ExitStack() as stack:
            offering = asyncio.run_coroutine_threadsafe(self._offer(remote.secret), loop)
            stack.callback(offering.cancel)
            attached = remote.wait(timeout=trainer.attach_seconds)
            count = self._held.stop + sum(len(machine.ranks) for machine in attached)
            if count < trainer.ranks:
                _log.warning("training with %d of %d ranks: %s", count, trainer.ranks, remote.title)
                stack.pop_all()  # the others find this process, and wait
        if not attached:
            return None
        self._store = TcpRendezvous(address, remote.secret.hex(), count, timeout=trainer.step_timeout_seconds)
        return OtherMachines(remote=remote, held=self._held.stop, attached=attached, store_address=self._store.address)

    def fail(self, message: str) -> None:
        """End the service after a failure of the engine, in its thread. Name a lost machine if it is the cause."""
        if self._remote is not None and self._remote.wait_for_death(timeout=_LOSS_SECONDS):
            _log.error("%s", message)
            message = self._remote.death
        self._host.fatal(message)

    def on_checkpoint(self) -> None:
        """Begin again when more ranks could train; nothing is lost, because a checkpoint was just written."""
        self._failures = 0
        if self._remote is not None and self._remote.can_grow and not self._growing:
            _log.warning("more ranks wait: the trainer begins again with them")
            self._growing = True
            self._remote.end("the trainer begins again with more ranks")
            self._host.stop()

    def begins_again(self) -> bool:
        """Return whether the program must replace itself instead of ending: call it when the service has ended.

        A trainer that fails without a checkpoint in between ends after retry.restarts tries.
        """
        config, remote = self._options.config, self._remote
        if not config.trainer.min_ranks or remote is None or self._host.signalled:
            return False
        self._failures += not self._growing
        return bool(remote.death) and self._failures <= config.retry.restarts

    def replace_program(self, environment: Mapping[str, str]) -> NoReturn:
        """Start this program again in its own process, with `environment`, the environment of its start."""
        for path in list(Path("/proc/self/fd").iterdir()):
            with suppress(OSError):  # that of the list is closed already
                os.set_inheritable(int(path.name), int(path.name) <= 2)
        words = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, words, {**environment, _FAILURES_VARIABLE: str(self._failures)})

    async def _offer(self, secret: bytes) -> None:
        """Offer this machine's address at the coordinator, until cancelled."""
        channel = open_channel(self._options.coordinator, self._host.security, server=COORDINATOR)
        client = RendezvousClient(channel, peer=f"coordinator at {self._options.coordinator}")
        wait = 0.0
        try:
            while True:
                await asyncio.sleep(wait)
                try:
                    ttl = await client.offer(
                        member_id=self._options.member_id,
                        target=self._host.target,
                        secret=secret,
                        timeout=_CALL_SECONDS,
                    )
                    wait = ttl / 3
                except FourfoldError as error:
                    _log.warning("the ranks on other machines cannot find this one: %s", error)
                    wait = _RETRY_SECONDS
        finally:
            await channel.close()


def check_ranks(options: ServeOptions) -> None:
    """Refuse ranks that cannot meet, before models are loaded."""
    config, ranks = options.config, options.ranks
    assert ranks is not None
    text = "--rank " + (f"{ranks.start}-{ranks.stop - 1}" if len(ranks) > 1 else str(ranks.start))
    if ranks.stop > config.trainer.ranks:
        raise ConfigError(
            f"{text}: the recipe has trainer.ranks = {config.trainer.ranks}; raise it, or pass lower ranks"
        )
    if not options.coordinator:
        raise ConfigError(
            f"{text}: the machines of a trainer find each other through the coordinator; add --coordinator"
        )
    if config.trainer.attach_seconds >= config.trainer.step_timeout_seconds:
        raise ConfigError(
            f"{text}: trainer.attach_seconds = {config.trainer.attach_seconds:g} must be below "
            f"trainer.step_timeout_seconds = {config.trainer.step_timeout_seconds:g}, which limits the whole start"
        )
    if config.critic_apart:
        raise ConfigError(
            f"{text}: a critic with ranks of its own (critic.ranks = {config.critic.ranks}) is on one machine with the "
            f"policy; set critic.ranks = 0, or leave --rank out"
        )
