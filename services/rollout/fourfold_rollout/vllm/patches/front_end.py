"""Knows when vLLM's front end has worked off all outputs of its core process.

    core process -> socket -> task 1 -> outputs_queue -> task 2: output processor -> our samples
                                 '----> answers of utility calls, past the queue

The answer to "pause" comes after the last output on the socket, but it overtakes what waits in
the queue or is half processed: task 2 takes many outputs in pieces, with other tasks in between.
So a mark goes through the queue behind them, and comes out when all before it are done: task 2
hands the statistics of each message on last, and the mark travels as those of an empty one.
At the same place those are called who wait for the next outputs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from vllm.v1.engine import EngineCoreOutputs


class _Mark:
    """Travels in the place of statistics."""

    def __init__(self) -> None:
        self.passed: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class OutputBarrier:
    """Of one `AsyncLLM`. Its output task must be running: a request was added to it."""

    def __init__(self, llm: Any) -> None:
        """Begin to look at what the output processor gets."""
        self._queue: asyncio.Queue[Any] = llm.engine_core.outputs_queue
        self._processor = llm.output_processor
        self._pass_on = self._processor.update_scheduler_stats
        self._processor.update_scheduler_stats = self._update_scheduler_stats
        self._waiting: dict[Callable[[], None], None] = {}

    async def passed(self) -> None:
        """Return when all outputs that the front end has now are processed."""
        mark: Any = _Mark()
        self._queue.put_nowait(EngineCoreOutputs(scheduler_stats=mark))
        await mark.passed

    def after_next(self, call: Callable[[], None]) -> None:
        """Call once, when the next outputs are processed; however often it is asked for. It must raise nothing."""
        self._waiting[call] = None

    def token_count(self, request_id: str) -> int:
        """Return how many tokens of a running request are processed; `request_id` is vLLM's own."""
        return int(self._processor.request_states[request_id].detokenizer.num_output_tokens())

    def processed(self, request_id: str) -> tuple[list[int], Any]:
        """Return the tokens of a running request that are processed, and what vLLM has of their log-probabilities."""
        state = self._processor.request_states[request_id]
        return state.detokenizer.output_token_ids, state.logprobs_processor.logprobs

    def _update_scheduler_stats(self, stats: Any) -> None:
        if not isinstance(stats, _Mark):
            self._pass_on(stats)
            self._call_waiting()
        elif not stats.passed.done():  # whoever waited may be gone
            stats.passed.set_result(None)

    def _call_waiting(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, {}
            for call in waiting:
                call()
