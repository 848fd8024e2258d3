"""How fast the trainer trains: an update and an old-logprob pass, against the rate of one large matrix product.

A model of random weights and a step of samples with mixed lengths, through the trainer's own
step: rank 0 is this process, the others its children, as in the service. FLOP are counted
without recomputation: 6 N T + 12 L h sum(t^2) / 2 for an update, a third of it for a forward
pass (N parameters, T tokens, L layers, h hidden size, t tokens of a sample).

    python -m fourfold_bench.trainer_speed --shape 1.5b --ranks 2 --device cuda --tokens 524288 --save
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers

from fourfold.algorithm.state import AlgorithmState
from fourfold.arrays import Sample, VersionSpan
from fourfold.config import Config
from fourfold_bench import record
from fourfold_trainer.engine import UpdateSettings, UpdateSums
from fourfold_trainer.ranks.distributed_engine import DistributedEngine
from fourfold_trainer.step.micro_batches import compute_per_token
from fourfold_trainer.step.train_step import train_step

LIBRARIES: Final = ("torch", "transformers", "deepspeed", "numpy")
# Qwen2 of several sizes: layers, hidden, intermediate, heads, key and value heads, vocabulary.
SHAPES: Final = {
    "tiny": (2, 64, 128, 2, 1, 512),
    "0.43b": (24, 1024, 4096, 16, 8, 49_152),
    "0.5b": (24, 896, 4864, 14, 2, 151_936),
    "1.5b": (28, 1536, 8960, 12, 2, 151_936),
}


def write_model(folder: Path, shape: str, *, context: int, dtype: str) -> int:
    """Write a model of random weights; return its number of parameters."""
    layers, hidden, intermediate, heads, kv_heads, vocabulary = SHAPES[shape]
    config = transformers.Qwen2Config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=context,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    make: Any = transformers.Qwen2ForCausalLM
    model = make(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def make_samples(total: int, longest: int, vocabulary: int) -> list[Sample]:
    """Return samples of mixed lengths, about `total` tokens, an eighth of each its prompt, in groups of eight."""
    random = np.random.default_rng(0)
    samples: list[Sample] = []
    while total > 0:
        count = int(np.clip(random.lognormal(np.log(longest / 4), 0.8), 16, longest))
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
                token_ids=random.integers(0, vocabulary, count).astype(np.int32),
                behavior_logprobs=np.where(mask, -np.log(vocabulary), np.nan).astype(np.float32),
                action_mask=mask,
                loss_mask=mask,
                version_spans=spans,
                temperature=1.0,
                score=float(random.random()),
            )
        )
        total -= count
    if len(samples) % 8 == 1:  # a group of one has no advantage
        samples[-1] = replace(samples[-1], group_id=samples[-2].group_id)
    return samples


def recipe(options: argparse.Namespace, folder: Path, sample_count: int) -> Config:
    """Return the recipe of the run."""
    return Config.model_validate(
        {
            "name": "speed",
            "steps": 100,
            "model": {"source": str(folder), "dtype": options.dtype, "max_context_tokens": options.longest},
            "data": {"train": {"path": "unused.jsonl"}},
            "sampling": {"max_new_tokens": options.longest - 1},
            "batch": {
                "prompts_per_step": -(-sample_count // 8),
                "group_size": 8,
                "tokens_per_micro_batch": options.micro_batch,
            },
            "trainer": {
                "device": options.device,
                "ranks": options.ranks,
                "zero_stage": options.zero_stage,
                "gradient_checkpointing": options.checkpointing,
                "liger_kernels": options.liger,
            },
        }
    )


class Stopwatch:
    """Passes calls on to an engine, and measures its updates."""

    def __init__(self, engine: DistributedEngine) -> None:
        self.engine = engine
        self.seconds: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def update_policy(self, shares: Any, settings: UpdateSettings) -> UpdateSums:
        """Measure one optimizer step; its sums are numbers, so the device has finished."""
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
    """Write where rank 0's time goes, by operation and by kernel."""
    with torch.profiler.profile() as profiler:
        work()
    order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    averages = profiler.key_averages()
    tables = [averages.table(sort_by=key, row_limit=40, max_name_column_width=90) for key in {order, "cpu_time_total"}]
    path.write_text("\n".join(tables), encoding="utf-8")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run everything; return the numbers."""
    parameters = write_model(folder / "model", options.shape, context=options.longest, dtype=options.dtype)
    layers, hidden, *_, vocabulary = SHAPES[options.shape]
    samples = make_samples(options.tokens, options.longest, vocabulary)
    config = recipe(options, folder / "model", len(samples))
    engine = Stopwatch(
        DistributedEngine(config, folder / "model", run_dir=folder, member_id="trainer-0", on_death=print)
    )
    lengths = np.array([len(s.token_ids) for s in samples], np.float64)
    forward = 2 * parameters * lengths.sum() + 4 * layers * hidden * (lengths**2).sum() / 2
    positions = [np.flatnonzero(s.action_mask) for s in samples]
    state, steps, lookups, dummies = AlgorithmState(), list[float](), list[float](), 0.0
    for step in range(1, options.warmup + options.runs + 1):
        began = time.perf_counter()
        compute_per_token(engine.compute_logprobs, samples, positions, config)
        middle = time.perf_counter()
        result = train_step(engine, samples, config, step=step, state=state)
        lookups.append(middle - began)
        steps.append(time.perf_counter() - middle)
        dummies = 1 - result.real_tokens / result.forwarded_tokens
    if options.profile:
        profile(lambda: train_step(engine, samples, config, step=step + 1, state=state), options.profile)
    rate = matmul_flops(options.device, options.product)
    update, lookup, whole = (statistics.median(part[options.warmup :]) for part in (engine.seconds, lookups, steps))
    peak = torch.cuda.max_memory_allocated() if options.device == "cuda" else 0
    engine.leave()
    engine.close()
    return {
        "parameters": parameters,
        "samples": len(samples),
        "tokens": int(lengths.sum()),
        "matmul_tflops": round(rate / 1e12, 2),
        "update": _row(update, lengths.sum(), 3 * forward, rate, options.ranks),
        "old_logprobs": _row(lookup, lengths.sum(), forward, rate, options.ranks),
        "whole_step_seconds": round(whole, 3),
        "dummy_fraction": round(dummies, 4),
        "peak_memory_bytes_rank_0": peak,
    }


def _row(seconds: float, tokens: float, flops: float, rate: float, ranks: int) -> dict[str, float]:
    return {
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds),
        "tflops_per_rank": round(flops / seconds / ranks / 1e12, 3),
        "share_of_matmul": round(flops / seconds / ranks / rate, 3),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and, where asked, write down."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--zero-stage", type=int, default=3)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--tokens", type=int, default=8192, help="of one step, about")
    parser.add_argument("--longest", type=int, default=512, help="tokens of the longest sample")
    parser.add_argument("--micro-batch", type=int, default=2048, help="tokens of one pass of one rank")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--liger", action="store_true", help="with Liger's kernels")
    parser.add_argument("--product", type=int, default=1024, help="size of the matrix product; 8192 on a GPU")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--profile", type=Path, help="profile one more step into this file")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        results = measure(options, Path(folder))
    for name in ("update", "old_logprobs"):
        row = results[name]
        print(
            f"{name:14} {row['seconds']:8.3f} s  {row['tokens_per_second']:10,} tokens/s  "
            f"{row['tflops_per_rank']:8.2f} TFLOP/s a rank = {row['share_of_matmul']:.0%} of a matrix product"
        )
    print(f"matrix product {results['matmul_tflops']} TFLOP/s; dummies {results['dummy_fraction']:.1%} of the tokens")
    if options.save:
        parameters = {key: value for key, value in vars(options).items() if key not in ("save", "profile")}
        label = f"trainer_speed-{options.shape}-{options.ranks}x{options.device}"
        print(record.write("trainer_speed", parameters=parameters, results=results, libraries=LIBRARIES, label=label))
    return 0


if __name__ == "__main__":
    sys.exit(main())
