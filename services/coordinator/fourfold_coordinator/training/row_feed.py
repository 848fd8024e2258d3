"""Feeds the training loop with rows of data, which no engine samples."""

from __future__ import annotations

import asyncio
import time

import numpy as np

from fourfold import metrics as m
from fourfold.config.schema import AsynchronyConfig
from fourfold.errors import WrongState

from ..rows.row_source import RowSource
from ..state.run_position import RunPosition
from ..state.samples import StepBatch


class RowFeed:
    """The rows of a run that are not trained yet: a `StepSource`, whose position is the number of rows taken."""

    def __init__(self, rows: RowSource) -> None:
        self._rows = rows

    @property
    def data_position(self) -> int:
        """Number of rows that were taken, over all passes."""
        return self._rows.position

    @property
    def running(self) -> bool:
        """False: nothing is sampled."""
        return False

    async def run(self) -> None:
        """Return at once: there is nothing to make in advance."""

    async def resume(self, position: RunPosition, *, version: int, rule: AsynchronyConfig, lag_limit: int) -> None:
        """Continue with the row after those that were trained."""
        self._rows.position = position.next_position

    def mark_trained(self, version: int, rule: AsynchronyConfig, *, lag_limit: int) -> None:
        """Do nothing: no sample waits for new weights."""

    async def take(self, step: int) -> StepBatch:
        """Take the rows of a step; raise WrongState when all passes are done, which `steps` then exceeds."""
        batch = StepBatch()
        found = await asyncio.to_thread(self._rows.take, step)
        if found is None:
            raise WrongState(
                f"step {step}: all passes over the rows are done after {step - 1} steps; set steps = {step - 1}, or "
                f"raise data.passes"
            )
        batch.rows = found.samples
        batch.rolled = batch.scored = batch.done = time.monotonic()
        return batch

    def metrics(self, batch: StepBatch, *, policy_version: int) -> dict[str, float]:
        """Return the metrics of a batch that do not need the trainer."""
        lengths = [len(sample.token_ids) for sample in batch.rows]
        return {
            m.DATA_PASS: self._rows.passes_done,
            m.DATA_TOKENS: float(sum(lengths)),
            m.DATA_LOSS_TOKENS: float(sum(int(np.count_nonzero(sample.loss_mask)) for sample in batch.rows)),
            m.TOTAL_LENGTH: float(np.mean(lengths)),
        }
