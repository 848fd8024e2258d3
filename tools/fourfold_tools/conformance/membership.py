"""Checks that a service registers at a coordinator and keeps its lease, with a coordinator that fails on purpose.

One service at a time registers there. `MembershipProbe.launcher` starts and ends it; without one, the rules that need a
second start are skipped.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import secrets
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, NoReturn, Protocol, Self

import grpc
import psutil

from fourfold.address import is_wildcard
from fourfold.coordinator.v1 import membership_service_pb2 as pb
from fourfold.coordinator.v1.membership_service_pb2_grpc import (
    MembershipServiceServicer,
    add_MembershipServiceServicer_to_server,
)
from fourfold.errors import ConfigError, DeadlinePassed, FourfoldError, NotFound, Unavailable, WrongState
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold.reward.v1.reward_service_pb2_grpc import RewardServiceStub
from fourfold.rpc.channel import SERVER_OPTIONS, is_loopback, join_target, split_target
from fourfold.rpc.codec import ID_PATTERN
from fourfold.rpc.status import to_status
from fourfold.security.access import Security, check_identity
from fourfold_tools.conformance.calls import unary
from fourfold_tools.conformance.checks import Checks, Skipped, Violation

SERVICE: Final = "fourfold.coordinator.v1.MembershipService"
MAX_CALLS: Final = 100_000
_BIND_SECONDS: Final = 5.0
_BIND_PAUSE: Final = 0.1
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """A call that came."""

    method: str
    at: float
    """Time by the clock of the event loop."""
    token: bytes
    """Lease of the request, or the granted one."""
    has_deadline: bool
    failed: str
    """Name of the status code of the response; empty: OK."""


@dataclass(slots=True)
class LeaseRecord:
    """A lease that was granted."""

    token: bytes
    request: pb.RegisterRequest
    granted: float
    expires: float
    peer_fault: str
    """Why the caller's certificate does not allow the call; empty: it does, or there is no TLS."""


