"""Tests `WeightReceiver` without an engine: epochs, commit, abort, and the state after each error."""

from __future__ import annotations

import time

import pytest
import torch

from fourfold.errors import WEIGHTS_REFUSED, DeadlinePassed, InvalidInput, StaleEpoch, WrongState
from fourfold.weights import receiver as receiver_module
from fourfold.weights.apply.loader_trace import CopyRecorder, LoaderTrace, NamedTensors
from fourfold.weights.apply.reload import ReloadApplier
from fourfold.weights.digest import differing_tensors, digest_of
from fourfold.weights.manifest import Manifest, Span, TensorSpec
from fourfold.weights.receiver import WeightFeed, WeightReceiver
from fourfold.weights.sender import WeightSender
from fourfold.weights.source.dense import DenseSource
from fourfold.weights.transport.base import TransferGroup
from fourfold.weights.transport.waiting import Deadline
from tests.support.weight_peers import SHAPES, make_model


class PlainModel:
    """A `ReloadableModel` over plain parameters, whose loader can be made to fail."""

    def __init__(self) -> None:
        self.parameters = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
        self.elsewhere: tuple[str, ...] = ()  # tensors that another stage takes; this one takes them all the same
        self.loading = False
        self.fail_after = -1
        self.fail_finish = False

    def trace(self, tensors: NamedTensors) -> LoaderTrace:
        sources = list(tensors)
        destinations = list(self.parameters.items())
        recorder = CopyRecorder(sources, destinations)
        with recorder:
            for name, tensor in sources:
                if name in self.parameters:
                    self.parameters[name].copy_(tensor)
        missing = {n: (recorder.written[n], t.numel()) for n, t in destinations if recorder.written[n] != t.numel()}
        unused = tuple(n for n, _ in sources if not recorder.read[n])
        return LoaderTrace(unused=unused, elsewhere=self.elsewhere, missing=missing)

    def begin_load(self) -> None:
        assert not self.loading
        self.loading = True

    def load(self, tensors: NamedTensors) -> None:
        assert self.loading, "begun"
        for count, (name, tensor) in enumerate(tensors):
            if count == self.fail_after:
                raise RuntimeError("the loader failed")
            self.parameters[name].copy_(tensor)

    def finish_load(self) -> None:
        assert self.loading, "begun"
        if self.fail_finish:
            raise RuntimeError("finishing failed")
        self.loading = False

    def cancel_load(self) -> None:
        assert self.loading, "begun"
        self.loading = False


class Pair:
    """A sender and a receiver in one process, over shared memory."""

    def __init__(self) -> None:
        self.trainer = make_model(1)
        self.sender = WeightSender(DenseSource(self.trainer), rank=0, rank_count=1)
        self.model = PlainModel()
        self.receiver = WeightReceiver([ReloadApplier(self.model)], torch.device("cpu"))

    def open(self, epoch: int) -> None:
        offer = self.sender.make_offer(epoch, "shm", 1, timeout=5)
        self.receiver.open(epoch, "shm", self.sender.manifest().to_bytes(), [offer], 1, 0, 5)
        self.sender.open(epoch, timeout=5)

    def update(self, epoch: int, version: int) -> None:
        for old, new in zip(self.trainer.parameters(), make_model(version).parameters(), strict=True):
            old.data.copy_(new.data)
        sent = self.sender.send(epoch, version, timeout=5)
        digest = self.receiver.receive(epoch, version, 5)
        assert digest == digest_of(self.sender.manifest(), sent.partial_sums)

    def holds(self, version: int) -> bool:
        new = dict(make_model(version).named_parameters())
        return all(torch.equal(tensor, new[name].data) for name, tensor in self.model.parameters.items())


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_updates_are_applied_and_committed(pair: Pair) -> None:
    pair.open(1)
    for version in (1, 2):
        pair.update(1, version)
        assert pair.holds(version)
        assert not pair.model.loading
        pair.receiver.commit(1, version)
        pair.receiver.commit(1, version)
    assert pair.receiver.abort(1) == "clean"
    assert pair.receiver.abort(1) == "clean"


