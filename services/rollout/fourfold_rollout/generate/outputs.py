"""Turns the engine's outputs for one call into chunks for its client; no chunk has tokens of two policy versions.

put --> split at changes of the weights (SampleVersions) --> TokenHold --> deliver: one chunk
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np

from fourfold.arrays import EMPTY_FLOATS, Float32Array
from fourfold.errors import FourfoldError, Unavailable
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.sample.sampled import CHUNK_FIELDS, cut_columns, pack_columns
from fourfold_rollout.engine import EMPTY_IDS, EngineSample, Finish, SampleOutput
from fourfold_rollout.pause.hold import TokenHold

_RETRY_SECONDS: Final = 1.0
_FINISH_REASONS: Final = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    Finish.STOP: pb.FINISH_REASON_STOP,
    Finish.LENGTH: pb.FINISH_REASON_LENGTH,
    Finish.ABORTED: pb.FINISH_REASON_ABORTED,
}


class SampleVersions:
    """The boundaries between the versions in one sample.

    When sampling pauses for new weights, the engine reports how many tokens exist. Tokens may be put later; these
    counts tell which version sampled each.
    """

    def __init__(self) -> None:
        self._given = 0
        self._ends: deque[tuple[int, int]] = deque()  # (token count of the sample, version of the last of them)

    def end(self, token_count: int, version: int) -> None:
        """Record that the first `token_count` tokens exist; those without a version yet are of `version`."""
        counted = self._ends[-1][0] if self._ends else self._given
        if token_count <= counted:
            return
        if self._ends and self._ends[-1][1] == version:
            self._ends.pop()
        self._ends.append((token_count, version))

    def cut(self, output: SampleOutput, version: int) -> list[tuple[int, SampleOutput]]:
        """Return an output as (version, tokens) in order; tokens after the last boundary are of `version`.

        Neighbours have different versions. Only the last piece has the finish, and it may be empty.
        """
        start, self._given = self._given, self._given + len(output.token_ids)
        if not self._ends:
            return [(version, output)]
        bounds: list[tuple[int, int]] = []
        at = start
        for end, sampled_by in (*self._ends, (self._given, version)):
            upto = min(end, self._given)
            if upto <= at:
                continue
            if bounds and bounds[-1][1] == sampled_by:
                bounds.pop()
            bounds.append((upto, sampled_by))
            at = upto
        while self._ends and self._ends[0][0] <= self._given:
            self._ends.popleft()
        return _slices(output, start, bounds) or [(version, output)]


class CallOutputs:
    """Implements `SampleSink` (calls from the engine) and `TokenSink` (calls from the token hold) for one call."""

    def __init__(self, sample_count: int, token_hold: TokenHold, emit: Callable[[pb.SampleChunk], None]) -> None:
        """Begin a call on the running event loop at the hold's current version; `emit` gets each chunk."""
        self._loop = asyncio.get_running_loop()
        self._left = sample_count
        self._token_hold, self._emit = token_hold, emit
        self._first_version = token_hold.version
        self._versions = [SampleVersions() for _ in range(sample_count)]
        self._timer: asyncio.TimerHandle | None = None
        self._end: asyncio.Future[None] = self._loop.create_future()

    @property
    def done(self) -> bool:
        return self._left == 0

    async def complete(self) -> None:
        """Return when every sample has finished; raise the error given to `fail`."""
        await self._end

    def put(self, index: int, output: SampleOutput) -> None:
        for version, piece in self._versions[index].cut(output, self._token_hold.version):
            self._token_hold.pass_on(self, index, version, piece)

    def flush_every(self, seconds: float, samples: Sequence[EngineSample]) -> None:
        """Flush the samples now and every `seconds` seconds until the call ends.

        A chunk then has many tokens. One chunk per token would be too many: hundreds of samples get a token in every
        engine step, and one thread serves all of them.
        """
        if self._end.done():
            return  # the samples may have ended before all of them were submitted
        self._timer = self._loop.call_later(seconds, partial(self.flush_every, seconds, samples))
        for sample in samples:
            sample.flush()

    def boundary(self, index: int, token_count: int) -> None:
        self._versions[index].end(token_count, self._token_hold.version)

    def fail(self, error: FourfoldError) -> None:
        if not self._end.done():
            self._end.set_exception(error)

    def close(self) -> None:
        """Stop emitting chunks. `complete` must not be awaited after this."""
        self._end.cancel()
        self._stop_flushing()
        self._token_hold.forget(self)

    def deliver(self, index: int, version: int, output: SampleOutput) -> None:
        # Rounding can make a log-probability slightly positive, which receivers reject. The sink owns the array.
        np.minimum(output.logprobs, 0, out=output.logprobs)
        chunk = pb.SampleChunk(sample_index=index, policy_version=version, finish_reason=_FINISH_REASONS[output.finish])
        for name, data in pack_columns(output).items():
            setattr(chunk, CHUNK_FIELDS[name], data)
        self._emit(chunk)
        if output.finish is not None:
            self._left -= 1
            if not self._left:
                self._stop_flushing()
                if not self._end.done():
                    self._end.set_result(None)

    def drop(self, index: int, version: int) -> None:
        """End a sample whose tokens of `version` were dropped. If the call began with `version`, the call fails."""
        if version != self._first_version:
            end = SampleOutput(token_ids=EMPTY_IDS, logprobs=EMPTY_FLOATS, finish=Finish.ABORTED)
            self.deliver(index, self._first_version, end)
            return
        self.fail(_given_up(version))

    def _stop_flushing(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class ReleasedLogprobs:
    """Implements `TokenSink` for the log-probabilities of one ScoreTokens call."""

    def __init__(self) -> None:
        """Begin on the running event loop."""
        self.logprobs: asyncio.Future[Float32Array] = asyncio.get_running_loop().create_future()

    def pass_through(self, token_hold: TokenHold, version: int, values: Sequence[float]) -> None:
        """Pass values of a version to `logprobs` when the hold releases them. Values above 0 become 0."""
        logprobs = np.minimum(np.asarray(values, np.float32), 0)
        output = SampleOutput(token_ids=EMPTY_IDS, logprobs=logprobs, finish=Finish.LENGTH)
        self.logprobs.add_done_callback(lambda _: token_hold.forget(self))
        token_hold.pass_on(self, 0, version, output)

    def deliver(self, index: int, version: int, output: SampleOutput) -> None:
        if not self.logprobs.done():
            self.logprobs.set_result(output.logprobs)

    def drop(self, index: int, version: int) -> None:
        if not self.logprobs.done():
            self.logprobs.set_exception(_given_up(version))


def _given_up(version: int) -> Unavailable:
    return Unavailable(
        f"the update to version {version}, which sampled this call, was given up; try again",
        reason="UPDATE_GIVEN_UP",
        retry_after=_RETRY_SECONDS,
    )


def _slices(output: SampleOutput, start: int, bounds: list[tuple[int, int]]) -> list[tuple[int, SampleOutput]]:
    """Return the pieces that end at `bounds`, which are positions in the sample; the output begins at `start`."""
    pieces: list[tuple[int, SampleOutput]] = []
    low = 0
    for index, (end, version) in enumerate(bounds):
        high = end - start
        finish = output.finish if index == len(bounds) - 1 else None
        pieces.append((version, SampleOutput(finish=finish, **cut_columns(output, slice(low, high)))))
        low = high
    return pieces
