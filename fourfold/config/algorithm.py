"""Defines the algorithm's tables of a recipe. A preset gives every key its value, and a recipe may change any of them.

[algorithm]              preset, aggregation of token losses, whitening, entropy bonus
[algorithm.advantage]    advantage estimator: `kind` and its keys (fourfold/algorithm/advantages/)
[algorithm.loss]         policy loss: `kind` and its keys (fourfold/algorithm/losses/)
[algorithm.kl]           distance to the reference policy
[algorithm.correction]   correction of the logprob mismatch between engine and trainer
[algorithm.shaping]      changes of a score before it becomes an advantage
[algorithm.filter]       replacement of groups without a learning signal
[algorithm.selection]    answers or pairs of a group that are trained on (fourfold/algorithm/selection.py)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, Literal, Self

from pydantic import Field, model_validator

from fourfold.algorithm import corrections, kl
from fourfold.algorithm.advantages.base import AnyAdvantage
from fourfold.algorithm.advantages.grpo import Grpo
from fourfold.algorithm.aggregation import Mode
from fourfold.algorithm.losses.base import AnyLoss
from fourfold.algorithm.losses.ppo import PpoLoss
from fourfold.algorithm.selection import SelectionConfig
from fourfold.config.rows import ROW_PRESETS
from fourfold.table import Table
from fourfold.text import choices

# A k1 penalty in the reward, as InstructGPT and OpenRLHF have it.
_REWARD_KL: Final[Mapping[str, Any]] = {
    "kl": {"coef": 0.01, "placement": "reward", "estimator": "k1"},
    "shaping": {"clip": 10.0},
}

# The `openrlhf-*`, `verl-*`, `trl-*` and `prime-rl` presets compute the same terms as those systems with their
# defaults; the recipes in recipes/presets have their optimizer, too, and say what still differs. The others follow
# their papers, and common practice where a paper gives no value. A key that a preset does not set has its default.
PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    # arXiv 1707.06347 with a critic, as InstructGPT (2203.02155) uses it.
    "ppo": {**_REWARD_KL, "advantage": {"kind": "gae"}, "whiten": "full"},
    # arXiv 2501.03262.
    "reinforce++": {**_REWARD_KL, "advantage": {"kind": "reinforce"}, "whiten": "full"},
    "reinforce++-baseline": {
        "advantage": {"kind": "reinforce-baseline"},
        "whiten": "full",
        "kl": {"coef": 1e-5, "placement": "loss", "estimator": "k2"},
        "correction": {"kind": "icepop", "low": 0.5, "high": 5.0},
        "filter": {"keep": "varied"},
    },
    # arXiv 2402.14740, whose baseline has the KL penalty.
    "rloo": {
        "advantage": {"kind": "rloo"},
        "aggregation": "sequence-sum",
        "kl": {"coef": 0.03, "placement": "reward", "estimator": "k1"},
    },
    # arXiv 2402.03300 with DAPO's token mean and without its KL term, as GRPO is commonly used today.
    "grpo": {},
    "grpo-paper": {
        "aggregation": "sequence-mean",
        "kl": {"coef": 0.04, "placement": "loss", "estimator": "k3", "k3_max": 0.0},
    },
    # arXiv 2503.20783.
    "dr-grpo": {"advantage": {"kind": "dr-grpo"}, "aggregation": "constant-length"},
    # arXiv 2503.14476.
    "dapo": {
        "loss": {"kind": "ppo", "clip_high": 0.28},
        "shaping": {"overlong_buffer": 0.2},
        "filter": {"keep": "varied"},
    },
    # arXiv 2507.18071.
    "gspo": {"loss": {"kind": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}, "aggregation": "sequence-mean"},
    # arXiv 2506.13585; bound of the ratio and correction from ScaleRL, 2510.13786. Both also have float32 logits, which
    # belong to the model: model.head_dtype = "float32".
    "cispo": {"loss": {"kind": "cispo", "ratio_max": 5.0}, "correction": {"kind": "tis", "high": 2.0}},
    # arXiv 2602.05261: GSPO whose samples weigh as much as they are long.
    "luspo": {"loss": {"kind": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}, "aggregation": "sequence-sum"},
    # arXiv 2507.20673.
    "gmpo": {"loss": {"kind": "gmpo"}, "aggregation": "sequence-mean"},
    # arXiv 2602.04879.
    "dppo": {"loss": {"kind": "dppo"}},
    # arXiv 2602.10693.
    "vespo": {"loss": {"kind": "vespo"}},
    # arXiv 2504.02546.
    "gpg": {"advantage": {"kind": "gpg"}, "loss": {"kind": "reinforce"}},
    # arXiv 2602.07078.
    "otb": {"advantage": {"kind": "otb"}},
    # arXiv 2504.05118.
    "vapo": {
        "advantage": {"kind": "gae", "lam_length_factor": 0.05, "lam_critic": 1.0},
        "loss": {"kind": "ppo", "clip_high": 0.28},
    },
    # arXiv 2511.20347.
    "sapo": {"loss": {"kind": "sapo"}, "aggregation": "sequence-mean"},
    # arXiv 2505.24298.
    "decoupled": {"loss": {"kind": "ppo", "clip_high": 0.28}, "correction": {"kind": "tis", "high": 2.0}},
    # verl's defaults, with the KL term of its GRPO examples.
    "verl-grpo": {
        "loss": {"kind": "ppo", "dual_clip": 3.0},
        "kl": {"coef": 0.001, "placement": "loss", "estimator": "k3"},
    },
    "verl-ppo": {"advantage": {"kind": "gae"}, "loss": {"kind": "ppo", "dual_clip": 3.0}, "whiten": "full"},
    # Defaults of TRL's GRPOTrainer.
    "trl-grpo": {
        "advantage": {"kind": "grpo", "epsilon": 1e-4},
        "correction": {"kind": "sequence-sum-mask-tis", "high": 3.0},
        "kl": {"k3_max": 0.0},
    },
    # prime-rl's defaults.
    "prime-rl": {"advantage": {"kind": "dr-grpo"}, "loss": {"kind": "dppo"}},
    "openrlhf-ppo": {**_REWARD_KL, "advantage": {"kind": "gae", "hole_mode": "decay"}, "whiten": "full"},
    "openrlhf-reinforce++": {**_REWARD_KL, "advantage": {"kind": "reinforce", "hole_mode": "decay"}, "whiten": "full"},
    "openrlhf-reinforce++-baseline": {**_REWARD_KL, "advantage": {"kind": "reinforce-baseline"}, "whiten": "full"},
    "openrlhf-rloo": {**_REWARD_KL, "advantage": {"kind": "rloo", "kl_in_score": False}},
    "openrlhf-grpo": {**_REWARD_KL, "advantage": {"kind": "grpo", "epsilon": 1e-9}},
    "openrlhf-dr-grpo": {**_REWARD_KL, "advantage": {"kind": "dr-grpo"}},
    "openrlhf-gspo": {
        **_REWARD_KL,
        "advantage": {"kind": "grpo", "epsilon": 1e-9},
        "loss": {"kind": "gspo", "form": "sequence"},
        "aggregation": "sequence-mean",
    },
}

SAMPLE_PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    # arXiv 2304.06767 (RAFT): supervised fine-tuning on the best answer of each group.
    "rejection-sampling": {
        "advantage": {"kind": "constant", "value": 1.0},
        "loss": {"kind": "nll"},
        "selection": {"kind": "best"},
    },
    # arXiv 2402.04792 and 2405.07863.
    "online-dpo": {"loss": {"kind": "dpo"}, "selection": {"kind": "best-worst"}},
    # arXiv 2306.13649: the reverse KL divergence on samples of the student.
    "on-policy-distill": {"advantage": {"kind": "distillation"}, "correction": {"kind": "tis"}},
}
"""The presets that learn from samples of engines otherwise than by maximising a score, as `PRESETS`."""
ALL_PRESETS: Final = {**PRESETS, **SAMPLE_PRESETS, **ROW_PRESETS}


# Kinds of a preset that sets none.
_KINDS: Final = {"advantage": {"kind": "grpo"}, "loss": {"kind": "ppo"}}


class KlConfig(Table):
    """KL divergence to the frozen reference policy; with coef 0 no reference is started."""

    coef: float = Field(default=0.0, ge=0)
    """Coefficient of the KL term. 0: there is none."""
    placement: Literal["loss", "reward"] = "loss"
    """loss: a term of the loss, computed anew in every update. reward: subtracted from each token's reward."""
    estimator: kl.Kind = "k3"
    """Estimator of the divergence of one token (docs/glossary.md); k2 is half of the squared log-ratio."""
    k3_max: float = Field(default=kl.MAX_K3, ge=0)
    """Upper bound of k3, as in verl and OpenRLHF. A token at the bound (of 10: p is 2.61 nats or more below f) has no
    slope in the loss, unless importance_weighted. 0: no bound, as in GRPO's paper and TRL."""
    importance_weighted: bool = False
    """Multiply k3 in the loss by exp(p - o), so that it stays an estimate for the current policy after updates, and its
    gradient one of the divergence (DeepSeek-V3.2)."""
    target: float = Field(default=0.0, ge=0)
    """Distance in nats per token to which the coefficient is adapted (arXiv 1909.08593); 0: coef is constant."""
    horizon: int = Field(default=10_000, ge=1)
    """Number of samples after which a distance of twice the target has raised the coefficient by a fifth."""

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.coef and self.placement == "loss" and self.estimator == "k1":
            raise ValueError(
                "estimator k1 has no gradient towards the reference when it is a term of the loss; use k2 or k3 "
                "there, or placement = `reward`"
            )
        if self.importance_weighted and not (self.coef and self.placement == "loss" and self.estimator == "k3"):
            raise ValueError(
                f"importance_weighted = true weighs k3 in the loss, not estimator = `{self.estimator}`, placement = "
                f"`{self.placement}`, coef = {self.coef:g}; set k3, `loss` and a coef above 0, or remove it"
            )
        if self.k3_max != kl.MAX_K3 and self.estimator != "k3":
            raise ValueError(
                f"k3_max = {self.k3_max:g} has no effect on estimator = `{self.estimator}`; remove it, or, if the "
                f"preset has it, set it to {kl.MAX_K3:g}"
            )
        if self.target and not self.coef:
            raise ValueError(
                f"target = {self.target} needs coef > 0: an adaptive coefficient of 0 never changes; set coef above 0, "
                f"such as 0.001, or target = 0"
            )
        return self


