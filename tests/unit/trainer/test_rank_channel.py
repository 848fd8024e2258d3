"""Tests that messages between ranks arrive unchanged, and that a broken or silent end is reported."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from fourfold.errors import DeadlinePassed, InvalidInput, Overloaded, Unavailable
from fourfold_trainer.batches import Array
from fourfold_trainer.ranks.rank_channel import RankChannel, RankMessage, from_bytes
from fourfold_trainer.ranks.rank_worker import ERROR, read_error


@pytest.fixture
def ends() -> Iterator[tuple[RankChannel, RankChannel]]:
    left, right = (RankChannel(end) for end in socket.socketpair())
    yield left, right
    left.close()
    right.close()


def test_a_message_arrives_as_it_was_sent(ends: tuple[RankChannel, RankChannel]) -> None:
    left, right = ends
    arrays: list[Array] = [
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.array([1.5, np.nan], np.float32),
        np.empty(0, np.float32),
        np.arange(8, dtype=np.int64)[::2],
        from_bytes(b"offer"),
        np.random.default_rng(0).random(1_000_000),
    ]
    sent = RankMessage(name="update", fields={"a": 1, "b": [None, 0.1, float("inf")]}, arrays=arrays, sequence=7)
    sender = threading.Thread(target=left.send, args=(sent,))
    sender.start()
    found = right.receive(timeout=10)
    sender.join(10)
    assert (found.name, found.fields, found.sequence) == ("update", sent.fields, 7)
    for array, wanted in zip(found.arrays, arrays, strict=True):
        assert array.dtype == wanted.dtype
        np.testing.assert_array_equal(array, wanted)


def test_an_end_that_is_gone_is_noticed(ends: tuple[RankChannel, RankChannel]) -> None:
    left, right = ends
    left.close()
    with pytest.raises(Unavailable, match="gone"):
        right.receive(timeout=10)
    with pytest.raises(Unavailable, match="the rank channel broke while sending update"):
        for _ in range(100):
            right.send(RankMessage(name="update", arrays=[np.zeros(1 << 16)]))


def test_a_silent_end_is_waited_for_no_longer_than_asked(ends: tuple[RankChannel, RankChannel]) -> None:
    began = time.monotonic()
    with pytest.raises(DeadlinePassed):
        ends[0].receive(timeout=0.1)
    assert time.monotonic() - began < 20


def test_an_array_type_that_is_not_ours_is_refused(ends: tuple[RankChannel, RankChannel]) -> None:
    left, right = ends
    left.send(RankMessage(name="update", arrays=[np.zeros(1, np.complex64)]))
    with pytest.raises(Unavailable, match="array of <c8"):
        right.receive(timeout=10)


def test_an_error_keeps_its_class_over_the_link() -> None:
    fields = {"class": "Overloaded", "message": "full", "reason": "QUEUE", "retry_after": 2.0}
    error = read_error(RankMessage(name=ERROR, fields=fields))
    assert isinstance(error, Overloaded) and not isinstance(error, InvalidInput)
    assert (error.message, error.reason, error.retry_after) == ("full", "QUEUE", 2.0)
    assert read_error(RankMessage(name="answer")) is None


def test_an_end_that_stops_in_the_middle_of_a_message_has_broken_the_link() -> None:
    """The next bytes would otherwise be read as the beginning of a message."""
    left, right = socket.socketpair()
    with left, right:
        left.sendall(b"\x00\x00\x00")
        with pytest.raises(Unavailable, match="stopped in the middle of a message"):
            RankChannel(right).receive(timeout=0.05)
