"""Runs a step in parts: ForwardBackward adds to the pending gradient, OptimStep applies it.

rank 0       add_part              a call of ForwardBackward -> the pending gradient and the answer of the call
             apply_call            a call of OptimStep -> the state after the step
every rank   accumulate_gradient   gradient of  sum over tokens of  c * p,  c given by the caller, of either sign
             apply_gradient
             discard_gradient
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fourfold import metrics
from fourfold.arrays import Float32Array
from fourfold.config.schema import Config
from fourfold.errors import AlreadyExists, WrongState
from fourfold.nn.sequence import to_device
from fourfold.sample.columns import Samples
from fourfold_trainer.batches import Batches, WeightedBatch, dummy_tokens
from fourfold_trainer.checkpoint.store import StepAnswer, TrainerState
from fourfold_trainer.engine import TrainerEngine
from fourfold_trainer.step.lr_schedule import learning_rate
from fourfold_trainer.step.micro_batches import add_gradient
from fourfold_trainer.step.step_result import NOT_FINITE
from fourfold_trainer.trained_model import Policy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """A call of ForwardBackward whose own fields were checked."""

    step: int
    number: int  # 1 for the first of the step
    samples: Samples
    weights: Sequence[Float32Array]  # [n] of each sample, the first 0
    sha256: str  # digest of the call, hexadecimal


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartAnswer:
    """Answer to a part; kept until the next part, so that a repeated call gets it again."""

    loss: float
    logprobs: list[Float32Array]  # [n] of each sample, NaN where its weight is 0
    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimCall:
    """A call of OptimStep whose own fields were checked. None: the recipe's value."""

    step: int
    learning_rate: float | None
    max_grad_norm: float | None
    sha256: str  # digest of the call, hexadecimal


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PendingGradient:
    """The gradient that OptimStep will apply. Checkpoints do not contain it: none is written while there is one."""

    part_count: int = 0  # 0: there is no gradient
    lineage: str = ""  # SHA-256 over the digests of all parts
    last_sha256: str = ""  # digest of the last part
    answer: PartAnswer | None = None  # answer to the last part

    def refuse(self, what: str) -> None:
        """Raise WrongState when there is a gradient."""
        if self.part_count:
            raise WrongState(
                f"{what} while a gradient of {self.part_count} parts waits for OptimStep; call that, or DiscardGradient"
            )


def add_part(
    engine: TrainerEngine, part: Part, state: TrainerState, pending: PendingGradient, config: Config
) -> PendingGradient:
    """Add a part to the pending gradient; return it with the answer of the call.

    Raises:
        AlreadyExists: the number of the last part, with other content.
        WrongState: another step than the next, or neither the last part nor the next; or the recipe trains a reward
            model.
    """
    if config.algorithm.loss.trains == "scores":
        raise WrongState(
            "the recipe trains a reward model, and the gradient of a part is one of log-probabilities; use TrainStep"
        )
    if part.step != state.step + 1:
        raise WrongState(
            f"step {part.step} accepts no part; the trainer is at step {state.step}: send step {state.step + 1}"
        )
    if part.number == pending.part_count and pending.answer is not None:
        if part.sha256 != pending.last_sha256:
            raise AlreadyExists(
                f"part {part.number} of step {part.step} was another call; send part {part.number + 1}, or begin anew "
                f"with DiscardGradient"
            )
        return pending
    if part.number != pending.part_count + 1:
        raise WrongState(
            f"part {part.number} of step {part.step} cannot be added; the last one was {pending.part_count}: "
            f"send {pending.part_count + 1}"
        )
    found = add_gradient(engine.forward_backward, part.samples, part.weights, config)
    loss, rows = 0.0, []
    for weights, logprobs in zip(part.weights, found, strict=True):
        row = np.full(len(weights), np.nan, np.float32)
        row[weights != 0] = logprobs
        loss += float(weights[weights != 0].astype(np.float64) @ logprobs)
        rows.append(row)
    return PendingGradient(
        part_count=part.number,
        lineage=_joined(pending.lineage, part.sha256),
        last_sha256=part.sha256,
        answer=PartAnswer(loss=loss, logprobs=rows, policy_version=state.policy_version),
    )


def apply_call(
    engine: TrainerEngine, call: OptimCall, state: TrainerState, pending: PendingGradient, config: Config
) -> TrainerState:
    """Apply the pending gradient; return the state after the step, with the answer of the call.

    Raises:
        AlreadyExists: the number of the last step, with other content.
        WrongState: neither the last step nor the next, or no gradient is pending.
    """
    if call.step == state.step and state.answer is not None:
        if call.sha256 != state.batch_sha256:
            raise AlreadyExists(f"step {call.step} was ended by another call; the next is {call.step + 1}")
        return state
    if call.step != state.step + 1:
        raise WrongState(
            f"step {call.step} cannot be ended; the trainer is at step {state.step}: send {state.step + 1}"
        )
    if not pending.part_count:
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
        lineage=_joined(state.lineage, pending.lineage, call.sha256),
        answer=answer,
    )


def accumulate_gradient(policy: Policy, batches: Batches[WeightedBatch], *, rank_count: int) -> list[Float32Array]:
    """Add this rank's part of a gradient to the pending one; return the log-probabilities of each batch, [k]."""
    rows = []
    for batch in batches:
        logprobs, _ = policy.logprobs(batch.tokens)
        weights = to_device(batch.weights, logprobs.device)
        policy.backward((weights * logprobs).sum() * rank_count, last=False)
        rows.append(logprobs.detach())
    return [row.cpu().numpy() for row in rows]


def apply_gradient(policy: Policy, *, learning_rate: float, max_grad_norm: float) -> float:
    """Run `optimizer.step()` with the pending gradient; return its norm before clipping."""
    _end_gradient(policy, 0.0)
    return policy.optimizer_step(learning_rate, max_grad_norm=max_grad_norm)


def discard_gradient(policy: Policy) -> None:
    """Forget the pending gradient: every ZeRO stage skips a step whose gradient is not finite."""
    _end_gradient(policy, math.nan)
    policy.optimizer_step(0.0)


def _end_gradient(policy: Policy, factor: float) -> None:
    # ZeRO must know which backward pass is the last, and a part cannot know: the cheapest pass, times factor, is.
    logprobs, _ = policy.logprobs(dummy_tokens())
    policy.backward(factor * logprobs.sum(), last=True)


def _joined(*digests: str) -> str:
    return hashlib.sha256("".join(digests).encode()).hexdigest()