class CorrectionConfig(Table):
    """Correction of the policy loss for tokens whose log-probabilities differ between engine and trainer."""

    kind: Literal["none", corrections.Kind] = "none"
    """tis: weight = clip(ratio, low, high). icepop: weight = ratio; a token outside of [low, high] is rejected.
    sequence-mask: a sample is rejected when the geometric mean of its ratios is outside of [low, high].
    sequence-mask-tis: the same, and the tokens of the other samples are weighted by their ratio. docs/algorithms.md
    has the formulas of all."""
    low: float = Field(default=0.0, ge=0)
    """Lower bound; the default depends on the kind (docs/algorithms.md)."""
    high: float = Field(default=2.0, gt=0)
    """Upper bound; the default depends on the kind."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_kind(cls, given: Any) -> Any:
        # A kind of another type may not be hashable; pydantic reports it.
        if not isinstance(given, dict) or given.get("kind") not in tuple(corrections.DEFAULT_BOUNDS):
            return given
        low, high = corrections.DEFAULT_BOUNDS[given["kind"]]
        bounds = {"low": low, "high": high}
        unread = corrections.UNREAD.get(given["kind"])
        # The default is accepted: `dump` and `model_dump` write it, and services read it back.
        if unread and given.get(unread, bounds[unread]) != bounds[unread]:
            read = "high" if unread == "low" else "low"
            raise ValueError(
                f"{unread} = {given[unread]} has no effect: kind = `{given['kind']}` reads `{read}` alone; remove it"
            )
        return {**bounds, **given}

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low = {self.low} must be below high = {self.high}")
        return self


class ShapingConfig(Table):
    """Changes of a score, in the order of the keys."""

    normalize: bool = False
    """Subtract the running mean of all scores and divide by their running standard deviation."""
    overlong_buffer: float = Field(default=0.0, ge=0, le=1)
    """Share of sampling.max_new_tokens at its end in which the penalty grows from 0 to overlong_penalty (DAPO)."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """Penalty of a completion with all of the tokens that it may have."""
    truncated: float | None = Field(default=None, le=1)
    """In [0, 1]: the score of a truncated sample is multiplied by this. Below 0: its score is set to this."""
    mask_truncated: bool = False
    """Leave truncated samples out of the loss; their scores stay in the group's statistics."""
    count_masked: bool = False
    """Count the samples that mask_truncated leaves out, and their tokens, in the divisors of `aggregation`: the loss of
    the others then weighs less. TRL counts the samples, but not their tokens with token-mean."""
    clip: float = Field(default=0.0, ge=0)
    """Largest absolute value of the shaped score, after the comparison in the group; 0: no limit."""
    clip_low: float | None = Field(default=None, le=0)
    """Smallest value of the shaped score, if it is not -clip."""

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.count_masked and not self.mask_truncated:
            raise ValueError("count_masked = true counts what mask_truncated leaves out; set mask_truncated, too")
        if self.clip_low is not None and not self.clip:
            raise ValueError(f"clip_low = {self.clip_low} is the lower bound of clip = 0, which is no limit; set clip")
        return self

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Smallest and largest value of the shaped score; None: no limit."""
        return (-self.clip if self.clip_low is None else self.clip_low, self.clip) if self.clip else None


class FilterConfig(Table):
    """Dynamic sampling: groups without a learning signal are replaced by new ones, so that the batch keeps its size."""

    keep: Literal["all", "varied", "mean-inside"] = "all"
    """varied: groups whose scores differ (DAPO). mean-inside: groups whose mean score is in (low, high). Scores include
    the rewards of turns."""
    low: float = 0.0
    """Mean score that a group must exceed, with mean-inside."""
    high: float = 1.0
    """Mean score that a group must stay below, with mean-inside."""
    max_rounds: int = Field(default=10, ge=1)
    """Most prompts drawn for one step, in multiples of prompts_per_step; then the step trains on the groups it has."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.keep == "mean-inside" and self.low >= self.high:
            raise ValueError(f"low = {self.low} must be below high = {self.high}")
        return self


