"""A reward model in the real trainer: its scores are those of plain transformers and of the reward service."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from fourfold import metrics as m
from fourfold.arrays import EMPTY_FLOATS
from fourfold.errors import InvalidInput, WrongState
from fourfold.model.classifier import ClassifierFolder
from fourfold.rpc.channel import open_channel
from fourfold.sample import Sample
from fourfold.sample.wire import encode
from fourfold.trainer.client import AsyncTrainerClient
from fourfold_reward.models.packed import PackedPasses
from tests.fakes.trainer_engine import sample
from tests.integration.test_trainer_service import Service
from tests.support.trainer_driver import VOCABULARY

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]


def pairs(step: int, pad: int) -> list[Sample]:
    """Return six pairs; one answer of each second pair ends with two tokens that transformers takes for padding."""
    found = []
    for i, (one, two) in enumerate([(2, 9), (12, 1), (4, 4), (1, 7), (6, 3), (3, 5)]):
        for side, length in enumerate((one, two)):
            made = sample(
                f"{step}-{i}-{side}",
                group=str(i),
                score=1.0 - side,
                completion=length,
                seed=step,
                vocabulary=VOCABULARY,
            )
            ids = made.token_ids.copy()
            ids[-2:] = pad if i % 2 and side else ids[-2:]
            found.append(replace(made, token_ids=ids, behavior_logprobs=EMPTY_FLOATS, version_spans=()))
    return found


def transformers_scores(model: Any, samples: Sequence[Sample], pad: int, *, side: str) -> torch.Tensor:
    """Return the scores of one padded batch."""
    width = max(len(s.token_ids) for s in samples)
    ids, mask = torch.full((len(samples), width), pad), torch.zeros(len(samples), width, dtype=torch.int64)
    for row, one in enumerate(samples):
        place = slice(0, len(one.token_ids)) if side == "right" else slice(width - len(one.token_ids), width)
        ids[row, place], mask[row, place] = torch.from_numpy(one.token_ids).long(), 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    scores: torch.Tensor = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, 0]
    return scores


def load(folder: str, *, steps: bool = False) -> Any:
    kind = transformers.AutoModelForTokenClassification if steps else transformers.AutoModelForSequenceClassification
    return kind.from_pretrained(folder, dtype="float32").eval()


async def test_scores_are_those_of_transformers_and_of_the_reward_service(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    llama = tiny_model("llama", 0, "float32")
    tables = '[algorithm]\npreset = "reward-model"\n[algorithm.loss]\nkind = "bradley-terry"\ncenter_coef = 0.01'
    trainer = Service(
        llama, tmp_path, ranks=2, dtype="float32", timeout=120, samples="rows_per_step = 6", tables=tables
    )
    pad = int(json.loads((llama / "config.json").read_text())["pad_token_id"])
    seen = pairs(9, pad)
    try:
        channel = open_channel(trainer.wait_ready(), None)
        client = AsyncTrainerClient(channel, peer="trainer-0")

        async def train(step: int) -> dict[str, float]:
            answer = await client.train_step(step, [encode(s) for s in pairs(step, pad)], timeout=100)
            assert answer.policy_version == step and not answer.skipped_reason
            return dict(answer.metrics)

        assert await client.compute_scores(seen, timeout=60) == [0.0] * 12, "the head begins at 0"
        found = await train(1)
        assert found[m.POLICY_LOSS] == pytest.approx(math.log(2)) and found[m.SCORE_STD] == 0
        model = load(await client.export_model("first", timeout=60))
        found = await train(2)
        check_step(model, pairs(2, pad), pad, found)

        assert await client.save_checkpoint(score=0.5, timeout=60) == 2
        scores = await client.compute_scores(seen, timeout=60)
        again = await train(3)
        assert await client.compute_scores(seen, timeout=60) != scores
        await client.load_checkpoint(2, timeout=60)
        assert await client.compute_scores(seen, timeout=60) == scores
        exported = await client.export_model("model", timeout=60)
        repeated = await train(3)
        assert [repeated[name] for name in (m.POLICY_LOSS, m.GRAD_NORM)] == [again[m.POLICY_LOSS], again[m.GRAD_NORM]]
        check_export(Path(exported), seen, scores, pad)
        with pytest.raises(InvalidInput, match="the recipe trains a reward model; set include_values alone"):
            await client.compute_logprobs(seen, timeout=60)
        with pytest.raises(WrongState, match="the recipe trains a reward model"):
            await client.forward_backward([seen[0].token_ids], [np.zeros(len(seen[0].token_ids))], step=4, timeout=60)
        await channel.close()
    finally:
        trainer.end()


def step_rows(step: int) -> list[Sample]:
    """Return six answers of one to six steps with soft labels."""
    found = []
    for i, (length, every) in enumerate([(9, 2), (12, 2), (4, 4), (7, 3), (20, 5), (3, 1)]):
        made = sample(f"{step}-{i}", group=str(i), score=1.0, completion=length, seed=step, vocabulary=VOCABULARY)
        ends = made.loss_mask & (np.cumsum(made.loss_mask) % every == 0)
        labels = (np.random.default_rng(step + i).random(len(ends)) * ends).astype(np.float32)
        rows = replace(made, loss_mask=ends, token_rewards=labels)
        found.append(replace(rows, behavior_logprobs=EMPTY_FLOATS, version_spans=()))
    return found


async def test_scores_of_steps_are_those_of_transformers_and_of_the_reward_service(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    llama = tiny_model("llama", 0, "float32")
    tables = '[algorithm]\npreset = "process-reward"'
    trainer = Service(
        llama, tmp_path, ranks=2, dtype="float32", timeout=120, samples="rows_per_step = 6", tables=tables
    )
    try:
        channel = open_channel(trainer.wait_ready(), None)
        client = AsyncTrainerClient(channel, peer="trainer-0")
        for step in (1, 2):
            answer = await client.train_step(step, [encode(s) for s in step_rows(step)], timeout=100)
            found = dict(answer.metrics)
            if step == 1:
                assert found[m.POLICY_LOSS] == pytest.approx(math.log(2)), "the head begins at 0"
                first = load(await client.export_model("first", timeout=60), steps=True)
            else:
                check_labelled_step(first, step_rows(2), found)
        seen = step_rows(9)
        scores = await client.compute_step_scores(seen, timeout=60)
        folder = Path(await client.export_model("model", timeout=60))
        await channel.close()
    finally:
        trainer.end()
    assert ClassifierFolder.read(str(folder), process=True).labels == 1
    model, same = load(str(folder), steps=True), np.testing.assert_allclose
    ends = [np.flatnonzero(one.loss_mask) for one in seen]
    served = PackedPasses(model, device=torch.device("cpu")).start([s.token_ids for s in seen], ends)()
    same(served, np.concatenate([row[at] for row, at in zip(scores, ends, strict=True)]), atol=1e-5)
    plain = load(str(folder), steps=True)
    for one, row in zip(seen, scores, strict=True):
        with torch.no_grad():
            logits = plain(input_ids=torch.from_numpy(one.token_ids).long()[None]).logits[0, :, 0]
        assert np.isnan(row[0]) and np.ptp(row[1:]) > 1e-4
        same(logits.numpy()[1:], row[1:], atol=1e-5)


def check_labelled_step(model: Any, samples: Sequence[Sample], found: dict[str, float]) -> None:
    """Compare a step with the loss and the gradient of plain transformers, one answer after the other."""
    model.zero_grad()
    count, parts = sum(int(s.loss_mask.sum()) for s in samples), []
    for one in samples:
        logits = model(input_ids=torch.from_numpy(one.token_ids).long()[None]).logits[0, :, 0]
        scores, labels = logits[torch.from_numpy(one.loss_mask)], torch.from_numpy(one.token_rewards[one.loss_mask])
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, labels, reduction="sum") / count
        loss.backward()  # type: ignore[no-untyped-call]
        parts.append(float(loss.detach()))
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert found[m.POLICY_LOSS] == pytest.approx(sum(parts), abs=1e-6)
    assert found[m.GRAD_NORM] == pytest.approx(float(norm), rel=1e-4)


def check_step(model: Any, samples: Sequence[Sample], pad: int, found: dict[str, float]) -> None:
    """Compare a step with the loss and the gradient of plain transformers, all pairs in one padded batch."""
    scores = transformers_scores(model, samples, pad, side="right")
    chosen, rejected = scores[0::2], scores[1::2]
    loss = (-torch.nn.functional.logsigmoid(chosen - rejected) + 0.01 * (chosen + rejected) ** 2).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    chosen, rejected, scores = (values.detach() for values in (chosen, rejected, scores))
    assert found[m.POLICY_LOSS] == pytest.approx(float(loss.detach()), abs=1e-6)
    assert found[m.GRAD_NORM] == pytest.approx(float(norm), rel=1e-4)
    assert found[m.PAIR_MARGIN] == pytest.approx(float((chosen - rejected).mean()), abs=1e-5)
    assert found[m.SCORE_ACCURACY] == pytest.approx(float((chosen > rejected).float().mean()))
    assert found[m.SCORE_STD] == pytest.approx(float(scores.std(correction=0)), abs=1e-5)


def check_export(folder: Path, samples: Sequence[Sample], scores: list[float], pad: int) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"] and config["problem_type"] == "regression"
    assert (config["num_labels"], config["pad_token_id"]) == (1, pad)
    assert ClassifierFolder.read(str(folder)).labels == 1
    model = load(str(folder))
    same: Any = np.testing.assert_allclose
    with torch.no_grad():
        for side in ("left", "right"):
            same(transformers_scores(model, samples, pad, side=side).numpy(), scores, atol=1e-5)
    passes = PackedPasses(model, device=torch.device("cpu"))
    same(passes.start([s.token_ids for s in samples])(), scores, atol=1e-5)
    assert np.ptp(scores) > 0.01
