"""Defines losses of tokens: their inputs, their results, and the registry of `[algorithm.loss]`.

    k             loss tokens of a micro-batch, all samples one after another
    p             [k]  current log-probability of each token; carries the gradient
    o             [k]  old log-probability, before the step began
    u             [k]  behavior log-probability, of the engine that sampled the token
    A             [k]  advantage
    ratio         [k]  exp(p - o), the log clamped to +-20
    segments      int64 [k]  trajectory of each token, 0 to s - 1

A loss is computed in the precision of p and is not yet weighted: see aggregation.py and corrections.py. As long as
p = o = u, every policy loss has the gradient of REINFORCE, -A; GMPO and the sequence form of GSPO have its mean over
the sample, and DFT has exp(p) times it.

The modules of this package import no torch and call only methods of its tensors: `fourfold plan` reads
keys and formulas on machines without torch.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, SerializeAsAny

from fourfold.algorithm.ratios import clamp
from fourfold.algorithm.registry import Definition, Registry
from fourfold.text import is_metric_name

if TYPE_CHECKING:
    from torch import Tensor

Reads = Literal["trajectories", "pairs", "labels", "steps"]
Trained = Literal["policy", "scores"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """Columns of a micro-batch that a policy loss may read.

    The loss tokens of a trajectory, those of all its segments, are in one micro-batch, except where `token_wise` allows
    to split them.
    """

    logprobs: Tensor  # p, [k]; the only one with a gradient
    old_logprobs: Tensor  # o, [k]
    behavior_logprobs: Tensor  # u, [k]; -inf or NaN where the engine reported no number
    advantages: Tensor  # A, [k]
    segments: Tensor  # int64 [k]: trajectory of each token, 0 to segment_count - 1
    segment_count: int
    top_logprobs: Tensor | None = None
    """Current log-probabilities of the teacher's likeliest tokens in place of each token, [k, `teacher_tokens`]; they
    carry the gradient, too. None: the loss reads no teacher."""
    teacher_logprobs: Tensor | None = None
    """Those of the teacher, [k, `teacher_tokens`]."""

    def __post_init__(self) -> None:
        for name in ("old_logprobs", "behavior_logprobs", "advantages"):
            assert not getattr(self, name).requires_grad, f"{name} must be detached: only logprobs has a gradient"

    def ratio(self) -> Tensor:
        """Return exp(p - o), [k]; the gradient is 0 where the log is beyond +-20."""
        return clamp(self.logprobs - self.old_logprobs).exp()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLoss:
    """The loss of every token, and metrics of it."""

    loss: Tensor  # [k]
    means: dict[str, Tensor] = field(default_factory=dict)
    """Metrics of the step that are means over its tokens, by name: detached, [k] each."""

    def __post_init__(self) -> None:
        if wrong := [name for name in self.means if not is_metric_name(name)]:
            raise ValueError(f"a loss has a metric named {wrong[0]!r}; write a name such as my-loss/penalty")


class Loss(Definition):
    """A loss of the model that is trained: of tokens (`PolicyLoss`) or of whole answers (`SampleLoss`)."""

    reads: ClassVar[Reads] = "trajectories"
    """Units of the loss: trajectories, pairs of them, trajectories with a label, or labelled steps. The samples of a
    trajectory, and those of a pair, stay in one micro-batch."""
    trains: ClassVar[Trained] = "policy"
    """Model whose outputs the loss reads: the policy's log-probabilities, or the scores of a reward model's head."""
    needs_reference: ClassVar[bool] = False
    """True: the loss reads the log-probabilities of the reference, which each sample must have."""
    measures_distance: ClassVar[bool] = False
    """True: `SampleInputs.distance` is measured before each optimizer step, on the samples without a score."""
    compares_with_old: ClassVar[bool] = True
    """False if the loss does not read the old log-probabilities."""
    token_wise: ClassVar[bool] = False
    """True if the loss of a token depends on that token alone: a trajectory of several segments that is longer than a
    micro-batch may then be split. False is safe for every loss."""
    corrects_lag: ClassVar[bool] = False
    """True if the loss itself weighs tokens by their behavior log-probabilities, and leaves out a token whose is not a
    number."""
    trains_without_advantage: ClassVar[bool] = True
    """False if a trajectory whose advantages are all 0 adds nothing to the gradient: the trainer then makes no pass for
    it. True is safe for every loss."""
    reports_entropy: ClassVar[bool] = True
    """False: there is no metric policy/entropy, and no entropies are computed unless `entropy_coef` is above 0."""

    @property
    def of_answers(self) -> bool:
        """True for a loss of whole answers (`SampleLoss`), which reads no advantages."""
        return self.reads != "trajectories"

    @property
    def teacher_tokens(self) -> int:
        """Number of a teacher's likeliest tokens that the loss reads in place of each token; 0: it reads no teacher."""
        return 0

    @property
    def tail_weight(self) -> float:
        """Weight in the sums of the tokens that a sample has beyond the length of the shorter one of its pair."""
        return 1.0

    def narrowest_clip(self) -> float:
        """Return the smallest |p - o|, in nats, that the loss clips; inf if there is none."""
        return math.inf


class PolicyLoss(Loss):
    """A loss of the policy's tokens: `[algorithm.loss]`."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        # They describe the `compute` of their class: a subclass of PpoLoss, or a mixin before it, may add a term that
        # trains on more tokens.
        at = next(index for index, base in enumerate(cls.__mro__) if "compute" in vars(base))
        for name in ("compares_with_old", "token_wise", "corrects_lag", "trains_without_advantage"):
            if not any(name in vars(base) for base in cls.__mro__[: at + 1]):
                setattr(cls, name, getattr(PolicyLoss, name))

    @abstractmethod
    def compute(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of every token, [k]."""


LOSSES: Final = Registry("losses", Loss)  # type: ignore[type-abstract]
AnyLoss = Annotated[SerializeAsAny[Loss], BeforeValidator(LOSSES.parse)]


def log_likelihood_loss(p: Tensor, weight: Tensor) -> Tensor:
    """Return -weight p, [k]; `weight` is detached."""
    # A token that the policy cannot sample (p = -inf) contributes nothing; -inf * 0 would be NaN.
    return -weight * p.masked_fill(p.isneginf(), 0.0)
