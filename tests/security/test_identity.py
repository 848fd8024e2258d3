"""Attacks on members, leases and channels: false registrations, false targets and false servers."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from fourfold import config, errors
from fourfold.config import SecurityConfig
from fourfold.coordinator.client import AsyncCoordinatorClient, Lease, MembershipClient
from fourfold.coordinator.v1 import membership_service_pb2 as pb
from fourfold.coordinator.v1.membership_service_pb2_grpc import add_MembershipServiceServicer_to_server
from fourfold.reward.client import AsyncRewardClient
from fourfold.rollout.client import AsyncRolloutClient
from fourfold.rpc.channel import open_channel
from fourfold.rpc.server import Server
from fourfold.security.access import COORDINATOR, ROLLOUT, Security
from fourfold.security.principal import Principal
from fourfold.service.lifecycle import ServeOptions, ServiceHost
from fourfold_coordinator.routing.membership import MembershipServicer
from fourfold_coordinator.routing.registry import TTL_SECONDS, Member, MemberChange, Registry
from fourfold_coordinator.routing.router import Router
from fourfold_tools import certs
from tests.fakes.clock import FakeClock
from tests.fakes.servicers import Reward, Rollout
from tests.security.pki import Pki

TOKENIZER = b"t" * 32
QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
ROLES = {
    "trainer": pb.ROLE_TRAINER,
    "reward": pb.ROLE_REWARD,
    "rollout": pb.ROLE_ROLLOUT,
    "reference": pb.ROLE_REFERENCE,
}


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki") / "certs")


class Desk:
    """The coordinator's registry and router behind a real port."""

    def __init__(self, clock: FakeClock, security: Security | None) -> None:
        self.security = security
        self.registry = Registry(clock=clock, tokenizer_sha256=TOKENIZER, security=security)
        self.router = Router(
            self.registry,
            open_channel=self._open,
            wait_seconds=1,
        )
        self.server = Server(listen="127.0.0.1:0", security=security)
        service = pb.DESCRIPTOR.services_by_name["MembershipService"]
        self.server.add(service, add_MembershipServiceServicer_to_server, MembershipServicer(self.registry))
        self.address = ""
        self.channels: list[Any] = []

    def _open(self, member: Member) -> Any:
        server = Principal(member.role_name, member.member_id)
        return open_channel(member.target, self.security, server=server)

    def client(self, security: Security | None) -> MembershipClient:
        self.channels.append(open_channel(self.address, security, server=COORDINATOR))
        return MembershipClient(self.channels[-1], peer="coordinator")

    async def register(self, client: MembershipClient, name: str, role: str = "", **changes: Any) -> Lease:
        arguments: dict[str, Any] = {
            "member_id": name,
            "incarnation": "a" * 32,
            "role": ROLES[role or name.partition("-")[0]],
            "target": "127.0.0.1:9",
            "tokenizer_sha256": TOKENIZER,
            "timeout": 10.0,
        }
        return await client.register(**{**arguments, **changes})

    def live(self) -> list[str]:
        return [member.member_id for member in self.registry.members()]


@pytest.fixture
async def desk(clock: FakeClock) -> AsyncIterator[Desk]:
    made = Desk(clock, None)
    async for desk in _serve(made):
        yield desk


@pytest.fixture
async def secured(clock: FakeClock, pki: Pki) -> AsyncIterator[Desk]:
    made = Desk(clock, pki.load("coordinator-0"))
    async for desk in _serve(made):
        yield desk


async def _serve(desk: Desk) -> AsyncIterator[Desk]:
    desk.address = await desk.server.start()
    routing = asyncio.create_task(desk.router.run())
    yield desk
    assert not routing.done(), "the router ended"
    routing.cancel()
    with suppress(asyncio.CancelledError):
        await routing
    for channel in desk.channels:
        await channel.close()
    await desk.server.stop(0)


async def run_out(desk: Desk, clock: FakeClock) -> None:
    """End every lease that is not renewed. A longer gap would be a stall of the coordinator, which ends none."""
    for _ in range(4):
        await clock.advance(TTL_SECONDS / 4)
        desk.registry.beat()
    desk.registry.expire()


