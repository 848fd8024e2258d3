"""The algorithm's tables: a preset gives every key its value, and a recipe may change any of them.

[algorithm]              estimator of the advantages, loss, how token losses are added up
[algorithm.kl]           distance to the reference policy
[algorithm.correction]   difference between the policy that sampled and the one that is trained
[algorithm.shaping]      what happens to a score before it becomes an advantage
[algorithm.filter]       groups that others replace because they teach nothing
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, Literal, Self

from pydantic import Field, model_validator

from fourfold.config.presets import PRESETS
from fourfold.config.table import Table

Estimator = Literal["gae", "reinforce", "reinforce-baseline", "rloo", "grpo", "dr-grpo", "remax", "opo"]
PolicyLoss = Literal["ppo", "gspo", "cispo", "sapo", "reinforce"]
Aggregation = Literal["token-mean", "sequence-mean", "sequence-sum", "constant-length"]
CorrectionKind = Literal["none", "tis", "icepop", "sequence-mask", "sequence-mask-tis"]

# Estimators that compare the samples of a prompt; the others are at home with one.
_COMPARES: Final = ("reinforce-baseline", "rloo", "grpo", "dr-grpo", "opo")
_KL_STEP: Final = 0.2  # of the adaptive controller, per horizon

CORRECTION_BOUNDS: Final[Mapping[str, tuple[float, float]]] = {
    "tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    # Of the geometric mean of a whole sample, which moves much less than a token's ratio.
    "sequence-mask": (0.999, 1.002),
    "sequence-mask-tis": (0.999, 1.002),
}


class KlConfig(Table):
    """KL divergence to the frozen reference policy; with coef 0 no reference is started."""

    coef: float = Field(default=0.0, ge=0)
    placement: Literal["loss", "reward"] = "loss"
    """loss: a term of the loss, computed anew in every update. reward: subtracted from each token's reward."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    target: float = Field(default=0.0, ge=0)
    """Nats per token that the coefficient is steered to (arXiv 1909.08593); 0: it stays as it is."""
    horizon: int = Field(default=10_000, ge=1)
    """Samples in which a distance twice the target changes the coefficient by a fifth."""

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.coef and self.placement == "loss" and self.estimator == "k1":
            raise ValueError(
                "estimator k1 has no gradient towards the reference when it is a term of the loss; use k2 or k3 "
                "there, or placement = `reward`"
            )
        if self.target and not self.coef:
            raise ValueError(
                f"target = {self.target} steers coef, and coef = 0 stays 0 whatever multiplies it; set coef above 0 to "
                f"begin with, such as 0.001, or target = 0"
            )
        return self


