"""Runs real trainer engines for tests, one after another: `python -m tests.support.trainer_driver CASES.json OUT`.

It is a process of its own, because DeepSpeed keeps state in module variables and reads the environment. Each case makes
an engine and runs the actions of its `does`. The results go to OUT/<name>.npz, the layout of the checkpoints to
OUT/<name>.json. Ranks above 0 are children of this process, as in the service.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from fourfold.algorithm.state import AlgorithmState
from fourfold.arrays import Float32Array
from fourfold.config import Config
from fourfold.metrics import PADDING_FRACTION
from fourfold.sample import Sample
from fourfold.sample.columns import Samples
from fourfold_trainer.checkpoint.store import layout_of
from fourfold_trainer.ranks.distributed_engine import DistributedEngine
from fourfold_trainer.service.metrics import summarise
from fourfold_trainer.step.forward import forward_all
from fourfold_trainer.step.micro_batches import Compute, add_gradient, compute_per_token
from fourfold_trainer.step.shadow import compare_gradients
from fourfold_trainer.step.step_result import StepResult
from fourfold_trainer.step.train_step import train_step
from tests.fakes.trainer_engine import group_of
from tests.support.plain_gradients import ragged

REPOSITORY = Path(__file__).parents[2]
SERVICES = ("rollout", "trainer", "reward", "coordinator", "gateway")
LEARNING_RATE = 1e-3
VOCABULARY = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The recipe and the actions of one engine."""

    name: str
    model: str
    stage: int = 3
    ranks: int = 1
    hpz: int = 1  # ranks of a second partition
    sequence: int = 1  # ranks that share a row
    dtype: str = "float32"
    head_dtype: str = ""
    device: str = "cpu"
    budget: int = 512
    algorithm: dict[str, Any] = field(default_factory=dict)
    mini_batches: int = 1
    checkpointing: bool = False
    does: str = "train"
    # train     three steps; exports the weights if there is a folder
    # restore   two steps, save, two more; then load, and the third step again
    # resume    as restore; then a new engine loads and runs the third step, too
    # poison    as train, after a step whose gradient overflows
    # copy      load `source`, save, the third step
    # average   three steps, saved after the second; then load, and the third step again
    # parts     a gradient is discarded; then three steps of two parts, with log-probabilities computed in between
    # stream    one step; then the weights as they are exported and as they would be sent
    # export    one step; then the weights twice, the second time after a pass without gradients
    # split     the first step with every batch of SPLITS and each of its budgets, each saved in a folder of its own
    # shadow    two steps, with and without shadow scores from the same checkpoint, each saved in a folder of its own
    folder: str = ""  # for the checkpoint
    source: str = ""  # folder of another case's checkpoint
    ema: float = 0.0
    lora: dict[str, Any] = field(default_factory=dict)
    adapters: str = "auto"
    liger: bool = False
    optimizer: str = "adamw"
    offload: str = "none"
    router_coef: float = 0.0
    max_grad_norm: float = 1.0
    critic_source: str = ""
    critic_ranks: int = 0


# Tokens per micro-batch, by kind of batch: for one pass on each rank, for two or three, and for one for each sample.
SPLITS = {"many": (512, 64, 25), "few": (512, 16), "segments": (512, 16), "one": (16,)}


def batch(number: int) -> list[Sample]:
    """Return the batch of a step: groups of several sizes and lengths, one with equal scores, one with one sample."""
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
            "model": {
                "source": case.model,
                "dtype": case.dtype,
                "head_dtype": case.head_dtype,
                "max_context_tokens": 32,
            },
            "data": {"train": {"path": "train.jsonl"}},
            "batch": {
                "prompts_per_step": 5,
                "group_size": 4,
                "tokens_per_micro_batch": case.budget,
                "mini_batches_per_step": case.mini_batches,
            },
            "sampling": {"max_new_tokens": 8},
            "algorithm": case.algorithm,
            "weights": {"adapters": case.adapters},
            "critic": {
                "source": case.critic_source,
                "ranks": case.critic_ranks,
                "learning_rate": LEARNING_RATE,
                "weight_decay": 0.01,
                "max_grad_norm": case.max_grad_norm,
            },
            "trainer": {
                "device": case.device,
                "ranks": case.ranks,
                "sequence_parallel_size": case.sequence,
                "zero_stage": case.stage,
                "zero_hpz_partition_size": case.hpz,
                "learning_rate": LEARNING_RATE,
                "max_grad_norm": case.max_grad_norm,
                "gradient_checkpointing": case.checkpointing,
                "ema_decay": case.ema,
                "optimizer": case.optimizer,
                "offload": case.offload,
                "router_aux_loss_coef": case.router_coef,
                "step_timeout_seconds": 60,
                "weight_decay": 0.01,
                "lora": case.lora,
                "liger_kernels": case.liger,
            },
        }
    )


