"""Reports the steps of a run: metrics, diagnosis, metrics.jsonl, log lines, and the report at the end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from fourfold import metrics as m
from fourfold.config.schema import Config
from fourfold.host.clock import SYSTEM_CLOCK, utc_text
from fourfold.trainer.v1.trainer_service_pb2 import TrainStepResponse

from ..launch.run_names import METRICS_FILE
from ..reporting import report
from ..reporting.batch_metrics import SCORER_METRICS, count_scorers
from ..reporting.diagnosis import TrainingDiagnosis
from ..state.files import MetricsWriter
from ..state.samples import StepBatch
from ..state.timeline import TIMELINE_FILE
from ..weights.update_result import WeightUpdateResult
from .context import RunContext
from .recovery import finite, rewrite_metrics

log = logging.getLogger("fourfold.coordinator")

# At the end of a failed run, wait at most this long for a disk that does not respond.
_ABANDON_SECONDS: Final = 0.5


@dataclass(slots=True)
class StepRecord:
    """The metrics and findings of one step, which starts when the record is made."""

    step: int
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0  # from the first prompt to the published weights
    metrics: dict[str, float] = field(default_factory=dict)
    skipped_reason: str = ""  # the trainer's; empty when it trained
    dropped: Mapping[str, int] = field(default_factory=dict)  # samples by reason
    findings: list[str] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)  # the findings that are new, or clearly worse than before
    lag_change: str = ""  # why the lag limit changed after this step; empty if it did not
    scorers: dict[str, dict[str, int]] = field(default_factory=dict)  # scored samples by scorer and name@version
    evaluating: bool = False  # whether its evaluation runs beside the next steps
    row: dict[str, Any] = field(default_factory=dict)  # the metrics that were saved last

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds that the block takes to a metric."""
        began = time.monotonic()
        yield
        self.metrics[name] = self.metrics.get(name, 0.0) + time.monotonic() - began


