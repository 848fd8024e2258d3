"""Encoding and decoding of samples: round trips, and an error that names each malformed field."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from fourfold.errors import InvalidInput
from fourfold.rpc import codec
from fourfold.sample import Sample, VersionSpan, check_unique, wire
from fourfold.sample.wire import decode, encode
from fourfold.trainer.v1 import trainer_service_pb2 as trainer
from fourfold.types.v1 import experience_pb2 as pb

VOCABULARY = 1000
MAX_TOKENS = 64


def make(prompt: int = 3, sampled: int = 5, *, seed: int = 0, **changes: object) -> Sample:
    rng = np.random.default_rng(seed)
    n = prompt + sampled
    mask = np.arange(n) >= prompt
    logprobs = np.where(mask, -rng.random(n), np.nan).astype(np.float32)
    spans = [VersionSpan(policy_version=-1, token_count=prompt)]
    spans += [VersionSpan(policy_version=7, token_count=sampled)] if sampled else []
    values: dict[str, object] = {
        "sample_id": "s-1",
        "group_id": "g_1",
        "token_ids": rng.integers(0, VOCABULARY, n, dtype=np.int32),
        "behavior_logprobs": logprobs,
        "action_mask": mask,
        "loss_mask": mask,
        "version_spans": tuple(spans),
        "temperature": 1.0,
    }
    return Sample(**(values | changes))  # type: ignore[arg-type]


def read(message: pb.Experience) -> Sample:
    return decode(message, vocabulary_size=VOCABULARY, max_tokens=MAX_TOKENS)


def floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def teach(ids: bytes, logprobs: bytes) -> Callable[[pb.Experience], None]:
    def change(message: pb.Experience) -> None:
        message.teacher_ids, message.teacher_logprobs = ids, logprobs

    return change


NAN = float("nan")
BAD: list[tuple[str, Callable[[pb.Experience], object], str]] = [
    ("id", lambda m: setattr(m, "sample_id", "a b"), "sample_id is 'a b'; it must be 1 to 128 characters"),
    ("empty id", lambda m: setattr(m, "sample_id", ""), "sample_id is ''"),
    ("group", lambda m: setattr(m, "group_id", "x" * 129), "group_id is 'xxx"),
    ("odd ids", lambda m: setattr(m, "token_ids", b"\0" * 33), "token_ids has 33 bytes; int32 needs a multiple of 4"),
    ("one token", lambda m: setattr(m, "token_ids", b"\0" * 4), "1 tokens; it must have 2 to 64"),
    ("too long", lambda m: setattr(m, "token_ids", b"\0" * 4 * 65), "65 tokens; it must have 2 to 64"),
    ("vocabulary", lambda m: setattr(m, "token_ids", codec.pack_ints([1] * 7 + [1000])), "token id 1000 is outside"),
    ("negative", lambda m: setattr(m, "token_ids", codec.pack_ints([1] * 7 + [-2])), "token id -2 is outside"),
    ("short mask", lambda m: setattr(m, "action_mask", b"\0\1"), "action_mask has 2 bytes; 8 tokens need 8"),
    (
        "mask of 2",
        lambda m: setattr(m, "action_mask", b"\0\0\0\1\1\1\1\2"),
        "action_mask holds 2; each byte must be 0 or 1",
    ),
    ("first sampled", lambda m: setattr(m, "action_mask", b"\1" * 8), "action_mask[0] is 1"),
    ("loss length", lambda m: setattr(m, "loss_mask", b"\0\1"), "loss_mask has 2 bytes"),
    ("loss of 3", lambda m: setattr(m, "loss_mask", b"\0\0\0\3\1\1\1\1"), "loss_mask holds 3"),
    ("loss outside", lambda m: setattr(m, "loss_mask", b"\0\0\1\1\1\1\1\1"), "it must be a subset"),
    (
        "short logprobs",
        lambda m: setattr(m, "behavior_logprobs", b"\0" * 28),
        "behavior_logprobs has 28 bytes; 8 float32 need 32",
    ),
    (
        "positive",
        lambda m: setattr(m, "behavior_logprobs", floats(NAN, NAN, NAN, -1, -1, 0.5, -1, -1)),
        "behavior_logprobs holds 0.5 on a sampled token",
    ),
    (
        "nan sampled",
        lambda m: setattr(m, "behavior_logprobs", floats(NAN, NAN, NAN, -1, -1, NAN, -1, -1)),
        "behavior_logprobs holds nan on a sampled token",
    ),
    (
        "number on the prompt",
        lambda m: setattr(m, "behavior_logprobs", floats(NAN, -1, NAN, -1, -1, -1, -1, -1)),
        "behavior_logprobs must be NaN on tokens that were not sampled",
    ),
    (
        "positive on the prompt",
        lambda m: setattr(m, "behavior_logprobs", floats(NAN, 1, NAN, -1, -1, -1, -1, -1)),
        "behavior_logprobs must be NaN on tokens that were not sampled",
    ),
    ("greedy", lambda m: setattr(m, "temperature", 0), "temperature is 0.0; it must be in (0, 2]"),
    ("hot", lambda m: setattr(m, "temperature", 2.5), "temperature is 2.5"),
    ("nan temperature", lambda m: setattr(m, "temperature", NAN), "temperature is nan"),
    ("top_p", lambda m: setattr(m, "top_p", 0), "top_p is 0.0; it must be in (0, 1]"),
    ("top_k", lambda m: setattr(m, "top_k", -1), "top_k is -1"),
    ("no spans", lambda m: m.ClearField("version_spans"), "has behavior_logprobs and no version_spans"),
    ("no logprobs", lambda m: m.ClearField("behavior_logprobs"), "has version_spans and no behavior_logprobs"),
    ("span of 0", lambda m: setattr(m.version_spans[0], "token_count", 0), "token_count >= 1"),
    (
        "huge span",
        lambda m: setattr(m.version_spans[0], "token_count", 2**31 - 1),
        "version_spans cover 2147483652 tokens",
    ),
    ("version -2", lambda m: setattr(m.version_spans[0], "policy_version", -2), r"policy_version in [-1, 2^53]"),
    (
        "huge version",
        lambda m: setattr(m.version_spans[1], "policy_version", 2**63 - 1),
        r"policy_version in [-1, 2^53]",
    ),
    ("sampled prompt", lambda m: setattr(m.version_spans[0], "policy_version", 3), "-1 exactly where action_mask is 0"),
    ("no version", lambda m: setattr(m.version_spans[1], "policy_version", -1), "-1 exactly where action_mask is 0"),
    ("no end", lambda m: m.ClearField("end_reason"), "end_reason is 0; it must be TERMINATED or TRUNCATED"),
    ("score", lambda m: setattr(m, "score", NAN), "score is nan; it must be finite"),
    (
        "teacher width",
        lambda m: setattr(m, "teacher_ids", bytes(36)),
        "teacher_ids has 36 bytes and teacher_logprobs 0",
    ),
    (
        "teacher above 64",
        teach(bytes(32 * 65), bytes(32 * 65)),
        "8 tokens need 32 for each likely token, of which there are 1 to 64",
    ),
    (
        "teacher alone",
        lambda m: setattr(m, "teacher_logprobs", bytes(64)),
        "teacher_ids has 0 bytes and teacher_logpro",
    ),
    (
        "teacher above 0",
        teach(bytes(32), floats(*[0.5] * 8)),
        "teacher_logprobs must be finite and at most 0",
    ),
    (
        "teacher vocabulary",
        teach(codec.pack_ints([5000] * 8), bytes(32)),
        "teacher_ids has an id outside of the vocabulary [0, 1000)",
    ),
    (
        "teacher twice",
        teach(codec.pack_ints([3, 3] * 8), bytes(64)),
        "teacher_ids has an id twice at one position",
    ),
    ("reference length", lambda m: setattr(m, "reference_logprobs", b"\0" * 4), "reference_logprobs has 4 bytes"),
    (
        "reference nan",
        lambda m: setattr(m, "reference_logprobs", floats(NAN, -1, -1, -1, -1, NAN, -1, -1)),
        "finite after the first token",
    ),
    ("baseline", lambda m: setattr(m, "baseline_score", NAN), "baseline_score is nan; it must be finite"),
    ("trajectory", lambda m: setattr(m, "trajectory_id", "a b"), "trajectory_id is 'a b'; it must be 1 to 128"),
    (
        "segment",
        lambda m: setattr(m, "segment_index", 1),
        "segment_index is 1 with segment_count = 1; it must be in [0",
    ),
    ("segment -1", lambda m: setattr(m, "segment_index", -1), "segment_index is -1"),
    ("segments -1", lambda m: setattr(m, "segment_count", -1), "segment_count = -1"),
    ("whose segment", lambda m: setattr(m, "segment_count", 2), "segment_count is 2 without a trajectory_id"),
    ("rewards length", lambda m: setattr(m, "token_rewards", b"\0" * 4), "token_rewards has 4 bytes"),
    ("prompt reward", lambda m: setattr(m, "token_rewards", floats(1, *[0] * 7)), "0 where action_mask is 0"),
    ("reward nan", lambda m: setattr(m, "token_rewards", floats(*[0] * 7, NAN)), "token_rewards must be finite"),
]


@pytest.mark.parametrize(("change", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_a_malformed_message_is_refused_with_the_reason(
    change: Callable[[pb.Experience], object], message: str
) -> None:
    experience = encode(make())
    read(experience)
    change(experience)
    with pytest.raises(InvalidInput, match=re.escape(message)) as caught:
        read(experience)
    assert "s-1" in str(caught.value) or "sample_id" in message


def test_tokens_of_data_have_no_engine() -> None:
    sample = make(behavior_logprobs=np.empty(0, np.float32), version_spans=(), score=0.5)
    message = encode(sample)
    assert not message.behavior_logprobs and not message.version_spans
    found = read(message)
    assert (found.behavior_logprobs.tolist(), found.version_spans, found.oldest_version) == ([], (), -1)
    assert found.token_ids.tolist() == sample.token_ids.tolist() and found.score == 0.5


def test_an_equal_loss_mask_does_not_travel() -> None:
    sample = make()
    assert encode(sample).loss_mask == b""
    assert encode(make(loss_mask=sample.action_mask.copy())).loss_mask == b""
    other = sample.action_mask.copy()
    other[-1] = False
    assert encode(make(loss_mask=other)).loss_mask == other.tobytes()


def test_a_stream_is_the_messages_that_protobuf_would_encode() -> None:
    samples = [make(prompt=1 + i, sampled=20, sample_id=f"s{i}", score=1.0) for i in range(60)]
    samples[3] = make(sample_id="s3", loss_mask=np.zeros(8, np.bool_), token_rewards=np.zeros(8, np.float32))
    items = [wire.encode_parts(sample) for sample in samples]
    size = max(sum(map(len, item)) for item in items)
    head, number = trainer.TrainStepRequest(step=300), trainer.TrainStepRequest.EXPERIENCES_FIELD_NUMBER
    for limit in (1, 3 * size, 1 << 20):
        data = list(codec.encode_stream(head, number, iter(items), limit))
        requests = [trainer.TrainStepRequest.FromString(part) for part in data]
        assert {request.step for request in requests} == {300}
        assert [e for request in requests for e in request.experiences] == [encode(sample) for sample in samples]
        assert all(len(part) <= limit or len(r.experiences) == 1 for part, r in zip(data, requests, strict=True))
        assert [r.SerializeToString(deterministic=True) for r in requests] == [
            trainer.TrainStepRequest(step=300, experiences=r.experiences).SerializeToString(deterministic=True)
            for r in requests
        ]
    assert list(codec.encode_stream(head, number, [])) == [head.SerializeToString()]


def test_parts_are_not_copies_of_the_arrays() -> None:
    sample = make(prompt=100, sampled=400)
    arrays = [np.frombuffer(part, np.uint8) for part in wire.encode_parts(sample)]
    for values in (sample.token_ids, sample.behavior_logprobs, sample.action_mask):
        assert any(np.shares_memory(values, array) for array in arrays)


def test_a_repeated_sample_id_is_refused() -> None:
    check_unique(["a", "b"])
    with pytest.raises(InvalidInput, match="sample a occurs twice"):
        check_unique(["a", "b", "a"])


def test_lists_and_arrays_pack_to_the_same_bytes() -> None:
    ints, numbers = [0, 1, -1, 2**31 - 1, -(2**31)], [0.0, -0.5, -1e-30, float("-inf"), NAN]
    assert codec.pack_ints(ints) == codec.pack_ints(tuple(ints)) == np.array(ints, "<i4").tobytes()
    assert (
        codec.pack_floats(numbers)
        == codec.pack_floats(np.array(numbers, np.float32))
        == np.array(numbers, "<f4").tobytes()
    )
    assert codec.pack_ints([]) == codec.pack_floats([]) == b""
