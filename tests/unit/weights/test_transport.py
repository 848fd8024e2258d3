"""Tests offers, deadlines, host ids, replies and senders: everything of a transfer that needs no second process."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from fourfold.errors import DeadlinePassed, Internal, InvalidInput, StaleEpoch, Unavailable, WrongState
from fourfold.weights import sender
from fourfold.weights.sender import WeightSender
from fourfold.weights.source.dense import DenseSource
from fourfold.weights.transport.base import (
    MAX_OFFER_BYTES,
    Backend,
    TransferGroup,
    available_backends,
    make_receiver,
    make_sender,
    unpack_offers,
)
from fourfold.weights.transport.waiting import Deadline
from fourfold.weights.worker_control import error_reply, unwrap, unwrap_same
from tests.support.descriptors import open_descriptors
from tests.support.weight_peers import make_model

_BACKENDS = ["shm", "gloo"]


def _group(epoch: int = 3, receiver_count: int = 1) -> TransferGroup:
    return TransferGroup(epoch=epoch, manifest=DenseSource(make_model(0)).manifest(), receiver_count=receiver_count)


_CPU = torch.device("cpu")


def _source() -> DenseSource:
    return DenseSource(make_model(1))


def test_both_backends_are_there_best_first() -> None:
    assert available_backends(_CPU) == ["shm", "gloo"]


@pytest.mark.parametrize("backend", _BACKENDS)
def test_an_offer_is_small_and_hides_nothing_in_other_lengths(backend: str) -> None:
    group = _group()
    sender = make_sender(backend, group, 0, _source())
    try:
        offer = sender.offer()
        assert len(offer) <= MAX_OFFER_BYTES
        for wrong in (b"", offer[:10], offer[:59], offer + b"x" * MAX_OFFER_BYTES):
            with pytest.raises(InvalidInput, match="bytes"):
                make_receiver(backend, group, 0, _CPU).accept([wrong])
        if backend == "shm":
            for wrong in (offer[:-1], offer + b"x"):
                with pytest.raises(InvalidInput, match="body"):
                    make_receiver(backend, group, 0, _CPU).accept([wrong])
        with pytest.raises(InvalidInput, match="2 offers"):
            make_receiver(backend, group, 0, _CPU).accept([offer, offer])
    finally:
        sender.close()


def _other(**changes: Any) -> TransferGroup:
    manifest = DenseSource(make_model(0), dtype=torch.float32).manifest() if changes.pop("other_model", 0) else None
    base = _group()
    values = {"epoch": base.epoch, "receiver_count": base.receiver_count, "manifest": manifest or base.manifest}
    return TransferGroup(**{**values, **changes})


@pytest.mark.parametrize(
    ("group", "error", "says"),
    [
        (_other(epoch=4), StaleEpoch, "epoch 3"),
        (_other(receiver_count=2), InvalidInput, "for 1 receivers"),
        (_other(other_model=1), InvalidInput, "another manifest"),
    ],
)
def test_an_offer_for_another_group_is_refused(group: TransferGroup, error: type[Exception], says: str) -> None:
    sender = make_sender("shm", _group(), 0, _source())
    try:
        with pytest.raises(error, match=says):
            unpack_offers(Backend.SHM, group, [sender.offer()])
        with pytest.raises(InvalidInput, match="no gloo offer"):
            unpack_offers(Backend.GLOO, _group(), [sender.offer()])
    finally:
        sender.close()


def test_a_gloo_offer_whose_meeting_place_is_gone_is_unavailable() -> None:
    group = _group()
    sender = make_sender("gloo", group, 0, _source())
    offer = sender.offer()
    sender.close()
    receiving = make_receiver("gloo", group, 0, _CPU)
    receiving.accept([offer])
    with pytest.raises(Unavailable, match="cannot connect to trainer rank 0"):
        receiving.open(Deadline(1))


@pytest.mark.parametrize("tail", [b"host.example", b"", b"\xff\xff", b"127.0.0.1\0"])
def test_a_gloo_offer_without_an_address_is_refused(tail: bytes) -> None:
    group = _group()
    sender = make_sender("gloo", group, 0, _source())
    try:
        broken = sender.offer().removesuffix(b"127.0.0.1") + tail
        with pytest.raises(InvalidInput, match="gloo offer 0"):
            make_receiver("gloo", group, 0, _CPU).accept([broken])
    finally:
        sender.close()


def test_unknown_backends_and_bad_groups_are_refused() -> None:
    with pytest.raises(InvalidInput, match="'rdma'"):
        make_sender("rdma", _group(), 0, _source())
    with pytest.raises(InvalidInput, match="receiver 1 of 1"):
        make_receiver("shm", _group(), 1, _CPU)
    with pytest.raises(InvalidInput, match="0 receivers"):
        _group(receiver_count=0)


def test_deadlines() -> None:
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidInput, match="timeout"):
            Deadline(seconds)
    deadline = Deadline(0.02)
    assert 0 < deadline.check("nothing") <= 0.02
    time.sleep(0.03)
    assert deadline.remaining == 0
    with pytest.raises(DeadlinePassed, match="the moon did not happen within"):
        deadline.check("the moon")


def test_replies_carry_errors_as_what_they_were() -> None:
    assert unwrap([b"a", b"b"]) == [b"a", b"b"]
    assert unwrap_same([b"a", b"a"]) == b"a"
    with pytest.raises(Internal, match="different results"):
        unwrap_same([b"a", b"b"])
    for error in (
        WrongState("no"),
        StaleEpoch("old", reason="TRANSFER_ABORTED"),
        DeadlinePassed("late"),
        Internal("x"),
    ):
        with pytest.raises(type(error), match=f"engine worker 1: {error.message}") as caught:
            unwrap([{"direct": 0}, error_reply(error)])
        assert caught.value.reason == error.reason


# The sender's rules, with a transport that needs no receiver.


def _sender(rank_count: int = 1) -> WeightSender:
    return WeightSender(DenseSource(make_model(1), rank_count=rank_count), rank=0, rank_count=rank_count)


def test_epochs_only_grow_and_calls_name_the_open_one() -> None:
    sender = _sender()
    with pytest.raises(StaleEpoch, match="epoch 1 is not open"):
        sender.open(1, timeout=1)
    sender.make_offer(5, "shm", 1, timeout=1)
    with pytest.raises(WrongState, match="was not opened"):
        sender.send(5, 1, timeout=1)
    with pytest.raises(StaleEpoch, match="not above"):
        sender.make_offer(5, "shm", 1, timeout=1)
    sender.make_offer(6, "shm", 1, timeout=1)
    for call in (lambda: sender.open(5, timeout=1), lambda: sender.send(5, 1, timeout=1), lambda: sender.abort(5)):
        with pytest.raises(StaleEpoch):
            call()
    with pytest.raises(StaleEpoch, match="group 3 of epoch 6"):
        sender.make_offer(6, "shm", 1, group=3, timeout=1)
    sender.open(6, timeout=1)
    sender.open(6, timeout=1)
    with pytest.raises(StaleEpoch, match="and is open"):
        sender.make_offer(6, "shm", 1, group=1, timeout=1)
    result = sender.send(6, 1, timeout=1)
    assert result.sent_bytes == sender.manifest().byte_count
    sender.abort(6)
    sender.abort(6)
    with pytest.raises(StaleEpoch, match="closed"):
        sender.send(6, 2, timeout=1)


def test_an_offer_for_an_epoch_that_is_aborted_meanwhile_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = _sender()
    before = open_descriptors("memfd", "pidfd")
    weights.make_offer(1, "shm", 1, timeout=1)

    def make(*arguments: Any) -> Any:
        weights.abort(1)  # in another thread, while this one allocates
        return make_sender(*arguments)

    monkeypatch.setattr(sender, "make_sender", make)
    with pytest.raises(StaleEpoch, match="group 1 of epoch 1 is not the next one"):
        weights.make_offer(1, "shm", 1, group=1, timeout=1)
    assert open_descriptors("memfd", "pidfd") <= before


def test_a_backend_that_cannot_send_from_here_leaves_nothing_open() -> None:
    before = open_descriptors("memfd", "pidfd")
    with pytest.raises(WrongState, match="this backend needs a GPU"):
        _sender().make_offer(1, "cuda_ipc", 1, timeout=1)
    assert open_descriptors("memfd", "pidfd") <= before


def test_a_sender_must_be_made_for_the_ranks_of_its_source() -> None:
    with pytest.raises(InvalidInput, match="laid out for 1 ranks"):
        WeightSender(DenseSource(make_model(1)), rank=0, rank_count=2)


def test_a_dense_source_leaves_other_ranks_empty() -> None:
    manifest = DenseSource(make_model(1), rank_count=3, dtype=torch.float32).manifest()
    assert {t.dtype for t in manifest.tensors} == {"float32"}
    assert manifest.shard_bytes[1:] == (0, 0)


def test_a_dense_source_notices_what_it_cannot_send() -> None:
    model = make_model(1)
    source = DenseSource(model)
    model.get_parameter("norm.weight").data = torch.zeros(9, dtype=torch.bfloat16)
    with pytest.raises(WrongState, match=r"norm\.weight is now"):
        source.begin_round()
    with pytest.raises(InvalidInput, match="float64"):
        DenseSource(make_model(1, dtype=torch.float64))
