"""Feeds the training loop with rows of data, which no engine samples.

The rows of the next step are read while the trainer works: random reads of a large store would else be waited for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from fourfold import metrics as m
from fourfold.config.schema import AsynchronyConfig
from fourfold.errors import FourfoldError, WrongState
from fourfold.host.cancellation import completed
from fourfold.sample import Sample

from ..rows.row_source import RowBatch, RowSource
from ..state.run_position import RunPosition
from ..state.samples import StepBatch
from .prepared_reference import PreparedReference
from .teacher import Teacher


class RowFeed:
    """The rows of a run that are not trained yet: a `StepSource`, whose position is the number of rows taken."""

    def __init__(
        self,
        rows: RowSource,
        reference: PreparedReference | None = None,
        teacher: Teacher | None = None,
        *,
        held_out: Collection[PreparedReference] = (),
    ) -> None:
        """Feed rows, with the log-probabilities of a reference, or a teacher's tokens, if the loss reads them.

        `held_out`: references of held-out rows, which are prepared with that of `rows`.
        """
        self._rows, self._reference, self._teacher, self._held_out = rows, reference, teacher, tuple(held_out)
        self._position, self._passes = rows.position, rows.passes_done
        self._ahead: dict[int, asyncio.Future[RowBatch | None]] = {}  # the next step, if its rows have been read
        self._taught: RowBatch | None = None  # the rows of that step with the teacher's tokens

    @property
    def data_position(self) -> int:
        """Number of rows that were taken, over all passes. Rows that were only read in advance do not count."""
        return self._position

    @property
    def running(self) -> bool:
        """False: nothing is sampled."""
        return False

    async def run(self) -> None:
        """Return at once: `look_ahead` reads rows in advance, when the batch before them has been sent."""

    async def resume(self, position: RunPosition, *, version: int, rule: AsynchronyConfig, lag_limit: int) -> None:
        """Continue with the row after those that were trained. Before step 1, have the reference computed."""
        self._ahead.clear()
        self._rows.position = self._position = position.next_position
        for each in filter(None, (self._reference, *self._held_out)):
            await each.prepare(position)

    def mark_trained(self, version: int, rule: AsynchronyConfig, *, lag_limit: int) -> None:
        """Do nothing: no sample waits for new weights."""

    async def look_ahead(self, step: int) -> Sequence[Sample]:
        """Read the rows of a step, which `take` then returns without a wait.

        Returns nothing if all passes are done, or reading or teaching the rows failed. `take` raises that error, so
        that it fails its own step and not the present one.
        """
        await self._read_ahead(step)
        if self._ahead[step].exception() is not None:
            return ()
        try:
            found = await self._ready(step)
        except FourfoldError:
            return ()
        return () if found is None else found.samples

    async def _ready(self, step: int) -> RowBatch | None:
        """Return the rows of a step with all that the loss reads; None: all passes are done."""
        await self._read_ahead(step)
        found = self._ahead[step].result()
        if found is None or self._teacher is None:
            return found
        if self._taught is None:
            self._taught = replace(found, samples=await self._teacher.teach(found.samples))
        return self._taught

    async def _read_ahead(self, step: int) -> None:
        if step not in self._ahead:
            self._ahead, self._taught = {step: asyncio.ensure_future(asyncio.to_thread(self._read, step))}, None
            # A cancelled call ends after its thread, which would otherwise move the position after a `resume`.
            await completed(asyncio.wait(self._ahead.values()))

    def _read(self, step: int) -> RowBatch | None:
        found = self._rows.take(step)
        if found is None or self._reference is None:
            return found
        return replace(found, samples=self._reference.attach(found, step))

    async def take(self, step: int) -> StepBatch:
        """Take the rows of a step; raise WrongState when all passes are done, which `steps` then exceeds."""
        batch = StepBatch()
        found = await self._ready(step)
        del self._ahead[step]
        if found is None:
            raise WrongState(
                f"step {step}: all passes over the rows are done after {step - 1} steps; set steps = {step - 1}, or "
                f"raise data.passes"
            )
        batch.rows, self._position, self._passes = found.samples, found.next_position, self._rows.passes_done
        batch.done = time.monotonic()
        return batch

    def metrics(self, batch: StepBatch, *, policy_version: int) -> dict[str, float]:
        """Return the metrics of a batch that do not need the trainer."""
        lengths = [len(sample.token_ids) for sample in batch.rows]
        return {
            m.DATA_PASS: self._passes,
            m.DATA_TOKENS: float(sum(lengths)),
            m.DATA_LOSS_TOKENS: float(sum(int(np.count_nonzero(sample.loss_mask)) for sample in batch.rows)),
            m.TOTAL_LENGTH: float(np.mean(lengths)),
        }
