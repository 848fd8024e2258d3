"""Measures the trainer: an update and a pass of old log-probabilities, against the rate of one large matrix product.

The model has random weights and the samples have mixed lengths. They pass through the trainer's own step: rank 0 is
this process, the other ranks are its children, as in the service. FLOP are those of `models.forward_flop`. After each
step comes what the service does between a step and the next: it returns cached memory (`--release`, for a trainer that
shares its GPUs) and computes the probe of a weight update.

    python -m fourfold_bench.trainer_speed --shape 1.5b --ranks 2 --device cuda --tokens 524288 --save
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from fourfold import metrics
from fourfold.algorithm.state import AlgorithmState
from fourfold.arrays import Int32Array
from fourfold.config import Config
from fourfold.plan.memory import GIB, memory_plan
from fourfold.plan.models import model_sizes
from fourfold.sample import Sample, VersionSpan
from fourfold.sample.columns import Samples
from fourfold_bench.harness import Benchmark, BenchmarkRun, BenchmarkSettings, option, run_script
from fourfold_bench.models import SHAPE_NAMES, SHAPES, forward_flop, parameter_count, write_model
from fourfold_coordinator.weights.probe import LogprobProbe
from fourfold_trainer.engine import UpdateSettings, UpdateSums
from fourfold_trainer.flops import speed
from fourfold_trainer.ranks.distributed_engine import DistributedEngine
from fourfold_trainer.step.batch import TrainBatch
from fourfold_trainer.step.forward import forward_all
from fourfold_trainer.step.micro_batches import compute_old_logprobs
from fourfold_trainer.step.shadow import compare_gradients
from fourfold_trainer.step.train_step import train_step

_PROBE_TOKENS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings(BenchmarkSettings):
    """The options of the trainer benchmark."""

    shape: str = option("of a model with random weights", default="tiny", choices=SHAPE_NAMES)
    device: str = option(default="cpu", choices=("cpu", "cuda"))
    ranks: int = option(default=1, least=1)
    dtype: str = option(default="bfloat16", choices=("bfloat16", "float32"))
    head_dtype: str = option("logits: of the weights' dtype, or float32", default="", choices=("", "float32"))
    tokens: int = option("tokens of one step, about", default=8192, least=1)
    longest: int = option("tokens of the longest sample", default=512, least=16)
    micro_batch: int = option("tokens of one pass of one rank", default=2048)
    liger: bool = option("fused kernels", default=False)
    zero_stage: int = option(default=3)
    offload: str = option(default="none", choices=("none", "optimizer", "optimizer+parameters"))
    checkpointing: bool = option("recompute activations", default=False)
    product: int = option("size of the matrix product; 8192 on a GPU", default=1024, least=1)
    runs: int = option(default=3, least=1)
    warmup: int = option(default=1, least=0)
    shadow: bool = option("give the samples shadow scores, and measure the comparison of gradients", default=False)
    release: bool = option("return cached memory after each step, as a trainer that shares GPUs", default=False)
    profile: str = option(
        "write torch profiles of one more step, and of a probe (FILE.probe)", default="", metavar="FILE"
    )


def make_samples(total: int, longest: int, vocabulary: int) -> list[Sample]:
    """Return samples of random tokens, mixed lengths and random scores, about `total` tokens, in groups of eight.

    An eighth of each sample is its prompt.
    """
    random, scores = np.random.default_rng(0), np.random.default_rng(1)
    samples: list[Sample] = []
    while total > 0:
        count = int(np.clip(random.lognormal(np.log(longest / 4), 0.8), 16, longest))
        tokens: Int32Array = random.integers(0, vocabulary, count).astype(np.int32)
        prompt = max(2, count // 8)
        mask = np.arange(count) >= prompt
        spans = (
            VersionSpan(policy_version=-1, token_count=prompt),
            VersionSpan(policy_version=0, token_count=count - prompt),
        )
        samples.append(
            Sample(
                sample_id=f"s{len(samples)}",
                group_id=f"g{len(samples) // 8}",
                token_ids=tokens,
                behavior_logprobs=np.where(mask, -np.log(vocabulary), np.nan).astype(np.float32),
                action_mask=mask,
                loss_mask=mask,
                version_spans=spans,
                temperature=1.0,
                score=float(scores.random()),
            )
        )
        total -= count
    if len(samples) % 8 == 1:  # a group of one has no advantage
        samples[-1] = replace(samples[-1], group_id=samples[-2].group_id)
    return samples


def recipe(settings: TrainerSettings, model: Path, sample_count: int) -> Config:
    """Return the recipe of a run with the settings' trainer."""
    return Config.model_validate(
        {
            "name": "passes",
            "steps": 100,
            "model": {
                "source": str(model),
                "dtype": settings.dtype,
                "head_dtype": settings.head_dtype,
                "max_context_tokens": settings.longest,
            },
            "data": {"train": {"path": "unused.jsonl"}},
            "sampling": {"max_new_tokens": settings.longest - 1},
            "batch": {
                "prompts_per_step": -(-sample_count // 8),
                "group_size": 8,
                "tokens_per_micro_batch": settings.micro_batch,
            },
            "trainer": {
                "device": settings.device,
                "ranks": settings.ranks,
                "liger_kernels": settings.liger,
                "zero_stage": settings.zero_stage,
                "gradient_checkpointing": settings.checkpointing,
                "offload": settings.offload,
            },
        }
    )


@contextmanager
def start_ranks(config: Config, model: Path, folder: Path) -> Iterator[DistributedEngine]:
    """Start the trainer's ranks, and end them."""
    engine = DistributedEngine(config, model, run_dir=folder, member_id="trainer-0", on_death=print)
    try:
        yield engine
        engine.leave()
    finally:
        engine.close()


class Stopwatch:
    """Forwards calls to an engine, and measures its updates and what follows a step."""

    def __init__(self, engine: DistributedEngine, config: Config) -> None:
        self.engine, self._config = engine, config
        self.seconds: list[float] = []
        self.release_seconds: list[float] = []
        self.probe_seconds: list[float] = []

    def finish_step(self, *, release: bool) -> None:
        """Measure what the service does between a step and the next."""
        began = time.perf_counter()
        if release:
            self.engine.release_memory()
        self.release_seconds.append(time.perf_counter() - began)
        self.probe()
        self.probe_seconds.append(time.perf_counter() - began - self.release_seconds[-1])

    def probe(self) -> None:
        """Compute the log-probabilities of 64 tokens, as for the comparison after a weight update."""
        ids = np.arange(_PROBE_TOKENS, dtype=np.int32)
        probe = LogprobProbe(ids, tolerance=math.inf).sample()
        forward_all(self.engine, Samples.of([probe]), self._config, entropies=False, values=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def update_policy(self, shares: Any, settings: UpdateSettings) -> UpdateSums:
        """Measure one optimizer step. Its sums are numbers, so the device has finished when they are there."""
        began = time.perf_counter()
        sums = self.engine.update_policy(shares, settings)
        self.seconds.append(time.perf_counter() - began)
        return sums


def matmul_flops(device: str, size: int) -> float:
    """Return FLOP a second of a square product in bfloat16, median of ten."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(12):
        began = time.perf_counter()
        torch.mm(left, right)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / statistics.median(seconds[2:])


def profile(work: Callable[[], object], path: Path) -> None:
    """Write the time of rank 0 by operation and by kernel."""
    with torch.profiler.profile() as profiler:
        work()
    order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    averages = profiler.key_averages()
    tables = [averages.table(sort_by=key, row_limit=40, max_name_column_width=90) for key in {order, "cpu_time_total"}]
    path.write_text("\n".join(tables), encoding="utf-8")


class TrainerBenchmark(Benchmark[TrainerSettings]):
    """Rates of the trainer's two passes."""

    name = "trainer_speed"
    summary = "an update and a pass of old log-probabilities, against a matrix product"
    settings = TrainerSettings
    libraries = ("torch", "transformers", "deepspeed", "numpy")

    def label(self, settings: TrainerSettings) -> str:
        return f"{settings.shape}-{settings.ranks}x{settings.device}"

    def measure(self, settings: TrainerSettings, run: BenchmarkRun) -> dict[str, Any]:
        model = run.folder / "model"
        write_model(model, settings.shape, context=settings.longest, dtype=settings.dtype)
        samples = make_samples(settings.tokens, settings.longest, SHAPES[settings.shape]["vocab_size"])
        if settings.shadow:
            scores = np.random.default_rng(2).random(len(samples)).tolist()  # `make_samples` has generators 0 and 1
            samples = [replace(s, shadow_score=score) for s, score in zip(samples, scores, strict=True)]
        config = recipe(settings, model, len(samples))
        with start_ranks(config, model, run.folder) as ranks:
            return _measure(settings, Stopwatch(ranks, config), config, samples)

    def table(self, document: Mapping[str, Any]) -> list[str]:
        results = document["results"]
        lines = [
            f"{name:14} {row['seconds']:8.3f} s  {row['tokens_per_second']:10,} tokens/s  "
            f"{row['tflops_per_rank']:8.2f} TFLOP/s a rank = {row['share_of_matmul']:.0%} of a matrix product"
            for name, row in ((name, results[name]) for name in ("update", "old_logprobs"))
        ]
        rate, dummies, mfu = results["matmul_tflops"], results["dummy_fraction"], results["mfu"]
        of_peak = "" if mfu is None else f" (MFU {mfu:.1%})"
        return [
            *lines,
            f"matrix product {rate} TFLOP/s; dummies {dummies:.1%} of the tokens",
            f"whole step {results['whole_step_seconds']} s{of_peak}, {results['shadow_seconds']} s of it for shadow "
            f"scores (cosine {results['shadow_cosine']})",
            f"then memory released in {results['release_seconds']} s, "
            f"probe of {_PROBE_TOKENS} tokens in {results['probe_seconds']} s",
            f"most memory of a rank {results['gpu_peak_gib']} GiB on the GPU; planned {results['planned_gib']} GiB",
        ]


def _measure(settings: TrainerSettings, engine: Stopwatch, config: Config, samples: Sequence[Sample]) -> dict[str, Any]:
    batch = TrainBatch.of(samples, config.algorithm)
    every = [list(range(len(samples)))]
    state, steps, passes, shadows, dummies = AlgorithmState(), list[float](), list[float](), list[float](), 0.0
    cosine, peak = math.nan, 0.0
    for step in range(1, settings.warmup + settings.runs + 1):
        began = time.perf_counter()
        compute_old_logprobs(engine.compute_logprobs, batch, config, every)
        middle = time.perf_counter()
        measure = partial(compare_gradients, engine, state)
        result = train_step(engine, samples, config, step=step, state=state, measure=measure)
        shadows.append(result.measured.get(metrics.SHADOW_SECONDS, 0.0))
        if step == 1:
            cosine = result.measured.get(metrics.SHADOW_COSINE, math.nan)
        peak = max(peak, result.policy.highest.get(metrics.GPU_PEAK, 0.0))
        passes.append(middle - began)
        steps.append(time.perf_counter() - middle)
        engine.finish_step(release=settings.release)
        dummies = 1 - result.real_tokens / result.forwarded_tokens
    rate = matmul_flops(settings.device, settings.product)
    timed = (engine.seconds, passes, steps, shadows, engine.release_seconds, engine.probe_seconds)
    update, logprobs, whole, shadow, release, probe = (statistics.median(part[settings.warmup :]) for part in timed)
    if settings.profile:  # after the medians: the engine measures this step, too
        profile(lambda: train_step(engine, samples, config, step=step + 1, state=state), Path(settings.profile))
        engine.finish_step(release=settings.release)
        profile(engine.probe, Path(f"{settings.profile}.probe"))
    phase = whole - shadow + release
    rates = speed(engine.machine, result.policy_work, result.critic_work, seconds=phase, rank_count=settings.ranks)
    lengths = np.array([len(s.token_ids) for s in samples], np.float64)
    tokens = float(lengths.sum())
    flop = forward_flop(settings.shape, tokens=tokens, squares=float((lengths**2).sum()))
    return {
        "parameters": parameter_count(settings.shape),
        "samples": len(samples),
        "tokens": int(tokens),
        "matmul_tflops": round(rate / 1e12, 2),
        "update": _row(update, tokens, 3 * flop / settings.ranks, rate),
        "old_logprobs": _row(logprobs, tokens, flop / settings.ranks, rate),
        "whole_step_seconds": round(whole, 3),
        "mfu": rates.get(metrics.MFU),  # of the whole train phase, as in runs
        "shadow_seconds": round(shadow, 3),  # part of the whole step
        "shadow_cosine": None if math.isnan(cosine) else round(cosine, 6),  # of the first step
        "release_seconds": round(release, 4),
        "probe_seconds": round(probe, 4),
        "dummy_fraction": round(dummies, 4),
        "gpu_peak_gib": round(peak, 3),
        "planned_gib": round(_planned_gib(config), 3),
    }


def _planned_gib(config: Config) -> float:
    """Return what `fourfold plan` expects of a rank, without the program's own memory."""
    trainer = memory_plan(config, model_sizes(config))[0]
    return (trainer.total - trainer.programs) / GIB


def _row(seconds: float, tokens: float, flop: float, rate: float) -> dict[str, float]:
    """Return the rates of one pass with `flop` on each rank."""
    return {
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds),
        "tflops_per_rank": round(flop / seconds / 1e12, 3),
        "share_of_matmul": round(flop / seconds / rate, 3),
    }


if __name__ == "__main__":
    sys.exit(run_script(TrainerBenchmark()))
