"""Connects pairs of processes by gloo. They meet at a key-value store in the sender's process, over TCP.

The store maps short names to short values; the first value of a name stays. Each member of a transfer keeps one
connection, which starts with the secret of the offer. The store compares the secret once, when it is complete, so that
the time of a refusal does not depend on the number of correct bytes. A request is a put, which has no reply, or a
question, which is answered when the name has a value: a member that asked for `FAULT` gets the first failure at once.
The connections end with the store's process.

torch's TCPStore cannot do this: it listens on every interface, and its calls block without a deadline.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import selectors
import socket
import struct
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Final

from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]

from fourfold.errors import PEER_LOST, Unavailable
from fourfold.weights.transport.waiting import Deadline, aborted

NONCE_BYTES: Final = 16
FAULT: Final = "fault"
POLL_SECONDS: Final = 0.02
# put or ask, bytes of the name, bytes of the value
_REQUEST: Final = struct.Struct("<?HH")
_REPLY: Final = struct.Struct("<H")
_LONGEST: Final = 4096
_MAX_MEMBERS: Final = 16_384
_CONNECT_SECONDS: Final = 10.0
# A connection without the secret is closed after this time; if there are too many, the oldest is closed.
_HANDSHAKE_SECONDS: Final = 2.0
_MAX_UNAUTHENTICATED: Final = 128


class KeyValueStore:
    """The store, served by a thread until `close`."""

    def __init__(self, address: str) -> None:
        """Listen on a free port of `address`, an IP address of this machine."""
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._values: dict[str, bytes] = {}
        self._visitors: dict[socket.socket, _Visitor] = {}
        self.unauthenticated: dict[_Visitor, float] = {}  # with the time at which each is closed, the oldest first
        self._selector = selectors.DefaultSelector()
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=1024)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._wake, self._woken = socket.socketpair()
        for readable in (self._listener, self._woken):
            self._selector.register(readable, selectors.EVENT_READ)
        self._last_words: tuple[str, bytes] | None = None
        self._thread = threading.Thread(target=self._serve, name="weights-store", daemon=True)
        self._thread.start()

    def close(self, name: str, value: bytes) -> None:
        """Put a last value and end all connections. Any number of times, from any thread."""
        self._last_words = self._last_words or (name, value)
        with suppress(OSError):  # closed before
            self._wake.send(b"x")
        self._thread.join(_CONNECT_SECONDS)

    def _serve(self) -> None:
        while self._last_words is None:
            for key, _ in self._selector.select(self._close_late()):
                if key.fileobj is self._listener:
                    self._admit()
                    continue
                visitor = self._visitors.get(key.fileobj)  # type: ignore[call-overload]
                if visitor is not None and not visitor.read(self):  # None: just closed, or the wake-up
                    self._leave(visitor)
        self.put(*self._last_words)
        for visitor in list(self._visitors.values()):
            self._leave(visitor)
        for end in (self._listener, self._wake, self._woken):
            end.close()
        self._selector.close()

    def _admit(self) -> None:
        with suppress(OSError):  # the peer has closed the connection already
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            if len(self._visitors) >= _MAX_MEMBERS:
                connection.close()
                return
            visitor = self._visitors[connection] = _Visitor(connection)
            self._selector.register(connection, selectors.EVENT_READ)
            self.unauthenticated[visitor] = time.monotonic() + _HANDSHAKE_SECONDS
            # Members send the secret at once, so the oldest connection without it belongs to no member.
            if len(self.unauthenticated) > _MAX_UNAUTHENTICATED:
                self._leave(next(iter(self.unauthenticated)))

    def _close_late(self) -> float | None:
        """Close connections whose secret is late; return the seconds until the next one is late; None: never."""
        for visitor, end in list(self.unauthenticated.items()):
            if (left := end - time.monotonic()) > 0:
                return left
            self._leave(visitor)
        return None

    def _leave(self, visitor: _Visitor) -> None:
        self._selector.unregister(visitor.connection)
        del self._visitors[visitor.connection]
        self.unauthenticated.pop(visitor, None)
        visitor.connection.close()

    def put(self, name: str, value: bytes) -> None:
        """Set a value unless the name has one, and reply to those who asked. In the store's thread."""
        self._values.setdefault(name, value)
        for visitor in list(self._visitors.values()):
            if name in visitor.asked:
                visitor.asked.discard(name)
                visitor.reply(self._values[name])

    def ask(self, visitor: _Visitor, name: str) -> None:
        if name in self._values:
            visitor.reply(self._values[name])
        else:
            visitor.asked.add(name)


