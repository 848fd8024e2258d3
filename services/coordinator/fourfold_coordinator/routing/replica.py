"""One member as the coordinator sees it, and how many tries a piece of work may lose."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import grpc

from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import FourfoldError, InvalidInput, Unavailable, WrongState
from fourfold.reference.client import AsyncReferenceClient
from fourfold.reward.client import AsyncRewardClient
from fourfold.rollout.client import AsyncRolloutClient, RolloutControlClient
from fourfold.trainer.client import AsyncTrainerClient, TrainerWeightClient

from .circuit_breaker import CircuitBreaker
from .load import EngineLoad, LoadTicket
from .registry import Member
from .scheduling import Demand

T = TypeVar("T")

NOT_INSPECTED: Final = "not looked at yet"


class ServiceMissing(Unavailable):
    """No service of a needed role came in time; the run cannot go on."""


class FatalRunError(WrongState):
    """An answer after which the recipe wants the run to end; no other replica is asked."""


class GivenUp(FourfoldError):
    """A piece of work has used its retry budget up; `reason` says why, for the ledger."""


class RetryPolicy(Protocol):
    """What a piece of work may lose before it is given up."""

    def spend(self, error: FourfoldError) -> None:
        """Count one lost try; raise GivenUp or FatalRunError when there was none left."""
        ...


@dataclass(slots=True, kw_only=True)
class RetryBudget:
    """Tries that one group may still lose."""

    infrastructure: int
    data: int

    def spend(self, error: FourfoldError) -> None:
        """Count one lost try.

        Raises:
            GivenUp: there was none left.
        """
        data = isinstance(error, InvalidInput)
        left = self.data if data else self.infrastructure
        if left <= 0:
            raise GivenUp(f"given up after its last try: {error}", reason=error.reason) from error
        if data:
            self.data -= 1
        else:
            self.infrastructure -= 1


class Replica:
    """One member as the coordinator sees it: channel, clients, load, and why it is not used."""

    def __init__(self, member: Member, channel: grpc.aio.Channel) -> None:
        self.member = member
        self.channel = channel
        self.rollout = AsyncRolloutClient(channel, peer=member.peer)
        self.control = RolloutControlClient(channel, peer=member.peer)
        self.reward = AsyncRewardClient(channel, peer=member.peer)
        self.reference = AsyncReferenceClient(channel, peer=member.peer)
        self.trainer = AsyncTrainerClient(channel, peer=member.peer)
        self.weights = TrainerWeightClient(channel, peer=member.peer)
        self.unusable_reason = NOT_INSPECTED
        """Why it is not used, for people; empty when it is."""
        self.outstanding = 0
        """Samples it was given and has not answered."""
        self.outstanding_size = 0
        """The same in the measure of `Demand.size`."""
        self.load = EngineLoad()
        """What an engine reports of itself."""
        self.capacity = 0
        """Most samples outstanding; 0: no limit."""
        self._congested_at = 0
        """Samples outstanding at which it was overloaded, until an answer comes; 0: it was not."""
        self.max_items = 0
        """Most samples in one call of a reward service; 0: no limit."""
        self.vocabulary_size = 0
        """Of an engine; 0 before it was looked at."""
        self.reads_tokens = False
        """Whether a reward service wants the arrays of a sample."""
        self.scorer = ""
        """Name of a reward service, as name@version."""
        self.version = -1
        """Version of the weights that the broker vouches for; -1: none."""
        self.gone = ""
        """Why it is no member any more; empty while it is."""
        self.breaker = CircuitBreaker()
        self._calls: set[asyncio.Timeout] = set()

    @property
    def key(self) -> tuple[str, str]:
        """Name and incarnation."""
        return self.member.member_id, self.member.incarnation

    @property
    def title(self) -> str:
        """Name for people, with that of its scorer where it has one."""
        return f"{self.member.member_id} ({self.scorer})" if self.scorer else self.member.member_id

    @property
    def trouble(self) -> str:
        """Why it rests, for people; empty when its last call worked."""
        error = self.breaker.first
        return "" if error is None else f"its calls fail and are tried again; the first with {error.reason}: {error}"

    @property
    def cache(self) -> tuple[str, str, int]:
        """What its prefix cache holds is of this process and of these weights."""
        return *self.key, self.version

    def give(self, demand: Demand) -> LoadTicket:
        """Count a call that goes there; `end` it with what this returns."""
        self.outstanding += demand.samples
        self.outstanding_size += demand.size
        return self.load.give(demand.tokens)

    def end(self, demand: Demand, ticket: LoadTicket) -> None:
        """Count a call that is over."""
        self.outstanding -= demand.samples
        self.outstanding_size -= demand.size
        self.load.end(ticket)

    def has_room(self, samples: int) -> bool:
        """Whether it may be given that many samples more. What it refused beside other work it may take alone."""
        limits = [self.capacity, self._congested_at if self.outstanding else 0]
        return all(self.outstanding + samples <= limit for limit in limits if limit)

    def congested(self, samples: int) -> bool:
        """Note that it refused `samples` as too many; return whether what we gave it before is the reason."""
        self._congested_at = self.outstanding - samples
        return self._congested_at > 0

    @property
    def present(self) -> bool:
        """Whether it was looked at and fits the run; an engine may still wait for weights."""
        return bool(self.vocabulary_size) if self.member.role == Role.ROLE_ROLLOUT else not self.unusable_reason

    @property
    def busy(self) -> bool:
        """Whether calls are in flight."""
        return bool(self._calls)

    def record_success(self) -> None:
        """Forget earlier failures."""
        self.breaker.record_success()
        self._congested_at = 0

    async def call(self, work: Awaitable[T]) -> T:
        """Await `work`, but not after the member's lease has ended.

        Raises:
            Unavailable: it ended.
        """
        if self.gone:  # its channel may be closed, and what gRPC raises then is no error that anybody catches
            if inspect.iscoroutine(work):
                work.close()
            raise self._ended()
        try:
            async with asyncio.timeout(None) as scope:
                self._calls.add(scope)
                try:
                    return await work
                finally:
                    self._calls.discard(scope)
        except TimeoutError:
            if not scope.expired():
                raise
            raise self._ended() from None

    def leave(self, why: str, *, cut: bool) -> None:
        """Note that it is no member any more; `cut` ends the calls in flight."""
        self.gone = self.unusable_reason = why
        if cut:
            for scope in list(self._calls):
                scope.reschedule(0.0)

    def _ended(self) -> Unavailable:
        return Unavailable(f"{self.member.peer}: {self.gone}", reason="LEASE_ENDED")
