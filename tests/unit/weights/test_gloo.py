"""Tests gloo between real processes: several senders and receivers, aborts, deadlines, killed members."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psutil
import pytest

from fourfold.address import is_loopback
from fourfold.errors import PEER_LOST, DeadlinePassed, StaleEpoch, Unavailable, WrongState
from fourfold.weights.digest import add_sums, digest_of
from fourfold.weights.manifest import Manifest
from fourfold.weights.sender import WeightSender
from fourfold.weights.source.dense import DenseSource
from fourfold.weights.transport import rendezvous
from fourfold.weights.transport.rendezvous import NONCE_BYTES, StoreClient
from fourfold.weights.transport.waiting import Deadline
from tests.support.descriptors import open_descriptors
from tests.support.weight_peers import Peer, make_model, receiver, sender

_TIMEOUT = 10.0
_BIG = 20_000_000  # elements: more than one bucket


@contextmanager
def _peers(*peers: Peer) -> Iterator[None]:
    try:
        yield
    finally:
        for peer in peers:
            peer.stop()


_made: list[WeightSender] = []


@pytest.fixture(autouse=True)
def _close_senders() -> Iterator[None]:
    yield
    while _made:
        _made.pop().close()


def _weights(seed: int = 1, big: int = 0) -> WeightSender:
    _made.append(WeightSender(DenseSource(make_model(seed, big=big)), rank=0, rank_count=1))
    return _made[-1]


def _join(weights: WeightSender, *receivers: Peer, epoch: int = 1) -> None:
    offer = weights.make_offer(epoch, "gloo", len(receivers), timeout=_TIMEOUT)
    for peer in receivers:
        peer.start("open", epoch, "gloo", [offer], _TIMEOUT)
    weights.open(epoch, timeout=_TIMEOUT)
    for peer in receivers:
        peer.result()


def test_two_ranks_reach_two_receivers_and_the_digests_agree() -> None:
    senders = [Peer(sender, 4, 0, rank, 2) for rank in range(2)]
    manifest = Manifest.from_bytes(senders[0].call("manifest"))
    receivers = [Peer(receiver, manifest.to_bytes(), 2, index) for index in range(2)]
    with _peers(*senders, *receivers):
        offers = [peer.call("make_offer", 1, "gloo", 2) for peer in senders]
        for peer in receivers:
            peer.start("open", 1, "gloo", offers, _TIMEOUT)
        for peer in senders:
            peer.start("open", 1, _TIMEOUT)
        for peer in (*senders, *receivers):
            peer.result()
        for version in (1, 2):
            for peer in senders:
                peer.call("reseed", version)
            for peer in receivers:
                peer.start("receive", version, _TIMEOUT)
            for peer in senders:
                peer.start("send", 1, version, _TIMEOUT)
            digest = digest_of(manifest, add_sums(manifest, [peer.result()[0] for peer in senders]))
            assert [peer.result() for peer in receivers] == [digest] * 2
            values = [p.float().flatten().tolist() for p in make_model(version).parameters()]
            assert receivers[1].call("values") == values


def test_several_buckets_arrive_whole_and_only_loopback_listens() -> None:
    weights = _weights(big=_BIG)
    peer = Peer(receiver, weights.manifest().to_bytes(), 1, 0)
    with _peers(peer):
        _join(weights, peer)
        for pid in (psutil.Process().pid, peer.process.pid):
            listening = [c.laddr.ip for c in psutil.Process(pid).net_connections("tcp") if c.status == "LISTEN"]
            assert all(is_loopback(host.removeprefix("::ffff:")) for host in listening), listening  # gRPC's are mapped
            assert listening
        peer.start("receive", 1, _TIMEOUT)
        sent = weights.send(1, 1, timeout=_TIMEOUT)
        assert peer.result() == digest_of(weights.manifest(), sent.partial_sums)
        assert sent.sent_bytes >= 2 * _BIG
        weights.close()


def test_a_receiver_that_does_not_come_ends_open_at_its_deadline() -> None:
    weights = _weights()
    weights.make_offer(1, "gloo", 1, timeout=_TIMEOUT)
    start = time.monotonic()
    with pytest.raises(DeadlinePassed, match="meeting with receiver 0"):
        weights.open(1, timeout=0.3)
    assert 0.25 < time.monotonic() - start < 15
    with pytest.raises(StaleEpoch, match="closed"):
        weights.open(1, timeout=1)


def test_a_send_ends_at_its_deadline_when_the_receiver_does_nothing() -> None:
    weights = _weights(big=_BIG)
    peer = Peer(receiver, weights.manifest().to_bytes(), 1, 0)
    with _peers(peer):
        _join(weights, peer)
        start = time.monotonic()
        with pytest.raises((DeadlinePassed, Unavailable)):
            weights.send(1, 1, timeout=0.5)
        assert time.monotonic() - start < 15


def test_the_senders_abort_ends_the_receivers_wait_at_once() -> None:
    weights = _weights()
    peer = Peer(receiver, weights.manifest().to_bytes(), 1, 0)
    with _peers(peer):
        _join(weights, peer)
        peer.start("receive", 1, 20.0)
        time.sleep(0.1)
        start = time.monotonic()
        weights.abort(1)
        with pytest.raises(StaleEpoch, match="aborted"):
            peer.result()
        assert time.monotonic() - start < 15


def test_abort_from_another_thread_ends_a_wait_at_once_and_the_process_goes_on() -> None:
    weights = _weights()
    peer = Peer(receiver, weights.manifest().to_bytes(), 1, 0)
    with _peers(peer):
        _join(weights, peer)
        peer.call("abort_in", 0.2)
        start = time.monotonic()
        with pytest.raises(StaleEpoch, match="aborted"):
            peer.call("receive", 1, 20.0)
        peer.call("close")
        assert peer.call("pid") == peer.process.pid  # nothing of it is blocked by the abandoned operation
        assert time.monotonic() - start < 15


def test_abort_while_the_receivers_are_awaited_ends_open() -> None:
    trainer = Peer(sender, 1, 0, 0, 1)
    with _peers(trainer):
        offer = trainer.call("make_offer", 1, "gloo", 2)
        peer = Peer(receiver, trainer.call("manifest"), 2, 0)
        with _peers(peer):
            peer.start("open", 1, "gloo", [offer], 20.0)
            time.sleep(0.2)
            trainer.call("abort", 1)
            with pytest.raises(Unavailable, match="aborted this epoch"):
                peer.result()


def test_a_killed_sender_is_noticed_at_once() -> None:
    trainer = Peer(sender, 1, 0, 0, 1)
    peer = Peer(receiver, trainer.call("manifest"), 1, 0)
    with _peers(peer, trainer):
        peer.start("open", 1, "gloo", [trainer.call("make_offer", 1, "gloo", 1)], _TIMEOUT)
        trainer.call("open", 1, _TIMEOUT)
        peer.result()
        peer.start("receive", 1, 20.0)
        time.sleep(0.1)
        start = time.monotonic()
        trainer.kill()
        with pytest.raises(Unavailable, match=r"has ended|is gone"):
            peer.result()
        assert time.monotonic() - start < 15


def test_a_killed_receiver_ends_the_send_and_the_next_epoch_works() -> None:
    weights = _weights(big=_BIG)
    peer = Peer(receiver, weights.manifest().to_bytes(), 1, 0)
    with _peers(peer):
        _join(weights, peer)
        peer.kill()
        start = time.monotonic()
        with pytest.raises(Unavailable, match=r"has ended|is gone"):
            weights.send(1, 1, timeout=20)
        assert time.monotonic() - start < 15
    other = Peer(receiver, weights.manifest().to_bytes(), 1, 0)
    with _peers(other):
        _join(weights, other, epoch=2)
        other.start("receive", 1, _TIMEOUT)
        sent = weights.send(2, 1, timeout=_TIMEOUT)
        assert other.result() == digest_of(weights.manifest(), sent.partial_sums)


def test_another_version_than_the_expected_one_is_refused_and_the_sender_learns_of_it() -> None:
    weights = _weights(big=_BIG)
    peer = Peer(receiver, weights.manifest().to_bytes(), 1, 0)
    with _peers(peer):
        _join(weights, peer)
        peer.start("receive", 2, _TIMEOUT)
        with pytest.raises(Unavailable, match="receiver 0 is gone") as lost:
            weights.send(1, 3, timeout=_TIMEOUT)
        assert lost.value.reason == PEER_LOST, "the trainer is well"
        with pytest.raises(WrongState, match="version 3"):
            peer.result()


def test_closing_leaves_no_descriptor() -> None:
    weights = _weights()
    peer = Peer(receiver, weights.manifest().to_bytes(), 1, 0)
    with _peers(peer):
        _join(weights, peer)
        weights.close()
        peer.call("close")
        before = open_descriptors().total()
        for epoch in range(2, 5):
            _join(weights, peer, epoch=epoch)
            weights.close()
            peer.call("close")
        end = time.monotonic() + 10  # threads of gloo close the last one a moment later
        while open_descriptors().total() > before and time.monotonic() < end:
            time.sleep(0.05)
        assert open_descriptors().total() <= before


def _is_closed(connection: socket.socket, within: float) -> bool:
    connection.settimeout(within)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


@pytest.fixture
def store() -> Iterator[rendezvous.KeyValueStore]:
    store = rendezvous.KeyValueStore("127.0.0.1")
    yield store
    store.close("end", b"")


def test_a_store_does_not_tell_how_much_of_its_secret_is_right(store: rendezvous.KeyValueStore) -> None:
    for right in range(NONCE_BYTES):
        guess = store.nonce[:right] + bytes([store.nonce[right] ^ 1]) + store.nonce[right + 1 :]
        with socket.create_connection(("127.0.0.1", store.port)) as connection:
            connection.sendall(guess[:-1])
            assert not _is_closed(connection, 0.02), f"{right} bytes are right"
            connection.sendall(guess[-1:])
            assert _is_closed(connection, 5.0)


def test_a_store_keeps_few_connections_without_the_secret_and_no_old_ones(
    store: rendezvous.KeyValueStore,
) -> None:
    deadline = Deadline(20.0)
    member = StoreClient("127.0.0.1", store.port, store.nonce, "the store", deadline)
    with ExitStack() as stack:
        began = time.monotonic()
        strangers = [stack.enter_context(socket.create_connection(("127.0.0.1", store.port))) for _ in range(300)]
        for connection in strangers[::2]:
            connection.sendall(store.nonce[:-1])
        second = StoreClient("127.0.0.1", store.port, store.nonce, "the store", deadline)
        second.put("name", b"value")
        assert member.get("name", threading.Event(), deadline, "a value") == b"value"
        assert sum(not _is_closed(connection, 0.001) for connection in strangers) <= 128
        assert all(_is_closed(connection, 10.0) for connection in strangers)
        assert 1.0 < time.monotonic() - began < 8.0
        second.put("other", b"value")
        assert member.get("other", threading.Event(), deadline, "a value") == b"value"
        member.close()
        second.close()


def test_an_abort_ends_a_member_that_waits_for_another_one(store: rendezvous.KeyValueStore) -> None:
    deadline, abort = Deadline(20.0), threading.Event()
    member = StoreClient("127.0.0.1", store.port, store.nonce, "the store", deadline)
    timer = threading.Timer(0.1, abort.set)
    timer.start()
    began = time.monotonic()
    with pytest.raises(StaleEpoch):  # in `get`, before gloo is asked, which only its own timeout ends
        rendezvous.connect_pair(member, "pair", 0, "127.0.0.1", abort, deadline, "the other end")
    assert time.monotonic() - began < 10
    timer.join()
    member.close()
