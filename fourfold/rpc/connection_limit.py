"""At most so many connections per address on a port that is open to everybody.

gRPC limits the connections of a port but not those of one address, so one host could hold all of them without a token
or a single call. gRPC also gives no access to its sockets; here they are found among the descriptors of this process,
and the newest ones of an address that has too many are shut down, which gRPC takes for a client that left.
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
    """Watches one port of this process."""

    def __init__(self, port: int, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._port = port
        self._clock = clock
        self._since: dict[_Peer, int] = {}
        """The round in which each connection was seen first."""
        self._round = 0

    async def run(self) -> None:
        """Enforce the limit every second, until cancelled."""
        while True:
            await self._clock.sleep(PERIOD_SECONDS)
            with suppress(OSError):  # no descriptor is left to look at the others; the next round tries again
                for host, count in self.enforce().items():
                    log.warning("closed %d connections of %s: it had more than %d", count, host, MAX_PER_ADDRESS)

    def enforce(self) -> dict[str, int]:
        """Close what is too much; return how many connections of which addresses."""
        self._round += 1
        descriptors = _connections(self._port)
        self._since = {peer: self._since.get(peer, self._round) for peer in descriptors}
        by_host: dict[str, list[_Peer]] = {}
        for peer in sorted(descriptors, key=self._since.__getitem__):
            by_host.setdefault(peer[0], []).append(peer)
        excess = {host: peers[MAX_PER_ADDRESS:] for host, peers in by_host.items() if len(peers) > MAX_PER_ADDRESS}
        for peers in excess.values():
            for peer in peers:
                _shut_down(descriptors[peer], self._port, peer)
        return {host: len(peers) for host, peers in excess.items()}


def _connections(port: int) -> dict[_Peer, int]:
    """Return the descriptor of every connection to a port of this process, by its peer."""
    found: dict[_Peer, int] = {}
    for entry in _DESCRIPTORS.iterdir():
        with suppress(OSError):  # closed meanwhile
            if str(entry.readlink()).startswith("socket:"):
                with _duplicate(int(entry.name)) as connection:
                    if peer := _peer(connection, port):
                        found[peer] = int(entry.name)
    return found


def _shut_down(descriptor: int, port: int, peer: _Peer) -> None:
    with suppress(OSError), _duplicate(descriptor) as connection:  # it may have left meanwhile
        if _peer(connection, port) == peer:
            connection.shutdown(socket.SHUT_RDWR)


def _duplicate(descriptor: int) -> socket.socket:
    """Return a socket of our own for a descriptor: gRPC may close its own at any time and the number be used again."""
    duplicate = os.dup(descriptor)
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise


def _peer(connection: socket.socket, port: int) -> _Peer | None:
    """Return the address of the other end; None if this is no connection to our port."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return None
    try:
        if connection.getsockname()[1] != port:
            return None
        host, number = connection.getpeername()[:2]
    except OSError:  # it listens, or the other end has left
        return None
    return str(host), int(number)
