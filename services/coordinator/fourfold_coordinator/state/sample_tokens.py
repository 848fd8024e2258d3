"""Formats tokens.jsonl: the tokens of each line of samples.jsonl, for `fourfold view`.

    {"step": 3, "sample_id": "p0000031-0-4", "tokens": "BASE64"}

`tokens` is base64 of a zlib stream of little-endian arrays, one after another:

    segments  uint32 [1]
    lengths   uint32 [segments]   tokens of each segment, prompts and observations included
    ids       uint32 [n]          of all segments, as 4 planes: all lowest bytes first, then the second ones ...
    logprobs  float16 [n]         of the sampled tokens, in nats; NaN for others; as 2 planes of bytes

float16 has 3 digits: enough to show a value, not to measure a mismatch between engine and trainer. Planes of bytes are
smaller when compressed: the high bytes of ids are mostly zeros. A token takes about 4.9 bytes. The lines are appended
before those of samples.jsonl, and a restore removes those after its checkpoint. A trajectory may have two equal lines.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from fourfold.arrays import Float32Array, Int32Array

from .samples import Trajectory
from .typed_json import Whole, parse

TOKENS_FILE: Final = "tokens.jsonl"
_LEVEL: Final = 1  # of zlib; level 6 takes 4 times as long for 5 % fewer bytes
_MAX_BYTES: Final = 1 << 28  # of the arrays of one trajectory, against a damaged file


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSegment:
    """The tokens of one segment."""

    token_ids: Int32Array  # [n], prompt included
    logprobs: Float32Array  # [n] nats; NaN for tokens that the model did not sample


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLine:
    """A line of tokens.jsonl."""

    step: Whole
    sample_id: str
    tokens: str


_LINE: Final = TypeAdapter(TokenLine)


def to_token_lines(step: int, trajectories: Iterable[Trajectory]) -> bytearray:
    """Return the lines of tokens.jsonl for one step. Slow for a large batch: call it in a thread."""
    lines = bytearray()
    for trajectory in trajectories:
        segments = [
            TokenSegment(
                token_ids=s.token_ids, logprobs=np.where(s.action_mask, s.behavior_logprobs, np.float32(np.nan))
            )
            for s in trajectory.segments
        ]
        name = json.dumps(trajectory.sample.sample_id, ensure_ascii=False).encode()
        lines += b'{"step": %d, "sample_id": %b, "tokens": "%b"}\n' % (step, name, encode_tokens(segments))
    return lines


def parse_token_line(line: bytes) -> TokenLine:
    """Return a line of tokens.jsonl; raise ValueError for a text that is none."""
    return parse(_LINE, line)


def encode_tokens(segments: Iterable[TokenSegment]) -> bytes:
    """Return the value of `tokens`."""
    found = list(segments)
    lengths = np.array([len(found), *(len(s.token_ids) for s in found)], "<u4")
    ids = np.concatenate([s.token_ids for s in found]).astype("<u4")
    with np.errstate(over="ignore"):  # below -65504 nats is -inf
        logprobs = np.concatenate([s.logprobs for s in found]).astype("<f2")
    data = lengths.tobytes() + _planes(ids).tobytes() + _planes(logprobs).tobytes()
    return base64.b64encode(zlib.compress(data, _LEVEL))


def decode_tokens(text: str) -> list[TokenSegment]:
    """Return the segments of a value of `tokens`; raise ValueError when it is damaged."""
    try:
        stream = zlib.decompressobj()
        data = stream.decompress(base64.b64decode(text, validate=True), _MAX_BYTES)
        if not stream.eof:
            raise ValueError("incomplete")
        count = int(np.frombuffer(data, "<u4", 1)[0])
        lengths = np.frombuffer(data, "<u4", count, 4)
        if not count or not lengths.all():
            raise ValueError("a segment without tokens")
        begin, size = 4 * (1 + count), int(lengths.sum(dtype=np.int64))
        ids = _values(np.frombuffer(data, np.uint8, 4 * size, begin), "<u4").astype(np.int32)
        logprobs = _values(np.frombuffer(data, np.uint8, 2 * size, begin + 4 * size), "<f2").astype(np.float32)
        if ids.min() < 0:
            raise ValueError("a token id of 2^31 or more")
    except (ValueError, zlib.error) as error:
        raise ValueError(f"damaged tokens: {error}") from None
    ends = np.cumsum(lengths)[:-1]
    pairs = zip(np.split(ids, ends), np.split(logprobs, ends), strict=True)
    return [TokenSegment(token_ids=i, logprobs=p) for i, p in pairs]


def _planes(values: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(values.view(np.uint8).reshape(len(values), -1).T)


def _values(planes: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.generic]:
    return np.ascontiguousarray(planes.reshape(np.dtype(dtype).itemsize, -1).T).view(dtype).reshape(-1)
