"""What crosses the pipes between the service and a worker: a length, then a JSON object."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO, Final

HEADER: Final = struct.Struct("<I")
# A request carries one sample of at most 8 MiB, in which JSON may write six bytes for one; a reply is a few KiB.
MAX_REPLY_BYTES: Final = 1 << 20


def pack(message: Mapping[str, Any]) -> bytes:
    """Return the frame of a message."""
    body = json.dumps(message, ensure_ascii=False).encode(errors="replace")  # texts may hold half a surrogate pair
    return HEADER.pack(len(body)) + body


def unpack(body: bytes) -> dict[str, Any]:
    """Return the message of a frame's body.

    Raises:
        ValueError: the body is no JSON object.
    """
    try:
        message = json.loads(body)
    except RecursionError:
        raise ValueError("a frame that is nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError(f"a frame holds a {type(message).__name__}; it must hold an object")
    return message


def read(stream: BinaryIO, *, most: int | None = None) -> dict[str, Any] | None:
    """Block for the next message; None when the other side is gone.

    Args:
        stream: what the other side writes to.
        most: largest size that is read; None when the other side is trusted.

    Raises:
        ValueError: it is larger, or no JSON object.
    """
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    if most is not None and size > most:
        raise ValueError(f"a frame of {size} bytes; at most {most} fit")
    body = stream.read(size)
    return unpack(body) if len(body) == size else None


def write(stream: BinaryIO, message: Mapping[str, Any]) -> None:
    """Send a message."""
    stream.write(pack(message))
    stream.flush()