def test_sums_name_the_tensor_that_differs(pair: Pair) -> None:
    pair.open(1)
    pair.update(1, 1)
    manifest = pair.sender.manifest()
    ours = pair.receiver.sums(1)
    pair.trainer.get_parameter("mlp.weight").data[0] = 0
    theirs = pair.sender.send(1, 2, timeout=5).partial_sums
    assert differing_tensors(manifest.to_bytes(), ours, theirs) == ["mlp.weight"]


def test_received_but_not_committed_is_dirty_until_the_next_update_succeeds(pair: Pair) -> None:
    pair.open(1)
    pair.update(1, 1)
    assert pair.receiver.abort(1) == "dirty"
    assert pair.receiver.abort(1) == "dirty"
    pair.open(2)
    with pytest.raises(DeadlinePassed):
        pair.receiver.receive(2, 2, 0.05)
    assert pair.receiver.abort(2) == "dirty"  # a failure that touches nothing does not clean it
    pair.open(3)
    pair.update(3, 3)
    pair.receiver.commit(3, 3)
    assert pair.receiver.abort(3) == "clean"
    pair.open(4)
    pair.update(4, 4)
    with pytest.raises(DeadlinePassed):
        pair.receiver.receive(4, 5, 0.05)  # version 4 was not committed, and is what the model holds
    assert pair.receiver.abort(4) == "dirty"


def test_an_epoch_in_which_nothing_was_sent_is_clean(pair: Pair) -> None:
    pair.open(0)
    assert pair.receiver.abort(0) == "clean"
    pair.receiver.abort(0)
    with pytest.raises(StaleEpoch, match="epoch -1 is not above the last one, 0"):
        pair.receiver.open(-1, "shm", b"", [], 1, 0, 1)
    with pytest.raises(StaleEpoch, match="epoch -1 is not above the last one, -1"):
        Pair().receiver.open(-1, "shm", b"", [], 1, 0, 1)


@pytest.mark.parametrize("stable", [True, False])
def test_the_applier_is_told_whether_the_memory_stays(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, stable: bool
) -> None:
    seen: list[bool] = []
    begin = ReloadApplier.begin

    def note(self: ReloadApplier, *, stable: bool) -> None:
        seen.append(stable)
        begin(self, stable=stable)

    monkeypatch.setattr(ReloadApplier, "begin", note)
    monkeypatch.setattr("fourfold.weights.transport.shm.ShmReceiver.stable", stable)
    pair.open(1)
    pair.update(1, 1)
    assert seen == [stable] and pair.holds(1)


def test_nothing_arrived_leaves_the_old_weights_clean(pair: Pair) -> None:
    pair.open(1)
    pair.update(1, 1)
    pair.receiver.commit(1, 1)
    with pytest.raises(DeadlinePassed):
        pair.receiver.receive(1, 2, 0.05)
    with pytest.raises(StaleEpoch, match="closed"):
        pair.receiver.receive(1, 2, 0.05)
    assert pair.receiver.abort(1) == "clean"
    assert pair.holds(1)


@pytest.mark.parametrize("fail_after", [0, 1])
def test_a_failing_loader_leaves_a_model_that_runs_and_is_dirty(pair: Pair, fail_after: int) -> None:
    pair.open(1)
    pair.update(1, 1)
    pair.receiver.commit(1, 1)
    pair.model.fail_after = fail_after
    pair.sender.send(1, 2, timeout=5)
    with pytest.raises(RuntimeError, match="loader failed"):
        pair.receiver.receive(1, 2, 5)
    assert not pair.model.loading
    assert pair.receiver.abort(1) == "dirty"
    pair.model.fail_after = -1
    pair.open(2)
    pair.update(2, 3)
    pair.receiver.commit(2, 3)
    assert pair.receiver.abort(2) == "clean"


