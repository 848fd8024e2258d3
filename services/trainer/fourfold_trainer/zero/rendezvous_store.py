"""Makes the store in which the ranks of a process group exchange addresses, and names its address.

    one machine         file:///tmp/.../rendezvous        a file in a private folder
    several machines    tcp://10.0.0.1:40213/SECRET       a server in rank 0's process, on its own address only

torch's TCP store has no authentication. Its keys therefore begin with the secret, which only ranks that attached know:
other processes that reach the port can neither read nor replace them.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from fourfold.errors import ConfigError
from fourfold.rpc.channel import join_target, split_target


def file_rendezvous(folder: Path) -> str:
    """Return the address of the store of ranks on one machine, in a folder that only this user can enter."""
    return f"file://{folder / 'rendezvous'}"


class TcpRendezvous:
    """The server of the store of ranks on several machines. It serves as long as this object lives."""

    def __init__(self, host: str, secret: str, rank_count: int, *, timeout: float) -> None:
        """Listen on a free port of `host`, an address of this machine.

        Raises ConfigError: this machine cannot listen there.
        """
        try:
            family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.bind(address)
            listener.listen(rank_count + 8)
        except OSError as error:
            raise ConfigError(
                f"the ranks cannot meet at {host} ({error.strerror or error}); give --listen an address of this machine"
            ) from None
        port = listener.getsockname()[1]
        self.address = f"tcp://{join_target(host, port)}/{secret}"
        # Given a socket, the server listens there; otherwise it would listen on every address of this machine.
        self._server: Any = TCPStore(
            host, port, rank_count, True, timedelta(seconds=timeout), False, master_listen_fd=listener.detach()
        )


def store_of(store_address: str, rank_count: int, *, timeout: float) -> Any:
    """Return the store at an address, for `init_process_group`."""
    kind, _, place = store_address.partition("://")
    if kind == "file":
        return FileStore(place, rank_count)
    target, _, secret = place.partition("/")
    host, port = split_target(target)
    store = TCPStore(host, port, rank_count, False, timedelta(seconds=timeout), False)
    return PrefixStore(secret, store)
