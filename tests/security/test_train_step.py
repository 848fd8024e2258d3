"""TrainStep with callers that send too much data, too slowly, too often, or invalid data."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import numpy as np
import pytest

from fourfold.errors import AlreadyExists, DeadlinePassed, InvalidInput, Overloaded, WrongState
from fourfold.sample import VersionSpan
from fourfold.sample.wire import encode
from fourfold.trainer.v1 import trainer_service_pb2 as pb
from fourfold_trainer.service import batch_stream
from tests.fakes.trainer_engine import group_of
from tests.fakes.trainer_service import SECONDS, Start, Trainer

USEFUL = group_of([0, 1])


@pytest.fixture
async def added(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[int]:
    """Return the steps of the messages that the trainer decodes, in order."""
    steps: asyncio.Queue[int] = asyncio.Queue()
    loop, add = asyncio.get_running_loop(), batch_stream.IncomingBatch.add

    def noted(batch: batch_stream.IncomingBatch, request: pb.TrainStepRequest) -> None:
        loop.call_soon_threadsafe(steps.put_nowait, request.step)
        add(batch, request)

    monkeypatch.setattr(batch_stream.IncomingBatch, "add", noted)
    return steps


def message(step: int) -> pb.TrainStepRequest:
    return pb.TrainStepRequest(step=step, experiences=[encode(one) for one in USEFUL])


@pytest.mark.parametrize("step", [2, 7, 2**53])
async def test_a_batch_of_another_step_is_refused_by_its_first_message(
    trainer: Trainer, added: asyncio.Queue[int], step: int
) -> None:
    with pytest.raises(WrongState, match=f"step {step} cannot be trained; the trainer is at step 0: send 1"):
        await trainer.train(step, USEFUL * 1000)
    assert added.empty(), "nothing of it was looked into"


async def test_one_batch_is_read_at_a_time_and_a_broken_one_is_dropped(
    trainer: Trainer, added: asyncio.Queue[int]
) -> None:
    first = trainer.stub.TrainStep(timeout=SECONDS)
    await first.write(message(1))
    assert await asyncio.wait_for(added.get(), SECONDS) == 1
    with pytest.raises(Overloaded, match="another TrainStep, of step 1, is being read") as caught:
        await trainer.train(1, USEFUL)
    assert (caught.value.reason, caught.value.retry_after) == ("TRAIN_STEP_RUNNING", 1.0)
    with pytest.raises(WrongState):  # refused before it waits for its turn
        await trainer.train(5, USEFUL)
    first.cancel()
    answer = await asyncio.wait_for(_until_admitted(trainer), SECONDS)  # the server sees the cancellation later
    assert answer.step == 1 and trainer.engine.updates == 1


async def test_a_retry_while_the_step_is_trained_gets_the_stored_answer(
    trainer: Trainer, added: asyncio.Queue[int]
) -> None:
    """The connection of the first caller breaks during the step."""
    trainer.engine.gate.clear()
    lost = asyncio.create_task(trainer.train(1, USEFUL))
    assert await asyncio.to_thread(trainer.engine.entered.wait, SECONDS)
    with pytest.raises(Overloaded, match="of step 1"):
        await trainer.train(1, USEFUL)
    lost.cancel()
    retry = asyncio.create_task(_until_admitted(trainer))
    assert [await asyncio.wait_for(added.get(), SECONDS) for _ in range(4)] == [1] * 4, "the retry came before the end"
    trainer.engine.gate.set()
    answer = await asyncio.wait_for(retry, SECONDS)
    assert (answer.step, answer.policy_version) == (1, 1) and trainer.engine.updates == 1


async def _until_admitted(trainer: Trainer) -> pb.TrainStepResponse:
    while True:
        try:
            return await trainer.train(1, USEFUL)
        except (Overloaded, DeadlinePassed):
            await asyncio.sleep(0.01)


async def test_a_silent_stream_is_ended_with_a_reason(
    trainer: Trainer, added: asyncio.Queue[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_stream, "_IDLE_SECONDS", 0.3)
    silent = trainer.stub.TrainStep(timeout=SECONDS)
    await silent.write(message(1))
    assert await asyncio.wait_for(added.get(), SECONDS) == 1
    answer = await asyncio.wait_for(_until_admitted(trainer), SECONDS)
    assert answer.step == 1
    await silent.done_writing()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await silent
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "no message of the batch came" in str(caught.value.details())


async def test_a_batch_that_arrives_too_slowly_is_ended_with_the_limit() -> None:
    async def slow() -> AsyncIterator[pb.TrainStepRequest]:
        while True:
            yield message(1)
            await asyncio.sleep(0.02)

    with pytest.raises(
        DeadlinePassed, match=r"did not arrive within trainer.step_timeout_seconds = 0\.1; send it faster"
    ):
        async for _ in batch_stream.read_messages(slow(), timeout=0.1):
            pass


async def test_a_batch_larger_than_the_recipes_largest_is_refused(trainer: Trainer) -> None:
    with pytest.raises(InvalidInput, match="the batch has more than 4 samples"):
        await trainer.train(1, group_of([0, 1, 0, 1, 0]))
    large = [encode(one) for one in USEFUL]
    large[1].scorer = "x" * 40_000
    with pytest.raises(InvalidInput, match="the batch has more than 19072 bytes, which 4 samples"):
        await trainer.client.train_step(1, large, timeout=SECONDS)
    assert (await trainer.train(1, group_of([0, 1, 0, 1]))).step == 1


async def test_the_last_batch_sent_again_is_not_kept_in_memory(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await trainer.train(1, USEFUL)
    kept: list[int] = []
    add = batch_stream.IncomingBatch.add

    def noted(batch: batch_stream.IncomingBatch, request: pb.TrainStepRequest) -> None:
        add(batch, request)
        kept.append(len(batch.samples))

    monkeypatch.setattr(batch_stream.IncomingBatch, "add", noted)
    assert await trainer.train(1, USEFUL) == first
    with pytest.raises(AlreadyExists):
        await trainer.train(1, group_of([1, 0]))
    assert set(kept) == {0}


async def test_every_valid_sample_fits(start_trainer: Start) -> None:
    """Every sample is as long as the context, and each token has a version of its own."""
    trainer = await start_trainer()
    long = [
        replace(
            one,
            reference_logprobs=np.array([np.nan, *[-1.0] * 15], np.float32),
            token_rewards=np.zeros(16, np.float32),
            version_spans=tuple(VersionSpan(policy_version=-1 if t < 3 else 0, token_count=1) for t in range(16)),
        )
        for one in group_of([0, 1, 0, 1], completion=13)
    ]
    assert (await trainer.train(1, long)).step == 1
