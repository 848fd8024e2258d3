"""Explains in words what is wrong with a training step and how to fix it.

Every step's findings go to metrics.jsonl (`diagnosis`) and to the report. The log and the display show a finding once,
and again when it is clearly worse or has lasted for many steps. Above these thresholds a run fails more often than not;
a healthy run has no findings.
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
SMALL_SAMPLE_SIZE: Final = 0.5  # as a share of the tokens
# Metric, limit, key and text of the findings about one value, which is their severity, too.
_LIMITS: Final = (
    (m.TRUNCATION_RATE, 0.25, "truncation", "{:.0%} of the completions were cut off; raise sampling.max_new_tokens"),
    (
        m.MISMATCH_KL,
        0.01,
        "mismatch",
        f"large logprob mismatch between engine and trainer: {m.MISMATCH_KL} = {{:.2g}}; look for stale weights or "
        f"another precision",
    ),
    (m.APPROX_KL, 0.1, "update", f"large update: {m.APPROX_KL} = {{:.2g}}; lower trainer.learning_rate"),
    (
        m.REJECTED_TOKENS,
        0.2,
        "rejected",
        "algorithm.correction rejected {:.0%} of the tokens; widen its bounds, or look for stale weights",
    ),
    (
        m.MISMATCH_NONFINITE,
        0.0,
        "nonfinite",
        "{:.0f} tokens were sampled with a log-probability that is not finite; check the engine",
    ),
)
# Ratio to the value at the start of the window.
_ENTROPY_RATIO: Final = 0.5
# Ratio to the median of the first steps.
_MISMATCH_GROWTH: Final = 3.0
# Nats per token. A smaller mismatch is rounding, even if it grew.
_SMALL_MISMATCH: Final = 2e-3
_WINDOW_STEPS: Final = 50
# A trend needs this many steps, and compares the means of this many at its ends: one unusual step is no trend.
_TREND_STEPS: Final = 10
_END_STEPS: Final = 3

# A finding is shown again when it is this many times as severe as when it was shown, or after so many steps.
_WORSE: Final = 1.5
_REPEAT_STEPS: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem of one step."""

    key: str  # identifies the same problem in other steps
    text: str
    severity: float = 1.0  # above 0; comparable between findings with the same key


