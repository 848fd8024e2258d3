"""One sample in vLLM: takes its outputs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np

from fourfold.arrays import EMPTY_FLOATS
from fourfold.errors import FourfoldError, Internal
from fourfold_rollout.engine import Finish, SampleOutput, SampleRequest
from fourfold_rollout.vllm.logprob_table import LogprobRow

_log = logging.getLogger(__name__)

_FINISHES: Final = {finish.value: finish for finish in Finish}


class SampleOwner(Protocol):
    """Knows which samples run."""

    def is_running(self, sample: VllmSample) -> bool:
        """Return whether anybody wants what a sample gives."""
        ...

    def processed(self, sample: VllmSample) -> tuple[Sequence[int], Any]:
        """Return all tokens that vLLM has handed out of a running sample, and its log-probabilities if it has any."""
        ...

    def note_output(self, sample: VllmSample, output: SampleOutput) -> None:
        """Count what a running sample has given."""
        ...

    def ask_again(self, sample: VllmSample) -> None:
        """Have a sample `give` after vLLM's next outputs: it had nothing."""
        ...

    def forget(self, sample: VllmSample) -> bool:
        """Know that a sample has ended; return whether it was running."""
        ...


class VllmSample:
    """One sample in the engine. It takes the place of vLLM's collector: outputs come without a task that waits."""

    def __init__(self, owner: SampleOwner, request: SampleRequest, row: LogprobRow | None) -> None:
        """Begin without tokens; the log-probabilities come with vLLM's outputs when `row` is None."""
        self._owner = owner
        self.request = request
        self.row = row
        self.id = ""
        """vLLM's own."""
        self.given = 0
        """Tokens that the sink has got."""

    def attach(self, collector: Any) -> None:
        """Take the collector's place; what it has got already comes now."""
        self.id = collector.request_id
        collector.put = self.put
        if (early := collector.output) is not None:
            self.put(early)

    def put(self, result: Any) -> None:
        """Take an output of vLLM. Raises nothing."""
        if self._owner.is_running(self):
            self._hand_over(lambda: self._output(result.outputs[0]), ended=result.finished)

    def flush(self) -> None:
        """Put what vLLM has handed out and the sink has not got; if nothing, after its next outputs. Raises nothing."""
        if not self._owner.is_running(self):
            return
        if not self._hand_over(lambda: self._rest(*self._owner.processed(self), None), ended=False):
            self._owner.ask_again(self)

    def fail(self, error: FourfoldError) -> None:
        """End without what is missing: the engine gives nothing more."""
        self._owner.forget(self)
        self.release()
        self.request.sink.fail(error)

    def release(self) -> None:
        """Give back the row: the engine has ended the sample, or was told to. Idempotent."""
        if self.row is not None:
            self.row.release()

    def _hand_over(self, make: Callable[[], SampleOutput], *, ended: bool) -> bool:
        """Return whether there was anything for the sink: tokens, the end, or an error."""
        try:
            output = make()
            if output.finish is None and not len(output.token_ids):
                return False
            self.given += len(output.token_ids)
            self._owner.note_output(self, output)
            if output.finish is not None:
                self.release()
            self.request.sink.put(self.request.index, output)
        except Exception as error:  # whatever it is: it is vLLM's task for the outputs of all samples that would die
            named = error if isinstance(error, FourfoldError) else _unusable(error)
            if ended:  # vLLM knows it no more
                self.fail(named)
            else:
                self.request.sink.fail(named)
        return True

    def _output(self, completion: Any) -> SampleOutput:
        finish = _finish(completion.finish_reason)
        if self.request.streaming:  # vLLM tells the new tokens alone
            return self._make(completion.token_ids, completion.logprobs, finish)
        return self._rest(completion.token_ids, completion.logprobs, finish)

    def _rest(self, ids: Sequence[int], logprobs: Any, finish: Finish | None) -> SampleOutput:
        """Return what the sink has not got of all the sample's tokens."""
        new = ids[self.given :]
        # Of vLLM's, the new ones alone are read: a long sample is asked many times. vLLM 0.26 cannot slice to nothing.
        return self._make(new, logprobs[self.given :] if new and self.row is None else None, finish)

    def _make(self, ids: Sequence[int], logprobs: Any, finish: Finish | None) -> SampleOutput:
        if self.row is None:
            values = np.asarray(logprob_values(logprobs, ids), np.float32)
        else:
            values = self.row.take(len(ids)) if ids else EMPTY_FLOATS
        return SampleOutput(token_ids=np.asarray(ids, np.int32), logprobs=values, finish=finish)


def logprob_values(logprobs: Any, ids: Sequence[int]) -> list[float]:
    """Return the log-probability of each id: one entry per position where only that one was asked for."""
    if not ids:
        return []  # an end without tokens: vLLM 0.26 hands out all earlier log-probabilities with it
    flat = getattr(logprobs, "logprobs", None)
    if flat is not None and len(flat) == len(ids):
        return list(flat)
    return [position[token].logprob for position, token in zip(logprobs or (), ids, strict=True)]


def _finish(reason: str | None) -> Finish | None:
    if reason is None:
        return None
    finish = _FINISHES.get(reason)
    if finish is None:
        raise Internal(f"the engine gave a sample up: {reason}")
    return finish


def _unusable(error: Exception) -> Internal:
    _log.error("an output of the engine cannot be used", exc_info=error)
    return Internal(f"an output of the engine cannot be used: {type(error).__name__}: {error}")
