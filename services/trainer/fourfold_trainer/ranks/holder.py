"""Holds ranks of a trainer whose rank 0 is on another machine: the process of `fourfold serve trainer --rank 8-15`.

    FindRendezvous --> AttachRanks --> start the children --> carry their streams --> rank 0 or a child has ended
          ^                                                                                   |
          '-------------------- all children are ended; the next rank 0 is awaited -----------'

It imports no torch, and needs no GPU of its own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from typing import Any, Final

import grpc

from fourfold.coordinator.client import RendezvousClient
from fourfold.errors import FourfoldError, InvalidInput, PermissionDenied, Unauthenticated, Unavailable, WrongState
from fourfold.host import logs
from fourfold.host.process import NOTICE
from fourfold.host.process_tree import PARENT_PID_VARIABLE, die_with_parent
from fourfold.model import folder
from fourfold.rpc.channel import check_target, open_channel, split_target, translate_errors
from fourfold.security.access import COORDINATOR, Security
from fourfold.security.principal import Principal
from fourfold.service.lifecycle import ServeOptions
from fourfold.text import MAX_ERROR, clean
from fourfold.trainer.v1 import rank_service_pb2 as pb
from fourfold.trainer.v1 import rank_service_pb2_grpc as pb_grpc
from fourfold.weights.transport.locality import host_id
from fourfold_trainer.ranks.local_ranks import PROGRAM, LocalRanks
from fourfold_trainer.ranks.placement import ADDRESS_VARIABLE, INTERFACE_VARIABLE, collective_interface

_log = logging.getLogger("fourfold.trainer")

PART_BYTES: Final = 1 << 20
_CALL_SECONDS: Final = 5.0
_HELLO_SECONDS: Final = 30.0
_ASK_SECONDS: Final = 1.0  # between questions for an offer
_DONE_SECONDS: Final = 30.0  # how long a next rank 0 is awaited when the last one has ended in good order
_PARTS_AHEAD: Final = 4  # of each rank


class RankHolder:
    """Ranks of this machine, attached to one rank 0 after the other."""

    def __init__(self, options: ServeOptions) -> None:
        """Check the options and the model.

        Raises:
            ConfigError: an address, a certificate or the model is not usable.
        """
        assert options.ranks is not None
        config = options.config
        self._options, self._ranks = options, options.ranks
        self._run_dir = options.make_folder().absolute()
        self._security = Security.load(config.security, Principal("trainer", options.member_id))
        check_target(options.coordinator, self._security)
        self._model_folder = folder.resolve(config.model.source)
        self._stop = asyncio.Event()
        self._leave = asyncio.Event()  # the machine is about to leave: rank 0 saves a checkpoint first
        self._stops_when_saved = False
        self._announced = False
        self._attached = False
        self._logged_refusal = ""  # a waiting machine repeats its call every second; its refusal is logged once

    async def run(self) -> int:
        """Hold the ranks until the run is over, a signal, or an error that stays; return the exit code."""
        patience = self._options.config.retry.service_wait_seconds
        with self._signals():
            channel = open_channel(self._options.coordinator, self._security, server=COORDINATOR)
            try:
                client = RendezvousClient(channel, peer=f"coordinator at {self._options.coordinator}")
                ended_well = False
                while (offer := await self._find(client, _DONE_SECONDS if ended_well else patience)) is not None:
                    ended_well = await self._attach_once(*offer)
                    if self._stop.is_set():
                        return 0
                if ended_well or self._stop.is_set():
                    return 0
                _print_error(
                    f"no rank 0 of {self._options.member_id} for {patience:g} s (retry.service_wait_seconds); start "
                    "it by `fourfold serve trainer` with --rank 0-N, or raise the key"
                )
                return 1
            finally:
                await channel.close()

    async def _find(self, client: RendezvousClient, patience: float) -> tuple[str, bytes] | None:
        """Return address and secret of rank 0; None when there was none for `patience` seconds, or at a signal."""
        end, said = asyncio.get_running_loop().time() + patience, ""
        while not self._stop.is_set() and asyncio.get_running_loop().time() < end:
            try:
                return await client.find(self._options.member_id, timeout=_CALL_SECONDS)
            except (InvalidInput, PermissionDenied, Unauthenticated):  # it stays so
                raise
            except FourfoldError as error:
                if error.message != said:
                    said = error.message
                    _log.info("no rank 0 yet: %s", said)
            with suppress(TimeoutError):
                async with asyncio.timeout(_ASK_SECONDS):
                    await self._stop.wait()
        return None

    async def _attach_once(self, target: str, secret: bytes) -> bool:
        """Hold the ranks for one rank 0; return whether it ended them in good order."""
        peer = f"rank 0 at {target}"
        channel = open_channel(target, self._security, server=Principal("trainer", self._options.member_id))
        try:
            with translate_errors(peer=peer, name="AttachRanks", timeout=None):
                call: Any = pb_grpc.RankServiceStub(channel).AttachRanks()
                await call.write(pb.AttachRanksRequest(hello=self._hello(secret)))
                async with asyncio.timeout(_HELLO_SECONDS):
                    answer = await call.read()
                if not isinstance(answer, pb.AttachRanksResponse) or answer.WhichOneof("message") != "hello":
                    raise Unavailable(f"{peer} answered no hello")
                self._announce(answer.hello.host)
                self._attached = True
                return await self._carry(call, split_target(target)[0])
        except TimeoutError:
            _log.warning("%s did not answer within %g s", peer, _HELLO_SECONDS)
        except WrongState as error:
            if error.reason not in ("ENDING", "RANK_TAKEN", "LATER"):  # another model or version, unknown ranks
                raise
            if error.message != self._logged_refusal:
                self._logged_refusal = error.message
                _log.warning("%s", error)
        except FourfoldError as error:
            # A killed process reports no cause, and gRPC's own text does not name it.
            lost = f"connection to {peer} lost (was it killed?), waiting for a new one: " if self._attached else ""
            _log.warning("%s%s", lost, error)
        finally:
            self._attached = False
            await channel.close()
        if self._stops_when_saved:
            self._stop.set()
        await asyncio.sleep(_ASK_SECONDS)
        return False

    async def _carry(self, call: Any, rank_zero: str) -> bool:
        """Start the children and carry their streams until one end leaves; end them."""
        loop = asyncio.get_running_loop()
        died: asyncio.Future[str] = loop.create_future()

        def on_death(reason: str) -> None:
            loop.call_soon_threadsafe(_set_first, died, reason)

        ranks = LocalRanks(run_dir=self._run_dir, name=self._options.member_id, on_death=on_death)
        connection: _Streams | None = None
        try:
            sockets = await asyncio.to_thread(self._start_children, ranks, rank_zero)
            connection = _Streams(call, dict(zip(self._ranks, sockets, strict=True)))
            carrying = asyncio.create_task(connection.run())
            stopping = asyncio.create_task(self._stop.wait())
            noticing = asyncio.create_task(self._give_notice(connection))
            waiting: set[asyncio.Future[Any]] = {carrying, stopping, died}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            noticing.cancel()
            if carrying.done():
                error = carrying.exception()
                if error is not None and not connection.leaving:  # the connection broke
                    raise error
            else:
                reason = died.result() if died.done() else "its process was stopped"
                await connection.fail(carrying, reason)
            return connection.leaving or await asyncio.to_thread(ranks.wait_ended)
        finally:
            if connection is not None:
                connection.close()
            await asyncio.to_thread(ranks.close)

    async def _give_notice(self, connection: _Streams) -> None:
        """Report a notice to rank 0, if there is one; stop afterwards if this process must end."""
        await self._leave.wait()
        with suppress(TimeoutError, grpc.RpcError):  # the end of the call is handled apart
            async with asyncio.timeout(self._options.config.trainer.step_timeout_seconds):
                await connection.write(pb.AttachRanksRequest(notice=True))
                await connection.saved.wait()
        if self._stops_when_saved:
            self._stop.set()

    def _start_children(self, ranks: LocalRanks, rank_zero: str) -> list[socket.socket]:
        paths = {
            "model_folder": str(self._model_folder),
            "run_dir": str(self._run_dir),
            "critic_source": self._options.config.critic.source,
            "start_seconds": self._options.config.trainer.attach_seconds + _HELLO_SECONDS,
        }
        address = _own_address(rank_zero)
        interface = collective_interface(address, self._options.interface)
        return ranks.start(
            list(self._ranks),
            timeout=self._options.config.trainer.step_timeout_seconds,
            program=(*PROGRAM, json.dumps(paths)),
            env={INTERFACE_VARIABLE: interface, ADDRESS_VARIABLE: address},
        )

    def _hello(self, secret: bytes) -> pb.RanksHello:
        return pb.RanksHello(
            secret=secret,
            first_rank=self._ranks.start,
            last_rank=self._ranks.stop - 1,
            host=socket.gethostname(),
            host_id=host_id(),
            version=version("fourfold"),
            model_sha256=folder.fingerprint(self._model_folder),
        )

    def _announce(self, host: str) -> None:
        _log.info("attached to rank 0 on %s", clean(host, 100))
        if not self._announced:
            self._announced = True
            with suppress(OSError):
                sys.stdout.write(f"READY {socket.gethostname()}\n")
                sys.stdout.flush()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        loop.add_signal_handler(NOTICE, self._leave.set)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT, NOTICE):
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        """End after a checkpoint of rank 0; immediately without ranks, under a launcher, and at the second signal."""
        if not self._attached or self._stops_when_saved or PARENT_PID_VARIABLE in os.environ:
            self._stop.set()
        self._stops_when_saved = True
        self._leave.set()


class _Streams:
    """The byte streams of the children, in one call of RankService."""

    def __init__(self, call: Any, sockets: Mapping[int, socket.socket]) -> None:
        self._call, self._sockets = call, sockets
        self._writing = asyncio.Lock()  # gRPC takes one message at a time
        self.leaving = False  # rank 0 ends in good order
        self.saved = asyncio.Event()  # rank 0 has saved a checkpoint because of our notice
        for stream in sockets.values():
            stream.setblocking(False)

    async def run(self) -> None:
        """Carry until rank 0 ends the call. Raises the errors of gRPC."""
        readers = [asyncio.create_task(self._read(rank, stream)) for rank, stream in self._sockets.items()]
        loop = asyncio.get_running_loop()
        try:
            while isinstance(part := await self._call.read(), pb.AttachRanksResponse):
                self.leaving = self.leaving or part.leaving
                if part.saved:
                    self.saved.set()
                with suppress(OSError, KeyError):  # a child that has ended; its death is reported apart
                    await loop.sock_sendall(self._sockets[part.bytes.rank], part.bytes.data)
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def fail(self, carrying: asyncio.Task[None], reason: str) -> None:
        """Report to rank 0 why the ranks end, and end the call."""
        with suppress(Exception):  # rank 0 may be gone, too
            async with asyncio.timeout(_CALL_SECONDS):
                await self.write(pb.AttachRanksRequest(failure=clean(reason, MAX_ERROR)))
                await carrying
        carrying.cancel()
        await asyncio.gather(carrying, return_exceptions=True)

    def close(self) -> None:
        for stream in self._sockets.values():
            stream.close()

    async def _read(self, rank: int, stream: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while data := await loop.sock_recv(stream, PART_BYTES):
                await self.write(pb.AttachRanksRequest(bytes=pb.RankBytes(rank=rank, data=data)))

    async def write(self, message: pb.AttachRanksRequest) -> None:
        async with self._writing:
            await self._call.write(message)


def main(options: ServeOptions) -> int:
    """Hold the ranks of `options.ranks`; return the exit code."""
    die_with_parent()
    logs.setup(options.member_id, run_dir=options.run_dir)
    try:
        return asyncio.run(RankHolder(options).run())
    except FourfoldError as error:
        _print_error(f"{options.member_id}: {error.message}")
        return 1


def _set_first(future: asyncio.Future[str], reason: str) -> None:
    if not future.done():
        future.set_result(reason)


def _own_address(peer: str) -> str:
    """Return this machine's address on the way to a peer. No packet is sent."""
    family, *_, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _print_error(line: str) -> None:
    with suppress(OSError):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
