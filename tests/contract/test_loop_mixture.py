"""A run with a mixture of two files that is killed: its prompts stay those of the seed and the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fourfold.model import folder
from fourfold.model.tokenizer import Tokenizer
from fourfold_coordinator.data.prompts import load_prompts
from tests.fakes.stage import Stage, check_books, fresh_processes
from tests.fakes.toy import write_data

STEPS = 8


def attempts(stage: Stage) -> dict[int, tuple[str, str]]:
    """Return source and text of the prompt at each position that was trained on."""
    return {int(line["group_id"][1:8]): (line["source"], line["prompt"]) for line in stage.lines("samples.jsonl")}


async def test_a_mixture_goes_on_in_its_order_after_a_kill(make_stage: Callable[..., Stage], tmp_path: Path) -> None:
    train: list[dict[str, Any]] = [
        {"path": str(write_data(tmp_path / "large.jsonl")), "weight": 2.0},
        {"path": str(write_data(tmp_path / "tiny.jsonl", digits=1)), "weight": 1.0},
    ]
    stage = make_stage(steps=STEPS, data={"train": train, "holdout": None}, evaluation={"every_steps": 100})
    reached = asyncio.Event()

    async def stop(step: int) -> None:
        if step == 5:
            reached.set()
            await asyncio.sleep(30)

    stage.trainer.on_train = stop
    await stage.start()
    async with asyncio.timeout(20):
        await reached.wait()
    await stage.kill()
    before = attempts(stage)
    stage.trainer.on_train = None
    await fresh_processes(stage)
    await stage.start()
    assert await stage.finish() == 0
    check_books(stage)
    assert stage.trainer.loaded == [4]
    prompts = load_prompts(stage.config, Tokenizer.load(folder.resolve(stage.config.model.source)))
    pure = {position: (prompts.at(position).source, prompts.at(position).text) for position in range(3 * STEPS)}
    after = attempts(stage)
    assert before.items() <= after.items() and after == pure
    for row in stage.lines("metrics.jsonl"):
        sources = [source for position, (source, _) in pure.items() if position // 3 == row["step"] - 1]
        shares = {name: row.get(f"data/{name}/share", 0) for name in ("large", "tiny")}
        assert shares == {name: sources.count(name) / 3 for name in shares}
        assert all(0 <= row[f"data/{name}/reward"] <= 1 for name in set(sources))
