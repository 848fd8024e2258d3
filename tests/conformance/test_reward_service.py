"""Checks that a reward service keeps the contract: ours, the examples, or the one at --target.

    pytest tests/conformance/test_reward_service.py --target 127.0.0.1:50053

The suite does not depend on the scores: every outcome may be a score, an abstention or an error. It checks each
property that a caller relies on.
"""

from __future__ import annotations

import math
import re
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from google.rpc.code_pb2 import Code

from fourfold.reward.v1 import reward_service_pb2 as pb
from fourfold.reward.v1.reward_service_pb2_grpc import RewardServiceStub
from fourfold.text import MAX_COMPONENTS, MAX_ERROR, is_metric_name
from fourfold.types.v1.experience_pb2 import Experience

CALL_SECONDS = 30.0
REASON = re.compile(r"[A-Z][A-Z0-9_]{0,62}")
# Texts that break careless scorers: NaN and infinity as numbers, floats that overflow 32 bits, nothing, not ASCII.
AWKWARD = ["nan", "inf", "-inf", "1e300", "", " ", "\x00", "\u00e9\U0001f600", "1,000", "{}", "x" * 100_000]


def item(sample_id: str, completion: str = "12", **fields: str) -> pb.ScoreItem:
    return pb.ScoreItem(
        experience=Experience(sample_id=sample_id), prompt_text="6 * 2 =", completion_text=completion, **fields
    )


def score(channel: grpc.Channel, items: list[pb.ScoreItem], timeout: float = CALL_SECONDS) -> list[pb.SampleScore]:
    """Call Score and check the properties of every response."""
    answer = RewardServiceStub(channel).Score(pb.ScoreRequest(items=items), timeout=timeout)
    assert [s.sample_id for s in answer.scores] == [i.experience.sample_id for i in items]
    for one in answer.scores:
        check_outcome(one)
    return list(answer.scores)


def check_outcome(one: pb.SampleScore) -> None:
    kind = one.WhichOneof("outcome")
    assert kind is not None, f"{one.sample_id} has no outcome"
    if kind == "score":
        assert math.isfinite(one.score), f"{one.sample_id} has the score {one.score}"
    elif kind == "abstain_reason":
        assert REASON.fullmatch(one.abstain_reason), one
    else:
        assert one.error.code in Code.values(), one
        assert one.error.code != Code.Value("OK"), one
        assert REASON.fullmatch(one.error.reason), one
        assert len(one.error.message) <= MAX_ERROR and one.error.message.isprintable()
    assert len(one.components) <= MAX_COMPONENTS
    assert all(is_metric_name(name) and math.isfinite(value) for name, value in one.components.items()), one


def refused(channel: grpc.Channel, items: list[pb.ScoreItem]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as error:
        score(channel, items)
    code = error.value.code()
    assert isinstance(code, grpc.StatusCode)
    return code


@pytest.fixture
def limit(channel: grpc.Channel) -> int:
    """Most samples of one call; 0: no limit."""
    info = RewardServiceStub(channel).GetInfo(pb.GetInfoRequest(), timeout=CALL_SECONDS)
    return info.max_sample_count


def test_info_names_scorer_and_version(channel: grpc.Channel) -> None:
    info = RewardServiceStub(channel).GetInfo(pb.GetInfoRequest(), timeout=CALL_SECONDS)
    name, at, version = info.name.rpartition("@")
    assert name and at and version, f"name is {info.name!r}; it must be name@version"
    assert info.max_sample_count >= 0
    assert len(info.tokenizer_sha256) in (0, 32)


def test_scores_have_the_order_and_ids_of_the_request(channel: grpc.Channel, limit: int) -> None:
    count = min(limit or 200, 200)
    scores = score(channel, [item(f"s-{(i * 7919) % 1000}_X", str(i)) for i in range(count)])
    assert len(scores) == count


def test_single_item_is_scored(channel: grpc.Channel) -> None:
    score(channel, [item("a" * 128)])


def test_same_request_gives_the_same_answer(channel: grpc.Channel) -> None:
    items = [
        item(f"s{i}", text, answer="12", metadata_json='{"k": 1}') for i, text in enumerate(["12", "13", "", "nan"])
    ]
    assert score(channel, items) == score(channel, items)


def test_score_does_not_depend_on_the_rest_of_the_batch(channel: grpc.Channel) -> None:
    items = [item("a", "12"), item("b", "nan"), item("c", "hello")]
    together = score(channel, items)
    alone = [score(channel, [one])[0] for one in items]
    assert together == alone


def test_scores_are_finite(channel: grpc.Channel, limit: int) -> None:
    items = [item(f"s{i}", text, answer=text[:100]) for i, text in enumerate(AWKWARD)]
    for start in range(0, len(items), limit or len(items)):
        score(channel, items[start : start + (limit or len(items))])


@pytest.mark.parametrize("metadata", ["{", "[]", "null", "NaN", '{"a": ' * 1000])
def test_bad_metadata_fails_no_other_sample(channel: grpc.Channel, metadata: str) -> None:
    first, second = score(channel, [item("good"), item("bad", metadata_json=metadata)])
    assert first == score(channel, [item("good")])[0]
    assert second.WhichOneof("outcome")


def test_unknown_verifier_is_an_error_of_its_sample(channel: grpc.Channel) -> None:
    first, second = score(channel, [item("good"), item("bad", verifier="no-such-verifier")])
    assert first == score(channel, [item("good")])[0]
    assert second.error.code == Code.Value("NOT_FOUND")


def test_empty_request_is_refused(channel: grpc.Channel) -> None:
    assert refused(channel, []) is grpc.StatusCode.INVALID_ARGUMENT


def test_repeated_ids_are_refused(channel: grpc.Channel) -> None:
    assert refused(channel, [item("a"), item("b"), item("a")]) is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("sample_id", ["", "a b", "a" * 129, "\u00e9", "a/b"])
def test_malformed_id_is_refused(channel: grpc.Channel, sample_id: str) -> None:
    assert refused(channel, [item(sample_id)]) is grpc.StatusCode.INVALID_ARGUMENT


def test_request_above_8_mib_is_refused(channel: grpc.Channel) -> None:
    assert refused(channel, [item("a", "x" * (9 << 20))]) is grpc.StatusCode.INVALID_ARGUMENT
    score(channel, [item("a")])


def test_more_items_than_the_limit_are_refused(channel: grpc.Channel, limit: int) -> None:
    if not limit:
        pytest.skip("the service has no limit of its own")
    assert refused(channel, [item(f"s{i}") for i in range(limit + 1)]) is grpc.StatusCode.INVALID_ARGUMENT


def test_deadline_is_kept_and_the_next_call_is_answered(channel: grpc.Channel, limit: int) -> None:
    items = [item(f"s{i}", "sleep") for i in range(min(limit or 100, 100))]
    started = time.monotonic()
    try:
        score(channel, items, timeout=1.0)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - started < 15
    started = time.monotonic()
    score(channel, [item("next")])
    assert time.monotonic() - started < 15


def test_concurrent_calls_get_their_own_responses(channel: grpc.Channel, limit: int) -> None:
    count = min(limit or 20, 20)

    def call(number: int) -> list[pb.SampleScore]:
        return score(channel, [item(f"c{number}-{i}", str(number)) for i in range(count)])

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(call, range(16)))
    assert [len(a) for a in answers] == [count] * 16
