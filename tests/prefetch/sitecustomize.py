"""Makes DeepSpeed prefetch few parameters at once, on every rank. Python imports this at its start, from PYTHONPATH.

A tiny model fits into DeepSpeed's default prefetch bucket (50 million elements), and nothing stays in flight after a
pass. With a small bucket it behaves as a large model does.
"""

from __future__ import annotations

from typing import Any, Final

import fourfold_trainer.zero.deepspeed_model
from fourfold_trainer.zero import deepspeed_config

_BUCKET_ELEMENTS: Final = 100_000
_original = deepspeed_config.deepspeed_config


def _small_prefetch(*args: Any, **kwargs: Any) -> dict[str, Any]:
    found = _original(*args, **kwargs)
    found["zero_optimization"]["stage3_prefetch_bucket_size"] = _BUCKET_ELEMENTS
    return found


fourfold_trainer.zero.deepspeed_model.deepspeed_config = _small_prefetch  # type: ignore[attr-defined]
