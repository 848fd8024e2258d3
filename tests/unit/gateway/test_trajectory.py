"""Segments of a session: exact prefixes, overlapping turns, limits, and the experiences made of them."""

from __future__ import annotations

import numpy as np
import pytest

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.errors import InvalidInput, WrongState
from fourfold.sample import VersionSpan
from fourfold.sample.sampled import SampledTokens
from fourfold.sample.wire import decode
from fourfold.types.v1 import experience_pb2
from fourfold_gateway import trajectory as trajectory_module
from fourfold_gateway.trajectory import (
    CONTEXT_LENGTH,
    TOO_MANY_SEGMENTS,
    Limits,
    PendingTurn,
    Sampling,
    SessionTokens,
    Turn,
)

SAMPLING = Sampling(temperature=0.75)


def trajectory(*, max_segments: int = 8, max_context_tokens: int = 100) -> SessionTokens:
    return SessionTokens(Limits(max_segments=max_segments, max_context_tokens=max_context_tokens))


def sampled(*ids: int, version: int = 1, constrained: tuple[int, ...] = ()) -> SampledTokens:
    return SampledTokens(
        token_ids=np.array(ids, np.int32),
        logprobs=np.array([-i / 8 for i in ids], np.float32),
        version_spans=(VersionSpan(policy_version=version, token_count=len(ids)),),
        constrained=np.array(constrained, np.bool_),
    )


def finish(
    sessions: SessionTokens,
    pending: PendingTurn,
    completion: SampledTokens,
    reason: pb.FinishReason.ValueType = pb.FINISH_REASON_STOP,
) -> Turn:
    return sessions.finish_turn(pending, completion, finish_reason=reason)


def turn(session: SessionTokens, prompt: list[int], completion: SampledTokens, sampling: Sampling = SAMPLING) -> Turn:
    return finish(session, session.begin_turn(prompt, sampling), completion)


def test_a_prompt_that_begins_with_a_segment_extends_it() -> None:
    session = trajectory()
    turn(session, [1, 2], sampled(3, 4, version=5))
    second = turn(session, [1, 2, 3, 4, 9], sampled(6, version=5))
    assert second.observation.tolist() == [9]
    (segment,) = session.segments
    assert segment.token_ids.tolist() == [1, 2, 3, 4, 9, 6]
    columns = segment.columns()
    assert columns["action_mask"].tolist() == [False, False, True, True, False, True]
    assert np.isnan(columns["behavior_logprobs"]).tolist() == [True, True, False, False, True, False]
    spans = [(span.policy_version, span.token_count) for span in columns["version_spans"]]
    assert spans == [(-1, 2), (5, 2), (-1, 1), (5, 1)]
    third = turn(session, [1, 2, 3, 4, 9, 6], sampled(7, version=5))
    assert third.segment_index == 0, "without an observation, too"
    assert segment.token_ids.size == 6, "segments that were given out do not change"
    last = session.segments[0].columns()["version_spans"][-1]
    assert (last.policy_version, last.token_count) == (5, 2)


@pytest.mark.parametrize("prompt", [[1, 2, 3], [1, 2, 3, 5, 9], [2, 1, 2, 3, 4], [9]])
def test_any_other_prompt_opens_a_segment_in_which_it_is_context(prompt: list[int]) -> None:
    session = trajectory()
    turn(session, [1, 2], sampled(3, 4))
    turn(session, prompt, sampled(8))
    assert [segment.token_ids.tolist() for segment in session.segments] == [[1, 2, 3, 4], [*prompt, 8]]
    assert np.flatnonzero(session.segments[1].columns()["action_mask"]).tolist() == [len(prompt)]


def test_the_longest_segment_is_extended() -> None:
    session = trajectory()
    turn(session, [1], sampled(2))
    turn(session, [7], sampled(8))
    other = session.begin_turn([1, 2], SAMPLING)
    turn(session, [1, 2, 3], sampled(4))
    finish(session, other, sampled(5))
    assert [segment.token_ids.tolist() for segment in session.segments] == [[1, 2, 3, 4], [7, 8], [1, 2, 5]]
    turn(session, [1, 2, 5, 6], sampled(6))
    assert session.segments[2].token_ids.tolist() == [1, 2, 5, 6, 6]


def test_another_temperature_opens_a_segment() -> None:
    session = trajectory()
    turn(session, [1], sampled(2))
    turn(session, [1, 2, 3], sampled(4), Sampling(temperature=1.0))
    turn(session, [1, 2, 3], sampled(4))
    assert [segment.sampling.temperature for segment in session.segments] == [0.75, 1.0]


