"""Limits the connections of each address on a public port.

gRPC limits the connections of a port but not of an address, so one host without a token could hold all of them. gRPC
gives no access to its sockets. This module finds them among the file descriptors of the process, and shuts down the
newest ones of an address that has too many. gRPC treats that as a client that disconnected.
"""

from __future__ import annotations

import logging
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final

from fourfold.host.clock import SYSTEM_CLOCK, Clock

log = logging.getLogger("fourfold.rpc.server")

MAX_PER_ADDRESS: Final = 128
PERIOD_SECONDS: Final = 1.0
_DESCRIPTORS: Final = Path("/proc/self/fd")

_Peer = tuple[str, int]


class ConnectionLimit:
    """Limits the connections to one port of this process."""

    def __init__(self, port: int, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._port = port
        self._clock = clock
        self._first_seen: dict[_Peer, int] = {}  # the round in which a connection appeared
        self._round = 0

    async def run(self) -> None:
        """Enforce the limit every second until cancelled."""
        while True:
            await self._clock.sleep(PERIOD_SECONDS)
            with suppress(OSError):  # out of file descriptors; the next round tries again
                for host, count in self.enforce().items():
                    log.warning("closed %d connections of %s: it had more than %d", count, host, MAX_PER_ADDRESS)

    def enforce(self) -> dict[str, int]:
        """Close the newest connections above the limit; return their number per address."""
        self._round += 1
        descriptors = _connections(self._port)
        self._first_seen = {peer: self._first_seen.get(peer, self._round) for peer in descriptors}
        by_host: dict[str, list[_Peer]] = {}
        for peer in sorted(descriptors, key=self._first_seen.__getitem__):
            by_host.setdefault(peer[0], []).append(peer)
        excess = {host: peers[MAX_PER_ADDRESS:] for host, peers in by_host.items() if len(peers) > MAX_PER_ADDRESS}
        for peer in (peer for peers in excess.values() for peer in peers):
            with suppress(OSError), _duplicate(descriptors[peer]) as connection:
                if _peer(connection, self._port) == peer:  # the descriptor may belong to another connection by now
                    connection.shutdown(socket.SHUT_RDWR)
        return {host: len(peers) for host, peers in excess.items()}


def _connections(port: int) -> dict[_Peer, int]:
    """Return the descriptor of every connection to a port of this process, by its peer."""
    found: dict[_Peer, int] = {}
    for entry in _DESCRIPTORS.iterdir():
        with suppress(OSError):  # closed in the meantime
            if str(entry.readlink()).startswith("socket:"):
                with _duplicate(int(entry.name)) as connection:
                    if peer := _peer(connection, port):
                        found[peer] = int(entry.name)
    return found


def _duplicate(descriptor: int) -> socket.socket:
    """Return a socket with a duplicate of a descriptor, because gRPC may close its own at any time."""
    duplicate = os.dup(descriptor)
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise


def _peer(connection: socket.socket, port: int) -> _Peer | None:
    """Return the remote address of a connection to `port`; None for any other socket."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return None
    try:
        if connection.getsockname()[1] != port:
            return None
        host, number = connection.getpeername()[:2]
    except OSError:  # a listening socket, or the peer has disconnected
        return None
    return str(host), int(number)
