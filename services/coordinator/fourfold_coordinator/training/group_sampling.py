"""Samples groups: calls engines until every sample of a group is finished, and keeps what interrupted calls sampled.

    request of all samples --> engine A --> finished samples
                                  | dead, draining, lease lost, deadline, aborted by an update
                                  v
    ids so far of the others --> engine B --> ... until all are finished, or no tries are left (GivenUp)

The tokens of a call are checked before they are kept. After a response that breaks the contract, the unfinished samples
of that request are sampled again from where they were before it.

With `rollout.hedge_after`, a call that is too slow gets a rival: a copy of its unfinished samples continues on another
engine. Each sample is taken from the first of the two that finishes it; the other call is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from fourfold.arrays import Int32Array
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import FourfoldError, PeerFault, Unavailable
from fourfold.rollout.client import Completion, CompletionDraft
from fourfold.rollout.group_requests import GroupRequest, Parts, join_parts, token_count
from fourfold.rollout.v1 import rollout_service_pb2 as rollout

from ..routing.replica import Flight, GivenUp, Interrupted, Replica, ServiceMissing
from ..routing.router import Router
from ..routing.scheduling import CompletionLengths, Demand, SamplingPace, prefix_keys
from ..state.sample_traces import GENERATE
from ..state.samples import check_completions

log = logging.getLogger("fourfold.coordinator")

OnTry = Callable[[], AbstractAsyncContextManager[None]]

# A flush costs the coordinator 10 % of the CPU time of 8 samples with 1,024 tokens each, and the death of an engine
# costs minutes. So engines send the tokens of unfinished samples a few times in a long call, and of short calls never.
FLUSH_SECONDS: Final = (5.0, 10.0)
HEDGE_FLUSH_SECONDS: Final = 2.0  # a slow call is recognized by its tokens
_FLUSHES: Final = 4
# Before the first call has ended: a fast engine under load.
_FIRST_PACE: Final = 0.01
WATCH_SECONDS: Final = 0.5
GRACE_SECONDS: Final = 1.0


@dataclass(slots=True, eq=False)
class _Leg:
    """A chain of calls, one after the other, and what it has of each unfinished sample."""

    parts: dict[int, Parts]  # by index, ascending
    drafts: dict[int, CompletionDraft] = field(default_factory=dict)  # of the call in flight
    replica: Replica | None = None  # that has the call in flight
    flight: Flight | None = None  # what that call takes of the replica's capacity
    began: float = 0.0  # of that call, on the router's clock
    flush_seconds: float | None = None  # of that call
    forked: dict[int, int] = field(default_factory=dict)  # tokens that this rival copied from the call in flight


class GroupSampler:
    """Samples the groups of a run."""

    def __init__(
        self,
        router: Router,
        *,
        timeout: float,
        newest_version: Callable[[], int],
        stop_token_ids: Sequence[int] = (),
        hedge_after: float = 0.0,
    ) -> None:
        """Prepare.

        Args:
            timeout: Seconds of one call.
            newest_version: Returns the highest policy version that an engine may have received.
            stop_token_ids: Tokens after which no sample continues.
            hedge_after: As `rollout.hedge_after`.
        """
        self.router, self.timeout = router, timeout
        self._newest_version, self._newest = newest_version, -1
        self.stop_token_ids, self.hedge_after = frozenset(stop_token_ids), hedge_after
        self.lengths, self.pace = CompletionLengths(), SamplingPace()

    async def sample(
        self,
        request: GroupRequest,
        *,
        spend: Callable[[FourfoldError], None],
        on_try: OnTry,
        on_finished: Callable[[Completion], None],
    ) -> None:
        """Call `on_finished` with each completion of a group when it is finished and checked; return after the last.

        `spend` and `on_try` are those of `Router.call`. An interruption that brought new tokens costs no try, so that
        frequent weight updates cannot use up the budget of a long sample. `on_finished` is called within a try.

        Raises:
            GivenUp: The budget is used up.
            ServiceMissing: No service came in time.
        """
        group = _Group(self, request, spend, on_try, on_finished)
        try:
            await (group.race() if self.hedge_after else group.follow(group.new_leg()))
        finally:
            kept = token_count(group.completions.values())
            self.router.tokens.add(continued=group.continued, lost=group.received - kept)
        self.lengths.add(len(completion.token_ids) for completion in group.completions.values())

    def check(self, part: Completion, replica: Replica) -> None:
        """Raise PeerFault for tokens of an engine that cannot be trained on."""
        # The newest version comes from the ledger: a query for each sample would cost more than the other checks.
        if max((span.policy_version for span in part.version_spans), default=0) > self._newest:
            self._newest = self._newest_version()
        check_completions(
            [part],
            peer=replica.member.peer,
            vocabulary_size=replica.vocabulary_size,
            newest_version=self._newest,
        )

    def demand(self, prompt_token_ids: Int32Array, done: Sequence[int], max_tokens: int) -> Demand:
        """Return what a call for samples of a prompt adds to an engine's load; `done` has the tokens of each so far."""
        expected = self.lengths.expected(max_tokens)
        # Samples share the blocks of their prompt; engines count it once per sample in their load report, though.
        tokens = sum(len(prompt_token_ids) + count + min(expected, max_tokens - count) for count in done)
        return Demand(samples=len(done), tokens=tokens, prefix=prefix_keys(prompt_token_ids))

    def flush_seconds(self, max_tokens: int) -> float | None:
        """Return how long engines may keep the tokens of a call; None, until a sample is finished."""
        low, high = FLUSH_SECONDS
        longest = max_tokens * (self.pace.seconds_per_token or _FIRST_PACE)
        if self.hedge_after:
            low = HEDGE_FLUSH_SECONDS
        elif longest < 2 * low:
            return None  # a lost call is soon repeated
        return min(max(longest / _FLUSHES, low), high)


