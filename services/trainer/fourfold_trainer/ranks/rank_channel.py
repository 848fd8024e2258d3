"""Sends messages between rank 0 and the other ranks over a private Unix socket.

    u32 header bytes | u64 body bytes | header: name and small fields as JSON | body: arrays as raw bytes

There is no pickle, although both ends belong to one user on one machine (service/rank_rendezvous.py relays
the bytes of ranks on other machines).
"""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from fourfold.errors import DeadlinePassed, Unavailable
from fourfold_trainer.batches import Array, Batches

BATCH: Final = "batch"
_SIZES: Final = struct.Struct("<IQ")
_MAX_HEADER: Final = 1 << 28
# The other end has a thread that only reads; if it reads nothing for this time, the process has stopped.
_SEND_SECONDS: Final = 60
_DTYPES: Final = frozenset({"<i4", "<i8", "<f4", "<f8", "|u1"})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankMessage:
    """A command or its answer."""

    name: str
    fields: dict[str, Any] = field(default_factory=dict)  # JSON values
    arrays: Sequence[Array] = ()
    sequence: int = 0  # number of the command, which its answer repeats: a late answer is recognised and dropped
    batch_count: int = 0  # messages named BATCH that follow a command, each with the arrays of one micro-batch
    batches: Batches[Sequence[Array]] = ()  # micro-batches of a running command; `send` leaves them out


def from_bytes(data: bytes) -> Array:
    """Return bytes as a uint8 array, for a message."""
    return np.frombuffer(data, np.uint8)


class RankChannel:
    """One end of the connection. Several threads may call `send`, one thread `receive`."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setblocking(True)
        # Set the timeout in the kernel: one of the socket object would apply to both directions.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_SECONDS, 0))
        self._sending = threading.Lock()

    def send(self, message: RankMessage) -> None:
        """Send one message. Raises Unavailable if the other end is gone or does not read."""
        arrays = [np.ascontiguousarray(array) for array in message.arrays]
        layout = [[array.dtype.str, array.shape] for array in arrays]
        header = json.dumps([message.name, message.sequence, message.batch_count, message.fields, layout]).encode()
        sizes = _SIZES.pack(len(header), sum(a.nbytes for a in arrays))
        with self._sending:
            try:
                self._socket.sendall(sizes + header)
                for array in arrays:
                    self._socket.sendall(array.reshape(-1).view(np.uint8).data)
            except BlockingIOError:
                raise Unavailable(f"the other end did not take {message.name} within {_SEND_SECONDS} s") from None
            except OSError as error:
                raise Unavailable(f"the rank channel broke while sending {message.name}: {error.strerror}") from None

    def receive(self, *, timeout: float | None = None) -> RankMessage:
        """Return the next message.

        Raises:
            DeadlinePassed: no message began within `timeout` seconds.
            Unavailable: the other end is gone, or stopped in the middle of a message.
        """
        end = None if timeout is None else time.monotonic() + timeout
        if end is not None and not self._readable(timeout or 0.0):
            raise DeadlinePassed("the other end of the rank channel did not answer in time")
        header_size, body_size = _SIZES.unpack(self._read(_SIZES.size, end))
        if header_size > _MAX_HEADER:
            raise Unavailable(f"the rank channel carries no message: a header of {header_size} bytes")
        name, sequence, batch_count, fields, layout = json.loads(self._read(header_size, end))
        body = memoryview(self._read(body_size, end))
        arrays, offset = [], 0
        for dtype, shape in layout:
            if dtype not in _DTYPES:
                raise Unavailable(f"the rank channel carries an array of {dtype}; known are {sorted(_DTYPES)}")
            count = int(np.prod(shape, dtype=np.int64))
            array = np.frombuffer(body, dtype, count, offset).reshape(shape)
            offset += array.nbytes
            arrays.append(array)
        return RankMessage(name=name, fields=fields, arrays=arrays, sequence=sequence, batch_count=batch_count)

    def close(self) -> None:
        """Close this end; the other one reads the end of the stream."""
        self._socket.close()

    def _read(self, count: int, end: float | None) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            if end is not None and not self._readable(end - time.monotonic()):
                raise Unavailable("the other end of the rank channel stopped in the middle of a message")
            try:
                size = self._socket.recv_into(view)
            except OSError as error:
                raise Unavailable(f"the rank channel broke: {error.strerror}") from None
            if not size:
                raise Unavailable("the other end of the rank channel is gone")
            view = view[size:]
        return data

    def _readable(self, timeout: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(max(timeout, 0.0) * 1000))
