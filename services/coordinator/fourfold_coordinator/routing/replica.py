"""Holds the state of one member (`Replica`), and the tries of a piece of work (`RetryBudget`)."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

import grpc

from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import DeadlinePassed, FourfoldError, InvalidInput, Unavailable, WrongState
from fourfold.host.clock import SYSTEM_CLOCK, Clock
from fourfold.reference.client import AsyncReferenceClient
from fourfold.reward.client import AsyncRewardClient
from fourfold.rollout.client import AsyncRolloutClient, RolloutControlClient
from fourfold.rollout.load import STALL_SECONDS, EngineLoad
from fourfold.rpc.circuit_breaker import CircuitBreaker
from fourfold.trainer.client import AsyncTrainerClient, TrainerWeightClient

from ..state.timeline import Timeline
from .registry import Member
from .scheduling import Demand, MeasuredSpeed

T = TypeVar("T")


class CancelScopes:
    """Awaits that `cancel` ends together. Use it on one event loop.

    Each costs a timeout that never expires; a task would cost three times as much.
    """

    def __init__(self) -> None:
        self._open: set[asyncio.Timeout] = set()

    def __bool__(self) -> bool:
        return bool(self._open)

    async def run(self, work: Awaitable[T]) -> tuple[T] | None:
        """Return the result of `work`; None if `cancel` ended it first. Raises the errors of `work`."""
        try:
            async with asyncio.timeout(None) as scope:
                self._open.add(scope)
                try:
                    return (await work,)
                finally:
                    self._open.discard(scope)
        except TimeoutError:
            if not scope.expired():
                raise
            return None

    def cancel(self) -> None:
        """End the awaits that run now."""
        for scope in self._open:
            if not scope.expired():  # an earlier call cancelled this await, which has not ended yet
                scope.reschedule(0.0)


ReplicaKey = tuple[str, str]  # member id and incarnation of one process

NOT_INSPECTED: Final = "not inspected yet"
INFO_SECONDS: Final = 10.0  # deadline of calls that only ask for information
# Phase of a role's calls in timeline.jsonl. Calls of the trainer have phases of their own.
_PHASES: Final[Mapping[int, str]] = {
    Role.ROLE_ROLLOUT: "generate",
    Role.ROLE_REWARD: "score",
    Role.ROLE_REFERENCE: "reference",
}
# Most samples of an engine of unknown speed: a share of its capacity, or a number if it has no limit. It could be the
# slowest engine, and a step waits for its last group.
_TRIAL_SHARE: Final = 0.25
_TRIAL_SAMPLES: Final = 64


class ServiceMissing(Unavailable):
    """No service of a needed role came in time; the run cannot continue."""


class Interrupted(Unavailable):
    """An engine ended samples early for a drain or a weight update. This is not a failure of the engine."""


class FatalRunError(WrongState):
    """An error that ends the run; no other replica is tried."""


class GivenUp(FourfoldError):
    """A piece of work has no tries left; `reason` is what the ledger records."""


@dataclass(slots=True, kw_only=True)
class RetryBudget:
    """The tries that one group has left, counted apart for failures of services and of the data."""

    infrastructure: int
    data: int

    def spend(self, error: FourfoldError) -> None:
        """Count one failed try; raise GivenUp when no try was left."""
        data = isinstance(error, InvalidInput)
        left = self.data if data else self.infrastructure
        if left <= 0:
            raise GivenUp(f"given up after its last try: {error}", reason=error.reason) from error
        if data:
            self.data -= 1
        else:
            self.infrastructure -= 1


class ScorerInputs(NamedTuple):
    """The inputs of a reward service besides the texts of a sample."""

    tokens: bool = False  # the arrays
    messages: bool = False  # the chat messages of the prompt


class Flight:
    """The share of a replica's capacity that a call in flight still uses. Finished samples use none."""

    def __init__(self, replica: Replica, demand: Demand) -> None:
        self.samples, self.size = demand.samples, demand.size
        self._replica, (self.began, self._area) = replica, replica.add_outstanding(demand.samples, demand.size)

    def finish_sample(self, tokens: int) -> None:
        """Note that the replica finished a sample of `tokens` sampled tokens and has room for other work."""
        if self.samples:
            self._replica.measure(tokens, since=self.began, area=self._area)
            self._release(1, self.size // self.samples)

    def end(self) -> None:
        """Release the remaining capacity."""
        self._release(self.samples, self.size)

    def _release(self, samples: int, size: int) -> None:
        self.samples, self.size = self.samples - samples, self.size - size
        self._replica.add_outstanding(-samples, -size)


class Replica:
    """One member: its clients, its load, and the reason if it gets no calls."""

    def __init__(
        self,
        member: Member,
        channel: grpc.aio.Channel,
        *,
        clock: Clock = SYSTEM_CLOCK,
        on_change: Callable[[Replica], None] = lambda _replica: None,
        timeline: Timeline | None = None,
    ) -> None:
        """Create a replica without calls; `on_change` is called when its load changes or it becomes usable or unusable.

        `timeline` records the calls, together with those of other replicas.
        """
        self._timeline = timeline or Timeline(clock)
        self.member, self.channel = member, channel
        self._clock, self._on_change = clock, on_change
        self.rollout = AsyncRolloutClient(channel, peer=member.peer)
        self.engine_control = RolloutControlClient(channel, peer=member.peer)
        self.reward = AsyncRewardClient(channel, peer=member.peer)
        self.reference = AsyncReferenceClient(channel, peer=member.peer)
        self.trainer = AsyncTrainerClient(channel, peer=member.peer)
        self.trainer_weights = TrainerWeightClient(channel, peer=member.peer)
        self._unusable_reason = NOT_INSPECTED
        self.gone = ""  # reason why the member left; empty while it is a member
        self._left_at = math.inf  # time at which it left, on the monotonic clock
        self.breaker = CircuitBreaker()
        # Calls in flight.
        self.outstanding = 0  # samples
        self.outstanding_size = 0  # in the measure of `Demand.size`
        self._flights: dict[Flight, None] = {}  # in the order of their start
        self.load = EngineLoad()
        self._measured = MeasuredSpeed()
        self.pending_call = ""  # name of the trainer's call in flight
        self.moved_at = -math.inf  # time at which it last finished a sample or a call, on the monotonic clock
        self._changed_at = self._finished_at = clock.monotonic()  # last change of `outstanding`; last finished sample
        self._area = 0.0  # integral of the outstanding samples over time
        self._congested_at = 0  # outstanding samples when it was overloaded, until a call succeeds; else 0
        self._calls = CancelScopes()
        self._cut_error: Callable[[], FourfoldError] = self._lease_ended  # error of calls that were ended early
        # Answers of the service to GetInfo.
        self.capacity = 0  # most outstanding samples; 0 for no limit
        self.max_items = 0  # most samples in one call of a reward service; 0 for no limit
        self.vocabulary_size = 0  # of a compatible engine; otherwise 0
        self.reads = ScorerInputs()  # of a reward service
        self.pure = False  # for a reward service: equal samples have equal scores
        self.inspected_at = 0.0  # time of the last GetInfo, on the monotonic clock
        self.scorer = ""  # of a reward service, as name@version
        # Advice for users about a scorer that scored no sample; cleared when a call succeeds.
        self.advice = ""
        self._version = -1

    @property
    def unusable_reason(self) -> str:
        """Return the reason, for users, why it gets no calls; empty if it may get calls."""
        return self._unusable_reason

    @unusable_reason.setter
    def unusable_reason(self, reason: str) -> None:
        self._unusable_reason = reason
        self._on_change(self)

    @property
    def version(self) -> int:
        """Return the policy version that it samples, from the commit on and before its probe agrees; -1 for none."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._version = version
        self._on_change(self)

    @property
    def key(self) -> ReplicaKey:
        """Return name and incarnation, which identify a process."""
        return self.member.member_id, self.member.incarnation

    @property
    def title(self) -> str:
        """Return the name for users, with that of its scorer if it has one."""
        return f"{self.member.member_id} ({self.scorer})" if self.scorer else self.member.member_id

    @property
    def condition_text(self) -> str:
        """Return the text that watchers read while the breaker is open."""
        return "; ".join(filter(None, (self.failure_text, self.advice)))

    @property
    def failure_text(self) -> str:
        """Describe its recent failed calls for users; empty when its last call succeeded."""
        error = self.breaker.first
        return "" if error is None else f"its calls fail and are tried again; the first with {error.reason}: {error}"

    @property
    def cache_key(self) -> tuple[str, str, int]:
        """Return the key of its prefix cache, which depends on the process and the weights."""
        return *self.key, self.version

    @property
    def present(self) -> bool:
        """Return whether it was inspected and is compatible with the run; an engine may still wait for weights."""
        return bool(self.vocabulary_size) if self.member.role == Role.ROLE_ROLLOUT else not self.unusable_reason

    @property
    def calls_since(self) -> float | None:
        """Return when the oldest call in flight began, on the monotonic clock; None without one."""
        return next((flight.began for flight in self._flights), None)

    @property
    def busy(self) -> bool:
        return bool(self._calls)

    @contextmanager
    def in_flight(self, demand: Demand) -> Iterator[Flight]:
        """Count a call in the replica's load and in its breaker within the block."""
        flight = Flight(self, demand)
        self._flights[flight] = None
        work = self._timeline.during(self.member.member_id, _PHASES.get(self.member.role, "work"))
        try:
            with self.breaker.in_flight(), self.load.in_flight(demand.tokens), work:
                yield flight
            self.moved_at = self._clock.monotonic()
        finally:
            del self._flights[flight]
            flight.end()

    def add_outstanding(self, samples: int, size: int) -> tuple[float, float]:
        """Add to the calls in flight; return the time and the integral of the outstanding samples until then."""
        now = self._clock.monotonic()
        if not self.outstanding:
            self._finished_at = now
        self._area += self.outstanding * (now - self._changed_at)
        self._changed_at = now
        self.outstanding += samples
        self.outstanding_size += size
        self._on_change(self)
        return now, self._area

    def measure(self, tokens: int, *, since: float, area: float) -> None:
        """Measure the speed with a finished sample of `tokens` tokens; time and integral are those of its start."""
        now = self._clock.monotonic()
        if (seconds := now - since) > 0:
            samples = (self._area + self.outstanding * (now - self._changed_at) - area) / seconds
            self._measured.add(tokens=tokens, seconds=seconds, samples=samples, now=now)
        self._finished_at = self.moved_at = now

    def speed(self, now: float) -> float | None:
        """Return its tokens per second under load: measured in this run, or else as reported; None: unknown.

        An engine whose reports stopped has no speed: it may hang.
        """
        measured = self._measured.tokens_per_second
        if measured is None or self.load.silent(now):
            return self.load.speed(now)
        return measured

    def quiet(self, now: float) -> float:
        """Return the seconds since it finished a sample, or got work after it had none."""
        return now - self._finished_at if self.outstanding else 0.0

    def on_trial(self, samples: int, now: float) -> bool:
        """Return whether this number of further samples is too large for an engine of unknown speed."""
        most = _TRIAL_SHARE * self.capacity or _TRIAL_SAMPLES
        return 0 < self.outstanding > most - samples and self.speed(now) is None

    def takes(self, samples: int) -> bool:
        """Return whether it accepts this number of samples in one call when it has no others."""
        return not self.capacity or samples <= self.capacity

    def has_room(self, samples: int) -> bool:
        """Return whether it has room for these samples. A call that was refused next to others may fit alone."""
        return all(self.outstanding + samples <= limit for limit in self._sample_limits())

    def seconds_until_room(self, samples: int, now: float) -> float:
        """Return the expected seconds until it has room for these samples; 0 if it has, or its speed is unknown.

        By Little's law a sample takes as long as the engine would need for all its outstanding work. Samples that
        began together also end together: an engine that was just filled has no room before its whole work is done.
        """
        missing = self.outstanding + samples - min(self._sample_limits(), default=math.inf)
        if missing <= 0 or not (speed := self.speed(now)):
            return 0.0
        for flight in self._flights:
            missing -= flight.samples
            if missing <= 0:
                return max(flight.began + self.outstanding_size / speed - now, 0.0)
        return 0.0

    def room(self, demand: Demand, now: float) -> float:
        """Return the number of such calls that its limits and its KV cache admit now; infinite without limits."""
        rooms = [(limit - self.outstanding) // demand.samples for limit in self._sample_limits()]
        if (cache := self.load.room(now)) is not None:
            rooms.append(cache // demand.size)
        return max(min(rooms, default=math.inf), 0)

    def _sample_limits(self) -> list[int]:
        return [limit for limit in (self.capacity, self._congested_at if self.outstanding else 0) if limit]

    def record_congestion(self, samples: int) -> bool:
        """Note that it refused `samples` samples as too many; return whether our own calls are the cause."""
        self._congested_at = self.outstanding - samples
        return self._congested_at > 0

    def record_success(self) -> None:
        """Note a successful call, which clears earlier failures."""
        self.advice = ""
        self.breaker.record_success()
        self._congested_at = 0

    async def call(self, work: Awaitable[T]) -> T:
        """Await `work` as long as the member's lease lasts; raise Unavailable when the lease ended.

        Raises DeadlinePassed after `end_stalled_calls`.
        """
        if self.gone:  # its channel may be closed, and gRPC would raise UsageError, which is no FourfoldError
            if inspect.iscoroutine(work):
                work.close()
            raise self._lease_ended()
        if (done := await self._calls.run(work)) is None:
            raise self._cut_error()
        return done[0]

    def leave(self, reason: str, *, cut: bool) -> None:
        """Note that the member left; with `cut`, end its calls in flight."""
        self.gone, self._left_at = reason, self._clock.monotonic()
        self.unusable_reason = reason
        if cut:
            self._cut(self._lease_ended)

    def end_late_calls(self) -> None:
        """End calls in flight STALL_SECONDS after the member left, because its load is no longer watched."""
        if self._clock.monotonic() - self._left_at >= STALL_SECONDS:
            self._cut(self._lease_ended)

    def fits(self, version: int | None) -> bool:
        """Return whether it may get calls that need this policy version; None: any."""
        return not self.unusable_reason and (version is None or self.version >= version)

    def end_stalled_calls(self, now: float) -> bool:
        """End the calls of an engine that has samples but makes no progress; return whether it was such an engine."""
        if not self.outstanding or not self.load.stalled(now):
            return False
        self.load.restart_stall(now)
        self._cut(self._stalled)
        return True

    def _cut(self, error: Callable[[], FourfoldError]) -> None:
        self._cut_error = error
        self._calls.cancel()

    def _stalled(self) -> DeadlinePassed:
        text = f"the engine has samples and sampled no token for {STALL_SECONDS:g} s; look at its log, and restart it"
        return DeadlinePassed(f"{self.member.peer}: {text}", reason="STALLED")

    def _lease_ended(self) -> Unavailable:
        return Unavailable(f"{self.member.peer}: {self.gone}", reason="LEASE_ENDED")


async def inspect_replica(replica: Replica, tokenizer_sha256: bytes) -> str:
    """Store the properties that the replica reports.

    Returns the reason why it must get no calls in a run with this tokenizer; empty if it may. Raises FourfoldError if
    the replica does not answer.
    """
    tokenizer, reason = tokenizer_sha256, ""
    match replica.member.role:
        case Role.ROLE_ROLLOUT:
            info = await replica.rollout.get_info(timeout=INFO_SECONDS)
            tokenizer, replica.capacity = info.tokenizer_sha256, info.max_concurrent_samples
            replica.vocabulary_size = info.vocabulary_size if tokenizer == tokenizer_sha256 else 0
            reason = "weights not checked yet"
        case Role.ROLE_REWARD:
            reward = await replica.reward.get_info(timeout=INFO_SECONDS)
            tokenizer = reward.tokenizer_sha256 or tokenizer
            replica.reads = ScorerInputs(tokens=bool(reward.tokenizer_sha256), messages=reward.reads_messages)
            replica.max_items, replica.scorer, replica.pure = reward.max_sample_count, reward.name, reward.pure
        case Role.ROLE_REFERENCE:
            reference = await replica.reference.get_info(timeout=INFO_SECONDS)
            tokenizer = reference.tokenizer_sha256
    if tokenizer != tokenizer_sha256:
        return f"it has another tokenizer ({tokenizer.hex()[:12] or 'none'}) than the run"
    return reason
