"""Has the reference log-probabilities of a run of rows computed before its first step.

The reference is the model that training begins with, so the trainer computes it while it has these weights, in the
micro-batches of the updates: then the first update finds the policy equal to the reference to the bit. Another model,
`reference.source`, is run by the reference services, which can compute what a resumed run lacks, too. Samples that an
earlier run of the same recipe, or an interrupted start of this one, has left in the file are not computed again.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from pathlib import Path

from fourfold.coordinator.v1 import run_service_pb2 as run_pb
from fourfold.sample import Sample

from ..reporting.lineage import model_digest
from ..rows.reference_file import ReferenceFile, reference_path
from ..rows.row_source import RowBatch, RowSource
from ..state.run_position import RunPosition
from .context import RunContext
from .service_calls import in_parts

log = logging.getLogger("fourfold.coordinator")


class PreparedReference:
    """The reference of a run's rows, or of a held-out set."""

    def __init__(self, context: RunContext, rows: RowSource, held_out: str = "") -> None:
        """`held_out`: name of the held-out set that `rows` are; empty: `rows` are trained on."""
        self._context, self._rows, self._config = context, rows, context.config
        self._file, self._held_out = ReferenceFile(Path()), held_out
        self._served = context.config.needs_reference
        self._key = file_key(held_out, served=self._served)
        self._complete = False  # every sample was found in the file, or computed

    async def prepare(self, position: RunPosition) -> None:
        """Compute what is missing, before step 1; later, find the file that the run began with.

        Reference services compute what is missing later, too.

        Raises:
            WrongState: the file is gone, and so are the weights that it was computed from.
            FourfoldError: the trainer or the services cannot compute, or the disk stayed full.
        """
        context, step = self._context, position.step
        # A resumed run may have other batch sizes, and keeps the file of the trainer, whose weights are others now.
        known = context.ledger.get(self._key) if step and not self._served else ""
        weights = model_digest(context.ledger, "reference" if self._served else "model")
        path = Path(known) if known else await asyncio.to_thread(reference_path, self._config, self._rows, weights)
        self._file = ReferenceFile(path, served=self._served)
        if step and (not self._served or self._complete):
            if not path.exists():
                raise self._file.lost(step + 1, "the file is gone")
            return
        await context.disk.write(context.ledger.put, {self._key: str(path)})
        context.board.set_phase(run_pb.RUN_PHASE_PREPARING)
        rows, steps = copy.copy(self._rows), self._config.steps
        rows.position = 0
        steps = rows.steps_of_first_pass if self._held_out else min(steps, rows.steps_of_first_pass or steps)
        began, computed = time.monotonic(), 0
        for number in range(1, steps + 1):
            batch = await asyncio.to_thread(rows.take, number)
            if batch is None:
                break
            if not await asyncio.to_thread(self._file.has, batch):
                computed += len(batch.samples)
                for part in batch.parts():
                    await self._compute(part, number)
            context.board.set_progress(number / steps)
        if computed:
            await context.disk.write_in_thread(self._file.sync)
        self._complete = True
        log.info(
            "reference prepared: set=%s steps=%d computed_samples=%d seconds=%.1f file=%s",
            self._held_out or "train", steps, computed, time.monotonic() - began, path,
        )  # fmt: skip

    async def _compute(self, part: RowBatch, step: int) -> None:
        timeout, calls = self._config.trainer.step_timeout_seconds, self._context.service_calls
        if self._served:
            rows = await in_parts(part.samples, lambda samples: calls.reference(samples, calls.budget()))
        else:
            async with self._context.broker.lock:
                rows = await self._context.session.call(
                    "ComputeLogprobs", lambda r: r.trainer.reference_logprobs(part.samples, step=step, timeout=timeout)
                )
        await self._context.disk.write_in_thread(self._file.write, part, rows)

    def attach(self, batch: RowBatch, step: int) -> tuple[Sample, ...]:
        """Return the samples of a step with their reference, as `ReferenceFile.attach`. Call it in a thread."""
        return self._file.attach(batch, step)


def file_key(held_out: str, *, served: bool) -> str:
    """Return the key of the ledger for the file of a held-out set, or of the rows to train on.

    Reference services and the trainer have files of their own: a resumed run may have another `reference.source`.
    """
    return f"{'served_' if served else ''}reference_file {held_out}".strip()
