"""A real vLLM CPU engine takes new weights: afterwards it is what a fresh engine with them would be.

This is the test that `applier.VERIFIED_ARCHITECTURES` refers to: an architecture joins the
list by joining FAMILIES here.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers

from fourfold.errors import MODEL_MISMATCH, DeadlinePassed, FourfoldError, Internal, StaleEpoch, WrongState
from fourfold.weights.applier import VERIFIED_ARCHITECTURES
from fourfold.weights.digest import combine_digest
from fourfold.weights.sender import WeightSender
from fourfold.weights.source import DenseSource
from tests.weight_engine import Engine, running_engine
from tests.weight_peers import PartSource

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

FAMILIES: Final = {
    "qwen2": "Qwen2ForCausalLM",  # tied, biases, and a vocabulary that the engine pads
    "qwen3": "Qwen3ForCausalLM",  # norms of q and k
    "gemma": "GemmaForCausalLM",  # tied
    "llama": "LlamaForCausalLM",  # last: the tests below go on with its engine
}
TIED: Final = {"qwen2", "gemma"}
_TIMEOUT: Final = 30.0
_epochs = itertools.count(1)
_versions = itertools.count(1)
TinyModel = Callable[..., Path]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One engine process for all tests; importing vLLM is most of their time."""
    with running_engine() as running:
        yield running


class Trainer:
    """The trainer's end: one or more ranks over the model of a folder, in this process."""

    def __init__(self, folder: Path, ranks: int = 1, dtype: torch.dtype | None = None) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        sources = [PartSource(self.model, rank, ranks) for rank in range(ranks)] if ranks > 1 else None
        self.senders = [
            WeightSender(
                sources[rank] if sources else DenseSource(self.model, dtype=dtype), rank=rank, rank_count=ranks
            )
            for rank in range(ranks)
        ]
        self.epoch = -1

    def become(self, folder: Path) -> None:
        """Take other weights, as an optimizer step would."""
        other = transformers.AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            for old, new in zip(self.model.parameters(), other.parameters(), strict=True):
                old.copy_(new)

    def open(self, engine: Engine, backend: str = "shm") -> dict[str, int]:
        """Join the engine in a new epoch."""
        self.epoch = next(_epochs)
        offers = [s.make_offer(self.epoch, backend, 1, timeout=_TIMEOUT) for s in self.senders]
        manifest = self.senders[0].manifest().to_bytes()
        engine.start_verb("weights_open", self.epoch, backend, manifest, offers, 1, 0, _TIMEOUT)
        try:
            for s in self.senders:
                s.open(self.epoch, timeout=5)
        except FourfoldError:
            engine.finish_verb()  # its own error says more
            raise
        answer: dict[str, int] = engine.finish_verb()
        return answer

    def update(self, engine: Engine) -> None:
        """Send the present weights and commit them."""
        version = next(_versions)
        engine.start_verb("weights_receive", self.epoch, version, _TIMEOUT)
        parts = [s.send(self.epoch, version, timeout=_TIMEOUT).partial_sums for s in self.senders]
        assert engine.finish_verb() == combine_digest(self.senders[0].manifest(), parts)
        engine.verb("weights_commit", self.epoch, version)

    def close(self, engine: Engine) -> str:
        """End the epoch on both sides; return the engine's state."""
        for s in self.senders:
            s.abort(self.epoch)
        return str(engine.verb("weights_abort", self.epoch))


def test_every_verified_architecture_is_tested() -> None:
    assert set(FAMILIES.values()) == VERIFIED_ARCHITECTURES


@pytest.mark.parametrize("family", FAMILIES)
def test_an_updated_engine_equals_a_fresh_one(
    family: str, engine: Engine, tiny_model: TinyModel, tmp_path: Path
) -> None:
    one, two = tiny_model(family, 1), tiny_model(family, 2)
    if family == "qwen2":
        one, two = _with_odd_vocabulary(one, tmp_path / "one"), _with_odd_vocabulary(two, tmp_path / "two")
    engine.load(two)
    fresh_two = engine.generate()
    engine.load(one)
    fresh_one = engine.generate()
    assert [tokens for tokens, _ in fresh_one] != [tokens for tokens, _ in fresh_two]

    # Shared memory, from two ranks that hold half of every tensor.
    trainer = Trainer(two, ranks=2)
    report = trainer.open(engine)
    assert (report["direct"], report["reload"]) == (0, len(trainer.senders[0].manifest().tensors))
    assert "packs the weights" in report["reason"]
    assert engine.generate() == fresh_one  # opening changes nothing
    trainer.update(engine)
    assert engine.generate() == fresh_two
    trainer.become(one)
    trainer.update(engine)
    assert engine.generate() == fresh_one
    assert trainer.close(engine) == "clean"

    # Gloo, from one rank. The comparison can fail: without the repack a tied head goes stale.
    trainer = Trainer(two)
    trainer.open(engine, "gloo")
    if family in TIED:
        engine.sabotage("repack", True)
        trainer.update(engine)
        assert engine.generate() != fresh_two
        engine.sabotage("repack", False)
    trainer.update(engine)
    assert engine.generate() == fresh_two
    trainer.become(one)
    trainer.update(engine)
    assert engine.generate() == fresh_one
    assert trainer.close(engine) == "clean"


