"""Adds a teacher's likeliest tokens to the rows of a step, by calls to the reference services.

Nothing is kept on the disk: with k tokens, each token of the data takes 8 k bytes there, 128 GB for 10^9 tokens and
k = 16, and is read as often as the data has passes, mostly once. The calls for a step are made while the trainer works
on the one before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from fourfold.config.schema import Config
from fourfold.reference.top_tokens import top_tokens
from fourfold.sample import Sample

from ..routing.trainer_session import leaves
from .service_calls import ServiceCalls

_PART_TOKENS: Final = 1 << 13  # of a call: the forward passes of a batch of the service, and all replicas get some


class Teacher:
    """The teacher of a run of rows."""

    def __init__(self, calls: ServiceCalls, config: Config, *, vocabulary_size: int) -> None:
        """Ask the reference services of `calls`; the ids of the policy are below `vocabulary_size`."""
        self._calls, self._config, self._vocabulary_size = calls, config, vocabulary_size

    async def teach(self, samples: Sequence[Sample]) -> tuple[Sample, ...]:
        """Return samples with the teacher's tokens. A part whose service fails goes to another one.

        Raises:
            GivenUp: The services failed too often.
            ServiceMissing: No service came in time.
        """
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._teach(part)) for part in _parts(samples)]
        except BaseExceptionGroup as errors:  # the first error has cancelled the other calls
            raise next(leaves(errors)) from None
        return tuple(sample for task in tasks for sample in task.result())

    async def _teach(self, samples: Sequence[Sample]) -> list[Sample]:
        timeout, top_k = self._config.trainer.step_timeout_seconds, self._config.algorithm.loss.teacher_tokens
        limits: dict[str, Any] = {"top_k": top_k, "vocabulary_size": self._vocabulary_size, "timeout": timeout}
        rows = await self._calls.ask_reference(
            samples, self._calls.budget(), lambda client: top_tokens(client, samples, **limits)
        )
        return [
            replace(sample, teacher_ids=row.ids, teacher_logprobs=row.logprobs)
            for sample, row in zip(samples, rows, strict=True)
        ]


def _parts(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    """Yield the samples of a step in parts of about equal work, in order."""
    part, tokens = list[Sample](), 0
    for sample in samples:
        if part and tokens + len(sample.token_ids) > _PART_TOKENS:
            yield part
            part, tokens = [], 0
        part.append(sample)
        tokens += len(sample.token_ids)
    yield part
