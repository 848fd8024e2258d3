"""`fourfold sample` without processes: the real coordinator with toy services, and the files that it makes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from fourfold.algorithm.selection import SelectionConfig
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold_coordinator.cli.sample import _selection
from fourfold_coordinator.launch.run_names import GROUPS_FILE, SAMPLING_FILE
from fourfold_coordinator.routing.replica import GivenUp
from fourfold_coordinator.rows.forms import normalise, recognise
from fourfold_coordinator.rows.normal import Chat, RowFields
from fourfold_coordinator.state.sampled_rows import Sampling, places, write_rows
from fourfold_coordinator.training.evaluation import prompt_rows
from fourfold_coordinator.training.evaluation.answers import answer_prompt
from tests.contract.test_evaluation import EvaluationStage


@pytest.fixture
async def make_sampling(tmp_path: Path) -> AsyncIterator[Callable[..., EvaluationStage]]:
    stages: list[EvaluationStage] = []

    def make(select: str, prompts: int = 0, **changes: Any) -> EvaluationStage:
        stages.append(EvaluationStage(tmp_path, **changes))
        asked = Sampling(selection=_selection(select), prompts=prompts, truncated=False)
        (stages[-1].folder / SAMPLING_FILE).write_text(asked.model_dump_json())
        return stages[-1]

    yield make
    for stage in stages:
        await stage.close()


async def rows_of(stage: EvaluationStage) -> list[dict[str, Any]]:
    """Sample to the end; return the rows."""
    await stage.start()
    assert await stage.finish() == 0
    write_rows(stage.folder / GROUPS_FILE, stage.folder / "rows.jsonl")
    return stage.lines("rows.jsonl")


async def test_every_answer_to_every_training_prompt_is_a_row(make_sampling: Callable[..., EvaluationStage]) -> None:
    stage = make_sampling("none")
    rows = await rows_of(stage)
    prompts = Counter(row["prompt_index"] for row in rows)
    held_out = {line["prompt"][0]["content"] for line in rows}
    assert set(prompts.values()) == {4} and len(held_out) == len(prompts), "each prompt once, with its four answers"
    for row in rows:
        assert (row["prompt"][-1]["role"], row["completion"][0]["role"]) == ("user", "assistant")
        a, b = (int(text) for text in row["prompt"][-1]["content"].split("=")[0].split(" * "))
        assert row["score"] == float(row["completion"][0]["content"] == str(a * b))
        assert len(row["model_sha256"]) == len(row["recipe_sha256"]) == 64
    form = recognise(rows, RowFields(), "answers")
    (side,) = normalise(rows[0], form, RowFields()).sides
    assert form == "completion" and isinstance(side, Chat) and side.answers_from == len(rows[0]["prompt"])


async def test_the_selected_pairs_load_as_pairs(make_sampling: Callable[..., EvaluationStage]) -> None:
    rows = await rows_of(make_sampling("best-worst", prompts=12))
    assert 0 < len(rows) <= 12 and all(row["score_chosen"] > row["score_rejected"] for row in rows)
    form = recognise(rows, RowFields(), "pairs")
    chosen, rejected = normalise(rows[0], form, RowFields()).sides
    assert form == "pairs" and isinstance(chosen, Chat) and isinstance(rejected, Chat)
    assert chosen.messages[:-1] == rejected.messages[:-1] == rows[0]["prompt"]
    assert chosen.messages[-1]["content"] == rows[0]["chosen"][0]["content"]


async def test_a_killed_sampling_continues_with_the_prompts_that_have_no_line(
    make_sampling: Callable[..., EvaluationStage],
) -> None:
    stage = make_sampling("above,threshold=1", prompts=12)
    whole = await rows_of(stage)
    groups = stage.folder / GROUPS_FILE
    lines = groups.read_bytes().splitlines(keepends=True)
    groups.write_bytes(b"".join(lines[:5]) + lines[5][: len(lines[5]) // 2])  # as a killed process leaves it
    again = make_sampling("above,threshold=1", prompts=12)
    assert await rows_of(again) == whole and whole
    assert [position for position, _ in places(groups)] == list(range(12))
    asked = {request.request_id.split("/")[0] for request in again.rollouts[0].requests}
    assert len(asked) == 7, "prompts that are done are not sampled again"


async def test_an_answer_without_a_score_is_left_out_with_its_reason(
    make_sampling: Callable[..., EvaluationStage],
) -> None:
    stage = make_sampling("none", prompts=6)

    def abstain(item: reward.ScoreItem) -> reward.SampleScore | None:
        return reward.SampleScore(abstain_reason="NO_IDEA") if item.experience.sample_id == "sample-2-1" else None

    stage.reward.outcome = abstain
    rows = await rows_of(stage)
    lines = {line["position"]: line for line in stage.lines(GROUPS_FILE)}
    assert len(rows) == 23 and lines[2]["left_out"] == {"NO_IDEA": 1} and len(lines[2]["scores"]) == 3


async def test_lost_prompts_are_tried_again_and_many_of_them_end_the_sampling(
    make_sampling: Callable[..., EvaluationStage], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = {1, 4}

    async def fail(calls: Any, prompt: Any, *, name: str, **rest: Any) -> Any:
        if int(name.removeprefix("sample-")) in failing:
            raise GivenUp("the scorer is broken", reason="SCORER")
        return await answer_prompt(calls, prompt, name=name, **rest)

    monkeypatch.setattr(prompt_rows, "answer_prompt", fail)
    first = make_sampling("none", prompts=6)
    assert len(await rows_of(first)) == 16
    failing.clear()
    assert len(await rows_of(make_sampling("none", prompts=6))) == 24
    (first.folder / GROUPS_FILE).unlink()
    failing.update(range(40))
    broken = make_sampling("none", prompts=40)
    await broken.start()
    assert await broken.finish() == 1 and not (first.folder / GROUPS_FILE).exists()
    assert re.search(r"17 prompts are lost, .* answers \(0\); .* the scorer is broken", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("top,count=2", SelectionConfig(kind="top", count=2)),
        ("best-worst,min_margin=0.5", SelectionConfig(kind="best-worst", min_margin=0.5)),
    ],
)
def test_a_selection_has_the_keys_of_the_recipe(text: str, found: SelectionConfig) -> None:
    assert _selection(text) == found
