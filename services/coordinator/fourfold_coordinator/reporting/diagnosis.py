"""In plain words what is wrong with a step, and what to do: for the log, the display, metrics.jsonl and the report.

    metrics of a step --> TrainingDiagnosis.examine --> findings of the step      metrics.jsonl: `diagnosis`, every step
                              |
                              '-------------> those to tell            log and display: once, then when it is clearly
                                                                       worse, or still so many steps later

Thresholds are those at which a run goes wrong more often than not; a healthy run is silent.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Final

from fourfold import metrics as m
from fourfold.config import Config

from ..state.ledger import BY_DESIGN, StepRow

_FEW_USEFUL: Final = 0.2
_MUCH_TRUNCATION: Final = 0.25
_LARGE_MISMATCH_KL: Final = 1e-2
_LARGE_UPDATE_KL: Final = 0.1
_SMALL_SAMPLE_SIZE: Final = 0.5
_MANY_REJECTED: Final = 0.2
# Of what it was within the window.
_ENTROPY_LEFT: Final = 0.5
_DRIFT_GROWTH: Final = 3.0
# Nats per token: a drift below this is rounding, whatever it was before.
_SMALL_DRIFT: Final = 2e-3
_WINDOW_STEPS: Final = 50
# Steps that a trend needs, and those that are averaged at each of its ends.
_TREND_STEPS: Final = 10
_END_STEPS: Final = 3

# A finding is told again when it is so many times as bad as when it was told,
_WORSE: Final = 1.5
# or after so many steps.
_REPEAT_STEPS: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is wrong."""

    key: str
    """The same for the same trouble in other steps."""
    text: str
    badness: float = 1.0
    """How bad it is, compared with other steps; above 0."""


class TrainingDiagnosis:
    """Examines the steps of a run in their order."""

    def __init__(self, *, compares_samples: bool = True, critic_begins: int = 1) -> None:
        """Begin without history.

        Args:
            compares_samples: whether the algorithm learns from differences inside of a group.
            critic_begins: step from which on a critic must foresee something.
        """
        self._compares_samples = compares_samples
        self._critic_begins = max(critic_begins, _TREND_STEPS)
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=_WINDOW_STEPS)
        self._first_drifts: list[float] = []
        self._told: dict[str, tuple[int, float]] = {}
        self._skipped_in_a_row = 0

    @classmethod
    def from_config(cls, config: Config) -> TrainingDiagnosis:
        """Return the one for a run."""
        critic = config.critic
        return cls(
            compares_samples=config.algorithm.compares_samples,
            critic_begins=critic.policy_starts_at_step + critic.warmup_steps,
        )

    def replay(self, rows: Sequence[StepRow]) -> None:
        """Take up where an earlier life of the run was; what was told then is not told again."""
        for row in rows:
            self.examine(row.step, row.metrics, skipped_reason=row.skipped_reason, dropped={})

    def examine(
        self, step: int, metrics: Mapping[str, Any], *, skipped_reason: str, dropped: Mapping[str, int]
    ) -> tuple[list[Finding], list[Finding]]:
        """Return what is wrong with a step, and what of it is to be told.

        Args:
            step: the next one.
            metrics: of the step.
            skipped_reason: the trainer's; empty when it trained.
            dropped: samples dropped in the step, by reason; those of `BY_DESIGN` are no trouble.
        """
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped_reason else 0
        self._recent.append(metrics)
        if len(self._first_drifts) < _TREND_STEPS:
            self._first_drifts = self._history(m.MISMATCH_MEAN)
        found = [
            *_of_scores(metrics, skipped_reason, self._skipped_in_a_row, compares_samples=self._compares_samples),
            *_of_lengths(metrics),
            *_of_policies(metrics, skipped=bool(skipped_reason)),
            *self._of_trends(step, metrics),
            *_of_drops(dropped),
        ]
        return found, [finding for finding in found if self._is_news(step, finding)]

    def _is_news(self, step: int, finding: Finding) -> bool:
        told_step, badness = self._told.get(finding.key, (step - _REPEAT_STEPS, finding.badness))
        if step - told_step < _REPEAT_STEPS and finding.badness < _WORSE * badness:
            return False
        self._told[finding.key] = step, finding.badness
        return True

    def _of_trends(self, step: int, metrics: Mapping[str, Any]) -> Iterator[Finding]:
        entropies = self._history(m.ENTROPY)
        if len(entropies) >= _TREND_STEPS:
            before, now = fmean(entropies[:_END_STEPS]), fmean(entropies[-_END_STEPS:])
            if now < _ENTROPY_LEFT * before:
                yield Finding(
                    key="entropy",
                    text=f"the entropy collapses: {before:.2g} nats {len(entropies)} steps ago, {now:.2g} now; the "
                    f"policy stops exploring: raise algorithm.clip_high or algorithm.entropy_coef, or lower "
                    f"trainer.learning_rate",
                    badness=before / max(now, 1e-9),
                )
        drifts = self._history(m.MISMATCH_MEAN)
        if len(drifts) >= _TREND_STEPS:
            before, now = median(self._first_drifts), fmean(drifts[-_END_STEPS:])
            if now > max(_DRIFT_GROWTH * before, _SMALL_DRIFT):
                yield Finding(
                    key="drift",
                    text=f"engine and trainer drift apart: {m.MISMATCH_MEAN} was {before:.2g} nats at first and is "
                    f"{now:.2g} now; train with algorithm.correction.kind = `tis`, or compare the precisions of both",
                    badness=now / max(before, 1e-9),
                )
        variances = self._history(m.EXPLAINED_VARIANCE)[-_END_STEPS:]
        if step > self._critic_begins and m.EXPLAINED_VARIANCE in metrics and variances and max(variances) < 0:
            yield Finding(
                key="critic",
                text=f"the critic does harm: {m.EXPLAINED_VARIANCE} = {variances[-1]:.2g}, worse than a constant; "
                f"change critic.learning_rate, train it alone for longer (critic.policy_starts_at_step), or scale the "
                f"scores (algorithm.shaping.normalize)",
                badness=1 - variances[-1],
            )

    def _history(self, name: str) -> list[float]:
        """Return a metric of the recent steps that have it, in order."""
        values = (metrics.get(name) for metrics in self._recent)
        return [value for value in values if value is not None and math.isfinite(value)]


