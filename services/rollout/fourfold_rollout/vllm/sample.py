"""One sample in vLLM: takes its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

from fourfold.errors import Internal, Unavailable
from fourfold_rollout.engine import Finish, SampleOutput, SampleRequest

_FINISHES: Final = {finish.value: finish for finish in Finish}


class Owner(Protocol):
    """Knows which samples run."""

    def note_output(self, sample: VllmSample, output: SampleOutput) -> bool:
        """Count what a sample has given; return whether anybody wants it."""
        ...

    def forget(self, sample: VllmSample) -> bool:
        """Know that a sample has ended; return whether it was running."""
        ...

    def dead_error(self) -> Unavailable:
        """Return the error of every call to a dead engine."""
        ...


class VllmSample:
    """One sample in the engine. It takes the place of vLLM's collector: outputs come without a task that waits."""

    def __init__(self, owner: Owner, request: SampleRequest) -> None:
        self._owner = owner
        self.request = request
        self.id = ""
        """vLLM's own."""

    def attach(self, collector: Any) -> None:
        """Take the collector's place; what it has got already comes now."""
        self.id = collector.request_id
        collector.put = self.put
        if (early := collector.output) is not None:
            self.put(early)

    def put(self, result: Any) -> None:
        """Take an output of vLLM, or the error that ended it."""
        if isinstance(result, Exception):
            self._owner.forget(self)
            self.request.sink.fail(self._owner.dead_error())
            return
        completion = result.outputs[0]
        ids: list[int] = list(completion.token_ids)
        output = SampleOutput(
            token_ids=ids, logprobs=logprob_values(completion.logprobs, ids), finish=_finish(completion.finish_reason)
        )
        if self._owner.note_output(self, output):
            self.request.sink.put(self.request.index, output)


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
