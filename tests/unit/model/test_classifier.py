"""Limits of reward models, from their configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fourfold.model.classifier import ClassifierFolder


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}, 512),
        ({"model_type": "xlm-roberta", "max_position_embeddings": 514}, 512),
        ({"model_type": "camembert", "max_position_embeddings": 514, "pad_token_id": 0}, 513),
        ({"model_type": "bert", "max_position_embeddings": 512, "pad_token_id": 0}, 512),
        ({"model_type": "esm", "max_position_embeddings": None}, None),
    ],
)
def test_positions_before_the_first_token_hold_no_text(
    tmp_path: Path, config: dict[str, Any], longest: int | None
) -> None:
    assert ClassifierFolder(path=tmp_path, config=config, shapes={}).longest == longest
