"""Frames between scoring process and runner, and Python values as JSON.

A runner executes code of the policy and may send anything. `receive` limits size and time, and `decode` makes only
plain values and handles.
"""

from __future__ import annotations

import json
import math
import os
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, Final

_HEADER: Final = struct.Struct("<I")
_READY: Final = b"ready"
MAX_FRAME_BYTES: Final = 4 << 20
# Larger integers become texts, because json refuses those of more than 4,300 digits.
_LARGE: Final = 1 << 53
_CONTAINERS: Final[dict[type, str]] = {tuple: "t", set: "s", frozenset: "z"}


class WireError(Exception):
    """The other side closed the connection, was too slow, or sent what it must not send."""


class TooLargeError(WireError):
    """A message has more bytes than a frame may have."""


def report_ready(descriptor: int) -> None:
    """Tell the scoring process that the runner is in its sandbox, and begins with the code."""
    os.write(descriptor, _READY)


def wait_until_ready(connection: socket.socket, *, deadline: float) -> None:
    """Wait for the runner. Raises WireError: it ended, or was too slow."""
    if _read(connection, len(_READY), deadline) != _READY:
        raise WireError("the runner sent something else before the code ran")


def send(connection: socket.socket, message: dict[str, Any], *, deadline: float | None = None) -> None:
    """Send one message; `deadline` is a time of time.monotonic(). Raises WireError."""
    body = json.dumps(message).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise TooLargeError(f"a value has {len(body)} bytes; at most {MAX_FRAME_BYTES} are passed on")
    try:
        _limit(connection, deadline)
        connection.sendall(_HEADER.pack(len(body)) + body)
    except OSError as error:
        raise WireError(f"the code ended ({type(error).__name__})") from None


def receive(connection: socket.socket, *, deadline: float | None = None) -> dict[str, Any]:
    """Return the next message. Raises WireError."""
    (size,) = _HEADER.unpack(_read(connection, _HEADER.size, deadline))
    if size > MAX_FRAME_BYTES:
        raise WireError(f"a value has {size} bytes; at most {MAX_FRAME_BYTES} are passed on")
    try:
        message = json.loads(_read(connection, size, deadline))
    except (ValueError, RecursionError):
        raise WireError("the code sent no JSON") from None
    if not isinstance(message, dict):
        raise WireError("the code sent no object")
    return message


def _read(connection: socket.socket, count: int, deadline: float | None) -> bytes:
    parts, left = list[bytes](), count
    while left:
        try:
            _limit(connection, deadline)
            part = connection.recv(min(left, 1 << 16))
        except OSError as error:
            raise WireError(f"the code gave no answer ({type(error).__name__})") from None
        if not part:
            raise WireError("the code ended its process")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _limit(connection: socket.socket, deadline: float | None) -> None:
    if deadline is not None:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))


def encode(value: Any, handle: Callable[[Any], int]) -> Any:
    """Return a value as JSON; `handle` returns the number of an object that is no plain value, or raises."""
    match value:
        case None | bool() | str():
            return value if value is None or isinstance(value, bool) else str.__str__(value)
        case int():
            return int(value) if -_LARGE < value < _LARGE else {"i": hex(value)}
        case float():
            return float(value) if math.isfinite(value) else {"f": repr(float(value))}
        case complex():
            return {"c": [encode(value.real, handle), encode(value.imag, handle)]}
        case bytes() | bytearray():
            return {"b": value.hex()}
        case list():
            return [encode(entry, handle) for entry in value]
        case tuple() | set() | frozenset():
            kind = next(name for known, name in _CONTAINERS.items() if isinstance(value, known))
            return {kind: [encode(entry, handle) for entry in value]}
        case dict():
            return {"d": [[encode(k, handle), encode(v, handle)] for k, v in value.items()]}
    return {"o": handle(value)}


def decode(data: Any, handle: Callable[[int], Any]) -> Any:
    """Return the value of `encode`; `handle` returns the object of a number. Raises WireError."""
    try:
        return _decode(data, handle)
    except (ValueError, TypeError, RecursionError, OverflowError):
        raise WireError("the code sent a malformed value") from None


def _decode(data: Any, handle: Callable[[int], Any]) -> Any:
    if isinstance(data, list):
        return [_decode(entry, handle) for entry in data]
    if not isinstance(data, dict):
        return data
    ((kind, body),) = data.items()
    match kind:
        case "i":
            return int(body, 16)
        case "f":
            return float(body)
        case "c":
            return complex(*(_decode(part, handle) for part in body))
        case "b":
            return bytes.fromhex(body)
        case "d":
            return {_decode(k, handle): _decode(v, handle) for k, v in body}
        case "o" if isinstance(body, int):
            return handle(body)
    kinds = {name: known for known, name in _CONTAINERS.items()}
    if kind not in kinds:
        raise ValueError(kind)
    return kinds[kind](_decode(entry, handle) for entry in body)
