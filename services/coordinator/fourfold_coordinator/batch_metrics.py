"""The numbers of a batch, and in words why there may be nothing to learn from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from fourfold import metrics as m

from .ledger import BY_DESIGN
from .samples import Batch

_FEW_USEFUL: Final = 0.2
_MUCH_TRUNCATION: Final = 0.25
_LARGE_MISMATCH_KL: Final = 1e-2
_LARGE_UPDATE_KL: Final = 0.1


def summarize(batch: Batch, *, policy_version: int) -> dict[str, float]:
    """Return the metrics of a batch that need no trainer, over all that was generated: before the filter.

    Args:
        batch: with at least one group.
        policy_version: of the weights that the trainer holds.
    """
    groups = batch.generated()
    scores = [np.array([s.score for s in group.samples], np.float64) for group in groups]
    samples = [sample for group in groups for sample in group.samples]
    every = np.concatenate(scores)
    highest, lowest = every.max(), every.min()
    lengths = np.array([sample.action_mask.sum() for sample in samples])
    lags = np.array([policy_version - sample.oldest_version for sample in samples])
    result = {
        m.REWARD_MEAN: float(every.mean()),
        m.REWARD_STD: float(every.std()),
        m.REWARD_MIN: float(lowest),
        m.REWARD_MAX: float(highest),
        m.FILTER_ACCEPT_RATE: batch.groups_accepted / len(groups),
        m.PROMPTS_CONSUMED: float(batch.prompts_drawn),
        m.RESPONSE_LENGTH: float(lengths.mean()),
        m.RESPONSE_LENGTH_P95: float(np.percentile(lengths, 95)),
        m.RESPONSE_LENGTH_MAX: float(lengths.max()),
        m.TRUNCATION_RATE: float(np.mean([sample.truncated for sample in samples])),
        m.POLICY_LAG_MEAN: float(lags.mean()),
        m.POLICY_LAG_MAX: float(lags.max()),
    }
    if len(every) > len(groups):  # groups of one cannot differ
        result |= {
            m.USEFUL_GROUPS: float(np.mean([s.max() > s.min() for s in scores])),
            m.GROUPS_ALL_MAX: float(np.mean([s.min() == highest for s in scores])),
            m.GROUPS_ALL_MIN: float(np.mean([s.max() == lowest for s in scores])),
        }
    return result


def diagnose(
    metrics: Mapping[str, Any], *, skipped_reason: str, dropped: Mapping[str, int], compares_samples: bool = True
) -> str:
    """Return in words what is wrong with a step, for people; empty when nothing is.

    Args:
        metrics: of the step.
        skipped_reason: the trainer's; empty when it trained.
        dropped: samples dropped in the step, by reason; those of `BY_DESIGN` are no trouble.
        compares_samples: whether the algorithm learns from differences inside of a group.
    """
    found: list[str] = []
    useful = metrics.get(m.USEFUL_GROUPS, 1.0) if compares_samples else 1.0
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
    troubles = [f"{count} {reason}" for reason, count in dropped.items() if reason not in BY_DESIGN]
    if troubles:
        found.append("dropped samples: " + ", ".join(troubles))
    return "; ".join(found)
