"""Tests of the findings about a step: their text, and how often each is logged."""

from __future__ import annotations

import re
from typing import Any

import pytest

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
        ([(1, 0)], {"length/truncation_rate": 0.5}, "50% of the completions were cut off"),
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


def test_nothing_is_said_of_a_healthy_step() -> None:
    assert diagnose(numbers_of((1, 0), (0, 1))) == ""
    diagnosis = TrainingDiagnosis()
    for step in range(1, 100):
        steady = {"policy/entropy": 1.0 + step % 2 / 10, "mismatch/logprob_diff_mean": 0.01, "mismatch/ess": 0.98}
        assert diagnosis.examine(step, HEALTHY | steady, skipped_reason="", dropped={"FILTERED": 4}) == ([], [])


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
    assert len(told(diagnosis, 1, length__truncation_rate=0.4)) == 1
    assert [told(diagnosis, step, length__truncation_rate=0.42) for step in range(2, 20)] == [[]] * 18
    assert told(diagnosis, 20, length__truncation_rate=0.62) == [
        "62% of the completions were cut off; raise sampling.max_new_tokens"
    ]
    assert [told(diagnosis, step, length__truncation_rate=0.7) for step in range(21, 70)] == [[]] * 49
    assert len(told(diagnosis, 70, length__truncation_rate=0.7)) == 1
    assert len(told(diagnosis, 71, length__truncation_rate=0.7, policy__approx_kl=0.2)) == 1, "other trouble is news"


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


def row(step: int, reason: str = "", truncation: float = 0.0) -> StepRow:
    metrics = HEALTHY | {"length/truncation_rate": truncation}
    return StepRow(step=step, policy_version=0, skipped_reason=reason, data_position=0, seconds=1.0, metrics=metrics)


def test_what_an_earlier_life_of_the_run_told_is_not_told_again() -> None:
    diagnosis = TrainingDiagnosis()
    diagnosis.replay([row(1, truncation=0.5), row(2)])
    assert told(diagnosis, 3, length__truncation_rate=0.5) == []


def test_the_report_says_what_was_wrong_how_often_and_when(tmp_path: Any) -> None:
    rows = [row(1), *(row(step, truncation=0.3 + step / 100) for step in (2, 3, 5))]
    rows += [row(6, "ALL_REJECTED")]
    cut, rejected = summarize_findings(make_config(tmp_path), rows)
    assert (cut["steps"], cut["first"], cut["last"]) == (3, 2, 5) and cut["text"].startswith("35% of")
    assert (rejected["steps"], rejected["first"], rejected["last"]) == (1, 6, 6)
