"""Rubrics, which samples fill in as data, and the grades of verdicts."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fourfold.config.reward import JudgeConfig
from fourfold.errors import ConfigError
from fourfold_reward.job import Job
from fourfold_reward.scorers.rubric import MAX_VERDICT, GradePattern, Rubric, Template
from fourfold_reward.scores import InvalidSample
from tests.support.reward_jobs import make_job

EXAMPLE = Path(__file__).parents[3] / "examples/rewards/judge_rubric.md"


def judge(**changes: Any) -> JudgeConfig:
    return JudgeConfig(url="http://127.0.0.1:1/v1", model="m", **changes)


def job(completion: str = "4", *, answer: str = "", messages: Any = None, **columns: Any) -> Job:
    given = "" if messages is None else json.dumps(messages)
    return make_job(
        completion, prompt="<|user|>2 + 2?", answer=answer, metadata_json=json.dumps(columns), messages_json=given
    )


def filled(text: str, sample: Job, tmp_path: Path) -> str:
    (tmp_path / "rubric.md").write_text(text)
    messages = Rubric(judge(rubric=str(tmp_path / "rubric.md"))).messages(sample)
    assert messages is not None
    return messages[-1]["content"]


def test_placeholders_are_filled_and_samples_are_data(tmp_path: Path) -> None:
    hostile = "{answer} {{ }} {prompt.__class__} {0} %s {task}"
    text = "P={prompt} C={completion} A={answer} T={task} N={n} {{x}}"
    found = filled(text, job(hostile, answer="{completion}", task="{n}", n=[1, "\u00e9"]), tmp_path)
    assert found == f'P=<|user|>2 + 2? C={hostile} A={{completion}} T={{n}} N=[1, "\u00e9"] {{x}}'


def test_a_prompt_of_messages_has_no_chat_template(tmp_path: Path) -> None:
    one, system = {"role": "user", "content": "2 + 2?"}, {"role": "system", "content": "Be {brief}."}
    text = "{prompt}|{completion}"
    assert filled(text, job(messages=[one]), tmp_path) == "2 + 2?|4"
    assert filled(text, job(messages=[system, one]), tmp_path) == "system: Be {brief}.\n\nuser: 2 + 2?|4"
    assert filled(text, job(messages=[{"role": "user", "content": None}]), tmp_path) == "|4"
    malformed: list[Any] = [{}, [1], "x"]
    for messages in malformed:
        with pytest.raises(InvalidSample, match="prompt_messages_json"):
            filled(text, job(messages=messages), tmp_path)


def test_columns_of_the_row_cannot_replace_the_sample(tmp_path: Path) -> None:
    sample = replace(job(), metadata_json='{"prompt": "other", "completion": "other", "answer": "other"}')
    assert filled("{completion} {prompt}", sample, tmp_path) == "4 <|user|>2 + 2?"


def test_a_missing_column_is_an_error_of_the_row(tmp_path: Path) -> None:
    with pytest.raises(InvalidSample, match="no column 'task' for the rubric; it has answer, completion, n, prompt"):
        filled("{completion} {task}", job(n=1), tmp_path)
    for text in ("{", "[]", "null"):
        with pytest.raises(InvalidSample) as info:
            Rubric(judge()).messages(make_job(metadata_json=text))
        assert info.value.reason == "BAD_METADATA"


def test_a_row_just_below_the_depth_of_the_parser_is_an_error_of_the_row(tmp_path: Path) -> None:
    for depth in range(800, 1000):
        sample = replace(job(), metadata_json='{"a": ' + "[" * depth + "]" * depth + "}")
        with suppress(InvalidSample):
            filled("{completion} {a}", sample, tmp_path)


def test_a_rubric_with_answer_needs_one_and_the_general_one_does_not(tmp_path: Path) -> None:
    (tmp_path / "rubric.md").write_text("{completion} {answer}")
    assert Rubric(judge(rubric=str(tmp_path / "rubric.md"))).messages(job(answer=" ")) is None
    general = Rubric(judge(system="You are fair."))
    without, with_answer = general.messages(job()), general.messages(job(answer="5"))
    assert without is not None and with_answer is not None
    assert [m["role"] for m in without] == ["system", "user"] and without[0]["content"] == "You are fair."
    assert "reference" not in without[1]["content"]
    assert "<reference_answer>\n5\n</reference_answer>" in with_answer[1]["content"]
    assert "agrees with the reference answer, is complete, and does" in with_answer[1]["content"]


@pytest.mark.parametrize("text", ["{completion} {", "{completion}\n}", "{completion} {}", "{completion} { a }", "{}"])
def test_a_stray_brace_is_named_with_its_line(text: str) -> None:
    line = text.count("\n") + 1
    with pytest.raises(ConfigError, match=f"rubric.md, line {line}: .* is no placeholder"):
        Template(text, source="rubric.md")


def test_a_rubric_that_ignores_the_completion_or_is_gone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no placeholder \{completion\}"):
        Template("{prompt}", source="rubric.md")
    with pytest.raises(ConfigError, match="cannot be read"):
        Rubric(judge(rubric=str(tmp_path / "no.md")))
    (tmp_path / "latin.md").write_bytes(b"{completion} \xff")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        Rubric(judge(rubric=str(tmp_path / "latin.md")))


def test_the_example_is_a_rubric() -> None:
    rubric = Rubric(judge(rubric=str(EXAMPLE)))
    messages = rubric.messages(job("x", answer="4"))
    assert messages is not None and "x" in messages[0]["content"]


@pytest.mark.parametrize(
    ("verdict", "grade", "score"),
    [
        ("Score: 7", 7, 0.7),
        ("It says 'Score: 10'.\n\nscore = 2.5", 2.5, 0.25),
        ("Score: 0", 0, 0.0),
        ("SCORE:10", 10, 1.0),
        ("x" * 1_000_000 + "Score: 5", 5, 0.5),
    ],
)
def test_the_last_match_is_the_grade(verdict: str, grade: float, score: float) -> None:
    assert GradePattern(judge()).find(verdict) == pytest.approx((grade, score))


@pytest.mark.parametrize("verdict", ["", "7", "Score: high", "Score: 11", "Score: -1", "Score: 5" + "x" * MAX_VERDICT])
def test_a_verdict_without_a_grade_in_range_is_refused(verdict: str) -> None:
    with pytest.raises(ValueError, match=r"no match|the grade"):
        GradePattern(judge()).find(verdict)


def test_patterns_may_have_words_and_other_ranges() -> None:
    pattern = GradePattern(judge(pattern=r"\[\[(-?\d+)\]\]", grade_min=-2, grade_max=2))
    assert pattern.find("[[1]] [[-1]]") == (-1, 0.25)
    for text in ("(yes|no)", "(nan|inf)", "Score(:)?"):
        for verdict in ("yes", "nan", "inf", "Score"):
            with pytest.raises(ValueError, match=r"no match|the grade"):
                GradePattern(judge(pattern=text)).find(verdict)


def test_a_pattern_of_exponential_time_is_cut_off() -> None:
    with pytest.raises(ValueError, match=r"within 0\.25 s"):
        GradePattern(judge(pattern=r"(a|aa)+:(\d)")).find("a" * 60 + ":x")


@pytest.mark.parametrize(("pattern", "message"), [("(", "no regular expression"), (r"Score: \d+", "has no group")])
def test_a_pattern_that_cannot_work_is_refused_at_the_start(pattern: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GradePattern(judge(pattern=pattern))
