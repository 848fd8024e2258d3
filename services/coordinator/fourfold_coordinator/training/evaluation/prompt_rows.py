"""Samples and scores answers to the training prompts without a trainer, for `fourfold sample`, and makes rows of them.

The rows of a prompt are appended to groups.jsonl (`state/sampled_rows.py`) when all its answers are scored.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fourfold.algorithm.selection import SelectionConfig, pairs_of
from fourfold.coordinator.v1 import run_service_pb2 as run_pb
from fourfold.errors import Unavailable
from fourfold.host.disk import append_lines

from ...data.prompts import group_seed
from ...launch.run_names import GROUPS_FILE, SAMPLING_FILE
from ...routing.replica import GivenUp
from ...state.sampled_rows import Sampling, places
from ...state.samples import Trajectory
from ..context import RunContext
from .answers import answer_prompt

log = logging.getLogger("fourfold.coordinator")

_GROUPS: Final = 512  # prompts whose answers are sampled at the same time, as many as a run queues for its engines
_TRUNCATED: Final = "TRUNCATED"
_EMPTY: Final = "EMPTY"
_LEAST_LOST: Final = 16  # fewer lost prompts end no sampling


class StandaloneSampling:
    """Rows of the answers of the model that the engines have loaded."""

    def __init__(self, context: RunContext, digests: Mapping[str, str | None]) -> None:
        """Prepare; `digests` are columns of every row that name what the answers are from."""
        self._context, self._digests = context, digests
        self._asked = Sampling.model_validate_json((context.folder / SAMPLING_FILE).read_bytes())
        self._file = context.folder / GROUPS_FILE
        self._lost = self._done = 0

    async def run(self) -> None:
        """Wait for the services, and append a line for every prompt that has none.

        A prompt whose answers a service failed to make is left out; the next process tries it again.

        Raises:
            ServiceMissing: no service came in time.
            Unavailable: most prompts were lost.
        """
        context, board = self._context, self._context.board
        done = {position for position, _ in places(self._file)}
        await context.router.wait_for(context.required_services(evaluate=True), seconds=context.start_seconds)
        board.mark_started()
        board.set_phase(run_pb.RUN_PHASE_EVALUATING)
        count = self._asked.prompts or len(context.prompts.train)
        size = context.config.batch.group_size
        self._done = sum(position < count for position in done)
        board.set_answers(self._done * size, count * size)
        left = (position for position in range(count) if position not in done)

        async def work() -> None:
            for position in left:
                await self._sample(position)
                board.set_answers(self._done * size, count * size)

        await context.session.run_all(work() for _ in range(min(_GROUPS, count)))
        log.info("sampling finished: prompts=%d lost=%d", self._done, self._lost)

    async def _sample(self, position: int) -> None:
        context = self._context
        prompt, calls = context.prompts.at(position), context.service_calls
        try:
            answers = await answer_prompt(
                calls,
                prompt,
                name=f"sample-{position}",
                count=context.config.batch.group_size,
                seed=group_seed(context.config.seed, position, prompt),
                version=0,
                budget=calls.budget(),
            )
        except GivenUp as error:
            self._lost += 1
            log.warning("prompt lost: position=%d reason=%s: %s", position, error.reason, error)
            if self._lost > max(_LEAST_LOST, self._done):
                raise Unavailable(
                    f"{self._lost} prompts are lost, more than have answers ({self._done}); the last one: {error}; "
                    f"correct the cause, and start the command again"
                ) from None
            return
        line = json.dumps({"position": position, **self._line(answers)}, ensure_ascii=False)
        await context.disk.write(append_lines, self._file, line.encode() + b"\n")
        self._done += 1

    def _line(self, answers: Sequence[Trajectory]) -> dict[str, Any]:
        found, left_out = list[tuple[Trajectory, float]](), Counter[str]()
        for answer in answers:
            score = answer.sample.score
            cut = answer.truncated and not self._asked.truncated
            # A row ends with the end token, and without an answer it would be dropped.
            reason = answer.dropped or (_TRUNCATED if cut else "" if answer.completion.strip() else _EMPTY)
            if reason or score is None:
                left_out[reason] += 1
            else:
                found.append((answer, score))
        rows = make_rows(found, self._asked.selection, tools_field=self._context.config.data.tools_field)
        scores = [a.sample.score for a in answers if a.sample.score is not None]
        return {"rows": [{**row, **self._digests} for row in rows], "scores": scores, "left_out": left_out}


def make_rows(
    answers: Sequence[tuple[Trajectory, float]], rule: SelectionConfig, *, tools_field: str
) -> list[dict[str, Any]]:
    """Return the rows of the answers to one prompt, each with its score: of answers, or of pairs.

    They have the forms `completion` and `pairs` (`rows/forms.py`), of messages if the prompt has messages.
    """
    if not answers:
        return []
    prompt = answers[0][0].prompt
    messages = json.loads(prompt.messages_json) if prompt.messages_json else None
    texts = [a.completion if messages is None else [{"role": "assistant", "content": a.completion}] for a, _ in answers]
    scores = [score for _, score in answers]
    start: dict[str, Any] = {"prompt": prompt.text if messages is None else messages}
    tools = json.loads(prompt.metadata_json or "{}").get(tools_field)
    if messages is not None and tools:
        start["tools"] = tools
    end = {"prompt_index": prompt.index}
    chosen = rule.select(scores)
    if not rule.makes_pairs:
        return [{**start, "completion": texts[i], "score": scores[i], **end} for i in chosen]
    return [
        {
            **start,
            "chosen": texts[chosen[w]],
            "rejected": texts[chosen[o]],
            "score_chosen": scores[chosen[w]],
            "score_rejected": scores[chosen[o]],
            **end,
        }
        for w, o in pairs_of([scores[i] for i in chosen], rule.min_margin)
    ]
