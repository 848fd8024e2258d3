"""Tests the CUDA transports on fakes of CUDA and NCCL: windows, staging, acknowledgements, deadlines and aborts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fourfold.errors import DeadlinePassed, FourfoldError, StaleEpoch, Unavailable, WrongState
from fourfold.weights.manifest import Manifest, Span
from fourfold.weights.sender import WeightSender
from fourfold.weights.source.base import WeightSource
from fourfold.weights.source.dense import DenseSource
from fourfold.weights.transport import cuda, staging
from fourfold.weights.transport.base import ReceiveTransport, TransferGroup, make_receiver
from fourfold.weights.transport.waiting import Deadline
from tests.fakes.cuda import Fabric, install
from tests.support.weight_peers import PartSource, make_model

_CPU = torch.device("cpu")
_BACKENDS = ("cuda_ipc", "nccl")


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fabric]:
    yield install(monkeypatch)


class Copied:
    """A source that gives copies, like one that computes what it sends."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.manifest, self.begin_round, self.end_round = source.manifest, source.begin_round, source.end_round

    def read(self, span: Span) -> torch.Tensor:
        values = self._source.read(span)
        return values if self.is_view(span) else values.clone()

    def is_view(self, span: Span) -> bool:
        return span.tensor == 1


class Target:
    """A sink with a place for every tensor; of some it gives slots."""

    def __init__(self, manifest: Manifest, slots: Callable[[Span], bool]) -> None:
        self.tensors = [torch.zeros(spec.count, dtype=torch.bfloat16) for spec in manifest.tensors]
        self._slots = slots
        self.flushes = 0

    def slot(self, span: Span) -> torch.Tensor | None:
        return self._place(span) if self._slots(span) else None

    def take(self, span: Span, values: torch.Tensor) -> None:
        self._place(span).copy_(values)

    def flush(self) -> None:
        self.flushes += 1

    def _place(self, span: Span) -> torch.Tensor:
        return self.tensors[span.tensor][span.start : span.start + span.count]


class Rig:
    """Some trainer ranks and one or two receivers, each in a thread of its own while it works."""

    def __init__(self, backend: str, *, ranks: int = 1, receivers: int = 1, copied: bool = False) -> None:
        self.model = make_model(1)
        sources: list[WeightSource] = [
            PartSource(self.model, rank, ranks) if ranks > 1 else DenseSource(self.model) for rank in range(ranks)
        ]
        if copied:
            sources = [Copied(source) for source in sources]
        self.senders = [WeightSender(source, rank=r, rank_count=ranks) for r, source in enumerate(sources)]
        self.manifest = sources[0].manifest()
        offers = [sender.make_offer(1, backend, receivers, timeout=5) for sender in self.senders]
        group = TransferGroup(epoch=1, manifest=self.manifest, receiver_count=receivers)
        self.receivers = [make_receiver(backend, group, index, _CPU) for index in range(receivers)]
        for receiver in self.receivers:
            receiver.accept(offers)

    def open(self, timeout: float = 5.0) -> None:
        at_once(
            [
                *(lambda s=s: s.open(1, timeout=timeout) for s in self.senders),
                *(lambda r=r: r.open(Deadline(timeout)) for r in self.receivers),
            ]
        )

    def update(self, version: int, slots: Callable[[Span], bool] = lambda _: True) -> list[Target]:
        for old, new in zip(self.model.parameters(), make_model(version).parameters(), strict=True):
            old.data.copy_(new.data)
        targets = [Target(self.manifest, slots) for _ in self.receivers]
        at_once(
            [
                *(lambda s=s: s.send(1, version, timeout=5) for s in self.senders),
                *(
                    lambda r=r, t=t: r.receive(version, t, Deadline(5))
                    for r, t in zip(self.receivers, targets, strict=True)
                ),
            ]
        )
        return targets

    def close(self) -> None:
        for sender in self.senders:
            sender.close()
        for receiver in self.receivers:
            receiver.close()


def at_once(calls: Sequence[Callable[[], object]]) -> None:
    """Run calls in threads; raise the first error."""
    errors: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if errors:
        raise errors[0]


def suppressed(call: Callable[[], object]) -> None:
    """Make a call whose failure does not matter."""
    with suppress(FourfoldError):
        call()


def check(targets: Sequence[Target], version: int) -> None:
    for target in targets:
        for got, expected in zip(target.tensors, make_model(version).parameters(), strict=True):
            assert got.equal(expected.flatten())


