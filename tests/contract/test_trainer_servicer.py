"""TrainerService and TrainerWeightService on a loopback server with a fake engine: one test for each rule."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from fourfold import metrics
from fourfold.config import Config
from fourfold.errors import (
    AlreadyExists,
    DeadlinePassed,
    InvalidInput,
    NotFound,
    StaleEpoch,
    Unavailable,
    WrongState,
)
from fourfold.trainer.client import TrainerClient, TrainerWeightClient
from fourfold.trainer.v1 import trainer_service_pb2 as pb
from fourfold.trainer.v1 import trainer_service_pb2_grpc as pb_grpc
from fourfold.trainer.v1 import trainer_weight_service_pb2 as weight
from fourfold.trainer.v1 import trainer_weight_service_pb2_grpc as weight_grpc
from fourfold.types.v1 import experience_pb2
from fourfold.wire import Sample, encode
from fourfold_trainer.core import TrainerCore
from fourfold_trainer.servicer import TrainerServicer
from fourfold_trainer.weight_servicer import TrainerWeightServicer
from tests.conftest import Serve
from tests.fakes.trainer_engine import MANIFEST, VOCABULARY, FakeEngine, group_of, sample

SHA256 = bytes(range(32))
SECONDS = 10.0


def config(**changes: dict[str, Any]) -> Config:
    tables: dict[str, Any] = {
        "name": "test",
        "steps": 10,
        "model": {"source": "nowhere", "max_context_tokens": 16},
        "data": {"train": {"path": "train.jsonl"}},
        "batch": {"prompts_per_step": 2, "group_size": 2, "tokens_per_micro_batch": 32},
        "sampling": {"max_new_tokens": 8},
    }
    for table, values in changes.items():
        tables[table] = {**tables.get(table, {}), **values}
    return Config.model_validate(tables)


@dataclass(slots=True, kw_only=True, eq=False)
class Trainer:
    """A served trainer."""

    engine: FakeEngine
    core: TrainerCore
    client: TrainerClient
    weights: TrainerWeightClient
    stub: pb_grpc.TrainerServiceAsyncStub
    run_dir: Path
    fatal: list[str]

    async def train(self, step: int, samples: Sequence[Sample], timeout: float = SECONDS) -> pb.TrainStepResponse:
        return await self.client.train_step(step, [encode(s) for s in samples], timeout=timeout)

    async def status(self) -> pb.TrainerStatus:
        return await self.client.get_status(timeout=SECONDS)


Start = Callable[..., Awaitable[Trainer]]


@pytest.fixture
async def start(serve: Serve, tmp_path: Path) -> AsyncIterator[Start]:
    cores: list[TrainerCore] = []

    async def make(engine: FakeEngine | None = None, *, started: bool = True, **changes: dict[str, Any]) -> Trainer:
        engine = engine or FakeEngine()
        fatal: list[str] = []
        core = TrainerCore(config(**changes), run_dir=tmp_path, make_engine=lambda: engine, fatal=fatal.append)
        cores.append(core)
        channel = await serve(
            (
                pb.DESCRIPTOR.services_by_name["TrainerService"],
                pb_grpc.add_TrainerServiceServicer_to_server,
                TrainerServicer(core, tokenizer_sha256=SHA256),
            ),
            (
                weight.DESCRIPTOR.services_by_name["TrainerWeightService"],
                weight_grpc.add_TrainerWeightServiceServicer_to_server,
                TrainerWeightServicer(core),
            ),
        )
        if started:
            await core.start()
        return Trainer(
            engine=engine,
            core=core,
            client=TrainerClient(channel, peer="trainer-0"),
            weights=TrainerWeightClient(channel, peer="trainer-0"),
            stub=pb_grpc.TrainerServiceStub(channel),
            run_dir=tmp_path,
            fatal=fatal,
        )

    yield make
    for core in cores:
        await core.stop()


@pytest.fixture
async def trainer(start: Start) -> Trainer:
    return await start()


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


async def test_calls_before_the_model_is_loaded_are_unavailable(start: Start) -> None:
    trainer = await start(started=False)
    assert (await trainer.status()).phase == pb.TRAINER_PHASE_STARTING
    with pytest.raises(Unavailable, match="loading") as caught:
        await trainer.train(1, USEFUL)
    assert caught.value.retry_after == 1.0


# ---- TrainStep ----


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


async def test_missing_reference_logprobs_are_refused_when_the_loss_needs_them(start: Start) -> None:
    trainer = await start(algorithm={"kl_coef": 0.1})
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
    assert sum(len(batch.tokens.token_ids) for batch in share) == 2


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


async def test_a_step_that_takes_too_long_ends_the_service(start: Start) -> None:
    trainer = await start(trainer={"step_timeout_seconds": 0.2})
    trainer.engine.gate.clear()
    with pytest.raises(DeadlinePassed):
        await trainer.train(1, USEFUL, timeout=1.0)
    trainer.engine.gate.set()
    assert "training for more than trainer.step_timeout_seconds = 0.2" in trainer.fatal[0]


# ---- ComputeLogprobs ----


async def test_logprobs_come_back_in_the_order_of_the_request(start: Start) -> None:
    trainer = await start(FakeEngine(rank_count=2), trainer={"ranks": 2}, batch={"tokens_per_micro_batch": 16})
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


# ---- checkpoints and export ----


async def test_a_checkpoint_restores_weights_step_version_and_the_last_answer(start: Start) -> None:
    trainer = await start()
    first = await trainer.train(1, USEFUL)
    assert await trainer.client.save_checkpoint(timeout=SECONDS) == 1
    assert (await trainer.status()).checkpoint_step == 1
    other = await start()  # as after a restart
    assert (await other.status()).checkpoint_step == 1
    status = await other.client.load_checkpoint(1, timeout=SECONDS)
    assert (status.step, status.policy_version, other.engine.updates) == (1, 1, 1)
    assert status.phase == pb.TRAINER_PHASE_WAITING
    assert await other.train(1, USEFUL) == first
    assert (await other.train(2, group_of([0, 1], version=1))).policy_version == 2


async def test_a_checkpoint_that_exists_is_not_written_again(trainer: Trainer) -> None:
    await trainer.train(1, USEFUL)
    for _ in range(2):
        await trainer.client.save_checkpoint(timeout=SECONDS)
    assert trainer.engine.order.count("save") == 1


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


async def test_a_checkpoint_of_another_layout_is_refused(start: Start) -> None:
    trainer = await start()
    await trainer.client.save_checkpoint(timeout=SECONDS)
    other = await start(FakeEngine(rank_count=2), trainer={"ranks": 2})
    with pytest.raises(WrongState, match="written with ranks = 1, the trainer runs with 2"):
        await other.client.load_checkpoint(0, timeout=SECONDS)
    assert "load" not in other.engine.order


async def test_a_damaged_checkpoint_is_refused(trainer: Trainer) -> None:
    await trainer.client.save_checkpoint(timeout=SECONDS)
    (trainer.run_dir / "checkpoints/step-000000/rank-000.safetensors").write_text("torn")
    with pytest.raises(WrongState, match="damaged"):
        await trainer.client.load_checkpoint(0, timeout=SECONDS)


async def test_only_the_newest_checkpoints_stay(start: Start) -> None:
    trainer = await start(checkpoint={"keep": 2})
    for step in range(1, 5):
        await trainer.train(step, group_of([0, 1], version=step - 1))
        await trainer.client.save_checkpoint(timeout=SECONDS)
    assert sorted(p.name for p in (trainer.run_dir / "checkpoints").iterdir()) == ["step-000003", "step-000004"]


async def test_a_checkpoint_that_fails_half_way_leaves_the_one_before(trainer: Trainer) -> None:
    await trainer.client.save_checkpoint(timeout=SECONDS)
    await trainer.train(1, USEFUL)
    trainer.engine.error = Unavailable("the disk is full")
    with pytest.raises(Unavailable, match="the disk is full"):
        await trainer.client.save_checkpoint(timeout=SECONDS)
    assert [p.name for p in (trainer.run_dir / "checkpoints").iterdir()] == ["step-000000"]
    assert (await trainer.status()).checkpoint_step == 0
    record = json.loads((trainer.run_dir / "checkpoints/step-000000/trainer.json").read_text())
    assert record["state"]["step"] == 0


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


@pytest.mark.parametrize("name", ["", "a/b", "..", "checkpoints"])
async def test_an_export_stays_inside_of_the_run_folder(trainer: Trainer, name: str) -> None:
    with pytest.raises(InvalidInput, match="name"):
        await trainer.client.export_model(name, timeout=SECONDS)


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
    offers = await trainer.weights.make_offer(epoch=1, backend="shm", receiver_count=2, timeout=SECONDS)
    assert offers == [b"shm-2-0"]
    await trainer.weights.open(epoch=1, timeout=SECONDS)
    sent = await trainer.weights.send(epoch=1, policy_version=0, timeout=SECONDS)
    assert (sent.weights_digest, sent.sent_bytes) == (bytes(32), 8)


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
    with pytest.raises(WrongState, match="policy version 1 cannot be sent; the present weights are 0"):
        await trainer.weights.send(epoch=1, policy_version=1, timeout=SECONDS)


async def test_an_unknown_backend_or_no_receivers_are_refused(trainer: Trainer) -> None:
    with pytest.raises(InvalidInput, match="backend is 'nccl'; the trainer has shm, gloo"):
        await trainer.weights.make_offer(epoch=1, backend="nccl", receiver_count=1, timeout=SECONDS)
    with pytest.raises(InvalidInput, match="receiver_count is 0"):
        await trainer.weights.make_offer(epoch=1, backend="shm", receiver_count=0, timeout=SECONDS)


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


# ---- end ----


async def test_stop_says_farewell_when_idle_and_closes_at_once_when_not(start: Start) -> None:
    idle, busy = await start(), await start()
    await idle.core.stop()
    assert idle.engine.left and idle.engine.closed
    busy.engine.gate.clear()
    step = asyncio.create_task(busy.train(1, USEFUL))
    await asyncio.to_thread(busy.engine.entered.wait, SECONDS)
    await asyncio.wait_for(busy.core.stop(), 3)
    assert busy.engine.closed and not busy.engine.left
    busy.engine.gate.set()
    await step
