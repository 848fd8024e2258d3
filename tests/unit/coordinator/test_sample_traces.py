"""The traces of samples, made from the changes of a real ledger."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from fourfold.tracing.spans import NONE, Span
from fourfold.trainer.v1.trainer_service_pb2 import TrainStepResponse
from fourfold_coordinator.state.ledger import FILTERED, Ledger, SampleState
from fourfold_coordinator.state.sample_traces import GENERATE, SCORE, SampleTraces, step_attributes

ANSWER = TrainStepResponse(step=1, policy_version=1, metrics={"policy/loss": 0.5, "train/grad_norm": float("nan")})


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    made = Ledger(tmp_path / "ledger.sqlite")
    yield made
    made.close()


def traced(ledger: Ledger, *, ratio: float = 1.0) -> SampleTraces:
    traces = SampleTraces(ratio=ratio)
    traces.follow(ledger, "run")
    return traces


def roll(ledger: Ledger, ids: tuple[str, ...], *states: SampleState) -> None:
    for state in states or (SampleState.RUNNING, SampleState.ROLLED, SampleState.READY):
        ledger.move(ids, state)


def test_a_trace_has_a_span_for_each_state(ledger: Ledger, ended: list[Span]) -> None:
    traces = traced(ledger)
    ids = ledger.issue(step=1, position=0, count=2).sample_ids
    roll(ledger, ids)
    ledger.lease(1, ids)
    with traces.step(1, ids, "trainer-0") as work:
        work.set(step_attributes(ANSWER))
    traces.trained(ids, ANSWER)
    assert Counter(span.name for span in ended if span.context.trace_id == trace_id(ids[1])) == Counter(
        ["wait", "generate", "score", "queue", "train", "sample", "fourfold.trainer.v1.TrainerService/TrainStep"]
    )
    roots = [span for span in ended if span.name == "sample"]
    assert [root.attributes["fourfold.sample_id"] for root in roots] == list(ids)
    assert roots[0].attributes.items() >= {"fourfold.step": 1, "fourfold.policy_version": 1}.items()
    phases = [span for span in ended if span.parent == roots[0].context]
    assert [span.name for span in phases] == ["wait", "generate", "score", "queue", "train"]
    assert all(before.end_time <= after.start_time for before, after in itertools.pairwise(phases))
    (step,) = (span for span in ended if span.parent is None and span.name != "sample")
    assert phases[-1].links == (step.context,) and step.links == tuple(root.context for root in roots)
    assert step.attributes["fourfold.policy.loss"] == 0.5 and step.attributes["fourfold.sample_count"] == 2
    assert "fourfold.train.grad_norm" not in step.attributes  # it could not be measured
    assert not traces.call(SCORE, ids, "reward-0")  # nothing is kept of samples that ended


def trace_id(sample_id: str) -> str:
    return hashlib.sha256(f"run/{sample_id}".encode()).hexdigest()[:32]


def test_a_call_is_in_the_traces_of_its_samples(ledger: Ledger, ended: list[Span]) -> None:
    traces = traced(ledger)
    ids = ledger.issue(step=1, position=0, count=3).sample_ids
    roll(ledger, ids[1:], SampleState.RUNNING, SampleState.ROLLED)
    ledger.drop(ids[:1], "REASON")
    calls = traces.call(SCORE, ids, "reward-0").running()
    assert {index: span.context.trace_id for index, span in calls.items()} == {i: trace_id(ids[i]) for i in (1, 2)}
    assert calls[1].attributes["fourfold.member"] == "reward-0"


@pytest.mark.parametrize(("reason", "error"), [("GROUP_TOO_SMALL", "GROUP_TOO_SMALL"), (FILTERED, None)])
def test_a_dropped_sample_has_its_reason(ledger: Ledger, ended: list[Span], reason: str, error: str | None) -> None:
    traced(ledger)
    ids = ledger.issue(step=1, position=0, count=1).sample_ids
    ledger.drop(ids, reason)
    root = ended[-1]
    assert (root.name, root.error, root.attributes["fourfold.drop_reason"]) == ("sample", error, reason)


def test_a_restore_ends_the_traces_of_what_it_drops(ledger: Ledger, ended: list[Span]) -> None:
    traces = traced(ledger)
    kept, lost = (ledger.issue(step=1, position=position, count=1) for position in range(2))
    roll(ledger, kept.sample_ids)
    ledger.lease(1, kept.sample_ids)
    traces.restore({kept.group_id}, "TRAINER_RESTORED")
    assert ended[-1].attributes["fourfold.sample_id"] == lost.sample_ids[0] and ended[-1].error == "TRAINER_RESTORED"
    ledger.restore(0, keep={kept.group_id})
    ledger.lease(1, kept.sample_ids)
    traces.trained(kept.sample_ids, ANSWER)
    names = [span.name for span in ended if span.context.trace_id == trace_id(kept.sample_ids[0])]
    assert names == ["wait", "generate", "score", "queue", "train", "queue", "train", "sample"]


def test_a_coordinator_that_continues_gives_unfinished_samples_their_roots(ledger: Ledger, ended: list[Span]) -> None:
    dead = traced(ledger)
    kept, lost, done = (ledger.issue(step=1, position=position, count=1) for position in range(3))
    roll(ledger, kept.sample_ids)
    roll(ledger, lost.sample_ids, SampleState.RUNNING)
    ledger.drop(done.sample_ids, "REASON")
    call = dead.call(SCORE, lost.sample_ids, "reward-0").running()[0]
    ends = {sample_id: [span for span in ended if span.name == "sample"] for sample_id in done.sample_ids}
    traces = traced(ledger)
    assert not traces.call(SCORE, done.sample_ids, "reward-0"), "it has its root"
    traces.restore({kept.group_id}, "COORDINATOR_RESTARTED")
    ledger.restore(0, "COORDINATOR_RESTARTED", keep={kept.group_id})
    ledger.lease(1, kept.sample_ids)
    traces.trained(kept.sample_ids, ANSWER)
    for names, error in ((lost.sample_ids, "COORDINATOR_RESTARTED"), (kept.sample_ids, None)):
        spans = [span for span in ended if span.context.trace_id == trace_id(names[0])]
        (root,) = (span for span in spans if span.name == "sample")
        assert (root.error, root.attributes["fourfold.resumed"]) == (error, True)
        assert {span.parent for span in spans if span is not root} == {root.context}, "those of the dead process, too"
    assert [s.name for s in ended if s.context.trace_id == call.context.trace_id] == ["wait", "generate", "sample"]
    assert len(ends[done.sample_ids[0]]) == 1
    assert sum(span.name == "sample" for span in ended) == 3


def test_an_answer_of_an_evaluation_has_a_trace(ledger: Ledger, ended: list[Span]) -> None:
    traces = traced(ledger)
    for _ in range(2):  # as after a restore
        with traces.evaluation(["eval1-math-0-0"]):
            with traces.call(GENERATE, ["eval1-math-0-0"], "rollout-0"):
                pass
            traces.move(["eval1-math-0-0"], SampleState.ROLLED, "")
    with pytest.raises(TimeoutError), traces.evaluation(["eval1-math-0-1"]):
        raise TimeoutError
    roots = [span for span in ended if span.name == "evaluation"]
    assert [root.error for root in roots] == [None, None, "TimeoutError"]
    assert len({root.context for root in roots}) == 3 and len({root.context.trace_id for root in roots}) == 2
    assert [span.name for span in ended[:4]] == [GENERATE, "generate", "score", "evaluation"]
    assert ended[1].parent == roots[0].context and ended[0].parent == ended[1].context
    assert not traces.call(SCORE, ["eval1-math-0-0"], "reward-0")


def test_a_change_that_is_repeated_is_in_the_trace_once(ledger: Ledger, ended: list[Span]) -> None:
    traced(ledger)
    ids = ledger.issue(step=1, position=0, count=1).sample_ids
    with pytest.raises(RuntimeError), ledger.together():
        ledger.move(ids, SampleState.RUNNING)
        raise RuntimeError
    ledger.move(ids, SampleState.RUNNING)
    ledger.move(ids, SampleState.ISSUED)  # the call failed
    ledger.move(ids, SampleState.RUNNING)
    assert [span.name for span in ended] == ["wait", "generate", "wait"]


def test_the_ratio_is_kept_and_repeats(ledger: Ledger, ended: list[Span]) -> None:
    chosen = []
    for _ in range(2):
        traces = traced(ledger, ratio=0.1)
        names = [f"p{position:07d}-0-{index}" for position in range(1000) for index in range(4)]
        traces.issue(names)
        chosen.append(list(traces.call(SCORE, names, "reward-0").running()))
    assert chosen[0] == chosen[1] and 320 <= len(chosen[0]) <= 480


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_nothing_is_kept_while_tracing_is_off(ledger: Ledger, ratio: float) -> None:
    traces = traced(ledger, ratio=ratio)
    ids = ledger.issue(step=1, position=0, count=2).sample_ids
    roll(ledger, ids)
    assert traces.call(SCORE, ids, "reward-0") is NONE and traces.step(1, ids, "trainer-0") is NONE
