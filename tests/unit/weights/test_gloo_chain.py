"""Tests a chain of gloo receivers in processes of their own: what the sender sends, and members that fail."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest

from fourfold.errors import CONSEQUENCES, PEER_LOST, PEER_SLOW, DeadlinePassed, FourfoldError, Unavailable, WrongState
from fourfold.weights.digest import digest_of
from fourfold.weights.sender import WeightSender
from fourfold.weights.source.dense import DenseSource
from tests.support.weight_peers import Peer, engine, make_model, receiver

_TIMEOUT = 20.0
_BIG = 4_000_000  # elements: 8 chunks


class Chain:
    """A sender in this process, and its receivers."""

    def __init__(self, count: int) -> None:
        self.model = make_model(1, big=_BIG)
        self.weights = WeightSender(DenseSource(self.model), rank=0, rank_count=1)
        self.peers = [self.spawn(count, index) for index in range(count)]
        self._epoch = 0

    def spawn(self, count: int, index: int) -> Peer:
        return Peer(receiver, self.weights.manifest().to_bytes(), count, index)

    def join(self) -> None:
        self._epoch += 1
        offer = self.weights.make_offer(self._epoch, "gloo", len(self.peers), timeout=_TIMEOUT)
        for peer in self.peers:
            peer.start("open", self._epoch, "gloo", [offer], _TIMEOUT)
        self.weights.open(self._epoch, timeout=_TIMEOUT)
        for peer in self.peers:
            peer.result()

    def publish(self, version: int, timeout: float = _TIMEOUT) -> tuple[bytes, list[bytes | FourfoldError]]:
        """Send a version; return the sender's digest (empty: it failed) and each receiver's, or its error."""
        for peer in self.peers:
            peer.start("receive", version, timeout)
        try:
            sums = self.weights.send(self._epoch, version, timeout=timeout).partial_sums
            digest = digest_of(self.weights.manifest(), sums)
        except FourfoldError as error:
            assert error.reason in CONSEQUENCES
            digest = b""
        return digest, [_outcome(peer) for peer in self.peers]


def _outcome(peer: Peer) -> bytes | FourfoldError:
    try:
        return bytes(peer.result())
    except FourfoldError as error:
        return error
    except EOFError:
        return Unavailable("killed")


@contextmanager
def chain(count: int) -> Iterator[Chain]:
    made = Chain(count)
    try:
        yield made
    finally:
        made.weights.close()
        for peer in made.peers:
            peer.kill()  # gloo would keep the process until its operations have timed out


def test_every_receiver_gets_the_weights_and_the_sender_sends_them_once() -> None:
    with chain(4) as it:
        it.join()
        for version in (1, 2):
            next(iter(it.model.parameters())).data.fill_(version)
            digest, received = it.publish(version)
            assert digest and received == [digest] * 4
        (first, *_) = it.peers[3].call("values")
        assert set(first) == {2.0}


def test_a_killed_receiver_in_the_middle_is_named_by_all_others_and_the_next_chain_works_without_it() -> None:
    with chain(4) as it:
        it.join()
        dead = it.peers[1]
        dead.signal(signal.SIGSTOP)  # so that the transfer is under way when it dies
        for peer in it.peers:
            peer.start("receive", 1, _TIMEOUT)
        time.sleep(0.1)
        dead.kill()
        began = time.monotonic()
        with suppress(Unavailable):  # receiver 0 may have taken everything before it notices
            it.weights.send(1, 1, timeout=_TIMEOUT)
        for peer in (it.peers[0], *it.peers[2:]):
            with pytest.raises(Unavailable, match="receiver 1 is gone") as lost:
                peer.result()
            assert lost.value.reason == PEER_LOST, "no receiver but the dead one is to blame"
            peer.stop()
        assert time.monotonic() - began < 15
        it.peers = [it.spawn(3, index) for index in range(3)]
        it.join()
        digest, received = it.publish(2)
        assert digest and received == [digest] * 3


def test_a_receiver_that_stands_still_is_named_by_all_others() -> None:
    with chain(4) as it:
        it.join()
        stopped = it.peers[2]
        stopped.signal(signal.SIGSTOP)
        for peer in it.peers:
            peer.start("receive", 1, 2.0)
        it.weights.send(1, 1, timeout=2.0)  # receiver 0 has room for everything
        errors = [_outcome(peer) for peer in (it.peers[0], it.peers[1], it.peers[3])]
        stopped.signal(signal.SIGCONT)
        own = _outcome(stopped)
    assert isinstance(errors[0], bytes), "a receiver that has passed everything on is done"
    for error in errors[1:]:
        assert isinstance(error, DeadlinePassed) and error.reason == PEER_SLOW
        assert "receiver 2 took too long" in error.message
    assert isinstance(own, FourfoldError) and own.reason not in CONSEQUENCES


def test_weights_that_change_in_one_receiver_differ_from_there_on() -> None:
    with chain(3) as it:
        it.join()
        it.peers[1].call("corrupt")
        digest, received = it.publish(1)
        assert received[0] == digest
        assert received[1] == received[2] != digest


def test_groups_are_sent_to_side_by_side() -> None:
    weights = WeightSender(DenseSource(make_model(1, big=_BIG)), rank=0, rank_count=1)
    slow, fast = (Peer(receiver, weights.manifest().to_bytes(), 1, 0) for _ in range(2))
    try:
        for group, (backend, peer) in enumerate((("gloo", slow), ("shm", fast))):
            offer = weights.make_offer(1, backend, 1, group=group, timeout=_TIMEOUT)
            peer.start("open", 1, backend, [offer], _TIMEOUT)
        weights.open(1, timeout=_TIMEOUT)
        slow.result()
        fast.result()
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(weights.send, 1, 1, timeout=_TIMEOUT)
            digest = fast.call("receive", 1, _TIMEOUT)  # while the other receiver does nothing
            assert not sending.done()
            assert slow.call("receive", 1, _TIMEOUT) == digest
            sent = sending.result()
        assert digest_of(weights.manifest(), sent.partial_sums) == digest
        assert sent.sent_bytes >= 2 * weights.manifest().byte_count
        fast.start("receive", 2, 5.0)
        slow.kill()
        with pytest.raises(Unavailable, match="receiver 0 is gone"):
            weights.send(1, 2, timeout=_TIMEOUT)
    finally:
        weights.close()
        slow.stop()
        fast.stop()


def test_a_late_receiver_is_fed_by_one_that_holds_the_weights_and_the_sender_sends_nothing() -> None:
    weights = WeightSender(DenseSource(make_model(1, big=_BIG)), rank=0, rank_count=1)
    manifest = weights.manifest().to_bytes()
    first, late = Peer(engine, manifest), Peer(receiver, manifest, 1, 0)
    try:
        first.start("open", 1, "gloo", [weights.make_offer(1, "gloo", 1, timeout=_TIMEOUT)], _TIMEOUT)
        weights.open(1, timeout=_TIMEOUT)
        first.result()
        with pytest.raises(WrongState, match="does not hold version 1"):
            first.call("feed", 2, 1, _TIMEOUT)
        first.start("receive", 1, _TIMEOUT)
        digest = digest_of(weights.manifest(), weights.send(1, 1, timeout=_TIMEOUT).partial_sums)
        assert first.result() == digest
        with pytest.raises(WrongState, match="does not hold version 1"):
            first.call("feed", 2, 1, _TIMEOUT)  # received, and not committed
        first.call("commit", 1)
        weights.close()  # so that nothing can come from there
        for epoch in (2, 3):
            late.start("open", epoch, "gloo", first.call("feed", epoch, 1, _TIMEOUT), _TIMEOUT)
            late.result()
            assert late.call("receive", 1, _TIMEOUT) == digest
        offers = first.call("feed", 4, 1, _TIMEOUT)
        first.call("close")  # as with the next update
        with pytest.raises(Unavailable, match="cannot connect to trainer rank 0"):
            late.call("open", 4, "gloo", offers, _TIMEOUT)
    finally:
        weights.close()
        first.stop()
        late.stop()
