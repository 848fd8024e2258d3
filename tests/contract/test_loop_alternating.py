"""A run at policy lag 0 trains on the very samples of the alternating loop that came before asynchronous training."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Final

import pytest

from fourfold.arrays import Sample
from tests.contract.test_loop_filter import constant_at
from tests.fakes.stage import Stage

# Digests of everything that the trainer received in a run of the release before `[asynchrony]` (commit 8b8ff61).
BEFORE: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "plain": (
        {},
        "48c8c393d973915045d569d070be02c37010e1701f4542997731b3e1b82a772e",
    ),
    "filter": (
        {"algorithm": {"filter": {"keep": "varied", "max_rounds": 4}}},
        "4726f1da6a6b7d493db632ab320fd00d518e9b9fc90aa1f57faceb4290c566b6",
    ),
    "remax": (
        {"algorithm": {"advantage": {"kind": "remax"}}},
        "6858e55b7cb9bfcfca2e9ced94f3b2abf41c630ba61a1e1b306791baa6a6aed7",
    ),
}


def digest(batches: list[list[Sample]]) -> str:
    """Return a SHA-256 (hex) of the batches, in order, with every field that training depends on."""
    result = hashlib.sha256()
    for step, samples in enumerate(batches):
        for s in samples:
            facts = (step, s.sample_id, s.group_id, s.score, s.baseline_score, s.temperature, s.truncated)
            spans = [(span.policy_version, span.token_count) for span in s.version_spans]
            result.update(repr((facts, spans)).encode())
            for array in (s.token_ids, s.behavior_logprobs, s.action_mask, s.loss_mask):
                result.update(array.tobytes())
    return result.hexdigest()


@pytest.mark.parametrize("kind", BEFORE)
async def test_a_run_without_a_lag_is_the_run_that_it_was(make_stage: Callable[..., Stage], kind: str) -> None:
    changes, before = BEFORE[kind]
    stage, batches = make_stage(steps=6, **changes), list[list[Sample]]()
    if kind == "filter":
        stage.reward.outcome = constant_at(every=3)
    stage.trainer.on_batch = batches.append
    await stage.start()
    assert await stage.finish() == 0
    assert digest(batches) == before
