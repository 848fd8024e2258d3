"""Tests each rule of TrainStep in its proto, with a fake engine on a loopback server."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from fourfold import metrics
from fourfold.arrays import Float32Array
from fourfold.errors import AlreadyExists, DeadlinePassed, InvalidInput, Overloaded, Unavailable, WrongState
from fourfold.sample import Sample, VersionSpan
from fourfold.sample.wire import encode
from fourfold.trainer.client import train_step_ahead
from fourfold.trainer.v1 import trainer_service_pb2 as pb
from fourfold_trainer.engine import EngineFailedError
from fourfold_trainer.service import batch_stream
from fourfold_trainer.service.state import TrainerCore
from tests.fakes.stage import until
from tests.fakes.trainer_engine import VOCABULARY, FakeEngine, group_of, sample
from tests.fakes.trainer_service import SECONDS, Start, Trainer, config

USEFUL = group_of([0, 1])
NAN, INF = float("nan"), float("inf")


def floats(*values: float) -> Float32Array:
    return np.array(values, np.float32)


async def test_a_step_raises_step_and_version_and_reports_metrics(trainer: Trainer) -> None:
    answer = await trainer.train(1, [*USEFUL, *group_of([1, 1], group="same")])
    assert (answer.step, answer.policy_version, answer.skipped_reason) == (1, 1, "")
    assert answer.metrics[metrics.GRAD_NORM] == 1.5
    assert answer.metrics[metrics.ADVANTAGE_ABSMAX] == pytest.approx(0.7071, abs=1e-4)
    assert answer.metrics[metrics.MISMATCH_MEAN] == 0.5
    assert answer.metrics[metrics.TRAINED_SAMPLES] == 2
    assert set(answer.metrics) <= set(metrics.METRICS)
    weights = trainer.engine.shares[0][0][0].weights
    assert weights.tolist() == [pytest.approx(1 / 8)] * 4  # samples without advantage count, too
    status = await trainer.status()
    assert (status.step, status.policy_version) == (1, 1)


async def test_the_trainer_gives_memory_back_where_others_need_it(start_trainer: Start) -> None:
    asleep = {"rollout": {"gpus_per_replica": 1, "sleep_mode": True}}
    for tables in ({}, asleep, {"trainer": {"device": "cuda"}}, {"trainer": {"device": "cuda"}, **asleep}):
        shares = len(tables) == 2
        trainer = await start_trainer(**tables)
        assert trainer.engine.order == ["release_memory"] * shares, "when it has loaded"
        await trainer.train(1, USEFUL)
        assert trainer.engine.order[-1] == ("release_memory" if shares else "update_policy")


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


async def test_the_next_step_is_read_while_a_step_is_trained_and_begins_when_told(trainer: Trainer) -> None:
    trainer.engine.gate.clear()
    first = asyncio.create_task(trainer.train(1, USEFUL))
    assert await asyncio.to_thread(trainer.engine.entered.wait, SECONDS)
    start, second = asyncio.Event(), group_of([0, 1])
    ahead = asyncio.create_task(train_step_ahead(trainer.client, 2, second, start, timeout=SECONDS))
    await until(lambda: trainer.servicer.admitted == {1, 2})
    with pytest.raises(Overloaded, match="another TrainStep, of step 1"):
        await trainer.train(2, second)
    unmarked = iter([pb.TrainStepRequest(step=2, experiences=[encode(one) for one in second])])
    with pytest.raises(grpc.aio.AioRpcError, match="step 2 cannot be trained"):
        await trainer.stub.TrainStep(unmarked, timeout=SECONDS)
    with pytest.raises(WrongState, match="step 3 cannot be trained"):
        await trainer.train(3, second)
    trainer.engine.gate.set()
    assert (await first).step == 1
    assert (await trainer.status()).step == 1 and not ahead.done(), "the caller has not begun it"
    start.set()
    assert (await ahead).step == 2 and trainer.engine.updates == 2
    assert await trainer.train(2, second) == await ahead


async def test_a_batch_whose_caller_died_before_its_begin_is_not_trained(trainer: Trainer) -> None:
    call = trainer.stub.TrainStep(timeout=SECONDS)
    await call.write(pb.TrainStepRequest(step=1, experiences=[encode(one) for one in USEFUL], begin=False))
    await call.done_writing()
    with pytest.raises(grpc.aio.AioRpcError, match="the batch of step 1 ended without begin = true"):
        await call
    assert (await trainer.status()).step == 0
    assert (await trainer.train(1, USEFUL)).step == 1


async def test_nothing_may_follow_the_message_that_begins_a_step(trainer: Trainer) -> None:
    request = pb.TrainStepRequest(step=1, experiences=[encode(one) for one in USEFUL], begin=True)
    with pytest.raises(grpc.aio.AioRpcError, match="a message came after the one with begin = true"):
        await trainer.stub.TrainStep(iter([request, pb.TrainStepRequest(step=1)]), timeout=SECONDS)
    assert (await trainer.stub.TrainStep(iter([request]), timeout=SECONDS)).step == 1


async def test_a_step_whose_predecessor_failed_is_refused(trainer: Trainer) -> None:
    slow = trainer.stub.TrainStep(timeout=SECONDS)
    await slow.write(pb.TrainStepRequest(step=1, experiences=[encode(replace(USEFUL[0], score=None))]))
    await until(lambda: trainer.servicer.admitted == {1})
    start = asyncio.Event()
    ahead = asyncio.create_task(train_step_ahead(trainer.client, 2, USEFUL, start, timeout=SECONDS))
    await until(lambda: trainer.servicer.admitted == {1, 2})
    await slow.done_writing()
    with pytest.raises(grpc.aio.AioRpcError, match="has no score"):
        await slow
    start.set()
    with pytest.raises(WrongState, match="step 2 cannot be trained; the trainer is at step 0: send 1"):
        await ahead
    assert (await trainer.train(1, USEFUL)).step == 1


async def test_a_step_ahead_that_the_trainer_gives_up_ends_before_it_is_begun(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_stream, "_IDLE_SECONDS", 0.1)
    ahead = train_step_ahead(trainer.client, 1, USEFUL, asyncio.Event(), timeout=SECONDS)
    with pytest.raises(DeadlinePassed, match="no message of the batch came"):
        await asyncio.wait_for(ahead, SECONDS / 2)


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
        ({"behavior_logprobs": np.full(5, np.nan, np.float32)}, "sample bad: behavior_logprobs holds nan"),
        ({"behavior_logprobs": floats(NAN, NAN, NAN, -1, -INF)}, r"sample bad: behavior_logprobs\[4\] is -inf.*`tis`"),
        (
            {
                "version_spans": tuple(
                    VersionSpan(policy_version=v, token_count=n) for v, n in ((-1, 3), (0, 1), (7, 1))
                )
            },
            "sample bad was sampled by policy version 7; the trainer is at 0",
        ),
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


async def test_a_token_of_probability_zero_is_left_to_a_correction_that_rejects_it(start_trainer: Start) -> None:
    bad = replace(sample("bad"), behavior_logprobs=floats(NAN, NAN, NAN, -1, -INF))
    trainer = await start_trainer(algorithm={"correction": {"kind": "tis"}})
    assert (await trainer.train(1, [*USEFUL, bad])).step == 1
    masked = replace(bad, loss_mask=np.array([0, 0, 0, 1, 0], bool))
    assert (await (await start_trainer()).train(1, [*USEFUL, masked])).step == 1


async def test_fewer_samples_than_ranks_are_trained_on_and_a_recipe_that_asks_for_them_is_refused(
    start_trainer: Start,
) -> None:
    trainer = await start_trainer(FakeEngine(rank_count=3), trainer={"ranks": 3})
    answer = await trainer.train(1, USEFUL)
    assert [sum(batch.is_dummy for batch in share) for share in trainer.engine.shares[0]] == [0, 0, 1]
    assert answer.policy_version == 1 and answer.metrics[metrics.DUMMY_FRACTION] == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match=r"4 samples cannot feed 5 trainer ranks .* raise batch.prompts_per_step to"):
        config(trainer={"ranks": 5})


async def test_the_speed_is_measured_in_flop_on_a_gpu_and_in_tokens_everywhere(trainer: Trainer) -> None:
    answer = await trainer.train(1, USEFUL)
    assert answer.metrics[metrics.TRAIN_SPEED] > 0 and metrics.TRAIN_TFLOPS not in answer.metrics
    trainer.engine.machine = replace(trainer.engine.machine, gpu="NVIDIA H200")
    answer = await trainer.train(2, group_of([0, 1], version=1))
    seconds = 10 / answer.metrics[metrics.TRAIN_SPEED]
    flops = 6 * 1000 * 10 + 6 * 10 * 2 * 5**2  # two samples of 5 tokens
    assert answer.metrics[metrics.TRAIN_TFLOPS] == pytest.approx(flops / seconds / 1e12)
    assert answer.metrics[metrics.MFU] == pytest.approx(flops / seconds / 989.5e12)


async def test_a_sample_longer_than_the_context_is_refused(trainer: Trainer) -> None:
    with pytest.raises(InvalidInput, match="17 tokens; it must have 2 to 16"):
        await trainer.train(1, [sample("long", prompt=10, completion=7)])


async def test_missing_reference_logprobs_are_refused_when_the_loss_needs_them(start_trainer: Start) -> None:
    trainer = await start_trainer(algorithm={"kl": {"coef": 0.1}})
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
    assert trainer.engine.order == ["update_policy", "save"]


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
    assert trainer.engine.order == ["update_policy", "save", "compute_logprobs"]
    assert await save == 1


async def test_an_unexpected_error_ends_the_service_and_hides_its_text_from_the_caller(trainer: Trainer) -> None:
    trainer.engine.error = torch.OutOfMemoryError("CUDA out of memory. GPU 0 is full of a secret.")
    with pytest.raises(Unavailable) as caught:
        await trainer.train(1, USEFUL)
    assert "secret" not in caught.value.message
    text = "the engine failed while training: out of memory: GPU 0 is full of a secret; lower batch.tokens_per_micro_b"
    assert trainer.fatal[0].startswith(text)


async def test_a_gpu_without_room_for_the_model_is_named_with_the_keys_that_help(tmp_path: Path) -> None:
    def make_engine() -> FakeEngine:
        raise torch.OutOfMemoryError("CUDA out of memory. GPU 0 has a total capacity of 79.11 GiB.")

    fatal: list[str] = []
    core = TrainerCore(config(), run_dir=tmp_path, make_engine=make_engine, fatal=fatal.append)
    with pytest.raises(Unavailable, match="is ending"):
        await core.start()
    text = (
        "the engine failed while starting: out of memory: GPU 0 has a total capacity of 79.11 GiB; lower batch.tokens"
    )
    assert fatal[0].startswith(text)


async def test_an_error_after_the_weights_began_to_change_ends_the_service(trainer: Trainer) -> None:
    await trainer.train(1, USEFUL)
    trainer.engine.change_error = Unavailable("the link broke")
    trainer.engine.gate.clear()
    second = group_of([0, 1], version=1)
    with pytest.raises(Unavailable, match="the trainer failed and is ending"):
        await trainer.train(2, second)
    (message,) = trainer.fatal
    assert message == "the engine stopped in the middle of training: the link broke"
    assert (await trainer.status()).phase == pb.TRAINER_PHASE_TRAINING, "it waits for no call any more"
    trainer.engine.gate.set()
    with pytest.raises(Unavailable, match="is ending"):
        await trainer.train(2, second)
    assert trainer.engine.order == ["update_policy", "update_policy"], "the repeated step does not begin"


async def test_an_error_between_two_updates_of_a_step_ends_the_service(start_trainer: Start) -> None:
    trainer = await start_trainer(batch={"mini_batches_per_step": 2})
    update = trainer.engine.update_policy

    def second_fails(*args: Any) -> Any:
        if trainer.engine.updates:
            raise Unavailable("the disk is full")
        return update(*args)

    trainer.engine.update_policy = second_fails  # type: ignore[assignment, method-assign]
    with pytest.raises(Unavailable, match="is ending"):
        await trainer.train(1, [*USEFUL, *group_of([1, 0], group="h")])
    assert trainer.engine.updates == 1 and len(trainer.fatal) == 1


async def test_an_error_before_anything_has_changed_goes_to_the_caller_alone(trainer: Trainer) -> None:
    await trainer.train(1, USEFUL)
    trainer.engine.error = Unavailable("not now")
    second = group_of([0, 1], version=1)
    with pytest.raises(Unavailable, match="not now"):
        await trainer.train(2, second)
    assert not trainer.fatal
    assert (await trainer.train(2, second)).step == 2


async def test_ranks_that_cannot_go_on_end_the_service_at_any_call(trainer: Trainer) -> None:
    trainer.engine.error = EngineFailedError("rank 1: the link broke")
    with pytest.raises(Unavailable, match="is ending"):
        await trainer.client.compute_logprobs(USEFUL, timeout=SECONDS)
    assert trainer.fatal == ["rank 1: the link broke"]


async def test_a_step_that_takes_too_long_ends_the_service(start_trainer: Start) -> None:
    trainer = await start_trainer(trainer={"step_timeout_seconds": 0.2})
    trainer.engine.gate.clear()
    with pytest.raises(DeadlinePassed):
        await trainer.train(1, USEFUL, timeout=1.0)
    trainer.engine.gate.set()
    assert "training for more than trainer.step_timeout_seconds = 0.2" in trainer.fatal[0]