@dataclass(slots=True, kw_only=True)
class FakeCoordinator(MembershipServiceServicer):
    """Grants leases to one service that registers, notes each call, and fails on request. Use it on one event loop."""

    ttl: float
    """Time to live of leases, in seconds."""
    security: Security | None = None
    unavailable: bool = False
    """Answer every call with UNAVAILABLE."""
    refusal: FourfoldError | None = None
    """Answer Register with this error; None: grant a lease."""
    drain: bool = False
    """Request a drain with each KeepAlive."""
    calls: list[Call] = field(default_factory=list)
    leases: list[LeaseRecord] = field(default_factory=list)
    lease: LeaseRecord | None = None
    """The valid one."""
    forgotten: set[bytes] = field(default_factory=set)
    """Tokens that were answered with NOT_FOUND."""
    _server: grpc.aio.Server | None = None

    async def start(self, listen: str) -> str:
        """Listen, and return the bound HOST:PORT; raise ConfigError if this machine cannot listen there."""
        host, port = split_target(listen)
        if self.security is None and not is_loopback(host):
            raise ConfigError(f"--coordinator-listen {listen}: without --certs it listens on loopback only")
        server = grpc.aio.server(options=SERVER_OPTIONS)
        add_MembershipServiceServicer_to_server(self, server)
        end = asyncio.get_running_loop().time() + _BIND_SECONDS
        while True:
            try:
                if self.security is None:
                    port = server.add_insecure_port(join_target(host, port))
                else:
                    port = server.add_secure_port(
                        join_target(host, port), self.security.server_credentials(public=False)
                    )
                break
            except RuntimeError:
                if asyncio.get_running_loop().time() > end:
                    raise ConfigError(
                        f"--coordinator-listen {listen}: this machine cannot listen there; is the port in use?"
                    ) from None
                await asyncio.sleep(_BIND_PAUSE)
        await server.start()
        self._server = server
        return join_target(host, port)

    async def stop(self) -> None:
        """Close the port and all connections. Leases are lost."""
        server, self._server, self.lease = self._server, None, None
        if server is not None:
            await server.stop(0)

    def forget(self) -> None:
        """Lose the valid lease, as a coordinator that was restarted."""
        self.lease = None

    async def Register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterResponse:
        fault = self._peer_fault(request, context)
        if self.unavailable:
            await self._fail("Register", b"", context, Unavailable("the coordinator is starting"))
        if self.refusal is not None:
            await self._fail("Register", b"", context, self.refusal)
        now = _now()
        lease = LeaseRecord(secrets.token_bytes(16), request, now, now + self.ttl, fault)
        if len(self.leases) < MAX_CALLS:
            self.leases.append(lease)
        self.lease = lease
        self._note("Register", lease.token, context)
        response = pb.RegisterResponse(lease_token=lease.token)
        response.ttl.FromNanoseconds(int(self.ttl * 1e9))
        return response

    async def KeepAlive(self, request: pb.KeepAliveRequest, context: Context) -> pb.KeepAliveResponse:
        token = request.lease_token
        if self.unavailable:
            await self._fail("KeepAlive", token, context, Unavailable("the coordinator is busy"))
        lease = self.lease
        if lease is None or token != lease.token or lease.expires < _now():
            self.lease = None if lease is not None and token == lease.token else lease
            await self._fail("KeepAlive", token, context, NotFound("unknown lease; register again"))
        self._note("KeepAlive", token, context)
        lease.expires = _now() + self.ttl
        response = pb.KeepAliveResponse(drain_requested=self.drain)
        response.ttl.FromNanoseconds(int(self.ttl * 1e9))
        return response

    async def Deregister(self, request: pb.DeregisterRequest, context: Context) -> pb.DeregisterResponse:
        if self.lease is not None and request.lease_token == self.lease.token:
            self.lease = None
        self._note("Deregister", request.lease_token, context)
        return pb.DeregisterResponse()

    def since(self, begin: float, method: str = "") -> list[Call]:
        """Return the calls of a method, or of all methods, from a time on."""
        return [call for call in self.calls if call.at >= begin and method in ("", call.method)]

    async def _fail(self, method: str, token: bytes, context: Context, error: FourfoldError) -> NoReturn:
        self._note(method, token, context, error.code)
        if error.code == "NOT_FOUND":
            self.forgotten.add(token)
        details = to_status(error).SerializeToString()
        await context.abort(grpc.StatusCode[error.code], error.message, (("grpc-status-details-bin", details),))
        raise AssertionError("abort always raises")

    def _note(self, method: str, token: bytes, context: Context, failed: str = "") -> None:
        if len(self.calls) < MAX_CALLS:  # a service that calls without a pause must not fill the memory
            self.calls.append(Call(method, _now(), token, context.time_remaining() is not None, failed))

    def _peer_fault(self, request: pb.RegisterRequest, context: Context) -> str:
        if self.security is None:
            return ""
        names = context.auth_context().get("x509_subject_alternative_name", ())
        try:
            owner = check_identity(SERVICE, [name.decode("latin-1") for name in names])
        except FourfoldError as error:
            return error.message
        if owner.name == request.member_id:
            return ""
        return f"it is that of {owner.name!r}, and member_id is {request.member_id[:140]!r}; both must be equal"


def _now() -> float:
    return asyncio.get_running_loop().time()


REGISTRATION: Final = Checks["MembershipProbe"]()
MEMBERSHIP: Final = Checks["MembershipProbe"]()
_INCARNATION: Final = re.compile(r"[0-9a-f]{32}")
_POLL_SECONDS: Final = 0.05
_START_POLL_SECONDS: Final = 0.1
_SLACK_SECONDS: Final = 0.5
"""Delay of a KeepAlive that a busy machine explains."""
RETURN_SECONDS: Final = 15.0
"""Time in which a service registers again: pauses between attempts grow to 5 s, and so do those of its connection."""
_CALLS_PER_SECOND: Final = 10.0
"""More calls of one service, while the coordinator is unavailable, are no back-off."""
_BURST: Final = 10
END_SECONDS: Final = 30.0
_NO_LAUNCHER: Final = "the service was started by hand; give --start COMMAND"


class Launcher(Protocol):
    """Starts and ends the service under test."""

    async def start(self) -> None:
        """Start it once more."""

    async def terminate(self) -> None:
        """Send it SIGTERM, and return at once."""

    async def exit_code(self) -> int | None:
        """Return its exit code; None: it runs."""

    def dialled(self) -> set[str]:
        """Return the remote addresses HOST:PORT of the connections that it made."""

    async def close(self) -> None:
        """Kill what is left of it."""