def _with_odd_vocabulary(folder: Path, target: Path) -> Path:
    """Copy a model with fewer rows in its embedding; vLLM pads them to a multiple of 64."""
    shutil.copytree(folder, target)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(487)
    model.save_pretrained(target)
    return target


@pytest.fixture
def llama(engine: Engine, tiny_model: TinyModel) -> Any:
    """A llama engine with the weights of seed 1, and what it says."""
    if engine.weights != tiny_model("llama", 1):
        engine.load(tiny_model("llama", 1))
    return engine.generate()


def test_abort_and_deadline_leave_the_old_version_serving(llama: Any, engine: Engine, tiny_model: TinyModel) -> None:
    for backend in ("shm", "gloo"):
        trainer = Trainer(tiny_model("llama", 2))
        trainer.open(engine, backend)
        engine.start_verb("weights_receive", trainer.epoch, next(_versions), 20.0)
        trainer.senders[0].abort(trainer.epoch)
        with pytest.raises(StaleEpoch, match="aborted"):
            engine.finish_verb()
        assert engine.verb("weights_abort", trainer.epoch) == "clean"
        assert engine.generate() == llama

        trainer.open(engine, backend)
        with pytest.raises(DeadlinePassed):
            engine.verb("weights_receive", trainer.epoch, next(_versions), 0.2)
        assert trainer.close(engine) == "clean"
        assert engine.generate() == llama


def test_an_update_that_fails_half_way_is_dirty_and_the_next_one_heals(
    llama: Any, engine: Engine, tiny_model: TinyModel
) -> None:
    trainer = Trainer(tiny_model("llama", 2))
    trainer.open(engine)
    engine.sabotage("load", True)
    version = next(_versions)
    engine.start_verb("weights_receive", trainer.epoch, version, _TIMEOUT)
    trainer.senders[0].send(trainer.epoch, version, timeout=_TIMEOUT)
    with pytest.raises(Internal):
        engine.finish_verb()
    engine.sabotage("load", False)
    assert trainer.close(engine) == "dirty"
    engine.generate()  # the engine is alive, though nobody should serve from it
    trainer.become(tiny_model("llama", 1))
    trainer.open(engine)
    trainer.update(engine)
    assert engine.generate() == llama
    assert trainer.close(engine) == "clean"


def test_what_does_not_fit_is_refused_before_anything_changes(
    llama: Any, engine: Engine, tiny_model: TinyModel
) -> None:
    def refused(trainer: Trainer, says: str) -> None:
        with pytest.raises(FourfoldError, match=says) as caught:
            trainer.open(engine)
        assert caught.value.code == "FAILED_PRECONDITION"
        assert caught.value.reason == MODEL_MISMATCH
        assert engine.generate() == llama

    wider = Trainer(tiny_model("llama", 1))
    wider.model.model.norm.weight = torch.nn.Parameter(torch.zeros(65, dtype=torch.bfloat16))
    wider.senders = [WeightSender(DenseSource(wider.model), rank=0, rank_count=1)]
    refused(wider, r"refuses model\.norm\.weight \(65,\)")
    refused(Trainer(tiny_model("qwen2", 1)), r"no place|refuses|does not send")
    refused(Trainer(tiny_model("llama_tied", 1)), r"does not send all of lm_head\.weight")

    trainer = Trainer(tiny_model("llama", 1))
    trainer.open(engine)
    trainer.update(engine)
    assert engine.generate() == llama
    trainer.close(engine)


def test_float32_weights_are_cast_by_the_engine_like_by_a_fresh_one(
    llama: Any, engine: Engine, tiny_model: TinyModel
) -> None:
    full = tiny_model("llama", 4, "float32")
    updated = []
    for dtype in (None, torch.bfloat16):
        trainer = Trainer(full, dtype=dtype)
        trainer.open(engine)
        trainer.update(engine)
        updated.append(engine.generate())
        trainer.close(engine)
    engine.load(full)  # as bfloat16
    assert updated == [engine.generate()] * 2


def test_an_unverified_architecture_is_refused_by_name(engine: Engine, tiny_model: TinyModel, tmp_path: Path) -> None:
    """Another name for what the engine runs by its class for llama: that class alone says nothing."""
    folder = tmp_path / "aquila"
    shutil.copytree(tiny_model("llama", 1), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["AquilaForCausalLM"]}))
    engine.load(folder)
    before = engine.generate()
    with pytest.raises(WrongState, match="weight updates of AquilaForCausalLM are not verified"):
        Trainer(tiny_model("llama", 1)).open(engine)
    assert engine.generate() == before


@pytest.mark.slow
def test_a_model_that_runs_by_another_implementation_is_refused_by_name(engine: Engine, tiny_model: TinyModel) -> None:
    engine.load(tiny_model("gpt_neox", 1))
    with pytest.raises(WrongState, match=r"GPTNeoXForCausalLM .* are not verified"):
        Trainer(tiny_model("gpt_neox", 1)).open(engine)
