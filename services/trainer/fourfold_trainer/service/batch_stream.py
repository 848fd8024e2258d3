"""Reads the streams of TrainStep, and never keeps more in memory than two of the recipe's largest batches.

first message    the servicer checks its step against the trainer's state, and refuses any other step
admission        one stream of the step in turn, and one of the step after it, which trains after the first; others
                 are refused
every message    decoded while the next one travels; counted against the limits of the recipe
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Final

from fourfold.bounds import TRAIN_MESSAGE_BYTES
from fourfold.config import Config
from fourfold.errors import DeadlinePassed, InvalidInput, Overloaded
from fourfold.sample import Sample
from fourfold.sample.columns import Samples, SamplesBuilder
from fourfold.trainer.v1 import trainer_service_pb2 as pb
from fourfold.types.v1.experience_pb2 import Experience

# Largest encoding of a token: an int32, three float32 and two flags, and a version span of its own.
_TOKEN_BYTES: Final = 18 + 24
# Largest encoding of the fields that a sample has once: ids, scorer, score, tags and lengths.
_SAMPLE_BYTES: Final = 4096
# After this time without a message, the caller counts as dead. Its open stream would block all others.
_IDLE_SECONDS: Final = 30.0

Decode = Callable[[Experience], Sample]


class StreamAdmission:
    """Admits two streams at a time, of different steps. Use it on the event loop only."""

    def __init__(self) -> None:
        self.steps: set[int] = set()
        """Steps of the admitted streams."""

    @contextmanager
    def enter(self, step: int) -> Iterator[None]:
        """Admit a stream while the block runs. Raises Overloaded if another one of this step is, or two others."""
        if step in self.steps or len(self.steps) > 1:
            raise Overloaded(
                f"another TrainStep, of step {min(self.steps)}, is being read or trained; one is taken at a time, and "
                f"the step after it: try again when it has its answer",
                reason="TRAIN_STEP_RUNNING",
                retry_after=1.0,
            )
        self.steps.add(step)
        try:
            yield
        finally:
            self.steps.remove(step)


async def read_messages(
    stream: AsyncIterator[pb.TrainStepRequest], *, timeout: float, may_wait: Callable[[], bool] = lambda: False
) -> AsyncGenerator[pb.TrainStepRequest, None]:
    """Yield the messages of a call. While `may_wait()`, it may pause: it waits for the step before it.

    Raises:
        DeadlinePassed: no message came for 30 s, or the whole batch did not come within `timeout` seconds.
    """
    end = time.monotonic() + timeout
    while True:
        message = asyncio.ensure_future(anext(stream, None))
        try:
            # A read of gRPC that was cancelled cannot be repeated, so one read may see many pauses.
            while not message.done():
                left = end - time.monotonic()
                done, _ = await asyncio.wait({message}, timeout=max(min(left, _IDLE_SECONDS), 0.0))
                if not done and (left < _IDLE_SECONDS or not may_wait()):
                    raise DeadlinePassed(_late(left, timeout))
            request = message.result()
        finally:
            message.cancel()
        if request is None:
            return
        yield request


def _late(left: float, timeout: float) -> str:
    if left < _IDLE_SECONDS:
        return (
            f"the batch did not arrive within trainer.step_timeout_seconds = {timeout:g}; send it faster, or raise the "
            f"limit"
        )
    return f"no message of the batch came for {_IDLE_SECONDS:g} s; send the whole batch without a pause"


class IncomingBatch:
    """Collects the samples of one batch, and hashes and counts its bytes. One thread at a time may use it."""

    def __init__(self, step: int, config: Config, decode: Decode, *, keep: bool) -> None:
        """Begin an empty batch.

        Args:
            step: required in every message.
            config: recipe of the run, which limits the size of the batch.
            decode: checks and unpacks one sample.
            keep: False only hashes the samples, as for the batch of the last step, whose answer is stored.
        """
        self._step, self._decode, self._keep = step, decode, keep
        segments = config.agents.max_segments if config.agents.source != "none" else 1
        self._most = config.batch.samples_per_step * config.samples_per_row * segments
        token_bytes = _TOKEN_BYTES + 8 * config.algorithm.loss.teacher_tokens  # an id and a log-probability of each
        self._most_bytes = self._most * (config.model.max_context_tokens * token_bytes + _SAMPLE_BYTES)
        self._count = self._bytes = 0
        self._digest = hashlib.sha256()
        self._samples = SamplesBuilder()
        self.complete = False
        """Whether a message had begin = true, which none may follow."""

    @property
    def samples(self) -> Samples:
        """Return the samples, in the caller's order, once the last message is added."""
        return self._samples.build()

    @property
    def sha256(self) -> str:
        """Return the digest of the batch, hexadecimal. It does not depend on the cuts between messages."""
        return self._digest.hexdigest()

    def add(self, request: pb.TrainStepRequest) -> None:
        """Add one message. Raises InvalidInput for another step, a batch that is too large, or a malformed sample."""
        if request.step != self._step:
            raise InvalidInput(f"step is {request.step}; it must be {self._step} in every message of this call")
        if self.complete:
            raise InvalidInput("a message came after the one with begin = true, which must be the last one")
        self.complete = request.begin
        self._count += len(request.experiences)
        if self._count > self._most:
            raise InvalidInput(
                f"the batch has more than {self._most} samples; batch.prompts_per_step x batch.group_size of the "
                f"trainer's recipe, times agents.max_segments with agents, or batch.rows_per_step, allow no more: send "
                f"fewer, or raise one of them"
            )
        size = 0
        for message in request.experiences:
            data = message.SerializeToString(deterministic=True)
            size += len(data)
            self._bytes += len(data)
            if size > TRAIN_MESSAGE_BYTES:
                raise InvalidInput(f"a message has more than {TRAIN_MESSAGE_BYTES} bytes of experiences; send several")
            if self._bytes > self._most_bytes:
                raise InvalidInput(
                    f"the batch has more than {self._most_bytes} bytes, which {self._most} samples of "
                    f"model.max_context_tokens never have; send only the fields of the proto"
                )
            self._digest.update(len(data).to_bytes(8, "little"))
            self._digest.update(data)
            if self._keep:
                self._samples.add(self._decode(message))
