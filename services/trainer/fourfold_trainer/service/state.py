"""Holds the trainer's state and carries out each call: steps, parts of steps, checkpoints and exports.

    servicers (event loop)          engine thread
    ----------------------          -------------
    run(phase, ..., method) ----->  check against the state, use the ServedEngine, replace the state
    result or error  <------------
    status, watch: read the state, never wait for the engine

The state is replaced only when a call has succeeded, so that a refused call changes nothing. A caller that lost the
answer of a step gets it again with the same step number and batch.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

from fourfold import metrics
from fourfold.arrays import Float32Array
from fourfold.config import Config
from fourfold.errors import AlreadyExists, FourfoldError, InvalidInput, Unavailable, WrongState
from fourfold.sample import Sample
from fourfold.sample.columns import Samples
from fourfold_trainer import flops
from fourfold_trainer.checkpoint.store import CheckpointStore, StepAnswer, TrainerState, atomic_folder, layout_of
from fourfold_trainer.ranks.rank_worker import explain_failure
from fourfold_trainer.served_engine import ServedEngine
from fourfold_trainer.service import metrics as service_metrics
from fourfold_trainer.service.engine_thread import EngineThread, Phase
from fourfold_trainer.step import accumulation
from fourfold_trainer.step import train_step as steps
from fourfold_trainer.step.accumulation import PendingGradient
from fourfold_trainer.step.forward import Forward, forward_all
from fourfold_trainer.step.reference import compute_reference
from fourfold_trainer.step.sample_checks import check_samples
from fourfold_trainer.step.shadow import compare_gradients
from fourfold_trainer.step.unit_losses import UnitLosses, compute_unit_losses

_log = logging.getLogger("fourfold.trainer")

P = ParamSpec("P")
T = TypeVar("T")
_LEAVE_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A snapshot of the trainer."""

    state: TrainerState
    phase: Phase
    checkpoint_step: int = -1  # of the newest complete checkpoint; -1 for none
    vocabulary_size: int = 0  # number of token ids; 0 while the model is loading
    gradient: PendingGradient = field(default_factory=PendingGradient)  # of the parts of the next step


