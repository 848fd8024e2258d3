"""Tests which ranks of other machines may attach, and what their end means; tests/integration has real machines."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from fourfold.errors import DeadlinePassed, PermissionDenied, WrongState
from fourfold.trainer.v1 import rank_service_pb2 as pb
from fourfold.trainer.v1.rank_service_pb2_grpc import RankServiceStub, add_RankServiceServicer_to_server
from fourfold_trainer.ranks.rank_channel import RankChannel, RankMessage
from fourfold_trainer.ranks.rank_processes import OtherMachines
from fourfold_trainer.ranks.remote_ranks import AttachedRanks, RemoteRanks
from fourfold_trainer.service import rank_rendezvous
from fourfold_trainer.service.rank_rendezvous import RankRendezvous, RankServicer
from tests.conftest import Serve

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


def expecting(deaths: list[str], *, held: int = 2, ranks: int = 6, least: int = 0, unit: int = 1) -> RemoteRanks:
    return Ranks(held, ranks, least=least, unit=unit, version="1.0", model_sha256=MODEL, on_death=deaths.append)


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


async def test_the_loss_of_a_machine_that_takes_no_more_bytes_is_noticed(serve: Serve) -> None:
    deaths: list[str] = []
    servicer = RankServicer()
    servicer.remote = remote = expecting(deaths, held=1, ranks=2)
    service = pb.DESCRIPTOR.services_by_name["RankService"]
    channel = await serve((service, add_RankServiceServicer_to_server, servicer))
    call = RankServiceStub(channel).AttachRanks(timeout=30)
    await call.write(pb.AttachRanksRequest(hello=hello(remote, 1, 1)))
    first = await call.read()
    assert isinstance(first, pb.AttachRanksResponse) and first.HasField("hello")
    (machine,) = await asyncio.to_thread(remote.wait, timeout=10)
    engine = machine.engine_ends[1]
    engine.setblocking(False)
    sending = asyncio.create_task(asyncio.get_running_loop().sock_sendall(engine, bytes(64 << 20)))
    await asyncio.sleep(1)
    assert not sending.done(), "all buffers between the engine and the machine are full"
    call.cancel()
    async with asyncio.timeout(20):
        while not deaths:
            await asyncio.sleep(0.05)
    assert deaths == ["rank 1 on host-1: its process has ended, or its connection broke"]
    sending.cancel()


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
    remote.wait(timeout=0)
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
    remote.wait(timeout=0)
    remote.close()
    remote.detach(attached, "the machine has left")
    assert (deaths, remote.death) == ([], "")


def test_enough_ranks_go_on_and_later_ones_wait() -> None:
    deaths: list[str] = []
    remote = expecting(deaths, ranks=8, least=4, unit=2)
    odd, last = remote.attach(hello(remote, 5, 5)), remote.attach(hello(remote, 6, 7))
    assert remote.wait(timeout=0.01) == [last], "2 + 1 + 2 ranks are no multiple of 2"
    assert remote.title == "ranks 0-1, ranks 6-7" and not remote.can_grow
    assert odd.engine_ends[5].fileno() == -1, "the end of its stream tells the machine to ask again"
    remote.detach(odd, "the engine has closed its end")
    assert deaths == []
    for first, last_rank, grows in ((5, 5, False), (2, 4, True)):
        with pytest.raises(WrongState, match=r"train without rank.*, which are taken in after the next") as refused:
            remote.attach(hello(remote, first, last_rank))
        assert (refused.value.reason, remote.can_grow) == ("LATER", grows)
    remote.end("the trainer begins again")
    left: list[str] = []
    remote.on_close.append(lambda: left.append("leaving"))
    remote.close()
    assert left == [], "machines are told that the run ends only when it does"
    remote.detach(last, "it has left")
    assert deaths == []


def test_a_machine_that_waits_no_longer_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = expecting([], least=2)
    assert remote.wait(timeout=0) == []
    with pytest.raises(WrongState, match="ranks 0-1 train without ranks 2-5"):
        remote.attach(hello(remote, 2, 5))
    assert remote.can_grow
    monkeypatch.setattr("fourfold_trainer.ranks.remote_ranks._CALL_SECONDS", -1.0)
    assert not remote.can_grow


def test_too_few_ranks_do_not_go_on() -> None:
    remote = expecting([], least=4)
    with pytest.raises(DeadlinePassed, match=r"attach_seconds = 0.01, and trainer.min_ranks = 4; start them"):
        remote.wait(timeout=0.01)
    remote.attach(hello(remote, 4, 5))
    assert len(remote.wait(timeout=0.01)) == 1


def test_ranks_without_gaps_get_the_streams_of_the_machines_that_are_there() -> None:
    remote = expecting([], least=4)
    attached = remote.attach(hello(remote, 4, 5))
    others = OtherMachines(remote=remote, held=2, attached=remote.wait(timeout=0), store_address="")
    assert others.machines == [range(2), range(2, 4)]
    assert others.connections == {2: attached.engine_ends[4], 3: attached.engine_ends[5]}


def test_the_loss_of_a_machine_is_waited_for_when_a_collective_broke_before() -> None:
    remote = expecting([], held=1, ranks=2)
    attached = remote.attach(hello(remote, 1, 1))
    assert not remote.wait_for_death(timeout=60), "no group trains yet"
    remote.wait(timeout=0)
    assert not remote.wait_for_death(timeout=0.01)
    killed = threading.Timer(0.05, remote.detach, (attached, "killed"))
    killed.start()
    assert remote.wait_for_death(timeout=60) and remote.death == "rank 1 on host-1: killed"
    killed.join()


def test_a_failed_engine_ends_the_service_with_the_lost_machine_as_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    remote = expecting(said, held=1, ranks=2)
    attached = remote.attach(hello(remote, 1, 1))
    remote.wait(timeout=0)
    point = RankRendezvous.__new__(RankRendezvous)
    point._remote, point._host = remote, SimpleNamespace(fatal=said.append)  # type: ignore[assignment]
    monkeypatch.setattr(rank_rendezvous, "_LOSS_SECONDS", 60)
    killed = threading.Timer(0.05, remote.detach, (attached, "killed"))
    killed.start()
    point.fail("the engine failed while training: connection closed by peer")
    killed.join()
    assert said == ["rank 1 on host-1: killed"] * 2, "the first ends the service"
    point._remote = None
    point.fail("out of memory")
    assert said[-1] == "out of memory"
