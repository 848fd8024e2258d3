"""Which replica does a piece of work, and what happens when it cannot.

    work --use--> the replica that is expected to be done first --answer--> done
      ^                |                             |
      |                | none: wait, then            | full of our own work: wait for an answer from there
      |                v ServiceMissing              | dead, draining, kept busy: another one (infrastructure)
      |                                              | refused for its content: once more (data)
      +----------------------------------------------+ budget used up: GivenUp(reason)

Replicas come and go with their leases. A replica is used only while nothing hinders it: it was
looked at, its weights are the wanted ones (the broker's business), and it did not just fail.
`choice.py` says which of them gets a call, and `load.py` what they report of themselves.
Work is served first come, first served, so that the same calls go out in the same order.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Final, NamedTuple, TypeVar

import grpc

from fourfold.coordinator.v1 import run_service_pb2 as run_pb
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import DeadlinePassed, FourfoldError, InvalidInput, Overloaded
from fourfold.host.clock import Clock

from ..state.disk_wait import DiskFull
from ..state.faults import FaultLog
from .load import summarize_loads, watch_load
from .registry import ROLE_NAMES, Member, MemberChange, Registry
from .replica import NOT_INSPECTED, FatalRunError, Replica, RetryPolicy, ServiceMissing
from .scheduling import Candidate, Demand, PrefixHolders, choose_replica

log = logging.getLogger("fourfold.coordinator")

T = TypeVar("T")

INFO_SECONDS: Final = 10.0
_TICK_SECONDS: Final = 0.25


class WaitLimit(NamedTuple):
    """How long a usable replica is waited for."""

    seconds: float
    key: str = "retry.service_wait_seconds"
    """Of the recipe, for messages."""


class Router:
    """All replicas of all roles. Used on one event loop; `run` it in a task."""

    def __init__(
        self,
        registry: Registry,
        *,
        open_channel: Callable[[Member], grpc.aio.Channel],
        tokenizer_sha256: bytes,
        clock: Clock,
        wait_seconds: float,
        on_wait: Callable[[str], None] = lambda _what: None,
        faults: FaultLog | None = None,
    ) -> None:
        """Follow the registry.

        Args:
            registry: tells who comes and goes.
            open_channel: opens a channel to a member.
            tokenizer_sha256: of the run; a service with another one is never used.
            clock: time of back-offs.
            wait_seconds: longest wait for a usable replica.
            on_wait: told what is waited for; empty: nothing.
            faults: told what fails.
        """
        self.clock = clock
        self.wait_seconds, self._wait = wait_seconds, WaitLimit(wait_seconds)
        self.on_wait = on_wait
        self.faults = faults or FaultLog()
        self._registry = registry
        self._open_channel = open_channel
        self._tokenizer_sha256 = tokenizer_sha256
        self._replicas: dict[str, Replica] = {}  # by member_id
        self._turns = {role: asyncio.Lock() for role in ROLE_NAMES}  # FIFO
        self._change = asyncio.Event()
        self._leaving: list[Replica] = []  # their channels are closed when their last call has ended
        self._watches: dict[Replica, asyncio.Task[None]] = {}
        self._prefixes = PrefixHolders()
        registry.add_listener(self._on_member)

    def replicas(self, role: int) -> list[Replica]:
        """Return the live replicas of a role, by name."""
        found = [r for r in self._replicas.values() if r.member.role == role]
        return sorted(found, key=lambda r: r.member.member_id)

    async def run(self) -> None:
        """Let leases expire, look at who is new and watch the engines' load, until cancelled."""
        looking: dict[tuple[str, str], asyncio.Task[None]] = {}
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    self._registry.expire()
                    for replica in list(self._replicas.values()):
                        busy = replica.key in looking and not looking[replica.key].done()
                        due = replica.unusable_reason == NOT_INSPECTED and not replica.breaker.resting(
                            self.clock.monotonic()
                        )
                        if due and not busy:
                            looking[replica.key] = tasks.create_task(self._look(replica))
                        engine = replica.member.role == Role.ROLE_ROLLOUT and replica.present
                        if engine and replica not in self._watches:
                            reports = watch_load(replica.rollout, replica.load, self.clock)
                            self._watches[replica] = tasks.create_task(reports)
                    looking = {key: task for key, task in looking.items() if not task.done()}
                    await self._close_channels()
                    await self.wait_for_change(timeout=_TICK_SECONDS)
        finally:
            for replica in (*self._leaving, *self._replicas.values()):
                await replica.channel.close()

    async def wait_for_change(self, *, timeout: float) -> None:
        """WaitLimit until anything about the replicas changes, at most `timeout` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._change.wait()

    def notify(self) -> None:
        """Wake everybody who waits for a change."""
        change, self._change = self._change, asyncio.Event()
        change.set()

    def set_unusable_reason(self, replica: Replica, why: str) -> None:
        """Stop using a replica, or use it again when `why` is empty."""
        if not replica.gone and replica.unusable_reason != why:
            replica.unusable_reason = why
            self.notify()

    async def call(
        self,
        role: int,
        work: Callable[[Replica], Awaitable[T]],
        *,
        demand: Demand,
        budget: RetryPolicy,
        version: int | None = None,
        wait: WaitLimit | None = None,
    ) -> T:
        """Have a replica do `work`; after a failure another one, where there is one.

        While `replica.breaker.probing` is set, `work` is the one call that must show that the replica works again.

        Args:
            role: a value of `Role`.
            work: one try; makes calls with deadlines.
            demand: what it adds to the replica's load.
            budget: what it may lose.
            version: of the weights that a rollout service must hold, or a later one; None: any.
            wait: longest wait for a usable replica; None: the run's.

        Raises:
            GivenUp: the budget is used up.
            FatalRunError: `work` or the budget raised it.
            ServiceMissing: no replica came in time.
        """
        avoid: set[tuple[str, str]] = set()
        while True:
            async with self._use(role, demand, wait or self._wait, version=version, avoid=avoid) as replica:
                try:
                    result = await replica.call(work(replica))
                except (DiskFull, FatalRunError):
                    raise  # no replica can change that
                except Overloaded as error:
                    if not replica.congested(demand.samples):  # others keep it busy
                        self.record_failure(replica, error)
                        budget.spend(error)
                except FourfoldError as error:
                    log.warning("%s failed, trying again: %s", replica.member.member_id, error)
                    avoid.add(replica.key)
                    self.record_failure(replica, error)
                    budget.spend(error)
                else:
                    self.record_success(replica)
                    return result

    def record_failure(self, replica: Replica, error: FourfoldError) -> None:
        """Count a failed call, let the replica rest, and show what is wrong when it fails again and again."""
        self.faults.record(replica.member.member_id, error.reason, error.message)
        breaker, now = replica.breaker, self.clock.monotonic()
        if isinstance(error, InvalidInput):  # the request's fault, as far as anybody knows
            return
        if isinstance(error, DeadlinePassed):
            breaker.trip(error, now)
        else:
            breaker.record_failure(error, now)
        if breaker.open and not replica.gone:
            self.faults.show(replica.member.member_id, replica.title, replica.trouble)

    def record_success(self, replica: Replica) -> None:
        """Note that a call to a replica worked."""
        replica.record_success()
        self.faults.clear(replica.title)

    async def wait_for(self, counts: Mapping[int, int], *, seconds: float | None = None) -> None:
        """WaitLimit until that many services of each role are there. One of each is enough after a while.

        Args:
            counts: services wanted, by role.
            seconds: longest wait for the first of each role; default: the run's. The others get the run's wait more.

        Raises:
            ServiceMissing: a role had not even one; names it.
        """
        patience = self.wait_seconds if seconds is None else seconds
        now = self.clock.monotonic()
        end, complete_by = now + patience, math.inf
        while True:
            now = self.clock.monotonic()
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
            await self.wait_for_change(timeout=_TICK_SECONDS)

    def members(self) -> list[run_pb.Member]:
        """Return the live members for people."""
        return [self._row(replica) for _, replica in sorted(self._replicas.items())]

    def _row(self, replica: Replica) -> run_pb.Member:
        member = replica.member
        late, since = self._registry.overdue(member.member_id)
        row = run_pb.Member(
            member_id=member.member_id,
            role=member.role_name,
            target=member.target,
            policy_version=replica.version if member.role == Role.ROLE_ROLLOUT else -1,
            state=run_pb.MEMBER_STATE_SILENT if late else run_pb.MEMBER_STATE_LIVE,
        )
        row.state_since.FromNanoseconds(int(since * 1e9))
        return row

    def engine_metrics(self) -> dict[str, float]:
        """Return what the engines said of themselves since this was asked last, by the names of metrics."""
        return summarize_loads([engine.load for engine in self.replicas(Role.ROLE_ROLLOUT)], self.clock.monotonic())

    def explain(self, role: int) -> str:
        """Say why the replicas of a role are not used."""
        replicas = self.replicas(role)
        if not replicas:
            return "none has registered"
        return "; ".join(
            f"{r.title}: {', '.join(filter(None, (r.unusable_reason, r.trouble))) or 'ready'}" for r in replicas
        )

    @asynccontextmanager
    async def _use(
        self, role: int, demand: Demand, wait: WaitLimit, *, version: int | None, avoid: set[tuple[str, str]]
    ) -> AsyncIterator[Replica]:
        async with self._turns[role]:
            replica = await self._acquire(role, demand, wait, version, avoid)
            ticket = replica.give(demand)
            self._prefixes.give(demand.prefix, replica.cache)
            probing = replica.breaker.begin_call()
        try:
            yield replica
        finally:
            if probing:
                replica.breaker.end_call()
            replica.end(demand, ticket)
            self.notify()

    async def _acquire(
        self, role: int, demand: Demand, wait: WaitLimit, version: int | None, avoid: set[tuple[str, str]]
    ) -> Replica:
        end = self.clock.monotonic() + wait.seconds
        while True:
            usable = [r for r in self.replicas(role) if self._usable(r, version)]
            free = {r.member.member_id: r for r in usable if r.has_room(demand.samples)}
            if free:
                chosen = free[choose_replica(self._candidates(free.values(), demand, avoid), demand.size).name]
                if not chosen.breaker.open:
                    self.on_wait("")
                return chosen
            now = self.clock.monotonic()
            # Busy ones are bounded by the deadlines of their calls, resting ones by the budget of those who try them.
            if any(r.outstanding for r in usable) or self._coming_back(role, version, now):
                end = now + wait.seconds
                if not usable:
                    self.on_wait(f"a {ROLE_NAMES[role]} service ({self.explain(role)})")
            elif now >= end:
                raise self._missing(role, wait, samples=demand.samples if usable else 0)
            else:
                self.on_wait(f"a {ROLE_NAMES[role]} service ({self.explain(role)})")
            await self.wait_for_change(timeout=_TICK_SECONDS)

    def _candidates(self, replicas: Iterable[Replica], demand: Demand, avoid: set[tuple[str, str]]) -> list[Candidate]:
        now, held = self.clock.monotonic(), self._prefixes.held(demand.prefix)
        return [
            Candidate(
                name=replica.member.member_id,
                outstanding=replica.outstanding_size,
                speed=replica.load.speed(now),
                room=replica.load.room(now),
                held=held.get(replica.cache, 0),
                avoided=replica.key in avoid,
            )
            for replica in replicas
        ]

    def _usable(self, replica: Replica, version: int | None) -> bool:
        return self._fits(replica, version) and replica.breaker.admits(self.clock.monotonic())

    def _fits(self, replica: Replica, version: int | None) -> bool:
        return not replica.unusable_reason and (version is None or replica.version >= version)

    def _coming_back(self, role: int, version: int | None, now: float) -> bool:
        """Whether a replica that fits only rests, or has the call that must show that it works again."""
        return any(self._fits(r, version) and not r.breaker.admits(now) for r in self.replicas(role))

    def _missing(self, role: int, wait: WaitLimit, *, samples: int = 0) -> ServiceMissing:
        """Return the error that nobody can be asked; `samples`: that nobody takes so many at once, though idle."""
        name = ROLE_NAMES[role]
        if samples:
            most = max(r.capacity for r in self.replicas(role))
            return ServiceMissing(
                f"no {name} service takes the {samples} samples of one prompt at once; the largest takes {most}: raise "
                f"{name}.max_concurrent_samples, or lower batch.group_size",
                reason=f"NO_{name.upper()}_SERVICE",
            )
        return ServiceMissing(
            f"no usable {name} service for {wait.seconds:g} s ({self.explain(role)}); look at its log, start one "
            f"with `fourfold serve {name}`, or raise {wait.key}",
            reason=f"NO_{name.upper()}_SERVICE",
        )

    def _on_member(self, member: Member, change: MemberChange) -> None:
        if change is MemberChange.JOINED:
            self._replicas[member.member_id] = Replica(member, self._open_channel(member))
            log.info("%s joined", member.member_id, extra={"target": member.target})
        elif (replica := self._replicas.pop(member.member_id, None)) is not None:  # None: no channel could be opened
            if replica in self._watches:
                self._watches.pop(replica).cancel()
            # Who leaves of its own will finishes what it has begun; who fell silent will not answer.
            replica.leave(change.value, cut=change is not MemberChange.LEFT)
            self.faults.gone(member.member_id)
            self._leaving.append(replica)
            log.info("%s is gone: %s", member.member_id, change.value)
        self.notify()

    async def _close_channels(self) -> None:
        for replica in [replica for replica in self._leaving if not replica.busy]:
            self._leaving.remove(replica)
            await replica.channel.close()

    async def _look(self, replica: Replica) -> None:
        """Ask a new replica who it is."""
        try:
            await replica.call(self._describe(replica))
        except FourfoldError as error:
            self.record_failure(replica, error)
            log.warning("%s does not say who it is: %s", replica.member.member_id, error)

    async def _describe(self, replica: Replica) -> None:
        tokenizer, unusable_reason = self._tokenizer_sha256, ""
        match replica.member.role:
            case Role.ROLE_ROLLOUT:
                info = await replica.rollout.get_info(timeout=INFO_SECONDS)
                tokenizer, replica.capacity = info.tokenizer_sha256, info.max_concurrent_samples
                replica.vocabulary_size = info.vocabulary_size if tokenizer == self._tokenizer_sha256 else 0
                unusable_reason = "weights not checked yet"
            case Role.ROLE_REWARD:
                reward = await replica.reward.get_info(timeout=INFO_SECONDS)
                tokenizer = reward.tokenizer_sha256 or tokenizer
                replica.reads_tokens = bool(reward.tokenizer_sha256)
                replica.max_items, replica.scorer = reward.max_sample_count, reward.name
            case Role.ROLE_REFERENCE:
                reference = await replica.reference.get_info(timeout=INFO_SECONDS)
                tokenizer = reference.tokenizer_sha256
        if tokenizer != self._tokenizer_sha256:
            unusable_reason = f"it has another tokenizer ({tokenizer.hex()[:12] or 'none'}) than the run"
        self.faults.clear(replica.member.member_id)  # it had no scorer's name before
        self.record_success(replica)
        self.set_unusable_reason(replica, unusable_reason)
        self.notify()