class Started:
    """A service that a command starts, in a process group of its own."""

    def __init__(self, command: Sequence[str]) -> None:
        """Prepare; `command` is a program with its arguments."""
        self._command = command
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the command. Its output goes to stderr."""
        await self.close()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.DEVNULL, stdout=2, start_new_session=True
            )
        except OSError as error:
            raise ConfigError(f"--start {self._command[0]}: it cannot be started: {error.strerror or error}") from None

    async def terminate(self) -> None:
        """Send SIGTERM to the process, not to its children."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    async def exit_code(self) -> int | None:
        """Return the exit code of the process; None: it runs."""
        return 0 if self._process is None else self._process.returncode

    def dialled(self) -> set[str]:
        """Return the remote addresses of connections that the process or its descendants made."""
        found, listening = set[str](), set[int]()
        with suppress(psutil.Error):
            assert self._process is not None
            process = psutil.Process(self._process.pid)
            for each in (process, *process.children(recursive=True)):
                for connection in each.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN:
                        listening.add(connection.laddr.port)
                    elif connection.raddr and connection.laddr.port not in listening:
                        found.add(join_target(connection.raddr.ip.removeprefix("::ffff:"), connection.raddr.port))
        return found

    async def close(self) -> None:
        """Kill the process group that is left."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


class MembershipProbe:
    """Plays the coordinator for one service. An async context manager."""

    def __init__(
        self,
        *,
        listen: str,
        security: Security | None,
        seconds: float,
        ttl: float,
        launcher: Launcher | None,
        open_target: Callable[[str], grpc.aio.Channel],
        role: pb.Role.ValueType = pb.ROLE_REWARD,
    ) -> None:
        """Prepare; nothing listens yet.

        Args:
            listen: HOST:PORT of the coordinator; port 0 takes a free one.
            security: certificates of a coordinator; None: no TLS.
            seconds: limit of a call, and of the wait for the first registration.
            ttl: time to live of leases.
            launcher: starts the service; None: it is started by hand.
            open_target: opens a channel to the service.
            role: role that it must register with.
        """
        self.listen, self.seconds, self.ttl, self.launcher = listen, seconds, ttl, launcher
        self.coordinator = FakeCoordinator(ttl=ttl, security=security)
        self.open_target, self.role = open_target, role
        self.target = ""
        """Address that the service registered with."""
        self.dialled = set[str]()

    async def __aenter__(self) -> Self:
        self.listen = await self.coordinator.start(self.listen)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.launcher is not None:
            await self.launcher.close()
        await self.coordinator.stop()

    @property
    def now(self) -> float:
        """Time by the clock of the event loop."""
        return asyncio.get_running_loop().time()

    def longest_gap(self, ttl: float) -> float:
        """Return the longest time between two renewals of a lease, with some slack."""
        return ttl / 3 + max(ttl / 6, _SLACK_SECONDS)

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait for a condition; return false after `seconds`. Notes the connections of the service meanwhile."""
        end = self.now + seconds
        while not condition():
            if self.now >= end:
                return False
            await asyncio.sleep(_POLL_SECONDS)
            if self.launcher is not None:
                self.dialled |= self.launcher.dialled()
        return True

    async def watch(self, seconds: float) -> None:
        """Let the service work for a while."""
        await self.until(lambda: False, seconds)

    async def registered(self, seconds: float, what: str) -> LeaseRecord:
        """Wait for a valid lease; raise Violation if there is none in time."""
        if not await self.until(lambda: self.coordinator.lease is not None, seconds):
            raise Violation(f"{what}, the service did not register in {seconds:g} s")
        assert self.coordinator.lease is not None
        return self.coordinator.lease

    async def member(self) -> LeaseRecord:
        """Return the valid lease; wait for one if there is none now."""
        return await self.registered(RETURN_SECONDS, "at the begin of the check")

    async def answers(self) -> reward.GetInfoResponse:
        """Ask the service for its name; raise its error."""
        async with self.open_target(self.target) as channel:
            stub = RewardServiceStub(channel)
            peer = f"service at {self.target}"
            info: reward.GetInfoResponse = await unary(
                stub.GetInfo, reward.GetInfoRequest(), peer=peer, seconds=self.seconds
            )
            return info

    def require_launcher(self) -> Launcher:
        """Return the launcher; raise Skipped without one."""
        if self.launcher is None:
            raise Skipped(_NO_LAUNCHER)
        return self.launcher


# -- registration -----------------------------------------------------------------------------------------------------


