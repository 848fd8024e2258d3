"""Tests `Publisher` with two engines and one sender, and the state of the engines after failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import pytest
import torch

from fourfold.errors import FourfoldError, InvalidInput, StaleEpoch
from fourfold.weights.apply.base import ApplyReport
from fourfold.weights.apply.reload import ReloadApplier
from fourfold.weights.local import Publisher, PublishFailed
from fourfold.weights.receiver import WeightReceiver
from fourfold.weights.sender import SendResult, WeightSender
from fourfold.weights.source.dense import DenseSource
from fourfold.weights.worker_control import error_reply
from tests.support.weight_peers import make_model
from tests.unit.weights.test_receiver import PlainModel


class PlainEngine:
    """An engine of one worker: a receiver and a model, and a verb that it answers wrongly."""

    def __init__(self) -> None:
        self.model = PlainModel()
        self.verbs: list[str] = []
        self.dies_at = ""
        self.lies_at = ""
        self._receiver = WeightReceiver([ReloadApplier(self.model)], torch.device("cpu"))

    def collective_rpc(self, method: str, *, args: tuple[Any, ...]) -> list[Any]:
        self.verbs.append(method.removeprefix("weights_"))
        if method == self.dies_at:
            raise RuntimeError("the engine died")
        if method == "weights_prove":
            return [{}]
        try:
            answer = getattr(self._receiver, method.removeprefix("weights_"))(*args)
        except FourfoldError as error:
            return [error_reply(error)]
        if isinstance(answer, ApplyReport):
            answer = asdict(answer)
        return [bytes(32) if method == self.lies_at else answer]

    def holds(self, trainer: torch.nn.Module) -> bool:
        new = dict(trainer.named_parameters())
        return all(torch.equal(tensor, new[name].data) for name, tensor in self.model.parameters.items())


class Scene:
    def __init__(self) -> None:
        self.trainer = make_model(1)
        self.engines = [PlainEngine(), PlainEngine()]
        sender = WeightSender(DenseSource(self.trainer), rank=0, rank_count=1)
        self.publisher = Publisher([sender], self.engines, backend="shm", timeout=20)

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.trainer.parameters():
                parameter.mul_(-0.5)

    def all_hold(self) -> bool:
        return all(engine.holds(self.trainer) for engine in self.engines)


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    with scene.publisher:
        yield scene


def test_every_engine_gets_every_version_with_and_without_sums(scene: Scene) -> None:
    first = scene.publisher.publish(1)
    assert scene.all_hold() and len(first.digest) == 32 and first.sent_bytes == scene_bytes(scene)
    scene.step()
    assert not scene.all_hold()
    assert scene.publisher.publish(2, verify=False).digest == b""
    assert scene.all_hold()
    assert scene.engines[0].verbs == ["prove", "open", "receive", "commit", "receive", "commit"]


def scene_bytes(scene: Scene) -> int:
    return sum(parameter.numel() * 2 for parameter in scene.trainer.parameters())


def test_engines_are_paused_while_they_receive_and_not_when_they_meet(scene: Scene) -> None:
    seen: list[list[str]] = []

    @contextmanager
    def pause() -> Iterator[None]:
        seen.append(list(scene.engines[1].verbs))
        yield
        seen.append(list(scene.engines[1].verbs))

    scene.publisher.publish(1, pause=pause)
    assert seen == [["prove", "open"], ["prove", "open", "receive"]]


def test_a_sender_that_fails_ends_the_engines_wait_and_is_named(scene: Scene) -> None:
    scene.publisher.publish(1)
    weight = scene.trainer.get_parameter("mlp.weight")
    kept, weight.data = weight.data, torch.zeros(3)
    began = time.monotonic()
    with pytest.raises(PublishFailed, match=r"mlp\.weight is now .*engines are clean") as caught:
        scene.publisher.publish(2)
    assert caught.value.clean and time.monotonic() - began < 15, "no call waited for the deadline"
    weight.data = kept
    scene.step()
    scene.publisher.publish(3)
    assert scene.all_hold()


class StuckSender(WeightSender):
    """Never sends; an abort ends it."""

    def send(self, *args: Any, **options: Any) -> SendResult:
        assert self._released.wait(20)
        raise StaleEpoch("aborted", reason="TRANSFER_ABORTED")

    def abort(self, epoch: int) -> None:
        self._released.set()
        super().abort(epoch)

    @property
    def _released(self) -> threading.Event:
        event: threading.Event = self.__dict__.setdefault("_event", threading.Event())
        return event


def test_an_engine_that_fails_ends_all_others_waits() -> None:
    """The other engine waits for a sender that never sends: only the publisher knows that it is in vain."""
    engines = [PlainEngine(), PlainEngine()]
    engines[1].dies_at = "weights_receive"
    sender = StuckSender(DenseSource(make_model(1)), rank=0, rank_count=1)
    with Publisher([sender], engines, backend="shm", timeout=20) as publisher:
        publisher.open()
        sender._released.clear()
        began = time.monotonic()
        with pytest.raises(PublishFailed, match="the engine died"):
            publisher.publish(1)
        assert time.monotonic() - began < 15
    assert [engine.verbs[-1] for engine in engines] == ["abort", "abort"]


def test_weights_that_did_not_arrive_as_sent_are_not_committed(scene: Scene) -> None:
    scene.engines[1].lies_at = "weights_receive"
    with pytest.raises(PublishFailed, match=r"did not arrive as it was sent.*dirty") as caught:
        scene.publisher.publish(1)
    assert not caught.value.clean
    assert "commit" not in scene.engines[0].verbs + scene.engines[1].verbs
    scene.engines[1].lies_at = ""
    scene.publisher.publish(2)
    assert scene.all_hold()


def test_nothing_to_publish_to_is_refused() -> None:
    sender = WeightSender(DenseSource(make_model(1)), rank=0, rank_count=1)
    with pytest.raises(InvalidInput, match="0 engines"):
        Publisher([sender], [], backend="shm")
