"""Runs the training loop: the schedule of a run, from its first step to its report.

    start ---> produce samples ----------------------------------+--> finish
      ^   |      admit -> generate -> score -> filter -> READY    |
      |   +--> step, step, step ... ------------------------------+
      |          take      B groups, in order of admission (`producer.py`), or B rows of data (`row_feed.py`)
      |          train     one TrainStep call; a repeat of the call trains nothing twice
      |          publish   send the new weights to every engine
      |          evaluate  every k steps, on the held-out prompts
      |          checkpoint  every k steps, first the trainer's, then the ledger's
      |          report    metrics, diagnosis and log line of the step (`step_report.py`)
      '---- the trainer restarted: go back to the last checkpoint (`recovery.py`)

`asynchrony.max_policy_lag` = L decides how far the producer may be ahead. With L = 0 sampling and training alternate,
so that the policy that samples is the policy that is trained. With L >= 1 engines sample while the trainer trains, and
evaluations run beside the next steps. Every part writes the state of its samples to the ledger before and after its
work, so that any process may be killed at any time.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Any

from fourfold import metrics as m
from fourfold.config.schema import PauseMode
from fourfold.coordinator.v1 import run_service_pb2 as run_pb
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import Internal
from fourfold.trainer.v1.trainer_service_pb2 import TrainStepResponse

from ..launch.run_names import CRITIC_FOLDER, EMA_FOLDER, MODEL_FOLDER, STEP_FOLDER
from ..routing.replica import ReplicaKey
from ..routing.trainer_session import TrainerRestarted
from ..state.sample_traces import step_attributes
from ..state.samples import StepBatch
from ..weights.update_result import WeightUpdateResult
from .context import RunContext
from .evaluation.queue import EvaluationQueue
from .lag_control import LagController
from .ports import PolicyEvaluator, RecipeFile, RecipeLog, StepSource
from .recovery import TRAINER_KEY, append_samples, restore, take_over
from .step_report import StepRecord, StepReporter

log = logging.getLogger("fourfold.coordinator")


class TrainingLoop:
    """Trains one run from start to end, over restarts of its trainer."""

    def __init__(
        self,
        context: RunContext,
        source: StepSource,
        recipe: RecipeFile,
        history: RecipeLog,
        evaluator: PolicyEvaluator,
    ) -> None:
        self.context, self.config = context, context.config
        self.recipe, self.history = recipe, history
        self.ledger, self.disk, self.board = context.ledger, context.disk, context.board
        self.session, self.broker = context.session, context.broker
        self.source, self.evaluator = source, evaluator
        self.reporter = StepReporter(context)
        self.evaluations = EvaluationQueue(self.evaluate_beside, context, self.reporter)
        self.lag = LagController(context.config.asynchrony)
        self.step = 0  # steps done
        self.timeout = context.config.trainer.step_timeout_seconds
        self.required, self.start_seconds = context.required_services(), context.start_seconds

    async def run(self) -> None:
        """Train to the last step and write the report. A restart of the trainer costs the steps after its checkpoint.

        The run ends after retry.restarts of them without a new checkpoint in between.
        """
        restarts, reason, saved = 0, "", self.ledger.last_checkpoint()
        try:
            while True:
                try:
                    await self.start(reason)
                    await self.session.run_all([self.source.run(), self.run_steps(), self.evaluations.run()])
                    await self.finish()
                    return
                except TrainerRestarted as error:
                    before, saved = saved, self.ledger.last_checkpoint()
                    restarts, reason = restarts + 1 if saved == before else 1, error.message
                    if restarts > self.config.retry.restarts:
                        raise
                    log.warning("%s", error)
                    self.broker.invalidate()
                    # All services have been there. From now on one service of each role is enough to continue.
                    self.required = dict.fromkeys(self.required, 1)
                    self.start_seconds = self.context.router.wait_seconds
        finally:
            self.session.drop_ahead()
            self.reporter.abandon()

    async def start(self, reason: str) -> None:
        """Wait for the services, continue where the trainer is or at the last checkpoint, and update every engine.

        `reason` is why the run starts again; empty when this process starts.
        """
        if self.ledger.counts():
            self.board.set_recovering(self.ledger.last_checkpoint())
        else:
            self.board.set_phase(run_pb.RUN_PHASE_WAITING_FOR_SERVICES)
        await self._connect()
        await self.reporter.close()  # a recovery rewrites the file that the reporter appends to
        totals = self.context.totals
        position = await take_over(self.context) or await restore(self.context)
        await self.history.record(self.config)  # the trainer has accepted it
        await self.context.experiences.release(position.step)
        self.step = position.step
        if reason or totals.continued:
            reason = totals.add_recovery(self.step, reason, trainer_kept=position.trainer_kept)
            await self.disk.write(totals.save)
            self.board.add_recovery(self.step, reason, trainer_kept=position.trainer_kept)
        self.reporter.resume()
        self.evaluations.reset()
        self.context.tasks.begin()
        await self.broker.resync(self.session.policy_version, step=self.step)
        self.lag.replay(self.ledger.steps())
        await self.source.resume(
            position, version=self.broker.version, rule=self.config.asynchrony, lag_limit=self.lag.limit
        )
        self.board.mark_started()
        self.board.set_step(step=self.step, policy_version=self.broker.version)
        await self._complete_step(self.step)

    async def _connect(self) -> None:
        """Wait for the services, and start a session with the trainer."""
        router = self.context.router
        if known := self.ledger.get(TRAINER_KEY):
            await router.wait_for({Role.ROLE_TRAINER: 1}, seconds=self.start_seconds)
            await self.session.connect()
            if self.session.incarnation == known:
                # Only the coordinator is new: all services have been there, so one of each role is enough.
                self.required = dict.fromkeys(self.required, 1)
        await router.wait_for(self.required, seconds=self.start_seconds)
        await self.session.connect()

    async def _complete_step(self, step: int) -> None:
        """Evaluate and checkpoint after the last step if the earlier process had not."""
        missing = all(row.step != step for row in self.ledger.evals())
        if missing and self._is_due(step, self.config.evaluation.every_steps):
            evaluated = await self.evaluate(step)
            if step > 0:
                await self.reporter.amend(step, evaluated)
        saved = self.ledger.last_checkpoint()
        missing = step > 0 and (saved is None or saved.step < step)
        if missing and self._is_due(step, self.config.checkpoint.every_steps):
            await self.checkpoint(step)

    async def run_steps(self) -> None:
        while self.step < self.config.steps:
            await self.run_step(self.step + 1)
        self.evaluations.close()

    async def run_step(self, step: int) -> None:
        """Take a batch, train and publish; evaluate and checkpoint when they are due; report."""
        record = StepRecord(step)
        batch = await self.take(step)
        async with self.broker.lock:  # the broker must not update engines while the trainer's weights change
            async with self.broker.sleeper.asleep() as sleep_times:
                with record.timed(m.TIME_TRAIN):
                    trained, batch_metrics = await self.train(step, batch)
            with record.timed(m.TIME_EVALUATE):
                await self.evaluations.before_publish()
            with record.timed(m.TIME_PUBLISH):
                update = await self.publish(trained)
        self.step = step
        self.reporter.add_published(record, batch, batch_metrics | sleep_times, trained, update)
        record.lag_change = self.lag.observe(step, record.metrics)
        if await self.recipe.update():
            record.lag_change = "; ".join(filter(None, (record.lag_change, self._follow_recipe())))
            await self.history.record(self.config)
        self.source.mark_trained(self.broker.version, self.config.asynchrony, lag_limit=self.lag.limit)
        self.board.set_step(step=step, policy_version=self.broker.version)
        await self._evaluate_if_due(record)
        await self.reporter.diagnose(record)
        if self._is_due(step, self.config.checkpoint.every_steps):
            # The row of the step is in the ledger already. If this process dies between the two commits of the
            # checkpoint, `recovery.newest_checkpoint` needs that row.
            with record.timed(m.TIME_CHECKPOINT):
                await self.checkpoint(step)
            await self.reporter.save(record)
        every = self.config.checkpoint.export_every_steps
        if every and step % every == 0 and step < self.config.steps:
            with record.timed(m.TIME_CHECKPOINT):
                await self.export(f"{STEP_FOLDER}{step}")
            await self.reporter.save(record)
        self.reporter.show(record)

    def _follow_recipe(self) -> str:
        """Use the new [asynchrony]; return what changed."""
        before, self.config = self.config.asynchrony, self.recipe.config
        if not self.lag.follows(self.config.asynchrony):
            self.lag = LagController(self.config.asynchrony)
        self.reporter.follow(self.config)
        self.board.set_max_policy_lag(self.config.asynchrony.max_policy_lag)
        changes = [
            f"asynchrony.{key} {old} -> {new}"
            for (key, old), (_, new) in zip(before, self.config.asynchrony, strict=True)
            if old != new
        ]
        return f"the recipe changed: {', '.join(changes)}"

    async def _evaluate_if_due(self, record: StepRecord) -> None:
        if not self._is_due(record.step, self.config.evaluation.every_steps) or not self.config.data.held_out:
            return
        # A checkpoint that is kept by its score needs the score first.
        beside = self.config.asynchrony.max_policy_lag and not self.config.checkpoint.keep_best
        if beside and record.step < self.config.steps:
            self.evaluations.put(record)
            return
        with record.timed(m.TIME_EVALUATE):
            record.metrics |= await self.evaluate(record.step)

    def _pauses_after(self, step: int) -> bool:
        """Return whether the weights of this step are needed before the next one."""
        saved, evaluates = self.config.checkpoint, self.config.data.held_out and self.config.evaluation.every_steps
        every = evaluates, saved.every_steps, saved.export_every_steps
        return any(self._is_due(step, steps) for steps in every if steps)

    def _is_due(self, step: int, every_steps: int) -> bool:
        return step == self.config.steps or step % every_steps == 0

    # -- take, train, publish -------------------------------------------------------------------------------------

    async def take(self, step: int) -> StepBatch:
        """Return the samples of one step: generated, scored, filtered, with reference log-probabilities; or of data."""
        self.board.set_phase(run_pb.RUN_PHASE_GENERATING)
        return await self.source.take(step)

    async def train(self, step: int, batch: StepBatch) -> tuple[TrainStepResponse, dict[str, float]]:
        """Train one step; return the trainer's response, and the metrics of the batch.

        When the response is lost, the same step is sent again with the same bytes.
        """
        self.board.set_phase(run_pb.RUN_PHASE_TRAINING)
        if batch.groups:
            await self.disk.write(self.ledger.lease, step, batch.sample_ids())
        sent = asyncio.Event()
        summary = asyncio.ensure_future(self._summarize(step, batch, sent))
        try:
            with self.context.router.traces.step(step, batch.sample_ids(), self.session.name) as spans:
                response = await self.session.train_step(step, batch.experiences, sent.set)
                spans.set(step_attributes(response))
        finally:
            sent.set()
            batch_metrics = await summary
        await self.disk.write(
            self.ledger.acknowledge,
            step,
            policy_version=response.policy_version,
            skipped_reason=response.skipped_reason,
            data_position=self.source.data_position,
        )
        if not self._pauses_after(step):
            self.session.begin_ahead()  # the ledger has this step, and its report takes 2 ms
        self.context.router.traces.trained(batch.sample_ids(), response)
        return response, batch_metrics

    async def _summarize(self, step: int, batch: StepBatch, sent: asyncio.Event) -> dict[str, float]:
        """Return the metrics of a batch, and append it to samples.jsonl, while the trainer works."""
        await sent.wait()  # encoding the batch for the trainer needs the GIL, so start after its last byte is sent
        # Written before the ledger's acknowledge, because the next coordinator may take over a trained step. A recovery
        # removes the lines of an untrained step.
        if batch.groups:
            await self.disk.write_in_thread(append_samples, self.context, step, batch.trajectories())
        if step < self.config.steps:
            self.session.send_ahead(step + 1, await self.source.look_ahead(step + 1))
        return await asyncio.to_thread(self.source.metrics, batch, policy_version=self.broker.version)

    async def publish(self, trained: TrainStepResponse) -> WeightUpdateResult:
        """Send the new weights to every engine.

        A skipped step made no new weights. Engines that slept during it have dropped the old ones and need them again.
        """
        if trained.policy_version == self.broker.version and not self.config.rollout.sleep_mode:
            return WeightUpdateResult()
        self.board.set_phase(run_pb.RUN_PHASE_PUBLISHING)
        self.broker.set_pause_mode(self._pause_mode())
        rule, limit = self.config.asynchrony, self.lag.limit
        return await self.broker.publish(
            trained.policy_version,
            step=trained.step,
            # Admit the next groups when the engines can sample them, before the last probe is compared.
            on_sampling=lambda: self.source.mark_trained(trained.policy_version, rule, lag_limit=limit),
        )

    def _pause_mode(self) -> PauseMode:
        """Return the treatment of running samples; an update does not wait for samples above a lowered lag limit."""
        mode = self.config.pause_mode
        return "keep" if mode == "wait" and self.config.weights.pause == "auto" and self.source.running else mode

    # -- evaluate, checkpoint, finish -----------------------------------------------------------------------------

    async def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate on the held-out prompts; return the metrics, empty without such prompts."""
        self.board.set_phase(run_pb.RUN_PHASE_EVALUATING)
        return await self._evaluate(step, self.broker.version, None, self.board.set_answers)

    async def evaluate_beside(self, step: int, version: int, engine: ReplicaKey | None) -> dict[str, float]:
        """Evaluate beside the next steps; `engine` keeps the weights of this step until the answers are there."""
        self.board.set_evaluation_progress(0.0)
        try:
            return await self._evaluate(
                step, version, engine, lambda done, count: self.board.set_evaluation_progress(done / count)
            )
        finally:
            self.board.set_evaluation_progress(None)

    async def _evaluate(
        self, step: int, version: int, engine: ReplicaKey | None, on_progress: Callable[[int, int], None]
    ) -> dict[str, float]:
        found = await self.evaluator.run(step=step, version=version, engine=engine, on_progress=on_progress)
        if found is None:
            return {}
        row = found.row
        await self.disk.write(self.ledger.add_eval, row)
        self.board.add_eval(row)
        half_width = math.nan if row.half_width is None else row.half_width
        return {
            m.EVAL_SCORE: row.score,
            m.EVAL_HALF_WIDTH: half_width,
            m.EVAL_VERSION_MIN: found.oldest_version,
            m.EVAL_VERSION_MAX: found.newest_version,
            **row.set_metrics(),
        }

    async def checkpoint(self, step: int) -> None:
        """Save the trainer's checkpoint; commit the ledger's when it is durable."""
        self.board.set_phase(run_pb.RUN_PHASE_SAVING)
        score = next((row.score for row in self.ledger.evals() if row.step == step), None)
        async with self.broker.lock:  # the trainer serves one call at a time
            saved = await self.session.call(
                "SaveCheckpoint", lambda r: r.trainer.save_checkpoint(score=score, timeout=self.timeout)
            )
        if saved != step:
            raise Internal(f"the trainer saved a checkpoint of step {saved} after step {step}")
        await self.disk.write(self.context.totals.save)
        await self.disk.write(
            self.ledger.commit_checkpoint,
            step=step,
            data_position=self.source.data_position,
            policy_version=self.session.policy_version,
        )
        await self.context.experiences.release(step)

    async def finish(self) -> None:
        """Export the model, its moving average if the trainer keeps one, and the critic if any; write the report."""
        self.context.tasks.end()
        self.board.set_phase(run_pb.RUN_PHASE_SAVING)
        model = await self.export(MODEL_FOLDER)
        model_ema = await self.export(EMA_FOLDER, ema=True) if self.config.trainer.ema_decay else None
        critic = await self.export(CRITIC_FOLDER, critic=True) if self.config.algorithm.needs_critic else None
        await self.reporter.write_report(model, model_ema, critic)

    async def export(self, name: str, **kind: bool) -> str:
        """Export the policy, its moving average (`ema`) or the critic (`critic`); return the folder."""
        kwargs: dict[str, Any] = {"timeout": self.timeout, **kind}
        async with self.broker.lock:
            return await self.session.call("ExportModel", lambda r: r.trainer.export_model(name, **kwargs))
