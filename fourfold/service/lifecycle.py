"""The life of a service process, the same for every service: start, ready, member, drain, end.

    listen  ->  start()  ->  ready, "READY host:port" on stdout  ->  registered and kept alive
                                                                          |
    exit code  <-  server.stop  <-  on_drain  <-  deregister  <-  not ready: a signal, a drain
                                                                  request, fatal(), or `until`

A drain takes a few seconds at most: each part of it has a bound. A second signal ends the
process at once. Errors that are meant for people are one line on stderr, the last one.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any, Final

from fourfold.config import Config
from fourfold.coordinator.client import MembershipClient
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import ConfigError, FourfoldError
from fourfold.host import logs
from fourfold.host.process import raise_file_limit
from fourfold.host.process_tree import PARENT_PID_VARIABLE, die_with_parent
from fourfold.rpc.channel import check_target, is_loopback, join_target, open_channel, split_target
from fourfold.rpc.limits import Quotas, limits_by_role
from fourfold.rpc.server import Server
from fourfold.security.access import COORDINATOR, Security, expiry_warning
from fourfold.security.principal import CallerLimits, Principal
from fourfold.service.membership import Membership

_log = logging.getLogger("fourfold.service.lifecycle")

_WARN_SECONDS: Final = 6 * 3600.0
_DEREGISTER_SECONDS: Final = 0.5
_ON_DRAIN_SECONDS: Final = 2.0
_GRACE_SECONDS: Final = 1.0
# After a signal, and after a fatal error under a launcher, the process ends even when a library's thread is stuck.
_HARD_EXIT_SECONDS: Final = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What a service is started with."""

    role: str
    """rollout, trainer, reward, reference or coordinator."""
    recipe: Path
    config: Config
    member_id: str
    """Stable name of the slot, e.g. "rollout-0"."""
    listen: str = "127.0.0.1:0"
    coordinator: str = ""
    """host:port; empty: the service stands alone."""
    run_dir: Path | None = None
    """Folder of the run, for checkpoints, export and logs."""
    advertise: str = ""
    """Host that others dial; empty: the one it listens on."""