class CorrectionConfig(Table):
    """Weight or rejection of tokens that the engine sampled from another distribution than the trainer computes."""

    kind: CorrectionKind = "none"
    """tis: weight = clip(ratio, low, high). icepop: weight = ratio, outside of [low, high] the token is rejected.
    sequence-mask: a sample is rejected when the geometric mean of its ratios is outside of [low, high].
    sequence-mask-tis: the same, and its other tokens are weighted by their ratio."""
    low: float = Field(default=0.0, ge=0)
    """Default: that of the kind, see `CORRECTION_BOUNDS`."""
    high: float = Field(default=2.0, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _fill_from_kind(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("kind") not in CORRECTION_BOUNDS:
            return given
        low, high = CORRECTION_BOUNDS[given["kind"]]
        return {"low": low, "high": high, **given}

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low = {self.low} must be below high = {self.high}")
        return self


class ShapingConfig(Table):
    """What happens to a score, in the order of the keys."""

    normalize: bool = False
    """Subtract the running mean of all scores and divide by their running standard deviation."""
    overlong_buffer: float = Field(default=0.0, ge=0, le=1)
    """Share of sampling.max_new_tokens at its end in which the penalty grows from 0 to overlong_penalty (DAPO)."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    truncated: float | None = Field(default=None, le=1)
    """Of a truncated sample: in [0, 1] its score is multiplied by this, below 0 its score becomes this."""
    mask_truncated: bool = False
    """Leave truncated samples out of the loss; their scores stay in the group's statistics."""
    clip: float = Field(default=0.0, ge=0)
    """Largest absolute value of the shaped score, after the comparison in the group; 0: any."""


class FilterConfig(Table):
    """Dynamic sampling: groups that teach nothing are replaced by new ones, so that the batch keeps its size."""

    keep: Literal["all", "varied", "mean-inside"] = "all"
    """varied: groups whose scores differ (DAPO). mean-inside: groups whose mean score is inside (low, high)."""
    low: float = 0.0
    high: float = 1.0
    max_rounds: int = Field(default=10, ge=1)
    """Most prompts drawn for one step, in multiples of prompts_per_step; then the step trains on what it has."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.keep == "mean-inside" and self.low >= self.high:
            raise ValueError(f"low = {self.low} must be below high = {self.high}")
        return self


class AlgorithmConfig(Table):
    """What the trainer minimises. Formulas: `services/trainer/fourfold_trainer/algorithm/`."""

    preset: str = "grpo"
    advantage: Estimator = "grpo"
    advantage_epsilon: float = Field(default=1e-6, ge=0)
    """Added to a group's standard deviation."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of gae and reinforce; the estimators that compare samples have none."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    hole_mode: Literal["skip", "decay"] = "skip"
    """Tokens between two turns: invisible to the discount, or part of it as in OpenRLHF."""
    whiten: Literal["off", "center", "full"] = "off"
    """Of the advantages over all tokens of the batch."""
    loss: PolicyLoss = "ppo"
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """The importance ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = Field(default=0.2, gt=0)
    dual_clip: float = Field(default=0.0, ge=0)
    """Bounds the loss of a negative advantage at this multiple of it; above 1, or 0: off."""
    gspo_form: Literal["token", "sequence"] = "token"
    """Whose advantage a token's gradient carries: its own, or the mean of its sample."""
    ratio_min: float = Field(default=0.0, ge=0)
    """CISPO clips the detached ratio to [ratio_min, ratio_max]."""
    ratio_max: float = Field(default=5.0, gt=0)
    sapo_tau_positive: float = Field(default=1.0, gt=0)
    sapo_tau_negative: float = Field(default=1.05, gt=0)
    aggregation: Aggregation = "token-mean"
    """How token losses become one number; constant-length divides by sampling.max_new_tokens."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    kl: KlConfig = KlConfig()
    correction: CorrectionConfig = CorrectionConfig()
    shaping: ShapingConfig = ShapingConfig()
    filter: FilterConfig = FilterConfig()

    @property
    def compares_samples(self) -> bool:
        """Whether an advantage needs at least two samples of a prompt."""
        return self.advantage in _COMPARES

    @property
    def needs_critic(self) -> bool:
        """Whether a critic is trained."""
        return self.advantage == "gae"

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        name = given.get("preset", "grpo")
        if name not in PRESETS:
            raise ValueError(f"preset {name!r} is unknown; choose one of {', '.join(PRESETS)}")
        base = dict(PRESETS[name])
        if isinstance(correction := given.get("correction"), dict) and "kind" in correction:
            base.pop("correction", None)  # its bounds belong to its kind
        return _merged(base, given)

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.dual_clip and self.dual_clip <= 1:
            raise ValueError(f"dual_clip = {self.dual_clip} must be above 1, or 0 for none")
        if self.loss == "cispo" and self.ratio_min >= self.ratio_max:
            raise ValueError(f"ratio_min = {self.ratio_min} must be below ratio_max = {self.ratio_max}")
        shaping = self.shaping
        if self.advantage == "remax" and (
            shaping.normalize or shaping.overlong_buffer or shaping.truncated is not None
        ):
            raise ValueError(
                "shaping.normalize, shaping.overlong_buffer and shaping.truncated change a sample's score, but not "
                "that of the greedy answer which advantage = `remax` compares it with; remove them, or choose another "
                "advantage"
            )
        if self.gamma != 1 and self.advantage not in ("gae", "reinforce"):
            raise ValueError(f"gamma = {self.gamma} has no meaning for advantage = `{self.advantage}`; remove it")
        return self

    def check_batch(self, *, group_size: int, samples_per_step: int) -> None:
        """Raise ValueError when a batch of this shape cannot be trained on."""
        if self.compares_samples and group_size < 2:
            raise ValueError(
                f"batch.group_size = {group_size}, but algorithm.advantage = `{self.advantage}` compares the samples "
                f"of a prompt; raise it to at least 2, or use `gae` or `reinforce`"
            )
        if self.filter.keep == "varied" and group_size < 2:
            raise ValueError(
                f"batch.group_size = {group_size}, but algorithm.filter.keep = `varied` keeps groups whose scores "
                f"differ; raise it to at least 2, or use keep = `mean-inside` or `all`"
            )
        step = _KL_STEP * samples_per_step / self.kl.horizon
        if self.kl.target and not step < 1:
            raise ValueError(
                f"algorithm.kl.horizon = {self.kl.horizon} is too short for {samples_per_step} samples a step: the "
                f"coefficient could turn negative; raise it above {math.ceil(_KL_STEP * samples_per_step)}"
            )


def _merged(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the keys of `given` on top, table by table."""
    result = {**base, **given}
    for key, value in given.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping):
            result[key] = _merged(base[key], value)
    return result
