"""The life cycle of a service process: start, ready, member of a run, drain, exit.

    listen  ->  start()  ->  ready for calls  ->  registered, "READY host:port" on stdout  ->  kept alive
                                                                                                |
    exit code  <-  server.stop  <-  on_drain  <-  deregister  <-  not ready: a signal, a drain
                                                                  request, fatal(), or `until`

Without a coordinator the READY line comes as soon as the service is ready for calls. While the coordinator does not
accept the service, lines "NOT READY: ..." on stdout say why.

Every part of a drain has a time limit, so a drain takes a few seconds at most. A second signal ends the process
immediately. The last line on stderr is the error message for the user, if there is one.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from fourfold.address import is_wildcard
from fourfold.config import Config
from fourfold.coordinator.client import MembershipClient
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import ConfigError, FourfoldError
from fourfold.host import logs
from fourfold.host.disk import make_private_folder
from fourfold.host.process import raise_file_limit
from fourfold.host.process_tree import PARENT_PID_VARIABLE, die_with_parent
from fourfold.rpc.call_stats import CallStats
from fourfold.rpc.channel import check_target, is_loopback, join_target, open_channel, split_target
from fourfold.rpc.limits import AGENT_LIMITS, Quotas, limits_by_role
from fourfold.rpc.server import Server
from fourfold.security.access import COORDINATOR, Security, expiry_warning
from fourfold.security.principal import Principal
from fourfold.service.exporter import Exporter
from fourfold.service.membership import Membership
from fourfold.service.metrics_server import DiscoveryFile, MetricsServer
from fourfold.tracing import export as tracing

_log = logging.getLogger("fourfold.service.lifecycle")

_WARN_SECONDS: Final = 6 * 3600.0
_DEREGISTER_SECONDS: Final = 0.5
# Without a registration, the service says so on stdout: first after 5 s, then every minute.
_UNREGISTERED_SECONDS: Final = (5.0, 60.0)
_ON_DRAIN_SECONDS: Final = 2.0
_GRACE_SECONDS: Final = 1.0
# After a signal, or a fatal error under a launcher, the process exits even when a thread of a library is stuck.
_HARD_EXIT_SECONDS: Final = 4.0
_PUBLIC_CALLS: Final = 512  # in flight, of one service on the port for agents


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Command-line options of a service."""

    role: str  # rollout, trainer, reward, reference or coordinator
    recipe: Path
    config: Config
    member_id: str  # stable name of the slot, e.g. "rollout-0"
    listen: str = "127.0.0.1:0"
    coordinator: str = ""  # host:port; empty: the service runs without a coordinator
    run_dir: Path | None = None  # folder of the run, for checkpoints, exports and logs
    advertise: str = ""  # host name or address that other services connect to; empty: the one of `listen`
    gateway: str = ""  # host:port of the gateway of an environment service; empty: those of the coordinator's run
    metrics_listen: str = ""  # "host:port" of the metrics endpoint; empty: as the recipe says ([metrics])
    scorer: str = ""  # name of the table [[reward]] that a reward service serves; empty: the first
    pool: str = ""  # name of the table [[rollout.pool]] of a rollout service; empty: the first
    engines: tuple[str, ...] = ()  # host:port of each engine of a gateway without a coordinator
    ranks: range | None = None  # ranks of the trainer that this process holds; None: all of them
    interface: str = ""  # network interface of the ranks' collectives; empty: the one on the way to rank 0
    evaluate: bool = False  # the coordinator evaluates the model of the recipe, and trains nothing
    assignments: tuple[str, ...] = ()  # KEY=VALUE each, which replaced keys of the recipe's file in `config`

    @property
    def host(self) -> str:
        """Host name or address that other services connect to."""
        return self.advertise or split_target(self.listen)[0]

    def make_folder(self) -> Path:
        """Make the folder of the run, if it is not there, and return it; raise ConfigError if it cannot be made."""
        folder = self.run_dir or Path("runs") / self.config.name
        make_private_folder(folder)
        return folder


