"""The trainer's state machine: what each call means, and what the trainer remembers between two of them.

    servicers (event loop)          engine thread
    ----------------------          -------------
    call ------------------------>  _do_...: check against the state, use the TrainerEngine, replace the state
    result or error  <------------
    status, watch: read the state, never wait for the engine

The state is replaced only when a call has succeeded, so a refused call changes nothing. A step
that outlived its caller is found again by its number and its batch's digest.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from fourfold import metrics
from fourfold.arrays import Sample
from fourfold.config import Config
from fourfold.errors import AlreadyExists, FourfoldError, InvalidInput, Unavailable, WrongState
from fourfold_trainer import flops
from fourfold_trainer.checkpoint.store import CheckpointStore, StepAnswer, TrainerState, atomic_folder, layout_of
from fourfold_trainer.engine import TrainerEngine
from fourfold_trainer.service import metrics as service_metrics
from fourfold_trainer.service.engine_thread import EngineThread, Phase
from fourfold_trainer.service.weight_transfers import Transfers
from fourfold_trainer.step import accumulation
from fourfold_trainer.step import train_step as steps
from fourfold_trainer.step.accumulation import PendingGradient
from fourfold_trainer.step.batch import check_samples
from fourfold_trainer.step.micro_batches import Forward, forward_all

_log = logging.getLogger("fourfold.trainer")

T = TypeVar("T")
_LEAVE_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A snapshot."""

    state: TrainerState
    phase: Phase
    checkpoint_step: int = -1
    """Of the newest durable checkpoint; -1 for none."""
    vocabulary_size: int = 0
    """Number of token ids; 0 while starting."""
    gradient: PendingGradient = field(default_factory=PendingGradient)
    """Of the parts of the next step."""