def history(config: Config, rows: Sequence[StepRow]) -> list[dict[str, Any]]:
    """Return what was wrong in a run: as it was said last, in how many steps, the first and the last of them.

    Args:
        config: of the run.
        rows: all steps, in order.
    """
    doctor = TrainingDiagnosis.from_config(config)
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        findings, _ = doctor.examine(row.step, row.metrics, skipped_reason=row.skipped_reason, dropped={})
        for finding in findings:
            entry = found.setdefault(finding.key, {"text": "", "steps": 0, "first": row.step})
            entry |= {"text": finding.text, "steps": entry["steps"] + 1, "last": row.step}
    return sorted(found.values(), key=lambda entry: (-entry["steps"], entry["first"]))


def _of_scores(
    metrics: Mapping[str, Any], skipped_reason: str, in_a_row: int, *, compares_samples: bool
) -> Iterator[Finding]:
    useful = metrics.get(m.USEFUL_GROUPS, 1.0) if compares_samples else 1.0
    if skipped_reason:
        again = f" ({in_a_row} steps in a row)" if in_a_row > 1 else ""
        text = f"nothing was learned{again}: {_why_skipped(skipped_reason, metrics, useful)} [{skipped_reason}]"
        yield Finding(key=f"skipped {skipped_reason}", text=text, badness=in_a_row)
    elif useful == 0:
        yield Finding(key="useful", text=f"nothing to learn: {_why_equal(metrics)}", badness=_FEW_USEFUL / 1e-3)
    elif useful < _FEW_USEFUL:
        yield Finding(
            key="useful",
            text=f"little to learn: only {useful:.0%} of the groups have scores that differ (mean score "
            f"{metrics.get(m.REWARD_MEAN, 0.0):.2g}); raise sampling.temperature or batch.group_size, or pick prompts "
            f"that are neither too easy nor too hard",
            badness=_FEW_USEFUL / useful,
        )


def _why_equal(metrics: Mapping[str, Any]) -> str:
    """Say why no group has scores that differ, and what to do."""
    mean = metrics.get(m.REWARD_MEAN, 0.0)
    if metrics.get(m.REWARD_STD) == 0:
        return (
            f"every sample scored {mean:g}; look at the answers in samples.jsonl: the verifier may not see them as "
            f"meant, or the task is too {'easy' if mean > 0 else 'hard'}: pick other prompts, or a larger "
            f"batch.group_size"
        )
    return (
        f"within each group all samples scored the same (mean score {mean:.2g}): each prompt is too easy or too hard; "
        f"raise sampling.temperature or batch.group_size, or let [algorithm.filter] keep = `varied` draw others"
    )


