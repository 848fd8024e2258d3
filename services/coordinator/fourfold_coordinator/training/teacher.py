"""Adds a teacher's likeliest tokens to the rows of a step, by calls to the reference services.

Nothing is kept on the disk: with k tokens, each token of the data takes 8 k bytes there, 128 GB for 10^9 tokens and
k = 16, and is read as often as the data has passes, mostly once. The calls for a step are made while the trainer works
on the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fourfold.config.schema import Config
from fourfold.reference.top_tokens import top_tokens
from fourfold.sample import Sample

from .service_calls import ServiceCalls, in_parts


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
        return tuple(await in_parts(samples, self._teach))

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
