"""A reward service that a recipe names by its address: it registers nowhere, and may be replaced there."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from fourfold.config import Config
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.host.clock import SYSTEM_CLOCK
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold_coordinator.rewards.scorers import permanent_id
from fourfold_coordinator.routing import router
from fourfold_coordinator.routing.registry import Registry
from tests.conftest import Serve
from tests.fakes.servicers import Reward
from tests.fakes.stage import until
from tests.fakes.toy import make_config


class Named(Reward):
    name, sha256 = "x@1", b""

    async def GetInfo(
        self, request: reward.GetInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> reward.GetInfoResponse:
        return reward.GetInfoResponse(name=self.name, max_sample_count=7, tokenizer_sha256=self.sha256)


async def test_a_service_that_was_replaced_at_its_address_is_noticed(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "_REFRESH_SECONDS", 0.05)
    monkeypatch.setattr(router, "_TICK_SECONDS", 0.02)
    service = Named()
    channel = await serve(service.servicer())
    registry = Registry(clock=SYSTEM_CLOCK, tokenizer_sha256=b"t" * 32)
    made = router.Router(registry, open_channel=lambda member: channel, wait_seconds=1.0)
    registry.add_permanent("reward-at-x", Role.ROLE_REWARD, "127.0.0.1:9")
    (replica,) = made.replicas(Role.ROLE_REWARD)
    running = asyncio.create_task(made.run())
    try:
        await until(lambda: replica.scorer == "x@1", 5)
        assert (replica.max_items, replica.unusable_reason) == (7, "")
        service.name = "x@2"
        await until(lambda: replica.scorer == "x@2", 5)
        assert not replica.unusable_reason
        service.sha256 = b"x" * 32
        await until(lambda: "another tokenizer" in replica.unusable_reason, 5)
        service.sha256 = b""
        await until(lambda: not replica.unusable_reason, 5)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(("given", "targets"), [("127.0.0.1:1", ("127.0.0.1:1",)), (["a:1", "b:2"], ("a:1", "b:2"))])
def test_a_recipe_names_one_address_or_several(tmp_path: Any, given: Any, targets: tuple[str, ...]) -> None:
    config = make_config(tmp_path, reward={"target": given})
    assert config.reward[0].target == targets
    assert Config.model_validate(config.model_dump()).reward[0].target == targets


def test_an_address_twice_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="has an address twice"):
        make_config(tmp_path, reward={"target": ["a:1", "a:1"]})


def test_member_ids_of_addresses_are_ids() -> None:
    assert permanent_id("[::1]:50053") == "reward-at--1-50053"
    assert permanent_id("scorer.internal:9") == "reward-at-scorer-internal-9"
