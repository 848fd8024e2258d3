"""One sample in vLLM: delivery of its outputs, and that none of its errors reaches vLLM's output task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fourfold.errors import FourfoldError, Internal, Unavailable
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold_rollout.engine import Finish, SampleOutput, SampleSink
from fourfold_rollout.generate.outputs import CallOutputs
from fourfold_rollout.pause.hold import TokenHold
from fourfold_rollout.vllm.logprob_table import LogprobTable, open_table
from fourfold_rollout.vllm.sample import RunningSamples, VllmSample, logprob_values
from tests.fakes.engine import sample_request

SLOTS, WIDTH = 2, 8


class Takes:
    """A sink that records its outputs, or raises the error that the test sets."""

    def __init__(self) -> None:
        self.outputs: list[SampleOutput] = []
        self.errors: list[FourfoldError] = []
        self.raises: Exception | None = None

    def put(self, index: int, output: SampleOutput) -> None:
        if self.raises is not None:
            raise self.raises
        self.outputs.append(output)

    def boundary(self, index: int, token_count: int) -> None:
        raise AssertionError("nothing paused")

    def fail(self, error: FourfoldError) -> None:
        self.errors.append(error)


class Barrier:
    """The part of `OutputBarrier` that samples use."""

    def __init__(self) -> None:
        self.done: tuple[list[int], Any] = ([], None)  # tokens that vLLM has processed, and their log-probabilities
        self.callbacks: list[Callable[[], None]] = []  # to be called after the next outputs

    def after_next(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def processed(self, request_id: str) -> tuple[Sequence[int], Any]:
        return self.done


class Stage:
    """A table and the samples that have rows in it."""

    def __init__(self) -> None:
        self.table = LogprobTable(SLOTS, WIDTH)
        self.cells = open_table(self.table.path, SLOTS, WIDTH)
        self.running = RunningSamples()
        self.barrier: Any = Barrier()
        self.sink = Takes()

    def sample(
        self, *, values: Sequence[float] | None, sink: SampleSink | None = None, streaming: bool = True
    ) -> VllmSample:
        """Start one; `values` is what the worker writes, None: vLLM gives the log-probabilities itself."""
        request = sample_request(max_tokens=WIDTH, streaming=streaming, sink=sink or self.sink)
        row = None if values is None else self.table.acquire(WIDTH)
        sample = VllmSample(self.running, self.barrier, request, row)
        if row is not None:
            self.cells[row.slot, : len(values or ())] = values
        self.running.samples.add(sample)
        return sample

    @property
    def holds(self) -> tuple[int, int]:
        """Samples that run, and rows that are taken."""
        return len(self.running.samples), SLOTS - self.table.free_count


@pytest.fixture
def stage() -> Stage:
    return Stage()


def result(ids: Sequence[int], finish: str | None = None, logprobs: Any = None) -> Any:
    """Return an output of a request as vLLM puts it."""
    completion = SimpleNamespace(token_ids=list(ids), logprobs=logprobs, finish_reason=finish)
    return SimpleNamespace(outputs=[completion], finished=finish is not None)


def test_tokens_come_with_their_cells_and_the_end_gives_the_row_back(stage: Stage) -> None:
    sample = stage.sample(values=[-1, -2, -3])
    sample.attach(SimpleNamespace(request_id="theirs", output=result([5])))
    assert sample.id == "theirs"
    sample.put(result([6, 7], "stop"))
    sample.put(result([8]))  # nobody wants it any more
    assert [o.token_ids.tolist() for o in stage.sink.outputs] == [[5], [6, 7]]
    assert [o.logprobs.tolist() for o in stage.sink.outputs] == [[-1], [-2, -3]]
    assert stage.running.past_tokens == 3
    assert [o.finish for o in stage.sink.outputs] == [None, Finish.STOP]
    assert stage.holds == (0, 0)
    assert stage.sink.errors == []


@pytest.mark.parametrize("row", [True, False], ids=["row", "vllm"])
def test_one_that_does_not_stream_gives_what_is_there_when_asked_and_the_rest_at_its_end(
    stage: Stage, row: bool
) -> None:
    sample = stage.sample(values=[-1, -2, -3, -4] if row else None, streaming=False)
    ids, logprobs = [5, 6, 7, 8], [{5 + i: SimpleNamespace(logprob=-1.0 - i)} for i in range(4)]
    sample.flush()
    assert stage.sink.outputs == []
    for count, had_nothing in ((2, True), (2, False), (3, True)):
        assert stage.barrier.callbacks == [sample.flush] * had_nothing
        stage.barrier.callbacks.clear()
        stage.barrier.done = ids[:count], logprobs[:count]
        sample.flush()
    sample.put(result(ids, "stop", logprobs=logprobs))
    sample.flush()
    assert [o.token_ids.tolist() for o in stage.sink.outputs] == [[5, 6], [7], [8]]
    assert [o.logprobs.tolist() for o in stage.sink.outputs] == [[-1, -2], [-3], [-4]]
    assert [o.finish for o in stage.sink.outputs] == [None, None, Finish.STOP]
    assert stage.holds == (0, 0)
    assert stage.running.past_tokens == 4


def test_what_cannot_be_given_is_told_to_the_sink(stage: Stage) -> None:
    sample = stage.sample(values=[-1], streaming=False)
    stage.barrier.done = [5, 6], None
    sample.flush()
    (error,) = stage.sink.errors
    assert "tokens 0 to 1 of a sample without the log-probability" in error.message
    assert stage.holds == (1, 1)


def test_a_sample_that_ends_without_a_log_probability_ends_with_an_error_and_is_forgotten(stage: Stage) -> None:
    sample = stage.sample(values=[-1])
    sample.put(result([5, 6], "length"))
    (error,) = stage.sink.errors
    assert isinstance(error, Internal)
    assert "tokens 0 to 1 of a sample without the log-probability" in error.message
    assert stage.sink.outputs == []
    assert stage.holds == (0, 0)


@pytest.mark.parametrize("finish", [None, "stop"])
def test_an_error_that_nobody_named_ends_the_sample_alone(stage: Stage, finish: str | None) -> None:
    sample, other = stage.sample(values=[-1]), stage.sample(values=[-2])
    stage.sink.raises = KeyError("index 9")
    sample.put(result([5], finish))
    stage.sink.raises = None
    (error,) = stage.sink.errors
    assert isinstance(error, Internal)
    assert "an output of the engine cannot be used: KeyError: 'index 9'" in error.message
    other.put(result([6], "stop"))
    assert [o.token_ids.tolist() for o in stage.sink.outputs] == [[6]]
    assert stage.holds == ((1, 1) if finish is None else (0, 0))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (result([5, 6], logprobs=[{5: SimpleNamespace(logprob=-1)}]), "ValueError: zip"),
        (result([5], logprobs=[{6: SimpleNamespace(logprob=-1)}]), "KeyError: 5"),
        (result([5], logprobs=None), "ValueError: zip"),
        (SimpleNamespace(outputs=[], finished=True), "IndexError"),
        (result([], "eaten"), "the engine gave a sample up: eaten"),
    ],
    ids=["too few", "of another token", "none", "nothing", "unknown end"],
)
def test_what_vllm_gives_without_a_row_and_cannot_be_used(stage: Stage, bad: Any, words: str) -> None:
    stage.sample(values=None).put(bad)
    (error,) = stage.sink.errors
    assert words in error.message


def test_without_a_row_the_log_probabilities_are_vllms(stage: Stage) -> None:
    sample = stage.sample(values=None)
    sample.put(result([5, 6], logprobs=SimpleNamespace(logprobs=[-1.0, -2.0])))
    sample.put(result([7], logprobs=[{7: SimpleNamespace(logprob=-3.0)}]))
    sample.put(result([], "length", logprobs=SimpleNamespace(logprobs=[-1.0, -2.0, -3.0])))
    assert np.concatenate([o.logprobs for o in stage.sink.outputs]).tolist() == [-1, -2, -3]
    assert stage.sink.outputs[-1].finish is Finish.LENGTH
    assert stage.running.samples == set()
    assert logprob_values(None, []) == []


def test_the_death_of_the_engine_ends_a_sample_once(stage: Stage) -> None:
    sample = stage.sample(values=[-1])
    sample.fail(Unavailable("killed"))
    sample.put(result([5], "stop"))
    assert [error.message for error in stage.sink.errors] == ["killed"]
    assert (stage.sink.outputs, stage.holds) == ([], (0, 0))


async def test_a_sample_that_gives_all_at_its_end_is_cut_where_the_weights_changed(stage: Stage) -> None:
    chunks: list[pb.SampleChunk] = []
    token_hold = TokenHold()
    sink = CallOutputs(1, token_hold, chunks.append)
    sample = stage.sample(values=[-1, -2, -3], sink=sink, streaming=False)
    sink.boundary(0, 2)
    token_hold.version = 1
    sample.put(result([5, 6, 7], "stop"))
    assert [(c.policy_version, len(c.token_ids) // 4) for c in chunks] == [(0, 2), (1, 1)]
    assert np.frombuffer(chunks[1].logprobs, "<f4").tolist() == [-3]
    await sink.complete()


async def test_no_sample_is_flushed_after_the_end_of_a_call(stage: Stage) -> None:
    """A timer that is never cancelled would keep the samples and the prompt of the call, and flush for ever."""
    sink = CallOutputs(1, TokenHold(), lambda _: None)
    sample = stage.sample(values=[-1], sink=sink, streaming=False)
    sink.flush_every(60, [sample])
    timer = sink._timer
    assert timer is not None
    sample.put(result([5], "stop"))
    assert timer.cancelled()
    sink.flush_every(60, [sample])
    assert sink._timer is timer
