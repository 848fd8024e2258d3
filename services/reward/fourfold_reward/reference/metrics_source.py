"""Exports the samples and batches at the reference service's metrics endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fourfold.service.exporter import Exported, Reading, Source
from fourfold_reward.reference.batcher import DynamicBatcher

_SAMPLES: Final = Exported("fourfold_reference_samples_total", "counter", "samples with log-probabilities computed")
_TOKENS: Final = Exported("fourfold_reference_tokens_total", "counter", "tokens of these samples, prompts included")
_SECONDS: Final = Exported("fourfold_reference_batch_seconds", "histogram", "computation of one batch of calls")
_WAITING: Final = Exported("fourfold_reference_waiting_calls", "gauge", "calls that wait for the next batch")
EXPORTED: Final = (_SAMPLES, _TOKENS, _SECONDS, _WAITING)


def reference_source(batcher: DynamicBatcher) -> Source:
    def read() -> Iterator[Reading]:
        yield _SAMPLES, batcher.samples
        yield _TOKENS, batcher.tokens
        yield _SECONDS, batcher.batch_seconds
        yield _WAITING, batcher.waiting_calls

    return read
