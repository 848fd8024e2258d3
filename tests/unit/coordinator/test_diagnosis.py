"""Tests of the findings about a step: their text, and how often each is logged."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

from fourfold import metrics as m
from fourfold.algorithm.losses import PpoLoss
from fourfold.config.schema import AsynchronyConfig, Config
from fourfold_coordinator.reporting.batch_metrics import compute_batch_metrics
from fourfold_coordinator.reporting.diagnosis import TrainingDiagnosis, summarize_findings
from fourfold_coordinator.state.ledger import StepRow
from tests.fakes.toy import make_config
from tests.unit.coordinator.test_batch_metrics import collected, group

HEALTHY: dict[str, Any] = {"groups/useful": 0.8, "reward/mean": 0.5, "reward/std": 0.5}


def numbers_of(*scores: tuple[float, ...]) -> dict[str, float]:
    return compute_batch_metrics(collected(*(group(*s) for s in scores)), policy_version=2)


def diagnose(metrics: dict[str, Any], *, skipped_reason: str = "", dropped: dict[str, int] | None = None) -> str:
    found, news = TrainingDiagnosis().examine(1, metrics, skipped_reason=skipped_reason, dropped=dropped or {})
    assert found == news, "the first time everything is news"
    return "; ".join(finding.text for finding in found)


@pytest.mark.parametrize(
    ("scores", "extra", "words"),
    [
        ([(0, 0), (0, 0)], {}, "every sample scored 0; .* too hard"),
        ([(1, 1), (1, 1)], {}, "every sample scored 1; .* too easy"),
        ([(1, 1), (0, 0)], {}, r"within each group all samples scored the same \(mean score 0.5\).*raise sampling"),
        ([(1, 0)] + [(0, 0)] * 9, {}, "only 10% of the groups"),
        ([(1, 0)], {"mismatch/kl_k3": 0.5}, "large logprob mismatch between engine and trainer: mismatch/kl_k3 = 0.5"),
        ([(1, 0)], {"policy/approx_kl": 0.5}, "lower trainer.learning_rate"),
        ([(1, 0)], {"mismatch/ess": 0.25}, "few tokens dominate the step: mismatch/ess = 0.25"),
        ([(1, 0)], {"mismatch/rejected_token_fraction": 0.4}, "rejected 40% of the tokens"),
        ([(1, 0)], {"mismatch/nonfinite": 3.0}, "3 tokens were sampled with a log-probability that is not finite"),
    ],
)
def test_what_is_wrong_with_a_step_is_said_in_words(
    scores: list[tuple[float, float]], extra: dict[str, float], words: str
) -> None:
    text = diagnose(numbers_of(*scores) | extra)
    assert re.search(words, text), text


@pytest.mark.parametrize(
    ("reason", "scores", "extra", "words"),
    [
        ("NO_ADVANTAGE", [(0, 0), (0, 0)], {}, "nothing was learned: every sample scored 0; .* too hard: choose other"),
        ("NO_ADVANTAGE", [(1, 1), (0, 0)], {}, r"each prompt is too easy or too hard; raise sampling.temperature"),
        (
            "NO_ADVANTAGE",
            [(1, 1), (0, 0)],
            {"policy/entropy": 3.3},
            r"raise batch.group_size, .*\(not sampling.temperature: the entropy is 3.3 nats per token already\)",
        ),
        ("NO_ADVANTAGE", [(1, 0)], {}, r"no token has an advantage, though scores differ \(mean 0.5\).*shaping"),
        ("NO_ACTION_TOKENS", [(1, 0)], {"length/truncation_rate": 1.0}, "100% were cut off.; raise sampling.max_new"),
        ("NO_ACTION_TOKENS", [(1, 1)], {}, "no token was left to train on: every sample scored 1"),
        ("ALL_REJECTED", [(1, 0)], {"mismatch/rejected_token_fraction": 1.0}, "rejected every token.*widen algorithm"),
        ("NOT_FINITE", [(1, 0)], {}, "the gradient was infinite or NaN.*lower trainer.learning_rate"),
        ("SOMETHING_NEW", [(1, 0)], {}, r"see the trainer's log \[SOMETHING_NEW\]"),
    ],
)
def test_why_a_step_was_skipped_and_what_to_do_is_said_in_words(
    reason: str, scores: list[tuple[float, ...]], extra: dict[str, float], words: str
) -> None:
    text = diagnose(numbers_of(*scores) | extra, skipped_reason=reason)
    assert re.search(words, text), text
    assert text.count("nothing") == 1 and text.count("rejected") <= 1, "said once"


@pytest.mark.parametrize("seed", range(20))
def test_no_metrics_end_a_run(seed: int) -> None:
    """A run of which no group had differing scores for 50 steps, so that nothing was trained, ended by an error."""
    chosen = random.Random(seed)
    names = [value for name, value in vars(m).items() if name.isupper() and isinstance(value, str)]
    rule = AsynchronyConfig(max_policy_lag=seed % 3, target_mismatch=0.02 * bool(seed % 3))
    diagnosis = TrainingDiagnosis(asynchrony=rule)
    known: list[str] = []
    for step in range(1, 150):
        if step % 60 == 15 or step == 1:  # which metrics the steps have changes rarely
            known = [name for name in names if chosen.random() < 0.7 * (step < 60)]
        metrics = {name: chosen.choice([0.0, 0.5, 1.0, -1.0, 1e30, math.nan, math.inf]) for name in known}
        diagnosis.examine(step, metrics, skipped_reason=chosen.choice(["", "NO_ADVANTAGE"]), dropped={})


def test_an_algorithm_that_compares_nothing_learns_from_equal_scores() -> None:
    same = numbers_of((1, 1), (0, 0))
    assert TrainingDiagnosis(compares_samples=False).examine(1, same, skipped_reason="", dropped={"BASELINE": 2}) == (
        [],
        [],
    )
    assert "2 RAISED" in diagnose(same, dropped={"FILTERED": 4, "RAISED": 2})
    assert "FILTERED" not in diagnose(same, dropped={"FILTERED": 4, "RAISED": 2})


def told(diagnosis: TrainingDiagnosis, step: int, **changes: Any) -> list[str]:
    metrics = HEALTHY | {name.replace("__", "/"): value for name, value in changes.items()}
    found, news = diagnosis.examine(step, metrics, skipped_reason="", dropped={})
    assert found, "metrics.jsonl has it at every step"
    return [finding.text for finding in news]


def test_the_same_trouble_is_told_once_then_when_it_is_clearly_worse_then_after_many_steps() -> None:
    diagnosis = TrainingDiagnosis()
    assert len(told(diagnosis, 1, mismatch__rejected_token_fraction=0.4)) == 1
    assert [told(diagnosis, step, mismatch__rejected_token_fraction=0.42) for step in range(2, 20)] == [[]] * 18
    assert told(diagnosis, 20, mismatch__rejected_token_fraction=0.62) == [
        "algorithm.correction rejected 62% of the tokens; widen its bounds, or look for stale weights"
    ]
    assert [told(diagnosis, step, mismatch__rejected_token_fraction=0.7) for step in range(21, 70)] == [[]] * 49
    assert len(told(diagnosis, 70, mismatch__rejected_token_fraction=0.7)) == 1
    assert len(told(diagnosis, 71, mismatch__rejected_token_fraction=0.7, policy__approx_kl=0.2)) == 1, (
        "other trouble is news"
    )


@pytest.mark.parametrize(
    ("rates", "told_at"),
    [
        ([0.8, 0.8, 0.8, 0.8, 0.8, 0.8], [5]),
        ([0.8, 0.6, 0.5, 0.4, 0.3, 0.3], []),  # it learns to write shorter completions
        ([0.8, 0.6, 0.5, 0.5, 0.5, 0.5, 0.5], [7]),
        ([0.1, 0.8, 0.8, 0.8, 0.8, 0.8], [6]),
    ],
)
def test_completions_that_stay_cut_off_are_told(rates: list[float], told_at: list[int]) -> None:
    diagnosis, tells = TrainingDiagnosis(), []
    for step, rate in enumerate(rates, start=1):
        _, news = diagnosis.examine(step, HEALTHY | {"length/truncation_rate": rate}, skipped_reason="", dropped={})
        tells += [step] * len(news)
    assert tells == told_at
    assert not news or news[0].text == f"{rates[-1]:.0%} of the completions were cut off; raise sampling.max_new_tokens"


def test_steps_skipped_in_a_row_are_told_ever_more_seldom() -> None:
    diagnosis, tells = TrainingDiagnosis(), []
    for step in range(1, 13):
        found, news = diagnosis.examine(step, HEALTHY, skipped_reason="NOT_FINITE", dropped={})
        assert len(found) == 1
        tells += [step] * len(news)
    assert tells == [1, 2, 3, 5, 8, 12]
    assert "12 steps in a row" in found[0].text
    diagnosis.examine(13, HEALTHY, skipped_reason="", dropped={})
    found, news = diagnosis.examine(14, HEALTHY, skipped_reason="NOT_FINITE", dropped={})
    assert "in a row" not in found[0].text and not news


def examined(name: str, values: list[float], **options: Any) -> list[str]:
    """Return what is told of the steps of a run with these values of one metric."""
    watching = TrainingDiagnosis(**options)
    return [
        f"{step} {finding.key}"
        for step, value in enumerate(values, 1)
        for finding in watching.examine(step, HEALTHY | {name: value}, skipped_reason="", dropped={})[1]
    ]


def test_an_entropy_that_falls_to_half_within_the_window_is_a_collapse() -> None:
    assert examined("policy/entropy", [1.0] * 20 + [0.4] * 3) == ["23 entropy"]
    assert examined("policy/entropy", [1.0] * 20 + [0.4] + [1.0] * 3) == [], "one step is no trend"
    slowly = [2.0 * 0.99**step for step in range(200)]  # 0.61 of it within 50 steps
    assert examined("policy/entropy", slowly) == []


def test_a_mismatch_of_three_times_the_first_steps_is_told_unless_it_is_rounding() -> None:
    assert examined("mismatch/logprob_diff_mean", [0.01] * 12 + [0.02] * 10 + [0.032] * 3) == ["25 mismatch growth"]
    assert examined("mismatch/logprob_diff_mean", [1e-5] * 12 + [1e-3] * 10) == []
    assert examined("mismatch/logprob_diff_mean", [0.01] * 12 + [float("nan")] * 10) == []


def test_a_critic_that_does_harm_is_told_after_its_warm_up() -> None:
    assert examined("value/explained_variance", [-0.5] * 12) == ["11 critic"]
    assert examined("value/explained_variance", [-0.5] * 12, critic_begins=20) == []
    assert examined("value/explained_variance", [-0.5, 0.2] * 10) == []


ASYNC = AsynchronyConfig(max_policy_lag=2)
RUNNING: dict[str, Any] = HEALTHY | {
    m.TOKEN_LAG_MEAN: 1.2, m.LAG_LIMIT: 2.0, m.TRAINER_WAIT: 0.04, m.ROLLOUT_WAIT: 0.3, m.STALE_TOKENS: 0.0,
    m.GROUPS_RUNNING: 10.0, m.GROUPS_READY: 30.0,
    m.LENGTH_BIAS: 0.01, m.MISMATCH_MEAN: 0.01, m.EFFECTIVE_SAMPLE_SIZE: 0.95,
}  # fmt: skip


def last_findings(
    changes: dict[str, float], *, steps: int = 20, dropped: dict[str, int] | None = None, **options: Any
) -> str:
    """Return the findings of the last of some equal steps of a run with a lag."""
    diagnosis = TrainingDiagnosis(**{"asynchrony": ASYNC, **options})
    for step in range(1, steps + 1):
        found, _ = diagnosis.examine(step, RUNNING | changes, skipped_reason="", dropped=dropped or {})
    return "; ".join(finding.text for finding in found)


def test_nothing_is_said_of_an_asynchronous_run_that_works() -> None:
    assert last_findings({}) == ""
    assert last_findings({}, dropped={"STALE": 8}) == "", "below 1 % of the tokens"
    assert last_findings({m.TRAINER_WAIT: 0.3, m.ROLLOUT_WAIT: 0.9, m.STALE_TOKENS: 0.01, m.LENGTH_BIAS: -0.05}) == ""


@pytest.mark.parametrize("other", [{m.TRAINER_WAIT: 0.05}, {m.GROUPS_READY: 30.0}, {m.ROLLOUT_WAIT: 0.5}])
def test_room_in_engines_is_a_finding_only_if_the_trainer_works_and_most_groups_are_ready(
    other: dict[str, float],
) -> None:
    idle = {m.ROLLOUT_WAIT: 1.0, m.GROUPS_READY: 40.0, m.GROUPS_RUNNING: 0.0}
    assert "use fewer engines" in last_findings(idle, asynchrony=AsynchronyConfig(max_policy_lag=1))
    assert last_findings({m.ROLLOUT_WAIT: 1.0, m.GROUPS_READY: 31.0} | other) == ""


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {m.TRAINER_WAIT: 0.6, m.ROLLOUT_WAIT: 0.02},
            "the trainer waits for samples 60% of the time (median of 10 steps), and the engines are full; add an "
            "engine (rollout.replicas), or KV cache (rollout.kv_cache_gib)",
        ),
        (
            {m.TRAINER_WAIT: 0.6, m.ROLLOUT_WAIT: 0.6},
            "the trainer waits for samples 60% of the time (median of 10 steps), and the engines have room for "
            "60%; raise asynchrony.max_policy_lag = 2",
        ),
        (
            {m.TRAINER_WAIT: 0.04, m.ROLLOUT_WAIT: 0.55, m.GROUPS_READY: 31.0},
            "the engines wait for the trainer: they have room for 55% of the time (median of 10 steps), and 31 of 41 "
            "groups are ready; lower asynchrony.max_policy_lag, for younger samples at the same speed, or give the "
            "trainer more GPUs",
        ),
        (
            {m.STALE_TOKENS: 0.023},
            "2.3% of the sampled tokens were dropped as stale (mean of 10 steps, at most 1% is normal); raise "
            "asynchrony.max_policy_lag = 2, or look for an engine that is slow or restarts",
        ),
        (
            {m.LENGTH_BIAS: -0.06},
            "trained completions are 6% shorter than all scored ones (above 5% the policy learns a wrong length), "
            "because samples of other lengths were dropped; see their reasons in report.json, and raise "
            "asynchrony.max_policy_lag if it is STALE",
        ),
        (
            {m.MISMATCH_KL: 0.02},
            "large logprob mismatch between engine and trainer at a mean lag of 1.2: mismatch/kl_k3 = 0.02; nothing "
            "corrects for it: train with algorithm.correction.kind = `tis`, or lower asynchrony.max_policy_lag",
        ),
        (
            {m.REJECTED_TOKENS: 0.4},
            "algorithm.correction rejected 40% of the tokens; widen its bounds, or lower asynchrony.max_policy_lag",
        ),
    ],
)
def test_what_is_wrong_with_an_asynchronous_run_is_said_with_its_fix(changes: dict[str, float], text: str) -> None:
    assert last_findings(changes) == text
    synchronous = last_findings(changes, asynchrony=AsynchronyConfig())
    assert "waits" not in synchronous and "stale (" not in synchronous and "max_policy_lag" not in synchronous


def test_a_trainer_that_waits_because_the_limit_was_lowered_is_told_so() -> None:
    rule = AsynchronyConfig(max_policy_lag=2, target_mismatch=0.02)
    changes = {m.TRAINER_WAIT: 0.5, m.ROLLOUT_WAIT: 0.4, m.LAG_LIMIT: 0.0}
    assert last_findings(changes, asynchrony=rule) == (
        "the trainer waits for samples 50% of the time (median of 10 steps), and the engines have room for 40%, as "
        "the lag limit is lowered to 0; raise asynchrony.target_mismatch = 0.02"
    )


def test_waits_are_told_after_ten_steps_and_not_after_one_long_wait() -> None:
    assert last_findings({m.TRAINER_WAIT: 0.9}, steps=9) == ""
    assert "the trainer waits" in last_findings({m.TRAINER_WAIT: 0.9}, steps=10)
    diagnosis = TrainingDiagnosis(asynchrony=ASYNC)
    for step in range(1, 40):
        wait = {m.TRAINER_WAIT: 0.9 if step % 5 == 0 else 0.0}
        assert diagnosis.examine(step, RUNNING | wait, skipped_reason="", dropped={}) == ([], [])


def test_a_length_bias_is_no_finding_at_first_nor_with_a_filter() -> None:
    assert "6% longer" in last_findings({m.LENGTH_BIAS: 0.06}, steps=10)
    assert last_findings({m.LENGTH_BIAS: 0.06}, steps=9) == ""
    assert last_findings({m.LENGTH_BIAS: 0.06}, filters=True) == ""


def test_with_a_correction_a_large_mismatch_is_answered_by_the_lag() -> None:
    text = last_findings({m.MISMATCH_KL: 0.02}, corrects=True)
    assert text.endswith("= 0.02; lower asynchrony.max_policy_lag, or set asynchrony.target_mismatch")
    assert "stale weights" in last_findings({m.MISMATCH_KL: 0.02, m.TOKEN_LAG_MEAN: 0.0}), "not the lag"


def test_a_target_that_the_lag_cannot_reach_is_told() -> None:
    rule = AsynchronyConfig(max_policy_lag=2, target_mismatch=0.02)
    assert last_findings({m.MISMATCH_MEAN: 0.03, m.LAG_LIMIT: 1.0}, asynchrony=rule) == (
        "asynchrony.target_mismatch = 0.02 is missed: mismatch/logprob_diff_mean = 0.03 (median of 12 steps) at a lag "
        "limit of 1, and a lower one would not help; compare the precisions of engine and trainer, or raise it"
    )
    assert last_findings({m.MISMATCH_MEAN: 0.024}, asynchrony=rule) == ""
    assert last_findings({m.MISMATCH_MEAN: 0.03}, asynchrony=rule, steps=11) == "", "the limit may still change"
    diagnosis = TrainingDiagnosis(asynchrony=rule)
    for step in range(1, 20):
        changes = {m.MISMATCH_MEAN: 0.03, m.LAG_LIMIT: float(step // 10)}
        assert diagnosis.examine(step, RUNNING | changes, skipped_reason="", dropped={})[0] == []


def test_a_mismatch_that_grows_with_the_lag_at_the_start_is_none() -> None:
    rule, told = AsynchronyConfig(max_policy_lag=16), []
    diagnosis = TrainingDiagnosis(asynchrony=rule)
    for step in range(1, 60):
        changes = {m.MISMATCH_MEAN: 0.002 * min(step, 16) if step < 50 else 0.1}
        found, _ = diagnosis.examine(step, RUNNING | changes, skipped_reason="", dropped={})
        told += [(step, finding.text) for finding in found]
    assert told[0][0] == 52 and "or lower asynchrony.max_policy_lag" in told[0][1]


def findings_of(root: Path, algorithm: dict[str, Any], *, max_policy_lag: int = 2) -> list[str]:
    """Return the findings of a run with this recipe, of which twelve steps had a large mismatch and a length bias."""
    config = make_config(root, asynchrony={"max_policy_lag": max_policy_lag}, algorithm=algorithm)
    metrics = RUNNING | {m.STALE_TOKENS: 0.05, m.MISMATCH_KL: 0.02, m.LENGTH_BIAS: 0.06}
    found = summarize_findings(config, [StepRow(step, 0, "", 0, 1.0, metrics) for step in range(1, 13)])
    return [entry["text"] for entry in found]


def test_the_recipe_decides_what_is_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mismatch, stale, bias = findings_of(tmp_path, {})
    assert "nothing corrects for it" in mismatch and stale.startswith("5.0% of") and bias.startswith("trained")
    assert len(findings_of(tmp_path, {"filter": {"keep": "varied"}})) == 2, "a filter may prefer a length"
    assert "nothing corrects" not in findings_of(tmp_path, {"correction": {"kind": "tis"}})[0]
    monkeypatch.setattr(PpoLoss, "corrects_lag", True)
    assert "nothing corrects" not in findings_of(tmp_path, {})[0]
    (mismatch,) = findings_of(tmp_path, {}, max_policy_lag=0)
    assert "stale weights" in mismatch


def row(step: int, reason: str = "", truncation: float = 0.0) -> StepRow:
    metrics = HEALTHY | {"length/truncation_rate": truncation}
    return StepRow(step=step, policy_version=0, skipped_reason=reason, data_position=0, seconds=1.0, metrics=metrics)


def test_what_an_earlier_life_of_the_run_told_is_not_told_again() -> None:
    diagnosis = TrainingDiagnosis()
    diagnosis.replay([row(step, truncation=0.5) for step in range(1, 6)])
    assert told(diagnosis, 6, length__truncation_rate=0.5) == []


def test_the_report_says_what_was_wrong_how_often_and_when(tmp_path: Any) -> None:
    rows = [row(1), *(row(step, truncation=0.3 + step / 100) for step in range(2, 9))]
    rows += [row(9, "ALL_REJECTED")]
    cut, rejected = summarize_findings(make_config(tmp_path), rows)
    assert (cut["steps"], cut["first"], cut["last"]) == (3, 6, 8) and cut["text"].startswith("38% of")
    assert (rejected["steps"], rejected["first"], rejected["last"]) == (1, 9, 9)


def test_pairs_with_a_wrong_reference_and_answers_that_are_unlearned_are_named() -> None:
    config = make_config_of_pairs()
    diagnosis = TrainingDiagnosis.from_config(config)
    texts = []
    for step in range(1, 13):
        values = {"pair/margin": 0.2 * step, "pair/chosen_reward": -0.3 * step}
        texts.append([f.text for f in diagnosis.examine(step, values, skipped_reason="", dropped={})[1]])
    assert "pair/margin = 0.2 before the first update, where policy and reference are the same weights" in texts[0][0]
    assert not any(texts[1:9])
    assert "the preferred answers become less likely, too: pair/chosen_reward = -1.6 (mean of 10 steps)" in texts[9][0]
    healthy = TrainingDiagnosis.from_config(config)
    assert healthy.examine(1, {"pair/margin": 0.0, "pair/accuracy": 0.0}, skipped_reason="", dropped={}) == ([], [])
    assert not TrainingDiagnosis().examine(1, {"pair/margin": 3.0}, skipped_reason="", dropped={})[0]


def make_config_of_pairs() -> Config:
    return Config.model_validate(
        {
            "name": "pairs",
            "steps": 20,
            "model": {"source": "x"},
            "data": {"train": {"path": "x.jsonl"}},
            "batch": {"rows_per_step": 4, "tokens_per_micro_batch": 2048},
            "algorithm": {"preset": "dpo"},
        }
    )