@REGISTRATION.add
async def check_register(probe: MembershipProbe) -> None:
    """Register has id, incarnation, role, an address that can be dialled, the hash of GetInfo, and a deadline."""
    if probe.launcher is not None:
        await probe.launcher.start()
    end = probe.now + probe.seconds
    while not await probe.until(lambda: probe.coordinator.lease is not None, _START_POLL_SECONDS):
        if probe.launcher is not None and (await probe.launcher.exit_code()) is not None:
            raise Violation("the service ended before it registered; its output tells why")
        if probe.now > end:
            raise DeadlinePassed(f"no service registered at {probe.listen} in {probe.seconds:g} s; is it started?")
    lease = await probe.member()
    _check_request(probe, lease)
    probe.target = lease.request.target
    info = await probe.answers()
    if info.tokenizer_sha256 != lease.request.tokenizer_sha256:
        theirs = lease.request.tokenizer_sha256
        if theirs or info.tokenizer_sha256:
            raise Violation(
                f"tokenizer_sha256 of Register is {theirs.hex()[:12] or 'empty'}, and that of GetInfo "
                f"{info.tokenizer_sha256.hex()[:12] or 'empty'}; both must be equal"
            )


def _check_request(probe: MembershipProbe, lease: LeaseRecord) -> None:
    request = lease.request
    if not ID_PATTERN.fullmatch(request.member_id):
        raise Violation(f"member_id is {request.member_id[:140]!r}; it must be [A-Za-z0-9_-]{{1,128}}")
    incarnation = request.incarnation
    if not _INCARNATION.fullmatch(incarnation) or len(set(incarnation)) < 4:
        raise Violation(
            f"incarnation is {incarnation[:80]!r}; it must be a random UUID, 32 lower-case hexadecimal digits"
        )
    if request.role != probe.role:
        names = pb.Role.Name(probe.role), str(request.role)
        raise Violation(f"role is number {names[1]}; a service of this kind registers with {names[0]} ({probe.role})")
    try:
        _, port = split_target(request.target)
    except ConfigError as error:
        raise Violation(f"target: {error.message}") from None
    if not port:
        raise Violation(f"target is {request.target!r}; port 0 cannot be dialled: register after the port is bound")
    if len(request.tokenizer_sha256) not in (0, 32):
        raise Violation(f"tokenizer_sha256 has {len(request.tokenizer_sha256)} bytes; it must have 32 or none")
    if lease.peer_fault:
        raise Violation(f"the certificate of the service: {lease.peer_fault}")
    _require_deadlines(probe.coordinator.calls)


def _require_deadlines(calls: Sequence[Call]) -> None:
    if bad := next((call.method for call in calls if not call.has_deadline), ""):
        raise Violation(f"{bad} came without a deadline; every call needs one")


# -- leases -----------------------------------------------------------------------------------------------------------


@MEMBERSHIP.add
async def check_keep_alive(probe: MembershipProbe) -> None:
    """KeepAlive comes three times per time to live, with the token of the lease, also while samples are scored."""
    lease = await probe.member()
    await probe.until(lambda: probe.now > lease.granted + 2 * probe.ttl, 2 * probe.ttl)
    # From the first lease on: a later one may follow the loss of a lease while samples were scored.
    _check_gaps(probe, probe.coordinator.leases[0].granted, probe.ttl)
    if probe.coordinator.lease is not lease:
        raise Violation("the service registered again, and its lease was valid; a lease is renewed with KeepAlive")


@MEMBERSHIP.add
async def check_new_time_to_live(probe: MembershipProbe) -> None:
    """KeepAlive follows the time to live of the last response."""
    await probe.member()
    ttl = probe.coordinator.ttl = probe.ttl * 0.5
    try:
        begin = probe.now
        heard = await probe.until(
            lambda: bool(probe.coordinator.since(begin, "KeepAlive")), probe.longest_gap(probe.ttl)
        )
        begin = probe.now
        await probe.watch(2 * ttl)
        if not heard:
            raise Violation(f"no KeepAlive came in {probe.longest_gap(probe.ttl):.2f} s")
        _check_gaps(probe, begin, ttl)
    finally:
        probe.coordinator.ttl = probe.ttl
        begin = probe.now
        await probe.until(lambda: bool(probe.coordinator.since(begin, "KeepAlive")), ttl)


