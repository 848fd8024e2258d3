"""Evaluates beside the next steps: one engine keeps the evaluated weights, the others get newer ones.

step k is published --> put: an engine is chosen --> its answers, all of one version --> metrics of step k
                          |                                                               |
step k + 1 is trained     '--> before_publish: several engines: the chosen one is held <--+ it is updated then
                                               one engine: the update waits --------------'
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, NamedTuple

from fourfold.coordinator.v1.membership_service_pb2 import Role

from ...routing.replica import Replica, ReplicaKey
from ..context import RunContext
from ..step_report import StepRecord, StepReporter

_TICK_SECONDS: Final = 0.25  # the death of an engine wakes no waiter

Evaluate = Callable[[int, int, ReplicaKey | None], Awaitable[dict[str, float]]]


class _Entry(NamedTuple):
    """An evaluation that was put."""

    record: StepRecord
    version: int  # of the weights to evaluate
    engine: ReplicaKey | None  # engine that keeps them; None: no engine has them


class EvaluationQueue:
    """The evaluations that run while the trainer trains. `run` is a task of its own."""

    def __init__(self, evaluate: Evaluate, context: RunContext, reporter: StepReporter) -> None:
        """Evaluate with `evaluate`, which takes step, policy version and the engine to ask, and returns metrics."""
        self._evaluate, self._reporter = evaluate, reporter
        self._router, self._broker = context.router, context.broker
        self.reset()

    def reset(self) -> None:
        """Forget all evaluations, for a new start of the run."""
        self._records: asyncio.Queue[_Entry | None] = asyncio.Queue()
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._broker.hold(None)

    def put(self, record: StepRecord) -> None:
        """Evaluate the weights that the engines serve now; the metrics are added to the record of their step."""
        chosen = min(self._current_engines(), key=lambda r: r.outstanding_size, default=None)
        record.evaluating = True
        self._open += 1
        self._idle.clear()
        self._records.put_nowait(_Entry(record, self._broker.version, None if chosen is None else chosen.key))

    def close(self) -> None:
        """Let `run` end after the evaluations that were put."""
        self._records.put_nowait(None)

    async def run(self) -> None:
        while (entry := await self._records.get()) is not None:
            self._broker.hold(entry.engine)
            metrics = await self._evaluate(entry.record.step, entry.version, entry.engine)
            await self._reporter.add_evaluation(entry.record, metrics)
            self._broker.hold(None)
            self._open -= 1
            if not self._open:
                self._idle.set()

    async def wait(self) -> None:
        """Return when every evaluation that was put is done."""
        await self._idle.wait()

    async def before_publish(self) -> None:
        """Return when new weights may go to the engines that are not held: all but one, or all.

        The caller holds the broker's lock, so a joining engine cannot get the weights of a waiting evaluation
        meanwhile. This waits only while some engine has these weights; otherwise the evaluation is of newer weights.
        """
        while self._open:
            engines = [r for r in self._router.replicas(Role.ROLE_ROLLOUT) if r.present]
            others = [r for r in engines if r.key != self._broker.held]
            if self._open == 1 and others:  # no engine has begun the second evaluation yet
                return
            if not self._current_engines():
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(_TICK_SECONDS):
                    await self.wait()

    def _current_engines(self) -> list[Replica]:
        """Return the engines that serve the weights that were published last."""
        engines = self._router.replicas(Role.ROLE_ROLLOUT)
        return [r for r in engines if r.version == self._broker.version and not r.unusable_reason]