class _Group:
    """One group while it is sampled."""

    def __init__(
        self,
        sampler: GroupSampler,
        request: GroupRequest,
        spend: Callable[[FourfoldError], None],
        on_try: OnTry,
        on_finished: Callable[[Completion], None],
    ) -> None:
        self._sampler, self._router, self._request = sampler, sampler.router, request
        self._spend, self._on_try, self._on_finished = spend, on_try, on_finished
        self._legs: list[_Leg] = []
        self._tries = 0  # a new request id for every try: the request of a lost try may still run
        self.completions: dict[int, Completion] = {}  # the finished samples by index
        self.received = self.continued = 0  # tokens

    def new_leg(self) -> _Leg:
        """Return a leg without tokens."""
        return _Leg(dict.fromkeys(range(self._request.count), ()))

    async def follow(self, leg: _Leg) -> None:
        """Return when all samples are finished. Raises the errors of `GroupSampler.sample`."""
        self._legs.append(leg)
        try:
            await self._router.call(
                Role.ROLE_ROLLOUT,
                partial(self._try, leg),
                demand=lambda: self._demand(leg),
                spend=self._spend_try,
                version=self._request.version,
                pin=self._request.engine,
                on_try=self._on_try,
                on_flight=partial(setattr, leg, "flight"),
            )
        finally:
            self._legs.remove(leg)

    def _unfinished(self, leg: _Leg) -> dict[int, Parts]:
        return {index: parts for index, parts in leg.parts.items() if index not in self.completions}

    def _demand(self, leg: _Leg) -> Demand:
        done = [token_count(parts) for parts in self._unfinished(leg).values()]
        return self._sampler.demand(self._request.prompt_token_ids, done, self._request.params.max_tokens)

    def _spend_try(self, error: FourfoldError) -> None:
        if len(self._legs) > 1:
            raise GivenUp("its samples continue on another engine", reason=error.reason) from error
        if not isinstance(error, Interrupted):
            self._spend(error)

    # -- one try ----------------------------------------------------------------------------------------------------

    async def _try(self, leg: _Leg, replica: Replica) -> None:
        """Ask an engine for the unfinished samples; raise an error if some are unfinished afterwards."""
        unfinished = self._unfinished(leg)
        if not unfinished or any(other.replica is replica for other in self._legs):
            return  # a rival comes too late, or all other engines are full again
        leg.replica, leg.began = replica, self._router.clock.monotonic()
        leg.flush_seconds = self._sampler.flush_seconds(self._request.params.max_tokens)
        requests = self._request.plan(unfinished, number=self._tries, flush_seconds=leg.flush_seconds)
        self._tries += 1
        errors: Sequence[FourfoldError | None] = ()
        try:
            if len(requests) == 1:
                errors = [await self._call(leg, replica, *requests[0])]
            else:
                errors = await asyncio.gather(*(self._call(leg, replica, *request) for request in requests))
        finally:  # also when the lease has ended
            leg.replica = None
            left = self._unfinished(leg)
            new = [token_count(leg.parts[index]) - token_count(parts) for index, parts in unfinished.items()]
            if left:
                self._log_interruption(replica, len(left), sum(new))
        if not left:
            self._sampler.pace.add(self._router.clock.monotonic() - leg.began, max(new))
            return
        if (error := next(filter(None, errors), None)) is not None:
            raise error
        text = f"{replica.member.peer}: the engine gave the request up"
        raise Interrupted(text, reason="ABORTED") if any(new) else Unavailable(text, reason="ABORTED")

    async def _call(
        self, leg: _Leg, replica: Replica, request: rollout.GenerateRequest, indices: Sequence[int]
    ) -> FourfoldError | None:
        """Make one Generate call, and keep what it brings of samples `indices`. Return its error."""
        leg.drafts |= {index: CompletionDraft(index) for index in indices}
        fault: FourfoldError | None = None
        names = [self._request.sample_ids[index] for index in indices if self._request.sample_ids]
        try:
            with self._router.traces.call(GENERATE, names, replica.member.member_id) as traced:
                async with aclosing(replica.rollout.generate(request, timeout=self._sampler.timeout)) as chunks:
                    async for chunk in chunks:
                        index = indices[chunk.sample_index]
                        leg.drafts[index].add(chunk)
                        if chunk.finish_reason != rollout.FINISH_REASON_UNSPECIFIED:
                            traced.end(chunk.sample_index)
                            if leg.flight is not None:
                                leg.flight.finish_sample(leg.drafts[index].token_count)
                            self._take(leg, replica, index)
        except FourfoldError as error:
            fault = error
        finally:  # also when the call was cancelled, because the lease has ended
            for index in [index for index in indices if index in leg.drafts]:
                if isinstance(fault, PeerFault):
                    self.received += leg.drafts.pop(index).token_count
                    continue
                try:
                    self._take(leg, replica, index)
                except PeerFault as error:
                    fault = error
        return fault

    def _take(self, leg: _Leg, replica: Replica, index: int) -> None:
        """Add the tokens of a call to those of the leg; drop them and raise PeerFault if they cannot be trained on."""
        draft = leg.drafts.pop(index)
        self.received += draft.token_count
        part = draft.join()
        self._sampler.check(part, replica)
        if index in self.completions or not draft.token_count:
            return
        leg.parts[index] = (*leg.parts[index], part)
        if self._finish(index, leg.parts[index]):
            self.continued += leg.forked.get(index, 0)

    def _finish(self, index: int, parts: Parts) -> bool:
        """Store a sample if it is finished; return whether it is."""
        reason = self._request.finish_reason(parts, self._sampler.stop_token_ids)
        if reason == rollout.FINISH_REASON_UNSPECIFIED:
            return False
        completion = self.completions[index] = join_parts(index, parts, reason)
        self._on_finished(completion)
        return True

    def _log_interruption(self, replica: Replica, unfinished: int, kept: int) -> None:
        self.continued += kept
        log.info(
            "call ended early, its samples continue: group=%s engine=%s unfinished=%d of=%d tokens_kept=%d",
            self._request.name, replica.member.member_id, unfinished, self._request.count, kept,
        )  # fmt: skip

    # -- rivals of slow calls ---------------------------------------------------------------------------------------

    async def race(self) -> None:
        """Do what `follow` does, with a rival for each call that is too slow."""
        shared = _SharedTry(self._on_try)
        self._on_try = shared.enter
        tasks = {asyncio.create_task(self.follow(self.new_leg()))}
        try:
            while len(self.completions) < self._request.count:
                done, tasks = await asyncio.wait(tasks, timeout=WATCH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                # A rival goes on, or has finished the samples in the turn of the event loop in which the other failed.
                spared = tasks or len(self.completions) == self._request.count
                for task in done:
                    error = task.exception()
                    if error is not None and not (spared and isinstance(error, GivenUp | ServiceMissing)):
                        raise error
                if (rival := self._make_rival()) is not None:
                    tasks.add(asyncio.create_task(self.follow(rival)))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _make_rival(self) -> _Leg | None:
        """Return a leg that continues the samples of a slow call, if another engine has room for them."""
        leg = next(iter(self._legs), None)
        if leg is None or len(self._legs) > 1 or leg.replica is None or not self._is_slow(leg, leg.replica):
            return None
        rival, tokens = _Leg({}), 0
        for index, parts in self._unfinished(leg).items():
            fork = self._fork(leg.replica, parts, leg.drafts.get(index))
            if fork == parts or not self._finish(index, fork):
                rival.parts[index], rival.forked[index] = fork, token_count(fork) - token_count(parts)
                tokens += token_count(fork)
        if not rival.parts or not self._router.has_spare(
            Role.ROLE_ROLLOUT, self._demand(rival), version=self._request.version, without=leg.replica
        ):
            return None
        log.warning(
            "call is slow, another engine continues its samples, too: group=%s engine=%s unfinished=%d of=%d tokens=%d",
            self._request.name, leg.replica.member.member_id, len(rival.parts), self._request.count, tokens,
        )  # fmt: skip
        return rival

    def _fork(self, replica: Replica, parts: Parts, draft: CompletionDraft | None) -> Parts:
        """Return the parts with the checked tokens of a draft; without them if they cannot be trained on."""
        if draft is None or not draft.token_count:
            return parts
        part = draft.join()
        try:
            self._sampler.check(part, replica)
        except PeerFault:
            return parts  # the call itself fails when it ends
        return (*parts, part)

    def _is_slow(self, leg: _Leg, replica: Replica) -> bool:
        """Return whether a call in flight takes too long for its tokens, or its engine stopped to report load."""
        now, pace = self._router.clock.monotonic(), self._sampler.pace.seconds_per_token
        if replica.load.silent(now):
            return True
        if pace is None:
            return False
        tokens = max((draft.token_count for draft in leg.drafts.values()), default=0)
        expected = pace * tokens + (leg.flush_seconds or 0.0) + GRACE_SECONDS
        return now - leg.began > self._sampler.hedge_after * expected


class _SharedTry:
    """Holds one `on_try` context open while any leg of a group is in a try; the error of the last one goes to it."""

    def __init__(self, on_try: OnTry) -> None:
        self._on_try, self._lock, self._count = on_try, asyncio.Lock(), 0
        self._context: AbstractAsyncContextManager[None] = nullcontext()

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[None]:
        """Return the context of one leg's try."""
        async with self._lock:
            if not self._count:
                self._context = self._on_try()
                await self._context.__aenter__()
            self._count += 1
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            async with self._lock:
                self._count -= 1
                if not self._count:
                    await self._context.__aexit__(type(error) if error else None, error, None)
