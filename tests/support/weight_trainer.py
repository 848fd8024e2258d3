"""Runs the trainer's end of a weight update for tests with a real engine: senders over a model in this process."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from fourfold.errors import FourfoldError
from fourfold.weights.digest import add_sums, digest_of
from fourfold.weights.sender import WeightSender
from fourfold.weights.source.dense import DenseSource
from tests.support.weight_engine import Engine
from tests.support.weight_peers import PartSource

TIMEOUT: Final = 30.0
_epochs = itertools.count(1)
_versions = itertools.count(1)


def next_version() -> int:
    """Return a policy version above all before."""
    return next(_versions)


class Trainer:
    """The trainer's end: one or more ranks over the model of a folder, in this process."""

    def __init__(
        self,
        folder: Path,
        ranks: int = 1,
        dtype: torch.dtype | None = None,
        *,
        held: str = "auto",
        device: str = "cpu",
        workers: int = 1,
    ) -> None:
        """Load a model in the type `held`, to be sent as `dtype` to engines of `workers` workers together."""
        self._workers = workers
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=held)
        self.model = model.to(device)
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

    def open(self, engine: Engine, backend: str = "shm") -> dict[str, Any]:
        """Join the engine in a new epoch."""
        engine.prove()
        self.epoch = next(_epochs)
        offers = [s.make_offer(self.epoch, backend, self._workers, timeout=TIMEOUT) for s in self.senders]
        manifest = self.senders[0].manifest().to_bytes()
        engine.start_verb("weights_open", self.epoch, backend, manifest, offers, self._workers, 0, TIMEOUT)
        try:
            for s in self.senders:
                s.open(self.epoch, timeout=TIMEOUT)
        except FourfoldError:
            engine.finish_verb()  # raises the engine's error, if any: it is more specific
            raise
        answer: dict[str, int] = engine.finish_verb()
        return answer

    def update(self, engine: Engine) -> None:
        """Send the present weights and commit them."""
        version = next_version()
        engine.start_verb("weights_receive", self.epoch, version, TIMEOUT)
        parts = [s.send(self.epoch, version, timeout=TIMEOUT).partial_sums for s in self.senders]
        manifest = self.senders[0].manifest()
        assert engine.finish_verb() == digest_of(manifest, add_sums(manifest, parts))
        engine.verb("weights_commit", self.epoch, version)

    def close(self, engine: Engine) -> str:
        """End the epoch on both sides; return the engine's state."""
        for s in self.senders:
            s.abort(self.epoch)
        return str(engine.verb("weights_abort", self.epoch))


def check_updates(
    engine: Engine, one: Path, two: Path, *, backend: str = "shm", trainer: Trainer | None = None, **arguments: Any
) -> dict[str, Any]:
    """Start engines with two weights; then one that is updated from either to the other must be what they were.

    Args:
        engine: the process.
        one, two: folders of one model.
        backend: that the weights take.
        trainer: of the model `two`; None: one on the CPU.
        arguments: vLLM's.

    Returns the engine's reply to `weights_open`.
    """
    engine.load(two, **arguments)
    fresh_two = engine.generate()
    engine.load(one, **arguments)
    fresh_one = engine.generate()
    assert engine.generate() == fresh_one
    assert fresh_one != fresh_two
    trainer = trainer or Trainer(two)
    report = trainer.open(engine, backend)
    assert engine.generate() == fresh_one  # opening changes nothing
    for folder, fresh in ((two, fresh_two), (one, fresh_one)) * 2:
        trainer.become(folder)
        trainer.update(engine)
        assert engine.generate() == fresh
    assert trainer.close(engine) == "clean"
    return report