@pytest.mark.parametrize("backend", _BACKENDS)
@pytest.mark.parametrize("copied", [False, True], ids=["views", "copies"])
@pytest.mark.parametrize(("ranks", "receivers"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("slots", [lambda s: False, lambda s: s.tensor == 0], ids=["no", "some"])
def test_every_version_arrives(
    fabric: Fabric,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    copied: bool,
    ranks: int,
    receivers: int,
    slots: Callable[[Span], bool],
) -> None:
    monkeypatch.setattr(staging, "WINDOW_BYTES", 100)  # several windows, and tensors cut into parts
    rig = Rig(backend, ranks=ranks, receivers=receivers, copied=copied)
    rig.open()
    for version in (2, 3, 9):
        check(rig.update(version, slots), version)
    rig.close()
    assert not fabric.opened


def test_both_ends_of_nccl_launch_the_same_groups(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "WINDOW_BYTES", 100)
    rig = Rig("nccl", receivers=2)
    rig.open()
    rig.update(2, lambda s: s.tensor == 0)
    assert fabric.groups[0] == fabric.groups[1] == fabric.groups[2]
    assert max(map(sum, fabric.groups[0][1:])) <= 100
    rig.close()


def test_a_moved_parameter_is_exported_again(fabric: Fabric) -> None:
    rig = Rig("cuda_ipc")
    rig.senders[0]._source.begin_round = lambda: None  # type: ignore[method-assign]
    rig.open()
    check(rig.update(2), 2)
    before = list(fabric.opened)
    for parameter in rig.model.parameters():
        parameter.data = parameter.data.clone()
    check(rig.update(3), 3)
    assert fabric.opened != before
    rig.close()


def test_ipc_does_not_return_before_the_receiver_has_taken_all(fabric: Fabric) -> None:
    """The optimizer may write as soon as `send` returns."""
    rig = Rig("cuda_ipc")
    rig.open()
    done = threading.Event()

    def send() -> None:
        rig.senders[0].send(1, 1, timeout=5)
        done.set()

    sending = threading.Thread(target=send)
    sending.start()
    assert not done.wait(0.2)
    rig.receivers[0].receive(1, Target(rig.manifest, lambda _: True), Deadline(5))
    assert done.wait(5)
    rig.close()


@pytest.mark.parametrize("backend", _BACKENDS)
def test_a_sender_whose_receiver_does_not_come_ends_at_its_deadline(fabric: Fabric, backend: str) -> None:
    rig = Rig(backend)
    rig.open()
    fabric.hang = True
    start = time.monotonic()
    with pytest.raises(DeadlinePassed):
        rig.senders[0].send(1, 1, timeout=0.3)
    assert time.monotonic() - start < 15
    with pytest.raises(StaleEpoch):
        rig.senders[0].send(1, 1, timeout=0.3)
    rig.close()


@pytest.mark.parametrize("backend", _BACKENDS)
def test_a_receiver_whose_sender_does_not_come_touches_nothing(fabric: Fabric, backend: str) -> None:
    rig = Rig(backend)
    rig.open()
    target = Target(rig.manifest, lambda _: pytest.fail("touched"))
    with pytest.raises(DeadlinePassed):
        rig.receivers[0].receive(1, target, Deadline(0.3))
    assert target.flushes == 0
    rig.close()


@pytest.mark.parametrize("backend", _BACKENDS)
@pytest.mark.parametrize("how", ["flag", "abort"])
def test_a_receiver_that_waits_is_ended_from_outside(fabric: Fabric, backend: str, how: str) -> None:
    rig = Rig(backend)
    rig.open()
    given_up = threading.Event()
    if how == "flag":
        threading.Timer(0.1, given_up.set).start()
    else:
        threading.Timer(0.1, rig.receivers[0].abort).start()
    start = time.monotonic()
    with pytest.raises(StaleEpoch):
        deadline = Deadline(20, stopped=given_up.is_set)
        rig.receivers[0].receive(1, Target(rig.manifest, lambda _: True), deadline)
    assert time.monotonic() - start < 15
    rig.close()


@pytest.mark.parametrize("backend", _BACKENDS)
def test_a_sender_that_waits_is_aborted_from_another_thread(fabric: Fabric, backend: str) -> None:
    rig = Rig(backend)
    rig.open()
    fabric.hang = True
    threading.Timer(0.1, lambda: rig.senders[0].abort(1)).start()
    start = time.monotonic()
    with pytest.raises(StaleEpoch):
        rig.senders[0].send(1, 1, timeout=20)
    assert time.monotonic() - start < 15
    rig.close()


def test_nccl_aborts_what_hangs_in_the_middle(fabric: Fabric) -> None:
    rig = Rig("nccl")
    rig.open()
    aborted = fabric.aborted
    receiving: ReceiveTransport[Any, Any] = rig.receivers[0]

    class Hanging(Target):
        def slot(self, span: Span) -> torch.Tensor | None:
            fabric.hang = True  # after the header
            return super().slot(span)

    with pytest.raises(FourfoldError):
        at_once(
            [
                lambda: rig.senders[0].send(1, 1, timeout=5),
                lambda: receiving.receive(1, Hanging(rig.manifest, lambda _: True), Deadline(0.5)),
            ]
        )
    assert fabric.aborted > aborted
    fabric.hang = False
    rig.close()


def test_nccl_members_that_do_not_meet_end_at_their_deadline(fabric: Fabric) -> None:
    rig = Rig("nccl", receivers=2)
    with pytest.raises(DeadlinePassed, match="the meeting of all 3 members"):
        rig.senders[0].open(1, timeout=0.2)
    with pytest.raises(DeadlinePassed):
        rig.receivers[0].open(Deadline(0.2))
    rig.close()


def test_a_call_that_returns_at_its_deadline_is_undone_once(monkeypatch: pytest.MonkeyPatch) -> None:
    release, undone = threading.Event(), list[str]()

    class SlowEvent(threading.Event):
        def set(self) -> None:
            super().set()
            release.set()
            time.sleep(0.1)  # the call returns now, before its caller looks for a result

    def call() -> str:
        release.wait(5)
        return "a communicator"

    monkeypatch.setattr(cuda, "threading", SimpleNamespace(Event=SlowEvent, Thread=threading.Thread))
    with pytest.raises(DeadlinePassed):
        cuda.watched(call, Deadline(0.05), "the call", undo=undone.append)
    assert undone == ["a communicator"]


def left_behind() -> list[threading.Thread]:
    """Return the threads that still connect, oldest first; those of other tests may be among them."""
    return [thread for thread in threading.enumerate() if thread.name == "weights-watched"]


def test_nccl_aborts_each_communicator_once_when_connecting_hangs(fabric: Fabric) -> None:
    rig = Rig("nccl")
    fabric.hang = True  # the members meet, and the first broadcast does not end
    with pytest.raises(DeadlinePassed):
        rig.open(timeout=0.3)
    rig.close()
    for thread in left_behind()[-2:]:
        thread.join(5)
    assert fabric.aborted == 2


def test_nccl_ends_a_connection_that_is_made_after_the_deadline(fabric: Fabric) -> None:
    rig = Rig("nccl")
    with pytest.raises(DeadlinePassed, match="the meeting of all 2 members"):
        rig.senders[0].open(1, timeout=0.1)
    thread = left_behind()[-1]
    (unique_id,) = fabric.joined
    fabric.join(2, unique_id, 1)
    thread.join(5)
    assert fabric.aborted == 1 and not fabric.groups, "nobody would have ended a broadcast"
    rig.close()


@pytest.mark.parametrize("backend", _BACKENDS)
def test_another_version_is_refused(fabric: Fabric, backend: str) -> None:
    rig = Rig(backend)
    rig.open()
    target = Target(rig.manifest, lambda _: True)
    sending = threading.Thread(target=lambda: suppressed(lambda: rig.senders[0].send(1, 7, timeout=0.5)))
    sending.start()
    with pytest.raises(WrongState, match="version"):
        rig.receivers[0].receive(8, target, Deadline(2))
    sending.join(5)
    assert target.flushes == 0
    rig.close()


def test_another_nccl_is_refused(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    source = DenseSource(make_model(1))
    offer = WeightSender(source, rank=0, rank_count=1).make_offer(1, "nccl", 1, timeout=5)
    monkeypatch.setattr(cuda, "nccl_version", lambda: 22000)
    receiving = make_receiver("nccl", TransferGroup(epoch=1, manifest=source.manifest(), receiver_count=1), 0, _CPU)
    with pytest.raises(WrongState, match="NCCL 22809, this engine 22000"):
        receiving.accept([offer])


def test_a_receiver_that_died_is_noticed_by_the_ipc_sender(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig("cuda_ipc")
    rig.open()
    transport: Any = rig.senders[0]._transports[0]
    monkeypatch.setattr(transport, "_has_ended", lambda receiver, pid: True)
    with pytest.raises(Unavailable, match="receiver 0, process"):
        rig.senders[0].send(1, 1, timeout=20)
    rig.close()
