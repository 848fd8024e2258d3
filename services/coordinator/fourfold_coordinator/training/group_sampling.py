"""Samples groups: calls engines until every sample of a group is finished; keeps the tokens of interrupted calls.

    request of all samples --> engine A --> finished samples
                                  | dead, draining, lease lost, deadline, aborted by an update
                                  v
    ids so far of the others --> engine B --> ... until all are finished, or no tries are left (GivenUp)

The tokens of a call are checked before they are kept. After a response that breaks the contract, the unfinished samples
of that request continue from their tokens before it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from functools import partial
from typing import Final

from fourfold.arrays import Int32Array
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import FourfoldError, PeerFault, Unavailable
from fourfold.rollout.client import Completion, CompletionDraft
from fourfold.rollout.group_requests import GroupRequest, Parts, join_parts, token_count
from fourfold.rollout.v1 import rollout_service_pb2 as rollout

from ..routing.replica import Flight, Interrupted, Replica
from ..routing.router import Router
from ..routing.scheduling import CompletionLengths, Demand, SamplingPace, prefix_keys
from ..state.sample_traces import GENERATE
from ..state.samples import check_completions

log = logging.getLogger("fourfold.coordinator")

OnTry = Callable[[], AbstractAsyncContextManager[None]]

# A dead engine costs minutes of sampling; a flush costs the coordinator 10 % of the CPU time of 8 samples with 1,024
# tokens each. So engines send the tokens of unfinished samples a few times in a long call, never in a short one.
FLUSH_SECONDS: Final = (5.0, 10.0)
_FLUSHES: Final = 4
# Pace before the first call has ended: that of a fast engine under load.
_FIRST_PACE: Final = 0.01


class GroupSampler:
    """Samples the groups of a run."""

    def __init__(
        self,
        router: Router,
        *,
        timeout: float,
        newest_version: Callable[[], int],
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        """Prepare.

        Args:
            timeout: Seconds of one call.
            newest_version: Returns the highest policy version that an engine may have received.
            stop_token_ids: Tokens after which no sample continues.
        """
        self.router, self.timeout = router, timeout
        self._newest_version, self._newest = newest_version, -1
        self.stop_token_ids = frozenset(stop_token_ids)
        self.lengths, self.pace = CompletionLengths(), SamplingPace()

    async def sample(
        self,
        request: GroupRequest,
        *,
        spend: Callable[[FourfoldError], None],
        on_try: OnTry,
        on_finished: Callable[[Completion], None],
    ) -> None:
        """Call `on_finished` with each finished and checked completion of a group; return after the last.

        `spend` and `on_try` are those of `Router.call`. An interruption that brought new tokens costs no try, so that
        frequent weight updates cannot use up the budget of a long sample. `on_finished` is called within a try.

        Raises:
            GivenUp: The budget is used up.
            ServiceMissing: No service came in time.
        """
        group = _Group(self, request, spend, on_try, on_finished)
        try:
            await group.follow()
        finally:
            kept = token_count(group.completions.values())
            self.router.tokens.add(continued=group.continued, lost=group.received - kept)
        self.lengths.add(len(completion.token_ids) for completion in group.completions.values())

    def check(self, part: Completion, replica: Replica) -> None:
        """Raise PeerFault if the tokens of an engine cannot be trained on."""
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
        """Return the load that a call for samples of a prompt adds to an engine; `done`: tokens of each so far."""
        expected = self.lengths.expected(max_tokens)
        # Samples share the blocks of their prompt, but engines count it once per sample in their load report.
        tokens = sum(len(prompt_token_ids) + count + min(expected, max_tokens - count) for count in done)
        return Demand(samples=len(done), tokens=tokens, prefix=prefix_keys(prompt_token_ids))

    def flush_seconds(self, max_tokens: int) -> float | None:
        """Return the longest time for which engines may keep the tokens of a call; None: until a sample is finished."""
        low, high = FLUSH_SECONDS
        longest = max_tokens * (self.pace.seconds_per_token or _FIRST_PACE)
        if longest < 2 * low:
            return None  # a short call is quickly repeated if it is lost
        return min(max(longest / _FLUSHES, low), high)


class _Group:
    """One group in progress."""

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
        self._parts: dict[int, Parts] = dict.fromkeys(range(request.count), ())  # of each sample, by index
        self._flight: Flight | None = None  # what the call in flight takes of the replica's capacity
        self._tries = 0  # a new request id for every try: the request of a lost try may still run
        self.completions: dict[int, Completion] = {}  # the finished samples by index
        self.received = self.continued = 0  # tokens

    async def follow(self) -> None:
        """Return when all samples are finished. Raises the errors of `GroupSampler.sample`."""
        await self._router.call(
            Role.ROLE_ROLLOUT,
            self._try,
            demand=self._demand,
            spend=self._spend_try,
            version=self._request.version,
            pin=self._request.engine,
            on_try=self._on_try,
            on_flight=partial(setattr, self, "_flight"),
        )

    def _unfinished(self) -> dict[int, Parts]:
        return {index: parts for index, parts in self._parts.items() if index not in self.completions}

    def _demand(self) -> Demand:
        done = [token_count(parts) for parts in self._unfinished().values()]
        return self._sampler.demand(self._request.prompt_token_ids, done, self._request.params.max_tokens)

    def _spend_try(self, error: FourfoldError) -> None:
        if not isinstance(error, Interrupted):
            self._spend(error)

    # -- one try ----------------------------------------------------------------------------------------------------

    async def _try(self, replica: Replica) -> None:
        """Ask an engine for the unfinished samples; raise an error if some are unfinished afterwards."""
        unfinished, began = self._unfinished(), self._router.clock.monotonic()
        if not unfinished:
            return  # the previous call was cut after its last sample
        flush_seconds = self._sampler.flush_seconds(self._request.params.max_tokens)
        requests = self._request.plan(unfinished, number=self._tries, flush_seconds=flush_seconds)
        self._tries += 1
        errors: Sequence[FourfoldError | None] = ()
        try:
            if len(requests) == 1:
                errors = [await self._call(replica, *requests[0])]
            else:
                errors = await asyncio.gather(*(self._call(replica, *request) for request in requests))
        finally:  # also runs when the lease has ended
            left = self._unfinished()
            new = [token_count(self._parts[index]) - token_count(parts) for index, parts in unfinished.items()]
            if left:
                self._log_interruption(replica, len(left), sum(new))
        if not left:
            self._sampler.pace.add(self._router.clock.monotonic() - began, max(new))
            return
        if (error := next(filter(None, errors), None)) is not None:
            raise error
        text = f"{replica.member.peer}: the engine gave the request up"
        raise Interrupted(text, reason="ABORTED") if any(new) else Unavailable(text, reason="ABORTED")

    async def _call(
        self, replica: Replica, request: rollout.GenerateRequest, indices: Sequence[int]
    ) -> FourfoldError | None:
        """Make one Generate call, and keep what it brings of samples `indices`. Return its error."""
        drafts = {index: CompletionDraft(index) for index in indices}
        fault: FourfoldError | None = None
        names = [self._request.sample_ids[index] for index in indices if self._request.sample_ids]
        try:
            with self._router.traces.call(GENERATE, names, replica.member.member_id) as traced:
                async with aclosing(replica.rollout.generate(request, timeout=self._sampler.timeout)) as chunks:
                    async for chunk in chunks:
                        index = indices[chunk.sample_index]
                        drafts[index].add(chunk)
                        if chunk.finish_reason != rollout.FINISH_REASON_UNSPECIFIED:
                            traced.end(chunk.sample_index)
                            if self._flight is not None:
                                self._flight.finish_sample(drafts[index].token_count)
                            self._take(replica, drafts.pop(index))
        except FourfoldError as error:
            fault = error
        finally:  # also when the call was cancelled, because the lease has ended
            for draft in drafts.values():
                if isinstance(fault, PeerFault):
                    self.received += draft.token_count
                    continue
                try:
                    self._take(replica, draft)
                except PeerFault as error:
                    fault = error
        return fault

    def _take(self, replica: Replica, draft: CompletionDraft) -> None:
        """Add the tokens of a call to those of the sample, and finish it if they are its last ones.

        Raises PeerFault, and drops the tokens, if they cannot be trained on.
        """
        self.received += draft.token_count
        part, index = draft.join(), draft.index
        self._sampler.check(part, replica)
        if not draft.token_count:
            return
        self._parts[index] = (*self._parts[index], part)
        reason = self._request.finish_reason(self._parts[index], self._sampler.stop_token_ids)
        if reason != rollout.FINISH_REASON_UNSPECIFIED:
            completion = self.completions[index] = join_parts(index, self._parts[index], reason)
            self._on_finished(completion)

    def _log_interruption(self, replica: Replica, unfinished: int, kept: int) -> None:
        self.continued += kept
        log.info(
            "call ended early, its samples continue: group=%s engine=%s unfinished=%d of=%d tokens_kept=%d",
            self._request.name, replica.member.member_id, unfinished, self._request.count, kept,
        )  # fmt: skip
