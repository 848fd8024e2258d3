"""Has the trainer compute the reference log-probabilities of a run of rows before its first step.

The reference is the model that training begins with, so the trainer computes it while it has these weights, in the
micro-batches of the updates: then the first update finds the policy equal to the reference to the bit. Samples that an
earlier run of the same recipe, or an interrupted start of this one, has left in the file are not computed again.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from fourfold.coordinator.v1 import run_service_pb2 as run_pb
from fourfold.errors import WrongState
from fourfold.sample import Sample

from ..rows.reference_file import ReferenceFile, reference_path
from ..rows.row_source import RowBatch, RowSource
from ..state.run_position import RunPosition
from .context import RunContext

log = logging.getLogger("fourfold.coordinator")

_CALL_TOKENS: Final = 1 << 20  # of about 5 bytes: a call takes at most 8 MiB
_FILE_KEY: Final = "reference_file"  # key in the ledger


class PreparedReference:
    """The reference of a run's rows."""

    def __init__(self, context: RunContext, rows: RowSource) -> None:
        self._context, self._rows, self._config = context, rows, context.config
        self._file = ReferenceFile(Path())

    async def prepare(self, position: RunPosition) -> None:
        """Compute what is missing, before step 1; later, find the file that the run began with.

        Raises:
            WrongState: the file is gone, and so are the weights that it was computed from.
            FourfoldError: the trainer cannot compute, or the disk stayed full.
        """
        context, step = self._context, position.step
        # A resumed run may have other batch sizes, and keeps its file. Before step 1, the sizes of now decide.
        known = context.ledger.get(_FILE_KEY) if step else ""
        path = Path(known) if known else await asyncio.to_thread(reference_path, self._config, self._rows)
        self._file = ReferenceFile(path)
        if step:
            if not path.exists():
                raise self._lost(step + 1, "the file is gone")
            return
        await context.disk.write(context.ledger.put, {_FILE_KEY: str(path)})
        context.board.set_phase(run_pb.RUN_PHASE_PREPARING)
        rows, steps = copy.copy(self._rows), self._config.steps
        rows.position, steps = 0, min(steps, rows.steps_of_first_pass or steps)
        began, computed = time.monotonic(), 0
        for number in range(1, steps + 1):
            batch = await asyncio.to_thread(rows.take, number)
            if batch is None:
                break
            if not await asyncio.to_thread(self._file.has, batch):
                computed += len(batch.samples)
                for part in _parts(batch):
                    await self._compute(part, number)
            context.board.set_progress(number / steps)
        if computed:
            await context.disk.write_in_thread(self._file.sync)
        log.info(
            "reference prepared: steps=%d computed_samples=%d seconds=%.1f file=%s",
            steps, computed, time.monotonic() - began, path,
        )  # fmt: skip

    async def _compute(self, part: RowBatch, step: int) -> None:
        timeout = self._config.trainer.step_timeout_seconds
        async with self._context.broker.lock:
            rows = await self._context.session.call(
                "ComputeLogprobs", lambda r: r.trainer.reference_logprobs(part.samples, step=step, timeout=timeout)
            )
        await self._context.disk.write_in_thread(self._file.write, part, rows)

    def attach(self, batch: RowBatch, step: int) -> tuple[Sample, ...]:
        """Return the samples of a step with their reference log-probabilities. Reads a file: call it in a thread.

        Raises:
            WrongState: those of a sample were not computed, or are damaged.
        """
        found = list[Sample]()
        for slot, sample in zip(batch.slots, batch.samples, strict=True):
            logprobs = self._file.read(slot, sample)
            if logprobs is None:
                raise self._lost(step, f"it has none, or damaged ones, for sample {sample.sample_id}")
            found.append(replace(sample, reference_logprobs=logprobs))
        return tuple(found)

    def _lost(self, step: int, what: str) -> WrongState:
        return WrongState(
            f"step {step} needs the reference log-probabilities of {self._file.path}, and {what}. They are those of "
            f"the weights before step 1, which the trainer has no more: start a run of the recipe that this one began "
            f"with, for as many steps, under another name; stop it when its step 1 begins, and resume this run"
        )


def _parts(batch: RowBatch) -> Iterator[RowBatch]:
    """Yield the samples of a step in parts that one call can carry; the samples of a unit stay together.

    A larger step has other micro-batches at the borders of its parts, and the first update then sees rounding there.
    """
    begin, tokens = 0, 0
    for i, sample in enumerate(batch.samples):
        new_unit = i and sample.group_id != batch.samples[i - 1].group_id
        if new_unit and tokens + 2 * len(sample.token_ids) > _CALL_TOKENS:
            yield _part(batch, begin, i)
            begin, tokens = i, 0
        tokens += len(sample.token_ids)
    yield _part(batch, begin, len(batch.samples))


def _part(batch: RowBatch, begin: int, end: int) -> RowBatch:
    return replace(batch, samples=batch.samples[begin:end], slots=batch.slots[begin:end])
