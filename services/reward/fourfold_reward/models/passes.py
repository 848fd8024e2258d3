"""Runs the forward passes of a reward model in one thread, over all samples that wait.

    put --FIFO--> round: the oldest samples, up to 8 passes of tokens --by length--> passes --> deliver, once per pass

A pass is started before the results of the one before are read, so that a GPU never waits for the host. Samples that
arrive during a round form the next one: a long sample or a busy caller cannot hold others back for longer than a round.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from fourfold.arrays import Float32Array, Int32Array
from fourfold.nn.gpu_errors import is_fatal
from fourfold.workers.queue import Entry
from fourfold_reward.models.packed import Passes
from fourfold_reward.models.steps import StepText
from fourfold_reward.protocol import Outcome

_log = logging.getLogger(__name__)
# Many passes waste little on a last, partly filled one. Few keep the wait of a new sample short.
_PASSES_PER_ROUND: Final = 8

Text = Entry[Int32Array | StepText, Outcome]
"""Token ids of a sample that waits for a pass, with its steps if each has a score."""
Delivered = Sequence[tuple[Text, Outcome]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    """A pass whose results have not been read."""

    entries: Sequence[Text]
    finish: Callable[[], Float32Array]
    since: float


class PassThread:
    """The thread. `put`, `withdraw` and `close` may be called in any thread."""

    def __init__(
        self,
        passes: Passes,
        *,
        tokens_per_batch: int,
        deliver: Callable[[Delivered, float], None],
        on_failure: Callable[[str], None],
    ) -> None:
        """Start the thread.

        Args:
            passes: of the model; only the thread uses it from now on.
            tokens_per_batch: most tokens of one pass, unless a text alone has more.
            deliver: called in the thread with the outcomes of a pass and its seconds.
            on_failure: called in the thread with a message when no pass is possible any more; the thread then ends.
        """
        self._passes = passes
        self._budget = tokens_per_batch
        self._deliver = deliver
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._waiting: deque[Text] = deque()
        self._round: deque[list[Text]] = deque()  # of the thread alone
        self._closing = False
        # Totals, written by the thread.
        self.samples = self.tokens = self.out_of_memory = 0
        self.running = 0  # samples in passes
        self.busy_since: float | None = None  # time.monotonic() when the oldest running pass began
        self._thread = threading.Thread(target=self._run, name="reward-model", daemon=True)
        self._thread.start()

    @property
    def kind(self) -> str:
        """How texts share a pass: "packed", "padded" or "one text at a time"."""
        return self._passes.kind

    def put(self, entries: Sequence[Text]) -> None:
        """Queue samples with tokens."""
        with self._changed:
            self._waiting.extend(entries)
            self._changed.notify()

    def withdraw(self) -> None:
        """Forget the queued samples of closed calls."""
        with self._changed:
            self._waiting = deque(entry for entry in self._waiting if not entry.call.closed)

    def close(self, timeout: float) -> bool:
        """End the thread after the running pass; return whether it ended within `timeout` seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            before: _Running | None = None
            while not self._closing:
                batch = self._next(wait=before is None)
                running = self._start(batch) if batch else None
                if before is not None:
                    self._finish(before)
                before = running
                self.running = 0 if running is None else len(running.entries)
                self.busy_since = None if running is None else running.since
        except Exception as error:
            _log.critical("forward passes ended", exc_info=error)
            self._on_failure(f"the reward model failed: {type(error).__name__}: {error}"[:2000])

    def _next(self, *, wait: bool) -> list[Text]:
        """Return the next batch; [] if there is none now, or after `close`."""
        while not self._closing:
            if not self._round:
                self._round.extend(self._new_round(wait=wait))
            if not self._round:
                break
            if batch := [entry for entry in self._round.popleft() if not entry.call.closed]:
                return batch
        return []

    def _new_round(self, *, wait: bool) -> list[list[Text]]:
        """Take the oldest samples that fit a round, at least one, and divide them into passes."""
        entries: list[Text] = []
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing or not wait)
            room = self._budget * _PASSES_PER_ROUND
            while self._waiting and (not entries or len(self._waiting[0].item) <= room):
                entries.append(self._waiting.popleft())
                room -= len(entries[-1].item)
        lengths = [len(entry.item) for entry in entries]
        return [[entries[i] for i in each] for each in self._passes.split(lengths, max_tokens=self._budget)]

    def _start(self, batch: list[Text]) -> _Running | None:
        """Start a pass; None if it failed: its samples are then queued in halves, or have their error."""
        since = time.monotonic()
        self.running += len(batch)
        try:
            items = [entry.item for entry in batch]
            ids = [item.token_ids if isinstance(item, StepText) else item for item in items]
            finish = self._passes.start(ids, [item.ends for item in items if isinstance(item, StepText)])
        except Exception as error:
            self._divide(batch, error)
            return None
        return _Running(entries=batch, finish=finish, since=since)

    def _divide(self, batch: list[Text], error: Exception) -> None:
        """Queue the halves of a batch that failed before all others. Raises `error` if the GPU is lost."""
        if is_fatal(error):
            raise error
        no_memory = isinstance(error, torch.OutOfMemoryError)
        if no_memory:
            self.out_of_memory += 1
            torch.cuda.empty_cache()
        tokens = sum(len(entry.item) for entry in batch)
        if len(batch) == 1:
            self._deliver([(batch[0], _outcome_of(error, tokens, no_memory=no_memory))], 0.0)
            return
        if no_memory and (half := max(tokens // 2, 1)) < self._budget:
            _log.warning("out of memory: pass halved; lower reward.model.tokens_per_batch. tokens=%d", tokens)
            self._budget = half
        elif not no_memory:
            _log.warning("pass failed: halved to find the sample. samples=%d error=%s", len(batch), error)
        middle = len(batch) // 2
        self._round.extendleft([batch[middle:], batch[:middle]])

    def _finish(self, running: _Running) -> None:
        """Wait for the scores of a pass and deliver them."""
        try:
            scores = running.finish()
        except Exception as error:  # an error of a kernel that has no other place to appear
            self._divide(list(running.entries), error)
            return
        seconds = time.monotonic() - running.since
        self.samples += len(running.entries)
        self.tokens += sum(len(entry.item) for entry in running.entries)
        self._deliver(list(zip(running.entries, _outcomes(running.entries, scores), strict=True)), seconds)


def _outcomes(entries: Sequence[Text], scores: Float32Array) -> Iterator[Outcome]:
    """Yield the outcome of each sample of a pass, which has one score, or one for each step."""
    at = 0
    for entry in entries:
        steps = entry.item if isinstance(entry.item, StepText) else None
        found = scores[at : (at := at + (1 if steps is None else len(steps.ends)))]
        yield _scored(float(found[0])) if steps is None else steps.outcome(found)


def _scored(score: float) -> Outcome:
    if not np.isfinite(score):
        return Outcome.error("NOT_FINITE", f"the reward model's score is {score}; it must be finite")
    return Outcome(score=score)


def _outcome_of(error: Exception, tokens: int, *, no_memory: bool) -> Outcome:
    if no_memory:
        return Outcome.error(
            "OUT_OF_MEMORY",
            f"a text of {tokens} tokens alone does not fit into the memory of the device; lower "
            f"reward.model.max_tokens, or raise reward.model.gpus_per_replica",
        )
    return Outcome.error("RAISED", f"the reward model failed: {type(error).__name__}: {error}")
