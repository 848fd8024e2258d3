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
from fourfold.config.schema import AsynchronyConfig, Config

from ..state.ledger import BY_DESIGN, STALE, StepRow

_FEW_USEFUL: Final = 0.2
SMALL_SAMPLE_SIZE: Final = 0.5  # as a share of the tokens
# Margin of the first update: policy and reference are the same weights, and rounding makes less of it.
_FIRST_MARGIN: Final = 0.05
# Mean reward of the preferred answers. With beta = 0.1 they are exp(10) times less likely than at the start.
_FALLEN_REWARD: Final = -1.0
# Metric, limit, key and text of the findings about one value. The value is also their severity.
_LIMITS: Final = (
    (
        m.MISMATCH_KL,
        0.01,
        "mismatch",
        f"large logprob mismatch between engine and trainer{{lag}}: {m.MISMATCH_KL} = {{:.2g}}; {{fix}}",
    ),
    (m.APPROX_KL, 0.1, "update", f"large update: {m.APPROX_KL} = {{:.2g}}; lower trainer.learning_rate"),
    (
        m.REJECTED_TOKENS,
        0.2,
        "rejected",
        "algorithm.correction rejected {:.0%} of the tokens; widen its bounds, or {cure}",
    ),
    (
        m.MISMATCH_NONFINITE,
        0.0,
        "nonfinite",
        "{:.0f} tokens were sampled with a log-probability that is not finite; check the engine",
    ),
)
_LOWER_LAG: Final = "lower asynchrony.max_policy_lag"
# Ratio to the value at the start of the window.
_ENTROPY_RATIO: Final = 0.5
# Nats per token. Instruction-tuned models have 0.2 to 1 at temperature 1; above, they seldom follow an instruction.
_HIGH_ENTROPY: Final = 1.5
# Ratio to the median of the first steps.
_MISMATCH_GROWTH: Final = 3.0
# Nats per token. A smaller mismatch is rounding, even if it grew.
_SMALL_MISMATCH: Final = 2e-3
# Of an asynchronous run. Without these waits, steps would be at most 1 / (1 - 0.3) = 1.4 times as fast.
_TRAINER_WAITS: Final = 0.3
# Engines that have room for more than this share of the time could sample more at a larger lag.
_ENGINES_HAVE_ROOM: Final = 0.1
# A trainer that waits less than this is the bottleneck. Engines then usually have room, and idle engines are a waste.
_TRAINER_WORKS: Final = 0.05
_ENGINES_WAIT: Final = 0.5
_MOST_READY: Final = 0.75
# Below 1 %, dropped tokens cost less than a larger lag.
_STALE: Final = 0.01
# Of the mean lengths since the start. Those of 10 steps of 256 samples differ by up to 4 % by chance.
_LENGTH_BIAS: Final = 0.05
# Medians and means of waits and drops are over this many steps.
_RECENT_STEPS: Final = 10
_MISSED_TARGET: Final = 1.25
_WINDOW_STEPS: Final = 50
# A trend needs this many steps, and compares the means of this many at its ends: one unusual step is no trend.
_TREND_STEPS: Final = 10
_END_STEPS: Final = 3
# Share of the completions that are cut off, the number of steps in which it is exceeded, and the ratio of the last
# share to the first above which the share has not decreased.
_TRUNCATED: Final = 0.25
_TRUNCATION_STEPS: Final = 5
_FALLS: Final = 0.9

