"""A step in parts: ForwardBackward adds to a gradient, OptimStep uses it up. What each call means; see core.py.

add      a part -> the gradient that waits, with the answer to give when the call is repeated
apply    the gradient that waits -> the state after the step
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fourfold import metrics
from fourfold.arrays import Float32Array, Sample
from fourfold.config import Config
from fourfold.errors import AlreadyExists, WrongState
from fourfold_trainer.checkpoint.store import StepAnswer, TrainerState
from fourfold_trainer.engine import Engine
from fourfold_trainer.step.lr_schedule import learning_rate
from fourfold_trainer.step.micro_batches import add_gradient
from fourfold_trainer.step.train_step import NOT_FINITE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """A call of ForwardBackward, checked on its own."""

    step: int
    number: int
    """1 for the first of the step."""
    samples: Sequence[Sample]
    weights: Sequence[Float32Array]  # [n] of each sample, the first 0
    sha256: str
    """Of the call, hexadecimal."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartAnswer:
    """What a part answered: kept until the next, so that a repeated call gets it again."""

    loss: float
    logprobs: list[Float32Array]  # [n] of each sample, NaN where its weight is 0
    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimCall:
    """A call of OptimStep, checked on its own. None: the recipe's."""

    step: int
    learning_rate: float | None
    max_grad_norm: float | None
    sha256: str
    """Of the call, hexadecimal."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gradient:
    """What waits for OptimStep. It is in no checkpoint, so none is written while there is one."""

    part_count: int = 0
    """0: nothing waits."""
    lineage: str = ""
    """SHA-256 over all parts."""
    last_sha256: str = ""
    """Of the last part."""
    answer: PartAnswer | None = None
    """To the last part."""

    def refuse(self, what: str) -> None:
        """Raise WrongState when a gradient waits."""
        if self.part_count:
            raise WrongState(
                f"{what} while a gradient of {self.part_count} parts waits for OptimStep; call that, or DiscardGradient"
            )


def add(engine: Engine, part: Part, state: TrainerState, waiting: Gradient, config: Config) -> Gradient:
    """Return the gradient that waits after a part; its answer is that of the call.

    Raises:
        AlreadyExists: the last part, but another call.
        WrongState: another step than the next, or neither the last part nor the next.
    """
    if part.step != state.step + 1:
        raise WrongState(
            f"step {part.step} takes no part; the trainer is at step {state.step}: send step {state.step + 1}"
        )
    if part.number == waiting.part_count and waiting.answer is not None:
        if part.sha256 != waiting.last_sha256:
            raise AlreadyExists(
                f"part {part.number} of step {part.step} was another call; send part {part.number + 1}, or begin anew "
                f"with DiscardGradient"
            )
        return waiting
    if part.number != waiting.part_count + 1:
        raise WrongState(
            f"part {part.number} of step {part.step} cannot be added; the last one was {waiting.part_count}: "
            f"send {waiting.part_count + 1}"
        )
    found = add_gradient(engine.forward_backward, part.samples, part.weights, config)
    loss, rows = 0.0, []
    for weights, logprobs in zip(part.weights, found, strict=True):
        row = np.full(len(weights), np.nan, np.float32)
        row[weights != 0] = logprobs
        loss += float(weights[weights != 0].astype(np.float64) @ logprobs)
        rows.append(row)
    return Gradient(
        part_count=part.number,
        lineage=_joined(waiting.lineage, part.sha256),
        last_sha256=part.sha256,
        answer=PartAnswer(loss=loss, logprobs=rows, policy_version=state.policy_version),
    )


def apply(engine: Engine, call: OptimCall, state: TrainerState, waiting: Gradient, config: Config) -> TrainerState:
    """Return the state after the step; its answer is that of the call.

    Raises:
        AlreadyExists: the last step, but another call.
        WrongState: neither the last step nor the next, or no gradient waits.
    """
    if call.step == state.step and state.answer is not None:
        if call.sha256 != state.batch_sha256:
            raise AlreadyExists(f"step {call.step} was ended by another call; the next is {call.step + 1}")
        return state
    if call.step != state.step + 1:
        raise WrongState(
            f"step {call.step} cannot be ended; the trainer is at step {state.step}: send {state.step + 1}"
        )
    if not waiting.part_count:
        raise WrongState(f"no gradient waits for step {call.step}; call ForwardBackward first")
    rate, longest = call.learning_rate, call.max_grad_norm
    norm = engine.optim_step(
        learning_rate=learning_rate(config.trainer, call.step, config.steps) if rate is None else rate,
        max_grad_norm=config.trainer.max_grad_norm if longest is None else longest,
    )
    done = math.isfinite(norm)
    answer = StepAnswer(
        step=call.step,
        policy_version=state.policy_version + done,
        skipped_reason="" if done else NOT_FINITE,
        metrics={metrics.GRAD_NORM: norm},
    )
    return replace(
        state,
        step=call.step,
        policy_version=answer.policy_version,
        skipped_step_count=state.skipped_step_count + (not done),
        batch_sha256=call.sha256,
        lineage=_joined(state.lineage, waiting.lineage, call.sha256),
        answer=answer,
    )


def _joined(*digests: str) -> str:
    return hashlib.sha256("".join(digests).encode()).hexdigest()
