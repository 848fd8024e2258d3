"""What a step keeps in memory besides its samples, and that the way to save memory changes no bit."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fourfold.algorithm.state import AlgorithmState
from fourfold.config import Config, load
from fourfold.rpc.codec import encode_stream
from fourfold.sample import Sample, VersionSpan
from fourfold.sample.wire import decode, encode_parts
from fourfold.trainer.v1.trainer_service_pb2 import TrainStepRequest
from fourfold_trainer.engine import UpdateSettings, UpdateSums
from fourfold_trainer.service.batch_stream import IncomingBatch
from fourfold_trainer.service.metrics import summarise
from fourfold_trainer.step import batch as step_batch
from fourfold_trainer.step.train_step import train_step
from tests.fakes.trainer_engine import FakeEngine
from tests.support.recipes import make_recipe

SAMPLES, GROUP, TOKENS, PROMPT = 512, 8, 512, 64


class LastingEngine(FakeEngine):
    """An engine that keeps no batch, and returns what a rank measures of each token."""

    def update_policy(self, shares: Sequence[Sequence[Any]], settings: UpdateSettings) -> UpdateSums:
        tokens = sum(len(batch.advantages) for share in shares for batch in share)
        return UpdateSums(loss=1.0, token_count=tokens, grad_norm=1.0)


def config() -> Config:
    return make_recipe(
        model={"max_context_tokens": TOKENS},
        sampling={"max_new_tokens": TOKENS - PROMPT},
        batch={"prompts_per_step": SAMPLES // GROUP, "group_size": GROUP, "tokens_per_micro_batch": 4096},
    )


def samples() -> Iterator[Sample]:
    rng = np.random.default_rng(0)
    mask = np.arange(TOKENS) >= PROMPT
    for index in range(SAMPLES):
        yield Sample(
            sample_id=f"p{index // GROUP}-{index % GROUP}",
            group_id=f"p{index // GROUP}",
            token_ids=rng.integers(0, 100, TOKENS, dtype=np.int32),
            behavior_logprobs=np.where(mask, -rng.random(TOKENS, dtype=np.float32), np.float32(np.nan)),
            action_mask=mask,
            loss_mask=mask,
            version_spans=(
                VersionSpan(policy_version=-1, token_count=PROMPT),
                VersionSpan(policy_version=0, token_count=TOKENS - PROMPT),
            ),
            temperature=1.0,
            score=float(index % 2),
        )


def test_a_step_never_takes_more_than_twice_the_memory_of_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_batch, "_CHUNK_TOKENS", 4 * TOKENS)  # as small a share of the batch as in a large one
    recipe, wire = config(), 0
    limits = {"vocabulary_size": 100, "max_tokens": TOKENS}
    stream = encode_stream(TrainStepRequest(step=1), 2, map(encode_parts, samples()), limit=1 << 16)
    next(samples())  # numpy loads its generators on first use, which must not count
    tracemalloc.start()
    try:
        incoming = IncomingBatch(1, recipe, lambda message: decode(message, **limits), keep=True)
        for data in stream:
            wire += len(data)
            incoming.add(TrainStepRequest.FromString(data))
        received = tracemalloc.get_traced_memory()[0]
        result = train_step(LastingEngine(), incoming.samples, recipe, step=1, state=AlgorithmState())
        summarise(result, recipe)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert wire > SAMPLES * TOKENS * 9
    assert received < 1.5 * wire, "arrays of 9 bytes per token, and a kilobyte of objects per sample"
    assert peak < 2 * wire


@pytest.mark.parametrize("whiten", ["off", "full"])
@pytest.mark.parametrize("kind", ["grpo", "reinforce"])
def test_targets_do_not_depend_on_how_many_samples_are_computed_at_once(
    monkeypatch: pytest.MonkeyPatch, kind: str, whiten: str
) -> None:
    recipe = config()
    algorithm = {"advantage": {"kind": kind}, "whiten": whiten}
    recipe = Config.model_validate(recipe.model_dump(mode="json") | {"algorithm": algorithm})
    found = []
    for chunk in (1, 1000, 1 << 20):
        monkeypatch.setattr(step_batch, "_CHUNK_TOKENS", chunk)
        few = list(itertools.islice(samples(), 64))
        result = train_step(LastingEngine(), few, recipe, step=1, state=AlgorithmState())
        found.append([part.tobytes() for part in result.targets.advantages])
    assert found[0] == found[1] == found[2] and len(found[0]) == len(few)


def test_a_full_step_with_the_tokens_of_a_teacher_is_taken() -> None:
    recipe = load(Path(__file__).parents[3] / "recipes/distill.toml")
    tokens, k = recipe.model.max_context_tokens, recipe.algorithm.loss.teacher_tokens
    ids = np.tile(np.arange(k, dtype=np.int32), (tokens, 1))
    mask = np.arange(tokens) >= 1
    row = replace(
        next(iter(samples())),
        token_ids=np.zeros(tokens, np.int32),
        behavior_logprobs=np.empty(0, np.float32),
        version_spans=(),
        action_mask=mask,
        loss_mask=mask,
        teacher_ids=ids,
        teacher_logprobs=np.full((tokens, k), -9, np.float32),
    )
    limits = {"vocabulary_size": 100, "max_tokens": tokens}
    incoming = IncomingBatch(1, recipe, lambda message: decode(message, **limits), keep=True)
    for data in encode_stream(TrainStepRequest(step=1), 2, [encode_parts(row)] * recipe.batch.samples_per_step):
        incoming.add(TrainStepRequest.FromString(data))
    assert len(incoming.samples) == recipe.batch.samples_per_step


@pytest.mark.slow
def test_a_step_may_be_larger_than_two_gibibytes() -> None:
    """No message of protobuf may be that large; the batch goes in messages of a mebibyte."""
    tokens = 100_000
    recipe = Config.model_validate(
        config().model_dump(mode="json")
        | {
            "model": {"source": "none", "max_context_tokens": tokens},
            "batch": {"prompts_per_step": 300, "group_size": 8, "tokens_per_micro_batch": tokens},
        }
    )
    mask = np.arange(tokens) >= PROMPT
    sample = replace(
        next(iter(samples())),
        token_ids=np.zeros(tokens, np.int32),
        behavior_logprobs=np.where(mask, np.float32(-1), np.float32(np.nan)),
        action_mask=mask,
        loss_mask=mask,
    )
    wire, incoming = 0, IncomingBatch(1, recipe, lambda message: sample, keep=False)
    for data in encode_stream(TrainStepRequest(step=1), 2, (encode_parts(sample) for _ in range(2400))):
        wire += len(data)
        incoming.add(TrainStepRequest.FromString(data))
    assert wire > 1 << 31 and len(incoming.sha256) == 64