class ServiceHost:
    """Runs one service. Add servicers to `server`, then `run`."""

    def __init__(
        self,
        options: ServeOptions,
        *,
        role: Role.ValueType | None,
        tokenizer_sha256: bytes = b"",
        max_concurrent_rpcs: int = 1024,
    ) -> None:
        """Prepare; nothing listens yet.

        Args:
            options: from the command line.
            role: what to register as; None for the coordinator.
            tokenizer_sha256: 32 bytes, or empty; may be set later, in `start`.
            max_concurrent_rpcs: calls of one service in flight on the internal server.

        Raises:
            ConfigError: addresses or certificates are wrong.
        """
        die_with_parent()
        raise_file_limit()
        logs.setup(options.member_id, run_dir=options.run_dir)
        self.options = options
        self.role = role
        self.tokenizer_sha256 = tokenizer_sha256
        self.security = Security.load(options.config.security, Principal(options.role, options.member_id))
        self.quotas = Quotas(limits_by_role(agent_limits(options.config), self._granted))
        self.server = Server(
            listen=options.listen,
            security=self.security,
            max_concurrent_rpcs=max_concurrent_rpcs,
            quotas=self.quotas,
        )
        self.on_drain: list[Callable[[], Awaitable[None]]] = []
        self.target = ""
        """Where others dial; known once it listens."""
        self._extra_servers: list[Server] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._signal: int | None = None
        self._fatal = ""
        self._check_advertised()
        if options.coordinator:
            check_target(options.coordinator, self.security)

    def public_server(self, listen: str, *, max_concurrent_rpcs: int = 512) -> Server:
        """Return a second server for agents; the host starts, reports and stops it together with its own."""
        server = Server(
            listen=listen,
            security=self.security,
            public=True,
            max_concurrent_rpcs=max_concurrent_rpcs,
            quotas=self.quotas,
        )
        self._extra_servers.append(server)
        return server

    def fatal(self, message: str) -> None:
        """End the service with exit code 1 and `message` last on stderr. From any thread; the first message counts."""
        self._fatal = self._fatal or message
        self._wake()

    def stop(self) -> None:
        """Drain and end with exit code 0. From any thread."""
        self._wake()

    async def run(
        self, *, start: Callable[[], Awaitable[None]] | None = None, until: Awaitable[int] | None = None
    ) -> int:
        """Serve to the end and return the process's exit code.

        Args:
            start: makes the service ready (loads a model); a signal cancels it.
            until: ends the service with its result as exit code; a signal cancels it, and the
                exit code is then 128 plus the signal's number.

        Returns:
            0 after a drain, 1 after an error.
        """
        self._loop = asyncio.get_running_loop()
        work: asyncio.Future[int] | None = None
        try:
            with self._signals():
                member: Membership | None = None
                try:
                    if not await self._make_ready(start):
                        return self._exit_code(None)
                    member = self._membership()
                    if until is not None:
                        work = asyncio.ensure_future(until)
                    await self._serve(member, work)
                    return self._exit_code(work)
                finally:
                    await self._drain(member, work)
        except FourfoldError as error:
            self._fatal = self._fatal or error.message
            return 1
        finally:
            if work is None and inspect.iscoroutine(until):
                until.close()
            self._say_why()

    async def _make_ready(self, start: Callable[[], Awaitable[None]] | None) -> bool:
        """Listen, run `start`, report ready; False when the end came first."""
        bound = await self.server.start()
        self.target = self._advertised(split_target(bound)[1])
        if start is not None:
            await self._unless_stopped(start())
        if self._stop.is_set():
            return False
        for server in self._extra_servers:
            await server.start()
        for server in (self.server, *self._extra_servers):
            server.set_ready(True)
        with suppress(OSError):  # nobody reads our stdout any more
            sys.stdout.write(f"READY {self.target}\n")
            sys.stdout.flush()
        return True

    async def _serve(self, member: Membership | None, work: asyncio.Future[int] | None) -> None:
        """Wait for the end, whatever brings it. Errors of the members' task and of `until` are raised."""
        stop = asyncio.ensure_future(self._stop.wait())
        keep_alive = asyncio.ensure_future(member.run()) if member else None
        warning = asyncio.ensure_future(self._warn_of_expiry()) if self.security else None
        tasks: set[asyncio.Future[Any]] = {t for t in (stop, keep_alive, warning, work) if t is not None}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks - {stop}:
                if task.done() and not self._stop.is_set():
                    await task  # raises what it raised
        finally:
            for task in tasks - {work}:
                task.cancel()
            await asyncio.wait(tasks - {work})

    async def _warn_of_expiry(self) -> None:
        """Log a few times a day that our certificate expires soon."""
        while self.security is not None:
            if text := expiry_warning(self.options.member_id, self.security.days_left):
                _log.warning("%s", text)
            await asyncio.sleep(_WARN_SECONDS)

    async def _drain(self, member: Membership | None, work: asyncio.Future[int] | None) -> None:
        self.server.set_ready(False)
        for server in self._extra_servers:
            server.set_ready(False)
        if self._signal is not None or (self._fatal and PARENT_PID_VARIABLE in os.environ):
            _exit_later(1 if self._signal is None else 128 + self._signal, self._say_why)
        if member is not None:
            await member.leave(timeout=_DEREGISTER_SECONDS)
        for name, step in [(getattr(c, "__qualname__", "on_drain"), c) for c in self.on_drain]:
            await self._bounded(name, step())
        if work is not None and not work.done():
            work.cancel()
            await asyncio.wait({work}, timeout=_ON_DRAIN_SECONDS)
        await asyncio.gather(*(s.stop(_GRACE_SECONDS) for s in (self.server, *self._extra_servers)))

    async def _bounded(self, name: str, step: Awaitable[None]) -> None:
        """Run one step of the drain; the others run whatever becomes of it."""
        (result,) = await asyncio.gather(asyncio.wait_for(step, _ON_DRAIN_SECONDS), return_exceptions=True)
        if isinstance(result, BaseException):
            _log.error("%s failed while draining", name, exc_info=result)

    async def _unless_stopped(self, work: Awaitable[None]) -> None:
        """Await `work`; cancel it when the end comes first."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=_ON_DRAIN_SECONDS)
            elif not task.cancelled():
                await task
        finally:
            stop.cancel()
            task.cancel()

    def _membership(self) -> Membership | None:
        if self.role is None or not self.options.coordinator:
            return None
        channel = open_channel(self.options.coordinator, self.security, server=COORDINATOR)
        self.on_drain.append(channel.close)
        return Membership(
            MembershipClient(channel, peer=f"coordinator at {self.options.coordinator}"),
            member_id=self.options.member_id,
            role=self.role,
            target=self.target,
            tokenizer_sha256=self.tokenizer_sha256,
            on_drain=self.stop,
        )

    def _granted(self, name: str) -> Mapping[str, float]:
        """Return the limits that the token of an agent has of its own."""
        grant = self.security.tokens.get(name) if self.security else None
        return grant.limits if grant else {}

    def _advertised(self, port: int) -> str:
        """Return the target that others dial."""
        host = self.options.advertise or split_target(self.options.listen)[0]
        if host in ("0.0.0.0", "::"):
            raise ConfigError(
                f"listen = {self.options.listen!r} is every address of this machine; name the one that others dial "
                f"with --advertise HOST"
            )
        return join_target(host, port)

    def _check_advertised(self) -> None:
        """Refuse a host that nobody may dial: the coordinator would refuse it, after a model was loaded."""
        host = self.options.advertise
        if host and self.security is None and not is_loopback(host):
            raise ConfigError(
                f"--advertise {host!r:.80}: without TLS a service is only called on this machine; leave --advertise "
                f"out, or make certificates with `fourfold certs DIR` and set security.directory"
            )
        check_target(self._advertised(1), self.security)

    def _exit_code(self, work: asyncio.Future[int] | None) -> int:
        if self._fatal:
            return 1
        if work is not None and work.done() and not work.cancelled():
            return work.result()
        return 128 + self._signal if self._signal is not None and work is not None else 0

    def _say_why(self) -> None:
        """Write the fatal error on stderr, if there is one: a launcher reads it there."""
        if self._fatal:
            _say(f"{self.options.member_id}: {self._fatal}")

    def _wake(self) -> None:
        if self._loop is None:
            self._stop.set()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Drain on the first SIGTERM or SIGINT, exit on the second. Only in the main thread; elsewhere call `stop`."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # Not loop.add_signal_handler: the second signal must work while the loop is stuck.
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._signal is not None:
            os._exit(128 + number)
        self._signal = number
        self._wake()


def agent_limits(config: Config) -> CallerLimits:
    """Return the recipe's limits of one agent."""
    names = {field.name for field in fields(CallerLimits)}
    return CallerLimits(**config.rollout.agents.model_dump(include=names, exclude_none=True))


def _say(line: str) -> None:
    with suppress(OSError):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def _exit_later(code: int, say_why: Callable[[], None]) -> None:
    def leave() -> None:
        _say(f"still here {_HARD_EXIT_SECONDS} s after the drain began; leaving")
        say_why()
        os._exit(code)

    timer = threading.Timer(_HARD_EXIT_SECONDS, leave)
    timer.daemon = True
    timer.start()
