"""From the engine's outputs of one call to chunks for its client.

put -> cut where the weights changed -> wait for the flush -> gate (gate.py) -> deliver: a chunk
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import numpy as np

from fourfold.errors import FourfoldError, Unavailable
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.wire import EMPTY_FLOATS, Float32Array
from fourfold_rollout.engine import EMPTY_IDS, Finish, SampleOutput
from fourfold_rollout.gate import Gate
from fourfold_rollout.versions import SampleVersions

_RETRY_SECONDS: Final = 1.0
_FINISH_REASONS: Final = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    Finish.STOP: pb.FINISH_REASON_STOP,
    Finish.LENGTH: pb.FINISH_REASON_LENGTH,
    Finish.ABORTED: pb.FINISH_REASON_ABORTED,
}


class Outputs:
    """The `Sink` of one call: a sample's outputs of a flush interval become one chunk; its last goes out at once.

    No chunk has tokens of two versions.
    """

    def __init__(
        self,
        sample_count: int,
        gate: Gate,
        emit: Callable[[pb.SampleChunk], None],
        *,
        flush_seconds: float | None,
    ) -> None:
        """Belong to the running event loop.

        Args:
            sample_count: samples that must finish.
            gate: of the engine; the call begins with its present version.
            emit: takes each chunk.
            flush_seconds: from a sample's first output to the chunk with it and those that came meanwhile; None or 0:
                each output is a chunk.
        """
        self._loop = asyncio.get_running_loop()
        self._left = sample_count
        self._gate, self._emit, self._flush_seconds = gate, emit, flush_seconds
        self._first_version = gate.version
        self._versions = [SampleVersions() for _ in range(sample_count)]
        self._waiting: dict[int, tuple[int, SampleOutput, asyncio.TimerHandle]] = {}
        self._end: asyncio.Future[None] = self._loop.create_future()

    @property
    def done(self) -> bool:
        """Whether every sample has finished."""
        return self._left == 0

    async def complete(self) -> None:
        """Return when every sample has finished; raise what the engine failed of."""
        await self._end

    def put(self, index: int, output: SampleOutput) -> None:
        """Take a sample's next output."""
        for version, piece in self._versions[index].cut(output, self._gate.version):
            self._collect(index, version, piece)

    def boundary(self, index: int, token_count: int) -> None:
        """Know that the weights may change after a sample's first `token_count` tokens."""
        self._versions[index].end(token_count, self._gate.version)

    def fail(self, error: FourfoldError) -> None:
        """Know that the call cannot be completed."""
        if not self._end.done():
            self._end.set_exception(error)

    def close(self) -> None:
        """Send nothing any more; nobody waits for the end."""
        self._end.cancel()
        for _, _, timer in self._waiting.values():
            timer.cancel()
        self._waiting.clear()
        self._gate.forget(self)

    def deliver(self, index: int, version: int, output: SampleOutput) -> None:
        """Send a chunk."""
        self._emit(
            pb.SampleChunk(
                sample_index=index,
                token_ids=output.token_ids.astype("<i4", copy=False).tobytes(),
                logprobs=_pack_logprobs(output.logprobs),
                policy_version=version,
                finish_reason=_FINISH_REASONS[output.finish],
            )
        )
        if output.finish is not None:
            self._left -= 1
            if not self._left and not self._end.done():
                self._end.set_result(None)

    def drop(self, index: int, version: int) -> None:
        """End a sample whose tokens of `version` are dropped; when the whole call is of it, there is no answer."""
        if version != self._first_version:
            end = SampleOutput(token_ids=EMPTY_IDS, logprobs=EMPTY_FLOATS, finish=Finish.ABORTED)
            self.deliver(index, self._first_version, end)
            return
        self.fail(
            Unavailable(
                f"the update to version {version}, which sampled this call, was given up; try again",
                reason="UPDATE_GIVEN_UP",
                retry_after=_RETRY_SECONDS,
            )
        )

    def _collect(self, index: int, version: int, output: SampleOutput) -> None:
        if index in self._waiting:
            waiting_version, before, timer = self._waiting[index]
            if version != waiting_version:
                timer.cancel()
                self._flush(index)
            else:
                output = before + output
                if output.finish is None:
                    self._waiting[index] = version, output, timer
                    return
                timer.cancel()
                del self._waiting[index]
        if self._flush_seconds and output.finish is None:
            timer = self._loop.call_later(self._flush_seconds, self._flush, index)
            self._waiting[index] = version, output, timer
            return
        self._gate.pass_on(self, index, version, output)

    def _flush(self, index: int) -> None:
        version, output, _ = self._waiting.pop(index)
        self._gate.pass_on(self, index, version, output)


def _pack_logprobs(values: Float32Array) -> bytes:
    """Pack; a log-probability can round to slightly above 0, which no receiver accepts: then it is 0."""
    return np.minimum(values, 0).astype("<f4", copy=False).tobytes()