class AlgorithmConfig(Table):
    """The objective of the trainer. Losses and advantage estimators are registered in `fourfold/algorithm/`."""

    preset: str = "grpo"
    """Name of the values that the keys of [algorithm] have unless the recipe sets them."""
    advantage: AnyAdvantage = Grpo()
    whiten: Literal["off", "center", "full"] = "off"
    """Whitening of the advantages over the batch's tokens. center: subtract the mean. full: divide by the std, too."""
    loss: AnyLoss = PpoLoss()
    aggregation: Mode = "token-mean"
    """Reduction of token losses to one number; constant-length divides by sampling.max_new_tokens."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    sft_coef: float = Field(default=0.0, ge=0)
    """Weight of the mean negative log-likelihood of the preferred answers' tokens, beside a loss of pairs; or of all
    tokens of the loss, beside `distill`."""
    kl: KlConfig = KlConfig()
    correction: CorrectionConfig = CorrectionConfig()
    shaping: ShapingConfig = ShapingConfig()
    filter: FilterConfig = FilterConfig()
    selection: SelectionConfig = SelectionConfig()

    @property
    def needs_reference(self) -> bool:
        """True if a term of the loss, or the advantages, read log-probabilities of the reference."""
        return self.kl.coef > 0 or self.loss.needs_reference or self.distills

    @property
    def distills(self) -> bool:
        """True if the advantages follow from the reference, a teacher, and no score is read."""
        return self.advantage.reads_reference and not self.loss.of_answers

    @property
    def replaces_groups(self) -> bool:
        """True if scored groups without anything to train on are replaced by others."""
        return self.filter.keep != "all" or self.selection.kind != "none"

    @property
    def compares_samples(self) -> bool:
        """True if the advantage estimator needs at least two samples of a prompt."""
        return self.advantage.compares_samples and not self.loss.of_answers

    @property
    def needs_critic(self) -> bool:
        """True if a critic is trained."""
        return self.advantage.needs_critic

    @property
    def needs_entropies(self) -> bool:
        """True if a term of the loss or a metric reads the entropies of the loss tokens."""
        return self.loss.reports_entropy or self.entropy_coef > 0

    @property
    def needs_whole_trajectories(self) -> bool:
        """True if a token's loss depends on its trajectory, whose segments must then fit in one micro-batch."""
        return not self.loss.token_wise or self.correction.kind not in ("none", *corrections.OF_SINGLE_TOKENS)

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        name = given.get("preset", "grpo")
        if name not in list(ALL_PRESETS):  # a name of another type may not be hashable
            raise ValueError(f"preset = {name!r} is unknown; {choices(name, ALL_PRESETS)}")
        return merged(merged(_KINDS, ALL_PRESETS[name]), given)

    def _check_units(self) -> None:
        loss = self.loss
        if self.sft_coef and loss.reads != "pairs" and not loss.teacher_tokens:
            raise ValueError(
                f"sft_coef = {self.sft_coef:g} weighs the preferred answers of pairs, or answers beside a teacher, but "
                f"loss.kind = `{loss.kind}` reads {loss.reads}; remove it, or use a loss of pairs, such as `dpo`"
            )
        if not loss.of_answers:
            return
        unread = {
            "sft_coef": self.sft_coef > 0 and loss.trains == "scores",
            "kl.coef": self.kl.coef > 0,
            "entropy_coef": self.entropy_coef > 0,
            "correction.kind": self.correction.kind != "none",
            "advantage.kind": self.needs_critic or self.advantage.needs_greedy_sample,
            "whiten": self.whiten != "off",
            "shaping": self.shaping != ShapingConfig(),
        }
        if found := [key for key, is_set in unread.items() if is_set]:
            raise ValueError(
                f"{found[0]} has no effect on loss.kind = `{loss.kind}`, which reads whole answers and no advantages; "
                f"remove it, or, if the preset has it, set it to its default"
            )

    def _check_distillation(self) -> None:
        unread = {
            "kl.coef": self.kl.coef > 0,
            "shaping": self.shaping != ShapingConfig(mask_truncated=self.shaping.mask_truncated),
            "filter.keep": self.filter.keep != "all",
            "selection.kind": self.selection.kind != "none",
        }
        if self.distills and (found := [key for key, is_set in unread.items() if is_set]):
            raise ValueError(
                f"{found[0]} has no effect on advantage.kind = `{self.advantage.kind}`, which compares with a "
                f"teacher and reads no score; remove it, or, if the preset has it, set it to its default"
            )

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        shaping = self.shaping
        self._check_units()
        self._check_distillation()
        if self.advantage.needs_greedy_sample and (
            shaping.normalize or shaping.overlong_buffer or shaping.truncated is not None
        ):
            raise ValueError(
                f"shaping.normalize, shaping.overlong_buffer and shaping.truncated change a sample's score, not the "
                f"score of the greedy completion that advantage.kind = `{self.advantage.kind}` compares it with; "
                f"remove them, or choose another kind"
            )
        if self.advantage.compares_terms and (
            shaping.normalize or shaping.overlong_buffer or shaping.truncated is not None
        ):
            raise ValueError(
                f"shaping.normalize, shaping.overlong_buffer and shaping.truncated change a sample's score, but "
                f"advantage.kind = `{self.advantage.kind}` compares the terms of the score; remove them and score the "
                f"length by a table [[reward]] of its own, or choose another kind"
            )
        return self

    def _check_selection(self, group_size: int) -> None:
        """Check that the units that are made of a group are those that the loss reads."""
        loss, selection = self.loss, self.selection
        text = f"algorithm.selection.kind = `{selection.kind}`"
        varied = group_size == 2 and self.filter.keep == "varied"  # a group is a pair, then
        is_pair = selection.makes_pairs or (selection.kind == "none" and varied)
        if loss.reads == "pairs" and not is_pair:
            raise ValueError(
                f"algorithm.loss.kind = `{loss.kind}` reads pairs of different scores, but {text}, batch.group_size = "
                f"{group_size}; set selection.kind = `best-worst` or `all-pairs`"
            )
        if selection.kind == "none":
            return
        made = "pairs" if selection.makes_pairs else "trajectories"
        if loss.reads != made:
            raise ValueError(
                f"{text} makes {made}, but algorithm.loss.kind = `{loss.kind}` reads {loss.reads}; use `dpo` with "
                f"pairs, and `nll` with kind = `best`, `above` or `top`"
            )
        if self.compares_samples:
            raise ValueError(
                f"{text} leaves few samples of a prompt, and algorithm.advantage.kind = `{self.advantage.kind}` "
                f'compares them; set advantage = {{kind = "constant", value = 1.0}}'
            )
        if selection.kind == "all-pairs" and loss.tail_weight != 1:
            raise ValueError(
                f"{text} compares an answer with several others, and algorithm.loss weighs the tokens beyond the "
                f"length of one other (ld_alpha); remove ld_alpha, or use kind = `best-worst`"
            )
        least = 1 if selection.kind == "above" else selection.count + 1
        if group_size < least:
            raise ValueError(
                f"{text} selects of more than the batch.group_size = {group_size} samples of a prompt; raise it to at "
                f"least {least}"
            )

    def check_batch(self, *, group_size: int, samples_per_step: int) -> None:
        """Raise ValueError when a batch of this shape cannot be trained on."""
        if self.compares_samples and group_size < 2:
            raise ValueError(
                f"batch.group_size = {group_size}, but algorithm.advantage.kind = `{self.advantage.kind}` compares the "
                f"samples of a prompt; raise it to at least 2, or use `gae` or `reinforce`"
            )
        self._check_selection(group_size)
        if self.filter.keep == "varied" and group_size < 2:
            raise ValueError(
                f"batch.group_size = {group_size}, but algorithm.filter.keep = `varied` keeps groups whose scores "
                f"differ; raise it to at least 2, or use keep = `mean-inside` or `all`"
            )
        step = kl.MAX_ERROR * samples_per_step / self.kl.horizon
        if self.kl.target and not step < 1:
            raise ValueError(
                f"algorithm.kl.horizon = {self.kl.horizon} is too short for {samples_per_step} samples a step: the "
                f"coefficient could turn negative; raise it above {math.ceil(kl.MAX_ERROR * samples_per_step)}"
            )


def merged(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the keys of `given` on top, table by table; a table of another kind replaces the base's."""
    result = {**base, **given}
    for key, value in given.items():
        below = base.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            # The bounds of one correction, or the keys of one loss, have no meaning for another.
            result[key] = merged(below, value) if value.get("kind", below.get("kind")) == below.get("kind") else value
    return result
