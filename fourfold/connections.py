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

from fourfold.clock import SYSTEM_CLOCK, Clock

log = logging.getLogger("fourfold.server")

MAX_PER_ADDRESS: Final = 128
PERIOD_SECONDS: Final = 1.0
_DESCRIPTORS: Final = Path("/proc/self/fd")


class ConnectionLimit:
    """Watches one port of this process."""

    def __init__(self, port: int, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._port = port
        self._clock = clock
        self._seen: dict[tuple[str, int], int] = {}
        """Peers in the order in which they came, by the number of the round."""
        self._round = 0

    async def run(self) -> None:
        """Enforce the limit every second, until cancelled."""
        while True:
            await self._clock.sleep(PERIOD_SECONDS)
            for host, count in self.enforce().items():
                log.warning("closed %d connections of %s: it had more than %d", count, host, MAX_PER_ADDRESS)

    def enforce(self) -> dict[str, int]:
        """Close what is too much; return how many connections of which addresses."""
        self._round += 1
        by_host: dict[str, list[tuple[int, socket.socket]]] = {}
        peers: dict[tuple[str, int], int] = {}
        connections = _connections(self._port)
        try:
            for peer, connection in connections:
                peers[peer] = self._seen.get(peer, self._round)
                by_host.setdefault(peer[0], []).append((peers[peer], connection))
            self._seen = peers
            return {host: closed for host, found in by_host.items() if (closed := _close_newest(found))}
        finally:
            for _, connection in connections:
                connection.close()


def _close_newest(found: list[tuple[int, socket.socket]]) -> int:
    found.sort(key=lambda entry: entry[0])
    excess = found[MAX_PER_ADDRESS:]
    for _, connection in excess:
        with suppress(OSError):  # it has left meanwhile
            connection.shutdown(socket.SHUT_RDWR)
    return len(excess)


def _connections(port: int) -> list[tuple[tuple[str, int], socket.socket]]:
    """Return peer and a duplicate of the socket of every connection to a port of this process."""
    found = []
    for entry in _DESCRIPTORS.iterdir():
        with suppress(OSError):  # closed meanwhile
            if not str(entry.readlink()).startswith("socket:"):
                continue
            # The duplicate pins the socket: gRPC may close its own and the number may be used again.
            connection = socket.socket(fileno=os.dup(int(entry.name)))
            try:
                inet = connection.family in (socket.AF_INET, socket.AF_INET6)
                if inet and connection.type == socket.SOCK_STREAM and connection.getsockname()[1] == port:
                    peer = connection.getpeername()
                    found.append(((str(peer[0]), int(peer[1])), connection))
                    continue
            except OSError:  # it listens, or its peer has left
                pass
            connection.close()
    return found
