"""Tests TrainerService, except its training calls, and TrainerWeightService with a fake engine on loopback."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from fourfold.contract import CONTRACT_VERSION
from fourfold.errors import InvalidInput, NotFound, StaleEpoch, Unavailable, WrongState
from fourfold.sample.wire import encode
from fourfold.trainer.v1 import trainer_service_pb2 as pb
from fourfold.types.v1 import experience_pb2
from fourfold_trainer.service import weight_servicer
from tests.fakes.trainer_engine import MANIFEST, VOCABULARY, FakeEngine, group_of, sample
from tests.fakes.trainer_service import SECONDS, SHA256, Start, Trainer

USEFUL = group_of([0, 1])


# ---- status ----


async def test_status_names_the_limits_and_the_tokenizer(trainer: Trainer) -> None:
    assert await trainer.status() == pb.TrainerStatus(
        phase=pb.TRAINER_PHASE_WAITING,
        checkpoint_step=-1,
        rank_count=1,
        tokenizer_sha256=SHA256,
        vocabulary_size=VOCABULARY,
        max_context_tokens=16,
    )


async def test_the_status_has_the_version_of_the_contract(trainer: Trainer) -> None:
    response = await trainer.client._stub.GetStatus(pb.GetStatusRequest(), timeout=SECONDS)
    assert response.contract_version == CONTRACT_VERSION


async def test_status_and_watch_answer_while_a_step_runs(trainer: Trainer) -> None:
    phases: list[int] = []

    async def watch() -> None:
        async for status in trainer.client.watch_status():
            phases.append(status.phase)
            if status.step == 1 and status.phase == pb.TRAINER_PHASE_WAITING:
                return

    watching = asyncio.create_task(watch())
    trainer.engine.gate.clear()
    step = asyncio.create_task(trainer.train(1, USEFUL))
    await asyncio.to_thread(trainer.engine.entered.wait, SECONDS)
    assert (await trainer.status()).phase == pb.TRAINER_PHASE_TRAINING
    trainer.engine.gate.set()
    await step
    await asyncio.wait_for(watching, SECONDS)
    assert phases[0] == pb.TRAINER_PHASE_WAITING and pb.TRAINER_PHASE_TRAINING in phases


async def test_calls_before_the_model_is_loaded_are_unavailable(start_trainer: Start) -> None:
    trainer = await start_trainer(started=False)
    assert (await trainer.status()).phase == pb.TRAINER_PHASE_STARTING
    with pytest.raises(Unavailable, match="loading") as caught:
        await trainer.train(1, USEFUL)
    assert caught.value.retry_after == 1.0


# ---- ComputeLogprobs ----


async def test_logprobs_come_back_in_the_order_of_the_request(start_trainer: Start) -> None:
    trainer = await start_trainer(FakeEngine(rank_count=2), trainer={"ranks": 2}, batch={"tokens_per_micro_batch": 16})
    samples = [sample(f"s{n}", prompt=n, completion=1) for n in (4, 9, 2, 7, 3)]
    rows = await trainer.client.compute_logprobs(samples, timeout=SECONDS)
    for row, one in zip(rows, samples, strict=True):
        assert np.isnan(row[0]) and np.array_equal(row[1:], -one.token_ids[1:].astype(np.float32))


async def test_logprobs_are_stamped_with_the_version(trainer: Trainer) -> None:
    await trainer.train(1, USEFUL)
    request = pb.ComputeLogprobsRequest(experiences=[encode(USEFUL[0])])
    assert (await trainer.stub.ComputeLogprobs(request, timeout=SECONDS)).policy_version == 1


@pytest.mark.parametrize(
    "experiences",
    [
        [],
        [experience_pb2.Experience(sample_id="a", token_ids=b"\1\0\0\0\2\0\0\0")],  # no temperature
        [experience_pb2.Experience(sample_id="a", token_ids=b"\1\0\0", temperature=1)],
        [experience_pb2.Experience(sample_id="a", token_ids=bytes(4 * 17), temperature=1)],
    ],
)
async def test_a_bad_lookup_is_refused(trainer: Trainer, experiences: list[experience_pb2.Experience]) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await trainer.stub.ComputeLogprobs(pb.ComputeLogprobsRequest(experiences=experiences), timeout=SECONDS)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_reference_is_that_of_the_weights_before_step_1(start_trainer: Start) -> None:
    trainer = await start_trainer(
        batch={"group_size": 2}, algorithm={"loss": {"kind": "dpo"}, "filter": {"keep": "varied"}}
    )
    pair = group_of([1, 0], completion=4)
    rows = await trainer.client.reference_logprobs(pair, step=1, timeout=SECONDS)
    for row, one in zip(rows, pair, strict=True):
        wanted = np.where(one.loss_mask, -one.token_ids, 0).astype(np.float32)
        assert np.isnan(row[0]) and np.array_equal(row[1:], wanted[1:])
    with pytest.raises(InvalidInput, match="a pair has 2"):
        await trainer.client.reference_logprobs(pair[:1], step=1, timeout=SECONDS)
    request = pb.ComputeLogprobsRequest(experiences=map(encode, pair), reference_of_step=1, include_entropies=True)
    with pytest.raises(grpc.aio.AioRpcError, match="log-probabilities alone"):
        await trainer.stub.ComputeLogprobs(request, timeout=SECONDS)
    known = [replace(one, reference_logprobs=row) for one, row in zip(pair, rows, strict=True)]
    losses, margins = await trainer.client.unit_losses(known, step=1, timeout=SECONDS)
    assert losses == pytest.approx([np.log(2)]) and margins == [0.0]
    with pytest.raises(InvalidInput, match="no reference_logprobs"):
        await trainer.client.unit_losses(pair, step=1, timeout=SECONDS)
    more: dict[str, Any]
    for more in ({"include_values": True}, {"reference_of_step": 1}):
        request = pb.ComputeLogprobsRequest(experiences=map(encode, known), losses_of_step=1, **more)
        with pytest.raises(grpc.aio.AioRpcError, match="losses alone"):
            await trainer.stub.ComputeLogprobs(request, timeout=SECONDS)
    await trainer.client.forward_backward([pair[0].token_ids], [pair[0].loss_mask], step=1, timeout=SECONDS)
    await trainer.client.optim_step(1, timeout=SECONDS)
    with pytest.raises(WrongState, match="before step 1, and the trainer is at step 1"):
        await trainer.client.reference_logprobs(pair, step=2, timeout=SECONDS)


# ---- checkpoints and export ----


async def test_a_checkpoint_restores_weights_step_version_and_the_last_answer(start_trainer: Start) -> None:
    trainer = await start_trainer()
    first = await trainer.train(1, USEFUL)
    assert await trainer.client.save_checkpoint(timeout=SECONDS) == 1
    assert (await trainer.status()).checkpoint_step == 1
    other = await start_trainer()  # as after a restart
    assert (await other.status()).checkpoint_step == 1
    status = await other.client.load_checkpoint(1, timeout=SECONDS)
    assert (status.step, status.policy_version, other.engine.updates) == (1, 1, 1)
    assert status.phase == pb.TRAINER_PHASE_WAITING
    assert await other.train(1, USEFUL) == first
    assert (await other.train(2, group_of([0, 1], version=1))).policy_version == 2


async def test_a_checkpoint_from_a_lost_future_is_replaced(trainer: Trainer) -> None:
    await trainer.client.save_checkpoint(timeout=SECONDS)
    await trainer.train(1, USEFUL)
    await trainer.client.save_checkpoint(timeout=SECONDS)
    await trainer.client.load_checkpoint(0, timeout=SECONDS)
    await trainer.train(1, group_of([1, 0]))  # another batch than the first time
    await trainer.client.save_checkpoint(timeout=SECONDS)
    assert trainer.engine.order.count("save") == 3


async def test_a_missing_checkpoint_is_not_found_and_changes_nothing(trainer: Trainer) -> None:
    await trainer.train(1, USEFUL)
    await trainer.client.save_checkpoint(timeout=SECONDS)
    with pytest.raises(NotFound, match=r"no checkpoint of step 7 .*there are: 1"):
        await trainer.client.load_checkpoint(7, timeout=SECONDS)
    assert (await trainer.status()).step == 1 and trainer.engine.updates == 1


async def test_a_checkpoint_of_another_layout_is_refused(start_trainer: Start) -> None:
    trainer = await start_trainer()
    await trainer.client.save_checkpoint(timeout=SECONDS)
    other = await start_trainer(model={"dtype": "float32"})
    with pytest.raises(WrongState, match="written with dtype = bfloat16, the trainer runs with float32"):
        await other.client.load_checkpoint(0, timeout=SECONDS)
    assert "load" not in other.engine.order


async def test_a_checkpoint_is_loaded_by_another_number_of_ranks_and_another_stage(start_trainer: Start) -> None:
    trainer = await start_trainer()
    await trainer.train(1, USEFUL)
    await trainer.client.save_checkpoint(timeout=SECONDS)
    other = await start_trainer(FakeEngine(rank_count=2), trainer={"ranks": 2, "zero_stage": 1})
    assert (await other.client.load_checkpoint(1, timeout=SECONDS)).step == 1


async def test_before_a_machine_leaves_every_step_is_saved_besides_the_runs_checkpoints(start_trainer: Start) -> None:
    trainer = await start_trainer(checkpoint={"keep": 1})
    folder = trainer.run_dir / "checkpoints"
    await trainer.core.save_before_leaving()
    assert not folder.exists(), "there is nothing to lose"
    await trainer.train(1, group_of([0, 1], version=0))
    await trainer.core.save_before_leaving()
    await trainer.train(2, group_of([0, 1], version=1))
    await trainer.core.save_before_leaving()  # in the queue after that of the step
    assert sorted(p.name for p in folder.iterdir()) == ["step-000001", "step-000002"], "the ledger may need the older"
    assert (await trainer.status()).checkpoint_step == 2
    other = await start_trainer()
    assert (await other.client.load_checkpoint(2, timeout=SECONDS)).last_step.step == 2


async def test_the_best_checkpoints_stay_too_and_the_newest_is_found(start_trainer: Start) -> None:
    trainer = await start_trainer(checkpoint={"keep": 1, "keep_best": 1}, data={"eval": {"path": "eval.jsonl"}})
    for step, score in ((1, 0.0), (2, 0.75), (3, None), (4, 0.5)):
        await trainer.train(step, group_of([0, 1], version=step - 1))
        await trainer.client.save_checkpoint(score=score, timeout=SECONDS)
    assert sorted(p.name for p in (trainer.run_dir / "checkpoints").iterdir()) == ["step-000002", "step-000004"]
    record = json.loads((trainer.run_dir / "checkpoints/step-000002/trainer.json").read_text())
    assert record["score"] == 0.75
    other = await start_trainer()
    assert (await other.status()).checkpoint_step == 4


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
async def test_a_score_that_is_not_finite_is_refused(trainer: Trainer, score: float) -> None:
    with pytest.raises(InvalidInput, match=r"score is (nan|inf); it must be finite: leave it out when there is none"):
        await trainer.client.save_checkpoint(score=score, timeout=SECONDS)
    assert trainer.engine.order == []


async def test_the_average_is_exported_where_one_is_kept(start_trainer: Start) -> None:
    trainer = await start_trainer(trainer={"ema_decay": 0.9})
    path = Path(await trainer.client.export_model("model-ema", ema=True, timeout=SECONDS))
    assert (path / "model.safetensors").read_text() == "0 on average"
    other = await start_trainer()
    with pytest.raises(WrongState, match=r"trainer\.ema_decay = 0, so no average is kept; set it"):
        await other.client.export_model("other", ema=True, timeout=SECONDS)
    assert not (other.run_dir / "other").exists()


async def test_the_critic_is_exported_where_there_is_one(start_trainer: Start) -> None:
    trainer = await start_trainer(algorithm={"preset": "ppo"}, trainer={"ema_decay": 0.9})
    path = Path(await trainer.client.export_model("critic", critic=True, timeout=SECONDS))
    assert (path / "model.safetensors").read_text() == "critic 0"
    with pytest.raises(InvalidInput, match="ema and critic exclude each other"):
        await trainer.client.export_model("other", ema=True, critic=True, timeout=SECONDS)
    other = await start_trainer()
    with pytest.raises(WrongState, match="the algorithm of the recipe trains no critic"):
        await other.client.export_model("other", critic=True, timeout=SECONDS)
    assert not (other.run_dir / "other").exists()


async def test_an_export_replaces_the_folder_whole_or_not_at_all(trainer: Trainer) -> None:
    path = Path(await trainer.client.export_model("model", timeout=SECONDS))
    assert path == trainer.run_dir / "model" and (path / "model.safetensors").read_text() == "0"
    await trainer.train(1, USEFUL)
    trainer.engine.error = Unavailable("the disk is full")
    with pytest.raises(Unavailable):
        await trainer.client.export_model("model", timeout=SECONDS)
    assert (path / "model.safetensors").read_text() == "0"
    await trainer.client.export_model("model", timeout=SECONDS)
    assert (path / "model.safetensors").read_text() == "1"
    assert [p.name for p in trainer.run_dir.iterdir()] == ["model"]


@pytest.mark.parametrize("name", ["", "a/b", ".."])
async def test_an_export_stays_inside_of_the_run_folder(trainer: Trainer, name: str) -> None:
    with pytest.raises(InvalidInput, match="name"):
        await trainer.client.export_model(name, timeout=SECONDS)


@pytest.mark.parametrize("name", ["checkpoints", "experiences", "logs", "metrics", "traces"])
async def test_an_export_replaces_no_folder_without_a_model(trainer: Trainer, name: str) -> None:
    (trainer.run_dir / name / "kept").mkdir(parents=True)
    with pytest.raises(InvalidInput, match="has no model that may be replaced"):
        await trainer.client.export_model(name, timeout=SECONDS)
    assert (trainer.run_dir / name / "kept").is_dir()


# ---- versions and weights ----


async def test_the_policy_version_is_raised_and_never_lowered(trainer: Trainer) -> None:
    assert await trainer.client.raise_policy_version(7, timeout=SECONDS) == 7
    assert await trainer.client.raise_policy_version(3, timeout=SECONDS) == 7
    assert (await trainer.train(1, USEFUL)).policy_version == 8
    with pytest.raises(InvalidInput):
        await trainer.client.raise_policy_version(-1, timeout=SECONDS)


async def test_a_weight_update_from_manifest_to_digest(trainer: Trainer) -> None:
    manifest = await trainer.weights.get_manifest(timeout=SECONDS)
    assert manifest.manifest == MANIFEST.to_bytes() and manifest.manifest_sha256 == MANIFEST.sha256
    assert list(manifest.backends) == ["shm", "gloo"] and len(manifest.host_id) == 32
    assert not manifest.device_uuids and not manifest.reachable_device_uuids
    offers = await trainer.weights.make_offer(epoch=1, backend="shm", receiver_count=2, timeout=SECONDS)
    assert offers == [b"shm-2-0-0"]
    more = await trainer.weights.make_offer(epoch=1, backend="gloo", receiver_count=3, group=1, timeout=SECONDS)
    assert more == [b"gloo-3-0-1"]
    await trainer.weights.open(epoch=1, timeout=SECONDS)
    sent = await trainer.weights.send(epoch=1, policy_version=0, timeout=SECONDS)
    assert (sent.weights_digest, sent.sent_bytes, sent.sums) == (bytes(32), 8, bytes(16))
    sent = await trainer.weights.send(epoch=1, policy_version=0, skip_sums=True, timeout=SECONDS)
    assert sent.sums == b""


async def test_a_trainer_on_gpus_reports_its_gpus_and_those_that_reach_them(
    start_trainer: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_servicer, "reachable_gpus", lambda uuids: [*uuids, b"c" * 16])
    engine = FakeEngine()
    engine.backends = ("cuda_ipc", "nccl", "shm", "gloo")
    engine.device_uuids = (b"a" * 16, b"b" * 16)
    trainer = await start_trainer(engine, trainer={"device": "cuda"})
    manifest = await trainer.weights.get_manifest(timeout=SECONDS)
    assert list(manifest.backends) == ["cuda_ipc", "nccl", "shm", "gloo"]
    assert list(manifest.device_uuids) == [b"a" * 16, b"b" * 16]
    assert list(manifest.reachable_device_uuids) == [b"a" * 16, b"b" * 16, b"c" * 16]


async def test_another_epoch_is_stale(trainer: Trainer) -> None:
    await trainer.weights.make_offer(epoch=2, backend="shm", receiver_count=1, timeout=SECONDS)
    with pytest.raises(StaleEpoch):
        await trainer.weights.make_offer(epoch=2, backend="shm", receiver_count=1, timeout=SECONDS)
    with pytest.raises(StaleEpoch):
        await trainer.weights.open(epoch=1, timeout=SECONDS)
    with pytest.raises(StaleEpoch):
        await trainer.weights.send(epoch=3, policy_version=0, timeout=SECONDS)


async def test_only_the_present_version_can_be_sent(trainer: Trainer) -> None:
    await trainer.weights.make_offer(epoch=1, backend="shm", receiver_count=1, timeout=SECONDS)
    with pytest.raises(WrongState, match="policy version 1 cannot be sent; the current weights are 0"):
        await trainer.weights.send(epoch=1, policy_version=1, timeout=SECONDS)


async def test_an_unknown_backend_or_no_receivers_are_refused(trainer: Trainer) -> None:
    with pytest.raises(InvalidInput, match="backend is 'nccl'; the trainer has shm, gloo"):
        await trainer.weights.make_offer(epoch=1, backend="nccl", receiver_count=1, timeout=SECONDS)
    with pytest.raises(InvalidInput, match="receiver_count is 0"):
        await trainer.weights.make_offer(epoch=1, backend="shm", receiver_count=0, timeout=SECONDS)
    with pytest.raises(InvalidInput, match="group is -1"):
        await trainer.weights.make_offer(epoch=1, backend="shm", receiver_count=1, group=-1, timeout=SECONDS)


async def test_an_abort_overtakes_the_transfer_that_runs(trainer: Trainer) -> None:
    await trainer.weights.make_offer(epoch=1, backend="shm", receiver_count=1, timeout=SECONDS)
    trainer.engine.gate.clear()
    sending = asyncio.create_task(trainer.weights.send(epoch=1, policy_version=0, timeout=SECONDS))
    await asyncio.to_thread(trainer.engine.entered.wait, SECONDS)
    assert (await trainer.status()).phase == pb.TRAINER_PHASE_PUBLISHING
    await trainer.weights.abort(epoch=1, timeout=SECONDS)
    with pytest.raises(StaleEpoch, match="aborted"):
        await sending
    assert (await trainer.status()).phase == pb.TRAINER_PHASE_WAITING


async def test_the_transfer_of_a_killed_coordinator_is_aborted(trainer: Trainer) -> None:
    await trainer.weights.make_offer(epoch=1, backend="shm", receiver_count=1, timeout=SECONDS)
    trainer.engine.gate.clear()
    sending = asyncio.create_task(trainer.weights.send(epoch=1, policy_version=0, timeout=60))
    await asyncio.to_thread(trainer.engine.entered.wait, SECONDS)
    sending.cancel()  # as when the coordinator is killed: the call ends from the other side
    await asyncio.to_thread(trainer.engine.aborted.wait, SECONDS)
    trainer.engine.gate.set()
    assert await trainer.weights.make_offer(epoch=2, backend="shm", receiver_count=1, timeout=SECONDS)


# ---- end ----


async def test_stop_leaves_the_group_when_idle_and_closes_immediately_when_busy(start_trainer: Start) -> None:
    idle, busy = await start_trainer(), await start_trainer()
    await idle.core.stop()
    assert idle.engine.left and idle.engine.closed
    busy.engine.gate.clear()
    step = asyncio.create_task(busy.train(1, USEFUL))
    await asyncio.to_thread(busy.engine.entered.wait, SECONDS)
    await asyncio.wait_for(busy.core.stop(), 3)
    assert busy.engine.closed and not busy.engine.left
    busy.engine.gate.set()
    await step
