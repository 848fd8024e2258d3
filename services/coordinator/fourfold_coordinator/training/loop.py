"""The loop that trains. It reads from top to bottom.

    begin ---> step, step, step ... ---> finish
      ^          |
      '----------'  the trainer was restarted: back to the last checkpoint

    a step:  collect     prompts -> rollout -> reward -> filter -> reference, every group as fast as it can
             train       one TrainStep, idempotent
             publish     the new weights into every engine
             evaluate    every k steps, on held-out prompts
             checkpoint  every k steps: the trainer's, then the ledger's

Synchronous: a step begins when the weights of the one before are in every engine, so every
sample comes from the policy that is trained. An asynchronous mode changes when `collect` runs
and which versions it accepts; the parts stay as they are. Every sample's state is in the ledger
before and after each part, so that any process may die at any line.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from fourfold import metrics as m
from fourfold.config import Config
from fourfold.coordinator.v1 import run_service_pb2 as run_pb
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import Internal, PeerFault
from fourfold.host.disk import append_lines
from fourfold.trainer.v1.trainer_service_pb2 import TrainStepResponse
from fourfold_coordinator.state.metrics_file import MetricsWriter

from ..reporting import report
from ..reporting.batch_metrics import compute_batch_metrics
from ..reporting.diagnosis import Finding, TrainingDiagnosis
from ..routing.replica import Replica
from ..routing.trainer_session import TrainerRestarted
from ..state.ledger import TRAINER_RESTORED
from ..state.samples import StepBatch, to_lines
from ..weights.update import WeightUpdateResult
from .collect import BatchCollector
from .context import RunContext
from .recovery import restore, rewrite_metrics

log = logging.getLogger("fourfold.coordinator")

T = TypeVar("T")

MODEL_FOLDER: Final = "model"
EMA_FOLDER: Final = "model-ema"
SAMPLES_FILE: Final = "samples.jsonl"
METRICS_FILE: Final = "metrics.jsonl"
_LAST_METRICS_SECONDS: Final = 0.5


class TrainingLoop:
    """One run, from its services' first sign of life to the report."""

    def __init__(self, parts: RunContext) -> None:
        self.config, self.folder, self.collector = parts.config, parts.folder, BatchCollector(parts)
        self.ledger, self.board, self.router = parts.ledger, parts.board, parts.router
        self.session, self.broker = parts.session, parts.broker
        self.evaluator, self.memory, self.certificates = parts.evaluator, parts.memory, parts.certificates
        self.totals, self.disk = parts.totals, parts.disk
        self.needed, self.start_seconds = needed_services(parts.config), parts.start_seconds
        self.metrics_file = MetricsWriter(parts.folder / METRICS_FILE)
        self.diagnosis = TrainingDiagnosis.from_config(parts.config)
        self.step = 0
        """Steps done."""

    async def run(self) -> None:
        """Train to the last step and write the report. A restarted trainer costs the steps since its checkpoint.

        Raises:
            FourfoldError: why the run cannot go on.
        """
        restarts, why = 0, ""
        try:
            while True:
                try:
                    await self.begin(why)
                    while self.step < self.config.steps:
                        await self.one_step()
                    await self.finish()
                    return
                except TrainerRestarted as error:
                    restarts, why = restarts + 1, error.message
                    if restarts > self.config.retry.restarts:
                        raise
                    log.warning("%s", error)
                    self.broker.invalidate()
                    # The others were there: from now on one of each is enough.
                    self.needed, self.start_seconds = dict.fromkeys(self.needed, 1), self.router.wait_seconds
        finally:
            self.metrics_file.close(timeout=_LAST_METRICS_SECONDS)

    async def begin(self, why: str) -> None:
        """Wait for the services, take up where the run was, and bring every engine to its weights.

        Args:
            why: the run goes back to its checkpoint; empty when this process begins.
        """
        known = bool(self.ledger.counts())
        self.board.set_phase(run_pb.RUN_PHASE_RECOVERING if known else run_pb.RUN_PHASE_WAITING_FOR_SERVICES)
        await self.router.wait_for(self.needed, seconds=self.start_seconds)
        await self.session.connect()
        await asyncio.to_thread(self.metrics_file.close)
        restored = await restore(self.config, self.folder, self.ledger, self.session, self.disk)
        self.metrics_file = MetricsWriter(self.folder / METRICS_FILE)
        self.step, self.collector.position = restored.step, restored.data_position
        self.diagnosis = TrainingDiagnosis.from_config(self.config)
        self.diagnosis.replay(self.ledger.steps())
        if why or self.totals.resumes:
            self.board.add_recovery(restored.step, why)
        self.board.set_history(((row.step, row.metrics) for row in self.ledger.steps()), self.ledger.evals())
        await self.broker.resync(self.session.policy_version, step=self.step)
        self.board.mark_started()
        self.board.set_step(step=self.step, policy_version=self.broker.version)
        if self.step == 0 and not self.ledger.evals():
            await self.evaluate(0)

    async def one_step(self) -> None:
        """Collect, train, publish; then evaluate and checkpoint when it is time."""
        step, began = self.step + 1, time.monotonic()
        batch = await self.collect(step)
        metrics = batch.times()
        async with self.broker.lock:  # no engine is filled while the weights change
            async with self.broker.sleeper.asleep() as times:
                metrics |= times
                with timed(metrics, m.TIME_TRAIN):
                    trained, measured = await self.train(step, batch)
            with timed(metrics, m.TIME_PUBLISH):
                update = await self.publish(trained)
            metrics[m.TIME_PUBLISH] -= update.seconds.get(m.TIME_WAKE, 0.0)  # a part of its own
        seconds = time.monotonic() - began
        self.step = step
        self.board.set_step(step=step, policy_version=self.broker.version)
        # The trainer measures the batch, too, but sees only what the filter let through: ours win.
        metrics = dict(trained.metrics) | measured | metrics | self._counted(step, batch) | _update_metrics(update)
        metrics |= self.certificates.metrics()
        last = step == self.config.steps
        if last or step % self.config.evaluation.every_steps == 0:
            with timed(metrics, m.TIME_EVALUATE):
                metrics |= await self.evaluate(step)
        _add_up(metrics, time.monotonic() - began)
        found, news = self.diagnosis.examine(
            step, metrics, skipped_reason=trained.skipped_reason, dropped=self._dropped(step)
        )
        await self._keep_metrics(step, metrics, found, news, seconds)
        if last or step % self.config.checkpoint.every_steps == 0:
            with timed(metrics, m.TIME_CHECKPOINT):
                await self.checkpoint(step)
            _add_up(metrics, time.monotonic() - began)
            await self._keep_metrics(step, metrics, found, news, seconds)
        self._show_metrics(step)

    # -- collect, train, publish ----------------------------------------------------------------------------------

    async def collect(self, step: int) -> StepBatch:
        """Return the groups of one step; `collect.py` says how they come about."""
        self.board.set_phase(run_pb.RUN_PHASE_GENERATING)
        batch = await self.collector.collect(step, version=self.broker.version)
        if step == 1:
            await self.disk.write(self.ledger.put, {report.FIRST_STEP: report.first_step_facts(batch.groups)})
        return batch

    async def train(self, step: int, batch: StepBatch) -> tuple[TrainStepResponse, dict[str, float]]:
        """Train one step; return the trainer's answer, and the batch's own metrics.

        After a lost answer the same step is sent again with the same bytes. The batch is measured and made into
        lines while the trainer works. They are written when the ledger says that the step is done; a process that
        dies between the two goes back to a checkpoint before the step.
        """
        self.board.set_phase(run_pb.RUN_PHASE_TRAINING)
        await self.disk.write(self.ledger.lease, step, batch.sample_ids())
        sent = asyncio.Event()
        recording = asyncio.ensure_future(self._record(step, batch, sent))
        try:
            response = await self.session.call("TrainStep", lambda r: self._train_once(r, step, batch, sent.set))
        finally:
            sent.set()
            measured, lines = await recording
        self.session.policy_version = response.policy_version
        await self.disk.write(
            self.ledger.acknowledge,
            step,
            policy_version=response.policy_version,
            skipped_reason=response.skipped_reason,
            data_position=self.collector.position,
        )
        await self.disk.write_in_thread(append_lines, self.folder / SAMPLES_FILE, lines, sync=True)
        return response, measured

    async def _train_once(
        self, replica: Replica, step: int, batch: StepBatch, sent: Callable[[], None]
    ) -> TrainStepResponse:
        timeout = self.config.trainer.step_timeout_seconds
        response = await replica.trainer.train_step(step, _and_then(batch.experiences(), sent), timeout=timeout)
        if response.policy_version > self.session.policy_version + 1:  # a step makes one version
            text = f"TrainStep: policy_version {response.policy_version} after {self.session.policy_version}"
            raise PeerFault(replica.member.peer, "BAD_VERSION", text)
        return response

    async def _record(self, step: int, batch: StepBatch, sent: asyncio.Event) -> tuple[dict[str, float], bytes]:
        """Return the batch's metrics, and its lines of samples.jsonl."""
        await sent.wait()  # a batch that is on its way to the trainer needs this process for itself
        measured = await asyncio.to_thread(compute_batch_metrics, batch, policy_version=self.broker.version)
        return measured, await asyncio.to_thread(to_lines, step, batch.trajectories())

    async def publish(self, trained: TrainStepResponse) -> WeightUpdateResult:
        """Bring the new weights to every engine. A skipped step made none, but whoever slept has lost the old ones."""
        if trained.policy_version == self.broker.version and not self.config.rollout.sleep_mode:
            return WeightUpdateResult()
        self.board.set_phase(run_pb.RUN_PHASE_PUBLISHING)
        return await self.broker.publish(trained.policy_version, step=trained.step)

    # -- evaluate, checkpoint, finish -----------------------------------------------------------------------------

    async def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate on the held-out prompts, if there are any.

        Raises:
            TrainerRestarted: no engine that comes now would get the weights that are evaluated.
        """
        self.board.set_phase(run_pb.RUN_PHASE_EVALUATING)
        row = await self.evaluator.run(
            step=step, version=self.broker.version, on_progress=self.board.set_progress, beside=self.session.watch
        )
        if row is None:
            return {}
        await self.disk.write(self.ledger.add_eval, row)
        self.board.add_eval(row)
        half_width = math.nan if row.half_width is None else row.half_width
        return {m.EVAL_SCORE: row.score, m.EVAL_HALF_WIDTH: half_width}

    async def checkpoint(self, step: int) -> None:
        """Have the trainer write its checkpoint; when it is durable, commit ours."""
        self.board.set_phase(run_pb.RUN_PHASE_SAVING)
        timeout = self.config.trainer.step_timeout_seconds
        score = next((row.score for row in self.ledger.evals() if row.step == step), None)
        async with self.broker.lock:  # the trainer does one thing at a time
            saved = await self.session.call(
                "SaveCheckpoint", lambda r: r.trainer.save_checkpoint(score=score, timeout=timeout)
            )
        if saved != step:
            raise Internal(f"the trainer wrote a checkpoint of step {saved} after step {step}")
        await self.disk.write(self.totals.save)
        await self.disk.write(
            self.ledger.commit_checkpoint,
            step=step,
            data_position=self.collector.position,
            policy_version=self.session.policy_version,
        )

    async def finish(self) -> None:
        """Export the model, and its average where there is one, and write the report."""
        self.board.set_phase(run_pb.RUN_PHASE_SAVING)
        await self.memory.look()
        model = await self.export(MODEL_FOLDER)
        ema = await self.export(EMA_FOLDER, ema=True) if self.config.trainer.ema_decay else None
        await self.disk.write(self.totals.save)
        if not await asyncio.to_thread(self.metrics_file.close):
            await self.disk.write_in_thread(rewrite_metrics, self.folder / METRICS_FILE, self.ledger.steps())
        facts = report.build(
            self.config,
            self.ledger,
            seconds=self.totals.seconds,
            restarts=self.totals.restarts,
            resumes=self.totals.resumes,
            peak_memory_bytes=self.memory.peak_bytes,
            uncounted=self.memory.uncounted,
            model=model,
            model_ema=ema,
            faults=self.router.faults.rows(),
        )
        await self.disk.write_in_thread(report.write, self.folder, facts, self.ledger.steps(), self.ledger.evals())
        log.info("done: %s; the model is in %s", self.folder / "report.json", model)

    async def export(self, name: str, *, ema: bool = False) -> str:
        """Have the trainer write its weights, or their average; return the folder."""
        timeout = self.config.trainer.step_timeout_seconds
        async with self.broker.lock:
            return await self.session.call(
                "ExportModel", lambda r: r.trainer.export_model(name, ema=ema, timeout=timeout)
            )

    # -- numbers --------------------------------------------------------------------------------------------------

    def _counted(self, step: int, batch: StepBatch) -> dict[str, float]:
        trajectories = batch.trajectories()
        tokens = sum(int(t.sample.action_mask.sum()) for t in trajectories)
        return {
            m.ABSTAIN_COUNT: sum(t.abstained for t in trajectories),
            m.DROPPED_SAMPLES: sum(self._dropped(step).values()),
            m.SKIPPED_STEPS: self.ledger.skipped_count(),
            m.ROLLOUT_SPEED: tokens / max(batch.rolled - batch.began, 1e-9),
        }

    def _dropped(self, step: int) -> dict[str, int]:
        """Return the samples dropped in this step by reason; those of a step that was lost later are not its own."""
        return {reason: count for reason, count in self.ledger.dropped(step).items() if reason != TRAINER_RESTORED}

    async def _keep_metrics(
        self, step: int, metrics: dict[str, float], found: list[Finding], news: list[Finding], seconds: float
    ) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in sorted(metrics.items())}
        words = {"diagnosis": "; ".join(f.text for f in found), "alarms": [f.text for f in news]}
        await self.disk.write(self.ledger.record_metrics, step, {**finite, **words}, seconds=seconds)
        await self.disk.write(self.router.faults.save, self.ledger)

    def _show_metrics(self, step: int) -> None:
        row = self.ledger.step_row(step)
        self.metrics_file.write({"step": step, **row.metrics})
        self.board.add_step(step, row.metrics)
        log.info("step %d of %d is done", step, self.config.steps, extra={"reward": row.metrics.get(m.REWARD_MEAN)})
        for text in row.metrics["alarms"]:
            log.warning("step %d: %s", step, text)


def needed_services(config: Config) -> dict[int, int]:
    """Return how many services of each role the recipe asks for; those started by hand count as one."""
    counts: dict[int, int] = {
        Role.ROLE_TRAINER: 1,
        Role.ROLE_ROLLOUT: max(config.rollout.replicas, 1),
        Role.ROLE_REWARD: max(config.reward.replicas, 1),
    }
    if config.needs_reference:
        counts[Role.ROLE_REFERENCE] = max(config.reference.replicas, 1)
    return counts


def _and_then(items: Iterator[T], done: Callable[[], None]) -> Iterator[T]:
    """Yield the items; call `done` when all are taken."""
    yield from items
    done()


@contextmanager
def timed(metrics: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds that the block takes to `metrics`."""
    began = time.monotonic()
    yield
    metrics[name] = time.monotonic() - began


def _add_up(metrics: dict[str, float], seconds: float) -> None:
    """Note how long the step takes so far, and what of that no part accounts for."""
    metrics[m.TIME_STEP] = seconds
    metrics[m.TIME_OTHER] = seconds - sum(metrics.get(name, 0.0) for name in m.TIMES_OF_A_STEP)


def _update_metrics(update: WeightUpdateResult) -> dict[str, float]:
    if not update.probe_diffs:
        return {}
    return {
        **update.seconds,
        m.PROBE_DIFF_MEAN: max(mean for mean, _ in update.probe_diffs),
        m.PROBE_DIFF_MAX: max(largest for _, largest in update.probe_diffs),
    }
