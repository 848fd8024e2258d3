"""Converts between `Sample` (numpy arrays) and `Experience` (its protobuf message), and checks received messages.

`decode` checks every length and range before any code uses the data, and its errors name the wrong sample.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final, Literal, TypeAlias, TypeVar

import numpy as np
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from fourfold.arrays import EMPTY_FLOATS, BoolArray, Float32Array, Int32Array, Sample, ScoreTerm, VersionSpan
from fourfold.bounds import MAX_NUMBER
from fourfold.errors import InvalidInput
from fourfold.types.v1 import experience_pb2 as pb

AnyMessage = TypeVar("AnyMessage", bound=Message)
Buffer: TypeAlias = bytes | memoryview  # of bytes

ID_PATTERN: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
# Size of one message of a stream. The limit is 16 MiB; 1 MiB was the fastest size in measurements.
CHUNK_BYTES: Final = 1 << 20
MAX_TERMS: Final = 64  # of one score
_INT32: Final = np.dtype("<i4")
_FLOAT32: Final = np.dtype("<f4")


def duration(seconds: float) -> Duration:
    """Return a duration of so many seconds, at least 1 ns: the contract wants times above 0."""
    value = Duration()
    value.FromNanoseconds(max(int(seconds * 1e9), 1))
    return value


def encode(sample: Sample) -> pb.Experience:
    """Pack one sample. A loss mask that equals the action mask is left out."""
    return pb.Experience.FromString(b"".join(encode_parts(sample)))


def encode_parts(sample: Sample) -> list[Buffer]:
    """Return an encoded `Experience` in parts: the arrays of the sample, which are not copied, and what is between.

    The arrays come last: protobuf allows the fields of a message in any order.
    """
    rest = pb.Experience(
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        temperature=sample.temperature,
        top_p=sample.top_p if sample.top_p != 1.0 else None,
        top_k=sample.top_k or None,
        end_reason=pb.END_REASON_TRUNCATED if sample.truncated else pb.END_REASON_TERMINATED,
        score=sample.score,
        baseline_score=sample.baseline_score,
        scorer=sample.scorer,
        trajectory_id=sample.trajectory_id,
        segment_index=sample.segment_index,
        segment_count=sample.segment_count if sample.segment_count > 1 else 0,
        terms=[pb.ScoreTerm(name=t.name, scorer=t.scorer, score=t.score, weight=t.weight) for t in sample.terms],
        shadow_score=sample.shadow_score,
    )
    parts: list[Buffer] = [rest.SerializeToString(), *map(_encode_span, sample.version_spans)]
    arrays = [
        (pb.Experience.TOKEN_IDS_FIELD_NUMBER, np.asarray(sample.token_ids, _INT32)),
        (pb.Experience.BEHAVIOR_LOGPROBS_FIELD_NUMBER, np.asarray(sample.behavior_logprobs, _FLOAT32)),
        (pb.Experience.ACTION_MASK_FIELD_NUMBER, sample.action_mask),
        (pb.Experience.REFERENCE_LOGPROBS_FIELD_NUMBER, np.asarray(sample.reference_logprobs, _FLOAT32)),
        (pb.Experience.TOKEN_REWARDS_FIELD_NUMBER, np.asarray(sample.token_rewards, _FLOAT32)),
    ]
    if sample.loss_mask is not sample.action_mask and not np.array_equal(sample.loss_mask, sample.action_mask):
        arrays.append((pb.Experience.LOSS_MASK_FIELD_NUMBER, sample.loss_mask))
    for number, array in arrays:
        if array.size:
            parts += (_field_head(number, array.nbytes), np.ascontiguousarray(array).view(np.uint8).data)
    return parts


@lru_cache(maxsize=1 << 14)  # as `_field_head`: a message of each span would take a fifth of the time of a sample
def _encode_span(span: VersionSpan) -> bytes:
    message = pb.VersionSpan(policy_version=span.policy_version, token_count=span.token_count)
    return pb.Experience(version_spans=[message]).SerializeToString()


def encode_stream(
    head: Message, number: int, items: Iterable[Sequence[Buffer]], limit: int = CHUNK_BYTES
) -> Iterator[bytes]:
    """Yield encoded messages of at most `limit` bytes, each with the fields of `head` and its share of a repeated one.

    Args:
        head: has no item; it is sent alone when there is none.
        number: of the repeated message field.
        items: its elements, each encoded, in parts; read one by one. A larger element gets a message of its own.
        limit: bytes.
    """
    first = head.SerializeToString()
    parts: list[Buffer] = [first]
    size, count = len(first), 0
    for item in items:
        item_size = sum(map(len, item))
        start = _field_head(number, item_size)
        if count and size + len(start) + item_size > limit:
            yield b"".join(parts)
            parts, size, count = [first], len(first), 0
        parts += (start, *item)
        size, count = size + len(start) + item_size, count + 1
    yield b"".join(parts)


@lru_cache(maxsize=1 << 14)  # the samples of a run have thousands of lengths
def _field_head(number: int, size: int) -> bytes:
    """Return what precedes a field of `size` bytes: its number, wire type and size, as variable-length integers."""
    data = bytearray()
    for value in (number << 3 | 2, size):  # wire type 2: length-delimited
        while value > 0x7F:
            data.append(value & 0x7F | 0x80)
            value >>= 7
        data.append(value)
    return bytes(data)


def decode(message: pb.Experience, *, vocabulary_size: int, max_tokens: int) -> Sample:
    """Unpack and check one message; InvalidInput names the sample, the field, the value and the rule."""
    sample_id = check_id(message.sample_id, "sample_id")
    check_id(message.group_id, f"sample {sample_id}: group_id")
    token_ids = decode_token_ids(message, vocabulary_size=vocabulary_size, max_tokens=max_tokens)
    n = len(token_ids)
    action_bytes = message.action_mask
    action_mask = _mask(action_bytes, n, sample_id, "action_mask")
    loss_bytes = message.loss_mask
    loss_mask = _mask(loss_bytes, n, sample_id, "loss_mask") if loss_bytes else action_mask
    behavior = unpack_floats(message.behavior_logprobs, n, sample_id, "behavior_logprobs")
    if action_bytes[0]:
        raise InvalidInput(
            f"sample {sample_id}: action_mask[0] is 1; the first token is never sampled: send a prompt token first"
        )
    if loss_bytes and bool((loss_mask & ~action_mask).any()):
        raise InvalidInput(f"sample {sample_id}: loss_mask selects tokens outside action_mask; it must be a subset")
    _check_behavior(behavior, action_mask, action_bytes, sample_id)
    _check_sampling(message, sample_id)
    spans = tuple(
        VersionSpan(policy_version=s.policy_version, token_count=s.token_count) for s in message.version_spans
    )
    _check_spans(spans, action_bytes, sample_id)
    if message.end_reason not in (pb.END_REASON_TERMINATED, pb.END_REASON_TRUNCATED):
        raise InvalidInput(
            f"sample {sample_id}: end_reason is {message.end_reason}; it must be TERMINATED or TRUNCATED"
        )
    _check_segment(message, sample_id)
    reference = EMPTY_FLOATS
    if message.reference_logprobs:
        reference = unpack_floats(message.reference_logprobs, n, sample_id, "reference_logprobs")
        if not np.isfinite(reference[1:]).all():
            raise InvalidInput(f"sample {sample_id}: reference_logprobs must be finite after the first token")
    return Sample(
        sample_id=sample_id,
        group_id=message.group_id,
        token_ids=token_ids,
        behavior_logprobs=behavior,
        action_mask=action_mask,
        loss_mask=loss_mask,
        version_spans=spans,
        temperature=message.temperature,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        top_k=message.top_k,
        truncated=message.end_reason == pb.END_REASON_TRUNCATED,
        score=_score(message, "score"),
        scorer=message.scorer,
        reference_logprobs=reference,
        token_rewards=_token_rewards(message, action_mask),
        baseline_score=_score(message, "baseline_score"),
        trajectory_id=message.trajectory_id,
        segment_index=message.segment_index,
        segment_count=message.segment_count or 1,
        terms=_terms(message),
        shadow_score=_score(message, "shadow_score"),
    )


def _token_rewards(message: pb.Experience, action_mask: BoolArray) -> Float32Array:
    if not message.token_rewards:
        return EMPTY_FLOATS
    rewards = unpack_floats(message.token_rewards, len(action_mask), message.sample_id, "token_rewards")
    if not np.isfinite(rewards).all() or rewards[~action_mask].any():
        raise InvalidInput(f"sample {message.sample_id}: token_rewards must be finite, and 0 where action_mask is 0")
    return rewards


def _terms(message: pb.Experience) -> tuple[ScoreTerm, ...]:
    """Return the terms of the score; InvalidInput: too many, two of one name, or a number that is not finite."""
    where = f"sample {message.sample_id}: terms"
    if len(message.terms) > MAX_TERMS:
        raise InvalidInput(f"{where} has {len(message.terms)} entries; at most {MAX_TERMS} are allowed")
    terms = tuple(ScoreTerm(name=t.name, scorer=t.scorer, score=t.score, weight=t.weight) for t in message.terms)
    if len({term.name for term in terms}) < len(terms):
        raise InvalidInput(f"{where} has a name twice: {[term.name for term in terms]}; names must be different")
    for term in terms:
        check_id(term.name, f"{where}: name")
        if not (math.isfinite(term.score) and math.isfinite(term.weight)):
            raise InvalidInput(
                f"{where}: {term.name} has score {term.score}, weight {term.weight}; both must be finite"
            )
    return terms


def _score(message: pb.Experience, field: Literal["score", "baseline_score", "shadow_score"]) -> float | None:
    """Return a finite score, or None when the field is absent."""
    if not message.HasField(field):
        return None
    value: float = getattr(message, field)
    if not math.isfinite(value):
        raise InvalidInput(f"sample {message.sample_id}: {field} is {value}; it must be finite")
    return value


def decode_token_ids(message: pb.Experience, *, vocabulary_size: int, max_tokens: int) -> Int32Array:
    """Unpack only `token_ids`, int32 [n] with 2 <= n <= max_tokens; InvalidInput names the sample and the rule."""
    sample_id, data = message.sample_id, message.token_ids
    if len(data) % 4:
        raise InvalidInput(f"sample {sample_id}: token_ids has {len(data)} bytes; int32 needs a multiple of 4")
    ids = read_ints(data)
    if not 2 <= len(ids) <= max_tokens:
        raise InvalidInput(f"sample {sample_id}: {len(ids)} tokens; it must have 2 to {max_tokens}")
    # Viewed as unsigned, a negative id is a large one, so one comparison finds both kinds of invalid ids.
    if int(ids.view(np.uint32).max()) >= vocabulary_size:
        bad = int(ids[(ids < 0) | (ids >= vocabulary_size)][0])
        raise InvalidInput(f"sample {sample_id}: token id {bad} is outside the vocabulary [0, {vocabulary_size})")
    return ids


def unpack_floats(data: bytes, count: int, sample_id: str, field: str) -> Float32Array:
    """Unpack `count` little-endian float32, or raise InvalidInput when the length is wrong."""
    if len(data) != 4 * count:
        raise InvalidInput(f"sample {sample_id}: {field} has {len(data)} bytes; {count} float32 need {4 * count}")
    return read_floats(data)


def read_floats(data: bytes) -> Float32Array:
    """Return little-endian float32 values without a copy, where the machine has that byte order."""
    return np.frombuffer(data, _FLOAT32).astype(np.float32, copy=False)


def read_ints(data: bytes) -> Int32Array:
    """Return little-endian int32 values, as `read_floats`."""
    return np.frombuffer(data, _INT32).astype(np.int32, copy=False)


def check_id(value: str, what: str) -> str:
    """Return `value`, or raise InvalidInput when it is not a valid id."""
    if not ID_PATTERN.fullmatch(value):
        raise InvalidInput(f"{what} is {value[:140]!r}; it must be 1 to 128 characters of [A-Za-z0-9_-]")
    return value


def check_unique(ids: Iterable[str]) -> None:
    """Raise InvalidInput when a sample id occurs twice."""
    seen: set[str] = set()
    for sample_id in ids:
        if sample_id in seen:
            raise InvalidInput(f"sample {sample_id} occurs twice in one request; sample ids must be unique")
        seen.add(sample_id)


def pack_floats(values: Sequence[float] | Float32Array) -> bytes:
    """Return `values` as little-endian float32."""
    if isinstance(values, list):  # struct is more than twice as fast as numpy for a list
        return struct.pack(f"<{len(values)}f", *values)
    return np.asarray(values, "<f4").tobytes()


def pack_ints(values: Sequence[int] | Int32Array) -> bytes:
    """Return `values` as little-endian int32."""
    if isinstance(values, list):
        return struct.pack(f"<{len(values)}i", *values)
    return np.asarray(values, "<i4").tobytes()


def chunks(messages: Iterable[AnyMessage], limit: int = CHUNK_BYTES, max_count: int = 0) -> Iterator[list[AnyMessage]]:
    """Group messages into chunks of at most `limit` encoded bytes; a larger message gets a chunk of its own.

    `max_count` is the largest number of messages in a chunk; 0: no limit.
    """
    group: list[AnyMessage] = []
    size = 0
    for message in messages:
        message_size = message.ByteSize()
        if group and (size + message_size > limit or len(group) == max_count):
            yield group
            group, size = [], 0
        group.append(message)
        size += message_size
    if group:
        yield group


def _mask(data: bytes, count: int, sample_id: str, field: str) -> BoolArray:
    if len(data) != count:
        raise InvalidInput(f"sample {sample_id}: {field} has {len(data)} bytes; {count} tokens need {count}")
    if others := data.translate(None, b"\x00\x01"):
        raise InvalidInput(f"sample {sample_id}: {field} holds {others[0]}; each byte must be 0 or 1")
    return np.frombuffer(data, np.bool_)


def _check_behavior(behavior: Float32Array, action_mask: BoolArray, action_bytes: bytes, sample_id: str) -> None:
    """Check that values are at most 0 on sampled tokens and NaN elsewhere."""
    # Two passes over the array suffice for a valid sample; only an invalid one needs the search for the wrong value.
    at_most_zero = behavior <= 0  # False for NaN
    not_numbers = np.count_nonzero(behavior != behavior)
    if at_most_zero.tobytes() == action_bytes and not_numbers == len(behavior) - np.count_nonzero(at_most_zero):
        return
    wrong = behavior[action_mask & ~at_most_zero]
    if len(wrong):
        raise InvalidInput(
            f"sample {sample_id}: behavior_logprobs holds {wrong[0]} on a sampled token; it must be at most 0"
        )
    raise InvalidInput(f"sample {sample_id}: behavior_logprobs must be NaN on tokens that were not sampled")


def _check_sampling(message: pb.Experience, sample_id: str) -> None:
    if not 0 < message.temperature <= 2:
        raise InvalidInput(f"sample {sample_id}: temperature is {message.temperature}; it must be in (0, 2]")
    if message.HasField("top_p") and not 0 < message.top_p <= 1:
        raise InvalidInput(f"sample {sample_id}: top_p is {message.top_p}; it must be in (0, 1]")
    if message.top_k < 0:
        raise InvalidInput(f"sample {sample_id}: top_k is {message.top_k}; it must be at least 1, or unset")


def _check_segment(message: pb.Experience, sample_id: str) -> None:
    if message.trajectory_id:
        check_id(message.trajectory_id, f"sample {sample_id}: trajectory_id")
    index, count = message.segment_index, message.segment_count or 1
    if not 0 <= index < count:
        raise InvalidInput(
            f"sample {sample_id}: segment_index is {index} with segment_count = {count}; it must be in [0, {count})"
        )
    if count > 1 and not message.trajectory_id:
        raise InvalidInput(
            f"sample {sample_id}: segment_count is {count} without a trajectory_id; every segment names its trajectory"
        )


def _check_spans(spans: tuple[VersionSpan, ...], action_bytes: bytes, sample_id: str) -> None:
    if any(s.token_count < 1 or not -1 <= s.policy_version <= MAX_NUMBER for s in spans):
        raise InvalidInput(
            f"sample {sample_id}: version_spans must have token_count >= 1 and policy_version in [-1, 2^53]"
        )
    total = sum(s.token_count for s in spans)
    if total != len(action_bytes):
        raise InvalidInput(
            f"sample {sample_id}: version_spans cover {total} tokens; the sample has {len(action_bytes)}"
        )
    sampled = b"".join((b"\x01" if s.policy_version >= 0 else b"\x00") * s.token_count for s in spans)
    if sampled != action_bytes:
        raise InvalidInput(f"sample {sample_id}: version_spans must be -1 exactly where action_mask is 0")