class TrainerCore:
    """Serves one engine.

    Call `start`, `stop`, `run`, `status`, `watch` and `check_step` on the event loop, and all other methods by `run`,
    which calls them in the engine thread.
    """

    def __init__(
        self, config: Config, *, run_dir: Path, make_engine: Callable[[], ServedEngine], fatal: Callable[[str], None]
    ) -> None:
        """Prepare; `start` loads the model.

        Args:
            run_dir: checkpoints go into its folder `checkpoints`, exports beside that.
            make_engine: loads the model; called in the engine thread.
            fatal: ends the service with a message; called from any thread.
        """
        self.config, self._run_dir = config, run_dir
        self._make_engine = make_engine
        self._status = Status(state=TrainerState(), phase=Phase.STARTING)
        self._watchers: set[asyncio.Event] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loaded: tuple[ServedEngine, CheckpointStore] | None = None
        self._stopped = self._leaving = False
        self.trained_tokens = 0  # in the loss, of all steps of this process
        self.on_checkpoint: Callable[[], None] = lambda: None
        """Called in the engine thread when a checkpoint was written before the end of the run."""
        self._recorded_changes = 0  # the engine's change_count when `_status` last described its weights
        self._thread = EngineThread(
            limit_seconds=config.trainer.step_timeout_seconds,
            on_phase=lambda phase: self._set(phase=phase),
            is_unchanged=lambda: self._loaded is None or self.engine.change_count == self._recorded_changes,
            explain=partial(explain_failure, config=config),
            fatal=fatal,
        )

    async def start(self) -> None:
        """Load the model; the service is ready when this returns."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        await self.run(Phase.STARTING, self.config.trainer.step_timeout_seconds, self._load)

    async def stop(self) -> None:
        """End all ranks: in good order if the engine is idle, otherwise immediately. Idempotent."""
        if self._loaded is None or self._stopped:
            return
        self._stopped = True
        try:
            await self.run(Phase.WAITING, _LEAVE_SECONDS, self.engine.leave)
        except FourfoldError as error:
            _log.info("Ranks did not shut down cleanly; terminating them. reason=%s", error.message)
        self._thread.stop()
        await asyncio.to_thread(self.engine.close)

    async def save_before_leaving(self) -> None:
        """Save a checkpoint after the step in flight, and from now on after each step: a machine is about to leave.

        The coordinator finds it when the trainer has restarted. Errors are logged.
        """
        self._leaving = True
        try:
            await self.run(Phase.SAVING, self.config.trainer.step_timeout_seconds, self._save_extra)
        except FourfoldError as error:
            _log.warning("no checkpoint could be saved before a machine leaves: %s", error)

    async def run(
        self, phase: Phase, timeout: float, method: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a method of this class or of the engine in the engine thread; `phase` is reported while it runs.

        Raises DeadlinePassed if the call does not end within `timeout` seconds, including its time in the queue.
        """
        return await self._thread.run(phase, lambda: method(*args, **kwargs), timeout=timeout)

    @property
    def engine(self) -> ServedEngine:
        """Return the engine. Raises Unavailable while the model is loading."""
        return self._get_loaded()[0]

    def status(self) -> Status:
        return self._status

    def phase_seconds(self) -> dict[Phase, float]:
        """Return the seconds in each phase since the start."""
        return self._thread.phase_seconds.totals()

    async def watch(self) -> AsyncGenerator[Status, None]:
        """Yield the current snapshot, then one after every change; changes that follow too quickly are skipped."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            while True:
                changed.clear()
                yield self._status
                await changed.wait()
        finally:
            self._watchers.discard(changed)

    def check_step(self, step: int, *, running: Collection[int] = ()) -> bool:
        """Return True if `step` is the next step, and False if it is the last one, whose answer is stored.

        True also for the step after the next one while the next one is among those that are `running`.

        Raises:
            Unavailable: the model is loading.
            WrongState: any other step, or a gradient of parts is pending.
        """
        state = self._status.state
        if self.engine and step == state.step and state.answer is not None:
            return False
        self._status.gradient.refuse(f"step {step} cannot be trained")
        if step != state.step + 1 and not (step == state.step + 2 and state.step + 1 in running):
            raise WrongState(
                f"step {step} cannot be trained; the trainer is at step {state.step}: send {state.step + 1}"
            )
        return True

    # ---- called in the engine thread, by `run` ----

    def train_step(self, step: int, samples: Samples | None, batch_sha256: str) -> StepAnswer:
        """Train one step, or return the stored answer of the last one.

        Args:
            step: 1 for the first.
            samples: in the caller's order; None if `step` was the last one when the batch began to arrive.
            batch_sha256: digest of the batch, hexadecimal.

        Raises:
            AlreadyExists: the last step was trained with another batch.
            WrongState: neither the last step nor the next.
            InvalidInput: a sample is not valid; the message has its id.
        """
        state, config = self._status.state, self.config
        # The state may have changed since the first message of the batch was checked.
        if not self.check_step(step):
            assert state.answer is not None, "the last step has an answer"
            if batch_sha256 != state.batch_sha256:
                raise AlreadyExists(f"step {step} was trained with another batch; train step {step + 1}")
            return state.answer
        if samples is None:
            raise Unavailable(f"a checkpoint before step {step} was loaded while the batch travelled; send it again")
        check_samples(samples, config, policy_version=state.policy_version)
        began = time.monotonic()
        measure = partial(compare_gradients, self.engine, state.algorithm_state)
        result = steps.train_step(self.engine, samples, config, step=step, state=state.algorithm_state, measure=measure)
        self._release_memory()
        seconds = time.monotonic() - began
        skipped = state.skipped_step_count + bool(result.skipped_reason)
        measured = service_metrics.summarise(result, config)
        measured[metrics.SKIPPED_STEPS] = float(skipped)
        measured[metrics.TIME_TRAIN] = seconds
        seconds -= measured.get(metrics.SHADOW_SECONDS, 0.0)  # speeds include only training
        measured[metrics.TRAIN_SPEED] = int(samples.lengths.sum()) / seconds
        measured |= flops.speed(
            self.engine.machine,
            result.policy_work,
            result.critic_work,
            seconds=seconds,
            rank_count=config.trainer_processes,
        )
        answer = StepAnswer(
            step=step,
            policy_version=state.policy_version + bool(result.policy_updates),
            skipped_reason=result.skipped_reason,
            metrics=measured,
        )
        self._count(answer)
        self._set(
            state=TrainerState(
                step=step,
                policy_version=answer.policy_version,
                skipped_step_count=skipped,
                batch_sha256=batch_sha256,
                lineage=hashlib.sha256(f"{state.lineage}{batch_sha256}".encode()).hexdigest(),
                answer=answer,
                algorithm_state=result.algorithm_state,
            )
        )
        return answer

    def forward_backward(self, part: accumulation.Part) -> accumulation.PartAnswer:
        """Add a part to the gradient of the next step, or return the stored answer of the last part."""
        status = self._status
        added = accumulation.add_part(self.engine, part, status.state, status.gradient, self.config)
        assert added.answer is not None, "a part has an answer"
        self._set(gradient=added)
        return added.answer

    def optim_step(self, call: accumulation.OptimCall) -> StepAnswer:
        """Apply the pending gradient as a step, or return the stored answer of the last step."""
        before = self._status
        state = accumulation.apply_call(self.engine, call, before.state, before.gradient, self.config)
        assert state.answer is not None, "a step has an answer"
        if state is not before.state:
            self._count(state.answer)
            self._set(state=state, gradient=PendingGradient())
        return state.answer

    def discard_gradient(self) -> int:
        """Discard the pending gradient; return the number of its parts."""
        parts = self._status.gradient.part_count
        if parts:
            self.engine.discard_gradient()
            self._set(gradient=PendingGradient())
        return parts

    def forward(self, samples: Samples, *, entropies: bool, values: bool) -> tuple[Forward, int]:
        """Return log-probabilities, and entropies and values if asked for, with the policy version."""
        found = forward_all(self.engine, samples, self.config, entropies=entropies, values=values)
        return found, self._status.state.policy_version

    def compute_reference(self, samples: list[Sample], step: int) -> tuple[list[Float32Array], int]:
        """Return the reference log-probabilities of the samples of a step, with the policy version.

        Raises:
            WrongState: a step was trained, so that the weights are not those that training began with.
            InvalidInput: the loss has no reference, or a sample is no part of a unit.
        """
        state = self._status.state
        if state.step:
            raise WrongState(
                f"the reference of step {step} is that of the weights before step 1, and the trainer is at step "
                f"{state.step}; start it anew, without a checkpoint"
            )
        return compute_reference(self.engine, samples, self.config, step=step), state.policy_version

    def compute_unit_losses(self, samples: list[Sample], step: int) -> tuple[UnitLosses, int]:
        """Return the losses of `unit_losses.compute_unit_losses`, with the policy version."""
        version = self._status.state.policy_version
        return compute_unit_losses(self.engine, samples, self.config, step=step, policy_version=version), version

    def save_checkpoint(self, score: float | None = None) -> int:
        """Write a checkpoint of the current step, with the held-out score of its weights; return the step."""
        state, (engine, store) = self._status.state, self._get_loaded()
        self._status.gradient.refuse("no checkpoint can be written")
        store.save(state, engine.save, commit=engine.commit, score=score)
        engine.keep_checkpoints(self._run_dir / "checkpoints", store.folders)
        self._set(checkpoint_step=store.newest_step)
        if state.step < self.config.steps:
            self.on_checkpoint()
        return state.step

    def _save_extra(self) -> None:
        state, (engine, store) = self._status.state, self._get_loaded()
        if state.step == 0 or store.newest_step == state.step:
            return
        self._status.gradient.refuse("no checkpoint can be written")
        store.save(state, engine.save, commit=engine.commit, extra=True)
        _log.info("checkpoint saved before a machine leaves: step=%d", state.step)
        self._set(checkpoint_step=store.newest_step)

    def load_checkpoint(self, step: int) -> Status:
        """Restore a checkpoint. Raises NotFound, before anything changes, if there is none of that step."""
        engine, store = self._get_loaded()
        state, folder = store.read(step)
        self.discard_gradient()  # it belongs to the weights that are replaced
        engine.load(folder)
        self._release_memory()
        self._set(state=state)
        return replace(self._status, phase=Phase.WAITING)

    def export(self, name: str, *, ema: bool = False, critic: bool = False) -> Path:
        """Write the weights, their average, or the critic, as a folder into the run's folder; return its path."""
        target = (self._run_dir / name).absolute()
        if target.exists() and not any(target.glob("*.safetensors")):
            raise InvalidInput(f"name {name!r}: {target} has no model that may be replaced; choose another name")
        if ema and not self.config.trainer.ema_decay:
            raise WrongState(
                "trainer.ema_decay = 0, so no average is kept; set it, such as 0.99, or export without ema"
            )
        if critic and not self.config.algorithm.needs_critic:
            raise WrongState("the algorithm of the recipe trains no critic; export without critic")
        if critic and ema:
            raise InvalidInput("ema and critic exclude each other: the critic has no average; leave one out")
        with atomic_folder(target) as partial:
            if critic:
                self.engine.export_critic(partial)
            else:
                self.engine.export(partial, ema=ema)
        return target

    def raise_policy_version(self, version: int) -> int:
        """Raise the version of the current weights to at least `version`; return it."""
        state = self._status.state
        if version > state.policy_version:
            self._set(state=replace(state, policy_version=version))
        return max(version, state.policy_version)

    def _load(self) -> None:
        engine, kept = self._make_engine(), self.config.checkpoint
        engine.collect_checkpoints(self._run_dir / "checkpoints")
        store = CheckpointStore(
            self._run_dir / "checkpoints",
            keep=kept.keep,
            keep_best=kept.keep_best,
            layout=layout_of(self.config, engine.manifest()),
        )
        self._loaded = engine, store
        self._release_memory()
        self._set(checkpoint_step=store.newest_step, vocabulary_size=engine.vocabulary_size)

    def _get_loaded(self) -> tuple[ServedEngine, CheckpointStore]:
        if self._loaded is None:
            raise Unavailable("the trainer is loading its model; try again when it is ready", retry_after=1.0)
        return self._loaded

    def _count(self, answer: StepAnswer) -> None:
        """Count a trained step; if a machine is about to leave, have the state saved when it is set."""
        self.trained_tokens += int(answer.metrics.get(metrics.TRAINED_TOKENS, 0))
        if self._leaving and self._loop is not None:
            asyncio.run_coroutine_threadsafe(self.save_before_leaving(), self._loop)

    def _release_memory(self) -> None:
        """Return cached GPU memory if the rollout engines share the GPUs."""
        if self.config.shares_gpus:
            self.engine.release_memory()

    def _set(self, **changes: Any) -> None:
        """Replace fields of the status, and wake the watchers."""
        if self._loaded is not None and ("state" in changes or "gradient" in changes):
            self._recorded_changes = self.engine.change_count
        new = replace(self._status, **changes)
        if new == self._status:
            return
        self._status = new
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        for changed in self._watchers:
            changed.set()
