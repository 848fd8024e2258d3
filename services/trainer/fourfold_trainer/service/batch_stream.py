"""The stream of a TrainStep: one at a time, and never more of it in memory than the recipe's largest batch.

    first message   its step is checked against the trainer's state: another step is refused here
    one at a time   a second stream is refused until the first one has its answer or its caller is gone
    the others      decoded while the next one travels; counted against the limits of the recipe

The batch of the last step, sent again, is only hashed: its answer is stored, and its samples are not needed.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Final

from fourfold.arrays import Sample
from fourfold.config import Config
from fourfold.errors import DeadlinePassed, InvalidInput, Overloaded
from fourfold.trainer.v1 import trainer_service_pb2 as pb
from fourfold.types.v1.experience_pb2 import Experience

_MESSAGE_BYTES: Final = 4 << 20
# Largest encoding of a token: two int32, three float32 and two flags less one, and a version span of its own.
_TOKEN_BYTES: Final = 18 + 24
# The same of what a sample has once: ids, scorer, score, tags and lengths.
_SAMPLE_BYTES: Final = 4096
# A caller that sends nothing for so long has stopped; its stream would keep all others out.
_IDLE_SECONDS: Final = 30.0

Decode = Callable[[Experience], Sample]


class StreamAdmission:
    """Admits one stream at a time. Belongs to the event loop."""

    def __init__(self) -> None:
        self._step = 0
        """Of the stream that is admitted; 0: none is."""

    @contextmanager
    def enter(self, step: int) -> Iterator[None]:
        """Admit a stream for as long as the block runs.

        Raises:
            Overloaded: another one is admitted. The caller may try again.
        """
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

    Args:
        stream: as gRPC gives it.
        timeout: seconds for all of them.

    Raises:
        DeadlinePassed: one did not come in time.
    """
    end = time.monotonic() + timeout
    while True:
        seconds = min(end - time.monotonic(), _IDLE_SECONDS)
        try:
            async with asyncio.timeout(seconds):
                request = await anext(stream, None)
        except TimeoutError:
            raise DeadlinePassed(
                f"no message of the batch came for {seconds:.0f} s; send the whole batch without a pause"
            ) from None
        if request is None:
            return
        yield request


class IncomingBatch:
    """What has come of one batch. Not more than one thread at a time may call it."""

    def __init__(self, step: int, config: Config, decode: Decode, *, keep: bool) -> None:
        """Begin.

        Args:
            step: that every message must carry.
            config: of the run; it limits the batch.
            decode: checks and unpacks one sample.
            keep: False: the samples are hashed and forgotten.
        """
        self._step, self._decode, self._keep = step, decode, keep
        self._most = config.batch.samples_per_step
        self._most_bytes = self._most * (config.model.max_context_tokens * _TOKEN_BYTES + _SAMPLE_BYTES)
        self._count = self._bytes = 0
        self._digest = hashlib.sha256()
        self.samples: list[Sample] = []

    @property
    def sha256(self) -> str:
        """Digest of the batch, hexadecimal; it does not depend on how the batch was cut into messages."""
        return self._digest.hexdigest()

    def add(self, request: pb.TrainStepRequest) -> None:
        """Take one message.

        Raises:
            InvalidInput: another step, more than the recipe's largest batch, or a malformed sample.
        """
        if request.step != self._step:
            raise InvalidInput(f"step is {request.step}; it must be {self._step} in every message of this call")
        self._count += len(request.experiences)
        if self._count > self._most:
            raise InvalidInput(
                f"the batch has more than {self._most} samples; batch.prompts_per_step x batch.group_size of the "
                f"trainer's recipe allow no more: send fewer, or raise one of them"
            )
        size = 0
        for message in request.experiences:
            data = message.SerializeToString(deterministic=True)
            size += len(data)
            self._bytes += len(data)
            if size > _MESSAGE_BYTES:
                raise InvalidInput(f"a message has more than {_MESSAGE_BYTES} bytes of experiences; send several")
            if self._bytes > self._most_bytes:
                raise InvalidInput(
                    f"the batch has more than {self._most_bytes} bytes, which {self._most} samples of "
                    f"model.max_context_tokens never have; send what the proto asks for alone"
                )
            self._digest.update(len(data).to_bytes(8, "little"))
            self._digest.update(data)
            if self._keep:
                self.samples.append(self._decode(message))