# A finding is shown again when its severity has grown by this factor, or after this number of steps.
_WORSE: Final = 1.5
_REPEAT_STEPS: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem of one step."""

    key: str  # equal for the same problem in other steps
    text: str
    severity: float = 1.0  # above 0; only findings with the same key can be compared


class TrainingDiagnosis:
    """Examines the steps of a run in order."""

    def __init__(
        self,
        *,
        compares_samples: bool = True,
        critic_begins: int = 1,
        asynchrony: AsynchronyConfig | None = None,
        corrects: bool = False,
        filters: bool = False,
        compares_with_start: bool = False,
    ) -> None:
        """Start without history.

        Args:
            compares_samples: The algorithm learns from score differences within a group.
            critic_begins: The first step at which the critic must predict better than a constant.
            asynchrony: Of the recipe; None: sampling and training alternate.
            corrects: The algorithm weighs tokens by their behavior log-probabilities.
            filters: The algorithm does not train on every group that is scored.
            compares_with_start: The first update compares the policy with itself.
        """
        self._compares_samples, self._corrects, self._filters = compares_samples, corrects, filters
        self._compares_with_start = compares_with_start
        self._critic_begins = max(critic_begins, _TREND_STEPS)
        self._rule = asynchrony or AsynchronyConfig()
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
            asynchrony=config.asynchrony,
            corrects=config.algorithm.correction.kind != "none" or config.algorithm.loss.corrects_lag,
            filters=config.algorithm.replaces_groups,
            compares_with_start=(
                config.prepares_reference and not config.needs_reference and config.batch.updates_per_step == 1
            ),
        )

    def replay(self, rows: Sequence[StepRow]) -> None:
        """Examine the steps of earlier processes of the run, so that their findings are not shown again."""
        for row in rows:
            self.examine(row.step, row.metrics, skipped_reason=row.skipped_reason, dropped={})

    def follow(self, rule: AsynchronyConfig) -> None:
        """Use another [asynchrony] for the next steps."""
        self._rule = rule

    def examine(
        self, step: int, metrics: Mapping[str, Any], *, skipped_reason: str, dropped: Mapping[str, int]
    ) -> tuple[list[Finding], list[Finding]]:
        """Return all findings of the next step, and those of them to show.

        `skipped_reason` is the trainer's, empty when it trained; `dropped` has the step's dropped samples by reason.
        """
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped_reason else 0
        self._recent.append(metrics)
        if len(self._first_mismatches) < _TREND_STEPS and step > self._rule.max_policy_lag:  # the lag still grows
            self._first_mismatches += _finite(metrics, m.MISMATCH_MEAN)
        found = [
            *self._check_scores(metrics, skipped_reason),
            *self._check_limits(metrics, skipped=bool(skipped_reason)),
            *self._check_trends(step, metrics),
            *self._check_truncation(),
            *self._check_pairs(step, metrics),
        ]
        expected: tuple[str, ...] = BY_DESIGN
        if self._rule.max_policy_lag:
            found += [*self._check_waits(metrics), *self._check_lag(step, metrics)]
            expected = (*BY_DESIGN, STALE)  # a finding of its own
        problems = {reason: count for reason, count in dropped.items() if reason not in expected}
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
                f"{metrics.get(m.REWARD_MEAN, 0.0):.2g}); {_spread_advice(metrics)}, or choose prompts that are "
                f"neither too easy nor too hard",
                severity=_FEW_USEFUL / useful,
            )

    def _check_limits(self, metrics: Mapping[str, Any], *, skipped: bool) -> Iterator[Finding]:
        lag = metrics.get(m.TOKEN_LAG_MEAN) or 0.0
        words = {"lag": "", "fix": "look for stale weights or another precision", "cure": "look for stale weights"}
        if self._rule.max_policy_lag and lag > 0:
            fix = f"{_LOWER_LAG}, or set asynchrony.target_mismatch"
            if not self._corrects:
                fix = f"nothing corrects for it: train with algorithm.correction.kind = `tis`, or {_LOWER_LAG}"
            words = {"lag": f" at a mean lag of {lag:.1f}", "fix": fix, "cure": _LOWER_LAG}
        for name, limit, key, text in _LIMITS:
            value = metrics.get(name) or 0.0
            if value > limit and not (skipped and name == m.REJECTED_TOKENS):  # the reason of the skip names these
                yield Finding(key=key, text=text.format(value, **words), severity=value)
        size = metrics.get(m.EFFECTIVE_SAMPLE_SIZE)
        if size is not None and size < SMALL_SAMPLE_SIZE:
            yield Finding(
                key="ess",
                text=f"few tokens dominate the step: {m.EFFECTIVE_SAMPLE_SIZE} = {size:.2g}, because engine and "
                f"trainer assign them different probabilities; use algorithm.correction.kind = `tis`, or "
                f"{words['cure']}",
                severity=SMALL_SAMPLE_SIZE / max(size, 1e-9),
            )

    def _check_pairs(self, step: int, metrics: Mapping[str, Any]) -> Iterator[Finding]:
        """Yield signs that pairs are compared with a wrong reference, or that both of their answers are unlearned."""
        margin = metrics.get(m.PAIR_MARGIN) or 0.0
        if not self._compares_with_start:
            return
        if step == 1 and abs(margin) > _FIRST_MARGIN:
            yield Finding(
                key="first margin",
                text=f"{m.PAIR_MARGIN} = {margin:.2g} before the first update, where policy and reference are the same "
                f"weights: remove the file of the reference from data.cache, and start the run again",
            )
        rewards = self._history(m.PAIR_CHOSEN_REWARD)[-_TREND_STEPS:]
        if len(rewards) == _TREND_STEPS and (reward := fmean(rewards)) < _FALLEN_REWARD and margin > 0:
            yield Finding(
                key="both fall",
                text=f"the preferred answers become less likely, too: {m.PAIR_CHOSEN_REWARD} = {reward:.2g} (mean of "
                f"{_TREND_STEPS} steps) while the margin grows; set algorithm.sft_coef, such as 0.1, or lower "
                f"trainer.learning_rate",
                severity=-reward,
            )

    def _check_waits(self, metrics: Mapping[str, Any]) -> Iterator[Finding]:
        """Yield the causes for which the trainer or the engines of an asynchronous run wait."""
        rule, names = self._rule, (m.TRAINER_WAIT, m.ROLLOUT_WAIT)
        waits = [self._history(name)[-_RECENT_STEPS:] for name in names]
        if min(map(len, waits)) < _RECENT_STEPS:
            return
        trainer, room = map(median, waits)
        measured = f"of the time (median of {_RECENT_STEPS} steps)"
        if trainer > _TRAINER_WAITS:
            limit = metrics.get(m.LAG_LIMIT, rule.max_policy_lag)
            if room <= _ENGINES_HAVE_ROOM:
                fix = "the engines are full; add an engine (rollout.replicas), or KV cache (rollout.kv_cache_gib)"
            elif limit < rule.max_policy_lag:
                fix = (
                    f"the engines have room for {room:.0%}, as the lag limit is lowered to {limit:.0f}; raise "
                    f"asynchrony.target_mismatch = {rule.target_mismatch:g}"
                )
            else:
                fix = f"the engines have room for {room:.0%}; raise asynchrony.max_policy_lag = {rule.max_policy_lag}"
            text = f"the trainer waits for samples {trainer:.0%} {measured}, and {fix}"
            yield Finding(key="trainer waits", text=text, severity=trainer)
        ready, running = (metrics.get(name) or 0.0 for name in (m.GROUPS_READY, m.GROUPS_RUNNING))
        if trainer < _TRAINER_WORKS and room > _ENGINES_WAIT and ready > _MOST_READY * (ready + running):
            fewer = "lower asynchrony.max_policy_lag, for younger samples at the same speed"
            fix = fewer if rule.max_policy_lag > 1 else "use fewer engines (rollout.replicas)"
            text = (
                f"the engines wait for the trainer: they have room for {room:.0%} {measured}, and {ready:.0f} of "
                f"{ready + running:.0f} groups are ready; {fix}, or give the trainer more GPUs"
            )
            yield Finding(key="engines wait", text=text, severity=room)

    def _check_lag(self, step: int, metrics: Mapping[str, Any]) -> Iterator[Finding]:
        """Yield the costs of the lag in an asynchronous run: dropped tokens, biased lengths, a missed target."""
        rule, dropped = self._rule, self._history(m.STALE_TOKENS)[-_RECENT_STEPS:]
        if dropped and (share := fmean(dropped)) > _STALE:
            text = (
                f"{share:.1%} of the sampled tokens were dropped as stale (mean of {len(dropped)} steps, at most "
                f"{_STALE:.0%} is normal); raise asynchrony.max_policy_lag = {rule.max_policy_lag}, or look for an "
                f"engine that is slow or restarts"
            )
            yield Finding(key="stale", text=text, severity=share)
        bias = metrics.get(m.LENGTH_BIAS) or 0.0
        if step >= _TREND_STEPS and abs(bias) > _LENGTH_BIAS and not self._filters:
            text = (
                f"trained completions are {abs(bias):.0%} {'shorter' if bias < 0 else 'longer'} than all scored ones "
                f"(above {_LENGTH_BIAS:.0%} the policy learns a wrong length), because samples of other lengths were "
                f"dropped; see their reasons in report.json, and raise asynchrony.max_policy_lag if it is STALE"
            )
            yield Finding(key="length bias", text=text, severity=abs(bias))
        # This number of steps after a change, the lag controller has decided again.
        steps = min(rule.max_policy_lag + _RECENT_STEPS, _WINDOW_STEPS)
        limits, mismatches = (self._history(name)[-steps:] for name in (m.LAG_LIMIT, m.MISMATCH_MEAN))
        decided = len(limits) == len(mismatches) == steps and len(set(limits)) == 1
        if rule.target_mismatch and decided and median(mismatches) > _MISSED_TARGET * rule.target_mismatch:
            text = (
                f"asynchrony.target_mismatch = {rule.target_mismatch:g} is missed: {m.MISMATCH_MEAN} = "
                f"{median(mismatches):.2g} (median of {steps} steps) at a lag limit of {limits[0]:.0f}, and a lower "
                f"one would not help; compare the precisions of engine and trainer, or raise it"
            )
            yield Finding(key="target", text=text, severity=median(mismatches) / rule.target_mismatch)

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
        if mismatches and len(self._first_mismatches) == _TREND_STEPS:
            before, now = median(self._first_mismatches), fmean(mismatches[-_END_STEPS:])
            if now > max(_MISMATCH_GROWTH * before, _SMALL_MISMATCH):
                yield Finding(
                    key="mismatch growth",
                    text=f"the logprob mismatch between engine and trainer grew: {m.MISMATCH_MEAN} was {before:.2g} "
                    f"nats in the first steps and is {now:.2g} now; train with algorithm.correction.kind = `tis`, or "
                    f"{_LOWER_LAG if self._rule.max_policy_lag else 'compare the precisions of engine and trainer'}",
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

    def _check_truncation(self) -> Iterator[Finding]:
        """Yield completions that stay cut off; at first, many policies still learn to write shorter ones."""
        rates = self._history(m.TRUNCATION_RATE)[-_TRUNCATION_STEPS:]
        if len(rates) == _TRUNCATION_STEPS and min(rates) > _TRUNCATED and rates[-1] > _FALLS * rates[0]:
            yield Finding(
                key="truncation",
                text=f"{rates[-1]:.0%} of the completions were cut off; raise sampling.max_new_tokens",
                severity=rates[-1],
            )

    def _history(self, name: str) -> list[float]:
        """Return a metric's finite values in the recent steps, in order."""
        return [value for metrics in self._recent for value in _finite(metrics, name)]


