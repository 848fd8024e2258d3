"""A minimal HTTP/2 client that can leave calls unfinished; gRPC's own clients cannot."""

from __future__ import annotations

import select
import socket
import ssl
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_INITIAL_WINDOW_SIZE: Final = 4
_FRAME_BYTES: Final = 16384


class RawConnection:
    """An HTTP/2 connection that respects the server's flow control."""

    def __init__(self, target: str, authority: Path | None = None) -> None:
        """Connect, and exchange the TLS and HTTP/2 handshakes.

        Args:
            target: host:port.
            authority: the CA's certificate; None: no TLS.
        """
        host, _, port = target.rpartition(":")
        self._socket: socket.socket = socket.create_connection((host, int(port)), timeout=10)
        if authority is not None:
            context = ssl.create_default_context(cafile=str(authority))
            context.set_alpn_protocols(["h2"])
            self._socket = context.wrap_socket(self._socket, server_hostname=host)
        self._window = 65535
        self._initial_window = 65535
        self._windows: dict[int, int] = {}
        self.ended: set[int] = set()
        """Streams that the server has ended."""
        self.closed = False
        """True if the server has closed the connection."""
        self._received = b""
        self._next = 1
        self._socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, b""))
        self._socket.setblocking(False)

    def open(self, path: str, headers: Mapping[str, str]) -> int:
        """Begin a call; return its stream id."""
        stream, self._next = self._next, self._next + 2
        fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "localhost", "te": "trailers"}
        fields |= {"content-type": "application/grpc", **headers}
        block = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())
        self._windows[stream] = self._initial_window
        self._send(_frame(_HEADERS, _END_HEADERS, stream, block))
        return stream

    def send(self, stream: int, data: memoryview) -> int:
        """Send as much as the flow-control windows allow; return the number of bytes."""
        count = min(self._window, self._windows[stream], len(data), _FRAME_BYTES)
        if count <= 0 or self.closed or stream in self.ended:
            return 0
        self._window -= count
        self._windows[stream] -= count
        self._send(_frame(_DATA, 0, stream, bytes(data[:count])))
        return count

    def receive(self, seconds: float = 0.0) -> None:
        """Process the server's frames; wait at most `seconds` for the first one."""
        if self.closed or not (_pending(self._socket) or select.select([self._socket], [], [], seconds)[0]):
            return
        try:
            while data := self._socket.recv(1 << 16):
                self._received += data
            self.closed = True
        except (BlockingIOError, ssl.SSLWantReadError):
            pass
        except OSError:
            self.closed = True
        while len(self._received) >= 9:
            length = int.from_bytes(self._received[:3], "big")
            if len(self._received) < 9 + length:
                return
            kind, flags = self._received[3], self._received[4]
            stream = int.from_bytes(self._received[5:9], "big") & 0x7FFFFFFF
            payload, self._received = self._received[9 : 9 + length], self._received[9 + length :]
            self._take(kind, flags, stream, payload)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _WINDOW_UPDATE:
            increment = int.from_bytes(payload, "big")
            if stream:
                self._windows[stream] += increment
            else:
                self._window += increment
        elif kind == _SETTINGS and not flags & _ACK:
            for key, value in struct.iter_unpack(">HI", payload):
                if key == _INITIAL_WINDOW_SIZE:
                    for number in self._windows:
                        self._windows[number] += value - self._initial_window
                    self._initial_window = value
            self._send(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self._send(_frame(_PING, _ACK, 0, payload))
        elif kind == _RST or (kind in (_HEADERS, _DATA) and flags & _END_STREAM):
            self.ended.add(stream)

    def _send(self, data: bytes) -> None:
        view = memoryview(data)
        deadline = time.monotonic() + 10
        while view and not self.closed:
            try:
                view = view[self._socket.send(view) :]
            except (BlockingIOError, ssl.SSLWantWriteError):
                assert time.monotonic() < deadline, "the server takes nothing"
                select.select([], [self._socket], [], 1)
            except OSError:
                self.closed = True


def leave_unfinished(
    connection: RawConnection, path: str, *, calls: int, size: int, headers: Mapping[str, str], seconds: float = 20.0
) -> int:
    """Begin calls whose message lacks its last byte; return the number of bytes that the server accepted.

    Args:
        connection: the connection.
        path: full name of the method.
        calls: number of calls.
        size: bytes of each message, according to its prefix.
        headers: metadata of each call.
        seconds: time limit; the attack also ends after a second without progress.
    """
    message = memoryview(b"\0" + size.to_bytes(4, "big") + bytes(size - 1))
    connection.receive(1.0)  # the server's settings
    sent = {connection.open(path, headers): 0 for _ in range(calls)}
    end = time.monotonic() + seconds
    moved = time.monotonic()
    while time.monotonic() < min(end, moved + 1.0) and not connection.closed:
        for stream, count in sent.items():
            if new := connection.send(stream, message[count:]):
                sent[stream] += new
                moved = time.monotonic()
        connection.receive(0.01)
        if all(stream in connection.ended or count == len(message) for stream, count in sent.items()):
            break
    return sum(sent.values())


def _pending(connection: socket.socket) -> bool:
    return isinstance(connection, ssl.SSLSocket) and connection.pending() > 0


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _text(value: str) -> bytes:
    assert len(value) < 127
    return bytes((len(value),)) + value.encode()
