"""The numbers of a batch, the probe, and what a completion must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fourfold import metrics as m
from fourfold.errors import PeerFault
from fourfold.metrics import METRICS
from fourfold.rollout.client import Completion
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.sample import VersionSpan
from fourfold.sample.wire import decode, encode
from fourfold_coordinator.data.prompts import Prompt
from fourfold_coordinator.reporting.batch_metrics import compute_batch_metrics
from fourfold_coordinator.state.samples import (
    SampleGroup,
    StepBatch,
    Trajectory,
    build_sample,
    check_completions,
)

PROMPT = Prompt(
    index=0,
    text="2 * 3 =",
    token_ids=np.arange(5, dtype=np.int32),
    answer="6",
    metadata_json="{}",
    group_key="2 3",
)


def completion(tokens: int = 3, **changes: Any) -> Completion:
    base = Completion(
        sample_index=0,
        token_ids=np.arange(10, 10 + tokens, dtype=np.int32),
        logprobs=np.full(tokens, -0.5, np.float32),
        version_spans=(VersionSpan(policy_version=2, token_count=tokens),),
        finish_reason=rollout.FINISH_REASON_STOP,
    )
    return replace(base, **changes)


def group(*scores: float | None, tokens: int = 3, **changes: Any) -> SampleGroup:
    trajectories = []
    for index, score in enumerate(scores):
        sample = build_sample(
            PROMPT, completion(tokens, **changes), sample_id=f"s-{index}", group_id="g", temperature=1.0
        )
        trajectory = Trajectory(prompt=PROMPT, segments=(sample,), completion="6")
        scored = trajectory.with_values(score=score, scorer="x@1")
        trajectories.append(trajectory.with_drop_reason("NO_IDEA") if score is None else scored)
    return SampleGroup(position=0, seed=1, trajectories=tuple(trajectories))


def collected(*groups: SampleGroup, filtered: Sequence[SampleGroup] = ()) -> StepBatch:
    drawn = len(groups) + len(filtered)
    return StepBatch(groups=list(groups), filtered=list(filtered), prompts_drawn=drawn, groups_accepted=len(groups))


@pytest.mark.parametrize(
    ("scored", "done", "reward", "reference"), [(8.0, 9.0, 0, 0), (8.0, 12.0, 0, 2), (11.0, 12.0, 1, 1)]
)
def test_only_what_sampling_did_not_hide_counts(scored: float, done: float, reward: float, reference: float) -> None:
    times = StepBatch(began=0.0, rolled=10.0, scored=scored, done=done).times()
    assert times == {m.TIME_GENERATE: 10, m.TIME_REWARD: reward, m.TIME_REFERENCE: reference}
    assert all("not hidden behind sampling" in METRICS[name] for name in (m.TIME_REWARD, m.TIME_REFERENCE))


def test_a_sample_is_the_prompt_and_what_was_sampled() -> None:
    sample = build_sample(PROMPT, completion(), sample_id="s", group_id="g", temperature=0.7)
    assert sample.token_ids.tolist() == [0, 1, 2, 3, 4, 10, 11, 12]
    assert sample.action_mask.tolist() == [False] * 5 + [True] * 3
    assert np.isnan(sample.behavior_logprobs).tolist() == [True] * 5 + [False] * 3
    assert [(s.policy_version, s.token_count) for s in sample.version_spans] == [(-1, 5), (2, 3)]
    again = decode(encode(sample), vocabulary_size=20, max_tokens=8)
    assert again.oldest_version == 2


def test_truncation_comes_from_the_finish_reason() -> None:
    long = completion(finish_reason=rollout.FINISH_REASON_LENGTH)
    assert build_sample(PROMPT, long, sample_id="s", group_id="g", temperature=1.0).truncated


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"finish_reason": 77}, "unknown finish_reason 77"),
        ({"tokens": 0}, "a sample without tokens"),
        ({"token_ids": np.array([1, 2, 20], np.int32)}, "outside the vocabulary"),
        ({"token_ids": np.array([1, -2, 3], np.int32)}, "outside the vocabulary"),
    ],
)
def test_a_completion_that_cannot_be_trained_on_is_asked_of_another_engine(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PeerFault, match=f"rollout-0: .*{words}"):
        check_completions([completion(**changes)], peer="rollout-0", vocabulary_size=20, newest_version=2)


def test_an_unfinished_completion_is_checked_like_a_finished_one() -> None:
    for reason in (rollout.FINISH_REASON_UNSPECIFIED, rollout.FINISH_REASON_ABORTED):
        fields: dict[str, Any] = {"finish_reason": reason}
        for good in (completion(**fields), completion(**fields, tokens=0)):
            check_completions([good], peer="rollout-0", vocabulary_size=20, newest_version=2)
        bad = completion(**fields, token_ids=np.array([1, 20, 2], np.int32))
        with pytest.raises(PeerFault, match="outside the vocabulary"):
            check_completions([bad], peer="rollout-0", vocabulary_size=20, newest_version=2)


def test_tokens_of_a_version_that_was_never_sent_are_refused() -> None:
    check_completions([completion()], peer="rollout-0", vocabulary_size=20, newest_version=2)
    with pytest.raises(PeerFault, match="tokens of policy_version 2; 1 is the newest that was sent") as fault:
        check_completions([completion()], peer="rollout-0", vocabulary_size=20, newest_version=1)
    assert fault.value.reason == "BAD_VERSION"
    spans = (VersionSpan(policy_version=2, token_count=2), VersionSpan(policy_version=1, token_count=1))
    with pytest.raises(PeerFault, match="policy_version 2; 1 is the newest"):  # it went on with older weights
        check_completions([completion(version_spans=spans)], peer="r", vocabulary_size=20, newest_version=1)


def test_a_batch_in_numbers() -> None:
    batch = [group(1, 0, 1, 0), group(1, 1), group(0, 0, None), group(0.5, 0.5, tokens=7)]
    numbers = compute_batch_metrics(collected(*batch), policy_version=3)
    assert numbers["reward/mean"] == pytest.approx(0.5)
    assert numbers["groups/useful"] == 0.25
    assert (numbers["groups/all_max"], numbers["groups/all_min"]) == (0.25, 0.25)
    assert numbers["length/response_mean"] == pytest.approx((8 * 3 + 2 * 7) / 10)
    assert (numbers["train/policy_lag_mean"], numbers["train/policy_lag_max"]) == (1, 1)
    assert numbers["groups/std_mean"] == pytest.approx(0.5 / 4)
    assert numbers["length/total_mean"] == pytest.approx(5 + (8 * 3 + 2 * 7) / 10)
    assert (numbers["length/turns_mean"], numbers["length/no_action_rate"], numbers["train/lag_span"]) == (1, 0, 0)
    assert set(numbers) <= set(METRICS)


def test_turns_versions_and_samples_without_actions_are_counted() -> None:
    one, other = group(1, 0).trajectories
    mask = one.sample.action_mask.copy()
    mask[[1, 2]] = True  # of eight tokens the policy sampled 1 to 2 and 5 to 7
    spans = [(-1, 1), (3, 2), (-1, 2), (7, 2), (4, 1)]
    versions = tuple(VersionSpan(policy_version=v, token_count=n) for v, n in spans)
    two = one.with_values(action_mask=mask, version_spans=versions)
    none = other.with_values(action_mask=np.zeros(8, bool), version_spans=())
    numbers = compute_batch_metrics(collected(replace(group(1, 0), trajectories=(two, none))), policy_version=8)
    assert (numbers["length/turns_mean"], numbers["length/no_action_rate"], numbers["train/lag_span"]) == (1, 0.5, 4)


def test_the_numbers_of_a_batch_are_those_of_all_that_was_generated() -> None:
    batch = collected(group(1, 0, tokens=2), filtered=[group(3, 3), group(0, 0, tokens=7)])
    numbers = compute_batch_metrics(batch, policy_version=2)
    assert (numbers["reward/mean"], numbers["reward/min"], numbers["reward/max"]) == (7 / 6, 0, 3)
    assert numbers["groups/useful"] == pytest.approx(1 / 3)
    assert numbers["groups/filter_accept_rate"] == pytest.approx(1 / 3) and numbers["groups/prompts_consumed"] == 3
    assert numbers["length/response_max"] == 7
    assert numbers["length/response_p95"] == pytest.approx(np.percentile([2, 2, 3, 3, 7, 7], 95))


def test_groups_of_one_have_nothing_to_differ_from() -> None:
    numbers = compute_batch_metrics(collected(group(1), group(1)), policy_version=2)
    assert not [name for name in numbers if name in ("groups/useful", "groups/all_max", "groups/all_min")]


def with_turn_rewards(before: SampleGroup, *rewards: float) -> SampleGroup:
    """Return a group whose trajectories have these rewards of their turn beside their scores."""
    mask = before.trajectories[0].sample.action_mask
    streams = [np.where(np.arange(len(mask)) == len(mask) - 1, reward, 0).astype(np.float32) for reward in rewards]
    pairs = zip(before.trajectories, streams, strict=True)
    changed = tuple(t.with_values(token_rewards=stream) for t, stream in pairs)
    return replace(before, trajectories=changed)


def test_a_group_whose_turns_have_different_rewards_is_useful() -> None:
    assert with_turn_rewards(group(0.0, 1.0), 0.5, -1.5).rewards == [0.5, -0.5]
    equal, different = with_turn_rewards(group(0.0, 1.0), 1.0, 0.0), with_turn_rewards(group(0.0, 0.0), 1.0, 0.0)
    numbers = compute_batch_metrics(collected(equal, different), policy_version=2)
    assert numbers[m.USEFUL_GROUPS] == 0.5 and numbers[m.REWARD_MEAN] == 0.25, "the mean of the scores alone"


def test_a_trajectory_is_truncated_if_one_of_its_segments_is() -> None:
    one, two = group(0.0, 1.0).trajectories
    cut = replace(one, segments=(one.sample, replace(one.sample, truncated=True), one.sample))
    assert cut.truncated and not two.truncated
    batch = collected(SampleGroup(position=0, seed=1, trajectories=(cut, two)))
    assert compute_batch_metrics(batch, policy_version=2)[m.TRUNCATION_RATE] == 0.5
