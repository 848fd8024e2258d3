"""Samples one turn: calls engines until every sample is finished; the agent gets each token once.

    turn --> engine A --> tokens --> agent
                | dead, draining, aborted by an update, an answer that breaks the contract
                v
    prompt + ids so far --> engine B --> ... until all samples are finished

Tokens are checked before they are passed on, and stay valid when their engine fails later. The grammar of a sample
continues after the ids so far, too (`grammar_prefix_count`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from fourfold.errors import DeadlinePassed, FourfoldError, PeerFault, Unavailable, WrongState
from fourfold.rollout.client import CompletionDraft
from fourfold.rollout.group_requests import GroupRequest, Parts, token_count
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rpc.responses import MAX_ENGINE_VERSION
from fourfold_gateway.engines import ENGINE_ERRORS, Engine, EnginePool, caller_error

# Engines send tokens at least this often, because a dead engine loses the tokens that it has not sent.
_FLUSH_SECONDS: Final = 2.0
_WAIT_SECONDS: Final = 10.0
_TRIES: Final = 4  # failed calls in a row without a new token
_UNFINISHED: Final = rollout.FINISH_REASON_UNSPECIFIED


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """The request of a turn to the engines."""

    group: GroupRequest
    key: str  # calls with equal keys prefer the same engine
    flush_seconds: float | None
    """Longest time for which the engines and the sampler keep tokens; None: until their sample is finished. With stop
    strings it is short even if the agent gets finished samples."""
    separate: bool = False  # make one call per sample, so that each can end alone
    stopped: set[int] = field(default_factory=set)
    """Samples in which the reader of the chunks found a stop string: it adds them here, and their calls are cancelled.
    Needs `separate`."""


class TurnSampler:
    """Samples the turns of a gateway."""

    def __init__(self, engines: EnginePool, *, stop_token_ids: tuple[int, ...]) -> None:
        self._engines = engines
        self._stop_token_ids = frozenset(stop_token_ids)

    async def sample(self, turn: TurnRequest, *, timeout: float) -> AsyncGenerator[rollout.SampleChunk, None]:
        """Yield the chunks of all samples; the last one of each has the finish_reason STOP or LENGTH.

        Closing the generator aborts the samples. `timeout` is in seconds, for the whole turn.

        Raises:
            InvalidInput: an engine refuses the request.
            DeadlinePassed: the time is over.
            FourfoldError: the last error, when no engine finished the turn.
        """
        run = _Turn(self._engines, turn, self._stop_token_ids | set(turn.group.params.stop_token_ids), timeout)
        async with aclosing(run.chunks()) as chunks:
            async for chunk in chunks:
                yield chunk


class _Turn:
    """One turn in progress."""

    def __init__(self, engines: EnginePool, turn: TurnRequest, stop_ids: frozenset[int], timeout: float) -> None:
        self._engines, self._turn, self._stop_ids = engines, turn, stop_ids
        self._timeout, self._end = timeout, engines.clock.monotonic() + timeout
        self._queue: asyncio.Queue[rollout.SampleChunk | None] = asyncio.Queue()
        self._tries = 0
        self._held: dict[int, list[rollout.SampleChunk]] = {}  # chunks by sample, kept until the sample is finished

    async def chunks(self) -> AsyncGenerator[rollout.SampleChunk, None]:
        count = self._turn.group.count
        legs = [[i] for i in range(count)] if self._turn.separate else [list(range(count))]
        tasks = [asyncio.create_task(self._follow(leg)) for leg in legs]
        for task in tasks:
            task.add_done_callback(lambda _: self._queue.put_nowait(None))
        try:
            ended = 0
            while ended < len(tasks):
                chunk = await self._queue.get()
                if chunk is not None:
                    yield chunk
                    if chunk.sample_index in self._turn.stopped:
                        tasks[chunk.sample_index].cancel()
                    continue
                ended += 1
                for task in tasks:
                    if task.done() and not task.cancelled():
                        task.result()  # raises its error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, indices: list[int]) -> None:
        """Return when the samples are finished."""
        parts: dict[int, Parts] = dict.fromkeys(indices, ())
        tried: list[Engine] = []
        idle = 0  # tries in a row without a token
        while parts:
            left = self._seconds_left()
            engine = await self._engines.wait(
                self._turn.key,
                seconds=min(left, _WAIT_SECONDS),
                samples=len(parts),
                without=tried,
                min_version=self._turn.group.version,
            )
            before = sum(map(token_count, parts.values()))
            error = await self._try(engine, parts)
            if not parts:
                engine.breaker.record_success()
                return
            self._engines.continuations += len(parts)
            progress = sum(map(token_count, parts.values())) > before
            idle = 0 if progress else idle + 1
            tried.append(engine)
            if error is not None:
                self._seconds_left()  # the deadline of the turn is no failure of the engine
                self._engines.record_failure(engine, error)
                useless = isinstance(error, WrongState) and len(tried) >= len(self._engines.usable)
                if idle >= _TRIES or useless:
                    raise caller_error(error) from error
            elif idle >= _TRIES:
                raise Unavailable("engines ended the turn several times without a token; try again", retry_after=1.0)

    async def _try(self, engine: Engine, parts: dict[int, Parts]) -> FourfoldError | None:
        """Ask an engine for the samples in `parts`; remove the finished ones, and add tokens to the others."""
        flush = _FLUSH_SECONDS if self._turn.flush_seconds is None else self._turn.flush_seconds
        self._tries += 1
        plan = self._turn.group.plan(dict(sorted(parts.items())), number=self._tries, flush_seconds=flush)
        with engine.call(len(parts)):
            if len(plan) == 1:  # the usual case, without the 0.1 ms of a task and two gathers
                return await self._call(engine, *plan[0], parts)
            calls = [asyncio.create_task(self._call(engine, *call, parts)) for call in plan]
            try:
                errors = await asyncio.gather(*calls)
            finally:  # after an error of one call, cancel the others: nothing would read their tokens
                for call in calls:
                    call.cancel()
                await asyncio.gather(*calls, return_exceptions=True)
        return next(filter(None, errors), None)

    async def _call(
        self, engine: Engine, request: rollout.GenerateRequest, indices: list[int], parts: dict[int, Parts]
    ) -> FourfoldError | None:
        drafts = {index: CompletionDraft(index) for index in indices}
        fault: FourfoldError | None = None
        try:
            calls = engine.client.generate(request, timeout=self._seconds_left())
            async with aclosing(calls) as chunks:
                async for chunk in chunks:
                    index = indices[chunk.sample_index]
                    self._check(engine, chunk, bool(parts[index]) or drafts[index].token_count > 0)
                    drafts[index].add(chunk)
                    engine.end_probe()
                    if chunk.finish_reason == rollout.FINISH_REASON_ABORTED:
                        chunk.finish_reason = _UNFINISHED
                    if chunk.finish_reason != _UNFINISHED:
                        del parts[index], drafts[index]
                    self._pass_on(index, chunk)
        except ENGINE_ERRORS as error:
            fault = error
        except asyncio.CancelledError:  # the agent left, or a stop string was found
            if any(draft.token_count for draft in drafts.values()):
                engine.breaker.record_success()
            raise
        for index, draft in drafts.items():
            self._keep(index, draft, parts)
        return fault

    def _keep(self, index: int, draft: CompletionDraft, parts: dict[int, Parts]) -> None:
        """Keep the tokens of an unfinished sample; finish the sample if they complete it."""
        if draft.token_count:
            parts[index] = (*parts[index], draft.join())
        if not parts[index]:
            return
        reason = self._turn.group.finish_reason(parts[index], self._stop_ids)
        if reason != _UNFINISHED:
            version = parts[index][-1].version_spans[-1].policy_version
            del parts[index]
            self._pass_on(index, rollout.SampleChunk(policy_version=version, finish_reason=reason))

    def _check(self, engine: Engine, chunk: rollout.SampleChunk, has_tokens: bool) -> None:
        """Check what the client cannot check: the vocabulary, the highest version and the finish reason."""
        peer, ids = engine.client.peer, chunk.token_ids
        vocabulary_size = self._engines.vocabulary_size
        if ids and int(np.frombuffer(ids, "<u4").max()) >= vocabulary_size:
            raise PeerFault(peer, "BAD_SAMPLE", f"sampled ids outside the vocabulary [0, {vocabulary_size})")
        if chunk.policy_version > MAX_ENGINE_VERSION:
            raise PeerFault(peer, "BAD_VERSION", f"tokens of policy_version {chunk.policy_version}")
        reason = chunk.finish_reason
        if reason not in rollout.FinishReason.values():
            raise PeerFault(peer, "BAD_SAMPLE", f"unknown finish_reason {reason}")
        finished = reason in (rollout.FINISH_REASON_STOP, rollout.FINISH_REASON_LENGTH)
        if finished and not ids and not has_tokens:
            raise PeerFault(peer, "BAD_SAMPLE", "a sample without tokens")

    def _pass_on(self, index: int, chunk: rollout.SampleChunk) -> None:
        """Give a chunk to the agent now, or when its sample is finished if the agent asks for no early tokens."""
        chunk.sample_index = index
        if self._turn.flush_seconds is None:
            self._held.setdefault(index, []).append(chunk)
            if chunk.finish_reason == _UNFINISHED:
                return
            for held in self._held.pop(index):
                self._queue.put_nowait(held)
        elif chunk.token_ids or chunk.finish_reason != _UNFINISHED:
            self._queue.put_nowait(chunk)

    def _seconds_left(self) -> float:
        left = self._end - self._engines.clock.monotonic()
        if left <= 0:
            raise DeadlinePassed(f"the turn took longer than its deadline of {self._timeout:.3g} s")
        return left