class StepReporter:
    """Writes the metrics of a run's steps to the ledger, to metrics.jsonl and to the run board, which watchers read."""

    def __init__(self, context: RunContext) -> None:
        self._context, self._ledger, self._disk = context, context.ledger, context.disk
        self._path = context.folder / METRICS_FILE
        self._metrics_file = MetricsWriter(self._path)
        self._timeline_file = MetricsWriter(context.folder / TIMELINE_FILE)
        self._config = context.config
        self._diagnosis = TrainingDiagnosis.from_config(self._config)
        self._unwritten: deque[StepRecord] = deque()  # steps that metrics.jsonl lacks, and whose metrics are shown

    def follow(self, config: Config) -> None:
        """Diagnose the next steps by a recipe with another [asynchrony], and report that."""
        self._config = config
        self._diagnosis.follow(config.asynchrony)

    def resume(self) -> None:
        """Continue after the steps that the ledger has. Call `close` first."""
        rows = self._ledger.steps()
        self._unwritten.clear()
        self._metrics_file = MetricsWriter(self._path)
        self._timeline_file = MetricsWriter(self._context.folder / TIMELINE_FILE)
        self._diagnosis = TrainingDiagnosis.from_config(self._config)
        self._diagnosis.replay(rows)
        self._context.board.set_history(((row.step, row.metrics) for row in rows), self._ledger.evals())

    async def close(self) -> bool:
        """Write the pending lines of metrics.jsonl; return whether the file has every step."""
        await asyncio.to_thread(self._timeline_file.close)
        return await asyncio.to_thread(self._metrics_file.close)

    def abandon(self) -> None:
        """Close metrics.jsonl when the run ends, whether or not every line could be written."""
        self._metrics_file.close(timeout=_ABANDON_SECONDS)
        self._timeline_file.close(timeout=_ABANDON_SECONDS)

    def add_published(
        self,
        record: StepRecord,
        batch: StepBatch,
        measured: Mapping[str, float],
        trained: TrainStepResponse,
        update: WeightUpdateResult,
    ) -> None:
        """Add the metrics of a step whose weights are published.

        `measured` has the coordinator's own metrics of the batch.
        """
        record.seconds = time.monotonic() - record.began
        record.skipped_reason, record.dropped = trained.skipped_reason, batch.dropped
        record.scorers = count_scorers(batch)
        # Sleeping engines are woken during the update, but their wake-up is a metric of its own.
        record.metrics[m.TIME_PUBLISH] -= update.seconds.get(m.TIME_WAKE, 0.0)
        # Later tables win. The trainer also measures the batch, but only the groups that the filter kept.
        record.metrics = {
            **trained.metrics,
            **measured,
            **batch.times(),
            **record.metrics,
            **self._count_samples(batch),
            **_update_metrics(update),
            **self._context.certificates.metrics(),
            **self._context.shadows.metrics(trained.metrics),
            **{f"{SCORER_METRICS}{name}/cost_usd": cost for name, cost in self._context.scorers.costs.items()},
        }

    async def diagnose(self, record: StepRecord) -> None:
        """Compare a step with those before it, and save its metrics."""
        findings, alarms = self._diagnosis.examine(
            record.step, record.metrics, skipped_reason=record.skipped_reason, dropped=record.dropped
        )
        record.findings, record.alarms = [f.text for f in findings], [f.text for f in alarms]
        await self.save(record)

    async def save(self, record: StepRecord) -> None:
        """Write the metrics of a step to the ledger, with its time so far and the present time; repeatable."""
        _add_total_time(record)
        texts = {
            "end_time": utc_text(SYSTEM_CLOCK.now()),
            "diagnosis": "; ".join(record.findings),
            "lag_change": record.lag_change,
        }
        record.row = {**finite(record.metrics), **texts, "alarms": record.alarms, "scorers": record.scorers}
        await self._disk.write(self._ledger.record_metrics, record.step, record.row, seconds=record.seconds)
        await self._disk.write(self._context.router.faults.save, self._ledger)
        if costs := self._context.scorers.changed_costs():
            await self._disk.write(self._ledger.put, costs)

    async def add_evaluation(self, record: StepRecord, metrics: Mapping[str, float]) -> None:
        """Add the metrics of an evaluation that ended while later steps were trained."""
        record.metrics |= metrics
        record.row |= finite(metrics)
        await self._disk.write(self._ledger.record_metrics, record.step, record.row, seconds=record.seconds)
        record.evaluating = False
        self._write_lines()

    async def amend(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to the last step, which an earlier coordinator process has reported."""
        row = self._ledger.steps()[-1]
        await self._disk.write(self._ledger.record_metrics, step, row.metrics | finite(metrics), seconds=row.seconds)
        await self.close()
        await self._disk.write_in_thread(rewrite_metrics, self._path, self._ledger.steps())
        self.resume()

    def show(self, record: StepRecord) -> None:
        """Publish the metrics of a step: the board, the log, and metrics.jsonl as soon as it is evaluated."""
        self._timeline_file.write(self._context.router.timeline.take(record.step))
        self._unwritten.append(record)
        self._write_lines()
        self._context.board.add_step(record.step, record.row)
        config = self._context.config
        metric = m.main_metric(record.row)
        log.info("step %d of %d is done", record.step, config.steps, extra={m.MAIN[metric]: record.row.get(metric)})
        for text in record.alarms:
            log.warning("step %d: %s", record.step, text)
        if record.lag_change:
            log.info("step %d: %s", record.step, record.lag_change)

    def _write_lines(self) -> None:
        while self._unwritten and not self._unwritten[0].evaluating:
            record = self._unwritten.popleft()
            self._metrics_file.write({"step": record.step, **record.row})

    async def write_report(self, model: str, model_ema: str | None, critic: str | None) -> None:
        """Write report.json and what it refers to: the folders of the exports, as `report.build` takes them."""
        context, totals = self._context, self._context.totals
        await totals.memory.update()
        await self._disk.write(totals.save)
        if not await self.close():
            await self._disk.write_in_thread(rewrite_metrics, self._path, self._ledger.steps())
        faults = context.router.faults.rows()
        facts = report.build(
            self._config,
            self._ledger,
            totals,
            model=model,
            model_ema=model_ema,
            critic=critic,
            faults=faults,
            scorer_changes=context.scorers.history,
        )
        steps, evals = self._ledger.steps(), self._ledger.evals()
        await self._disk.write_in_thread(report.write, context.folder, facts, steps, evals)
        log.info("run finished: report=%s model=%s", context.folder / "report.json", model)

    def _count_samples(self, batch: StepBatch) -> dict[str, float]:
        trajectories = batch.trajectories()
        return {
            m.ABSTAIN_COUNT: sum(t.abstained for t in trajectories),
            m.DROPPED_SAMPLES: batch.dropped.total(),
            m.SKIPPED_STEPS: self._ledger.skipped_count(),
        }


def _add_total_time(record: StepRecord) -> None:
    """Store the time of the step so far, and the remainder that no part accounts for."""
    seconds = time.monotonic() - record.began
    record.metrics[m.TIME_STEP] = seconds
    waits = (m.TIME_ROWS, m.TIME_GENERATE, m.TIME_REWARD, m.TIME_REFERENCE)
    waited = sum(record.metrics.get(name, 0.0) for name in waits)
    record.metrics[m.TRAINER_WAIT] = waited / max(seconds, 1e-9)
    record.metrics[m.TIME_OTHER] = seconds - sum(record.metrics.get(name, 0.0) for name in m.TIMES_OF_A_STEP)


def _update_metrics(update: WeightUpdateResult) -> dict[str, float]:
    if not update.probe_diffs:  # a skipped step publishes nothing
        return {}
    return {
        **update.seconds,
        m.PROBE_DIFF_MEAN: max(mean for mean, _ in update.probe_diffs),
        m.PROBE_DIFF_MAX: max(largest for _, largest in update.probe_diffs),
    }
