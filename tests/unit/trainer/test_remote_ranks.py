"""Tests which ranks of other machines may attach, and what their end means; tests/integration has real machines."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from fourfold.errors import DeadlinePassed, PermissionDenied, WrongState
from fourfold.trainer.v1 import rank_service_pb2 as pb
from fourfold_trainer.ranks.rank_channel import RankChannel, RankMessage
from fourfold_trainer.ranks.remote_ranks import AttachedRanks, RemoteRanks

MODEL = b"m" * 32


class Ranks(RemoteRanks):
    """Remote ranks whose sockets the test closes."""

    sockets: ClassVar[list[socket.socket]] = []

    def attach(self, hello: pb.RanksHello) -> AttachedRanks:
        attached = super().attach(hello)
        self.sockets.extend([*attached.streams.values(), *attached.engine_ends.values()])
        return attached


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while Ranks.sockets:
        Ranks.sockets.pop().close()


def expecting(deaths: list[str], *, held: int = 2, ranks: int = 6) -> RemoteRanks:
    return Ranks(held, ranks, version="1.0", model_sha256=MODEL, on_death=deaths.append)


def hello(remote: RemoteRanks, first: int, last: int, **fields: Any) -> pb.RanksHello:
    known = {"secret": remote.secret, "version": "1.0", "model_sha256": MODEL, "host": f"host-{first}", "host_id": "h"}
    return pb.RanksHello(first_rank=first, last_rank=last, **{**known, **fields})


def test_ranks_of_two_machines_attach_in_any_order() -> None:
    remote = expecting([])
    remote.attach(hello(remote, 4, 5))
    remote.attach(hello(remote, 2, 3))
    machines = remote.wait(timeout=0)
    assert [list(machine.ranks) for machine in machines] == [[2, 3], [4, 5]]
    assert [machine.title for machine in machines] == ["ranks 2-3 on host-2", "ranks 4-5 on host-4"]


def test_bytes_of_the_engine_come_out_of_the_stream() -> None:
    remote = expecting([], held=1, ranks=2)
    attached = remote.attach(hello(remote, 1, 1))
    RankChannel(attached.engine_ends[1]).send(RankMessage(name="save", fields={"folder": "x"}))
    stream = attached.streams[1]
    stream.setblocking(True)
    assert RankChannel(stream).receive(timeout=5).fields == {"folder": "x"}


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"secret": b"x" * 32}, PermissionDenied, "the secret is not that of this rank 0"),
        ({"version": "2.0"}, WrongState, "the ranks have Fourfold '2.0', rank 0 has '1.0'; install the same version"),
        ({"model_sha256": b"o" * 32}, WrongState, "the ranks have another model than rank 0"),
        (
            {"first_rank": 1},
            WrongState,
            "ranks 1-3 do not fit: rank 0's machine holds ranks 0-1, and",
        ),
        ({"last_rank": 6}, WrongState, "ranks 2-6 do not fit"),
        ({"first_rank": 5, "last_rank": 4}, WrongState, "do not fit"),
    ],
)
def test_others_are_refused(fields: dict[str, Any], error: type[Exception], text: str) -> None:
    remote = expecting([])
    message = hello(remote, 2, 3)
    for name, value in fields.items():
        setattr(message, name, value)
    with pytest.raises(error, match=text):
        remote.attach(message)
    remote.attach(hello(remote, 2, 3))  # the refused ones took no place


def test_a_rank_attaches_once() -> None:
    remote = expecting([])
    remote.attach(hello(remote, 2, 3))
    with pytest.raises(WrongState, match="rank 3 is attached already") as refused:
        remote.attach(hello(remote, 3, 4))
    assert refused.value.reason == "RANK_TAKEN"


def test_missing_ranks_are_named() -> None:
    remote = expecting([])
    remote.attach(hello(remote, 2, 4))
    with pytest.raises(DeadlinePassed, match="ranks 5 did not attach within trainer"):
        remote.wait(timeout=0.01)


def test_a_machine_that_leaves_before_all_are_there_may_come_back() -> None:
    deaths: list[str] = []
    remote = expecting(deaths)
    first = remote.attach(hello(remote, 2, 5))
    remote.detach(first, "killed")
    assert deaths == ["ranks 2-5 on host-2: killed"]
    with pytest.raises(WrongState, match="this rank 0 is ending"):
        remote.attach(hello(remote, 2, 5))

    deaths.clear()
    remote = expecting(deaths)
    remote.detach(remote.attach(hello(remote, 2, 3)), "killed")
    assert deaths == []
    timer = threading.Timer(0.1, lambda: remote.attach(hello(remote, 2, 5)))
    timer.start()
    assert len(remote.wait(timeout=10)) == 1
    timer.join()


def test_the_end_after_close_is_no_death() -> None:
    deaths: list[str] = []
    remote = expecting(deaths)
    attached = remote.attach(hello(remote, 2, 5))
    remote.close()
    remote.detach(attached, "the machine has left")
    assert (deaths, remote.death) == ([], "")