def test_of_overlapping_turns_the_first_extends_and_the_others_open() -> None:
    session = trajectory(max_segments=2)
    turn(session, [1], sampled(2))
    first, second = (session.begin_turn([1, 2, 3], SAMPLING) for _ in range(2))
    assert finish(session, second, sampled(5)).segment_index == 0
    with pytest.raises(WrongState, match="may open 1 more"):  # the first turn, since the second extended the segment
        session.begin_turn([7], SAMPLING)
    assert finish(session, first, sampled(4)).segment_index == 1
    assert [segment.token_ids.tolist() for segment in session.segments] == [[1, 2, 3, 5], [1, 2, 3, 4]]
    assert [turn.number for turn in session.turns] == [0, 1, 2], "turns keep the order in which they began"
    assert [turn.completion.token_ids.tolist() for turn in session.turns] == [[2], [4], [5]]


def test_no_interleaving_makes_more_segments_than_allowed() -> None:
    session = trajectory(max_segments=2)
    turn(session, [1], sampled(2))
    first = session.begin_turn([1, 2, 3], SAMPLING)
    second = session.begin_turn([1, 2, 3], SAMPLING)
    with pytest.raises(
        WrongState, match=r"1 segments, .* may open 1 more, .* at most 2 \(agents.max_segments\)"
    ) as caught:
        session.begin_turn([1, 2, 3], SAMPLING)
    assert caught.value.reason == TOO_MANY_SEGMENTS
    finish(session, first, sampled(4))
    with pytest.raises(WrongState):
        session.begin_turn([7], SAMPLING)
    third = session.begin_turn([1, 2, 3, 4], SAMPLING)
    session.cancel_turn(second)
    session.cancel_turn(second)
    turn(session, [7], sampled(8))
    assert len(session.segments) == 2
    assert finish(session, third, sampled(5)).segment_index == 0


def test_a_trajectory_that_the_run_would_not_take_takes_no_further_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectory_module, "_MAX_TOKENS", 10)
    session = trajectory()
    turn(session, [1, 2, 3, 4, 5], sampled(6, 7))
    session.cancel_turn(session.begin_turn([1, 2, 3, 4, 5, 6, 7, 8, 8, 8], SAMPLING))
    for prompt in ([1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8], [9, 9, 9, 9]):
        with pytest.raises(WrongState, match="at most 10"):
            session.begin_turn(prompt, SAMPLING)


def test_prompts_need_tokens_and_room() -> None:
    session = trajectory(max_context_tokens=4)
    with pytest.raises(InvalidInput, match="no tokens"):
        session.begin_turn([], SAMPLING)
    with pytest.raises(InvalidInput, match="the prompt has 4 tokens, and the context 4") as caught:
        session.begin_turn([1, 2, 3, 4], SAMPLING)
    assert caught.value.reason == CONTEXT_LENGTH
    pending = session.begin_turn([1, 2, 3], SAMPLING)
    with pytest.raises(ValueError, match="2 sampled tokens after a prompt of 3"):
        finish(session, pending, sampled(1, 2))
    with pytest.raises(ValueError, match="0 sampled tokens"):
        finish(session, pending, sampled())
    wrong = SampledTokens(token_ids=np.ones(1, np.int32), logprobs=np.zeros(2, np.float32), version_spans=())
    with pytest.raises(ValueError, match="1 tokens with 2 log-probabilities, 0 tokens in version spans"):
        finish(session, pending, wrong)
    finish(session, pending, sampled(1))
    with pytest.raises(ValueError, match="has ended"):
        finish(session, pending, sampled(1))


def test_experiences_have_what_the_trainer_needs() -> None:
    session = trajectory()
    turn(session, [1, 2], sampled(3, 4, version=0, constrained=(1, 0)))
    cancelled = session.begin_turn([1, 2, 3, 4, 5], SAMPLING)
    session.cancel_turn(cancelled)
    turn(session, [1, 2, 3, 4, 5], sampled(6, 7, version=1))
    turn(session, [8], sampled(9, version=2))
    messages = session.to_experiences("task", "group", turn_rewards={1: 0.5, 2: -1.0})
    assert [(m.sample_id, m.trajectory_id, m.segment_index, m.segment_count) for m in messages] == [
        ("task", "task", 0, 2),
        ("task-seg1", "task", 1, 2),
    ]
    first, second = (decode(m, vocabulary_size=10, max_tokens=10) for m in messages)
    assert first.loss_mask.tolist() == [False, False, False, True, False, True, True]
    assert first.action_mask.tolist() == [False, False, True, True, False, True, True]
    assert first.token_rewards.tolist() == [0, 0, 0, 0, 0, 0, 0.5]
    assert second.token_rewards.tolist() == [0, -1]
    assert (first.temperature, first.group_id, first.truncated, first.score) == (0.75, "group", False, None)
    assert first.behavior_logprobs[[2, 3, 5, 6]].tolist() == [-0.375, -0.5, -0.75, -0.875]
    assert [m.SerializeToString() for m in messages] == [
        m.SerializeToString() for m in session.to_experiences("task", "group", turn_rewards={1: 0.5, 2: -1.0})
    ]
    assert not session.to_experiences("task", "group")[0].token_rewards


