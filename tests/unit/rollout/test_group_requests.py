"""Tests the requests of a group and of its continuation, and the joining of what they return."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fourfold.rollout.client import Completion
from fourfold.rollout.group_requests import GroupRequest, Parts, join_parts
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.sample import VersionSpan
from fourfold.seeds import derive_seed

REQUEST = GroupRequest(
    name="g",
    prompt_token_ids=np.array([7, 8], np.int32),
    params=rollout.SamplingParams(temperature=0.5, max_tokens=6, stop_token_ids=[3], seed=40),
    count=4,
    version=2,
)


def part(*ids: int, version: int = 2, reason: Any = rollout.FINISH_REASON_UNSPECIFIED) -> Completion:
    return Completion(
        sample_index=0,
        token_ids=np.array(ids, np.int32),
        logprobs=-np.array(ids, np.float32),
        version_spans=(VersionSpan(policy_version=version, token_count=len(ids)),),
        finish_reason=reason,
    )


def plan(unfinished: dict[int, Parts]) -> list[tuple[rollout.GenerateRequest, list[int]]]:
    return REQUEST.plan(unfinished, number=3, flush_seconds=None)


def test_a_group_without_tokens_is_one_request_with_the_params_of_the_group() -> None:
    expected = rollout.GenerateRequest(
        request_id="g-3", prompt_token_ids=[7, 8], sampling_params=REQUEST.params, sample_count=4, min_policy_version=2
    )
    assert plan(dict.fromkeys(range(4), ())) == [(expected, [0, 1, 2, 3])]
    ((flushed, _),) = REQUEST.plan(dict.fromkeys(range(4), ()), number=3, flush_seconds=2.5)
    assert flushed.flush_interval.ToNanoseconds() == 2_500_000_000
    flushed.ClearField("flush_interval")
    assert flushed == expected


def test_a_sample_continues_after_its_ids_with_a_seed_of_its_own_and_the_tokens_that_are_left() -> None:
    ((request, indices),) = plan({2: (part(5, 6), part(9))})
    assert (list(request.prompt_token_ids), request.sample_count, indices) == ([7, 8, 5, 6, 9], 1, [2])
    params = rollout.SamplingParams(temperature=0.5, max_tokens=3, stop_token_ids=[3])
    params.seed = derive_seed(40, "continue", 2, 3)
    assert (request.sampling_params, request.min_policy_version) == (params, 2)
    others = [plan({2: (part(5, 6),)}), plan({1: (part(5, 6), part(9))})]
    seeds = {r[0][0].sampling_params.seed for r in others} | {request.sampling_params.seed}
    assert len(seeds) == 3 and all(0 <= seed < 2**52 for seed in seeds)


def test_neighbours_without_tokens_keep_their_seeds_and_share_a_request() -> None:
    found = plan({0: (), 1: (), 2: (part(5),), 3: ()})
    assert [(request.request_id, indices) for request, indices in found] == [
        ("g-3-0", [0, 1]), ("g-3-2", [2]), ("g-3-3", [3]),
    ]  # fmt: skip
    assert [request.sample_count for request, _ in found] == [2, 1, 1]
    assert [request.sampling_params.seed for request, _ in found][::2] == [40, 43]
    assert [indices for _, indices in plan({1: (), 3: ()})] == [[1], [3]]
    assert [indices for _, indices in plan({0: (part(5),), 1: (), 2: ()})] == [[0], [1, 2]]


def test_joined_parts_keep_the_version_of_every_token() -> None:
    parts = (part(5, 6), part(9, version=2), part(4, 4, version=3), part(1, version=2))
    whole = join_parts(2, parts, rollout.FINISH_REASON_STOP)
    assert whole.token_ids.tolist() == [5, 6, 9, 4, 4, 1]
    assert whole.logprobs.tolist() == [-5, -6, -9, -4, -4, -1]
    assert [(s.policy_version, s.token_count) for s in whole.version_spans] == [(2, 3), (3, 2), (2, 1)]
    assert (whole.sample_index, whole.finish_reason) == (2, rollout.FINISH_REASON_STOP)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ((part(5), part(6, reason=rollout.FINISH_REASON_LENGTH)), rollout.FINISH_REASON_LENGTH),
        ((part(5, 3, reason=rollout.FINISH_REASON_STOP),), rollout.FINISH_REASON_STOP),
        ((part(5, 3, reason=rollout.FINISH_REASON_ABORTED),), rollout.FINISH_REASON_STOP),
        ((part(5, 9),), rollout.FINISH_REASON_STOP),
        ((part(3, 5, reason=rollout.FINISH_REASON_ABORTED),), rollout.FINISH_REASON_UNSPECIFIED),
        ((part(1, 1, 1), part(1, 1, 1, reason=rollout.FINISH_REASON_ABORTED)), rollout.FINISH_REASON_LENGTH),
        ((part(1, 1, 1), part(1, 1)), rollout.FINISH_REASON_UNSPECIFIED),
        ((part(1, 1, 1), part(1, 1, 3)), rollout.FINISH_REASON_STOP),
    ],
)
def test_no_sample_continues_after_a_stop_token_or_beyond_max_tokens(parts: Parts, reason: int) -> None:
    assert REQUEST.finish_reason(parts, frozenset({3, 9})) == reason