def loss_weights(samples: Sequence[Sample]) -> list[Float32Array]:
    """Return weights of both signs; 0 on the first token, on others, and on all of every fifth sample."""
    weights = []
    for i, one in enumerate(samples):
        row = np.sin(np.arange(len(one.token_ids)) * (i + 1)).astype(np.float32) / 8
        row[::3] = 0.0
        weights.append(row * (i % 5 > 0))
    return weights


def with_shadow_scores(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with other scores, which are those of a shadow; segments of a trajectory have the same."""
    names = sorted({sample.trajectory for sample in samples})
    scores = dict(zip(names, np.random.default_rng(5).normal(size=len(names)).tolist(), strict=True))
    return [replace(sample, shadow_score=scores[sample.trajectory]) for sample in samples]


# Learning rate and clipping norm of each step of parts: the recipe's, others, and no clipping.
OPTIM = ((LEARNING_RATE, 1.0), (LEARNING_RATE / 2, 0.25), (LEARNING_RATE, 0.0))


class Run:
    """A real engine, used as TrainerCore uses it."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.config = case, config_of(case)
        self.losses: list[float] = []
        self.norms: list[float] = []
        # Of every step, in the order of their names, except those that depend on how a step is split.
        self.metrics: list[float] = []
        self.engine = DistributedEngine(
            self.config, Path(case.model), run_dir=folder, member_id="trainer-0", on_death=self._on_death
        )

    def train(self, number: int, *, kl_coef: float | None = None) -> StepResult:
        """Train step `number` as a whole."""
        result = train_step(self.engine, batch(number), self.config, step=number, state=AlgorithmState(kl_coef=kl_coef))
        self.losses += [result.policy.loss, result.critic.loss]
        self.norms += result.policy_norms + result.critic_norms
        found = summarise(result, self.config)
        self.metrics += [found[name] for name in sorted(found) if name != PADDING_FRACTION]
        return result

    def step(self, number: int) -> None:
        """Train step `number`, whole or in parts, as the case requires."""
        if self.case.does == "parts":
            self.train_parts(number)
        else:
            self.train(number)

    def train_parts(self, number: int) -> None:
        """Train step `number` in two parts. The second has one sample, so that some ranks have only dummies."""
        samples = batch(number)
        weights = loss_weights(samples)
        rate, norm = OPTIM[number - 1]
        loss = self._add(samples[:-1], weights[:-1])
        self.logprobs()
        loss += self._add(samples[-1:], weights[-1:])
        self.losses.append(loss)
        self.norms.append(self.engine.optim_step(learning_rate=rate, max_grad_norm=norm))

    def discard(self) -> None:
        """Add a large gradient and discard it."""
        samples = batch(9)
        self._add(samples, [np.where(np.arange(len(s.token_ids)) > 0, 9, 0).astype(np.float32) for s in samples])
        self.engine.discard_gradient()

    def _add(self, samples: Sequence[Sample], weights: Sequence[Float32Array]) -> float:
        rows = add_gradient(self.engine.forward_backward, Samples.of(samples), weights, self.config)
        return sum(float(w[w != 0] @ row) for w, row in zip(weights, rows, strict=True))

    def logprobs(self) -> Float32Array:
        """Return the log-probabilities of a fixed batch, all samples one after another."""
        return self._look_up(self.engine.compute_logprobs)

    def entropies(self) -> Float32Array:
        """Return the entropies of the same batch."""
        found = forward_all(self.engine, Samples.of(batch(99)), self.config, entropies=True, values=False)
        return np.concatenate([row[1:] for row in found.entropies])

    def values(self) -> Float32Array:
        """Return the critic's values of a fixed batch; empty without a critic."""
        if not self.config.algorithm.needs_critic:
            return np.zeros(0, np.float32)
        return self._look_up(self.engine.compute_values, ranks=self.config.critic_data_parallel_size)

    def _look_up(self, compute: Compute, *, ranks: int = 0) -> Float32Array:
        samples = Samples.of(batch(99))
        every = [np.arange(1, len(s.token_ids)) for s in samples]
        counts = [len(positions) for positions in every]
        return np.concatenate(compute_per_token(compute, samples, every.__getitem__, counts, self.config, ranks=ranks))

    def weights(self, name: str, *, ema: bool = False) -> Float32Array:
        """Export into a new folder beside the checkpoint; return all weights, one after another."""
        folder = Path(self.case.folder).with_name(f"{self.case.name} {name}")
        folder.mkdir()
        self.engine.export(folder, ema=ema)
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        return np.concatenate([tensors[name].float().numpy().ravel() for name in sorted(tensors)])

    def close(self) -> None:
        """End the engine, so that this process can make another one."""
        self.engine.leave()
        self.engine.close()

    def _on_death(self, message: str) -> None:
        sys.stderr.write(message + "\n")


def copy(run: Run) -> dict[str, Any]:
    """Load another engine's checkpoint, save it, and go on with it."""
    run.engine.load(Path(run.case.source))
    run.engine.save(Path(run.case.folder))
    run.train(3)
    seen = {"straight": run.logprobs(), "straight_values": run.values(), "losses": run.losses, "norms": run.norms}
    run.close()
    return seen


def average(run: Run) -> dict[str, Any]:
    """Return the weights before and after each of three steps, and the exported averages."""
    seen: dict[str, Any] = {"weights 0": run.weights("0"), "average 0": run.weights("average 0", ema=True)}
    for number in (1, 2, 3):
        run.train(number)
        seen[f"weights {number}"] = run.weights(str(number))
        if number == 2:
            run.engine.save(Path(run.case.folder))
    seen["after"] = run.logprobs()
    seen["average 3"] = run.weights("average 3", ema=True)
    seen["after export"] = run.logprobs()
    run.engine.load(Path(run.case.folder))
    run.train(3)
    seen["again"], seen["average again"] = run.weights("again"), run.weights("average again", ema=True)
    run.close()
    return seen


def stream(run: Run) -> dict[str, Any]:
    """Return all weights of one rank before and after a step, and as the source of weight transfers reads them."""
    source = run.engine._worker.policy.weight_source()
    seen: dict[str, Any] = {"before": run.weights("before")}
    run.train(1)
    seen["exported"] = run.weights("exported")
    source.begin_round()  # raises if DeepSpeed has moved a partition
    manifest = source.manifest()
    spans = sorted(manifest.spans_of_rank(0), key=lambda span: manifest.tensors[span.tensor].name)
    seen["streamed"] = np.concatenate([source.read(span).float().cpu().numpy() for span in spans])
    seen["streamed_from"] = np.array([str(source.read(span).device.type) for span in spans])
    source.end_round()
    run.close()
    return seen


def export(run: Run) -> dict[str, Any]:
    """Return the weights right after a step and again after a pass without gradients, which prefetches parameters."""
    run.logprobs()
    run.train(1)
    seen: dict[str, Any] = {
        "after step": hashlib.sha256(run.weights("0").tobytes()).hexdigest(),
        "logprobs": run.logprobs(),
    }
    model: Any = run.engine._worker.policy._model  # type: ignore[attr-defined]
    seen["in_flight"] = sum(p.ds_status.name == "INFLIGHT" for p in model.parameters())
    seen["after pass"] = hashlib.sha256(run.weights("1").tobytes()).hexdigest()
    seen["logprobs again"] = run.logprobs()
    run.train(2)
    seen["losses"] = run.losses
    run.close()
    return seen


def offloads(engine: DistributedEngine) -> list[bool]:
    """Return whether DeepSpeed keeps the policy's optimizer, and its parameters, in main memory."""
    optimizer: Any = engine._worker.policy._engine.optimizer  # type: ignore[attr-defined]
    own = getattr(optimizer, "offload_optimizer", getattr(optimizer, "cpu_offload", False))
    return [bool(own), bool(getattr(optimizer, "offload_param", False))]


def split(run: Run) -> dict[str, Any]:
    """Train the same step with every split, each saved, so that the test can compare Adam's moments."""
    folder = Path(run.case.folder)
    (folder / "start").mkdir()
    run.engine.save(folder / "start")
    for kind, budgets in SPLITS.items():
        for budget in budgets:
            run.engine.load(folder / "start")
            table = run.config.batch.model_copy(update={"tokens_per_micro_batch": budget})
            config = run.config.model_copy(update={"batch": table})
            samples = ragged(kind, vocabulary=VOCABULARY)
            train_step(run.engine, samples, config, step=1, state=AlgorithmState())
            (folder / f"{kind} {budget}").mkdir()
            run.engine.save(folder / f"{kind} {budget}")
    run.close()
    return {}


def shadow(run: Run) -> dict[str, Any]:
    """Train two steps without and with shadow scores, both from one checkpoint; return the metrics of each step.

    They are saved in the folders `plain` and `shadowed`.
    """
    folder = Path(run.case.folder)
    (folder / "start").mkdir()
    run.engine.save(folder / "start")
    seen: dict[str, Any] = {}
    for kind in ("plain", "shadowed"):
        run.engine.load(folder / "start")
        state = AlgorithmState()
        for step, name in ((1, "many"), (2, "few")):
            samples = ragged(name, vocabulary=VOCABULARY)
            samples = with_shadow_scores(samples) if kind == "shadowed" else samples
            measure = partial(compare_gradients, run.engine, state)
            result = train_step(run.engine, samples, run.config, step=step, state=state, measure=measure)
            state = result.algorithm_state
            found = summarise(result, run.config)
            seen |= {f"{kind} {step} {key}": value for key, value in found.items()}
        (folder / kind).mkdir()
        run.engine.save(folder / kind)
        seen[f"{kind} logprobs"] = run.logprobs()
    run.close()
    return seen


WHOLE = {"shadow": shadow, "copy": copy, "average": average, "export": export, "split": split, "stream": stream}


def perform(case: Case, folder: Path) -> dict[str, Any]:
    """Run the actions of a case; return arrays by name."""
    run = Run(case, folder)
    layout = layout_of(run.config, run.engine.manifest())
    (folder / f"{case.name}.json").write_text(json.dumps(layout))
    if case.does in WHOLE:
        return WHOLE[case.does](run)
    seen: dict[str, Any] = {"before": run.logprobs(), "offloads": offloads(run.engine)}
    if case.does == "poison":
        poisoned = run.train(9, kl_coef=1e39)
        seen["poisoned_norm"] = poisoned.policy_norms[0]
        seen["after_poison"] = run.logprobs()
        run.losses.clear()
        run.norms.clear()
    if case.does == "parts":
        run.discard()
        seen["after_discard"] = run.logprobs()
        seen["entropies"] = run.entropies()
    for number in (1, 2):
        run.step(number)
    if case.does in ("restore", "resume"):
        torch.rand(7)  # advance the random state, as a model with dropout would
        run.engine.save(Path(case.folder))
        run.train(3)
        seen["straight"], seen["straight_values"] = run.logprobs(), run.values()
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
        run.step(3)
    seen |= {"after": run.logprobs(), "values": run.values(), "losses": run.losses, "norms": run.norms}
    seen["metrics"] = run.metrics
    if case.does == "train" and case.folder:
        seen["weights"] = run.weights("end")
    run.close()
    return seen


def main(cases: Sequence[Case], out: Path) -> None:
    """Run the cases in order. Under ZeRO-3, a case with several ranks must be the first of its process."""
    for case in cases:
        began = time.monotonic()
        np.savez(out / case.name, **perform(case, out))
        sys.stderr.write(f"{case.name}: {time.monotonic() - began:.1f} s\n")


def trainer_environment() -> dict[str, str]:
    """Return the environment of a trainer's process in tests."""
    paths = [str(REPOSITORY), *(str(REPOSITORY / "services" / name) for name in SERVICES)]
    paths += filter(None, [os.environ.get("PYTHONPATH")])  # of libraries that are not installed
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def write_cases(path: Path, cases: Sequence[Case]) -> None:
    """Write the cases as the JSON that `main` reads."""
    path.write_text(json.dumps([asdict(case) for case in cases]))


if __name__ == "__main__":
    main([Case(**case) for case in json.loads(Path(sys.argv[1]).read_text())], Path(sys.argv[2]))
