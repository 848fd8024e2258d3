"""The numbers of a batch, and in words why there may be nothing to learn from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from fourfold import metrics as m

from .samples import Group

_FEW_USEFUL: Final = 0.2
_MUCH_TRUNCATION: Final = 0.25
_LARGE_MISMATCH_KL: Final = 1e-2
_LARGE_UPDATE_KL: Final = 0.1


def summarize(groups: Sequence[Group], *, policy_version: int) -> dict[str, float]:
    """Return the metrics of a batch that need no trainer.

    Args:
        groups: at least one, each with samples to train on.
        policy_version: of the weights that the trainer holds.
    """
    scores = [np.array([s.score for s in group.samples], np.float64) for group in groups]
    samples = [sample for group in groups for sample in group.samples]
    every = np.concatenate(scores)
    highest, lowest = every.max(), every.min()
    lengths = np.array([sample.action_mask.sum() for sample in samples])
    lags = np.array([policy_version - sample.oldest_version for sample in samples])
    return {
        m.REWARD_MEAN: float(every.mean()),
        m.REWARD_STD: float(every.std()),
        m.USEFUL_GROUPS: float(np.mean([s.max() > s.min() for s in scores])),
        m.GROUPS_ALL_MAX: float(np.mean([s.min() == highest for s in scores])),
        m.GROUPS_ALL_MIN: float(np.mean([s.max() == lowest for s in scores])),
        m.RESPONSE_LENGTH: float(lengths.mean()),
        m.TRUNCATION_RATE: float(np.mean([sample.truncated for sample in samples])),
        m.POLICY_LAG_MEAN: float(lags.mean()),
        m.POLICY_LAG_MAX: float(lags.max()),
    }


def diagnose(metrics: Mapping[str, Any], *, skipped_reason: str, dropped: Mapping[str, int]) -> str:
    """Return in words what is wrong with a step, for people; empty when nothing is."""
    found: list[str] = []
    useful = metrics.get(m.USEFUL_GROUPS, 1.0)
    mean = metrics.get(m.REWARD_MEAN, 0.0)
    if useful == 0 and metrics.get(m.REWARD_STD) == 0:
        found.append(
            f"nothing to learn: every sample scored {mean:g}; look at the answers in samples.jsonl: the verifier may "
            f"not see them as meant, or the task is too {'easy' if mean > 0 else 'hard'}"
        )
    elif useful == 0:
        found.append("nothing to learn: within each group all samples scored the same; raise sampling.temperature")
    elif useful < _FEW_USEFUL:
        found.append(
            f"little to learn: only {useful:.0%} of the groups have scores that differ; raise sampling.temperature or "
            f"batch.group_size, or pick prompts that are neither too easy nor too hard"
        )
    if skipped_reason:
        found.append(f"the trainer skipped the step: {skipped_reason}")
    if metrics.get(m.TRUNCATION_RATE, 0.0) > _MUCH_TRUNCATION:
        found.append(f"{metrics[m.TRUNCATION_RATE]:.0%} of the completions were cut off; raise sampling.max_new_tokens")
    if metrics.get(m.MISMATCH_KL, 0.0) > _LARGE_MISMATCH_KL:
        found.append(
            f"engine and trainer disagree: {m.MISMATCH_KL} = {metrics[m.MISMATCH_KL]:.2g}; stale weights or another "
            f"precision"
        )
    if metrics.get(m.APPROX_KL, 0.0) > _LARGE_UPDATE_KL:
        found.append(f"large update: {m.APPROX_KL} = {metrics[m.APPROX_KL]:.2g}; lower trainer.learning_rate")
    if dropped:
        found.append("dropped samples: " + ", ".join(f"{count} {reason}" for reason, count in dropped.items()))
    return "; ".join(found)
