"""Cleaning of texts from other processes, and the patterns of names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.agent.v1 import agent_service_pb2 as agent
from fourfold.coordinator.v1 import experience_service_pb2 as experience
from fourfold.coordinator.v1 import run_service_pb2 as run
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold.rpc.responses import clean_strings
from fourfold.text import clean, is_metric_name, is_reason, public_url


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("KeyError: 'answer' (scorer.py:7)", "KeyError: 'answer' (scorer.py:7)"),
        ("gr\u00fc\u00df dich \u4f60\u597d", "gr\u00fc\u00df dich \u4f60\u597d"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07after", "after"),
        ("\x9b2Jgone", "gone"),
        ("a\x1b(Bb\x1bMc", "abc"),
        ("a\r\nb\tc\u2028d\u00a0e", "a  b c d e"),
        ("a\x00\x08\x7f\x85b", "a b"),
        ("abc\u202edcb\u2066x\u200e\u200b\ufeff", "abcdcbx"),
        ("half \udcff pair", "half  pair"),
    ],
)
def test_sequences_that_control_a_terminal_are_removed(text: str, left: str) -> None:
    assert clean(text) == left


@given(st.text(max_size=300), st.integers(3, 40))
def test_every_cleaned_text_is_printable_and_fits(text: str, limit: int) -> None:
    result = clean(text, limit)
    assert len(result) <= limit and result.isprintable()
    assert clean(result, limit) == result


def test_a_long_text_is_cut() -> None:
    assert clean("x" * 50, 10) == "xxxxxxx..."
    assert len(clean("\x1b[31m" * 1_000_000 + "x", 100)) <= 100


def test_names_must_match_their_pattern() -> None:
    assert all(map(is_reason, ("RAISED", "A1_B")))
    assert not any(map(is_reason, ("", "raised", "1A", "A B", "A" * 64, "RAISED\n")))
    assert all(map(is_metric_name, ("train/loss", "format ok", "\u00fcbung", "a.b:c@1-2+3")))
    assert not any(map(is_metric_name, ("", " a", "a" * 65, "a\n", "\x1b[2J", "a\u202eb", "a<b>")))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://user:pw@host:8000/v1/score?key=sk-1#x", "https://host:8000/v1/score"),
        ("http://u:p@[::1]:50/a", "http://[::1]:50/a"),
        ("http://host", "http://host"),
        ("http://user:pa/ss@host/x", "a malformed address"),
        ("http://[::1/x", "a malformed address"),
    ],
)
def test_a_shown_address_has_no_keys(url: str, shown: str) -> None:
    assert public_url(url) == shown


def test_every_string_of_a_message_is_cleaned() -> None:
    status = run.RunStatus(
        failure="a\x1b[2Jb",
        members=[run.Member(member_id="m\x07")],
        steps=[run.StepRecord(step=1, alarms=["fine", "x\ny"], metrics={"loss": 1.0})],
    )
    clean_strings(status)
    assert (status.failure, status.members[0].member_id) == ("ab", "m")
    assert list(status.steps[0].alarms) == ["fine", "x y"]
    score = reward.ScoreResponse(scores=[reward.SampleScore(error=reward.SampleError(code=2, message="\x1b[1mhi"))])
    clean_strings(score)
    assert score.scores[0].error.message == "hi"


DATA = "def f():\n\treturn 1\x0c\x1b[1m" + "x" * 5000
MESSAGE = agent.Message(role="assistant", content=DATA, tool_calls=[agent.ToolCall(arguments_json=DATA)])
VERBATIM: list[tuple[Any, Callable[[Any], str]]] = [
    (agent.NextTaskResponse(task=agent.Task(text=DATA)), lambda r: r.task.text),
    (agent.NextTaskResponse(task=agent.Task(metadata_json=DATA)), lambda r: r.task.metadata_json),
    (agent.NextTaskResponse(task=agent.Task(messages=[MESSAGE])), lambda r: r.task.messages[0].content),
    (agent.GenerateResponse(chunks=[agent.TurnChunk(text=DATA)]), lambda r: r.chunks[0].text),
    (
        agent.GenerateResponse(chunks=[agent.TurnChunk(message=MESSAGE)]),
        lambda r: r.chunks[0].message.tool_calls[0].arguments_json,
    ),
    (agent.DetokenizeResponse(text=DATA), lambda r: r.text),
    (agent.ApplyChatTemplateResponse(text=DATA), lambda r: r.text),
    (
        experience.LeaseTasksResponse(tasks=[experience.LeasedTask(messages_json=DATA)]),
        lambda r: r.tasks[0].messages_json,
    ),
]


@pytest.mark.parametrize(("response", "text_of"), VERBATIM)
def test_problems_and_conversations_stay_unchanged(response: Any, text_of: Callable[[Any], str]) -> None:
    clean_strings(response)
    assert text_of(response) == DATA


def test_reasons_of_sessions_are_cleaned() -> None:
    session = agent.Session(reason="A\x1b[1m\nB")
    clean_strings(session)
    assert session.reason == "A B"
