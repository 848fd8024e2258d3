"""Tests shared memory between real processes: arrival, refusals, and processes that end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fourfold.errors import DeadlinePassed, StaleEpoch, Unavailable, WrongState
from fourfold.weights.digest import add_sums, digest_of
from fourfold.weights.manifest import Manifest
from fourfold.weights.sender import WeightSender
from fourfold.weights.source.dense import DenseSource
from fourfold.weights.transport import shm
from fourfold.weights.transport.base import TransferGroup, make_receiver
from fourfold.weights.transport.waiting import Deadline
from tests.support.descriptors import open_descriptors
from tests.support.weight_peers import Collector, PartSource, Peer, make_model, receiver, sender

_CPU = torch.device("cpu")


def _manifest() -> Manifest:
    return DenseSource(make_model(1)).manifest()


@pytest.fixture
def trainer() -> Iterator[Peer]:
    """A trainer rank in another process, alone."""
    peer = Peer(sender, 1, 0, 0, 1)
    yield peer
    peer.stop()


def _join(trainer: Peer, epoch: int = 1) -> tuple[Manifest, shm.ShmReceiver]:
    manifest = Manifest.from_bytes(trainer.call("manifest"))
    offer = trainer.call("make_offer", epoch, "shm", 1)
    receiving = make_receiver("shm", TransferGroup(epoch=epoch, manifest=manifest, receiver_count=1), 0, _CPU)
    assert isinstance(receiving, shm.ShmReceiver)
    receiving.accept([offer])
    receiving.open(Deadline(5))
    trainer.call("open", epoch, 5.0)
    return manifest, receiving


def test_every_version_arrives_as_it_was_sent(trainer: Peer) -> None:
    manifest, receiving = _join(trainer)
    for version in (1, 2, 7):
        trainer.call("reseed", version)
        trainer.start("send", 1, version, 5.0)
        sink = Collector(manifest)
        receiving.receive(version, sink, Deadline(5))
        expected = list(make_model(version).parameters())
        for (span, values), parameter in zip(sink.taken, expected, strict=True):
            assert values.equal(parameter.flatten())
            assert span.count == parameter.numel()
        receiving.check()
        assert trainer.result()[1] == manifest.byte_count
    receiving.close()


def test_three_ranks_tile_the_tensors_and_their_digests_add_up() -> None:
    senders = [WeightSender(PartSource(make_model(4), r, 3), rank=r, rank_count=3) for r in range(3)]
    manifest = senders[0].manifest()
    receivers = [Peer(receiver, manifest.to_bytes(), 2, i) for i in range(2)]
    try:
        offers = [s.make_offer(1, "shm", 2, timeout=5) for s in senders]
        for peer in receivers:
            peer.call("open", 1, "shm", offers, 5.0)
        for peer in receivers:
            peer.start("receive", 9, 5.0)
        for s in senders:
            s.open(1, timeout=5)
        parts = [s.send(1, 9, timeout=5).partial_sums for s in senders]
        assert [peer.result() for peer in receivers] == [digest_of(manifest, add_sums(manifest, parts))] * 2
        assert receivers[0].call("values") == [p.float().flatten().tolist() for p in make_model(4).parameters()]
    finally:
        for peer in receivers:
            peer.stop()
        for s in senders:
            s.close()


def test_the_same_version_is_not_taken_twice(trainer: Peer) -> None:
    _, receiving = _join(trainer)
    trainer.call("send", 1, 1, 5.0)
    receiving.receive(1, Collector(_manifest()), Deadline(5))
    with pytest.raises(DeadlinePassed):
        receiving.receive(1, Collector(_manifest()), Deadline(0.1))


def test_another_version_than_the_expected_one_is_refused(trainer: Peer) -> None:
    _, receiving = _join(trainer)
    trainer.call("send", 1, 3, 5.0)
    with pytest.raises(WrongState, match="sent version 3; version 2 was due"):
        receiving.receive(2, Collector(_manifest()), Deadline(5))


def test_overwriting_what_is_being_read_is_noticed(trainer: Peer) -> None:
    _, receiving = _join(trainer)
    trainer.call("send", 1, 1, 5.0)
    receiving.receive(1, Collector(_manifest()), Deadline(5))
    receiving.check()
    trainer.call("send", 1, 2, 5.0)
    with pytest.raises(WrongState, match="overwrote"):
        receiving.check()


def test_the_senders_abort_ends_the_receivers_wait_at_once(trainer: Peer) -> None:
    _, receiving = _join(trainer)
    trainer.start("abort", 1)
    start = time.monotonic()
    with pytest.raises(StaleEpoch, match="aborted"):
        receiving.receive(1, Collector(_manifest()), Deadline(20))
    assert time.monotonic() - start < 15


def test_a_receiver_can_be_aborted_from_another_thread(trainer: Peer) -> None:
    manifest = trainer.call("manifest")
    peer = Peer(receiver, manifest, 1, 0)
    try:
        peer.call("open", 1, "shm", [trainer.call("make_offer", 1, "shm", 1)], 5.0)
        peer.call("abort_in", 0.1)
        with pytest.raises(StaleEpoch, match="aborted"):
            peer.call("receive", 1, 20.0)
    finally:
        peer.stop()


def test_a_sender_that_is_killed_is_noticed_at_once_and_leaves_nothing() -> None:
    trainer = Peer(sender, 1, 0, 0, 1)
    _, receiving = _join(trainer)
    trainer.call("send", 1, 1, 5.0)
    sink = Collector(_manifest())
    receiving.receive(1, sink, Deadline(5))
    trainer.kill()
    assert sink.taken[0][1].equal(next(iter(make_model(1).parameters())).flatten())  # what was received stays readable
    start = time.monotonic()
    with pytest.raises(Unavailable, match="ended before the arrival of version 2"):
        receiving.receive(2, Collector(_manifest()), Deadline(20))
    assert time.monotonic() - start < 15
    # Folders are those of whole test runs, this one or another; a segment is a file.
    assert not [path for path in Path("/dev/shm").iterdir() if "fourfold" in path.name and path.is_file()]


def test_an_offer_of_a_process_that_is_gone_or_recycled_is_unavailable() -> None:
    trainer = Peer(sender, 1, 0, 0, 1)
    source = DenseSource(make_model(1))
    manifest = Manifest.from_bytes(trainer.call("manifest"))
    group = TransferGroup(epoch=1, manifest=manifest, receiver_count=1)
    offer = trainer.call("make_offer", 1, "shm", 1)
    trainer.kill()
    receiving = make_receiver("shm", group, 0, _CPU)
    receiving.accept([offer])
    with pytest.raises(Unavailable, match="cannot map"):
        receiving.open(Deadline(1))

    # The same place, but another arena with another nonce: as if the pid had been recycled.
    ours = shm.ShmSender(group, 0, source)
    try:
        receiving = make_receiver("shm", group, 0, _CPU)
        receiving.accept([ours.offer()[:-16] + offer[-16:]])
        with pytest.raises(Unavailable, match="not trainer rank 0 any more"):
            receiving.open(Deadline(1))
    finally:
        ours.close()


def test_the_mapping_is_read_only_and_cannot_shrink() -> None:
    source = DenseSource(make_model(1))
    group = TransferGroup(epoch=1, manifest=source.manifest(), receiver_count=1)
    ours = shm.ShmSender(group, 0, source)
    try:
        with pytest.raises(OSError):
            os.ftruncate(ours._page._fd, 10)
        receiving = shm.ShmReceiver(group, 0, _CPU)
        receiving.accept([ours.offer()])
        receiving.open(Deadline(1))
        with pytest.raises(TypeError):
            receiving._links[0].page._words[0] = 1
    finally:
        ours.close()


def test_closing_gives_descriptors_and_memory_back() -> None:
    source = DenseSource(make_model(1))
    weights = WeightSender(source, rank=0, rank_count=1)
    before = open_descriptors("memfd", "pidfd")
    maps_before = _arena_maps()
    for epoch in range(20):
        group = TransferGroup(epoch=epoch, manifest=source.manifest(), receiver_count=1)
        receiving = make_receiver("shm", group, 0, _CPU)
        receiving.accept([weights.make_offer(epoch, "shm", 1, timeout=5)])
        receiving.open(Deadline(5))
        weights.open(epoch, timeout=5)
        weights.send(epoch, 1, timeout=5)
        receiving.receive(1, Collector(_manifest()), Deadline(5))
        receiving.close()
    weights.close()
    del receiving
    assert open_descriptors("memfd", "pidfd") <= before
    assert _arena_maps() == maps_before


def _arena_maps() -> int:
    return Path("/proc/self/maps").read_text(errors="replace").count("fourfold-weights")
