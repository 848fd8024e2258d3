"""Routes each piece of work to a replica, and retries it elsewhere when that fails.

    work --call--> the replica that is expected to finish first --success--> result
      ^                |                             |
      |                | none: wait, then            | full of our own work: wait for a call to end there
      |                v ServiceMissing              | dead, draining, overloaded by others: another (infrastructure)
      |                                              | refused for its content: once more (data)
      +----------------------------------------------+ no tries left: GivenUp(reason)

Replicas come and go with their leases. A replica gets calls after it was inspected and the broker has verified its
weights, unless it failed recently. `ranking.py` orders these replicas, and `scheduling.py` chooses among the first
ones. It may choose a full replica that will finish the call sooner than those with room. Calls of one role are served
in order of arrival, so that a repeated run sends them in the same order.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar, cast

import grpc

from fourfold.coordinator.v1 import run_service_pb2 as run_pb
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import DeadlinePassed, FourfoldError, InvalidInput, Overloaded
from fourfold.rollout.load import TokenCounts, report_period, summarize_loads, watch_load

from ..state.faults import FaultLog
from ..state.files import DiskFull
from ..state.sample_traces import SampleTraces
from ..state.timeline import Timeline
from .ranking import ReplicaRanking
from .registry import ROLE_NAMES, Departures, Member, MemberChange, Registry
from .replica import (
    NOT_INSPECTED,
    FatalRunError,
    Flight,
    Interrupted,
    Replica,
    ReplicaKey,
    ServiceMissing,
    inspect_replica,
)
from .scheduling import Candidate, Demand, PrefixHolders, choose_replica

log = logging.getLogger("fourfold.coordinator")

T = TypeVar("T")

_TICK_SECONDS: Final = 0.25
_NOTICE_SECONDS: Final = 0.02  # shortest time between two notices of changes
_STARTS_PER_TURN: Final = 32  # inspections and streams that are started in one turn of the event loop
_MAX_EXPLAINED: Final = 16  # most members named in one text
_REST_SHARE: Final = 19  # after a pass over all members, sleep this multiple of its duration
_REFRESH_SECONDS: Final = 5.0  # interval of GetInfo to a permanent member, whose process may have been replaced


class WaitLimit(NamedTuple):
    """Longest wait for a usable replica."""

    seconds: float
    key: str = "retry.service_wait_seconds"  # recipe key that sets it, for messages


class MemberState(NamedTuple):
    """The state of a member for watchers."""

    member: Member
    policy_version: int  # -1: none, or another role than an engine
    overdue: bool  # whether its renewal is overdue
    since: float  # when that began, or the unbroken series of renewals, in seconds since the epoch

    def to_proto(self) -> run_pb.Member:
        row = run_pb.Member(
            member_id=self.member.member_id,
            role=self.member.role_name,
            target=self.member.target,
            policy_version=self.policy_version,
            state=run_pb.MEMBER_STATE_SILENT if self.overdue else run_pb.MEMBER_STATE_LIVE,
        )
        row.state_since.FromNanoseconds(int(self.since * 1e9))
        return row


class _Wanted(NamedTuple):
    """The requirements of one try of a call; see `Router.call`."""

    role: int
    demand: Demand
    version: int | None
    pin: ReplicaKey | None
    avoid: set[ReplicaKey]  # replicas where the call failed before
    wait: WaitLimit
    pool: str  # empty: any
    choose: Callable[[list[Replica]], list[Replica]]


@dataclass(slots=True, eq=False)
class _RoomWaiter:
    """A call that waits for a replica with room for its samples."""

    samples: int
    room: asyncio.Future[None]

    def wake(self) -> None:
        if not self.room.done():
            self.room.set_result(None)


def _anyone(replicas: list[Replica]) -> list[Replica]:
    return replicas


class Router:
    """All replicas of all roles. Not thread-safe; `run` must run in a task."""

    def __init__(
        self,
        registry: Registry,
        *,
        open_channel: Callable[[Member], grpc.aio.Channel],
        wait_seconds: float,
        on_wait: Callable[[str], None] = lambda _what: None,
        faults: FaultLog | None = None,
        timeline: Timeline | None = None,
        traces: SampleTraces | None = None,
    ) -> None:
        """Follow the members of a registry.

        `wait_seconds` is the longest wait for a usable replica. `on_wait` is called with a description of each wait,
        and with an empty text when it ends.
        """
        self.clock, self.tokenizer_sha256, self.on_wait = registry.clock, registry.tokenizer_sha256, on_wait
        self.wait_seconds, self._wait = wait_seconds, WaitLimit(wait_seconds)
        self.faults, self.timeline = faults or FaultLog(), timeline or Timeline(registry.clock)
        self.traces = traces or SampleTraces()
        self.tokens = TokenCounts()
        self._registry, self._open_channel = registry, open_channel
        self._replicas: dict[str, Replica] = {}  # by member_id
        self._by_role = defaultdict[int, list[Replica]](list)  # ordered by name
        self._rankings = defaultdict[int, ReplicaRanking](ReplicaRanking)
        self._waiting = defaultdict[int, set[_RoomWaiter]](set)
        self._queued = defaultdict[int, int](int)  # sizes of the calls that have no replica yet, by role
        # By role and pool. asyncio.Lock serves waiting tasks in order of arrival.
        self._turns = defaultdict[tuple[int, str], asyncio.Lock](asyncio.Lock)
        self._pinned_turn = asyncio.Lock()  # a call that waits for one full replica must not delay other calls
        self._change = asyncio.Event()
        self._noticed_at = -math.inf  # on the event loop's clock
        self._notice: asyncio.TimerHandle | None = None
        self._leaving: list[Replica] = []  # departed members whose channels are not closed yet
        self._departures = Departures(self.clock)
        self._watches: dict[Replica, asyncio.Task[None]] = {}
        self._inspections: dict[tuple[str, str], asyncio.Task[None]] = {}  # in progress, by replica key
        self._prefixes = PrefixHolders()
        registry.add_listener(self._on_member)

    def replicas(self, role: int | None = None, pool: str = "") -> list[Replica]:
        """Return the live replicas of one role, or of all, ordered by name; with `pool` only those of that pool."""
        if role is None:
            return [replica for _, replica in sorted(self._replicas.items())]
        found = self._by_role[role]
        return [replica for replica in found if replica.member.pool == pool] if pool else found.copy()

    async def run(self) -> None:
        """Expire leases, inspect new members, watch the engines' load and end stalled calls, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._expire_leases())
                while True:
                    began = time.perf_counter()
                    await self._watch_members(tasks)
                    await self._close_channels()
                    await rest_after(began)
                    await self.wait_for_change(timeout=_TICK_SECONDS)
        finally:
            for replica in (*self._leaving, *self._replicas.values()):
                await replica.channel.close()

    async def _expire_leases(self) -> None:
        while True:  # in a task of its own, because the rest after a long pass is not a stall
            self._registry.beat()
            self._registry.expire()
            await asyncio.sleep(_TICK_SECONDS)

    async def _watch_members(self, tasks: asyncio.TaskGroup) -> None:
        """Start the inspections and streams that are due."""
        # A method of its own: a loop variable in `run` would keep the last replica alive after it has left.
        now, started = self.clock.monotonic(), 0
        self._inspections = {key: task for key, task in self._inspections.items() if not task.done()}
        period = report_period(len(self._by_role[Role.ROLE_ROLLOUT]))
        for replica in list(self._replicas.values()):
            stale = replica.member.permanent and now - replica.inspected_at >= _REFRESH_SECONDS
            due = replica.unusable_reason == NOT_INSPECTED or stale
            if due and not replica.breaker.resting(now) and replica.key not in self._inspections:
                self._inspections[replica.key] = tasks.create_task(self._inspect(replica))
                if (started := started + 1) % _STARTS_PER_TURN == 0:
                    await asyncio.sleep(0)
            if replica.member.role != Role.ROLE_ROLLOUT:
                continue
            replica.load.period = period
            # Open the stream only when the engine may get calls: while a thousand engines join, the report interval
            # grows, and each stream would be opened again several times.
            if replica.present and not replica.unusable_reason and replica not in self._watches:
                watch = watch_load(replica.rollout, replica.load, self.clock)
                self._watches[replica] = tasks.create_task(watch)
                if (started := started + 1) % _STARTS_PER_TURN == 0:
                    await asyncio.sleep(0)
            if replica.end_stalled_calls(now):
                log.warning("engine samples nothing, its calls go elsewhere: member=%s", replica.member.member_id)

    async def wait_for_change(self, *, timeout: float) -> None:
        """Wait for a change of any replica, at most `timeout` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._change.wait()

    def notify(self) -> None:
        """Wake all tasks that wait for a change, once for several changes in a short time."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # before `run`, nothing waits
            return
        if self._notice is None:
            wait = self._noticed_at + _NOTICE_SECONDS - loop.time()
            if wait > 0:
                self._notice = loop.call_later(wait, self._wake)
            else:
                self._wake()

    def _wake(self) -> None:
        self._notice, self._noticed_at = None, asyncio.get_running_loop().time()
        change, self._change = self._change, asyncio.Event()
        change.set()
        for waiters in self._waiting.values():
            for waiter in waiters:
                waiter.wake()

    def _on_replica(self, replica: Replica) -> None:
        """Note that a replica's load changed, or that it became usable or unusable."""
        self._rankings[replica.member.role].update(replica, self.clock.monotonic())
        for waiter in self._waiting[replica.member.role]:
            if not replica.unusable_reason and replica.has_room(waiter.samples):
                waiter.wake()

    def set_unusable_reason(self, replica: Replica, reason: str) -> None:
        """Stop calls to a replica for a reason; an empty reason allows them again."""
        if not replica.gone and replica.unusable_reason != reason:
            replica.unusable_reason = reason
            self.notify()

    async def call(
        self,
        role: int,
        work: Callable[[Replica], Awaitable[T]],
        *,
        demand: Demand | Callable[[], Demand],
        spend: Callable[[FourfoldError], None],
        version: int | None = None,
        pin: ReplicaKey | None = None,
        wait: WaitLimit | None = None,
        on_try: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
        pool: str = "",
        choose: Callable[[list[Replica]], list[Replica]] = _anyone,
        on_flight: Callable[[Flight], None] = lambda _flight: None,
    ) -> T:
        """Do `work` with a replica; after a failure, try another replica if there is one.

        While `replica.breaker.probing` is set, `work` is the one call that shows whether the replica works again.

        Args:
            work: One try; its calls have deadlines.
            demand: The load that the work adds to the replica, or a function that returns it for each try.
            spend: Counts one failed try; raises GivenUp or FatalRunError when no try was left.
            version: Lowest policy version that a rollout service must have; None for any.
            pin: Replica that gets the work as long as it is usable; None for any.
            wait: Longest wait for a usable replica; None for the run's.
            on_try: Returns the context that one try runs in. It gets the error of a try, also when a lease ended.
            pool, choose: Pool of the replica, empty for any; returns those of its replicas that may get the work now.
            on_flight: Called before each try with the capacity that the call uses; `work` may release it sample by
                sample.

        Raises:
            GivenUp: No tries are left.
            FatalRunError: `work` or `spend` raised it.
            ServiceMissing: No replica came in time.
        """
        avoid: set[ReplicaKey] = set()
        while True:
            size = demand if isinstance(demand, Demand) else demand()
            wanted = _Wanted(role, size, version, pin, avoid, wait or self._wait, pool, choose)
            async with self._acquire(wanted) as (replica, flight):
                on_flight(flight)
                try:
                    async with on_try():
                        result = await replica.call(work(replica))
                except (DiskFull, FatalRunError):
                    raise  # an error of this process, or the end of the run: another replica would not help
                except FourfoldError as error:
                    if self._on_failed_try(replica, flight, error, avoid):
                        spend(error)
                else:
                    self.record_success(replica)
                    return result

    def _on_failed_try(self, replica: Replica, flight: Flight, error: FourfoldError, avoid: set[ReplicaKey]) -> bool:
        """Record a failed try and avoid its replica in the next tries; return whether the failure uses up a try."""
        if isinstance(error, Overloaded):
            if replica.record_congestion(flight.samples):
                return False
            self.record_failure(replica, error)  # other clients fill the replica
        else:
            avoid.add(replica.key)
            if not isinstance(error, Interrupted):
                log.warning("call failed, trying again: member=%s: %s", replica.member.member_id, error)
                self.record_failure(replica, error)
        return True

    def record_failure(self, replica: Replica, error: FourfoldError) -> None:
        """Count a failed call, open the circuit breaker, and show repeated failures."""
        self.faults.record(replica.member.member_id, error.reason, error.message)
        breaker, now = replica.breaker, self.clock.monotonic()
        if isinstance(error, InvalidInput):  # a fault of the request, not of the service
            return
        if isinstance(error, DeadlinePassed):
            breaker.trip(error, now)
        else:
            breaker.record_failure(error, now)
        if breaker.open and not replica.gone:
            self.faults.show(replica.member.member_id, replica.title, replica.condition_text)

    def record_success(self, replica: Replica) -> None:
        """Forget a replica's earlier failures, and stop showing them."""
        replica.record_success()
        self.faults.clear(replica.title)

    async def wait_for(self, counts: Mapping[int, int], *, seconds: float | None = None) -> None:
        """Wait for services; when each role has one, wait at most the run's wait for the others.

        `counts` has the number of services by role. `seconds` limits the wait for the first service of each role
        (default: the run's wait); then ServiceMissing is raised.
        """
        patience = self.wait_seconds if seconds is None else seconds
        end, complete_by = self.clock.monotonic() + patience, math.inf
        while True:
            now, began = self.clock.monotonic(), time.perf_counter()
            found = {role: sum(r.present for r in self.replicas(role)) for role in counts}
            short = [role for role in counts if found[role] < counts[role]]
            if all(found.values()):
                complete_by = min(complete_by, now + self.wait_seconds)
            elif now >= end:
                raise self._missing(next(role for role in counts if not found[role]), WaitLimit(patience))
            if not short or (all(found.values()) and now >= complete_by):
                self.on_wait("")
                return
            self.on_wait(", ".join(f"{ROLE_NAMES[r]} {found[r]} of {counts[r]} ({self.explain(r)})" for r in short))
            await rest_after(began)
            await self.wait_for_change(timeout=_TICK_SECONDS)

    def members(self) -> list[MemberState]:
        """Return the state of each live member, ordered by name."""
        return [
            MemberState(
                replica.member,
                replica.version if replica.member.role == Role.ROLE_ROLLOUT else -1,
                *self._registry.overdue(name),
            )
            for name, replica in sorted(self._replicas.items())
        ]

    def engine_metrics(self) -> dict[str, float]:
        """Return the metrics of the engines' load reports and token counts since the last call of this method."""
        loads = [engine.load for engine in self.replicas(Role.ROLE_ROLLOUT)]
        return summarize_loads(loads, self.clock.monotonic()) | self.tokens.take()

    def explain(self, role: int, pool: str = "") -> str:
        """Describe for users why the replicas of a role, or of a pool, get no calls."""
        replicas = self.replicas(role, pool)
        replicas.sort(key=lambda r: not r.unusable_reason)  # usable replicas come last
        texts = [
            f"{r.title}: {', '.join(filter(None, (r.unusable_reason, r.failure_text))) or 'ready'}"
            for r in replicas[:_MAX_EXPLAINED]
        ]
        if more := len(replicas) - len(texts):
            texts.append(f"{more} more")
        return "; ".join(texts + self._departures.texts(role, pool)) or "none has registered"

    def room(self, role: int, demand: Demand, *, version: int | None = None) -> float:
        """Return the number of such calls that the replicas would start at once; infinite without limits."""
        now = self.clock.monotonic()
        usable = (r for r in self.replicas(role) if r.fits(version) and r.breaker.admits(now))
        return sum(replica.room(demand, now) for replica in usable)

    @asynccontextmanager
    async def _acquire(self, wanted: _Wanted) -> AsyncIterator[tuple[Replica, Flight]]:
        """Choose a replica, and count the call in its load within the block."""
        with ExitStack() as call, ExitStack() as queued:
            queued.enter_context(self._in_queue(wanted))
            async with self._turns[wanted.role, wanted.pool] if wanted.pin is None else self._pinned_turn:
                replica = await self._choose(wanted)
                queued.close()
                flight = call.enter_context(replica.in_flight(wanted.demand))
                self._prefixes.add(wanted.demand.prefix, replica.cache_key)
            yield replica, flight

    @contextmanager
    def _in_queue(self, wanted: _Wanted) -> Iterator[None]:
        self._queued[wanted.role] += wanted.demand.size
        try:
            yield
        finally:
            self._queued[wanted.role] -= wanted.demand.size

    async def _choose(self, wanted: _Wanted) -> Replica:
        """Return the replica for a call; wait until one has room; raise ServiceMissing when none came in time."""
        role, demand, seconds = wanted.role, wanted.demand, wanted.wait.seconds
        end = self.clock.monotonic() + seconds
        while True:
            now = self.clock.monotonic()
            usable = self._ranked(wanted, now)
            room_will_come = bool(usable)
            if not usable:
                fitting = self._fitting(wanted)
                usable = [r for r in fitting if r.breaker.admits(now)]
                room_will_come = len(usable) < len(fitting) or any(r.outstanding for r in usable)
            if (chosen := self._best(usable, wanted, now)) is not None:
                if not chosen.breaker.open:
                    self.on_wait("")
                return chosen
            if room_will_come:
                # Restart the limit: a call in flight, which has a deadline, or a breaker's retry will end this wait.
                end = now + seconds
            elif now >= end:
                raise self._missing(role, wanted.wait, pool=wanted.pool, samples=demand.samples if usable else 0)
            if not (room_will_come and usable):
                self.on_wait(f"a {ROLE_NAMES[role]} service ({self.explain(role, wanted.pool)})")
            await self._wait_for_room(role, demand.samples)

    async def _wait_for_room(self, role: int, samples: int) -> None:
        """Wait until a replica may have room, at most one tick, because the end of a rest wakes no waiter."""
        waiter = _RoomWaiter(samples, asyncio.get_running_loop().create_future())
        self._waiting[role].add(waiter)
        try:
            await asyncio.wait((waiter.room,), timeout=_TICK_SECONDS)
        finally:
            self._waiting[role].discard(waiter)

    def _fitting(self, wanted: _Wanted) -> list[Replica]:
        """Return all replicas that may get a call; only the pinned one if it is usable and did not fail the call."""
        found = wanted.choose(self.replicas(wanted.role, wanted.pool))
        fitting = [r for r in found if r.fits(wanted.version)]
        return [r for r in fitting if r.key == wanted.pin and r.key not in wanted.avoid] or fitting

    def _ranked(self, wanted: _Wanted, now: float) -> list[Replica]:
        """Return the candidates for a call by rank; empty: consider all replicas."""
        if wanted.pin is not None or wanted.pool or wanted.choose is not _anyone:
            return []
        demand = wanted.demand

        def fits(replica: Replica) -> bool:
            return replica.fits(wanted.version) and replica.breaker.admits(now) and replica.takes(demand.samples)

        def free(replica: Replica) -> bool:
            return replica.key not in wanted.avoid and not self._is_full(replica, demand, now)

        found = self._rankings[wanted.role].first(demand, fits, free, now)
        for holder in cast("dict[tuple[str, str, int], int]", self._prefixes.held(demand.prefix)):
            replica = self._replicas.get(holder[0])
            if replica is not None and replica not in found and fits(replica):
                found.append(replica)
        return found

    def _best(self, replicas: Iterable[Replica], wanted: _Wanted, now: float) -> Replica | None:
        """Return the replica for a call; None: no replica has room, or the call should wait for a full one."""
        demand, held = wanted.demand, self._prefixes.held(wanted.demand.prefix)
        candidates = {
            replica.member.member_id: Candidate(
                name=replica.member.member_id,
                outstanding=replica.outstanding_size,
                speed=replica.speed(now),
                room=replica.load.room(now),
                held=held.get(replica.cache_key, 0),
                avoided=replica.key in wanted.avoid,
                full=self._is_full(replica, demand, now),
                wait=replica.seconds_until_room(demand.samples, now),
                quiet=replica.quiet(now),
            )
            for replica in replicas
            if replica.takes(demand.samples)
        }
        if not candidates:
            return None
        backlog = self._rankings[wanted.role].backlog_seconds(self._queued[wanted.role], now)  # includes this call
        best = choose_replica(list(candidates.values()), demand.size, backlog_seconds=backlog)
        return None if best.full else self._replicas[best.name]

    def _is_full(self, replica: Replica, demand: Demand, now: float) -> bool:
        if not replica.has_room(demand.samples):
            return True
        among_others = demand.tokens > 0 and len(self._by_role[replica.member.role]) > 1
        return among_others and replica.on_trial(demand.samples, now)

    def _missing(self, role: int, wait: WaitLimit, *, pool: str = "", samples: int = 0) -> ServiceMissing:
        """Return the error for a role; `samples` is set when no usable replica accepts so many in one call."""
        name = ROLE_NAMES[role]
        text = (
            f"no usable {name} service for {wait.seconds:g} s ({self.explain(role, pool)}); look at its log, start one "
            f"with `fourfold serve {name}`, or raise {wait.key}"
        )
        if samples:
            most = max(r.capacity for r in self.replicas(role))
            text = (
                f"no {name} service takes the {samples} samples of one prompt at once; the largest takes {most}: raise "
                f"{name}.max_concurrent_samples, or lower batch.group_size"
            )
        return ServiceMissing(text, reason=f"NO_{name.upper()}_SERVICE")

    def _on_member(self, member: Member, change: MemberChange) -> None:
        if change is MemberChange.JOINED:
            replica = Replica(
                member,
                self._open_channel(member),
                clock=self.clock,
                on_change=self._on_replica,
                timeline=self.timeline,
            )
            self._departures.forget(member)
            self._replicas[member.member_id] = replica
            bisect.insort(self._by_role[member.role], replica, key=lambda r: r.member.member_id)
            log.info("%s joined", member.member_id, extra={"target": member.target})
        elif member.member_id in self._replicas:  # missing if no channel could be opened
            replica = self._replicas.pop(member.member_id)
            self._by_role[member.role].remove(replica)
            if replica in self._watches:
                self._watches.pop(replica).cancel()
            # A member that deregistered finishes its calls. A silent or replaced member will not answer.
            replica.leave(change.value, cut=change is not MemberChange.LEFT)
            self.faults.forget(member.member_id)
            self._leaving.append(replica)
            self._departures.add(member, change)
        self.notify()

    async def _close_channels(self) -> None:
        for replica in list(self._leaving):
            if replica.busy:
                replica.end_late_calls()
            else:
                self._leaving.remove(replica)
                await replica.channel.close()

    async def _inspect(self, replica: Replica) -> None:
        try:
            await replica.call(self._describe(replica))
        except FourfoldError as error:
            self.record_failure(replica, error)
            log.warning("GetInfo failed: member=%s: %s", replica.member.member_id, error)

    async def _describe(self, replica: Replica) -> None:
        """Ask a new replica for its properties, and decide whether it may get calls."""
        replica.inspected_at = self.clock.monotonic()
        reason = await inspect_replica(replica, self.tokenizer_sha256)
        self.faults.clear(replica.member.member_id)  # title before the scorer's name is known
        if replica.member.permanent and replica.present and not reason:
            return  # a later inspection does not decide about it: its calls show whether it works
        self.record_success(replica)
        self.set_unusable_reason(replica, reason)
        self.notify()


async def rest_after(began: float) -> None:
    """Sleep after a pass over all members, so that passes use at most a twentieth of the event loop's time.

    `began` is when the pass began, on the clock of `time.perf_counter`.
    """
    await asyncio.sleep(_REST_SHARE * (time.perf_counter() - began))