def summarize_findings(config: Config, rows: Sequence[StepRow]) -> list[dict[str, Any]]:
    """Return each finding of a run with its last text, its number of steps, and its first and last step."""
    diagnosis = TrainingDiagnosis.from_config(config)
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        findings, _ = diagnosis.examine(row.step, row.metrics, skipped_reason=row.skipped_reason, dropped={})
        for finding in findings:
            entry = found.setdefault(finding.key, {"text": "", "steps": 0, "first": row.step})
            entry |= {"text": finding.text, "steps": entry["steps"] + 1, "last": row.step}
    return sorted(found.values(), key=lambda entry: (-entry["steps"], entry["first"]))


def _explain_equal_scores(metrics: Mapping[str, Any]) -> str:
    """Return the reason why all groups have equal scores, and the fix."""
    mean = metrics.get(m.REWARD_MEAN, 0.0)
    if metrics.get(m.REWARD_STD) == 0:
        return (
            f"every sample scored {mean:g}; look at the answers in samples.jsonl: the verifier may not recognize their "
            f"format, or the task is too {'easy' if mean > 0 else 'hard'}: choose other prompts, or a larger "
            f"batch.group_size"
        )
    return (
        f"within each group all samples scored the same (mean score {mean:.2g}): each prompt is too easy or too hard; "
        f"{_spread_advice(metrics)}, or set [algorithm.filter] keep = `varied` to draw others"
    )


