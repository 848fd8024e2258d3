"""The accuracy of a reward model on held-out pairs, and the scores that a trainer may answer."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fourfold.config.sources import DataSourceConfig
from fourfold.model.tokenizer import Tokenizer
from fourfold.sample import Sample
from fourfold_coordinator.rows.encode import EncodingSettings
from fourfold_coordinator.rows.held_out import HeldOutRows
from fourfold_coordinator.rows.normal import Form
from fourfold_coordinator.rows.store import prepare_store
from fourfold_coordinator.training.evaluation import row_evaluator as module
from fourfold_coordinator.training.evaluation.row_evaluator import RowEvaluator
from tests.support.chat_templates import write_tokenizer
from tests.support.template_shapes import SHAPES

# What the trainer answers for each pair: the preferred answer first.
SCORES = {"a": (2.0, 1.0), "b": (-1.0, 0.5), "c": (0.25, 0.25), "d": (3.0, -3.0)}


def config_of(reads: str) -> Any:
    """Return what the evaluator reads of the recipe of a reward model."""
    return SimpleNamespace(
        trainer=SimpleNamespace(step_timeout_seconds=5),
        evaluation=SimpleNamespace(metric=""),
        algorithm=SimpleNamespace(loss=SimpleNamespace(trains="scores", reads=reads, of_answers=True)),
    )


class Session:
    """A trainer that scores a text by its letter and its side."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.calls: list[int] = []

    async def call(self, name: str, work: Callable[[Any], Awaitable[Any]]) -> Any:
        assert name == "ComputeLogprobs"
        return await work(SimpleNamespace(trainer=self))

    async def compute_scores(self, samples: Sequence[Sample], *, timeout: float) -> list[float]:
        self.calls.append(len(samples))
        texts = [self.tokenizer.decode(s.token_ids.tolist()) for s in samples]
        return [SCORES[text[text.index("which ") + 6]]["other" in text] for text in texts]


@pytest.mark.parametrize("tokens", [1 << 20, 50])
async def test_a_pair_in_order_counts_1_and_one_of_equal_scores_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    monkeypatch.setattr(module, "_CALL_TOKENS", tokens)  # a call then carries half of a pair
    write_tokenizer(tmp_path, SHAPES["qwen25"], {"eos_token": "<|im_end|>"})
    tokenizer = Tokenizer.load(tmp_path)
    rows = [
        {"prompt": [{"role": "user", "content": f"which {name}"}], "chosen": "this", "rejected": "the other"}
        for name in SCORES
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = EncodingSettings(form=Form.PAIRS, max_tokens=200, scored=True)
    store = prepare_store(DataSourceConfig(path=str(tmp_path / "rows.jsonl")), settings, tokenizer, tmp_path / "tokens")
    session: Any = Session(tokenizer)
    held_out = HeldOutRows(name="holdout", stores=[store], units=np.arange(4))
    progress = list[tuple[int, int]]()
    evaluator = RowEvaluator([held_out], session, config_of("pairs"))
    found = await evaluator.run(step=3, version=2, engine=None, on_progress=lambda *numbers: progress.append(numbers))
    assert found is not None and found.row.score == pytest.approx((1 + 0 + 0.5 + 1) / 4)
    assert found.row.measure == "accuracy" and found.row.answer_count == 4 and progress[-1] == (4, 4)
    assert sum(session.calls) == 8 and (len(session.calls) > 4) == (tokens == 50)
    interval = found.row.sets[0].interval
    assert interval is not None and interval[0] < 0.625 < interval[1]


async def test_held_out_steps_have_an_accuracy_and_a_loss(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, SHAPES["qwen25"], {"eos_token": "<|im_end|>"})
    rows = [
        {"prompt": "a", "completions": ["one", "two", "three"], "labels": [1, 0.25, 0]},
        {"prompt": "b", "completions": ["four"], "labels": [True]},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = EncodingSettings(form=Form.STEPS, max_tokens=200)
    source = DataSourceConfig(path=str(tmp_path / "rows.jsonl"))
    store = prepare_store(source, settings, Tokenizer.load(tmp_path), tmp_path / "tokens")
    scores = {0: [2.0, 0.5, -1.0], 1: [-3.0]}

    class Trainer:
        async def compute_step_scores(self, samples: Sequence[Sample], *, timeout: float) -> list[Any]:
            found = [np.full(len(sample.token_ids), 9, np.float32) for sample in samples]
            for i, sample in enumerate(samples):
                found[i][sample.loss_mask] = scores[i]
            return found

    class Calls:
        async def call(self, name: str, work: Callable[[Any], Awaitable[Any]]) -> Any:
            return await work(SimpleNamespace(trainer=Trainer()))

    held_out = HeldOutRows(name="holdout", stores=[store], units=np.arange(2))
    evaluator = RowEvaluator([held_out], Calls(), config_of("steps"))
    found = await evaluator.run(step=3, version=2, engine=None, on_progress=lambda *_: None)
    assert found is not None and found.row.score == pytest.approx(2 / 4) and found.row.answer_count == 4
    assert found.row.measure == "step accuracy"
    pairs = [(2.0, 1.0), (0.5, 0.25), (-1.0, 0.0), (-3.0, 1.0)]
    right = [1 / (1 + np.exp(-h)) for h, _ in pairs]
    wanted = -np.mean([t * np.log(s) + (1 - t) * np.log(1 - s) for s, (_, t) in zip(right, pairs, strict=True)])
    assert found.row.sets[0].loss == pytest.approx(wanted, rel=1e-6)
    assert found.row.sets[0].metrics()["loss"] == found.row.sets[0].loss