@pytest.mark.parametrize(
    "target",
    ["mymachine:5000", "10.0.0.7:5000", "0.0.0.0:5000", "dns:///x:1", "unix:/tmp/x:1", "127.0.0.1:0", "a b:1", "x\n:1"],
)
async def test_a_forbidden_target_is_refused_and_changes_nothing(desk: Desk, clock: FakeClock, target: str) -> None:
    client = desk.client(None)
    await desk.register(client, "reward-0")
    for name in ("reward-0", "reward-1"):  # it cannot replace a member, and cannot join
        with pytest.raises(errors.InvalidInput, match=f"{name}: target"):
            await desk.register(client, name, target=target, incarnation="b" * 32)
    assert desk.live() == ["reward-0"]
    assert [state.member.member_id for state in desk.router.members()] == ["reward-0"]
    await desk.register(client, "reward-0")  # was not fenced
    await run_out(desk, clock)
    assert desk.live() == [] and desk.router.members() == []


async def test_a_target_of_megabytes_is_neither_stored_nor_logged(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    client = desk.client(None)
    for target in ("x" * (8 << 20) + ":5000", "127.0.0.1:" + "9" * (8 << 20), "y" * 300 + ":1"):
        with pytest.raises(errors.InvalidInput) as refused:
            await desk.register(client, "reward-0", target=target)
        assert len(refused.value.message) < 300
    assert desk.live() == []
    assert sum(len(record.getMessage()) for record in caplog.records) < 10_000


def test_the_list_of_fenced_processes_is_bounded(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fourfold_coordinator.routing.registry.MAX_FENCED", 4)
    registry = Registry(clock=clock, tokenizer_sha256=TOKENIZER)
    for number in range(10):
        registry.register(_reward("reward-0", f"{number:032x}"))
    for number in (5, 6, 7, 8):
        with pytest.raises(errors.WrongState, match="was replaced by a newer process"):
            registry.register(_reward("reward-0", f"{number:032x}"))
    assert len(registry._fenced) == 4


def test_a_listener_that_fails_stops_neither_the_registry_nor_the_other_listeners(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    registry, seen = Registry(clock=clock, tokenizer_sha256=TOKENIZER), list[MemberChange]()

    def fail(member: Member, change: MemberChange) -> None:
        raise KeyError(member.member_id)

    registry.add_listener(fail)
    registry.add_listener(lambda _member, change: seen.append(change))
    token = registry.register(_reward("reward-0"))
    registry.keep_alive(token)
    assert [r.getMessage() for r in caplog.records] == ["registry listener failed: member=reward-0 change=joined"]
    registry.deregister(token)
    assert seen == [MemberChange.JOINED, MemberChange.LEFT]


async def test_a_member_to_which_no_channel_opens_is_logged_once_and_leaves_without_a_trace(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    registry = Registry(clock=clock, tokenizer_sha256=TOKENIZER)

    def refuse(member: Member) -> Any:
        raise errors.ConfigError("no")

    router = Router(registry, open_channel=refuse, wait_seconds=1)
    registry.register(_reward("reward-0"))
    await clock.advance(TTL_SECONDS)
    assert [m.member_id for m in registry.expire()] == ["reward-0"]
    assert router.members() == []
    assert [r.getMessage() for r in caplog.records] == ["registry listener failed: member=reward-0 change=joined"]


def _reward(name: str, incarnation: str = "a" * 32) -> Member:
    return Member(
        member_id=name, incarnation=incarnation, role=pb.ROLE_REWARD, target="127.0.0.1:9", tokenizer_sha256=b""
    )


@pytest.fixture
def harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a ServiceHost from changing this process's logging."""
    monkeypatch.setattr("fourfold.service.lifecycle.logs.setup", lambda *_args, **_options: None)


@pytest.mark.usefixtures("harmless")
@pytest.mark.parametrize("advertise", ["mymachine", "10.0.0.7"])
def test_a_service_that_others_may_not_connect_to_does_not_start(advertise: str) -> None:
    recipe = config.load(QUICKSTART)
    options = ServeOptions(role="reward", recipe=QUICKSTART, config=recipe, member_id="reward-0", advertise=advertise)
    with pytest.raises(
        errors.ConfigError, match=f"--advertise '{advertise}': without TLS .* leave --advertise out, or"
    ):
        ServiceHost(options, role=pb.ROLE_REWARD)


@pytest.mark.parametrize(
    ("name", "role"),
    [("trainer-0", "trainer"), ("reward-1", "reward"), ("reward-0", "reference")],
)
async def test_a_certificate_registers_only_its_own_member(secured: Desk, pki: Pki, name: str, role: str) -> None:
    if name != "reward-0":
        await secured.register(secured.client(pki.load(name)), name)
    before = secured.live()
    attacker = secured.client(pki.load("reward-0"))
    with pytest.raises(errors.PermissionDenied, match=f"reward/reward-0 may not register as {role}/{name}") as refused:
        await secured.register(attacker, name, role, incarnation="b" * 32)
    assert refused.value.reason == "NOT_YOUR_MEMBER_ID"
    assert secured.live() == before
    if name != "reward-0":  # the real one was not fenced
        await secured.register(secured.client(pki.load(name)), name)


async def test_a_lease_is_valid_only_for_its_member(secured: Desk, pki: Pki) -> None:
    owner, thief = secured.client(pki.load("trainer-0")), secured.client(pki.load("reward-0"))
    lease = await secured.register(owner, "trainer-0")
    with pytest.raises(errors.NotFound):
        await thief.keep_alive(lease.token, timeout=10)
    await thief.deregister(lease.token, timeout=10)
    assert secured.live() == ["trainer-0"]
    assert await owner.keep_alive(lease.token, timeout=10) == (TTL_SECONDS, False)
    await owner.deregister(lease.token, timeout=10)
    assert secured.live() == []


async def test_a_revoked_member_loses_its_lease(clock: FakeClock, tmp_path: Path) -> None:
    pki = Pki(tmp_path / "certs")
    async for desk in _serve(Desk(clock, pki.load("coordinator-0"))):
        client = desk.client(pki.load("reward-0"))
        lease = await desk.register(client, "reward-0")
        certs.revoke(pki.folder, ["reward-0"])
        for call in (client.keep_alive(lease.token, timeout=10), desk.register(client, "reward-0")):
            with pytest.raises(errors.PermissionDenied, match="certificate of reward/reward-0 is revoked"):
                await call
        await run_out(desk, clock)
        assert "reward-0" not in desk.live()


@pytest.mark.usefixtures("harmless")
@pytest.mark.parametrize(("days", "warned"), [(13.5, True), (15.0, False)])
async def test_a_service_logs_that_its_certificate_expires_soon(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, days: float, warned: bool
) -> None:
    pki = Pki(tmp_path / "certs")
    certs.renew(pki.folder, ["reward-0"], days=days)
    recipe = config.load(QUICKSTART).model_copy(update={"security": SecurityConfig(directory=str(pki.folder))})
    options = ServeOptions(role="reward", recipe=QUICKSTART, config=recipe, member_id="reward-0")

    async def until() -> int:
        await asyncio.sleep(0)
        return 0

    assert await ServiceHost(options, role=pb.ROLE_REWARD).run(until=until()) == 0
    said = [r.getMessage() for r in caplog.records if "expires in" in r.getMessage()]
    assert bool(said) is warned
    if warned:
        assert said == [
            "the certificate of reward-0 expires in 13.5 days; run `fourfold certs renew DIR reward-0` where "
            "ca-key.pem is, and copy reward-0.pem to its machine; no restart is needed"
        ]


async def test_a_role_that_cannot_be_a_member_cannot_call_the_membership_service(secured: Desk, pki: Pki) -> None:
    for name in ("viewer-0", "coordinator-0"):
        with pytest.raises(errors.PermissionDenied, match=f"{name} may not call .*MembershipService"):
            await secured.register(secured.client(pki.load(name)), "reward-0")


async def _reward_server(security: Security) -> tuple[Server, str]:
    server = Server(listen="127.0.0.1:0", security=security)
    server.add(*Reward().servicer())
    return server, await server.start()


@pytest.mark.parametrize("impostor", ["reward-1", "coordinator-0"])
async def test_the_coordinator_calls_no_other_member_at_an_address(pki: Pki, impostor: str) -> None:
    """An address may have been taken over, or a member may have registered the target of another process."""
    server, target = await _reward_server(pki.load(impostor))
    async with open_channel(target, pki.load("coordinator-0"), server=Principal("reward", "reward-0")) as channel:
        with pytest.raises(errors.Unavailable, match="another member answers there than the one that is called"):
            await AsyncRewardClient(channel, peer="reward-0").get_info(timeout=10)
    await server.stop(0)


async def test_the_coordinator_calls_the_expected_member(pki: Pki) -> None:
    server, target = await _reward_server(pki.load("reward-0"))
    for who in (Principal("reward", "reward-0"), Principal("reward")):
        async with open_channel(target, pki.load("coordinator-0"), server=who) as channel:
            assert (await AsyncRewardClient(channel, peer="reward-0").get_info(timeout=10)).name == "x@1"
    await server.stop(0)


async def test_a_service_and_a_viewer_accept_only_a_coordinator(secured: Desk, pki: Pki) -> None:
    server, target = await _reward_server(pki.load("reward-1"))
    refused = "another member answers there than the one that is called"
    async with open_channel(target, pki.load("reward-0"), server=COORDINATOR) as channel:
        with pytest.raises(errors.Unavailable, match=refused):
            await secured.register(MembershipClient(channel, peer="coordinator"), "reward-0")
    async with open_channel(target, pki.load("viewer-0"), server=COORDINATOR) as channel:
        with pytest.raises(errors.Unavailable, match=refused):
            await AsyncCoordinatorClient(channel, peer="coordinator").get_run(timeout=10)
    await server.stop(0)


@pytest.mark.parametrize("checks", ["role", "host"])
async def test_an_agent_sends_its_token_only_to_rollout_services(pki: Pki, checks: str) -> None:
    """This includes an agent whose TLS library checks the host name, which is the default of every library."""
    for name in ("reward-0", "rollout-0"):
        security = dataclasses.replace(pki.load("rollout-0", tokens=True), _material=pki.load(name)._material)
        server = Server(listen="127.0.0.1:0", security=security, public=True)
        server.add(*Rollout().servicer())
        target = await server.start()
        if checks == "role":
            channel = open_channel(target, pki.agent(), server=ROLLOUT, token=pki.token)
        else:
            channel = grpc.aio.secure_channel(target, pki.agent().channel_credentials(pki.token))
        client = AsyncRolloutClient(channel, peer="rollout")
        if name == "rollout-0":
            await client.get_info(timeout=10)
        else:
            with pytest.raises(errors.Unavailable, match="another member answers there"):
                await client.get_info(timeout=10)
        await channel.close()
        await server.stop(0)


async def test_a_refusal_that_quotes_a_caller_is_logged_in_one_short_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Refuses(Reward):
        async def GetInfo(self, request: object, context: object) -> Any:
            raise errors.PermissionDenied("no\n\x1b[2J" * 100_000)

    server = Server(listen="127.0.0.1:0", security=None)
    server.add(*Refuses().servicer())
    async with open_channel(await server.start(), None) as channel:
        with pytest.raises(errors.PermissionDenied):
            await AsyncRewardClient(channel, peer="reward-0").get_info(timeout=10)
    await server.stop(0)
    (text,) = [record.getMessage() for record in caplog.records]
    assert len(text) < 700 and text.isprintable()
    assert "/fourfold.reward.v1.RewardService/GetInfo refused to ipv4:127.0.0.1" in text


def test_a_secure_channel_needs_an_expected_server(pki: Pki) -> None:
    with pytest.raises(ValueError, match="name the server that must answer there"):
        open_channel("127.0.0.1:5000", pki.load("coordinator-0"))