class TrainerCore:
    """Serves one engine. Coroutines run on one event loop; `_do_...` methods in the engine thread."""

    def __init__(
        self, config: Config, *, run_dir: Path, make_engine: Callable[[], TrainerEngine], fatal: Callable[[str], None]
    ) -> None:
        """Prepare; nothing is loaded yet.

        Args:
            config: of the run.
            run_dir: checkpoints go into its `checkpoints`, exports beside it.
            make_engine: loads the model; called in the engine thread.
            fatal: ends the service with a message; called from any thread.
        """
        self._config, self._run_dir = config, run_dir
        self._make_engine = make_engine
        self._status = Status(state=TrainerState(), phase=Phase.STARTING)
        self._watchers: set[asyncio.Event] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engine: TrainerEngine | None = None
        self._store: CheckpointStore | None = None
        self._stopped = False
        self._known_changes = 0
        """Of the engine, when the status was last made to say what it holds."""
        self._thread = EngineThread(
            limit_seconds=config.trainer.step_timeout_seconds,
            on_phase=lambda phase: self._set(phase=phase),
            is_known=lambda: self._engine is None or self._engine.change_count == self._known_changes,
            fatal=fatal,
        )
        self.transfers = Transfers(
            self._thread, engine=lambda: self._running, version=lambda: self._status.state.policy_version
        )
        """Weights on their way to the engines."""

    async def start(self) -> None:
        """Load the model; the service is ready when this returns."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        await self._thread.run(Phase.STARTING, self._do_start, timeout=self._config.trainer.step_timeout_seconds)

    async def stop(self) -> None:
        """End all ranks: in good order when the engine is idle, at once when it is not. Idempotent."""
        engine = self._engine
        if engine is None or self._stopped:
            return
        self._stopped = True
        try:
            await self._thread.run(Phase.WAITING, engine.leave, timeout=_LEAVE_SECONDS)
        except FourfoldError as error:
            _log.info("the ranks are ended without a farewell: %s", error.message)
        self._thread.stop()
        await asyncio.to_thread(engine.close)

    @property
    def config(self) -> Config:
        """Of the run."""
        return self._config

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids.

        Raises:
            Unavailable: the model is not loaded yet.
        """
        return self._running.vocabulary_size

    def status(self) -> Status:
        """Return the present snapshot."""
        return self._status

    async def watch(self) -> AsyncGenerator[Status, None]:
        """Yield the present snapshot, then one after every change; those that come too fast are skipped."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            while True:
                changed.clear()
                yield self._status
                await changed.wait()
        finally:
            self._watchers.discard(changed)

    def check_step(self, step: int) -> bool:
        """Return whether `step` would be trained now; False: it is the last one, whose answer is stored.

        Raises:
            Unavailable: the model is not loaded yet.
            WrongState: neither the last step nor the next.
        """
        state = self._status.state
        if self._running and step == state.step and state.answer is not None:
            return False
        self._status.gradient.refuse(f"step {step} cannot be trained")
        if step != state.step + 1:
            raise WrongState(
                f"step {step} cannot be trained; the trainer is at step {state.step}: send {state.step + 1}"
            )
        return True

    async def train_step(
        self, step: int, samples: list[Sample] | None, batch_sha256: str, *, timeout: float
    ) -> StepAnswer:
        """Train one step, or return the stored answer of the last one.

        Args:
            step: 1 for the first.
            samples: decoded, in the caller's order; None for the last step, whose answer is stored.
            batch_sha256: digest of the batch, hexadecimal.
            timeout: seconds.

        Raises:
            AlreadyExists: the last step, but another batch.
            WrongState: neither the last step nor the next.
            InvalidInput: names the sample.
        """
        return await self._thread.run(
            Phase.TRAINING, lambda: self._do_train_step(step, samples, batch_sha256), timeout=timeout
        )

    async def forward_backward(self, part: accumulation.Part, *, timeout: float) -> accumulation.PartAnswer:
        """Add a part to the gradient of the next step, or return the stored answer of the last one."""
        return await self._thread.run(Phase.TRAINING, lambda: self._do_forward_backward(part), timeout=timeout)

    async def optim_step(self, call: accumulation.OptimCall, *, timeout: float) -> StepAnswer:
        """End the step whose gradient waits, or return the stored answer of the last one."""
        return await self._thread.run(Phase.TRAINING, lambda: self._do_optim_step(call), timeout=timeout)

    async def discard_gradient(self, *, timeout: float) -> int:
        """Forget the gradient that waits; return the number of its parts."""
        return await self._thread.run(Phase.TRAINING, self._do_discard, timeout=timeout)

    async def forward(
        self, samples: list[Sample], *, entropies: bool, values: bool, timeout: float
    ) -> tuple[Forward, int]:
        """Return what the models make of every token, and the policy version."""

        def run() -> tuple[Forward, int]:
            found = forward_all(self._running, samples, self._config, entropies=entropies, values=values)
            return found, self._status.state.policy_version

        return await self._thread.run(Phase.COMPUTING, run, timeout=timeout)

    async def save_checkpoint(self, *, score: float | None = None, timeout: float) -> int:
        """Write a checkpoint of the present step, with its held-out score if it has one; return the step."""
        return await self._thread.run(Phase.SAVING, lambda: self._do_save(score), timeout=timeout)

    async def load_checkpoint(self, step: int, *, timeout: float) -> Status:
        """Restore a checkpoint. NotFound, and nothing changed, when there is none of that step."""
        return await self._thread.run(Phase.SAVING, lambda: self._do_load(step), timeout=timeout)

    async def export(self, name: str, *, ema: bool = False, timeout: float) -> Path:
        """Write the weights, or their average, as a Hugging Face folder in the run's folder; return its path."""
        return await self._thread.run(Phase.SAVING, lambda: self._do_export(name, ema=ema), timeout=timeout)

    async def raise_policy_version(self, version: int, *, timeout: float) -> int:
        """Raise the version of the present weights to at least `version`; return it."""
        return await self._thread.run(Phase.WAITING, lambda: self._do_raise(version), timeout=timeout)

    # ---- engine thread -------------------------------------------------------------------

    def _do_start(self) -> None:
        engine = self._make_engine()
        config = self._config
        self._store = CheckpointStore(
            self._run_dir / "checkpoints",
            keep=config.checkpoint.keep,
            keep_best=config.checkpoint.keep_best,
            layout=layout_of(config, engine.manifest()),
        )
        self._engine = engine
        self._release_memory()
        self._set(checkpoint_step=self._store.newest_step, vocabulary_size=engine.vocabulary_size)

    def _do_train_step(self, step: int, samples: list[Sample] | None, batch_sha256: str) -> StepAnswer:
        state = self._status.state
        if not self.check_step(step):
            assert state.answer is not None, "the last step has an answer"
            if batch_sha256 != state.batch_sha256:
                raise AlreadyExists(f"step {step} was trained with another batch; train step {step + 1}")
            return state.answer
        if samples is None:
            raise Unavailable(f"a checkpoint before step {step} was loaded while the batch travelled; send it again")
        config = self._config
        check_samples(samples, config.algorithm, policy_version=state.policy_version)
        began = time.monotonic()
        result = steps.train_step(self._running, samples, config, step=step, state=state.algorithm_state)
        self._release_memory()
        seconds = time.monotonic() - began
        skipped = state.skipped_step_count + bool(result.skipped_reason)
        measured = service_metrics.summarise(result, config, step=step)
        measured[metrics.SKIPPED_STEPS] = float(skipped)
        measured[metrics.TIME_TRAIN] = seconds
        measured[metrics.TRAIN_SPEED] = sum(len(s.token_ids) for s in samples) / seconds
        measured |= flops.speed(
            self._running.machine,
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

    def _do_forward_backward(self, part: accumulation.Part) -> accumulation.PartAnswer:
        status = self._status
        added = accumulation.add_part(self._running, part, status.state, status.gradient, self._config)
        assert added.answer is not None, "a part has an answer"
        self._set(gradient=added)
        return added.answer

    def _do_optim_step(self, call: accumulation.OptimCall) -> StepAnswer:
        before = self._status
        state = accumulation.apply_call(self._running, call, before.state, before.gradient, self._config)
        assert state.answer is not None, "a step has an answer"
        if state is not before.state:
            self._set(state=state, gradient=PendingGradient())
        return state.answer

    def _do_discard(self) -> int:
        parts = self._status.gradient.part_count
        if parts:
            self._running.discard_gradient()
            self._set(gradient=PendingGradient())
        return parts

    def _do_save(self, score: float | None) -> int:
        state = self._status.state
        self._status.gradient.refuse("no checkpoint can be written")
        self._checkpoints.save(state, self._running.save, score=score)
        self._set(checkpoint_step=self._checkpoints.newest_step)
        return state.step

    def _do_load(self, step: int) -> Status:
        state, folder = self._checkpoints.read(step)
        self._do_discard()  # it belongs to the weights that go
        self._running.load(folder)
        self._release_memory()
        self._set(state=state)
        return replace(self._status, phase=Phase.WAITING)

    def _release_memory(self) -> None:
        """Leave no more of the GPUs taken than what is kept until the next call, where others need it."""
        if self._config.shares_gpus:
            self._running.release_memory()

    def _do_export(self, name: str, *, ema: bool) -> Path:
        target = (self._run_dir / name).absolute()
        if name in ("checkpoints", "logs"):
            raise InvalidInput(f"name {name!r} is the run's own folder; choose another one, such as `model`")
        if ema and not self._config.trainer.ema_decay:
            raise WrongState(
                "trainer.ema_decay = 0, so no average is kept; set it, such as 0.99, or export without ema"
            )
        with atomic_folder(target) as partial:
            self._running.export(partial, ema=ema)
        return target

    def _do_raise(self, version: int) -> int:
        state = self._status.state
        if version > state.policy_version:
            self._set(state=replace(state, policy_version=version))
        return max(version, state.policy_version)

    @property
    def _running(self) -> TrainerEngine:
        if self._engine is None:
            raise Unavailable("the trainer is loading its model; try again when it is ready", retry_after=1.0)
        return self._engine

    @property
    def _checkpoints(self) -> CheckpointStore:
        if self._store is None:
            raise Unavailable("the trainer is loading its model; try again when it is ready", retry_after=1.0)
        return self._store

    def _set(self, **changes: Any) -> None:
        """Replace fields of the status, and tell the watchers."""
        if self._engine is not None and ("state" in changes or "gradient" in changes):
            self._known_changes = self._engine.change_count
        new = replace(self._status, **changes)
        if new == self._status:
            return
        self._status = new
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        for changed in self._watchers:
            changed.set()
