"""What the benchmarks of the trainer's passes share: their options, samples, recipe and ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from fourfold.arrays import Int32Array, Sample, VersionSpan
from fourfold.config import Config
from fourfold_bench.harness import BenchmarkSettings, option
from fourfold_bench.models import SHAPE_NAMES
from fourfold_trainer.ranks.distributed_engine import DistributedEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSettings(BenchmarkSettings):
    """The options of a benchmark of the trainer's passes."""

    shape: str = option("of a model with random weights", default="tiny", choices=SHAPE_NAMES)
    device: str = option(default="cpu", choices=("cpu", "cuda"))
    ranks: int = option(default=1, least=1)
    dtype: str = option(default="bfloat16", choices=("bfloat16", "float32"))
    head_dtype: str = option("logits: of the weights' dtype, or float32", default="", choices=("", "float32"))
    tokens: int = option("tokens of one step, about", default=8192, least=1)
    longest: int = option("tokens of the longest sample", default=512, least=16)
    micro_batch: int = option("tokens of one pass of one rank", default=2048)
    liger: bool = option("fused kernels", default=False)


def make_samples(total: int, longest: int, vocabulary: int) -> list[Sample]:
    """Return samples of random tokens and mixed lengths, about `total` tokens, as of `samples_of`."""
    random = np.random.default_rng(0)
    rows: list[Int32Array] = []
    while total > 0:
        count = int(np.clip(random.lognormal(np.log(longest / 4), 0.8), 16, longest))
        rows.append(random.integers(0, vocabulary, count).astype(np.int32))
        total -= count
    return samples_of(rows, vocabulary)


def samples_of(rows: Sequence[Int32Array], vocabulary: int) -> list[Sample]:
    """Return samples with random scores in groups of eight, an eighth of each row its prompt."""
    random = np.random.default_rng(1)
    samples: list[Sample] = []
    for row in rows:
        count = len(row)
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
                token_ids=row,
                behavior_logprobs=np.where(mask, -np.log(vocabulary), np.nan).astype(np.float32),
                action_mask=mask,
                loss_mask=mask,
                version_spans=spans,
                temperature=1.0,
                score=float(random.random()),
            )
        )
    if len(samples) % 8 == 1:  # a group of one has no advantage
        samples[-1] = replace(samples[-1], group_id=samples[-2].group_id)
    return samples


def recipe(
    settings: PassSettings,
    model: Path,
    sample_count: int,
    *,
    batch: Mapping[str, Any] = MappingProxyType({}),
    algorithm: Mapping[str, Any] = MappingProxyType({}),
    trainer: Mapping[str, Any] = MappingProxyType({}),
) -> Config:
    """Return the recipe of a run; the tables have keys besides those of `settings`."""
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
                **batch,
            },
            "algorithm": dict(algorithm),
            "trainer": {
                "device": settings.device,
                "ranks": settings.ranks,
                "liger_kernels": settings.liger,
                **trainer,
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
