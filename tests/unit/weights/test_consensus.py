"""Tests that the workers of one engine join an epoch all or none, and all report the refusal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo  # type: ignore[attr-defined]

from fourfold.errors import Internal, Unavailable, WrongState
from fourfold.weights.apply.reload import ReloadApplier
from fourfold.weights.consensus import GroupConsensus
from fourfold.weights.manifest import Manifest
from fourfold.weights.receiver import WeightReceiver
from fourfold.weights.sender import WeightSender
from fourfold.weights.source.dense import DenseSource
from fourfold.weights.transport.waiting import Deadline
from tests.support.weight_peers import make_model
from tests.unit.weights.test_receiver import PlainModel


class Workers:
    """Two, each in a thread of its own, with a real group."""

    def __init__(self) -> None:
        store = HashStore()
        self._pools = [ThreadPoolExecutor(1) for _ in range(2)]
        self.groups = self.each(lambda rank: GroupConsensus(_group(store, rank), rank, 2))

    def each(self, work: Callable[[int], Any]) -> list[Any]:
        """Return what both answer, or their errors."""
        futures = [pool.submit(work, rank) for rank, pool in enumerate(self._pools)]
        return [future.exception(20) or future.result() for future in futures]

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown()


def _group(store: HashStore, rank: int) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=10)
    return ProcessGroupGloo(store, rank, 2, options)


@pytest.fixture
def workers() -> Iterator[Workers]:
    running = Workers()
    yield running
    running.close()


@pytest.mark.parametrize("refusing", [(0,), (1,), (0, 1)], ids=["first", "last", "both"])
def test_all_hear_of_the_first_refusal(workers: Workers, refusing: tuple[int, ...]) -> None:
    long = "\N{BOMB}" * 5000
    errors = [WrongState(f"no place for {long} in {rank}", reason="MODEL_MISMATCH") for rank in range(2)]

    def ask(rank: int) -> Any:
        return workers.groups[rank].first_refusal(errors[rank] if rank in refusing else None, Deadline(10))

    first = refusing[0]
    own, other = (found := workers.each(ask))[first], found[1 - first]
    assert own is errors[first]
    assert isinstance(other, WrongState) and other.reason == "MODEL_MISMATCH"
    assert other.message.startswith("no place for") and other.message.endswith(f"(refused by worker {first})")
    assert workers.each(lambda rank: workers.groups[rank].first_refusal(None, Deadline(10))) == [None, None]


def test_who_does_not_answer_is_not_waited_for_any_longer_than_the_call(workers: Workers) -> None:
    began = time.monotonic()
    answers = workers.each(lambda rank: rank or workers.groups[0].first_refusal(None, Deadline(0.1)))
    assert isinstance(answers[0], Unavailable) and "could not agree" in answers[0].message
    assert time.monotonic() - began < 20


class Engine:
    """Two receivers, whose models a test makes differ, and a sender for both."""

    def __init__(self, workers: Workers) -> None:
        self.each = workers.each
        self.models = [PlainModel(), PlainModel()]
        self.appliers = [ReloadApplier(model) for model in self.models]
        self.receivers = [
            WeightReceiver([applier], torch.device("cpu"), group)
            for applier, group in zip(self.appliers, workers.groups, strict=True)
        ]
        self.sender = WeightSender(DenseSource(make_model(1)), rank=0, rank_count=1)

    def open(self, epoch: int, sender: WeightSender | None = None) -> list[Any]:
        sender = sender or self.sender
        offer = sender.make_offer(epoch, "shm", 2, timeout=5)
        manifest = sender.manifest().to_bytes()
        answers = self.each(lambda rank: self.receivers[rank].open(epoch, "shm", manifest, [offer], 2, rank, 5))
        sender.open(epoch, timeout=5)
        return answers


@pytest.mark.parametrize("refusing", [0, 1])
def test_the_epoch_before_goes_on_in_all_when_one_refuses_the_next(workers: Workers, refusing: int) -> None:
    engine = Engine(workers)
    assert not any(isinstance(answer, Exception) for answer in engine.open(1))
    other = torch.nn.Module()  # the same tensors under other numbers
    for name, child in reversed(tuple(make_model(2).named_children())):
        other.add_module(name, child)
    next_sender = WeightSender(DenseSource(other), rank=0, rank_count=1)
    engine.models[refusing].parameters["head.weight"] = torch.zeros(3, dtype=torch.bfloat16)
    answers = engine.open(2, next_sender)
    assert all(isinstance(answer, WrongState) and "send all of head.weight" in answer.message for answer in answers)

    engine.sender.send(1, 1, timeout=5)
    digests = engine.each(lambda rank: engine.receivers[rank].receive(1, 1, 5))
    assert digests[0] == digests[1] and isinstance(digests[0], bytes)
    next_sender.close()


def test_a_worker_that_breaks_while_it_checks_keeps_no_other_waiting(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(workers)

    def fail(manifest: Manifest) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.appliers[1], "bake", fail)
    first, second = engine.open(1)
    assert isinstance(first, Internal) and "traceback" in first.message
    assert isinstance(second, RuntimeError)


def test_a_stage_leaves_tensors_to_the_other_one_but_not_both_the_same(workers: Workers) -> None:
    engine = Engine(workers)
    names = [spec.name for spec in engine.sender.manifest().tensors]
    for model, elsewhere in zip(engine.models, (names[:2], names[2:]), strict=True):
        model.elsewhere = tuple(elsewhere)
    assert not any(isinstance(answer, Exception) for answer in engine.open(1))
    engine.models[1].elsewhere = tuple(names[1:])
    other = WeightSender(DenseSource(make_model(2)), rank=0, rank_count=1)
    answers = engine.open(2, other)
    assert all(isinstance(answer, WrongState) and answer.reason == "MODEL_MISMATCH" for answer in answers)
    assert all(f"no place for {names[1]};" in answer.message for answer in answers)
    engine.sender.send(1, 1, timeout=5)
    digests = engine.each(lambda rank: engine.receivers[rank].receive(1, 1, 5))
    assert digests[0] == digests[1] and isinstance(digests[0], bytes), "the epoch before goes on"
    other.close()