def _check_gaps(probe: MembershipProbe, begin: float, ttl: float) -> None:
    """Check the times between renewals from `begin` until now."""
    renewals = [call for call in probe.coordinator.since(begin) if call.method != "Deregister"]
    calls = [call for call in renewals if call.method == "KeepAlive"]
    times = [begin, *(call.at for call in renewals), probe.now]
    longest = max(after - before for before, after in itertools.pairwise(times))
    if longest > (limit := probe.longest_gap(ttl)):
        raise Violation(
            f"{longest:.2f} s passed without a KeepAlive, with a time to live of {ttl:g} s; send one every "
            f"{ttl / 3:.2f} s (more than {limit:.2f} s is too late)"
        )
    most = _BURST + 10 * (probe.now - begin) / ttl
    if len(calls) > most:
        raise Violation(
            f"{len(calls)} KeepAlive calls came in {probe.now - begin:.1f} s; send one every {ttl / 3:.2f} s"
        )
    if any(call.failed for call in calls):
        raise Violation(
            f"KeepAlive was answered with {next(c.failed for c in calls if c.failed)}: an unknown lease_token"
        )
    _require_deadlines(calls)


@MEMBERSHIP.add
async def check_lost_lease(probe: MembershipProbe) -> None:
    """After NOT_FOUND the service registers again, with the same member_id and incarnation."""
    lease, begin = await probe.member(), probe.now
    probe.coordinator.forget()
    again = await probe.registered(probe.ttl + RETURN_SECONDS, "after a KeepAlive with NOT_FOUND")
    _check_same_process(lease, again)
    refused = [call for call in probe.coordinator.since(begin, "KeepAlive") if call.failed]
    if len(refused) > 1:
        raise Violation(f"{len(refused)} KeepAlive calls came with a lease that was NOT_FOUND; register again at once")
    await probe.watch(probe.longest_gap(probe.ttl))
    if any(call.failed for call in probe.coordinator.since(again.granted, "KeepAlive")):
        raise Violation("after it had registered again, the service renewed its old lease")


@MEMBERSHIP.add
async def check_unavailable(probe: MembershipProbe) -> None:
    """While the coordinator is UNAVAILABLE the service goes on, tries again with pauses, and registers afterwards."""
    lease, begin = await probe.member(), probe.now
    seconds = 1.5 * probe.ttl
    probe.coordinator.unavailable = True
    try:
        await probe.watch(seconds)
        await _check_alive(probe, "while the coordinator was unavailable")
    finally:
        probe.coordinator.unavailable = False
        probe.coordinator.forget()
    count, most = len(probe.coordinator.since(begin)), _BURST + seconds * _CALLS_PER_SECOND
    if count > most:
        raise Violation(
            f"{count} calls came in {seconds:.1f} s of UNAVAILABLE; begin with pauses of 100 to 200 ms, and double "
            f"them up to 5 s"
        )
    if not count:
        raise Violation(f"no call came in {seconds:.1f} s of UNAVAILABLE; try again")
    _check_same_process(lease, await probe.registered(RETURN_SECONDS, "after UNAVAILABLE"))


@MEMBERSHIP.add
async def check_coordinator_restart(probe: MembershipProbe) -> None:
    """A coordinator that ends and starts again at its address gets a registration of the same process."""
    lease = await probe.member()
    await probe.coordinator.stop()
    try:
        await probe.watch(probe.ttl)
    finally:
        await probe.coordinator.start(probe.listen)
    _check_same_process(lease, await probe.registered(RETURN_SECONDS, "after a restart of the coordinator"))
    await _check_alive(probe, "after a restart of the coordinator")


def _check_same_process(before: LeaseRecord, after: LeaseRecord) -> None:
    for name in ("member_id", "incarnation", "role", "target", "tokenizer_sha256", "scorer"):
        old, new = getattr(before.request, name), getattr(after.request, name)
        if old != new:
            raise Violation(
                f"{name} of the second registration of one process is {str(new)[:80]!r}, after {str(old)[:80]!r}"
            )


async def _check_alive(probe: MembershipProbe, when: str) -> None:
    try:
        await probe.answers()
    except FourfoldError as error:
        raise Violation(f"{when} the service itself had no answer ({error.message[:200]})") from None


# -- the end ----------------------------------------------------------------------------------------------------------


@MEMBERSHIP.add
async def check_dialled(probe: MembershipProbe) -> None:
    """While nothing is scored, the service dials the coordinator's address alone."""
    launcher = probe.require_launcher()
    await probe.member()
    probe.dialled.clear()  # what it dialled when it started, and for the samples
    await probe.watch(probe.ttl)
    probe.dialled |= launcher.dialled()
    host, port = split_target(probe.listen)
    ours = {join_target(address, port) for address in await _addresses(host)}
    if others := sorted(probe.dialled - ours):
        raise Violation(f"the service dialled {', '.join(others[:5])}; the coordinator is at {probe.listen}")


