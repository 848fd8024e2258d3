"""The smallest recipe that a test of the trainer needs."""

from __future__ import annotations

from typing import Any

from fourfold.config import Config

_TABLES: dict[str, Any] = {
    "name": "toy",
    "steps": 10,
    "model": {"source": "toy", "max_context_tokens": 12},
    "data": {"train": {"path": "train.jsonl"}},
    "sampling": {"max_new_tokens": 8},
    "batch": {"prompts_per_step": 4, "group_size": 3},
}


def make_recipe(**tables: Any) -> Config:
    """Return the recipe with these tables; their keys are added to those of a table that it has."""
    merged = dict(_TABLES)
    for name, value in tables.items():
        merged[name] = {**merged.get(name, {}), **value} if isinstance(value, dict) else value
    return Config.model_validate(merged)
