"""The algorithm's tables: a preset gives every key its value, and a recipe may change any of them.

[algorithm]              preset, how token losses are added up
[algorithm.advantage]    estimator of the advantages: `kind` and its keys (fourfold/algorithm/advantages.py)
[algorithm.loss]         policy loss: `kind` and its keys (fourfold/algorithm/losses.py)
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

from fourfold.algorithm import corrections, kl
from fourfold.algorithm.advantages import AnyAdvantage, Grpo
from fourfold.algorithm.aggregation import Mode
from fourfold.algorithm.losses import AnyPolicyLoss, PpoLoss
from fourfold.config.presets import PRESETS
from fourfold.table import Table

_KL_STEP: Final = 0.2  # of the adaptive controller, per horizon
# Of presets that name none.
_KINDS: Final = {"advantage": {"kind": "grpo"}, "loss": {"kind": "ppo"}}


class KlConfig(Table):
    """KL divergence to the frozen reference policy; with coef 0 no reference is started."""

    coef: float = Field(default=0.0, ge=0)
    placement: Literal["loss", "reward"] = "loss"
    """loss: a term of the loss, computed anew in every update. reward: subtracted from each token's reward."""
    estimator: kl.Kind = "k3"
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

    kind: Literal["none", corrections.Kind] = "none"
    """tis: weight = clip(ratio, low, high). icepop: weight = ratio, outside of [low, high] the token is rejected.
    sequence-mask: a sample is rejected when the geometric mean of its ratios is outside of [low, high].
    sequence-mask-tis: the same, and its other tokens are weighted by their ratio."""
    low: float = Field(default=0.0, ge=0)
    """Bounds; the defaults are those of the kind (`fourfold/algorithm/corrections.py`)."""
    high: float = Field(default=2.0, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _fill_from_kind(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("kind") not in corrections.DEFAULT_BOUNDS:
            return given
        low, high = corrections.DEFAULT_BOUNDS[given["kind"]]
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
    """What the trainer minimises. Losses and advantage estimators are registered in `fourfold/algorithm/`."""

    preset: str = "grpo"
    advantage: AnyAdvantage = Grpo()
    whiten: Literal["off", "center", "full"] = "off"
    """Of the advantages over all tokens of the batch."""
    loss: AnyPolicyLoss = PpoLoss()
    aggregation: Mode = "token-mean"
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
        return self.advantage.compares_samples

    @property
    def needs_critic(self) -> bool:
        """Whether a critic is trained."""
        return self.advantage.needs_critic

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        name = given.get("preset", "grpo")
        if name not in PRESETS:
            raise ValueError(f"preset {name!r} is unknown; choose one of {', '.join(PRESETS)}")
        return merged(default_tables(name), given)

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        shaping = self.shaping
        if self.advantage.needs_greedy_sample and (
            shaping.normalize or shaping.overlong_buffer or shaping.truncated is not None
        ):
            raise ValueError(
                f"shaping.normalize, shaping.overlong_buffer and shaping.truncated change a sample's score, but not "
                f"that of the greedy answer which advantage.kind = `{self.advantage.kind}` compares it with; remove "
                f"them, or choose another kind"
            )
        return self

    def check_batch(self, *, group_size: int, samples_per_step: int) -> None:
        """Raise ValueError when a batch of this shape cannot be trained on."""
        if self.compares_samples and group_size < 2:
            raise ValueError(
                f"batch.group_size = {group_size}, but algorithm.advantage.kind = `{self.advantage.kind}` compares the "
                f"samples of a prompt; raise it to at least 2, or use `gae` or `reinforce`"
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


def default_tables(preset: object) -> dict[str, Any]:
    """Return the keys that a preset sets, and the kinds of those that set none."""
    return merged(_KINDS, PRESETS.get(preset, {}) if isinstance(preset, str) else {})


def merged(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the keys of `given` on top, table by table; a table of another kind replaces the base's."""
    result = {**base, **given}
    for key, value in given.items():
        below = base.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            # The other keys belong to their kind: bounds of one correction have no meaning for another.
            result[key] = merged(below, value) if value.get("kind", below.get("kind")) == below.get("kind") else value
    return result