async def _addresses(host: str) -> set[str]:
    """Return the IP addresses under which a program of this machine reaches a host that a server listens on."""
    if is_wildcard(host):
        found = {each.address for addresses in psutil.net_if_addrs().values() for each in addresses}
    else:
        infos = await asyncio.get_running_loop().getaddrinfo(host, None)
        found = {str(info[4][0]) for info in infos}
    return {address.partition("%")[0] for address in found}


@MEMBERSHIP.add
async def check_drain(probe: MembershipProbe) -> None:
    """When KeepAlive requests a drain, the service deregisters, and ends."""
    lease = await probe.member()
    probe.coordinator.drain = True
    try:
        await _check_leaving(probe, lease, "a request to drain")
    finally:
        probe.coordinator.drain = False
    if probe.launcher is None:
        raise Skipped(f"it deregistered; whether it ends was not checked: {_NO_LAUNCHER}")


async def _check_leaving(probe: MembershipProbe, lease: LeaseRecord, after: str) -> None:
    """Wait until the service has returned its lease and has ended."""
    begin = probe.now
    seconds = probe.longest_gap(probe.ttl) + END_SECONDS
    gone = lambda: any(c.token == lease.token for c in probe.coordinator.since(begin, "Deregister"))  # noqa: E731
    if not await probe.until(gone, seconds):
        raise Violation(f"no Deregister with the lease's token came in {seconds:.0f} s after {after}")
    left = probe.now
    code = 0 if probe.launcher is None else await _exit(probe, probe.launcher, after)
    if code not in (0, 128 + signal.SIGTERM, -signal.SIGTERM):
        raise Violation(f"the process ended with exit code {code} after {after}; it must be 0")
    if later := [call.method for call in probe.coordinator.since(left) if call.method != "Deregister"]:
        raise Violation(f"{later[0]} came after Deregister; a service that has left stays away")


async def _exit(probe: MembershipProbe, launcher: Launcher, after: str) -> int:
    """Wait for the end of the process; return its exit code."""
    end = probe.now + END_SECONDS
    while (code := await launcher.exit_code()) is None:
        if probe.now > end:
            raise Violation(f"the process did not end in {END_SECONDS:g} s after {after}")
        await asyncio.sleep(_POLL_SECONDS)
    return code


@MEMBERSHIP.add
async def check_second_start(probe: MembershipProbe) -> None:
    """A new process of the service registers with the same member_id and a new incarnation."""
    launcher = probe.require_launcher()
    before = probe.coordinator.leases[-1]
    await launcher.close()
    probe.coordinator.forget()
    known = {lease.request.incarnation for lease in probe.coordinator.leases}
    await launcher.start()
    lease = await probe.registered(probe.seconds, "after its second start")
    if lease.request.incarnation in known:
        raise Violation("the second process has the incarnation of the first; make a random one at each start")
    if lease.request.member_id != before.request.member_id:
        raise Violation(
            f"member_id of the second process is {lease.request.member_id!r}, after {before.request.member_id!r}; it "
            f"names the place of the service, and stays"
        )


@MEMBERSHIP.add
async def check_sigterm(probe: MembershipProbe) -> None:
    """On SIGTERM the service deregisters, and ends."""
    launcher = probe.require_launcher()
    if await launcher.exit_code() is not None:
        await launcher.start()
    lease = await probe.registered(probe.seconds, "after its start")
    await launcher.terminate()
    await _check_leaving(probe, lease, "SIGTERM")


@MEMBERSHIP.add
async def check_refusal(probe: MembershipProbe) -> None:
    """After FAILED_PRECONDITION, as for a newer process of its name, the service ends, and registers no more."""
    launcher = probe.require_launcher()
    if await launcher.exit_code() is not None:
        await launcher.start()
    await probe.registered(probe.seconds, "after its start")
    probe.coordinator.refusal = WrongState(
        "a newer process of this member has registered; give this one another member_id", reason="INCARNATION_FENCED"
    )
    begin = probe.now
    try:
        probe.coordinator.forget()
        code = await _exit(probe, launcher, "FAILED_PRECONDITION INCARNATION_FENCED")
    finally:
        probe.coordinator.refusal = None
    if not code:
        raise Violation("the process ended with exit code 0 after its registration was refused; it must be another one")
    if (count := len(probe.coordinator.since(begin, "Register"))) > 1:
        raise Violation(f"{count} Register calls came; the first was refused with FAILED_PRECONDITION, for good")