class TrainingDiagnosis:
    """Examines the steps of a run in order."""

    def __init__(self, *, compares_samples: bool = True, critic_begins: int = 1) -> None:
        """Start without history.

        `compares_samples`: the algorithm learns from score differences within a group. `critic_begins`: the first step
        at which the critic must predict better than a constant.
        """
        self._compares_samples = compares_samples
        self._critic_begins = max(critic_begins, _TREND_STEPS)
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=_WINDOW_STEPS)
        self._first_mismatches: list[float] = []
        self._shown: dict[str, tuple[int, float]] = {}  # key -> step and severity when it was last shown
        self._skipped_in_a_row = 0

    @classmethod
    def from_config(cls, config: Config) -> TrainingDiagnosis:
        critic = config.critic
        return cls(
            compares_samples=config.algorithm.compares_samples,
            critic_begins=critic.policy_starts_at_step + critic.warmup_steps,
        )

    def replay(self, rows: Sequence[StepRow]) -> None:
        """Examine the steps of earlier processes of the run, so that their findings are not shown again."""
        for row in rows:
            self.examine(row.step, row.metrics, skipped_reason=row.skipped_reason, dropped={})

    def examine(
        self, step: int, metrics: Mapping[str, Any], *, skipped_reason: str, dropped: Mapping[str, int]
    ) -> tuple[list[Finding], list[Finding]]:
        """Return all findings of the next step, and those of them to show.

        `skipped_reason` is the trainer's, empty when it trained; `dropped` has the step's dropped samples by reason.
        """
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped_reason else 0
        self._recent.append(metrics)
        if len(self._first_mismatches) < _TREND_STEPS:
            self._first_mismatches = self._history(m.MISMATCH_MEAN)
        found = [
            *self._check_scores(metrics, skipped_reason),
            *_check_limits(metrics, skipped=bool(skipped_reason)),
            *self._check_trends(step, metrics),
        ]
        problems = {reason: count for reason, count in dropped.items() if reason not in BY_DESIGN}
        if problems:
            text = "dropped samples: " + ", ".join(f"{count} {reason}" for reason, count in problems.items())
            key = f"dropped {' '.join(sorted(problems))}"
            found.append(Finding(key=key, text=text, severity=sum(problems.values())))
        return found, [finding for finding in found if self._is_news(step, finding)]

    def _is_news(self, step: int, finding: Finding) -> bool:
        shown_step, severity = self._shown.get(finding.key, (step - _REPEAT_STEPS, finding.severity))
        if step - shown_step < _REPEAT_STEPS and finding.severity < _WORSE * severity:
            return False
        self._shown[finding.key] = step, finding.severity
        return True

    def _check_scores(self, metrics: Mapping[str, Any], skipped_reason: str) -> Iterator[Finding]:
        useful = metrics.get(m.USEFUL_GROUPS, 1.0) if self._compares_samples else 1.0
        if skipped_reason:
            count = self._skipped_in_a_row
            again = f" ({count} steps in a row)" if count > 1 else ""
            text = f"nothing was learned{again}: {_explain_skip(skipped_reason, metrics, useful)} [{skipped_reason}]"
            yield Finding(key=f"skipped {skipped_reason}", text=text, severity=count)
        elif useful == 0:
            yield Finding(key="useful", text=f"nothing to learn: {_explain_equal_scores(metrics)}", severity=200)
        elif useful < _FEW_USEFUL:
            yield Finding(
                key="useful",
                text=f"little to learn: only {useful:.0%} of the groups have scores that differ (mean score "
                f"{metrics.get(m.REWARD_MEAN, 0.0):.2g}); raise sampling.temperature or batch.group_size, or choose "
                f"prompts that are neither too easy nor too hard",
                severity=_FEW_USEFUL / useful,
            )

    def _check_trends(self, step: int, metrics: Mapping[str, Any]) -> Iterator[Finding]:
        entropies = self._history(m.ENTROPY)
        if len(entropies) >= _TREND_STEPS:
            before, now = fmean(entropies[:_END_STEPS]), fmean(entropies[-_END_STEPS:])
            if now < _ENTROPY_RATIO * before:
                yield Finding(
                    key="entropy",
                    text=f"the entropy fell from {before:.2g} to {now:.2g} nats in {len(entropies)} steps, so the "
                    f"policy stops exploring; raise algorithm.loss.clip_high or algorithm.entropy_coef, or lower "
                    f"trainer.learning_rate",
                    severity=before / max(now, 1e-9),
                )
        mismatches = self._history(m.MISMATCH_MEAN)
        if len(mismatches) >= _TREND_STEPS:
            before, now = median(self._first_mismatches), fmean(mismatches[-_END_STEPS:])
            if now > max(_MISMATCH_GROWTH * before, _SMALL_MISMATCH):
                yield Finding(
                    key="mismatch growth",
                    text=f"the logprob mismatch between engine and trainer grew: {m.MISMATCH_MEAN} was {before:.2g} "
                    f"nats in the first steps and is {now:.2g} now; train with algorithm.correction.kind = `tis`, or "
                    f"compare the precisions of engine and trainer",
                    severity=now / max(before, 1e-9),
                )
        variances = self._history(m.EXPLAINED_VARIANCE)[-_END_STEPS:]
        if step > self._critic_begins and m.EXPLAINED_VARIANCE in metrics and variances and max(variances) < 0:
            yield Finding(
                key="critic",
                text=f"the critic predicts worse than a constant: {m.EXPLAINED_VARIANCE} = {variances[-1]:.2g}; change "
                f"critic.learning_rate, train the critic alone for longer (critic.policy_starts_at_step), or scale the "
                f"scores (algorithm.shaping.normalize)",
                severity=1 - variances[-1],
            )

    def _history(self, name: str) -> list[float]:
        """Return a metric's finite values in the recent steps, in order."""
        values = (metrics.get(name) for metrics in self._recent)
        return [value for value in values if value is not None and math.isfinite(value)]


