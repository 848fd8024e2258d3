"""Converts between `Sample` (numpy arrays) and `Experience` (its protobuf message), and checks received messages.

`decode` checks every length and range before any code uses the data, and its errors name the wrong sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fourfold.arrays import EMPTY_FLOATS, BoolArray, Int32Array
from fourfold.bounds import MAX_NUMBER, MAX_TEACHER_TOKENS
from fourfold.errors import InvalidInput
from fourfold.rpc.codec import Buffer, check_id, field_head, pack_ints, read_floats, read_ints, unpack_floats
from fourfold.sample.sample import Sample, ScoreTerm, VersionSpan
from fourfold.sample.token_columns import ACTION_MASK, COLUMNS, LOSS_MASK, TOKEN_IDS, TokenColumn
from fourfold.types.v1 import experience_pb2 as pb

MAX_TERMS: Final = 64  # of one score
_TEACHER: Final = {
    "teacher_ids": pb.Experience.TEACHER_IDS_FIELD_NUMBER,
    "teacher_logprobs": pb.Experience.TEACHER_LOGPROBS_FIELD_NUMBER,
}


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
    for column in COLUMNS:
        array = getattr(sample, column.name)
        if len(array) and not (column is LOSS_MASK and _is_action_mask(sample)):
            data = column.pack(array)
            parts += (field_head(column.number, len(data)), data)
    for name, number in _TEACHER.items():
        if len(array := getattr(sample, name)):
            data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data
            parts += (field_head(number, len(data)), data)
    return parts


def _is_action_mask(sample: Sample) -> bool:
    return sample.loss_mask is sample.action_mask or np.array_equal(sample.loss_mask, sample.action_mask)


@lru_cache(maxsize=1 << 14)  # as `field_head`: a message of each span would take a fifth of the time of a sample
def _encode_span(span: VersionSpan) -> bytes:
    message = pb.VersionSpan(policy_version=span.policy_version, token_count=span.token_count)
    return pb.Experience(version_spans=[message]).SerializeToString()


def decode(message: pb.Experience, *, vocabulary_size: int, max_tokens: int) -> Sample:
    """Unpack and check one message; InvalidInput names the sample, the field, the value and the rule."""
    sample_id = check_id(message.sample_id, "sample_id")
    check_id(message.group_id, f"sample {sample_id}: group_id")
    token_ids = decode_token_ids(message, vocabulary_size=vocabulary_size, max_tokens=max_tokens)
    action_mask = _column(message, ACTION_MASK, len(token_ids), None)
    found: dict[str, Any] = {TOKEN_IDS.name: token_ids, ACTION_MASK.name: action_mask}
    for column in COLUMNS:
        if column.name not in found:
            found[column.name] = _column(message, column, len(token_ids), action_mask)
    _check_sampling(message, sample_id)
    spans = tuple(
        VersionSpan(policy_version=s.policy_version, token_count=s.token_count) for s in message.version_spans
    )
    _check_engine(spans, message)
    if message.end_reason not in (pb.END_REASON_TERMINATED, pb.END_REASON_TRUNCATED):
        raise InvalidInput(
            f"sample {sample_id}: end_reason is {message.end_reason}; it must be TERMINATED or TRUNCATED"
        )
    _check_segment(message, sample_id)
    if message.teacher_ids or message.teacher_logprobs:
        found |= _teacher(message, len(token_ids), vocabulary_size)
    return Sample(
        sample_id=sample_id,
        group_id=message.group_id,
        version_spans=spans,
        temperature=message.temperature,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        top_k=message.top_k,
        truncated=message.end_reason == pb.END_REASON_TRUNCATED,
        score=_score(message, "score"),
        scorer=message.scorer,
        baseline_score=_score(message, "baseline_score"),
        trajectory_id=message.trajectory_id,
        segment_index=message.segment_index,
        segment_count=message.segment_count or 1,
        terms=_terms(message),
        shadow_score=_score(message, "shadow_score"),
        **found,
    )


def _column(message: pb.Experience, column: TokenColumn, count: int, action_mask: BoolArray | None) -> NDArray[Any]:
    """Unpack and check a column of `count` tokens, [0] if it is absent; `action_mask` is None for itself."""
    data: bytes = getattr(message, column.name)
    if not data and not column.required:
        return action_mask if column is LOSS_MASK and action_mask is not None else EMPTY_FLOATS
    if column.dtype == np.bool_:
        values: NDArray[Any] = _mask(data, count, message.sample_id, column.name)
    elif column.dtype == np.float32:
        values = unpack_floats(data, count, message.sample_id, column.name)
    elif len(data) != (size := column.dtype.itemsize * count):
        raise InvalidInput(
            f"sample {message.sample_id}: {column.name} has {len(data)} bytes; {count} tokens need {size}"
        )
    else:
        values = column.read(data)
    fault = column.rule(values, values if action_mask is None else action_mask) if column.rule else ""
    if fault:
        raise InvalidInput(f"sample {message.sample_id}: {fault}")
    return values


def _teacher(message: pb.Experience, count: int, vocabulary_size: int) -> dict[str, NDArray[Any]]:
    """Return the likely tokens of a teacher in place of `count` tokens: ids and log-probabilities, [count, k]."""
    data, where = (message.teacher_ids, message.teacher_logprobs), f"sample {message.sample_id}"
    width, rest = divmod(len(data[0]), 4 * count)
    if rest or not 1 <= width <= MAX_TEACHER_TOKENS or len(data[1]) != len(data[0]):
        raise InvalidInput(
            f"{where}: teacher_ids has {len(data[0])} bytes and teacher_logprobs {len(data[1])}; {count} tokens need "
            f"{4 * count} for each likely token, of which there are 1 to {MAX_TEACHER_TOKENS}"
        )
    ids, logprobs = read_ints(data[0]).reshape(count, width), read_floats(data[1]).reshape(count, width)
    if int(ids.view(np.uint32).max()) >= vocabulary_size:
        raise InvalidInput(f"{where}: teacher_ids has an id outside of the vocabulary [0, {vocabulary_size})")
    ordered = np.sort(ids[1:], axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        raise InvalidInput(f"{where}: teacher_ids has an id twice at one position; they must be different")
    if not (np.isfinite(logprobs[1:]) & (logprobs[1:] <= 0)).all():
        raise InvalidInput(f"{where}: teacher_logprobs must be finite and at most 0 after the first token")
    return {"teacher_ids": ids, "teacher_logprobs": logprobs}


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


def from_samples(samples: Iterable[Sample]) -> Iterator[pb.Experience]:
    """Yield the fields of samples that a forward pass needs."""
    for sample in samples:
        yield pb.Experience(
            sample_id=sample.sample_id, token_ids=pack_ints(sample.token_ids), temperature=sample.temperature
        )


def from_token_ids(token_ids: Iterable[ArrayLike], temperature: float) -> Iterator[pb.Experience]:
    """Yield samples of bare tokens, int [n] each, named by their index."""
    for index, ids in enumerate(token_ids):
        yield pb.Experience(
            sample_id=str(index), token_ids=pack_ints(np.asarray(ids, np.int32)), temperature=temperature
        )


def _mask(data: bytes, count: int, sample_id: str, field: str) -> BoolArray:
    if len(data) != count:
        raise InvalidInput(f"sample {sample_id}: {field} has {len(data)} bytes; {count} tokens need {count}")
    if others := data.translate(None, b"\x00\x01"):
        raise InvalidInput(f"sample {sample_id}: {field} holds {others[0]}; each byte must be 0 or 1")
    return np.frombuffer(data, np.bool_)


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


def _check_engine(spans: tuple[VersionSpan, ...], message: pb.Experience) -> None:
    """Check the versions of the engine that sampled the tokens; without one, there are no log-probabilities either.

    One of the two alone is a mistake of the sender: the sample would have no correction, or no limit of its age.
    """
    if bool(message.behavior_logprobs) != bool(spans):
        names = ("behavior_logprobs", "version_spans")
        there, empty = names if message.behavior_logprobs else reversed(names)
        raise InvalidInput(
            f"sample {message.sample_id} has {there} and no {empty}; send both, or neither if no engine sampled its "
            f"tokens"
        )
    if spans:
        _check_spans(spans, message.action_mask, message.sample_id)


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
