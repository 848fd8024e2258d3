"""A run with a curriculum: prompts that are always or never solved become rare, also after a restart."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fourfold.reward.v1 import reward_service_pb2 as reward
from tests.fakes.stage import Stage, check_books, fresh_processes
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


async def test_prompts_without_a_signal_become_rare(make_stage: Callable[..., Stage], tmp_path: Path) -> None:
    stage = make(make_stage, tmp_path / "data.jsonl", data={"curriculum": {}})
    await stage.start()
    assert await stage.finish() == 0
    check_books(stage)
    found = drawn(stage)
    assert found["mixed"] > 2 * (found["solved"] + found["failed"]), "a quarter of the prompts"
    rows = stage.lines("metrics.jsonl")
    assert rows[0]["groups/prompts_skipped"] == 0 and sum(row["groups/prompts_skipped"] for row in rows) > STEPS


async def test_without_a_curriculum_every_prompt_is_drawn(make_stage: Callable[..., Stage], tmp_path: Path) -> None:
    stage = make(make_stage, tmp_path / "data.jsonl")
    await stage.start()
    assert await stage.finish() == 0
    assert [p for step in positions(stage).values() for p in step] == list(range(3 * STEPS))
    assert "groups/prompts_skipped" not in stage.lines("metrics.jsonl")[0]


@pytest.mark.parametrize("limit", [0, 1])
async def test_a_resumed_run_skips_the_same_prompts(
    make_stage: Callable[..., Stage], tmp_path: Path, limit: int
) -> None:
    """With a lag, draws depend on the time: then the run only has to go on, with fewer prompts of those kinds."""
    lag = {"asynchrony": {"max_policy_lag": limit}}
    stage = make(make_stage, tmp_path / "data.jsonl", data={"curriculum": {}}, **lag)
    reached = asyncio.Event()

    async def stop(step: int) -> None:
        if step == 13:
            reached.set()
            await asyncio.sleep(30)

    stage.trainer.on_train = stop
    await stage.start()
    async with asyncio.timeout(60):
        await reached.wait()
    await stage.kill()
    before = positions(stage)
    stage.trainer.on_train = None
    await fresh_processes(stage)
    stage.reward.outcome = outcome
    await stage.start()
    assert await stage.finish() == 0
    check_books(stage)
    assert stage.trainer.loaded == [12]
    found = drawn(stage)
    assert found["mixed"] > found["solved"] + found["failed"]
    if limit:
        return
    whole = make(make_stage, tmp_path / "data.jsonl", data={"curriculum": {}})
    await whole.start()
    assert await whole.finish() == 0
    assert before | positions(stage) == positions(whole)
