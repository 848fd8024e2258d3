"""Writes the recipe of the step benchmark: prompts of made-up words, and a score that differs within a group."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from fourfold.config import Config, from_tables
from fourfold_bench.models import SHAPES, text_of
from fourfold_bench.step.benchmark import StepSettings

_NEVER: Final = 1_000_000
_SEED: Final = 17
_REWARD: Final = '''"""Scores that carry no information, but differ from sample to sample."""

import zlib


def score(sample):
    """Return a number in [0, 1)."""
    return zlib.crc32(sample.completion.encode()) / 2**32
'''


def write(settings: StepSettings, folder: Path, changes: Mapping[str, Mapping[str, Any]] | None = None) -> Config:
    """Write prompts and reward function into `folder`, where the model will be; return the recipe.

    The recipe has one step more than are measured, after which the run writes a checkpoint and exports the model.
    `changes` are keys of the recipe by table, which another benchmark adds or replaces.

    Raises:
        ConfigError: the settings break a rule of recipes; nothing was written.
    """
    total = settings.last_step + 1
    tables = _tables(settings, folder, total)
    tables |= {name: tables.get(name, {}) | dict(table) for name, table in (changes or {}).items()}
    config = from_tables(tables, source="the benchmark's recipe")
    random = np.random.default_rng(_SEED)
    words = SHAPES[settings.shape]["vocab_size"]
    rows = random.integers(0, words, (settings.prompts * total, settings.prompt_tokens)).tolist()
    lines = (json.dumps({"question": text_of(row), "answer": ""}) + "\n" for row in rows)
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "reward.py").write_text(_REWARD, encoding="utf-8")
    return config


def _tables(settings: StepSettings, folder: Path, total: int) -> dict[str, Any]:
    return {
        "name": "bench-step",
        "seed": _SEED,
        "steps": total,
        "model": {"source": str(folder / "model"), "max_context_tokens": settings.context},
        "data": {"train": {"path": str(folder / "prompts.jsonl")}, "chat": False},
        "batch": {
            "prompts_per_step": settings.prompts,
            "group_size": settings.group_size,
            "tokens_per_micro_batch": settings.tokens_per_micro_batch,
        },
        "sampling": {"max_new_tokens": settings.new_tokens, "temperature": 1.0},
        "algorithm": {"kl": {"coef": settings.kl_coef, "placement": "loss", "estimator": "k3"}},
        "placement": {"colocated": True if settings.on_gpus and settings.shares_gpus else None},
        "rollout": {
            "replicas": settings.replicas,
            "gpus_per_replica": int(settings.on_gpus),
            "kv_cache_gib": settings.engine_cache_gib,
            "max_concurrent_samples": settings.engine_samples,
            "sleep_mode": settings.sleep,
            **({"max_batched_tokens": settings.batched_tokens} if settings.batched_tokens else {}),
        },
        "trainer": {
            "ranks": settings.replicas,
            "device": settings.device,
            "zero_stage": 3,
            "liger_kernels": settings.liger,
            "gradient_checkpointing": settings.checkpointing,
            "offload": settings.offload,
        },
        "reward": {"function": f"{folder / 'reward.py'}:score"},
        "reference": {
            "replicas": settings.replicas if settings.kl_coef else 1,
            "device": settings.device,
            "tokens_per_batch": settings.reference_tokens,
        },
        # Sums of both sides are compared in the warm-up, and in measured steps as rarely as in any run.
        "weights": {"backend": settings.backend, "verify_first": settings.warm_up},
        "checkpoint": {"every_steps": _NEVER},
        "evaluation": {"every_steps": _NEVER},
    }
