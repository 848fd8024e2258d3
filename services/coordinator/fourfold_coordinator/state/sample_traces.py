"""Makes the trace of each traced sample from the changes of its state in the ledger.

    sample ---- wait ------ generate ------- score ----------- queue ---- train ------> TRAINED or DROPPED
                (ISSUED)    (RUNNING)        (ROLLED)          (READY)    (LEASED)
                            '- Generate      '- Score              link ->'- TrainStep
                               '- engine        ComputeLogprobs    to     '- trainer
                                                '- services        the step's own trace

The trace id is the beginning of SHA-256("RUN_ID/SAMPLE_ID"), and it decides whether the sample is traced. The id of the
root span is the next part of the same hash. So a coordinator that continues the run of a dead one can end the root
span, and the spans of other services keep their root.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Final

from fourfold import metrics as m
from fourfold.tracing.propagation import MAX_TRACES
from fourfold.tracing.spans import NONE, Attributes, Span, Spans, Value, enabled, failure_reason
from fourfold.trainer.v1.trainer_service_pb2 import TrainStepResponse

from .ledger import BY_DESIGN, Ledger, SampleState

GENERATE: Final = "fourfold.rollout.v1.RolloutService/Generate"
SCORE: Final = "fourfold.reward.v1.RewardService/Score"
REFERENCE: Final = "fourfold.reference.v1.ReferenceService/ComputeLogprobs"
TRAIN_STEP: Final = "fourfold.trainer.v1.TrainerService/TrainStep"
_PHASES: Final = {
    SampleState.ISSUED: "wait",
    SampleState.RUNNING: "generate",
    SampleState.ROLLED: "score",
    SampleState.READY: "queue",
    SampleState.LEASED: "train",
}
# Attributes of a step's span; each is an aggregate over the batch.
_STEP_METRICS: Final = (m.POLICY_LOSS, m.VALUE_LOSS, m.KL_LOSS, m.APPROX_KL, m.ENTROPY, m.GRAD_NORM)
_ID_RANGE: Final = 1 << 64


class _SampleTrace:
    """The trace of one sample: its root, and the span of the state that it is in."""

    def __init__(self, root: Span, state: SampleState) -> None:
        self.root, self.state = root, state
        self.phase = Span(_PHASES[self.state], self.root.context)

    def enter(self, state: SampleState) -> None:
        if state is not self.state:  # the ledger repeats a change whose transaction failed
            self.state = state
            self.phase.end()
            self.phase = Span(_PHASES[state], self.root.context)

    def end(self, attributes: Attributes, *, error: str | None = None) -> None:
        self.phase.end(error=error)
        self.root.end(attributes, error=error)


class SampleTraces:
    """The traces of the samples between their issue and their end. Used on one event loop."""

    def __init__(self, *, ratio: float = 0.0) -> None:
        """Trace a share of the samples if the process exports spans; trace nothing before `follow`."""
        self._run_id, self._limit = "", int(ratio * _ID_RANGE) if enabled() else 0
        self._open: dict[str, _SampleTrace] = {}  # by sample id

    def follow(self, ledger: Ledger, run_id: str) -> None:
        """Trace the samples of a run as its ledger issues and moves them."""
        self._run_id, ledger.on_issue, ledger.on_move = run_id, self.issue, self.move
        for sample_id, state in ledger.unfinished().items() if self._limit else ():
            self._begin(sample_id, "sample", state, resumed=True)

    # -- the life of a sample ---------------------------------------------------------------------------------------

    def issue(self, sample_ids: Sequence[str]) -> None:
        """Begin the traces of the new samples that are traced."""
        for sample_id in sample_ids if self._limit else ():
            self._begin(sample_id, "sample", SampleState.ISSUED)

    def _begin(self, sample_id: str, name: str, state: SampleState, *, resumed: bool = False) -> None:
        digest = hashlib.sha256(f"{self._run_id}/{sample_id}".encode()).hexdigest()
        if int(digest[16:32], 16) >= self._limit:  # the rule of OpenTelemetry's TraceIdRatioBased
            return
        attributes: dict[str, Value] = {"fourfold.sample_id": sample_id, "fourfold.group_id": group_of(sample_id)}
        if resumed:
            attributes["fourfold.resumed"] = True
        # A repeated evaluation has the same sample ids again.
        span_id = digest[32:48] if name == "sample" else ""
        root = Span(name, None, attributes=attributes, trace_id=digest[:32], span_id=span_id)
        self._open[sample_id] = _SampleTrace(root, state)

    def move(self, sample_ids: Sequence[str], state: SampleState, reason: str) -> None:
        """Note a change of state; DROPPED, for a reason, ends the traces."""
        if not self._open:
            return
        for sample_id in sample_ids:
            if (trace := self._open.get(sample_id)) is None:
                continue
            if state is SampleState.DROPPED:
                self._drop(sample_id, reason)
            else:
                trace.enter(state)

    @contextmanager
    def evaluation(self, sample_ids: Sequence[str]) -> Iterator[None]:
        """Trace answers of an evaluation inside the block, because the ledger does not have them."""
        for sample_id in sample_ids if self._limit else ():
            self._begin(sample_id, "evaluation", SampleState.RUNNING)
        error = None
        try:
            yield
        except BaseException as caught:
            error = failure_reason(caught)
            raise
        finally:
            for sample_id in sample_ids if self._open else ():
                if (trace := self._open.pop(sample_id, None)) is not None:
                    trace.end({}, error=error)

    def restore(self, keep: Collection[str], reason: str) -> None:
        """Note that the run went back: samples of the groups `keep` are READY, and the others were dropped."""
        for sample_id, trace in list(self._open.items()):
            if group_of(sample_id) not in keep:
                self._drop(sample_id, reason)
            elif trace.state is SampleState.LEASED:
                trace.enter(SampleState.READY)

    def _drop(self, sample_id: str, reason: str) -> None:
        error = None if reason in BY_DESIGN else reason
        self._open.pop(sample_id).end({"fourfold.drop_reason": reason}, error=error)

    # -- calls and steps --------------------------------------------------------------------------------------------

    def call(self, method: str, sample_ids: Sequence[str], member: str) -> Spans:
        """Begin the spans of a call to `member` for samples, by their index in the call."""
        if not self._open:
            return NONE
        # One span for all segments of a trajectory.
        found = {name: index for index, name in enumerate(sample_ids) if name in self._open}
        attributes = {"rpc.system.name": "grpc", "rpc.method": method, "fourfold.member": member}
        return Spans(
            {
                i: Span(method, self._open[n].phase.context, kind="client", attributes=attributes)
                for n, i in found.items()
            }
        )

    def step(self, step: int, sample_ids: Sequence[str], member: str) -> Spans:
        """Begin the spans of a TrainStep call: that of the step, in a trace of its own, and one of each LEASED sample.

        The span of the step has links to the samples, and they to it.
        """
        if not enabled():
            return NONE
        traced = [name for name in sample_ids if name in self._open]
        calls = self.call(TRAIN_STEP, traced, member).running()
        links = tuple(self._open[name].root.context for name in traced[: MAX_TRACES - 1])
        attributes = {"rpc.system.name": "grpc", "rpc.method": TRAIN_STEP, "fourfold.member": member}
        span = Span(TRAIN_STEP, None, kind="client", attributes=attributes, links=links)
        for name in traced:
            self._open[name].phase.links = (span.context,)
        spans = Spans({0: span, **{index + 1: call for index, call in calls.items()}})
        spans.set({"fourfold.step": step, "fourfold.sample_count": len(sample_ids)})
        return spans

    def trained(self, sample_ids: Sequence[str], answer: TrainStepResponse) -> None:
        """End the traces of the samples of a step."""
        for name in sample_ids if self._open else ():
            if (trace := self._open.pop(name, None)) is not None:
                trace.end({"fourfold.step": answer.step, "fourfold.policy_version": answer.policy_version})


def step_attributes(answer: TrainStepResponse) -> dict[str, Value]:
    """Return the attributes of the span of a step that was trained."""
    found: dict[str, Value] = {"fourfold.policy_version": answer.policy_version}
    if answer.skipped_reason:
        found["fourfold.skipped_reason"] = answer.skipped_reason
    measured = {name: answer.metrics[name] for name in _STEP_METRICS if name in answer.metrics}
    return found | {f"fourfold.{name.replace('/', '.')}": value for name, value in measured.items() if isfinite(value)}


def group_of(sample_id: str) -> str:
    """Return the id of a sample's group."""
    return sample_id.rpartition("-")[0]
