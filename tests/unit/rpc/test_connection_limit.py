"""The limit of connections per address: the newest connections above it are closed."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from fourfold.rpc import connection_limit
from fourfold.rpc.connection_limit import ConnectionLimit
from tests.support.descriptors import open_descriptors


class Port:
    """A listening port that keeps both ends of its connections."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.number = int(self.listener.getsockname()[1])
        self.ends: list[socket.socket] = []

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        """Connect, and return the client's socket."""
        client = socket.create_connection(("127.0.0.1", self.number), 5, source_address=(source, 0))
        self.ends += [client, self.listener.accept()[0]]
        return client

    def close(self) -> None:
        for end in (self.listener, *self.ends):
            end.close()


@pytest.fixture
def port() -> Iterator[Port]:
    opened = Port()
    yield opened
    opened.close()


def is_closed(client: socket.socket) -> bool:
    client.settimeout(0.05)
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return False


def test_the_newest_connections_of_one_address_are_closed(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limit, "MAX_PER_ADDRESS", 3)
    limit = ConnectionLimit(port.number)
    old = [port.connect("127.0.0.2") for _ in range(3)]
    assert limit.enforce() == {}
    other = [port.connect() for _ in range(3)]
    new = [port.connect("127.0.0.2") for _ in range(2)]
    descriptors = open_descriptors()
    assert limit.enforce() == {"127.0.0.2": 2}
    now = open_descriptors()
    assert all(now[target] <= count for target, count in descriptors.items()), "nothing of ours stays open"
    assert all(map(is_closed, new))
    assert not any(map(is_closed, (*old, *other)))


def test_other_ports_and_sockets_are_left_alone(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limit, "MAX_PER_ADDRESS", 1)
    another = Port()
    clients = [another.connect() for _ in range(3)]
    pair = socket.socketpair()
    assert ConnectionLimit(port.number).enforce() == {}
    assert not any(map(is_closed, clients))
    for end in pair:
        end.close()
    another.close()
