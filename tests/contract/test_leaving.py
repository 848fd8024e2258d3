"""Engines that leave between two calls of a sequence: the sequence ends with an error that has a name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import Unavailable
from fourfold.rollout.v1 import rollout_control_service_pb2 as control
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rpc.channel import open_channel
from fourfold.trainer.v1 import trainer_weight_service_pb2 as weight
from fourfold_coordinator.routing.registry import Member, MemberChange
from fourfold_coordinator.routing.replica import Replica
from tests.fakes.stage import Stage, successor, until
from tests.fakes.toy_trainer import FakeTrainer

SLEEP = {"gpus_per_replica": 1, "sleep_mode": True, "replicas": 2}
CLOSED_SECONDS = 0.6
"""After which the router has closed the channel of a member that left."""

CALLS: dict[str, Callable[[Replica], Awaitable[object]]] = {
    "one answer": lambda r: r.engine_control.describe(timeout=5),
    "a stream of answers": lambda r: r.rollout.complete(rollout.GenerateRequest(request_id="a"), timeout=5),
    "a stream of requests": lambda r: r.trainer.train_step(1, [], timeout=5),
}


@pytest.mark.parametrize("call", CALLS)
async def test_who_is_gone_is_not_called(make_stage: Callable[..., Stage], call: str) -> None:
    stage = make_stage()
    engine = stage.rollouts[0]
    await engine.start()
    member = Member(
        member_id="rollout-0",
        incarnation="0" * 32,
        role=Role.ROLE_ROLLOUT,
        target=engine.target,
        tokenizer_sha256=engine.tokenizer_sha256,
    )
    replica = Replica(member, open_channel(engine.target, None))
    await replica.call(replica.engine_control.describe(timeout=5))
    replica.leave(MemberChange.LEFT.value, cut=False)
    await replica.channel.close()
    with pytest.raises(Unavailable, match=rf"rollout-0 at {engine.target}: left") as refused:
        await replica.call(CALLS[call](replica))
    assert refused.value.reason == "LEASE_ENDED"


async def check_goes_on(stage: Stage) -> None:
    await stage.complete()
    leaving, staying = stage.rollouts
    assert leaving.commits == [] and staying.version == stage.trainer.version > 0


async def test_an_engine_that_leaves_between_two_tries_to_put_it_to_sleep(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=2, rollout=SLEEP)
    leaving = stage.rollouts[0]

    async def leave() -> None:
        await leaving.leave()
        await asyncio.sleep(0.1)

    leaving.on_sleep, leaving.busy_sleeps = leave, 1000
    await check_goes_on(stage)


async def test_an_engine_that_leaves_before_it_is_woken(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=2, rollout=SLEEP)
    leaving = stage.rollouts[0]
    leaving.asleep, leaving.state = {"weights", "kv_cache"}, control.WEIGHT_STATE_DIRTY  # by another coordinator
    leaving.on_describe = leaving.leave
    stage.rollouts[1].on_describe = lambda: asyncio.sleep(CLOSED_SECONDS)
    await check_goes_on(stage)


async def test_an_engine_that_leaves_while_the_trainer_looks_at_the_probe(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=2, rollout={"replicas": 2})
    leaving = stage.rollouts[0]

    async def leave() -> None:
        stage.trainer.on_probe = None
        await leaving.leave()
        await asyncio.sleep(CLOSED_SECONDS)

    stage.trainer.on_probe = leave
    await check_goes_on(stage)


class SpotTrainer(FakeTrainer):
    """Leaves once, at one moment of publishing, as after SIGTERM: the call in flight still gets its answer."""

    moment, version_then = "", 0
    left = False

    async def at(self, moment: str) -> None:
        if moment == self.moment and self.version == self.version_then and not self.left:
            await self.leave()
            self.left = True

    async def MakeOffer(self, request: weight.MakeOfferRequest, context: Any) -> weight.MakeOfferResponse:
        await self.at("offer")
        return await super().MakeOffer(request, context)

    async def OpenWeights(self, request: weight.OpenWeightsRequest, context: Any) -> weight.OpenWeightsResponse:
        await self.at("open")
        return await super().OpenWeights(request, context)

    async def SendWeights(self, request: weight.SendWeightsRequest, context: Any) -> weight.SendWeightsResponse:
        await self.at("send")
        return await super().SendWeights(request, context)


@pytest.mark.parametrize(("moment", "version"), [("offer", 1), ("open", 1), ("describe", 3), ("send", 3)])
async def test_a_trainer_that_leaves_while_it_publishes_is_waited_for(
    make_stage: Callable[..., Stage], moment: str, version: int
) -> None:
    stage = make_stage(steps=4)
    trainer = SpotTrainer("trainer-0", stage.config)
    stage.trainer, trainer.moment, trainer.version_then = trainer, moment, version
    stage.rollouts[0].on_describe = lambda: trainer.at("describe")
    await stage.start()
    await until(lambda: trainer.left)
    await asyncio.sleep(0.3)
    await trainer.kill()
    stage.trainer = successor(trainer)
    await stage.trainer.join(stage.address)
    await stage.check_end()
    assert stage.report()["restarts"] == {"trainer-0": 1}