def test_the_segment_with_the_last_turn_is_the_last_one() -> None:
    """The main conversation, a sub-agent with a conversation of its own, and the main conversation again."""
    session = trajectory()
    turn(session, [1, 2], sampled(3))
    turn(session, [8], sampled(9))
    turn(session, [1, 2, 3, 4], sampled(5))
    messages = session.to_experiences("task", "group", turn_rewards={2: 1.0})
    found = [decode(m, vocabulary_size=10, max_tokens=10).token_ids.tolist() for m in messages]
    assert found == [[8, 9], [1, 2, 3, 4, 5]]
    assert [m.segment_index for m in messages] == [0, 1]
    assert [session.final_index(each) for each in session.turns] == [1, 0, 1]


def test_a_budget_that_ended_the_trajectory_truncates_all_segments() -> None:
    session = trajectory()
    finish(session, session.begin_turn([1], SAMPLING), sampled(2), pb.FINISH_REASON_LENGTH)
    turn(session, [3], sampled(4))
    ends = [m.end_reason for m in session.to_experiences("t", "g")]
    assert ends == [experience_pb2.END_REASON_TERMINATED] * 2, "the episode went on after the turn that was cut off"
    ends = [m.end_reason for m in session.to_experiences("t", "g", truncated=True)]
    assert ends == [experience_pb2.END_REASON_TRUNCATED] * 2
    finish(session, session.begin_turn([3, 4], SAMPLING), sampled(5), pb.FINISH_REASON_LENGTH)
    ends = [m.end_reason for m in session.to_experiences("t", "g")]
    assert ends == [experience_pb2.END_REASON_TRUNCATED] * 2


def test_wrong_rewards_and_empty_sessions_are_refused() -> None:
    session = trajectory()
    with pytest.raises(WrongState, match="no finished turn"):
        session.to_experiences("t", "g")
    turn(session, [1], sampled(2))
    with pytest.raises(InvalidInput, match="has turn 1; the session has the turns 0 to 0"):
        session.to_experiences("t", "g", turn_rewards={1: 0.0})
    for reward in (float("nan"), float("inf"), 1e39):
        with pytest.raises(InvalidInput, match="must be a finite float32"):
            session.to_experiences("t", "g", turn_rewards={0: reward})


def test_a_restored_trajectory_goes_on() -> None:
    session = trajectory()
    rows = [turn(session, [1], sampled(2)), turn(session, [7], sampled(8)), turn(session, [1, 2, 3], sampled(4))]
    restored = SessionTokens.restore(Limits(max_segments=8, max_context_tokens=100), rows)
    assert [t.number for t in restored.turns] == [t.number for t in session.turns] == [0, 1, 2]
    assert [s.token_ids.tolist() for s in restored.segments] == [s.token_ids.tolist() for s in session.segments]
    assert turn(restored, [1, 2, 3, 4], sampled(5)).number == 3
    assert restored.token_count == 7
    with pytest.raises(ValueError, match="does not continue segment 0 at its end"):
        SessionTokens.restore(Limits(max_segments=8, max_context_tokens=100), rows[2:])
    third = turn(session, [9], sampled(1))
    with pytest.raises(ValueError, match="does not continue segment 2 at its end"):
        SessionTokens.restore(Limits(max_segments=8, max_context_tokens=100), [rows[0], third])


def test_a_completion_across_versions_keeps_them() -> None:
    session = trajectory()
    spans = (VersionSpan(policy_version=1, token_count=2), VersionSpan(policy_version=2, token_count=1))
    completion = SampledTokens(
        token_ids=np.array([3, 4, 5], np.int32), logprobs=np.zeros(3, np.float32), version_spans=spans
    )
    turn(session, [1, 2], completion)
    turn(session, [1, 2, 3, 4, 5], sampled(6, version=2))
    assert [t.completion.version_spans for t in session.turns] == [
        spans,
        (VersionSpan(policy_version=2, token_count=1),),
    ]
