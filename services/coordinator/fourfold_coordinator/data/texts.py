"""Decodes the tokens of many groups in one call of another thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from fourfold.arrays import Int32Array

_BATCH_TOKENS: Final = 1 << 20  # most tokens of one call, which takes about 15 ms


@dataclass(slots=True)
class _Batch:
    """Token ids that are decoded in one call."""

    sequences: list[Int32Array] = field(default_factory=list)
    tokens: int = 0
    texts: list[str] | None = None  # when they are decoded


class TextDecoder:
    """Decodes in threads, in batches: a call of a thread costs more than decoding a group of short samples."""

    def __init__(self, decode: Callable[[Sequence[Int32Array]], list[str]]) -> None:
        """`decode` returns the texts of token ids, and is called in other threads, once at a time."""
        self._decode = decode
        self._lock = asyncio.Lock()  # held by the task whose thread is decoding
        self._batch = _Batch()  # the batch that accepts further token ids

    async def decode(self, sequences: Sequence[Int32Array]) -> list[str]:
        """Return the text of each sequence. Calls that arrive during a decode share the next one."""
        if self._batch.tokens > _BATCH_TOKENS:
            self._batch = _Batch()
        batch, start = self._batch, len(self._batch.sequences)
        batch.sequences += sequences
        batch.tokens += sum(map(len, sequences))
        async with self._lock:  # the first of a batch decodes it; the others find its texts
            if batch.texts is None:
                if self._batch is batch:
                    self._batch = _Batch()
                batch.texts = await asyncio.to_thread(self._decode, batch.sequences)
        return batch.texts[start : start + len(sequences)]