class _Visitor:
    """A member's connection, at the store's end."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.asked = connection, set[str]()
        self._buffer = b""

    def read(self, store: KeyValueStore) -> bool:
        """Handle received bytes; return False at the end of the connection, or if it breaks the protocol."""
        try:
            data = self.connection.recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._buffer += data
        if self in store.unauthenticated:
            if len(self._buffer) < NONCE_BYTES:
                return bool(data)
            if not hmac.compare_digest(self._buffer[:NONCE_BYTES], store.nonce):
                return False
            self._buffer = self._buffer[NONCE_BYTES:]
            del store.unauthenticated[self]
        while len(self._buffer) >= _REQUEST.size:
            is_put, name_bytes, value_bytes = _REQUEST.unpack_from(self._buffer)
            end = _REQUEST.size + name_bytes + value_bytes
            if name_bytes + value_bytes > _LONGEST:
                return False
            if len(self._buffer) < end:
                break
            name = self._buffer[_REQUEST.size : _REQUEST.size + name_bytes].decode("ascii", "replace")
            value, self._buffer = self._buffer[_REQUEST.size + name_bytes : end], self._buffer[end:]
            if is_put:
                store.put(name, value)
            else:
                store.ask(self, name)
        return bool(data)

    def reply(self, value: bytes) -> None:
        # Replies are far smaller than a socket's buffer. A reply that does not fit, because its member reads none, is
        # dropped, and the member ends at its deadline.
        with suppress(OSError):
            self.connection.send(_REPLY.pack(len(value)) + value)


class StoreClient:
    """A member's connection to a store. Belongs to one thread."""

    def __init__(self, address: str, port: int, nonce: bytes, owner: str, deadline: Deadline) -> None:
        """Connect. Raises Unavailable: nothing listens there, or it cannot be reached."""
        self.owner, self._buffer = owner, b""
        try:
            left = min(deadline.check(f"a connection to {owner}"), _CONNECT_SECONDS)
            self._socket = socket.create_connection((address, port), timeout=left)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(nonce)
        except OSError as error:
            raise Unavailable(
                f"cannot connect to {owner} at {address} port {port} ({error}): it has ended or closed this epoch, or "
                f"the network between the machines refuses it; weights.interface names the network that weights use"
            ) from None

    def put(self, name: str, value: bytes) -> None:
        """Set a value, unless the name has one. A store that has ended is noticed by the next reply."""
        with suppress(OSError):
            self._request(True, name, value)

    def ask(self, name: str) -> None:
        """Ask for a value, to be read by `get` or `poll`. One question at a time."""
        with suppress(OSError):
            self._request(False, name, b"")

    def poll(self, seconds: float) -> bytes | None:
        """Return the value asked for, or None if there is none within `seconds`. Raises StoreGone: the store ended."""
        self._socket.settimeout(max(seconds, 1e-4))
        try:
            data = self._socket.recv(1 << 16)
        except TimeoutError:
            return None
        except OSError:
            data = b""
        if not data:
            raise StoreGone(f"{self.owner} has ended, or aborted this epoch", reason=PEER_LOST)
        self._buffer += data
        if len(self._buffer) < _REPLY.size:
            return None
        end = _REPLY.size + _REPLY.unpack_from(self._buffer)[0]
        if len(self._buffer) < end:
            return None
        value, self._buffer = self._buffer[_REPLY.size : end], self._buffer[end:]
        return value

    def get(self, name: str, abort: threading.Event, deadline: Deadline, what: str) -> bytes:
        """Return a value when there is one. Raises StaleEpoch, DeadlinePassed, StoreGone."""
        self.ask(name)
        while (value := self.poll(POLL_SECONDS)) is None:
            if abort.is_set():
                raise aborted()
            deadline.check(what)
        return value

    def close(self) -> None:
        self._socket.close()

    def _request(self, is_put: bool, name: str, value: bytes) -> None:
        key = name.encode()
        self._socket.settimeout(_CONNECT_SECONDS)
        self._socket.sendall(_REQUEST.pack(is_put, len(key), len(value)) + key + value)


class StoreGone(Unavailable):
    """The process of a store has ended."""


class _PairStore(Store):
    """The store in which gloo exchanges the addresses of one pair: one value of each end."""

    def __init__(
        self, store: StoreClient, name: str, rank: int, abort: threading.Event, deadline: Deadline, what: str
    ) -> None:
        super().__init__()
        self._store, self._name, self._rank = store, name, rank
        self._wait = (abort, deadline, what)
        self._values: dict[int, bytes] = {}  # by rank

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # gloo passes bytes
        self._values[self._rank] = value
        self._store.put(f"{self._name}/{self._rank}", value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def get(self, key: str) -> bytes:
        rank = int(key.rpartition("/")[2])  # gloo's keys end with the rank
        if rank not in self._values:
            self._values[rank] = self._store.get(f"{self._name}/{rank}", *self._wait)
        return self._values[rank]


def connect_pair(
    store: StoreClient, name: str, rank: int, address: str, abort: threading.Event, deadline: Deadline, what: str
) -> ProcessGroupGloo:
    """Return the gloo group of two processes, which is called `name` on the store; each end has a `rank`, 0 or 1.

    `address` is this machine's. Raises StaleEpoch, DeadlinePassed, StoreGone. Raises RuntimeError: gloo cannot connect.
    """
    # Meet first: gloo's constructor can be left only through its own timeout.
    store.put(f"{name}/here-{rank}", b"x")
    store.get(f"{name}/here-{1 - rank}", abort, deadline, what)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._threads = 1
    options._timeout = timedelta(seconds=min(deadline.check(what), _CONNECT_SECONDS))
    return ProcessGroupGloo(_PairStore(store, name, rank, abort, deadline, what), rank, 2, options)
