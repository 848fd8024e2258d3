"""Certificates, tokens and the policy table, over real TLS on loopback."""

from __future__ import annotations

import asyncio
import importlib
import os
import pkgutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc

import fourfold
from fourfold import errors
from fourfold.config import SecurityConfig
from fourfold.reward.client import AsyncRewardClient
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold.reward.v1.reward_service_pb2_grpc import add_RewardServiceServicer_to_server
from fourfold.rollout.client import AsyncRolloutClient
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rpc.channel import open_channel
from fourfold.rpc.server import Server
from fourfold.security import principal
from fourfold.security.access import POLICY, PUBLIC_SERVICES, ROLES, ROLLOUT, VIEWER, Security, check_identity
from fourfold.security.material import server_name
from fourfold.security.principal import Principal
from fourfold_tools import certs
from tests.fakes.servicers import Reward, Rollout

REWARD = Principal("reward")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder of certificates, and its token."""
    directory = tmp_path_factory.mktemp("certs") / "pki"
    return directory, certs.make(directory, ["trainer.internal", "10.0.0.5"])


def load(folder: tuple[Path, str], role: str, *, tokens: bool = False) -> Security:
    directory = folder[0]
    config = SecurityConfig(directory=str(directory), tokens_file=str(directory / "tokens.txt") if tokens else "")
    security = Security.load(config, Principal(role, f"{role}-0"))
    assert security is not None
    return security


@pytest.fixture
async def internal(folder: tuple[Path, str]) -> AsyncIterator[str]:
    """An internal server with mTLS that carries RewardService."""
    # Not localhost: at its other address, another process may have the port.
    server = Server(listen="127.0.0.1:0", security=load(folder, "reward"))
    server.add(*Reward().servicer())
    yield await server.start()
    await server.stop(0)


@pytest.fixture
async def public(folder: tuple[Path, str]) -> AsyncIterator[str]:
    """A public server with TLS and tokens that carries RolloutService."""
    server = Server(listen="127.0.0.1:0", security=load(folder, "rollout", tokens=True), public=True)
    server.add(*Rollout().servicer())
    yield await server.start()
    await server.stop(0)


async def test_only_the_coordinator_may_call_a_reward_service(folder: tuple[Path, str], internal: str) -> None:
    for role in ROLES:
        channel = open_channel(internal, load(folder, role), server=REWARD)
        client = AsyncRewardClient(channel, peer="reward-0")
        if role == "coordinator":
            assert (await client.get_info(timeout=10)).name == "x@1"
        else:
            with pytest.raises(errors.PermissionDenied, match=rf"{role}-0 may not call fourfold\.reward\.v1"):
                await client.get_info(timeout=10)
        check = health_pb2.HealthCheckRequest()
        await health_pb2_grpc.HealthStub(channel).Check(check, timeout=10)  # open to every member
        await channel.close()


class _Asks(Reward):
    """Returns the name of its caller."""

    async def GetInfo(self, request: reward.GetInfoRequest, context: object) -> reward.GetInfoResponse:
        return reward.GetInfoResponse(name=str(principal.current()))


async def test_a_servicer_knows_its_caller(folder: tuple[Path, str]) -> None:
    service = reward.DESCRIPTOR.services_by_name["RewardService"]
    for security, expected in ((None, "local"), (load(folder, "reward"), "coordinator/coordinator-0")):
        server = Server(listen="127.0.0.1:0", security=security)
        server.add(service, add_RewardServiceServicer_to_server, _Asks())
        channel = open_channel(await server.start(), security and load(folder, "coordinator"), server=REWARD)
        assert (await AsyncRewardClient(channel, peer="reward-0").get_info(timeout=10)).name == expected
        await channel.close()
        await server.stop(0)
    assert principal.current() == principal.LOCAL


async def test_a_client_without_a_certificate_of_our_ca_is_refused(
    folder: tuple[Path, str], internal: str, tmp_path: Path
) -> None:
    certs.make(tmp_path / "other", [])
    other = load((tmp_path / "other", ""), "coordinator")
    ours = load(folder, "coordinator")
    refused = "it hung up at once: .* or only one of us uses TLS, or it refuses our certificate"
    name = [("grpc.default_authority", server_name(REWARD))]
    stranger = grpc.ssl_channel_credentials(ours.material.authority, other.material.key, other.material.certificate)
    channels = [
        (grpc.aio.insecure_channel(internal), refused),
        (grpc.aio.secure_channel(internal, stranger, options=name), refused),
        (open_channel(internal, Security.for_agent(folder[0] / "ca.pem"), server=REWARD), refused),
        # This client does not trust the server either.
        (open_channel(internal, other, server=REWARD), "its certificate is not of our CA"),
    ]
    for channel, text in channels:
        with pytest.raises(errors.Unavailable, match=f"reward-0, GetInfo: cannot connect: {text}"):
            await AsyncRewardClient(channel, peer="reward-0").get_info(timeout=10)
        await channel.close()


async def test_a_failed_connection_is_explained(folder: tuple[Path, str], unused_port: int) -> None:
    ours, plain = load(folder, "coordinator"), Server(listen="127.0.0.1:0", security=None)
    for target, text in (
        (f"127.0.0.1:{unused_port}", r"nothing listens there \(.*Connection refused"),
        (await plain.start(), "it does not speak TLS"),
    ):
        channel = open_channel(target, ours, server=REWARD)
        with pytest.raises(errors.Unavailable, match=f"cannot connect: {text}"):
            await AsyncRewardClient(channel, peer="reward-0").get_info(timeout=10)
        await channel.close()
    await plain.stop(0)


async def test_an_agent_needs_a_token_and_no_certificate(folder: tuple[Path, str], public: str) -> None:
    agent = Security.for_agent(folder[0] / "ca.pem")
    channel = open_channel(public, agent, server=ROLLOUT, token=folder[1])
    client = AsyncRolloutClient(channel, peer="rollout-0")
    await client.get_info(timeout=10)
    assert [load.policy_version async for load in client.watch_load()] == [7]
    await channel.close()


@pytest.mark.parametrize("token", ["", "wrong", "x" * 4000])
async def test_a_missing_or_unknown_token_is_refused_on_every_kind_of_call_but_health(
    folder: tuple[Path, str], public: str, token: str, caplog: pytest.LogCaptureFixture
) -> None:
    channel = open_channel(public, Security.for_agent(folder[0] / "ca.pem"), server=ROLLOUT, token=token)
    client = AsyncRolloutClient(channel, peer="rollout-0")
    for call in (client.get_info(timeout=10), client.complete(rollout.GenerateRequest(), timeout=10)):
        with pytest.raises(errors.Unauthenticated) as caught:
            await call
        assert "xxxx" not in caught.value.message
        assert "wrong" not in caught.value.message
    with pytest.raises(errors.Unauthenticated):
        await anext(client.watch_load())
    said = "unknown bearer token" if token else "no bearer token"
    for method, text in zip(("GetInfo", "Generate", "WatchLoad"), caplog.messages, strict=True):
        assert text.startswith(f"/fourfold.rollout.v1.RolloutService/{method} refused to ipv")
        assert f": {said}; " in text and "xxxx" not in text
    check = health_pb2.HealthCheckRequest()
    response = await health_pb2_grpc.HealthStub(channel).Check(check, timeout=10)
    assert response.status == health_pb2.HealthCheckResponse.SERVING
    await channel.close()


async def test_a_public_port_on_loopback_without_tls_is_plain_and_elsewhere_refused(folder: tuple[Path, str]) -> None:
    server = Server(listen="127.0.0.1:0", security=None, public=True)
    server.add(*Rollout().servicer())
    channel = open_channel(await server.start(), None)
    await AsyncRolloutClient(channel, peer="r").get_info(timeout=5)
    await channel.close()
    await server.stop(0)
    with pytest.raises(errors.ConfigError, match="without TLS a service listens on loopback only"):
        Server(listen="0.0.0.0:0", security=None, public=True)
    with pytest.raises(errors.ConfigError, match="a public port needs bearer tokens"):
        Server(listen="127.0.0.1:0", security=load(folder, "rollout"), public=True)


@pytest.mark.parametrize(
    "uris",
    [
        [],
        ["https://fourfold/svc/reward/reward-0"],
        ["spiffe://elsewhere/svc/coordinator/coordinator-0"],
        ["spiffe://fourfold/svc/coordinator"],  # from an old version with one certificate per role
        ["spiffe://fourfold/svc/coordinator/"],
        ["spiffe://fourfold/svc/coordinator/a/b"],
        ["spiffe://fourfold/svc/coordinator/A"],
        ["spiffe://fourfold/svc/agent/coordinator-0"],
        ["spiffe://fourfold/svc/coordinator/a", "spiffe://fourfold/svc/trainer/a"],
    ],
)
def test_a_certificate_must_name_exactly_one_member(uris: list[str]) -> None:
    with pytest.raises(errors.Unauthenticated, match="has no URI spiffe://fourfold/svc/ROLE/MEMBER; use one made by"):
        check_identity("fourfold.reward.v1.RewardService", uris)


def test_a_service_without_a_row_is_refused_to_every_caller() -> None:
    with pytest.raises(errors.PermissionDenied, match=r"may not call x\.y\.Z; allowed: no role"):
        check_identity("x.y.Z", ["spiffe://fourfold/svc/coordinator/coordinator-0"])


def modules() -> list[Any]:
    names = [m.name for m in pkgutil.walk_packages(fourfold.__path__, "fourfold.") if m.name.endswith("_pb2")]
    return [importlib.import_module(name) for name in names]


def test_every_service_of_the_contract_has_a_row_in_the_policy() -> None:
    files: list[FileDescriptor] = [module.DESCRIPTOR for module in modules()]
    services = {service.full_name for file in files for service in file.services_by_name.values()}
    assert len(services) >= 8
    assert services <= set(POLICY), f"no row for {services - set(POLICY)}"
    for name in POLICY:
        assert name.startswith("grpc.") or name in services, f"{name} does not exist"
        assert POLICY[name] <= set(ROLES)
    assert set(PUBLIC_SERVICES) <= services
    assert descriptor_pool.Default().FindServiceByName("fourfold.trainer.v1.TrainerService")


def test_a_recipe_without_tls_has_no_tokens(folder: tuple[Path, str]) -> None:
    assert Security.load(SecurityConfig(), VIEWER) is None
    with pytest.raises(errors.ConfigError, match=r"tokens never travel without TLS"):
        Security.load(SecurityConfig(tokens_file="x"), Principal("rollout", "rollout-0"))


def test_a_machine_without_a_port_for_agents_needs_no_file_of_tokens(folder: tuple[Path, str], tmp_path: Path) -> None:
    config = SecurityConfig(directory=str(folder[0]), tokens_file=str(tmp_path / "absent"))
    for role in ROLES:
        who = Principal(role, f"{role}-0")
        if role in ("rollout", "gateway"):
            (tmp_path / "absent").unlink(missing_ok=True)
            with pytest.raises(errors.ConfigError, match="absent: cannot read it"):
                Security.load(config, who)
            (tmp_path / "absent").write_text("# nobody\n")
            with pytest.raises(errors.ConfigError, match="absent: holds no token digest; make one with `fourfold cer"):
                Security.load(config, who)
        else:
            assert Security.load(config, who)
    with pytest.raises(errors.ConfigError, match=r"ca\.pem: cannot read it .*`fourfold certs DIR` makes"):
        Security.load(SecurityConfig(directory=str(tmp_path)), VIEWER)


def test_no_secret_is_in_a_repr(folder: tuple[Path, str]) -> None:
    security = load(folder, "rollout", tokens=True)
    text = f"{security!r} {security.material!r} {security.tokens['agent']!r}"
    assert "PRIVATE" not in text
    assert "CERTIFICATE" not in text
    assert repr(security.tokens["agent"].digest) not in text


async def test_a_service_with_certificates_registers_over_tls(folder: tuple[Path, str]) -> None:
    from tests.contract.test_serve import REPOSITORY, Coordinator

    coordinator = Coordinator()
    server = Server(listen="127.0.0.1:0", security=load(folder, "coordinator"))
    server.add(*coordinator.servicer())
    address = await server.start()
    command = [sys.executable, "-m", "tests.fakes.service", "--certs", str(folder[0]), "--coordinator", address]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ
    )
    try:
        await coordinator.until(lambda: coordinator.kept_alive >= 1)
        target = coordinator.registered[0].target
        channel = open_channel(target, load(folder, "coordinator"), server=Principal("reward", "reward-0"))
        assert (await AsyncRewardClient(channel, peer="reward-0").get_info(timeout=5)).name == "sleeper@1"
        await channel.close()
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), 10)
    assert coordinator.deregistered == 1
    await server.stop(0)