class ServiceHost:
    """Runs one service process. Add servicers to `server`, then call `run`."""

    def __init__(
        self,
        options: ServeOptions,
        *,
        role: Role.ValueType | None,
        max_concurrent_rpcs: int = 1024,
        acceptors: int = 1,
    ) -> None:
        """Prepare, and check addresses and certificates; nothing listens yet.

        The coordinator has no `role`. `max_concurrent_rpcs` counts the calls of one service in flight on the internal
        server, which has so many `acceptors` (`Server`).
        """
        die_with_parent()
        raise_file_limit()
        logs.setup(options.member_id, run_dir=options.run_dir, terse=role is None)
        self.options = options
        self.role = role
        self.tokenizer_sha256 = b""  # 32 bytes or none; `start` may set it
        self.security = Security.load(
            options.config.security,
            Principal(options.role, options.member_id),
            public=options.role == "coordinator" and bool(options.config.view.public_listen),
        )
        self.quotas = Quotas(limits_by_role(AGENT_LIMITS, self._token_limits))
        self._stats = CallStats()
        self.server = Server(
            listen=options.listen,
            security=self.security,
            max_concurrent_rpcs=max_concurrent_rpcs,
            quotas=self.quotas,
            stats=self._stats,
            acceptors=acceptors,
        )
        self.exporter = Exporter(options.role, stats=self._stats, ready=lambda: self.server.ready)
        self._metrics = metrics_server(options, self.exporter)
        self.tracing = tracing.start(
            options.config, role=options.role, member_id=options.member_id, run_dir=options.run_dir
        )
        self.on_drain: list[Callable[[], Awaitable[None]]] = []
        self.on_signal: list[Callable[[], Awaitable[None]]] = []
        """Awaited before the drain that a signal starts, while the service works as before. They limit themselves, and
        a second signal ends the process. Not under a launcher: its signal ends the whole run."""
        self.incarnation = uuid.uuid4().hex
        """Of this process as a member of the run."""
        self.target = ""  # host:port for other services; set when the server listens
        self._servers = [self.server]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._signal: int | None = None
        self._fatal = ""
        self._check_advertised()
        if options.coordinator:
            check_target(options.coordinator, self.security)

    def public_server(self, listen: str, key: str) -> Server:
        """Add a server for agents, at the address that the recipe has under `key`.

        `run` starts and stops it, and sets its health, with the internal server.
        """
        server = Server(
            listen=listen,
            security=self.security,
            public=True,
            key=key,
            max_concurrent_rpcs=_PUBLIC_CALLS,
            quotas=self.quotas,
            stats=self._stats,
        )
        self._servers.append(server)
        return server

    def fatal(self, message: str) -> None:
        """End the service with exit code 1 and `message` as last line on stderr. Thread-safe; only the first counts."""
        self._fatal = self._fatal or message
        self.stop()

    def stop(self) -> None:
        """Drain and exit with code 0. Thread-safe."""
        if self._loop is None:
            self._stop.set()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)

    async def run(
        self, *, start: Callable[[], Awaitable[None]] | None = None, until: Awaitable[int] | None = None
    ) -> int:
        """Serve until a signal, a drain request, `fatal`, `stop` or the end of `until`; return the exit code.

        Args:
            start: makes the service ready, e.g. loads a model; a signal cancels it.
            until: ends the service, with its result as exit code. A signal cancels it; the exit code is then 128 plus
                the signal's number. Without `until` the exit code is 0 after a drain and 1 after an error.
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
                    if member is None:
                        _print(f"READY {self.target}")
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
            self._print_fatal()

    @property
    def signal_name(self) -> str:
        """Return the name of the signal that ended the service, such as SIGTERM; empty if none did."""
        return "" if self._signal is None else signal.Signals(self._signal).name

    @property
    def signalled(self) -> bool:
        """Return whether a signal ended the service."""
        return self._signal is not None

    def _set_ready(self, ready: bool) -> None:
        for server in self._servers:
            server.set_ready(ready)

    async def _make_ready(self, start: Callable[[], Awaitable[None]] | None) -> bool:
        """Listen, run `start` and take calls; return False when the service was stopped before."""
        if self._metrics is not None:
            await self._metrics.start()
        bound = await self.server.start()
        self.target = self._advertised(split_target(bound)[1])
        if start is not None:
            await self._unless_stopped(start())
        if self._stop.is_set():
            return False
        for server in self._servers[1:]:
            await server.start()
        self._set_ready(True)
        return True

    async def _announce(self, member: Membership) -> None:
        """Print the READY line as soon as the service is registered, and until then the reason why it is not."""
        seconds, later = _UNREGISTERED_SECONDS
        while not await member.is_registered(within=seconds):
            seconds = later
            _print(
                f"NOT READY: cannot register with the coordinator at {self.options.coordinator}: {member.problem}; "
                f"trying again"
            )
        _print(f"READY {self.target}")

    async def _serve(self, member: Membership | None, work: asyncio.Future[int] | None) -> None:
        """Wait for a stop or the end of a task; raise errors of the membership and of `until`."""
        stop = asyncio.ensure_future(self._stop.wait())
        keep_alive = asyncio.ensure_future(member.run()) if member else None
        warning = asyncio.ensure_future(self._warn_of_expiry()) if self.security else None
        tasks: set[asyncio.Future[Any]] = {t for t in (stop, keep_alive, warning, work) if t is not None}
        announcement = {asyncio.ensure_future(self._announce(member))} if member else set[asyncio.Future[None]]()
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks - {stop}:
                if task.done() and not self._stop.is_set():
                    await task  # raises its error
            if self.signalled and PARENT_PID_VARIABLE not in os.environ:
                for step in self.on_signal:
                    await step()
        finally:
            helpers = (tasks - {work}) | announcement
            for task in helpers:
                task.cancel()
            await asyncio.wait(helpers)

    async def _warn_of_expiry(self) -> None:
        """Warn every few hours when our certificate expires soon."""
        while self.security is not None:
            if text := expiry_warning(self.options.member_id, self.security.days_left):
                _log.warning("%s", text)
            await asyncio.sleep(_WARN_SECONDS)

    async def _drain(self, member: Membership | None, work: asyncio.Future[int] | None) -> None:
        self._set_ready(False)
        if self._signal is not None or (self._fatal and PARENT_PID_VARIABLE in os.environ):
            self._exit_later(1 if self._signal is None else 128 + self._signal)
        if member is not None:  # first, so that the coordinator sends no more work
            await member.leave(timeout=_DEREGISTER_SECONDS)
        for step in self.on_drain:
            # gather returns the error of a step, so that the other steps run.
            (result,) = await asyncio.gather(asyncio.wait_for(step(), _ON_DRAIN_SECONDS), return_exceptions=True)
            if isinstance(result, BaseException):
                name = getattr(step, "__qualname__", "on_drain")
                _log.error("a step of the drain failed: %s", name, exc_info=result)
        if work is not None and not work.done():
            work.cancel()
            await asyncio.wait({work}, timeout=_ON_DRAIN_SECONDS)
        await asyncio.gather(*(server.stop(_GRACE_SECONDS) for server in self._servers))
        if self._metrics is not None:
            await self._metrics.stop()
        await asyncio.to_thread(self.tracing.stop)

    async def _unless_stopped(self, work: Awaitable[None]) -> None:
        """Await `work`; cancel it when the service is stopped first."""
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
            scorer=self.options.scorer,
            incarnation=self.incarnation,
        )

    def _token_limits(self, name: str) -> Mapping[str, float]:
        """Return the limits in the grant of an agent's token."""
        grant = self.security.tokens.get(name) if self.security else None
        return grant.limits if grant else {}

    def _advertised(self, port: int) -> str:
        """Return "host:port" for other services."""
        host = self.options.host
        if is_wildcard(host):
            raise ConfigError(
                f"listen = {self.options.listen!r} is every address of this machine; give the one that others "
                f"connect to with --advertise HOST"
            )
        return join_target(host, port)

    def _check_advertised(self) -> None:
        """Refuse a host that the coordinator would refuse, before a model is loaded."""
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

    def _print_fatal(self) -> None:
        """Write the fatal error, if any, on stderr, where a launcher reads it."""
        if self._fatal:
            _print_error(f"{self.options.member_id}: {self._fatal}")

    def _exit_later(self, code: int) -> None:
        """Exit after `_HARD_EXIT_SECONDS`, even when threads are stuck."""

        def leave() -> None:
            _print_error(f"the drain took more than {_HARD_EXIT_SECONDS} s; exiting")
            self._print_fatal()
            os._exit(code)

        timer = threading.Timer(_HARD_EXIT_SECONDS, leave)
        timer.daemon = True
        timer.start()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Drain on the first SIGTERM or SIGINT, exit on the second. Outside of the main thread, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # Not loop.add_signal_handler, because the second signal must work while the event loop is blocked.
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
        self.stop()


def metrics_server(options: ServeOptions, exporter: Exporter) -> MetricsServer | None:
    """Return the metrics endpoint that the options or the recipe ask for."""
    listen = options.metrics_listen
    if not listen and options.config.metrics.endpoint:
        listen = "127.0.0.1:0"  # a recipe gives no port, because all services of a machine read the same one
    if not listen:
        return None
    run_dir, labels = options.run_dir, {"run": options.config.name, "role": options.role, "member": options.member_id}
    discovery = DiscoveryFile(run_dir / "metrics" / f"{options.member_id}.json", labels) if run_dir else None
    return MetricsServer(listen, exporter.page, discovery=discovery, names=options.config.security.http_names)


def _print(line: str) -> None:
    with suppress(OSError):  # the reader of stdout is gone
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def _print_error(line: str) -> None:
    with suppress(OSError):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