def _why_skipped(reason: str, metrics: Mapping[str, Any], useful: float) -> str:
    """Say in words what the trainer's reason means, and what to do."""
    match reason:
        case "NO_ADVANTAGE" if useful == 0:
            return _why_equal(metrics)
        case "NO_ADVANTAGE":
            return (
                f"no token has an advantage, though scores differ (mean {metrics.get(m.REWARD_MEAN, 0.0):.2g}); look "
                f"at [algorithm.shaping], which may have made them equal, and at samples.jsonl"
            )
        case "NO_ACTION_TOKENS":
            if useful == 0:
                return f"no token was left to train on: {_why_equal(metrics)}"
            return (
                f"no token was left to train on: completions are empty, or all are masked out of the loss "
                f"({metrics.get(m.TRUNCATION_RATE, 0.0):.0%} were cut off); raise sampling.max_new_tokens, or set "
                f"algorithm.shaping.mask_truncated = false"
            )
        case "ALL_REJECTED":
            return (
                f"algorithm.correction rejected every token: engine and trainer disagree by more than its bounds "
                f"({m.MISMATCH_MEAN} = {metrics.get(m.MISMATCH_MEAN, 0.0):.2g} nats); widen algorithm.correction.low "
                f"and .high, or use kind = `tis`, which rejects none"
            )
        case "NOT_FINITE":
            return (
                "the gradient was infinite or no number, and the weights stayed as they were; when it lasts, lower "
                "trainer.learning_rate, and look for extreme scores in samples.jsonl"
            )
        case _:
            return "the trainer says why in its log"


def _of_lengths(metrics: Mapping[str, Any]) -> Iterator[Finding]:
    truncation = metrics.get(m.TRUNCATION_RATE) or 0.0
    if truncation > _MUCH_TRUNCATION:
        text = f"{truncation:.0%} of the completions were cut off; raise sampling.max_new_tokens"
        yield Finding(key="truncation", text=text, badness=truncation)


def _of_policies(metrics: Mapping[str, Any], *, skipped: bool) -> Iterator[Finding]:
    mismatch = metrics.get(m.MISMATCH_KL) or 0.0
    if mismatch > _LARGE_MISMATCH_KL:
        yield Finding(
            key="mismatch",
            text=f"engine and trainer disagree: {m.MISMATCH_KL} = {mismatch:.2g}; stale weights or another precision",
            badness=mismatch,
        )
    moved = metrics.get(m.APPROX_KL) or 0.0
    if moved > _LARGE_UPDATE_KL:
        text = f"large update: {m.APPROX_KL} = {moved:.2g}; lower trainer.learning_rate"
        yield Finding(key="update", text=text, badness=moved)
    size = metrics.get(m.EFFECTIVE_SAMPLE_SIZE)
    if size is not None and size < _SMALL_SAMPLE_SIZE:
        yield Finding(
            key="ess",
            text=f"few tokens carry the step: {m.EFFECTIVE_SAMPLE_SIZE} = {size:.2g}, because engine and trainer find "
            f"them differently likely; use algorithm.correction.kind = `tis`, or look for stale weights",
            badness=_SMALL_SAMPLE_SIZE / max(size, 1e-9),
        )
    rejected = metrics.get(m.REJECTED_TOKENS) or 0.0
    if rejected > _MANY_REJECTED and not skipped:
        text = (
            f"algorithm.correction rejected {rejected:.0%} of the tokens; widen its bounds, or look for stale weights"
        )
        yield Finding(key="rejected", text=text, badness=rejected)
    if impossible := metrics.get(m.MISMATCH_NONFINITE):
        text = f"{impossible:.0f} tokens were sampled with a log-probability that is not finite; look at the engine"
        yield Finding(key="nonfinite", text=text, badness=impossible)


def _of_drops(dropped: Mapping[str, int]) -> Iterator[Finding]:
    troubles = {reason: count for reason, count in dropped.items() if reason not in BY_DESIGN}
    if troubles:
        text = "dropped samples: " + ", ".join(f"{count} {reason}" for reason, count in troubles.items())
        yield Finding(key=f"dropped {' '.join(sorted(troubles))}", text=text, badness=sum(troubles.values()))
