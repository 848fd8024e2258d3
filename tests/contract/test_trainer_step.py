"""TrainStep on a loopback server with a fake engine: one test for each rule of its proto."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from fourfold import metrics
from fourfold.errors import AlreadyExists, DeadlinePassed, InvalidInput, Unavailable, WrongState
from fourfold.trainer.v1 import trainer_service_pb2 as pb
from fourfold.wire import Sample, encode
from tests.conftest import Serve
from tests.fakes.trainer_engine import VOCABULARY, group_of, sample
from tests.fakes.trainer_service import SECONDS, Start, Trainer, trainers

USEFUL = group_of([0, 1])


@pytest.fixture
async def start_trainer(serve: Serve, tmp_path: Path) -> AsyncIterator[Start]:
    async with trainers(serve, tmp_path) as start:
        yield start


@pytest.fixture
async def trainer(start_trainer: Start) -> Trainer:
    return await start_trainer()


async def test_a_step_raises_step_and_version_and_reports_metrics(trainer: Trainer) -> None:
    answer = await trainer.train(1, [*USEFUL, *group_of([1, 1], group="same")])
    assert (answer.step, answer.policy_version, answer.skipped_reason) == (1, 1, "")
    assert answer.metrics[metrics.USEFUL_GROUPS] == 0.5
    assert answer.metrics[metrics.GROUPS_ALL_MAX] == 0.5
    assert answer.metrics[metrics.GRAD_NORM] == 1.5
    assert answer.metrics[metrics.MISMATCH_MEAN] == 0.5
    assert answer.metrics[metrics.TRAINED_SAMPLES] == 2
    assert set(answer.metrics) <= set(metrics.METRICS)
    assert trainer.engine.settings[0].token_count == 8  # samples without advantage count, too
    status = await trainer.status()
    assert (status.step, status.policy_version) == (1, 1)


async def test_the_same_step_again_returns_the_stored_answer(trainer: Trainer) -> None:
    first = await trainer.train(1, USEFUL)
    assert await trainer.train(1, USEFUL) == first
    assert trainer.engine.updates == 1


async def test_the_digest_does_not_depend_on_how_the_batch_is_cut_into_messages(trainer: Trainer) -> None:
    first = await trainer.train(1, USEFUL)
    call = trainer.stub.TrainStep(timeout=SECONDS)
    for one in USEFUL:
        await call.write(pb.TrainStepRequest(step=1, experiences=[encode(one)]))
    await call.done_writing()
    assert await call == first


async def test_the_same_step_with_another_batch_is_refused(trainer: Trainer) -> None:
    await trainer.train(1, USEFUL)
    with pytest.raises(AlreadyExists, match="step 1 was trained with another batch"):
        await trainer.train(1, group_of([1, 0]))


@pytest.mark.parametrize("step", [1, 4, 9])
async def test_any_other_step_is_a_wrong_state(trainer: Trainer, step: int) -> None:
    await trainer.train(1, USEFUL)
    second = group_of([0, 1], version=1)
    await trainer.train(2, second)
    with pytest.raises(WrongState, match=f"step {step} cannot be trained; the trainer is at step 2: send 3"):
        await trainer.train(step, USEFUL)
    assert trainer.engine.updates == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"score": None}, "sample bad has no score"),
        ({"top_p": 0.9}, "sample bad was sampled with top_p = 0.9"),
        ({"top_k": 5}, "top_k = 5"),
        ({"temperature": 0.0}, "sample bad: temperature is 0"),
        ({"token_ids": np.array([1, 2, 3, 4, VOCABULARY], np.int32)}, "token id 100 is outside the vocabulary"),
        ({"loss_mask": np.array([1, 0, 0, 1, 1], bool)}, "loss_mask selects tokens outside action_mask"),
        ({"behavior_logprobs": np.full(5, np.nan, np.float32)}, "behavior_logprobs holds nan"),
        ({"sample_id": "g-0"}, "sample g-0 occurs twice"),
        ({"sample_id": "no/slash"}, "sample_id is 'no/slash'"),
    ],
)
async def test_a_bad_sample_is_named_and_nothing_changes(trainer: Trainer, change: dict[str, Any], says: str) -> None:
    bad = replace(sample("bad"), **change)
    with pytest.raises(InvalidInput, match=says):
        await trainer.train(1, [*USEFUL, bad])
    status = await trainer.status()
    assert (status.step, status.policy_version, trainer.engine.updates) == (0, 0, 0)
    await trainer.train(1, USEFUL)


async def test_a_sample_of_a_version_that_was_never_published_is_refused(trainer: Trainer) -> None:
    with pytest.raises(InvalidInput, match="sample g-0 was sampled by policy version 3; the trainer is at 0"):
        await trainer.train(1, group_of([0, 1], version=3))


async def test_a_sample_longer_than_the_context_is_refused(trainer: Trainer) -> None:
    with pytest.raises(InvalidInput, match="17 tokens; it must have 2 to 16"):
        await trainer.train(1, [sample("long", prompt=10, completion=7)])


async def test_missing_reference_logprobs_are_refused_when_the_loss_needs_them(start_trainer: Start) -> None:
    trainer = await start_trainer(algorithm={"kl_coef": 0.1})
    with pytest.raises(InvalidInput, match="sample g-0 has no reference_logprobs"):
        await trainer.train(1, USEFUL)
    answer = await trainer.train(1, group_of([1, 1], reference=True))  # no advantage, but a KL loss
    assert answer.skipped_reason == ""
    assert answer.metrics[metrics.REFERENCE_KL] == 2.0
    assert len(trainer.engine.shares[0][0][0].reference_logprobs) == 4


async def test_an_empty_batch_is_refused(trainer: Trainer) -> None:
    with pytest.raises(InvalidInput, match="at least one"):
        await trainer.train(1, [])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await trainer.stub.TrainStep(iter(()), timeout=SECONDS)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_messages_of_one_call_must_carry_one_step(trainer: Trainer) -> None:
    requests = [pb.TrainStepRequest(step=n, experiences=[encode(USEFUL[n - 1])]) for n in (1, 2)]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await trainer.stub.TrainStep(iter(requests), timeout=SECONDS)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_message_above_its_limit_is_refused(trainer: Trainer) -> None:
    big = encode(USEFUL[0])
    big.scorer = "x" * (5 << 20)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await trainer.stub.TrainStep(iter([pb.TrainStepRequest(step=1, experiences=[big])]), timeout=SECONDS)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        (group_of([1, 1]), "NO_ADVANTAGE"),
        ([sample("alone")], "NO_ADVANTAGE"),
        (group_of([0, 1], completion=0), "NO_ACTION_TOKENS"),
    ],
)
async def test_a_step_with_nothing_to_learn_is_skipped_and_counted(
    trainer: Trainer, samples: list[Sample], reason: str
) -> None:
    answer = await trainer.train(1, samples)
    assert (answer.step, answer.policy_version, answer.skipped_reason) == (1, 0, reason)
    assert answer.metrics[metrics.SKIPPED_STEPS] == 1
    status = await trainer.status()
    assert (status.step, status.policy_version, status.skipped_step_count) == (1, 0, 1)
    assert await trainer.train(1, samples) == answer
    assert (await trainer.train(2, USEFUL)).policy_version == 1


async def test_a_gradient_that_is_not_finite_is_skipped_and_counted(trainer: Trainer) -> None:
    trainer.engine.grad_norm = float("nan")
    answer = await trainer.train(1, USEFUL)
    assert (answer.policy_version, answer.skipped_reason) == (0, "NOT_FINITE")
    assert (await trainer.status()).skipped_step_count == 1


async def test_samples_without_advantage_are_not_forwarded(trainer: Trainer) -> None:
    await trainer.train(1, [*group_of([1, 1], group="same"), *USEFUL])
    (share,) = trainer.engine.shares[0]
    assert sum(len(batch.tokens.lengths) for batch in share) == 2


async def test_a_step_that_outlives_its_caller_is_found_by_the_next_call(trainer: Trainer) -> None:
    trainer.engine.gate.clear()
    with pytest.raises(DeadlinePassed):
        await trainer.train(1, USEFUL, timeout=0.3)
    again = asyncio.create_task(trainer.train(1, USEFUL))
    await asyncio.sleep(0.1)
    trainer.engine.gate.set()
    assert (await again).step == 1
    assert trainer.engine.updates == 1


async def test_a_call_whose_deadline_passes_in_the_queue_is_dropped(trainer: Trainer) -> None:
    trainer.engine.gate.clear()
    running = asyncio.create_task(trainer.train(1, USEFUL))
    await asyncio.to_thread(trainer.engine.entered.wait, SECONDS)
    with pytest.raises(DeadlinePassed):
        await trainer.client.export_model("model", timeout=0.2)
    await asyncio.sleep(0.3)
    trainer.engine.gate.set()
    await running
    await trainer.client.save_checkpoint(timeout=SECONDS)
    assert trainer.engine.order == ["update", "save"]


async def test_calls_run_in_the_order_of_their_arrival(trainer: Trainer) -> None:
    trainer.engine.gate.clear()
    step = asyncio.create_task(trainer.train(1, USEFUL))
    await asyncio.to_thread(trainer.engine.entered.wait, SECONDS)
    save = asyncio.create_task(trainer.client.save_checkpoint(timeout=SECONDS))
    await asyncio.sleep(0.1)
    lookup = asyncio.create_task(trainer.client.compute_logprobs(USEFUL, timeout=SECONDS))
    await asyncio.sleep(0.1)
    trainer.engine.gate.set()
    await asyncio.gather(step, save, lookup)
    assert trainer.engine.order == ["update", "save", "compute_logprobs"]
    assert await save == 1


async def test_an_unexpected_error_ends_the_service_and_hides_its_text_from_the_caller(trainer: Trainer) -> None:
    trainer.engine.error = RuntimeError("CUDA out of memory: secret")
    with pytest.raises(Unavailable) as caught:
        await trainer.train(1, USEFUL)
    assert "secret" not in caught.value.message
    assert "the engine failed while training: RuntimeError: CUDA out of memory" in trainer.fatal[0]
    assert "tokens_per_micro_batch" in trainer.fatal[0]


async def test_a_step_that_takes_too_long_ends_the_service(start_trainer: Start) -> None:
    trainer = await start_trainer(trainer={"step_timeout_seconds": 0.2})
    trainer.engine.gate.clear()
    with pytest.raises(DeadlinePassed):
        await trainer.train(1, USEFUL, timeout=1.0)
    trainer.engine.gate.set()
    assert "training for more than trainer.step_timeout_seconds = 0.2" in trainer.fatal[0]
