"""Samples of many calls, looked up together.

    calls --FIFO--> round: as many as fill a few forward passes --one thread--> every call its rows --> the next round

One prompt's answers fill half a pass; those of all prompts that finished meanwhile fill all passes but the last. The
first call that comes does not wait for others: it is a round of its own, and they gather behind it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol

from fourfold.arrays import Float32Array, Int32Array

# Forward passes of one round: enough to be filled evenly, and few enough that nobody waits long for an answer.
PASSES_PER_ROUND: Final = 8
_NEWEST_SHARE: Final = 0.2


class Model(Protocol):
    """What is asked of `ReferenceModel`."""

    @property
    def tokens_per_batch(self) -> int:
        """Most tokens in one forward pass."""

    def logprobs(
        self, token_ids: Sequence[Int32Array], temperatures: Sequence[float], *, stopped: Callable[[], bool]
    ) -> list[Float32Array]:
        """Look samples up; blocks."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    token_ids: Sequence[Int32Array]
    temperatures: Sequence[float]
    rows: asyncio.Future[list[Float32Array]]
    gone: bool = False
    """Nobody waits for it any more."""

    @property
    def token_count(self) -> int:
        return sum(map(len, self.token_ids))


class Merger:
    """Belongs to one event loop; the model runs in a thread, one round at a time."""

    def __init__(self) -> None:
        self.mean_seconds = 1.0
        """That a round takes, the newest count most."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reference")
        self._closing = threading.Event()
        self._waiting: deque[_Call] = deque()
        self._rounds: asyncio.Task[None] | None = None

    @property
    def closing(self) -> bool:
        """Whether `close` was called."""
        return self._closing.is_set()

    def close(self) -> None:
        """Stop what is being computed at its next pass, and what waits in its turn."""
        self._closing.set()

    async def look_up(
        self, model: Model, token_ids: Sequence[Int32Array], temperatures: Sequence[float]
    ) -> list[Float32Array]:
        """Return the model's rows, in order.

        Raises:
            Stopped: `close` was called.
        """
        call = _Call(token_ids=token_ids, temperatures=temperatures, rows=asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        if self._rounds is None:
            self._rounds = asyncio.create_task(self._work(model))
        try:
            return await call.rows
        finally:
            call.gone = True

    async def _work(self, model: Model) -> None:
        """Make rounds until nobody waits."""
        loop = asyncio.get_running_loop()
        while calls := self._next_round(model.tokens_per_batch * PASSES_PER_ROUND):
            done = loop.run_in_executor(self._thread, self._compute, model, calls)
            await asyncio.wait({done})
            error = done.exception()
            answers = [[]] * len(calls) if error is not None else done.result()
            for call, rows in zip(calls, answers, strict=True):
                if call.rows.done():  # cancelled: its client went away
                    continue
                if error is not None:
                    call.rows.set_exception(error)
                else:
                    call.rows.set_result(rows)
        self._rounds = None

    def _next_round(self, most_tokens: int) -> list[_Call]:
        """Take the calls that waited longest; at least one, when somebody waits."""
        taken: list[_Call] = []
        tokens = 0
        while self._waiting:
            call = self._waiting[0]
            if not call.gone:
                tokens += call.token_count
                if taken and tokens > most_tokens:
                    break
                taken.append(call)
            self._waiting.popleft()
        return taken

    def _compute(self, model: Model, calls: Sequence[_Call]) -> list[list[Float32Array]]:
        """Return the rows of each call; in the thread."""
        began = time.monotonic()
        rows = iter(
            model.logprobs(
                [ids for call in calls for ids in call.token_ids],
                [temperature for call in calls for temperature in call.temperatures],
                stopped=lambda: self._closing.is_set() or all(call.gone for call in calls),
            )
        )
        self.mean_seconds += _NEWEST_SHARE * (time.monotonic() - began - self.mean_seconds)
        return [[next(rows) for _ in call.token_ids] for call in calls]
