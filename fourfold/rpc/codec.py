"""Encodes arrays, fields and streams of messages, and checks ids."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final, TypeAlias, TypeVar

import numpy as np
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from fourfold.arrays import Float32Array, Int32Array
from fourfold.errors import InvalidInput

AnyMessage = TypeVar("AnyMessage", bound=Message)
Buffer: TypeAlias = bytes | memoryview  # of bytes

ID_PATTERN: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
# Size of one message of a stream. The limit is 16 MiB; 1 MiB was the fastest size in measurements.
CHUNK_BYTES: Final = 1 << 20
_INT32: Final = np.dtype("<i4")
_FLOAT32: Final = np.dtype("<f4")


def duration(seconds: float) -> Duration:
    """Return a duration of so many seconds, at least 1 ns: the contract wants times above 0."""
    value = Duration()
    value.FromNanoseconds(max(int(seconds * 1e9), 1))
    return value


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
        start = field_head(number, item_size)
        if count and size + len(start) + item_size > limit:
            yield b"".join(parts)
            parts, size, count = [first], len(first), 0
        parts += (start, *item)
        size, count = size + len(start) + item_size, count + 1
    yield b"".join(parts)


@lru_cache(maxsize=1 << 14)  # the samples of a run have thousands of lengths
def field_head(number: int, size: int) -> bytes:
    """Return what precedes a field of `size` bytes: its number, wire type and size, as variable-length integers."""
    data = bytearray()
    for value in (number << 3 | 2, size):  # wire type 2: length-delimited
        while value > 0x7F:
            data.append(value & 0x7F | 0x80)
            value >>= 7
        data.append(value)
    return bytes(data)


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
