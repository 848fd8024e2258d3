"""Several held-out sets in a run, and evaluations without a trainer, by the real coordinator with toy services."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fourfold.coordinator.v1 import run_service_pb2 as run_pb
from fourfold.errors import FourfoldError
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold.service.lifecycle import ServeOptions
from tests.fakes.stage import Stage, watch_for
from tests.fakes.toy import toy_answer, toy_logprobs
from tests.fakes.toy_rollout import FakeRollout
from tests.fakes.toy_scorers import FakeReward


def write_set(path: Path, factors: range) -> Path:
    rows = [{"question": f"{a} * 11 =", "answer": str(a * 11)} for a in factors]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class EvaluationStage(Stage):
    """A folder in which a model is evaluated, without a trainer."""

    def options(self) -> ServeOptions:
        return dataclasses.replace(super().options(), evaluate=True)

    @property
    def members(self) -> list[Any]:
        return [*self.rollouts, self.reward]

    def evaluation(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "evaluation.json").read_text())
        return found


@pytest.fixture
async def make_evaluation(tmp_path: Path) -> Any:
    stages: list[EvaluationStage] = []

    def make(**changes: Any) -> EvaluationStage:
        stages.append(EvaluationStage(tmp_path, **changes))
        return stages[-1]

    yield make
    for stage in stages:
        await stage.close()


async def test_a_run_evaluates_several_sets_each_with_its_own_sampling(
    make_stage: Callable[..., Stage], tmp_path: Path
) -> None:
    hard = {"path": str(write_set(tmp_path / "hard.jsonl", range(3))), "samples_per_prompt": 4, "temperature": 0.5}
    greedy = {"path": str(write_set(tmp_path / "easy.jsonl", range(4))), "name": "greedy", "temperature": 0.0}
    stage = make_stage(steps=2, data={"eval": [hard, greedy | {"samples_per_prompt": 1, "max_new_tokens": 5}]})
    await stage.start()
    done = await watch_for(stage, lambda s: s.phase == run_pb.RUN_PHASE_DONE)
    await stage.check_end()

    sets = stage.report()["eval_after"]["sets"]
    assert [(s["name"], s["answer_count"]) for s in sets] == [("holdout", 16), ("hard", 12), ("greedy", 4)]
    assert [[each["k"] for each in s["pass_at"]] for s in sets] == [[1, 2], [1, 2, 4], [1]]
    after = stage.report()["eval_after"]
    assert after["score"] == pytest.approx(sum(s["score"] for s in sets) / 3)
    assert [(s.name, s.mean_score) for s in done.evals[-1].sets] == [(s["name"], s["score"]) for s in sets]

    row = stage.lines("metrics.jsonl")[-1]
    assert row["eval/score"] == after["score"] and row["eval/hard/score"] == sets[1]["score"]
    # Scores are 0 or 1, and so one answer has the mean score as its pass rate.
    assert row["eval/hard/pass_at_1"] == pytest.approx(row["eval/hard/score"])
    assert row["eval/hard/pass_at_1"] <= row["eval/hard/pass_at_2"] <= row["eval/hard/pass_at_4"]
    assert row["eval/hard/maj_at_1"] == row["eval/hard/pass_at_1"]

    asked = {
        r.request_id.split("-")[1]: r.sampling_params for r in stage.rollouts[0].requests if r.request_id[0] == "e"
    }
    assert {name: (round(p.temperature, 6), p.max_tokens) for name, p in asked.items()} == {
        "holdout": (1.0, 8), "hard": (0.5, 8), "greedy": (0.0, 5)
    }  # fmt: skip


async def test_a_set_without_a_score_leaves_the_evaluation_out(
    make_stage: Callable[..., Stage], tmp_path: Path
) -> None:
    stage = make_stage(steps=2, data={"eval": {"path": str(write_set(tmp_path / "hard.jsonl", range(3)))}})

    def abstain(item: reward.ScoreItem) -> reward.SampleScore | None:
        return reward.SampleScore(abstain_reason="NO_IDEA") if "-hard-" in item.experience.sample_id else None

    stage.reward.outcome = abstain
    await stage.start()
    assert await stage.finish() == 0
    assert stage.report()["evals"] == [], "a mean over the other sets cannot be compared with others"


async def test_an_evaluation_repeats_that_of_a_run_with_the_same_weights(
    make_stage: Callable[..., Stage], make_evaluation: Callable[..., EvaluationStage]
) -> None:
    settings = {"samples_per_prompt": 4, "every_steps": 2}
    stage = make_stage(steps=2, evaluation=settings)
    await stage.start()
    assert await stage.finish() == 0
    before, examples = stage.report()["eval_before"], stage.report()["answers_before"]

    again = make_evaluation(steps=2, evaluation=settings)
    await again.start()
    assert await again.finish() == 0
    (found,) = again.evaluation()["sets"]
    (expected,) = before["sets"]
    assert {**found, "seconds": 0} == {
        **expected, "seconds": 0, "prompts": 8, "samples_per_prompt": 4, "temperature": 1.0, "max_new_tokens": 8
    }  # fmt: skip
    assert again.evaluation()["score"] == before["score"] and again.evaluation()["scorers"] == ["toy@1"]
    lines = again.lines("answers.jsonl")
    assert len(lines) == 32 and sum(line["success"] for line in lines) == sum(line["score"] for line in lines)
    completions = {(line["prompt"], line["completion"]) for line in lines}
    assert {(each["prompt"], each["completion"]) for each in examples} <= completions


async def test_an_evaluation_waits_for_an_engine_with_the_model_of_the_recipe(
    make_evaluation: Callable[..., EvaluationStage],
) -> None:
    stage = make_evaluation()
    stage.rollouts[0].version = 3  # of a run that it served before
    await stage.start()
    status = await watch_for(stage, lambda s: "version 3 of a run" in s.waiting_for)
    assert "restart it with the model to evaluate" in status.waiting_for
    other = FakeRollout("rollout-1", stage.config)
    stage.rollouts.append(other)
    await other.join(stage.address)
    assert await stage.finish() == 0
    assert other.requests and not stage.rollouts[0].requests


async def test_an_engine_that_dies_in_an_evaluation_is_replaced(
    make_evaluation: Callable[..., EvaluationStage],
) -> None:
    stage = make_evaluation()
    first = stage.rollouts[0]

    async def die() -> None:
        first.on_generate = None
        stage.rollouts.append(FakeRollout("rollout-0", stage.config))
        await first.stop_answering()
        await stage.rollouts[-1].join(stage.address)
        raise FourfoldError("the engine died")

    first.on_generate = die
    await stage.start()
    assert await stage.finish() == 0
    (found,) = stage.evaluation()["sets"]
    assert (found["answer_count"], found["missing_count"]) == (16, 0) and stage.rollouts[1].requests


async def test_a_set_that_no_scorer_scores_is_named(make_evaluation: Callable[..., EvaluationStage]) -> None:
    stage = make_evaluation()
    stage.reward = FakeReward("reward-0", stage.config)
    stage.reward.outcome = lambda item: reward.SampleScore(abstain_reason="NO_IDEA")
    await stage.start()
    assert await stage.finish() == 0
    found = stage.evaluation()
    assert (found["score"], found["sets"], found["unscored"]) == (None, [], ["holdout"])
    assert {line["dropped"] for line in stage.lines("answers.jsonl")} == {"NO_IDEA"}


TASK = """
task: toy_products
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
{more}
"""
EXACT = """
generation_kwargs: {until: ["\\n"], max_gen_toks: 5, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOICE = """
doc_to_choice: "{{[answer, '7']}}"
doc_to_target: 0
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "more", "metric"), [
    ("generate_until", EXACT, "exact_match,none"), ("multiple_choice", CHOICE, "acc,none"),
])  # fmt: skip
async def test_tasks_of_the_harness_run_on_the_engines(
    make_evaluation: Callable[..., EvaluationStage], tmp_path: Path, kind: str, more: str, metric: str
) -> None:
    pytest.importorskip("lm_eval", reason="tests/packaging runs it with the extra lm-eval")
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    data = write_set(tmp_path / "products.jsonl", range(12))
    text = TASK.format(data=data, cache=tmp_path / "cache", kind=kind, more=more)
    (tasks / "toy.yaml").write_text(text)
    stage = make_evaluation(data={"holdout": None})
    (stage.folder / "lm-eval.json").write_text(json.dumps({"tasks": ["toy_products"], "include_path": str(tasks)}))
    await stage.start()
    assert await stage.finish(120) == 0
    result = stage.evaluation()["lm_eval"]["toy_products"]
    prompts = [r for r in stage.rollouts[0].requests if r.request_id.startswith("lm-eval")]
    assert result["sample_len"] == 12 and {r.sampling_params.temperature for r in prompts} == {0.0}
    if kind == "generate_until":
        assert len(prompts) == 12 and {r.sampling_params.max_tokens for r in prompts} == {5}
        right = [toy_answer(f"user {a} * 11 =", 0, 0)[0] == str(a * 11) for a in range(12)]  # as `FakeRollout` asks
    else:

        def score(answer: str) -> float:
            return float(toy_logprobs(0, np.array([0, *stage.rollouts[0]._encode(answer)]))[1:].sum())

        right = [score(str(a * 11)) >= score("7") for a in range(12)]
    assert result[metric] == pytest.approx(sum(right) / 12) and 0 < sum(right) < 12


@pytest.mark.slow
async def test_a_task_that_the_harness_does_not_have_ends_the_evaluation(
    make_evaluation: Callable[..., EvaluationStage], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval", reason="tests/packaging runs it with the extra lm-eval")
    stage = make_evaluation(data={"holdout": None})
    (stage.folder / "lm-eval.json").write_text(json.dumps({"tasks": ["nothing"], "include_path": ""}))
    await stage.start()
    assert await stage.finish(60) == 1
    assert "--lm-eval nothing: lm-evaluation-harness has no such task" in capsys.readouterr().err
