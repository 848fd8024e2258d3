"""Numbers near the bounds of int64 are refused on arrival, so that no later call fails because of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from fourfold.bounds import MAX_NUMBER, MAX_RAISED_VERSION
from fourfold.errors import FourfoldError, Internal, InvalidInput, NotFound, WrongState
from fourfold.rollout.v1 import rollout_control_service_pb2 as control_pb
from fourfold.sample.wire import encode
from fourfold.trainer.v1 import trainer_service_pb2 as pb
from tests.conftest import Serve
from tests.fakes.rollout import OPEN, Service, rollout_service
from tests.fakes.trainer_engine import group_of
from tests.fakes.trainer_service import SECONDS, Trainer

USEFUL = group_of([0, 1])
ENDS = (-(2**63), -1, MAX_NUMBER + 1, 2**63 - 1)


@pytest.fixture
async def rollout(serve: Serve) -> AsyncIterator[Service]:
    async with rollout_service(serve) as running:
        yield running


async def test_a_version_at_the_end_of_int64_is_refused_and_training_goes_on(trainer: Trainer) -> None:
    for version in (*ENDS, MAX_RAISED_VERSION + 1):
        with pytest.raises(InvalidInput, match=f"policy_version is {version}; it must be at"):
            await trainer.client.raise_policy_version(version, timeout=SECONDS)
    assert await trainer.client.raise_policy_version(MAX_RAISED_VERSION, timeout=SECONDS) == MAX_RAISED_VERSION
    assert (await trainer.train(1, USEFUL)).policy_version == MAX_RAISED_VERSION + 1
    assert (await trainer.status()).policy_version == MAX_RAISED_VERSION + 1
    assert await trainer.client.save_checkpoint(timeout=SECONDS) == 1
    assert (await trainer.client.load_checkpoint(1, timeout=SECONDS)).policy_version == MAX_RAISED_VERSION + 1


@pytest.mark.parametrize("number", ENDS)
async def test_no_number_of_a_trainer_call_is_an_internal_error(trainer: Trainer, number: int) -> None:
    small = max(min(number, 2**31 - 1), -(2**31))
    part = pb.WeightedSample(experience=encode(USEFUL[0]))
    calls: list[Any] = [
        trainer.stub.TrainStep(iter([pb.TrainStepRequest(step=number)]), timeout=SECONDS),
        trainer.stub.ForwardBackward(pb.ForwardBackwardRequest(step=number, part=1, samples=[part]), timeout=SECONDS),
        trainer.stub.ForwardBackward(pb.ForwardBackwardRequest(step=1, part=number, samples=[part]), timeout=SECONDS),
        trainer.stub.OptimStep(pb.OptimStepRequest(step=number), timeout=SECONDS),
        trainer.stub.LoadCheckpoint(pb.LoadCheckpointRequest(step=number), timeout=SECONDS),
    ]
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value
    weights = trainer.weights
    offer: dict[str, Any] = {"backend": "shm", "epoch": 1, "receiver_count": 1, "group": 0}
    for change in ({"epoch": number}, {"receiver_count": small}, {"group": small}):
        with pytest.raises(InvalidInput, match=rf"{next(iter(change))} is"):
            await weights.make_offer(**offer | change, timeout=SECONDS)
    await weights.make_offer(epoch=1, backend="shm", receiver_count=1, timeout=SECONDS)
    for refused in (
        weights.open(epoch=number, timeout=SECONDS),
        weights.send(epoch=number, policy_version=0, timeout=SECONDS),
        weights.send(epoch=1, policy_version=number, timeout=SECONDS),
        weights.abort(epoch=number, timeout=SECONDS),
    ):
        with pytest.raises(FourfoldError) as failed:
            await refused
        assert not isinstance(failed.value, Internal)


async def test_an_impossible_checkpoint_is_not_found(trainer: Trainer) -> None:
    with pytest.raises(NotFound):
        await trainer.client.load_checkpoint(MAX_NUMBER, timeout=SECONDS)


@pytest.mark.parametrize("number", ENDS)
async def test_no_number_of_a_weight_update_is_an_internal_error(rollout: Service, number: int) -> None:
    control = rollout.control
    small = max(min(number, 2**31 - 1), -(2**31))
    with pytest.raises(InvalidInput, match="epoch is"):
        await control.open(epoch=number, timeout=2, **OPEN)
    with pytest.raises(InvalidInput, match="receiver_count is"):
        await control.open(epoch=1, timeout=2, **OPEN | {"receiver_count": small})
    with pytest.raises(InvalidInput, match="first_receiver_index"):
        await control.open(epoch=1, timeout=2, **OPEN | {"first_receiver_index": small})
    await control.open(epoch=1, timeout=2, **OPEN)
    wait = control_pb.PAUSE_MODE_WAIT
    with pytest.raises(InvalidInput, match="policy_version is"):
        await control.begin(epoch=1, policy_version=number, pause_mode=wait, timeout=2)
    await control.begin(epoch=1, policy_version=1, pause_mode=wait, timeout=2)
    with pytest.raises(WrongState):
        await control.receive(epoch=1, policy_version=number, timeout=2)
    with pytest.raises(WrongState):
        await control.commit(epoch=1, policy_version=number, timeout=2)
    await control.receive(epoch=1, policy_version=1, timeout=2)
    await control.commit(epoch=1, policy_version=1, timeout=2)
    assert (await rollout.client.get_info(timeout=2)).policy_version == 1
