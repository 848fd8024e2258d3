"""Closes a connection whose client still sends, so that the client can read the last answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

_SECONDS: Final = 1.0
_MAX_LINGERING: Final = 256


class Lingering:
    """Limits the connections of a server that wait for their clients to close; further ones close at once."""

    def __init__(self) -> None:
        self._count = 0

    def enter(self) -> bool:
        """Count one connection; False when there are too many."""
        if self._count >= _MAX_LINGERING:
            return False
        self._count += 1
        return True

    def leave(self) -> None:
        """Stop counting a connection."""
        self._count -= 1


class LingeringTransport(asyncio.Transport):
    """A transport whose `close` first waits until the client has closed its side, at most for a second.

    A kernel resets a connection that is closed while the client sends, and the client may then lose the answer that it
    has not read. So `close` sends the end of the stream and reads the client's bytes until the client closes. Protocols
    must ignore bytes that come while `is_closing()`. With TLS, which has no half-closed streams, the client sees the
    end later.
    """

    def __init__(self, inner: asyncio.Transport, lingering: Lingering, client_is_done: Callable[[], bool]) -> None:
        """Wrap a transport; `close` does not wait for a client that has sent all of its request."""
        super().__init__()
        self._inner, self._lingering, self._client_is_done = inner, lingering, client_is_done
        self._timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Close after the buffered bytes, and after the client's end."""
        if self.is_closing():
            return
        if self._client_is_done() or not self._lingering.enter():
            self._inner.close()
            return
        self._timer = asyncio.get_running_loop().call_later(_SECONDS, self._inner.close)
        self._inner.resume_reading()
        if self._inner.can_write_eof():
            self._inner.write_eof()

    def lost(self) -> None:
        """Note that the connection has ended and its protocol knows it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._lingering.leave()

    def is_closing(self) -> bool:
        return self._timer is not None or self._inner.is_closing()

    def abort(self) -> None:
        self._inner.abort()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._timer is None:
            self._inner.write(data)

    def pause_reading(self) -> None:
        if not self.is_closing():
            self._inner.pause_reading()

    def resume_reading(self) -> None:
        if not self.is_closing():
            self._inner.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._inner.get_extra_info(name, default)
