"""Evaluates a model without a trainer, for `fourfold eval`, and writes the results to the run's folder.

evaluation.json  {"score", "half_width", "interval": as in report.json, null if a set has no score; "seed"; "success";
                 "seconds"; "scorers": name@version each; "sets": as in `state/eval_results.py`, with "prompts",
                 "samples_per_prompt", "temperature" and "max_new_tokens"; "unscored": names of the sets without a
                 scored answer; "lm_eval": results of the harness by task}. `fourfold eval` adds "model", and "step" of
                 the weights, null if they are of no run.
answers.jsonl    a line for each answer: {"set", "prompt_index", "task_group", "sample_id", "prompt", "completion",
                 "answer": the reference answer, "final_answer": of the completion, "score": null if it has none,
                 "terms": score by scorer of several, "success", "tokens", "truncated", "dropped": why it has no score}
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fourfold.answers import final_answer
from fourfold.coordinator.v1 import run_service_pb2 as run_pb
from fourfold.model.tokenizer import Tokenizer

from ...launch.run_names import ANSWERS_FILE, EVALUATION_FILE, HARNESS_FILE
from ...state.eval_results import SetResult, half_width, mean_of_sets
from ...state.files import replace_file
from ...state.samples import Trajectory
from ..context import RunContext
from .evaluator import AnsweredSet, Evaluator

log = logging.getLogger("fourfold.coordinator")


class StandaloneEvaluation:
    """One evaluation of the model that the engines have loaded."""

    def __init__(self, context: RunContext, evaluator: Evaluator, tokenizer: Tokenizer) -> None:
        self._context, self._config, self._tokenizer = context, context.config, tokenizer
        self._evaluator = evaluator

    async def run(self) -> None:
        """Wait for the services, sample and score all answers, and write the files. Raises ServiceMissing."""
        context, board = self._context, self._context.board
        await context.router.wait_for(context.required_services(evaluate=True), seconds=context.start_seconds)
        board.mark_started()
        board.set_phase(run_pb.RUN_PHASE_EVALUATING)
        context.tasks.begin()
        began = time.monotonic()
        answered = await self._evaluator.answer(step=0, version=0, engine=None, on_progress=board.set_answers)
        context.tasks.end()
        results = [each.result(self._config.evaluation.success) for each in answered]
        facts = {"seconds": round(time.monotonic() - began, 3), **self._facts(answered), **_summary(answered, results)}
        await context.disk.write_in_thread(self._write_answers, answered)
        await context.disk.write_in_thread(self._write, facts)  # written before the harness runs, which may fail
        if harness := await asyncio.to_thread(self._run_harness, asyncio.get_running_loop()):
            await context.disk.write_in_thread(self._write, {**facts, "lm_eval": harness})
        log.info("evaluation finished: folder=%s seconds=%.1f", context.folder, time.monotonic() - began)

    def _run_harness(self, loop: asyncio.AbstractEventLoop) -> dict[str, Any]:
        """Run the tasks of lm-evaluation-harness that the command has asked for, with calls on the event loop."""
        path = self._context.folder / HARNESS_FILE
        if not path.exists():
            return {}
        from .harness import run_tasks  # takes seconds, and needs the extra

        asked, context = json.loads(path.read_text(encoding="utf-8")), self._context
        return run_tasks(
            asked["tasks"],
            asked["include_path"],
            loop=loop,
            config=self._config,
            tokenizer=self._tokenizer,
            service_calls=context.service_calls,
            router=context.router,
        )

    def _facts(self, answered: Sequence[AnsweredSet]) -> dict[str, Any]:
        scorers = {a.sample.scorer for each in answered for a in _flat(each) if a.sample.scorer}
        config = self._config
        return {"seed": config.seed, "success": config.evaluation.success, "scorers": sorted(scorers), "lm_eval": {}}

    def _write(self, facts: Mapping[str, Any]) -> None:
        text = json.dumps(facts, indent=2, ensure_ascii=False, default=str)  # the harness has types of numpy
        replace_file(self._context.folder / EVALUATION_FILE, [text + "\n"])

    def _write_answers(self, answered: Sequence[AnsweredSet]) -> None:
        success = self._config.evaluation.success
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for each in answered for row in _rows(each, success))
        replace_file(self._context.folder / ANSWERS_FILE, lines)


def _summary(answered: Sequence[AnsweredSet], results: Sequence[SetResult | None]) -> dict[str, Any]:
    found = [result for result in results if result is not None]
    complete = bool(found) and len(found) == len(results)
    score, interval = mean_of_sets(found) if complete else (None, None)
    sets = [
        {
            **asdict(result),
            "prompts": len(each.held_out.prompts),
            "samples_per_prompt": each.held_out.rule.samples_per_prompt,
            "temperature": each.held_out.rule.temperature,
            "max_new_tokens": each.held_out.rule.max_new_tokens,
        }
        for each, result in zip(answered, results, strict=True)
        if result is not None
    ]
    unscored = [each.held_out.name for each, result in zip(answered, results, strict=True) if result is None]
    return {
        "score": score,
        "half_width": half_width(interval),
        "interval": interval,
        "sets": sets,
        "unscored": unscored,
    }


def _flat(answered: AnsweredSet) -> Iterator[Trajectory]:
    return (answer for answers in answered.answers for answer in answers)


def _rows(answered: AnsweredSet, success: float) -> Iterator[dict[str, Any]]:
    """Yield the lines of answers.jsonl of a set."""
    for answer in _flat(answered):
        score = answer.sample.score
        yield {
            "set": answered.held_out.name,
            "prompt_index": answer.prompt.index,
            "task_group": answer.prompt.group_key,
            "sample_id": answer.sample.sample_id,
            "prompt": answer.prompt_text,
            "completion": answer.completion,
            "answer": answer.prompt.answer,
            "final_answer": final_answer(answer.completion, answer.prompt.answer, prompt=answer.prompt_text),
            "score": score,
            "terms": {term.name: term.score for term in answer.sample.terms},
            "success": score is not None and score >= success,
            "tokens": answer.token_count,
            "truncated": answer.truncated,
            "dropped": answer.dropped,
        }
