"""Reads the stream of a TrainStep: one stream at a time, and never more in memory than the recipe's largest batch.

first message    the servicer checks its step against the trainer's state, and refuses any other step
admission        a second stream is refused until the first one has its answer or its caller is gone
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
    """Admits one stream at a time. Use it on the event loop only."""

    def __init__(self) -> None:
        self._step = 0  # of the admitted stream; 0: no stream is admitted

    @contextmanager
    def enter(self, step: int) -> Iterator[None]:
        """Admit a stream while the block runs. Raises Overloaded if another one is admitted."""
        if self._step:
            raise Overloaded(
                f"another TrainStep, of step {self._step}, is being read or trained; one is taken at a time: try again "
                f"when it has its answer",
                reason="TRAIN_STEP_RUNNING",
                retry_after=1.0,
            )
        self._step = step
        try:
            yield
        finally:
            self._step = 0


async def read_messages(
    stream: AsyncIterator[pb.TrainStepRequest], *, timeout: float
) -> AsyncGenerator[pb.TrainStepRequest, None]:
    """Yield the messages of a call.

    Raises:
        DeadlinePassed: no message came for 30 s, or the whole batch did not come within `timeout` seconds.
    """
    end = time.monotonic() + timeout
    while True:
        left = end - time.monotonic()
        try:
            async with asyncio.timeout(min(left, _IDLE_SECONDS)):
                request = await anext(stream, None)
        except TimeoutError:
            late = f"no message of the batch came for {_IDLE_SECONDS:g} s; send the whole batch without a pause"
            if left < _IDLE_SECONDS:
                late = (
                    f"the batch did not arrive within trainer.step_timeout_seconds = {timeout:g}; send it faster, or "
                    f"raise the limit"
                )
            raise DeadlinePassed(late) from None
        if request is None:
            return
        yield request


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
        self._most_bytes = self._most * (config.model.max_context_tokens * _TOKEN_BYTES + _SAMPLE_BYTES)
        self._count = self._bytes = 0
        self._digest = hashlib.sha256()
        self._samples = SamplesBuilder()

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
