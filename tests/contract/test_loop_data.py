"""Prompts of a run that is killed: a curriculum and a mixture of two files continue as in a run that was not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fourfold.model import folder
from fourfold.model.tokenizer import Tokenizer
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold_coordinator.data.load_prompts import load_prompts
from tests.fakes.stage import Stage, fresh_processes, hang_in_step, until
from tests.fakes.toy import write_data

STEPS = 24


def digits(text: str) -> tuple[int, int]:
    (found,) = re.findall(r"(\d) \* (\d)", text)
    return int(found[0]), int(found[1])


def outcome(item: reward.ScoreItem) -> reward.SampleScore:
    """Products with 0 are always solved, other ones with 1 never, and half of the attempts at the others are right."""
    pair = digits(item.prompt_text)
    right = 0 in pair or (1 not in pair and int(item.experience.sample_id[-1]) % 2 == 0)
    return reward.SampleScore(score=float(right))


def make(make_stage: Callable[..., Stage], path: Path, **changes: Any) -> Stage:
    data = {"train": {"path": str(write_data(path, digits=4))}, "holdout": None, **changes.pop("data", {})}
    stage = make_stage(steps=STEPS, data=data, evaluation={"every_steps": 100}, **changes)
    stage.reward.outcome = outcome
    return stage


def drawn(stage: Stage) -> Counter[str]:
    """Return how many groups the later steps trained on of each kind of product."""
    lines = [line for line in stage.lines("samples.jsonl") if line["step"] > 8 and line["sample_id"].endswith("-0")]
    kinds = ((0 in digits(line["prompt"]), 1 in digits(line["prompt"])) for line in lines)
    return Counter("solved" if zero else "failed" if one else "mixed" for zero, one in kinds)


def positions(stage: Stage) -> dict[int, list[int]]:
    return {step: sorted({int(name[1:8]) for name in ids}) for step, ids in stage.trainer.batches.items()}


async def test_a_resumed_run_skips_the_same_prompts(make_stage: Callable[..., Stage], tmp_path: Path) -> None:
    """Prompts without a signal become rare."""
    stage = make(make_stage, tmp_path / "data.jsonl", data={"curriculum": {}})
    reached = hang_in_step(stage, 13)
    await stage.start()
    await until(reached.is_set, 60)
    await stage.kill()
    before = positions(stage)
    await fresh_processes(stage)
    stage.reward.outcome = outcome
    await stage.complete()
    assert stage.trainer.loaded == [12]
    found = drawn(stage)
    assert found["mixed"] > 2 * (found["solved"] + found["failed"]), "a quarter of the prompts"
    whole = make(make_stage, tmp_path / "data.jsonl", data={"curriculum": {}})
    await whole.start()
    assert await whole.finish() == 0
    assert before | positions(stage) == positions(whole)
    rows = whole.lines("metrics.jsonl")
    assert rows[0]["groups/prompts_skipped"] == 0 and sum(row["groups/prompts_skipped"] for row in rows) > STEPS


MIXED_STEPS = 8


def attempts(stage: Stage) -> dict[int, tuple[str, str]]:
    """Return source and text of the prompt at each position that was trained on."""
    return {int(line["group_id"][1:8]): (line["source"], line["prompt"]) for line in stage.lines("samples.jsonl")}


async def test_a_mixture_goes_on_in_its_order_after_a_kill(make_stage: Callable[..., Stage], tmp_path: Path) -> None:
    train: list[dict[str, Any]] = [
        {"path": str(write_data(tmp_path / "large.jsonl")), "weight": 2.0},
        {"path": str(write_data(tmp_path / "tiny.jsonl", digits=1)), "weight": 1.0},
    ]
    stage = make_stage(steps=MIXED_STEPS, data={"train": train, "holdout": None}, evaluation={"every_steps": 100})
    reached = hang_in_step(stage, 5)
    await stage.start()
    await until(reached.is_set, 20)
    await stage.kill()
    before = attempts(stage)
    await fresh_processes(stage)
    await stage.complete()
    assert stage.trainer.loaded == [4]
    prompts = load_prompts(stage.config, Tokenizer.load(folder.resolve(stage.config.model.source)))
    pure = {position: (prompts.at(position).source, prompts.at(position).text) for position in range(3 * MIXED_STEPS)}
    after = attempts(stage)
    assert before.items() <= after.items() and after == pure
    for row in stage.lines("metrics.jsonl"):
        sources = [source for position, (source, _) in pure.items() if position // 3 == row["step"] - 1]
        shares = {name: row.get(f"data/{name}/share", 0) for name in ("large", "tiny")}
        assert shares == {name: sources.count(name) / 3 for name in shares}
        assert all(0 <= row[f"data/{name}/reward"] <= 1 for name in set(sources))
