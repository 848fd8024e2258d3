"""From the engine's outputs of one call to chunks for its client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import numpy as np

from fourfold.errors import Unavailable
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.wire import pack_floats, pack_ints
from fourfold_rollout.engine import Finish, SampleOutput

_FINISH_REASONS: Final = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    Finish.STOP: pb.FINISH_REASON_STOP,
    Finish.LENGTH: pb.FINISH_REASON_LENGTH,
    Finish.ABORTED: pb.FINISH_REASON_ABORTED,
}


class Outputs:
    """The `Sink` of one call: a sample's outputs of a flush interval become one chunk; its last goes out at once."""

    def __init__(
        self,
        sample_count: int,
        policy_version: int,
        emit: Callable[[pb.SampleChunk], None],
        *,
        flush_seconds: float | None,
    ) -> None:
        """Belong to the running event loop.

        Args:
            sample_count: samples that must finish.
            policy_version: whose weights sample.
            emit: takes each chunk.
            flush_seconds: from a sample's first output to the chunk with it and those that came meanwhile; None or 0:
                each output is a chunk.
        """
        self._loop = asyncio.get_running_loop()
        self._left = sample_count
        self._policy_version, self._emit, self._flush_seconds = policy_version, emit, flush_seconds
        self._waiting: dict[int, tuple[SampleOutput, asyncio.TimerHandle]] = {}
        self._end: asyncio.Future[None] = self._loop.create_future()

    @property
    def done(self) -> bool:
        """Whether every sample has finished."""
        return self._left == 0

    async def complete(self) -> None:
        """Return when every sample has finished; raise Unavailable when the engine died."""
        await self._end

    def put(self, index: int, output: SampleOutput) -> None:
        """Take a sample's next output."""
        if index in self._waiting:
            before, timer = self._waiting[index]
            output = before + output
            if output.finish is None:
                self._waiting[index] = output, timer
                return
            timer.cancel()
            del self._waiting[index]
        elif self._flush_seconds and output.finish is None:
            self._waiting[index] = output, self._loop.call_later(self._flush_seconds, self._flush, index)
            return
        self._send(index, output)

    def fail(self, error: Unavailable) -> None:
        """Know that the engine died."""
        if not self._end.done():
            self._end.set_exception(error)

    def close(self) -> None:
        """Send nothing any more; nobody waits for the end."""
        self._end.cancel()
        for _, timer in self._waiting.values():
            timer.cancel()
        self._waiting.clear()

    def _flush(self, index: int) -> None:
        self._send(index, self._waiting.pop(index)[0])

    def _send(self, index: int, output: SampleOutput) -> None:
        self._emit(
            pb.SampleChunk(
                sample_index=index,
                token_ids=pack_ints(output.token_ids),
                logprobs=_pack_logprobs(output.logprobs),
                policy_version=self._policy_version,
                finish_reason=_FINISH_REASONS[output.finish],
            )
        )
        if output.finish is not None:
            self._left -= 1
            if not self._left and not self._end.done():
                self._end.set_result(None)


def _pack_logprobs(values: list[float]) -> bytes:
    """Pack; a log-probability can round to slightly above 0, which no receiver accepts: then it is 0."""
    packed = pack_floats(values)
    array = np.frombuffer(packed, "<f4")
    return pack_floats(np.minimum(array, 0)) if (array > 0).any() else packed