def _spread_advice(metrics: Mapping[str, Any]) -> str:
    """Return advice that makes the samples of a group differ; a high entropy needs no higher temperature."""
    entropy = metrics.get(m.ENTROPY) or 0.0
    if entropy < _HIGH_ENTROPY:
        return "raise sampling.temperature or batch.group_size"
    return (
        f"raise batch.group_size, or show the form of a right answer in data.system_prompt (not sampling.temperature: "
        f"the entropy is {entropy:.2g} nats per token already)"
    )


def _explain_skip(reason: str, metrics: Mapping[str, Any], useful: float) -> str:
    """Return the meaning of the trainer's reason to skip a step, and the fix."""
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
        case "NO_ACTION_TOKENS" if metrics.get(m.FILTER_ACCEPT_RATE) == 0:
            return (
                f"[algorithm.filter] and [algorithm.selection] left nothing of any group (mean score "
                f"{metrics.get(m.REWARD_MEAN, 0.0):.2g}); lower selection.threshold or min_margin, raise "
                f"batch.group_size, or choose easier prompts"
            )
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


def _finite(metrics: Mapping[str, Any], name: str) -> list[float]:
    """Return a metric as a list of one value; empty if it is missing or not finite."""
    value = metrics.get(name)
    return [value] if value is not None and math.isfinite(value) else []
