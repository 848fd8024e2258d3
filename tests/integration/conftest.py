"""Fixtures of the integration tests: tiny models, each written once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return `tiny_model(family, seed=0, dtype="bfloat16")`, which gives a model folder (do not write into it)."""
    made: dict[tuple[str, int, str], Path] = {}

    def make(family: str, seed: int = 0, dtype: str = "bfloat16") -> Path:
        from tests.support.tiny_models import write_tiny_model  # imports torch and transformers: only when a test asks

        key = (family, seed, dtype)
        if key not in made:
            folder = tmp_path_factory.mktemp(f"{family}-{seed}-{dtype}-")
            made[key] = write_tiny_model(folder, family, seed=seed, dtype=dtype)
        return made[key]

    return make
