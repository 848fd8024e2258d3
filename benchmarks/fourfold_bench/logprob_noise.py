"""Measures how much log-probabilities of the same weights differ between passes that pack the samples differently.

A product of matrices rounds a row differently in a micro-batch of another shape. GSPO clips the mean of a sample's
differences at 3e-4 and 4e-4, so that noise of this size clips samples before any weight has changed. The passes:

    update     the micro-batches of the first epoch's updates, as old log-probabilities are computed
    repeated   the same again
    large      micro-batches four times as large, in which old log-probabilities were once computed
    reshuffled those of a second epoch, whose samples are dealt anew
    other head the micro-batches of the updates, with the other `model.head_dtype`: logits rounded, or not

Then one step is trained, with the noise that its first update finds (`policy/logprob_noise`), and that of one
micro-batch of the second epoch (`policy/logprob_noise_later_epochs`). A trained model (`--model`) reads texts of 60
tokens and more, cut from docs/; one of random weights (`--shape`) reads random tokens.

    python -m fourfold_bench.logprob_noise --model builtin:smollm2-135m-instruct --dtype bfloat16 --save
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from fourfold.algorithm.state import AlgorithmState
from fourfold.arrays import Float32Array, Int32Array, Sample
from fourfold.errors import ConfigError
from fourfold.model.folder import resolve
from fourfold.model.tokenizer import Tokenizer
from fourfold_bench.harness import Benchmark, BenchmarkRun, option, run_script
from fourfold_bench.models import SHAPES, write_model
from fourfold_bench.trainer_passes import PassSettings, make_samples, recipe, samples_of, start_ranks
from fourfold_trainer.step.batch import StepBatch
from fourfold_trainer.step.micro_batches import compute_old_logprobs, compute_per_token, mini_batches
from fourfold_trainer.step.train_step import train_step

_CLIP_LOW: Final = float(np.log(1 - 3e-4))
_CLIP_HIGH: Final = float(np.log(1 + 4e-4))
_DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
_SHORTEST: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseSettings(PassSettings):
    """The options of the benchmark of noise."""

    model: str = option("a trained model, as in a recipe; empty: random weights", default="", metavar="SOURCE")
    longest: int = option("tokens of the longest sample", default=240, least=_SHORTEST + 1)
    micro_batch: int = option("tokens of one pass of one rank", default=1024)


def read_texts(folder: Path, total: int, longest: int) -> list[Sample]:
    """Return the first `total` tokens of docs/, about, in samples of _SHORTEST to `longest` tokens."""
    tokenizer = Tokenizer.load(folder)
    random, rows, wanted = np.random.default_rng(0), list[Int32Array](), total
    for page in sorted(_DOCS.rglob("*.md")):
        ids = np.asarray(tokenizer.encode(page.read_text(encoding="utf-8")), np.int32)
        while total > 0 and len(ids) >= longest:
            count = int(random.integers(_SHORTEST, longest, endpoint=True))
            rows.append(ids[:count])
            ids, total = ids[count:], total - count
    if total > 0:
        raise ConfigError(f"--tokens {wanted}: docs/ has {total:,} tokens fewer; lower it")
    return samples_of(rows, tokenizer.vocabulary_size)


def compared(one: Sequence[Float32Array], other: Sequence[Float32Array]) -> dict[str, float]:
    """Return the differences of two passes, in nats: of tokens, and of the means of samples."""
    differences = [a.astype(np.float64) - b for a, b in zip(one, other, strict=True) if len(a)]
    tokens = np.abs(np.concatenate(differences))
    means = np.array([d.mean() for d in differences])
    outside = (means < _CLIP_LOW) | (means > _CLIP_HIGH)
    return {
        "token_mean": float(tokens.mean()),
        "token_max": float(tokens.max()),
        "sample_mean_abs": float(np.abs(means).mean()),
        "outside_gspo_clip": float(outside.mean()),
    }


class NoiseBenchmark(Benchmark[NoiseSettings]):
    """Noise of log-probabilities between passes of the same weights."""

    name = "logprob_noise"
    summary = "differences of log-probabilities between passes that pack samples differently"
    settings = NoiseSettings
    libraries = ("torch", "transformers", "deepspeed", "numpy")

    def label(self, settings: NoiseSettings) -> str:
        name = "trained" if settings.model else settings.shape
        head = f"-{settings.head_dtype}-head" if settings.head_dtype else ""
        return f"{name}-{settings.dtype}{head}-{settings.device}"

    def measure(self, settings: NoiseSettings, run: BenchmarkRun) -> dict[str, Any]:
        if settings.model:
            model = resolve(settings.model)
            samples = read_texts(model, settings.tokens, settings.longest)
        else:
            model = run.folder / "model"
            write_model(model, settings.shape, context=settings.longest, dtype=settings.dtype)
            samples = make_samples(settings.tokens, settings.longest, SHAPES[settings.shape]["vocab_size"])
        gspo = partial(
            recipe,
            model=model,
            sample_count=len(samples),
            algorithm={"preset": "gspo"},
            batch={"mini_batches_per_step": 2, "epochs_per_step": 2},
        )
        config = gspo(settings)
        other = gspo(replace(settings, head_dtype="" if settings.head_dtype else "float32"))
        batch = StepBatch.of(samples, config.algorithm)
        updates = mini_batches(batch.bounds, config, step=1)
        with start_ranks(other, model, run.folder) as engine:
            of_other_head = compute_old_logprobs(engine.compute_logprobs, batch, other, updates[:2])
        with start_ranks(config, model, run.folder) as engine:
            compute = engine.compute_logprobs
            update = compute_old_logprobs(compute, batch, config, updates[:2])
            passes = {
                "repeated": compute_old_logprobs(compute, batch, config, updates[:2]),
                "large": compute_per_token(compute, samples, batch.positions, batch.lengths, config),
                "reshuffled": compute_old_logprobs(compute, batch, config, updates[2:]),
                "other head": of_other_head,
            }
            noise = {name: compared(update, found) for name, found in passes.items()}
            result = train_step(engine, samples, config, step=1, state=AlgorithmState())
        return {
            "samples": len(samples),
            "noise": noise,
            "first_update_max": result.logprob_noise,
            "later_epochs_max": None if result.later_noise is None else result.later_noise.token,
        }

    def table(self, document: Mapping[str, Any]) -> list[str]:
        results = document["results"]
        lines = ["pass        mean |d|   max |d|   mean |sample|   outside of GSPO's clip"]
        for name, row in results["noise"].items():
            lines.append(
                f"{name:<10} {row['token_mean']:9.2e} {row['token_max']:9.2e} {row['sample_mean_abs']:15.2e} "
                f"{row['outside_gspo_clip']:24.1%}"
            )
        if results["first_update_max"] is not None:
            lines.append(f"first update of a step: at most {results['first_update_max']:.2e}")
        if results["later_epochs_max"] is not None:
            lines.append(f"a micro-batch of the second epoch: at most {results['later_epochs_max']:.2e}")
        return lines


if __name__ == "__main__":
    sys.exit(run_script(NoiseBenchmark()))
