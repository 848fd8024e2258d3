"""Real trainer engines for tests, one after another: `python -m tests.trainer_driver CASES.json OUT`.

A process of its own, because DeepSpeed keeps state in module variables and reads the
environment. Each case makes an engine and does what its `does` says; what it saw is written
to OUT/<name>.npz. Ranks above 0 are children of this process, as in the service.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fourfold.config import Config
from fourfold.wire import Float32Array, Sample
from fourfold_trainer import step
from fourfold_trainer.batching import split_lookup, split_step
from fourfold_trainer.engine import UpdateSettings, UpdateSums
from fourfold_trainer.ranks import RankGroup
from tests.fakes.trainer_engine import group_of

LEARNING_RATE = 1e-3
VOCABULARY = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One engine."""

    name: str
    model: str
    stage: int = 3
    ranks: int = 1
    dtype: str = "float32"
    budget: int = 512
    kl_coef: float = 0.0
    checkpointing: bool = False
    does: str = "train"
    """train: three steps. restore: two, save, two more; then back, and the third again. resume: the same, and a
    new engine loads and does the third, too. poison: a step whose gradient overflows comes first."""
    folder: str = ""
    """For the checkpoint."""


def batch(number: int) -> list[Sample]:
    """Return the batch of a step: groups of several sizes and lengths, one of them constant, one of one."""
    common: dict[str, Any] = {"vocabulary": VOCABULARY, "seed": number, "reference": True}
    return [
        *group_of([0, 1, 0, 1], group="a", prompt=9, completion=6, **common),
        *group_of([2, -1, 0], group="b", prompt=21, completion=3, temperature=0.7, **common),
        *group_of([1, 1], group="c", prompt=4, completion=9, **common),
        *group_of([1], group="d", prompt=5, completion=5, **common),
        *group_of([0, 3, 1, 1], group="e", prompt=2, completion=17, temperature=1.3, **common),
    ]


def config_of(case: Case) -> Config:
    """Return the recipe of a case."""
    return Config.model_validate(
        {
            "name": "driver",
            "steps": 10,
            "model": {"source": case.model, "dtype": case.dtype, "max_context_tokens": 32},
            "data": {"train": {"path": "train.jsonl"}},
            "batch": {"prompts_per_step": 5, "group_size": 4, "tokens_per_micro_batch": case.budget},
            "sampling": {"max_new_tokens": 8},
            "algorithm": {"kl_coef": min(case.kl_coef, 1.0)},
            "trainer": {
                "ranks": case.ranks,
                "zero_stage": case.stage,
                "gradient_checkpointing": case.checkpointing,
                "step_timeout_seconds": 60,
                "weight_decay": 0.01,
            },
        }
    )


class Run:
    """A real engine, driven as `core` does it."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.config = case, config_of(case)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.engine = RankGroup(
            self.config, Path(case.model), run_dir=folder, member_id="trainer-0", on_death=self._on_death
        )

    def train(self, number: int, *, kl_coef: float | None = None) -> UpdateSums:
        """Train step `number`."""
        samples = batch(number)
        plan = step.prepare(samples, self.config.algorithm)
        shares = split_step(
            [samples[i] for i in plan.trained],
            [float(plan.advantages[i]) for i in plan.trained],
            rank_count=self.case.ranks,
            max_tokens=self.case.budget,
            with_reference=self.case.kl_coef > 0,
        )
        settings = UpdateSettings(
            learning_rate=LEARNING_RATE,
            token_count=plan.token_count,
            rank_count=self.case.ranks,
            clip_low=0.2,
            clip_high=0.2,
            kl_coef=self.case.kl_coef if kl_coef is None else kl_coef,
        )
        sums = self.engine.update(shares, settings)
        self.losses.append(sums.loss)
        self.norms.append(sums.grad_norm)
        return sums

    def logprobs(self) -> Float32Array:
        """Return the log-probabilities of a fixed batch, all samples one after another."""
        samples = batch(99)
        orders, shares = split_lookup(samples, rank_count=self.case.ranks, max_tokens=self.case.budget)
        rows: dict[int, Float32Array] = {}
        for order, answers in zip(orders, self.engine.compute_logprobs(shares), strict=True):
            values, offset = np.concatenate(answers), 0
            for index in order:
                count = len(samples[index].token_ids) - 1
                rows[index] = values[offset : offset + count]
                offset += count
        return np.concatenate([rows[i] for i in range(len(samples))])

    def close(self) -> None:
        """End the engine so that another one can be made."""
        self.engine.leave()
        self.engine.close()

    def _on_death(self, message: str) -> None:
        sys.stderr.write(message + "\n")


def perform(case: Case, folder: Path) -> dict[str, Any]:
    """Do what a case says; return arrays by name."""
    run = Run(case, folder)
    seen: dict[str, Any] = {"before": run.logprobs()}
    if case.does == "poison":
        poisoned = run.train(9, kl_coef=1e39)
        seen["poisoned_norm"] = poisoned.grad_norm
        seen["after_poison"] = run.logprobs()
        run.losses.clear()
        run.norms.clear()
    for number in (1, 2):
        run.train(number)
    if case.does in ("restore", "resume"):
        run.engine.save(Path(case.folder))
        run.train(3)
        seen["straight"] = run.logprobs()
        run.train(4)
        run.engine.load(Path(case.folder))  # back, in the same engine
        run.train(3)
        seen["back"] = run.logprobs()
    if case.does == "resume":
        run.close()
        run = Run(case, folder)
        run.engine.load(Path(case.folder))
        seen["loaded"] = run.logprobs()
    if case.does != "restore":
        run.train(3)
    seen |= {"after": run.logprobs(), "losses": run.losses, "norms": run.norms}
    run.close()
    return seen


def main(cases: Sequence[Case], out: Path) -> None:
    """Run the cases, in their order: under ZeRO-3, one with several ranks must be the first of its process."""
    for case in cases:
        began = time.monotonic()
        np.savez(out / case.name, **perform(case, out))
        sys.stderr.write(f"{case.name}: {time.monotonic() - began:.1f} s\n")


def write_cases(path: Path, cases: Sequence[Case]) -> None:
    """Write what `main` reads."""
    path.write_text(json.dumps([asdict(case) for case in cases]))


if __name__ == "__main__":
    main([Case(**case) for case in json.loads(Path(sys.argv[1]).read_text())], Path(sys.argv[2]))
