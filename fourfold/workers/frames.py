"""Defines the messages between a service and its children: JSON objects, each after its length in bytes.

A program of a user or a model can write any bytes into the pipe of its process. The service therefore reads JSON, never
pickle, and limits the size of a message. `Lines` is for programs that do not know this package.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, Protocol

HEADER: Final = struct.Struct("<I")  # bytes of JSON text that follow


class Messages(Protocol):
    """Finds the messages in a stream of bytes."""

    @property
    def max_bytes(self) -> int:
        """Most bytes of one message."""

    def split(self, data: bytearray) -> list[bytes]:
        """Remove the complete messages from `data` and return them. Raises ValueError: the first one is too long."""


@dataclass(frozen=True, slots=True)
class Frames:
    """Messages of `pack`, without their headers."""

    max_bytes: int

    def split(self, data: bytearray) -> list[bytes]:
        """See `Messages`."""
        found: list[bytes] = []
        at, end = 0, len(data)
        while end - at >= HEADER.size:
            (size,) = HEADER.unpack_from(data, at)
            if size > self.max_bytes and not found:  # after the frames before it
                raise ValueError(f"it announced {size} bytes; at most {self.max_bytes} are allowed")
            if end - at < HEADER.size + size:
                break
            found.append(bytes(data[at + HEADER.size : at + HEADER.size + size]))
            at += HEADER.size + size
        del data[:at]
        return found


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines of text, with their ends."""

    max_bytes: int

    def split(self, data: bytearray) -> list[bytes]:
        """See `Messages`."""
        found: list[bytes] = []
        while (size := data.find(b"\n") + 1) or len(data) > self.max_bytes:
            if size > self.max_bytes or not size:
                if found:  # after the lines before it
                    break
                raise ValueError(f"a line of over {self.max_bytes} bytes")
            found.append(bytes(data[:size]))
            del data[:size]
        return found


def pack(message: Mapping[str, Any]) -> bytes:
    """Return a message as a frame."""
    # Texts can contain unpaired surrogates, which UTF-8 cannot encode.
    body = json.dumps(message, ensure_ascii=False).encode(errors="replace")
    return HEADER.pack(len(body)) + body


def unpack(body: bytes) -> dict[str, Any]:
    """Parse the JSON text of a frame. Raises ValueError: the text is not a JSON object."""
    try:
        message = json.loads(body)
    except RecursionError:
        raise ValueError("the JSON text is nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError(f"the JSON text is a {type(message).__name__}; it must be an object")
    return message


def read(stream: BinaryIO, *, max_bytes: int | None = None) -> dict[str, Any] | None:
    """Block until a message arrives; return None at the end of the stream.

    Raises ValueError: the text is longer than `max_bytes`, or not a JSON object.
    """
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    size = _size(header, max_bytes)
    body = stream.read(size)
    return unpack(body) if len(body) == size else None


async def receive(stream: asyncio.StreamReader, *, max_bytes: int | None = None) -> dict[str, Any]:
    """Wait for a message. Raises ValueError, as `read`, and asyncio.IncompleteReadError at the end of the stream."""
    size = _size(await stream.readexactly(HEADER.size), max_bytes)
    return unpack(await stream.readexactly(size))


def _size(header: bytes, max_bytes: int | None) -> int:
    (size,) = HEADER.unpack(header)
    if max_bytes is not None and size > max_bytes:
        raise ValueError(f"the frame has {size} bytes; at most {max_bytes} are allowed")
    return int(size)