def test_a_failing_end_of_loading_is_dirty(pair: Pair) -> None:
    pair.open(1)
    pair.model.fail_finish = True
    pair.sender.send(1, 1, timeout=5)
    with pytest.raises(RuntimeError, match="finishing failed"):
        pair.receiver.receive(1, 1, 5)
    assert not pair.model.loading
    assert pair.receiver.abort(1) == "dirty"


def test_memory_that_changes_under_the_loader_is_dirty(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.open(1)
    pair.sender.send(1, 1, timeout=5)
    original = pair.model.finish_load
    monkeypatch.setattr(pair.model, "finish_load", lambda: (pair.sender.send(1, 2, timeout=5), original()))
    with pytest.raises(WrongState, match="overwrote"):
        pair.receiver.receive(1, 1, 5)
    assert pair.receiver.abort(1) == "dirty"


def test_only_what_was_received_can_be_committed(pair: Pair) -> None:
    pair.open(1)
    with pytest.raises(WrongState, match="last one received is -1"):
        pair.receiver.commit(1, 1)
    with pytest.raises(StaleEpoch):
        pair.receiver.commit(2, 1)


def test_epochs_grow_and_a_new_one_replaces_the_open_one(pair: Pair) -> None:
    pair.open(3)
    with pytest.raises(StaleEpoch, match="not above"):
        pair.receiver.open(3, "shm", b"", [], 1, 0, 1)
    pair.open(4)
    for call in (lambda: pair.receiver.receive(3, 1, 1), lambda: pair.receiver.abort(3)):
        with pytest.raises(StaleEpoch, match="epoch 3 is not open"):
            call()
    pair.update(4, 1)


def test_what_does_not_fit_changes_nothing_and_the_open_epoch_goes_on(pair: Pair) -> None:
    pair.open(1)
    manifest = pair.sender.manifest().to_bytes()
    wider = make_model(1, big=10)
    other = WeightSender(DenseSource(wider), rank=0, rank_count=1)
    offer = other.make_offer(2, "shm", 1, timeout=5)
    with pytest.raises(WrongState, match=r"no place for big\.weight") as caught:
        pair.receiver.open(2, "shm", other.manifest().to_bytes(), [offer], 1, 0, 5)
    assert caught.value.reason in WEIGHTS_REFUSED
    with pytest.raises(InvalidInput, match="0 offers"):
        pair.receiver.open(2, "shm", manifest, [], 1, 0, 5)
    with pytest.raises(InvalidInput, match="body"):
        pair.receiver.open(2, "shm", other.manifest().to_bytes(), [offer[:-1]], 1, 0, 5)
    with pytest.raises(InvalidInput, match="not JSON"):
        pair.receiver.open(2, "shm", b"?", [offer], 1, 0, 5)
    pair.update(1, 5)
    assert pair.holds(5)
    other.close()


def test_a_model_that_needs_more_is_refused_and_names_what_is_missing(pair: Pair) -> None:
    pair.model.parameters["head.weight"] = torch.zeros(3, dtype=torch.bfloat16)
    with pytest.raises(WrongState, match=r"does not send all of head\.weight \(0 of 3 elements\)") as caught:
        pair.open(1)
    assert caught.value.reason in WEIGHTS_REFUSED, "the coordinator need not try again"


def test_the_recorder_executes_nothing_on_watched_tensors_and_refuses_what_it_cannot_judge() -> None:
    watched = torch.ones(4)
    source = torch.empty(4, device="meta")
    with CopyRecorder([("s", source)], [("d", watched)]) as recorder:
        watched[:2].copy_(source[:2])
        watched[2:].fill_(7)
        watched[:2].copy_(source[:2])  # the same region again does not count twice
        free = torch.zeros(3)
        free.add_(1)
    assert recorder.written["d"] == 4
    assert recorder.read["s"] == 4
    assert torch.equal(watched, torch.ones(4))
    assert torch.equal(free, torch.ones(3))
    with pytest.raises(WrongState, match="cannot be verified"), CopyRecorder([("s", source)], [("d", watched)]):
        watched.add_(1)
    with pytest.raises(WrongState, match="something else"), CopyRecorder([("s", source)], [("d", watched)]):
        watched.copy_(torch.zeros(4))
    assert torch.equal(watched, torch.ones(4))


def _three_spans() -> tuple[Manifest, list[Span]]:
    """A manifest of all tensors, the first one in three spans."""
    specs = tuple(TensorSpec(name=name, dtype="bfloat16", shape=shape) for name, shape in SHAPES.items())
    counts = [[100, 1, specs[0].count - 101], *([spec.count] for spec in specs[1:])]
    spans: list[Span] = []
    offset = 0
    for tensor, parts in enumerate(counts):
        for index, count in enumerate(parts):
            spans.append(Span(tensor=tensor, start=sum(parts[:index]), count=count, rank=0, offset=offset))
            offset += -(-2 * count // 64) * 64
    return Manifest(tensors=specs, spans=tuple(spans), shard_bytes=(offset,)), spans[:3]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
@pytest.mark.parametrize("stable", [True, False])
def test_a_tensor_that_arrives_in_several_spans_is_loaded_when_it_is_whole(
    order: tuple[int, ...], stable: bool
) -> None:
    model, (manifest, parts) = PlainModel(), _three_spans()
    applier = ReloadApplier(model)
    applier.bake(manifest)
    new = dict(make_model(3).named_parameters())
    for _ in range(2):  # nothing of one version is left for the next
        for parameter in model.parameters.values():
            parameter.zero_()
        applier.begin(stable=stable)
        for number, index in enumerate(order):
            assert not model.loading, "nothing is loaded before the tensor is whole"
            span = parts[index]
            arrived = new["embed.weight"].data.flatten()[span.start : span.start + span.count].clone()
            applier.take(span, arrived)
            arrived.fill_(0)  # the buffer is used again for the next part
            if number < 2:
                applier.flush()
        for span in manifest.spans[3:]:
            values = new[manifest.tensors[span.tensor].name].data.flatten().clone()
            applier.take(span, values)
            if not stable:
                values.fill_(0)
        applier.finish()
        assert all(torch.equal(model.parameters[name], new[name].data) for name in SHAPES)
        assert not model.loading and applier.abort() == "clean"


def test_an_update_whose_tensor_lacks_a_span_does_not_end_well() -> None:
    model, (manifest, parts) = PlainModel(), _three_spans()
    applier = ReloadApplier(model)
    applier.bake(manifest)
    applier.begin(stable=True)
    for span in (*parts[:2], *manifest.spans[3:]):
        applier.take(span, torch.ones(span.count, dtype=torch.bfloat16))
    with pytest.raises(WrongState, match="1 tensors did not arrive whole"):
        applier.finish()
    assert applier.abort() == "dirty"
    assert not model.loading


class FeedSender:
    """A sender whose transfer ends at once."""

    def __init__(self, *_: object) -> None:
        self.closed = False

    def offer(self) -> bytes:
        return b"offer"

    def open(self, deadline: Deadline) -> None:
        pass

    def send(self, version: int, deadline: Deadline) -> None:
        pass

    def abort(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def test_a_feed_stays_open_until_its_receivers_can_have_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = FeedSender()
    monkeypatch.setattr(receiver_module, "make_sender", lambda *_: sender)
    source = DenseSource(make_model(1))
    manifest = source.manifest()
    shard = torch.cat([source.read(span).reshape(-1).view(torch.uint8) for span in manifest.spans])
    group = TransferGroup(epoch=1, manifest=manifest, receiver_count=1)
    feed = WeightFeed(group, [shard], 1, timeout=30.0)
    end = time.monotonic() + 20
    while not feed.sums and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.05)
    assert feed.sums and not sender.closed
    feed.close()
    assert sender.closed
