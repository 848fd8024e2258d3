"""One sample in vLLM: its sampling parameters, and the way of its outputs from vLLM to the caller's sink."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from fourfold.arrays import EMPTY_FLOATS
from fourfold.errors import FourfoldError, Internal
from fourfold_rollout.engine import Finish, SampleOutput, SampleRequest
from fourfold_rollout.vllm.logprob_table import FIRST, GRAMMAR, SLOT, LogprobRow, LogprobTable
from fourfold_rollout.vllm.patches.front_end import OutputBarrier, take_outputs

_log = logging.getLogger(__name__)

_FINISHES: Final = {finish.value: finish for finish in Finish}


def sampling_params(request: SampleRequest, row: LogprobRow | None, table: LogprobTable | None) -> SamplingParams:
    """Return vLLM's parameters of a sample. Without a row, vLLM returns the log-probabilities itself."""
    options: dict[str, Any] = {"logprobs": 0, "flat_logprobs": True}
    if row is not None and table is not None:
        options = {"extra_args": {SLOT: row.slot}}
        if (grammar := request.grammar) is not None:
            fields = [grammar.kind, grammar.text, grammar.prefix_count, table.path, table.slots, table.width]
            options["extra_args"][GRAMMAR] = fields
    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        max_tokens=request.max_tokens,
        stop_token_ids=list(request.stop_token_ids),
        seed=request.seed,
        detokenize=False,
        ignore_eos=True,  # `stop_token_ids` includes the model's own
        output_kind=RequestOutputKind.DELTA if request.streaming else RequestOutputKind.FINAL_ONLY,
        **options,
    )


def probe_params(*, first: bool) -> SamplingParams:
    """Return vLLM's parameters of a request for the log-probabilities of its prompt; see `RolloutScheduler`."""
    return SamplingParams(
        extra_args={FIRST: True} if first else None,
        max_tokens=1,
        seed=0,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


class RunningSamples:
    """The running samples of an engine: those whose outputs are still wanted."""

    def __init__(self) -> None:
        self.samples: set[VllmSample] = set()
        self.past_tokens = 0  # tokens that earlier samples have put

    def remove(self, sample: VllmSample) -> bool:
        """Remove a sample that has ended; return whether it was running."""
        if sample not in self.samples:
            return False
        self.samples.remove(sample)
        self.past_tokens += sample.given
        return True


class VllmSample:
    """A running sample. Without a row in the table, its log-probabilities come with vLLM's outputs."""

    def __init__(
        self, running: RunningSamples, barrier: OutputBarrier, request: SampleRequest, row: LogprobRow | None
    ) -> None:
        self._running, self._barrier = running, barrier
        self.request = request
        self.row = row
        self.id = ""  # vLLM's own
        self.given = 0  # tokens put into the sink

    def attach(self, collector: Any) -> None:
        self.id = collector.request_id
        take_outputs(collector, self.put)

    def put(self, result: Any) -> None:
        """Take an output of vLLM. Raises nothing."""
        if self in self._running.samples:
            self._deliver(lambda: self._output(result.outputs[0]), ended=result.finished)

    def flush(self) -> None:
        """Put the processed tokens that the sink does not have; see `EngineSample.flush`."""
        if self not in self._running.samples:
            return
        if not self._deliver(lambda: self._rest(*self._barrier.processed(self.id), None), ended=False):
            self._barrier.after_next(self.flush)

    def fail(self, error: FourfoldError) -> None:
        """End the sample with an error: the engine returns nothing more."""
        self._running.remove(self)
        self.release()
        self.request.sink.fail(error)

    def release(self) -> None:
        """Free the row. The engine must have ended the sample, or have been asked to. Idempotent."""
        if self.row is not None:
            self.row.release()

    def _deliver(self, make: Callable[[], SampleOutput], *, ended: bool) -> bool:
        """Put the output of `make`; return whether the sink got tokens, the end or an error."""
        try:
            output = make()
            if output.finish is None and not len(output.token_ids):
                return False
            self.given += len(output.token_ids)
            if output.finish is not None:
                self._running.remove(self)
                self.release()
            self.request.sink.put(self.request.index, output)
        except Exception as error:  # an error that leaves here ends vLLM's task for the outputs of all samples
            named = error if isinstance(error, FourfoldError) else _unusable(error)
            if ended:  # vLLM has removed the sample, so no abort follows
                self.fail(named)
            else:
                self.request.sink.fail(named)
        return True

    def _output(self, completion: Any) -> SampleOutput:
        finish = None
        if (reason := completion.finish_reason) is not None and (finish := _FINISHES.get(reason)) is None:
            raise Internal(f"the engine gave a sample up: {reason}")
        if self.request.streaming:  # vLLM returns only the new tokens
            return self._make(completion.token_ids, completion.logprobs, finish)
        return self._rest(completion.token_ids, completion.logprobs, finish)

    def _rest(self, ids: Sequence[int], logprobs: Any, finish: Finish | None) -> SampleOutput:
        """Return the part of all the sample's tokens that the sink does not have."""
        new = ids[self.given :]
        # Slice vLLM's log-probabilities: a long sample is flushed often. vLLM 0.26 cannot slice them to nothing.
        return self._make(new, logprobs[self.given :] if new and self.row is None else None, finish)

    def _make(self, ids: Sequence[int], logprobs: Any, finish: Finish | None) -> SampleOutput:
        if self.row is None:
            values = np.asarray(logprob_values(logprobs, ids), np.float32)
        else:
            values = self.row.take(len(ids)) if ids else EMPTY_FLOATS
        flags = np.frombuffer(self.row.taken_flags(len(ids)) if self.row is not None else b"", np.bool_)
        return SampleOutput(token_ids=np.asarray(ids, np.int32), logprobs=values, finish=finish, constrained=flags)


def logprob_values(logprobs: Any, ids: Sequence[int]) -> list[float]:
    """Return the log-probability of each id from vLLM's object, which has one entry per position."""
    if not ids:
        return []  # vLLM 0.26 returns all earlier log-probabilities with an end without tokens
    flat = getattr(logprobs, "logprobs", None)
    if flat is not None and len(flat) == len(ids):
        return list(flat)
    return [position[token].logprob for position, token in zip(logprobs or (), ids, strict=True)]


def _unusable(error: Exception) -> Internal:
    _log.error("Output of the engine was unusable", exc_info=error)
    return Internal(f"an output of the engine cannot be used: {type(error).__name__}: {error}")
