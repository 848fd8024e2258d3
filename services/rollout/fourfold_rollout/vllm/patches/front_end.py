"""Hooks in vLLM's front end (`AsyncLLM`): output barrier, per-sample outputs, failures of the output task, shutdown.

core process --> socket --> task 1 --> outputs_queue --> task 2: OutputProcessor --> our samples
                               '-----> answers of utility calls, past the queue
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.async_llm import AsyncLLM


class _Mark:
    """Marks a place in the queue. It is sent as the statistics of a message without outputs."""

    def __init__(self) -> None:
        self.passed: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class OutputBarrier:
    """Reports when the front end has processed all outputs of its core process.

    The core process answers "pause" after its last output, but the answer overtakes outputs that wait in the queue or
    are half processed: task 2 processes a message in chunks and yields to other tasks in between. Therefore `passed`
    puts a mark into the queue, as the statistics of an empty message. Task 2 handles the statistics of a message after
    its outputs, so that the mark arrives when all outputs before it are processed.

    vLLM starts task 2 with the first request; before that, `passed` does not return.
    """

    def __init__(self, llm: Any) -> None:
        self._queue: asyncio.Queue[Any] = llm.engine_core.outputs_queue
        self._processor = llm.output_processor
        self._pass_on = self._processor.update_scheduler_stats
        self._processor.update_scheduler_stats = self._update_scheduler_stats
        self._callbacks: dict[Callable[[], None], None] = {}

    async def passed(self) -> None:
        """Return when all outputs that the front end has received so far are processed."""
        mark: Any = _Mark()
        self._queue.put_nowait(EngineCoreOutputs(scheduler_stats=mark))
        await mark.passed

    def after_next(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, after the next outputs; registering it twice changes nothing. It must not raise."""
        self._callbacks[callback] = None

    def token_count(self, request_id: str) -> int:
        """Return the number of processed tokens of a running request; `request_id` is vLLM's own."""
        return int(self._processor.request_states[request_id].detokenizer.num_output_tokens())

    def processed(self, request_id: str) -> tuple[list[int], Any]:
        """Return the processed tokens of a running request and vLLM's object with their log-probabilities."""
        state = self._processor.request_states[request_id]
        return state.detokenizer.output_token_ids, state.logprobs_processor.logprobs

    def _update_scheduler_stats(self, stats: Any) -> None:
        if isinstance(stats, _Mark):
            if not stats.passed.done():  # the caller of `passed` may have been cancelled, which cancels the future
                stats.passed.set_result(None)
            return
        self._pass_on(stats)
        if self._callbacks:
            callbacks, self._callbacks = self._callbacks, {}
            for callback in callbacks:
                callback()


def take_outputs(collector: Any, put: Callable[[Any], None]) -> None:
    """Call `put` with each output of a request instead of collecting it for a waiting task.

    vLLM's collector would need one task per sample, which wakes up for each output. `put` must not raise: vLLM would
    end the task that processes the outputs of all requests.
    """
    collector.put = put
    if (early := collector.output) is not None:
        put(early)


def on_output_failure(llm: AsyncLLM, callback: Callable[[Exception], None]) -> None:
    """Call `callback` with the error that ended vLLM's output task.

    vLLM would pass the error to every request; this callback replaces that, and is called without requests, too. The
    samples fail later, with the cause that `CrashWatch` finds.
    """
    processor: Any = llm.output_processor
    processor.propagate_error = callback


def disarm_shutdown(llm: AsyncLLM) -> None:
    """Make later calls of `shutdown` do nothing: vLLM makes one at its collection, when its modules may be gone."""
    llm.shutdown = lambda *_args, **_kwargs: None  # type: ignore[method-assign]
