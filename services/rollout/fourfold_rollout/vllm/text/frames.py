"""Defines the messages between the service and its text workers: JSON objects, each after its length in bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO, Final

HEADER: Final = struct.Struct("<I")
MAX_FRAME_BYTES: Final = 16 << 20
"""A text of 1 MiB whose every character JSON escapes, twice."""


def pack(message: Mapping[str, Any]) -> bytes:
    """Return a message as a frame."""
    # Parsers may return unpaired surrogates, which UTF-8 cannot encode.
    body = json.dumps(message, ensure_ascii=False).encode(errors="replace")
    return HEADER.pack(len(body)) + body


def unpack(body: bytes) -> dict[str, Any]:
    """Parse the JSON text of a frame. Raises ValueError: the text is not a JSON object."""
    message = json.loads(body)
    if not isinstance(message, dict):
        raise ValueError(f"the frame holds a {type(message).__name__}; it must hold an object")
    return message


def size_of(header: bytes) -> int:
    """Return the number of bytes after a header. Raises ValueError: they are too many."""
    (size,) = HEADER.unpack(header)
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"the frame has {size} bytes; at most {MAX_FRAME_BYTES} are allowed")
    return int(size)


def read(stream: BinaryIO) -> dict[str, Any] | None:
    """Block until a message arrives; return None at the end of the stream. Raises ValueError: it is malformed."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    size = size_of(header)
    body = stream.read(size)
    return unpack(body) if len(body) == size else None
