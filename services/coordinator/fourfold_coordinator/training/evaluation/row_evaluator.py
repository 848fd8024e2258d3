"""Measures held-out rows by the trainer: the loss of answers, loss and accuracy of pairs and labels, or of scores."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Protocol, TypeAlias, TypeVar

import numpy as np

from fourfold.arrays import Float32Array
from fourfold.config.schema import Config
from fourfold.errors import ConfigError, PeerFault, WrongState
from fourfold.sample import Sample
from fourfold.text import format_score

from ...reporting.estimators import clustered_interval
from ...routing.replica import Replica, ReplicaKey
from ...rows.held_out import HeldOutRows
from ...rows.row_source import RowBatch
from ...state.eval_results import EvalRow, Evaluation, Measure, SetResult, half_width, mean_of_sets

log = logging.getLogger("fourfold.coordinator")

T = TypeVar("T")
Attach: TypeAlias = Callable[[RowBatch, int], tuple[Sample, ...]]
"""Returns the samples of a step with their reference log-probabilities; called in a thread."""


class Session(Protocol):
    """Calls the trainer, as `TrainerSession`."""

    async def call(self, name: str, work: Callable[[Replica], Awaitable[T]]) -> T:
        """Return what `work` returns for the trainer."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """The measures of one held-out set."""

    values: Sequence[float]  # of each row, pair or step; their mean is the score of the set
    clusters: Sequence[str]  # the group of each
    tokens: float  # mean tokens of an answer
    loss: float | None = None
    accuracy: float | None = None


_CALL_TOKENS: Final = 1 << 20  # after so many the progress is shown; the client divides them into requests
_NOT_FINITE: Final = "NOT_FINITE"  # reason of the client for log-probabilities that are not


class RowEvaluator:
    """A `PolicyEvaluator` without engines. The score of a set is what `evaluation.metric` says; higher is better.

    That is minus the loss: per token, or per pair or labelled answer. Or it is the accuracy: the share of pairs whose
    preferred answer has the greater reward or score, and of answers on the side of their label; equal ones count half.
    Of a process reward model it is the share of steps whose score is above 0 where their label is above 0.5, and not
    above 0 elsewhere.
    """

    def __init__(
        self,
        sets: Sequence[HeldOutRows],
        session: Session,
        config: Config,
        references: Mapping[str, Attach] = MappingProxyType({}),
    ) -> None:
        """Evaluate `sets`, by name with the log-probabilities of a reference if the loss compares with one."""
        self._sets, self._session, self._config, self._references = tuple(sets), session, config, references
        self._timeout, self._measure = config.trainer.step_timeout_seconds, measure_of(config)
        loss = config.algorithm.loss
        if loss.trains == "scores":
            self._values = self._step_accuracy if loss.reads == "steps" else self._accuracy
        else:
            self._values = self._units if loss.of_answers else self._loss

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
        log.info("evaluation finished: step=%d held_out_%s=%s", step, self._measure.replace(" ", "_"), text)
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
        found = await self._values(held_out, on_progress)
        _, interval = clustered_interval(found.values, found.clusters)
        return SetResult(
            name=held_out.name,
            score=sum(found.values) / len(found.values),
            half_width=half_width(interval),
            interval=interval,
            answer_count=len(found.values),
            missing_count=0,
            tokens_per_answer=found.tokens,
            seconds=round(time.monotonic() - began, 3),
            pass_at=(),
            majority_at=(),
            measure=self._measure,
            loss=found.loss,
            accuracy=found.accuracy,
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
        return _Measured(values=values, clusters=clusters, tokens=mean_count)

    async def _units(self, held_out: HeldOutRows, on_progress: Callable[[int], None]) -> _Measured:
        rows, reference = held_out.steps(self._config), self._references.get(held_out.name)
        losses, margins, clusters, counts = list[float](), list[float](), list[str](), list[int]()
        for step in range(1, rows.steps_of_pass + 1):
            batch = await asyncio.to_thread(rows.take, step)
            assert batch is not None, "a pass has this many steps"
            units = map(rows.unit_at, range(batch.first_position, batch.next_position))
            clusters += [str(int(store.index["group"][found[0]])) for store, found in units]
            if reference is not None:
                batch = replace(batch, samples=await asyncio.to_thread(reference, batch, step))
            for part in batch.parts():
                for values, more in zip((losses, margins), await self._unit_losses(part, step), strict=True):
                    values += more
            counts += [int(s.loss_mask.sum()) for s in batch.samples if s.score is not None]
            on_progress(len(losses))
        loss, tokens = sum(losses) / len(losses), sum(counts) / len(counts)
        right = [float(1 + np.sign(margin)) / 2 for margin in margins]
        if self._measure.endswith("accuracy") and not right:
            raise ConfigError(
                f"algorithm.loss.kind = `{self._config.algorithm.loss.kind}` has no margin, by whose sign "
                f'evaluation.metric = "accuracy" counts; set it to "loss", or report `pair/margin` in `means`'
            )
        return _Measured(
            values=[-value for value in losses] if self._measure.endswith("loss") else right,
            clusters=clusters,
            tokens=tokens,
            loss=loss,
            accuracy=sum(right) / len(right) if right else None,
        )

    async def _accuracy(self, held_out: HeldOutRows, on_progress: Callable[[int], None]) -> _Measured:
        scores, lengths, clusters = list[float](), list[int](), list[str]()
        for part in _parts(held_out):
            scores += await self._scores([sample for sample, _ in part])
            lengths += [len(sample.token_ids) for sample, _ in part]
            clusters += [str(group) for _, group in part]
            on_progress(len(scores) // 2)
        # The samples of a pair are neighbours, that of the preferred answer first.
        values = [float(1 + np.sign(one - two)) / 2 for one, two in zip(scores[0::2], scores[1::2], strict=True)]
        return _Measured(values=values, clusters=clusters[0::2], tokens=sum(lengths) / len(lengths))

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
        right = ((h > 0) == (t > 0.5)).astype(float).tolist()
        return _Measured(values=right, clusters=clusters, tokens=sum(lengths) / len(lengths), loss=loss)

    async def _logprobs(self, samples: Sequence[Sample]) -> list[Float32Array]:
        return await self._ask(lambda r: r.trainer.compute_logprobs(samples, timeout=self._timeout))

    async def _unit_losses(self, part: RowBatch, step: int) -> tuple[list[float], list[float]]:
        return await self._ask(lambda r: r.trainer.unit_losses(part.samples, step=step, timeout=self._timeout))

    async def _ask(self, ask: Callable[[Replica], Awaitable[T]]) -> T:
        async def compute(trainer: Replica) -> T:
            try:
                return await ask(trainer)
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
        return await self._ask(lambda r: r.trainer.compute_scores(samples, timeout=self._timeout))

    async def _step_scores(self, samples: Sequence[Sample]) -> list[Float32Array]:
        return await self._ask(lambda r: r.trainer.compute_step_scores(samples, timeout=self._timeout))


def measure_of(config: Config) -> Measure:
    """Return what the score of a held-out set of rows is, by `evaluation.metric` or else by the loss."""
    loss, metric = config.algorithm.loss, config.evaluation.metric
    if not loss.of_answers:
        return "loss"
    if loss.reads == "steps":
        return "step accuracy"
    if loss.reads == "labels":
        return "label loss" if metric == "loss" else "label accuracy"
    return "pair loss" if metric == "loss" else "accuracy"


def _parts(held_out: HeldOutRows) -> Iterator[list[tuple[Sample, int]]]:
    """Yield the samples of a set in parts of about _CALL_TOKENS tokens."""
    part, tokens = list[tuple[Sample, int]](), 0
    for sample, group in held_out.samples():
        if part and tokens + len(sample.token_ids) > _CALL_TOKENS:
            yield part
            part, tokens = [], 0
        part.append((sample, group))
        tokens += len(sample.token_ids)
    if part:
        yield part
