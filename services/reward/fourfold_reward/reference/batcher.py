"""Batches the samples of concurrent calls dynamically, so that forward passes are full.

    calls --FIFO--> batch: up to 8 forward passes of samples --one thread--> rows of each call --> next batch

The completions of one prompt fill about half a forward pass. A call on an idle service starts at once; calls that
arrive while a batch is computed form the next one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import torch

from fourfold.arrays import Int32Array
from fourfold.errors import WrongState
from fourfold.host.timing import Histogram
from fourfold.nn.gpu_errors import explain_out_of_memory, is_fatal
from fourfold_reward.reference.model import ReferenceModel, SampleRows, Stopped

_log = logging.getLogger(__name__)
# Many passes per batch waste little on the last, partly filled pass. Few passes keep the wait for a response short.
PASSES_PER_BATCH: Final = 8
_NEWEST_WEIGHT: Final = 0.2


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    token_ids: Sequence[Int32Array]
    temperatures: Sequence[float]
    top_k: int
    rows: asyncio.Future[list[SampleRows]]  # cancelled when the client disconnects


class DynamicBatcher:
    """Queue of calls for one model. Use it from one event loop; the model runs in a thread, one batch at a time."""

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        """Make a queue; `on_failure` is called with a message when no pass is possible any more."""
        self._on_failure = on_failure
        self.mean_seconds = 1.0  # moving average of the duration of a batch
        # Totals of the batches so far; the thread writes them.
        self.batch_seconds = Histogram()
        self.samples = self.tokens = 0
        # Set it to stop: the running batch ends before its next forward pass, and waiting calls fail.
        self.closing = threading.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reference")
        self._waiting: deque[_Call] = deque()
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting_calls(self) -> int:
        return len(self._waiting)

    async def logprobs(
        self, model: ReferenceModel, token_ids: Sequence[Int32Array], temperatures: Sequence[float], *, top_k: int = 0
    ) -> list[SampleRows]:
        """Return the result of `model.logprobs` for the samples of one call, which may have more likely tokens.

        Raises:
            Stopped: `closing` was set, or no pass is possible any more.
            WrongState: the GPU has no memory for a pass.
        """
        rows = asyncio.get_running_loop().create_future()
        call = _Call(token_ids=token_ids, temperatures=temperatures, top_k=top_k, rows=rows)
        self._waiting.append(call)
        if self._task is None:
            self._task = asyncio.create_task(self._run(model))
        return await call.rows

    async def _run(self, model: ReferenceModel) -> None:
        """Compute batches until no call waits."""
        loop = asyncio.get_running_loop()
        while calls := self._next_batch(model.tokens_per_batch * PASSES_PER_BATCH):
            done = loop.run_in_executor(self._thread, self._compute, model, calls)
            await asyncio.wait({done})  # not `await done`: an error belongs to the calls of this batch only
            error = self._caller_error(done.exception(), model)
            for index, call in enumerate(calls):
                if call.rows.cancelled():
                    continue
                if error is not None:
                    call.rows.set_exception(error)
                else:
                    call.rows.set_result(done.result()[index])
        self._task = None

    def _caller_error(self, error: BaseException | None, model: ReferenceModel) -> BaseException | None:
        """Return the exception of the calls of a batch for an error of the model."""
        if isinstance(error, torch.OutOfMemoryError):
            return WrongState(
                f"the GPU has no memory for a pass ("
                f"{explain_out_of_memory(error)}); lower reference.tokens_per_batch = {model.tokens_per_batch}",
                reason="OUT_OF_MEMORY",
            )
        if error is None or not is_fatal(error):
            return error
        _log.critical("forward passes ended", exc_info=error)
        self.closing.set()
        self._on_failure(f"the reference model failed: {type(error).__name__}: {error}"[:2000])
        return Stopped()

    def _next_batch(self, max_tokens: int) -> list[_Call]:
        """Take the oldest waiting calls that fit, and at least one."""
        batch: list[_Call] = []
        tokens = 0
        while self._waiting:
            call = self._waiting[0]
            if not call.rows.done():
                tokens += sum(map(len, call.token_ids))
                if batch and tokens > max_tokens:
                    break
                batch.append(call)
            self._waiting.popleft()
        return batch

    def _compute(self, model: ReferenceModel, calls: Sequence[_Call]) -> list[list[SampleRows]]:
        """Return the rows of each call. Runs in the thread."""
        started = time.monotonic()
        rows = iter(
            model.logprobs(
                [ids for call in calls for ids in call.token_ids],
                [temperature for call in calls for temperature in call.temperatures],
                top_k=max(call.top_k for call in calls),
                stopped=lambda: self.closing.is_set() or all(call.rows.cancelled() for call in calls),
            )
        )
        seconds = time.monotonic() - started
        self.mean_seconds += _NEWEST_WEIGHT * (seconds - self.mean_seconds)
        self.batch_seconds.add(seconds)
        self.samples += sum(len(call.token_ids) for call in calls)
        self.tokens += sum(len(ids) for call in calls for ids in call.token_ids)
        return [[next(rows) for _ in call.token_ids] for call in calls]
