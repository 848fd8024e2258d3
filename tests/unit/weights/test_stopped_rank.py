"""Tests a trainer rank that is stopped: no wait exceeds its deadline, and the rank does no harm when it continues."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress

import pytest

from fourfold.errors import DeadlinePassed, FourfoldError
from fourfold.weights.digest import add_sums, digest_of
from fourfold.weights.manifest import Manifest
from tests.support.weight_peers import Peer, make_model, receiver, sender

_TIMEOUT = 10.0
_DEADLINE = 1.0


def _join(epoch: int, backend: str, senders: Sequence[Peer], peer: Peer) -> None:
    offers = [one.call("make_offer", epoch, backend, 1) for one in senders]
    peer.start("open", epoch, backend, offers, _TIMEOUT)
    for one in senders:
        one.start("open", epoch, _TIMEOUT)
    for one in (*senders, peer):
        one.result()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_rank_that_wakes_up_after_the_deadline_does_no_harm(backend: str) -> None:
    senders = [Peer(sender, 4, 0, rank, 2) for rank in range(2)]
    manifest = Manifest.from_bytes(senders[0].call("manifest"))
    peer = Peer(receiver, manifest.to_bytes(), 1, 0)
    try:
        _join(1, backend, senders, peer)
        stopped = senders[1].call("pid")
        os.kill(stopped, signal.SIGSTOP)
        began = time.monotonic()
        peer.start("receive", 1, _DEADLINE)
        for one in senders:
            one.start("send", 1, 1, _TIMEOUT)
        with pytest.raises(DeadlinePassed, match="rank 1"):
            peer.result()
        assert time.monotonic() - began < _DEADLINE + 5.0
        peer.call("close")
        senders[0].result()  # its half was sent
        for one in senders:
            one.start("abort", 1)
            one.start("reseed", 5)
        os.kill(stopped, signal.SIGCONT)
        with suppress(FourfoldError):
            senders[1].result()  # its send ended after the receiver was gone, or was refused
        for one in senders:
            one.result()
            one.result()
        _join(2, backend, senders, peer)
        peer.start("receive", 2, _TIMEOUT)
        for one in senders:
            one.start("send", 2, 2, _TIMEOUT)
        sums = [one.result()[0] for one in senders]
        assert peer.result() == digest_of(manifest, add_sums(manifest, sums))
        new = {name: p.float().flatten().tolist() for name, p in make_model(5).named_parameters()}
        assert peer.call("values") == [new[spec.name] for spec in manifest.tensors]
    finally:
        for one in (*senders, peer):
            os.kill(one.process.pid or 0, signal.SIGCONT)
            one.stop()
