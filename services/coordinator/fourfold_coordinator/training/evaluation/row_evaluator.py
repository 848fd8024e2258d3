"""Measures held-out rows: their loss by log-probabilities of the trainer, or the accuracy of its reward model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, TypeAlias

import numpy as np

from fourfold.arrays import Float32Array
from fourfold.errors import PeerFault, WrongState
from fourfold.sample import Sample
from fourfold.text import format_score

from ...reporting.estimators import clustered_interval
from ...routing.replica import Replica, ReplicaKey
from ...routing.trainer_session import TrainerSession
from ...rows.held_out import HeldOutRows
from ...state.eval_results import EvalRow, Evaluation, Measure, SetResult, half_width, mean_of_sets

log = logging.getLogger("fourfold.coordinator")

_Measured: TypeAlias = tuple[list[float], list[str], float, float | None]
"""A value for each row, pair or step, whose mean is the score of the set; the group of each; mean tokens of an answer;
the mean loss of a step."""

Scored: TypeAlias = Literal["", "answers", "steps"]
"""What a reward model that is trained scores; empty: none is trained."""
_CALL_TOKENS: Final = 1 << 20  # of 4 bytes: a call takes at most 8 MiB
_NOT_FINITE: Final = "NOT_FINITE"  # reason of the client for log-probabilities that are not


class RowEvaluator:
    """A `PolicyEvaluator` without engines. The score of a set is minus its loss per token, so that higher is better.

    That of a reward model is its accuracy: the share of pairs whose preferred answer has the greater score. A pair of
    equal scores counts half. That of a process reward model is the share of steps whose score is above 0 where their
    label is above 0.5, and not above 0 elsewhere; the loss is measured, too.
    """

    def __init__(
        self,
        sets: Sequence[HeldOutRows],
        session: TrainerSession,
        *,
        timeout: float,
        scored: Scored = "",
    ) -> None:
        """Evaluate `sets`; a call to the trainer may take `timeout` seconds. `scored`: what its reward model scores."""
        self._sets, self._session, self._timeout = tuple(sets), session, timeout
        self._values = {"": self._loss, "answers": self._accuracy, "steps": self._step_accuracy}[scored]
        self._measure: Measure = "accuracy" if scored else "loss"

    async def run(
        self, *, step: int, version: int, engine: ReplicaKey | None, on_progress: Callable[[int, int], None]
    ) -> Evaluation | None:
        """Evaluate the present weights of the trainer; None without held-out sets."""
        if not self._sets:
            return None
        total, done, results = sum(len(each.units) for each in self._sets), 0, list[SetResult]()
        for each in self._sets:

            def report(count: int, before: int = done) -> None:
                on_progress(before + count, total)

            results.append(await self._evaluate(each, report))
            done += len(each.units)
        score, interval = mean_of_sets(results)
        count = sum(result.answer_count for result in results)
        text = format_score(score, interval, count, measure=self._measure)
        text += "".join(f" {each.name}_loss={each.loss:.4f}" for each in results if each.loss is not None)
        log.info("evaluation finished: step=%d held_out_%s=%s", step, self._measure, text)
        row = EvalRow(
            step=step,
            score=score,
            half_width=half_width(interval),
            answer_count=count,
            missing_count=0,
            answers=[],
            sets=tuple(results),
        )
        return Evaluation(row=row, oldest_version=version, newest_version=version)

    async def _evaluate(self, held_out: HeldOutRows, on_progress: Callable[[int], None]) -> SetResult:
        began = time.monotonic()
        values, clusters, tokens, loss = await self._values(held_out, on_progress)
        _, interval = clustered_interval(values, clusters)
        return SetResult(
            name=held_out.name,
            score=sum(values) / len(values),
            half_width=half_width(interval),
            interval=interval,
            answer_count=len(values),
            missing_count=0,
            tokens_per_answer=tokens,
            seconds=round(time.monotonic() - began, 3),
            pass_at=(),
            majority_at=(),
            measure=self._measure,
            loss=loss,
        )

    async def _loss(self, held_out: HeldOutRows, on_progress: Callable[[int], None]) -> _Measured:
        sums, counts, clusters = list[float](), list[int](), list[str]()
        for part in _parts(held_out):
            rows = await self._logprobs([sample for sample, _ in part])
            for (sample, group), logprobs in zip(part, rows, strict=True):
                sums.append(-float(logprobs[sample.loss_mask].sum(dtype=np.float64)))
                counts.append(int(np.count_nonzero(sample.loss_mask)))
                clusters.append(str(group))
            on_progress(len(sums))
        loss, mean_count = sum(sums) / sum(counts), sum(counts) / len(counts)
        # The loss is a ratio of two sums. These values have it as their mean, and its variance as theirs.
        values = [-loss - (total - loss * count) / mean_count for total, count in zip(sums, counts, strict=True)]
        return values, clusters, mean_count, None

    async def _accuracy(self, held_out: HeldOutRows, on_progress: Callable[[int], None]) -> _Measured:
        scores, lengths, clusters = list[float](), list[int](), list[str]()
        for part in _parts(held_out):
            scores += await self._scores([sample for sample, _ in part])
            lengths += [len(sample.token_ids) for sample, _ in part]
            clusters += [str(group) for _, group in part]
            on_progress(len(scores) // 2)
        # The samples of a pair are neighbours, that of the preferred answer first.
        values = [float(1 + np.sign(one - two)) / 2 for one, two in zip(scores[0::2], scores[1::2], strict=True)]
        return values, clusters[0::2], sum(lengths) / len(lengths), None

    async def _step_accuracy(self, held_out: HeldOutRows, on_progress: Callable[[int], None]) -> _Measured:
        scores, labels, lengths, clusters = list[Float32Array](), list[Float32Array](), list[int](), list[str]()
        for part in _parts(held_out):
            for (sample, group), row in zip(part, await self._step_scores([s for s, _ in part]), strict=True):
                scores.append(row[sample.loss_mask])
                labels.append(sample.token_rewards[sample.loss_mask])
                lengths.append(len(sample.token_ids))
                clusters += [str(group)] * len(scores[-1])
            on_progress(len(scores))
        h, t = np.concatenate(scores).astype(np.float64), np.concatenate(labels).astype(np.float64)
        loss = float((t * np.logaddexp(0, -h) + (1 - t) * np.logaddexp(0, h)).mean())  # that of `step-labels`
        return ((h > 0) == (t > 0.5)).astype(float).tolist(), clusters, sum(lengths) / len(lengths), loss

    async def _logprobs(self, samples: Sequence[Sample]) -> list[Float32Array]:
        async def compute(trainer: Replica) -> list[Float32Array]:
            try:
                return await trainer.trainer.compute_logprobs(samples, timeout=self._timeout)
            except PeerFault as error:
                if error.reason != _NOT_FINITE:
                    raise
                # The same weights would answer the same when they are asked again.
                raise WrongState(
                    f"the training has diverged: {error.message}; lower trainer.learning_rate, and resume from a "
                    f"checkpoint or start a new run"
                ) from None

        return await self._session.call("ComputeLogprobs", compute)

    async def _scores(self, samples: Sequence[Sample]) -> list[float]:
        timeout = self._timeout
        return await self._session.call("ComputeLogprobs", lambda r: r.trainer.compute_scores(samples, timeout=timeout))

    async def _step_scores(self, samples: Sequence[Sample]) -> list[Float32Array]:
        timeout = self._timeout
        return await self._session.call(
            "ComputeLogprobs", lambda r: r.trainer.compute_step_scores(samples, timeout=timeout)
        )


def _parts(held_out: HeldOutRows) -> Iterator[list[tuple[Sample, int]]]:
    """Yield the samples of a set in parts that one call can carry."""
    part, tokens = list[tuple[Sample, int]](), 0
    for sample, group in held_out.samples():
        if part and tokens + len(sample.token_ids) > _CALL_TOKENS:
            yield part
            part, tokens = [], 0
        part.append((sample, group))
        tokens += len(sample.token_ids)
    if part:
        yield part
