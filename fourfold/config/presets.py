"""Defines the presets: values of the keys of [algorithm], by name. A key that a preset does not set has its default.

The `openrlhf-*`, `verl-*`, `trl-*` and `prime-rl` presets compute the same terms as those systems with their defaults;
the recipes in recipes/presets have their optimizer, too, and say what still differs. The others follow their papers,
and common practice where a paper gives no value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

# A k1 penalty in the reward, as InstructGPT and OpenRLHF have it.
_REWARD_KL: Final[Mapping[str, Any]] = {
    "kl": {"coef": 0.01, "placement": "reward", "estimator": "k1"},
    "shaping": {"clip": 10.0},
}

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