def summarize_findings(config: Config, rows: Sequence[StepRow]) -> list[dict[str, Any]]:
    """Return each finding of a run with its last text, its number of steps, the first and the last of them."""
    diagnosis = TrainingDiagnosis.from_config(config)
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        findings, _ = diagnosis.examine(row.step, row.metrics, skipped_reason=row.skipped_reason, dropped={})
        for finding in findings:
            entry = found.setdefault(finding.key, {"text": "", "steps": 0, "first": row.step})
            entry |= {"text": finding.text, "steps": entry["steps"] + 1, "last": row.step}
    return sorted(found.values(), key=lambda entry: (-entry["steps"], entry["first"]))


def _explain_equal_scores(metrics: Mapping[str, Any]) -> str:
    """Return why no group has scores that differ, and the fix."""
    mean = metrics.get(m.REWARD_MEAN, 0.0)
    if metrics.get(m.REWARD_STD) == 0:
        return (
            f"every sample scored {mean:g}; look at the answers in samples.jsonl: the verifier may not recognize their "
            f"format, or the task is too {'easy' if mean > 0 else 'hard'}: choose other prompts, or a larger "
            f"batch.group_size"
        )
    return (
        f"within each group all samples scored the same (mean score {mean:.2g}): each prompt is too easy or too hard; "
        f"raise sampling.temperature or batch.group_size, or set [algorithm.filter] keep = `varied` to draw others"
    )


def _explain_skip(reason: str, metrics: Mapping[str, Any], useful: float) -> str:
    """Return what the trainer's reason to skip a step means, and the fix."""
    match reason:
        case "NO_ADVANTAGE" if useful == 0:
            return _explain_equal_scores(metrics)
        case "NO_ADVANTAGE":
            return (
                f"no token has an advantage, though scores differ (mean {metrics.get(m.REWARD_MEAN, 0.0):.2g}); check "
                f"[algorithm.shaping], which may have made them equal, and samples.jsonl"
            )
        case "NO_ACTION_TOKENS" if useful == 0:
            return f"no token was left to train on: {_explain_equal_scores(metrics)}"
        case "NO_ACTION_TOKENS":
            return (
                f"no token was left to train on: completions are empty, or the loss masks all of them "
                f"({metrics.get(m.TRUNCATION_RATE, 0.0):.0%} were cut off); raise sampling.max_new_tokens, or set "
                f"algorithm.shaping.mask_truncated = false"
            )
        case "ALL_REJECTED":
            return (
                f"algorithm.correction rejected every token: the logprob mismatch between engine and trainer exceeds "
                f"its bounds ({m.MISMATCH_MEAN} = {metrics.get(m.MISMATCH_MEAN, 0.0):.2g} nats); widen "
                f"algorithm.correction.low and .high, or use kind = `tis`, which rejects none"
            )
        case "NOT_FINITE":
            return (
                "the gradient was infinite or NaN, and the weights did not change; if this continues, lower "
                "trainer.learning_rate, and look for extreme scores in samples.jsonl"
            )
        case _:
            return "see the trainer's log"


def _check_limits(metrics: Mapping[str, Any], *, skipped: bool) -> Iterator[Finding]:
    for name, limit, key, text in _LIMITS:
        value = metrics.get(name) or 0.0
        if value > limit and not (skipped and name == m.REJECTED_TOKENS):  # the reason of the skip tells of these
            yield Finding(key=key, text=text.format(value), severity=value)
    size = metrics.get(m.EFFECTIVE_SAMPLE_SIZE)
    if size is not None and size < SMALL_SAMPLE_SIZE:
        yield Finding(
            key="ess",
            text=f"few tokens dominate the step: {m.EFFECTIVE_SAMPLE_SIZE} = {size:.2g}, because engine and trainer "
            f"assign them different probabilities; use algorithm.correction.kind = `tis`, or look for stale weights",
            severity=SMALL_SAMPLE_SIZE / max(size, 1e-9),
        )
