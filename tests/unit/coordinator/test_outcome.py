"""The mixture of several scorers' results, and the results that services send."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fourfold.config import RewardConfig
from fourfold.errors import InvalidInput, Unavailable
from fourfold.reward.v1 import reward_service_pb2 as pb
from fourfold.sample import Sample, VersionSpan
from fourfold_coordinator.data.prompts import Prompt
from fourfold_coordinator.rewards.outcome import Outcome, mix, passes_gates, to_outcome, without_scores
from fourfold_coordinator.state.samples import Trajectory

MASK = np.array([0, 1, 1, 0, 1], np.bool_)  # two turns


def trajectory(**changes: Any) -> Trajectory:
    sample = Sample(
        sample_id="s",
        group_id="g",
        token_ids=np.arange(5, dtype=np.int32),
        behavior_logprobs=np.where(MASK, np.float32(-1), np.float32(np.nan)).astype(np.float32),
        action_mask=MASK,
        loss_mask=MASK,
        version_spans=(VersionSpan(policy_version=-1, token_count=1),),
        temperature=1.0,
        **changes,
    )
    ids = np.arange(1, dtype=np.int32)
    prompt = Prompt(index=0, text="?", token_ids=ids, answer="", metadata_json="{}", group_key="")
    return Trajectory(prompt=prompt, segments=(sample,), completion="!")


def table(name: str, **keys: Any) -> RewardConfig:
    return RewardConfig.model_validate({"name": name, "function": "exact_match", **keys})


def scored(score: float, **more: Any) -> Outcome:
    return Outcome(score=score, scorer=f"x@{score}", **more)


def test_one_scorer_with_weight_1_gives_its_own_score() -> None:
    found = mix(trajectory(), [(table("a"), scored(0.3))]).sample
    assert (found.score, found.scorer, [(t.score, t.weight) for t in found.terms]) == (0.3, "x@0.3", [(0.3, 1.0)])


def test_the_score_is_the_weighted_sum_and_survives_float32() -> None:
    outcomes = [(table("a", weight=0.1), scored(3.0)), (table("b", weight=-2.0), scored(0.25)), (table("c"), scored(1))]
    found = mix(trajectory(), outcomes).sample
    assert found.score == pytest.approx(0.8) and np.float32(found.score) == np.float32(str(found.score))
    assert [t.name for t in found.terms] == ["a", "b", "c"] and found.scorer == "x@3.0 + x@0.25 + x@1"


def test_rewards_of_turns_and_tokens_are_weighted_and_added_to_those_that_are_there() -> None:
    own = np.array([0, 1, 0, 0, 1], np.float32)
    given = np.array([0, 0, 2, 0, 4], np.float32)
    outcomes = [(table("a", weight=0.5), scored(1.0, token_rewards=given)), (table("b"), scored(1.0))]
    assert mix(trajectory(token_rewards=own), outcomes).sample.token_rewards.tolist() == [0, 1, 1, 0, 3]
    assert mix(trajectory(), outcomes).sample.token_rewards.tolist() == [0, 0, 1, 0, 2]


def test_scores_can_be_taken_back_and_given_again() -> None:
    own = np.array([0, 1, 0, 0, 1], np.float32)
    given = np.array([0, 0, 2, 0, 4], np.float32)
    for before in (trajectory(token_rewards=own), trajectory()):
        outcomes = [(table("a"), scored(1.0, token_rewards=given, components={"x": 1.0}))]
        once = mix(before, outcomes)
        again = mix(without_scores(once), outcomes)
        assert without_scores(once).sample.token_rewards.tolist() == before.sample.token_rewards.tolist()
        assert again.sample.token_rewards.tolist() == once.sample.token_rewards.tolist()
        assert (without_scores(once).sample.score, dict(without_scores(once).components)) == (None, {})


@pytest.mark.parametrize(
    ("outcomes", "dropped", "abstained"),
    [
        ([("a", Outcome(reason="WHY", abstained=True))], "WHY", True),
        ([("a", scored(1.0)), ("my-b", Outcome(reason="TIMEOUT"))], "MY_B_TIMEOUT", False),
        ([("a", scored(1.0)), ("b" * 64, Outcome(reason="R" * 63))], ("B" * 64 + "_")[:63], False),
        ([], "NO_SCORER", False),
    ],
)
def test_a_missing_score_drops_the_sample_and_is_no_zero(
    outcomes: list[tuple[str, Outcome]], dropped: str, abstained: bool
) -> None:
    found = mix(trajectory(), [(table(name), outcome) for name, outcome in outcomes])
    assert (found.dropped, found.abstained, found.sample.score) == (dropped, abstained, None)


def test_an_abstention_may_be_left_out_but_not_the_last_one() -> None:
    nothing = Outcome(reason="NO_IDEA", abstained=True)
    omits = table("b", abstain="omit")
    assert mix(trajectory(), [(table("a"), scored(2.0)), (omits, nothing)]).sample.score == 2.0
    assert mix(trajectory(), [(omits, nothing)]).dropped == "NO_IDEA"
    failed = Outcome(reason="RAISED")
    assert mix(trajectory(), [(table("a"), scored(2.0)), (omits, failed)]).dropped == "B_RAISED"


def test_gates_pass_from_their_value_on() -> None:
    gate = table("a", gate=0.5)
    assert passes_gates([(gate, scored(0.5))]) and not passes_gates([(gate, scored(0.49))])
    assert not passes_gates([(gate, Outcome(reason="RAISED"))]), "no score passes no gate"
    assert not passes_gates([(gate, Outcome(reason="X", abstained=True))])
    assert passes_gates([(table("a", gate=0.5, abstain="omit"), Outcome(reason="X", abstained=True))])
    assert passes_gates([]) and passes_gates([(table("b"), scored(0.0))])


def test_rewards_of_turns_are_at_the_ends_of_turns() -> None:
    sent = pb.SampleScore(
        score=1.0, turn_rewards=[0.5, -1.0], token_rewards=np.array([0, 1, 0, 0, 2], np.float32).tobytes()
    )
    found = to_outcome(sent, "x@1", trajectory().sample).token_rewards
    assert found is not None and found.tolist() == [0, 1, 0.5, 0, 1]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"turn_rewards": [1.0]}, "turn_rewards has 1 numbers for 2 turns"),
        ({"turn_rewards": [1.0, float("nan")]}, "turn_rewards must be finite"),
        ({"token_rewards": b"1234"}, "token_rewards has 4 bytes; 5 tokens need 20"),
        ({"token_rewards": np.array([1, 0, 0, 0, 0], np.float32).tobytes()}, "0 where action_mask is 0"),
        ({"token_rewards": np.array([0, np.inf, 0, 0, 0], np.float32).tobytes()}, "must be finite"),
    ],
)
def test_rewards_that_do_not_fit_the_sample_are_an_error_of_it(fields: dict[str, Any], text: str) -> None:
    found = to_outcome(pb.SampleScore(score=1.0, **fields), "x@1", trajectory().sample)
    assert found.score is None and found.reason == "BAD_REWARDS" and text in str(found.error)


def test_errors_of_the_service_are_told_from_those_of_the_sample() -> None:
    for code, kind in ((14, Unavailable), (4, InvalidInput), (2, InvalidInput)):
        sent = pb.SampleScore(error=pb.SampleError(code=code, reason="WHY"), cost_usd=0.5)
        found = to_outcome(sent, "x@1", trajectory().sample)
        assert (type(found.error), found.cost_usd, found.score) == (kind, 0.5, None)
