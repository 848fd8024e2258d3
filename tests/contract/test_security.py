"""Certificates, tokens and the policy table, over real TLS on loopback."""

from __future__ import annotations

import asyncio
import importlib
import os
import pkgutil
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc

import fourfold
from fourfold import certs, errors, principal
from fourfold.channel import open_channel
from fourfold.config import SecurityConfig
from fourfold.reward.client import RewardClient
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold.reward.v1.reward_service_pb2_grpc import add_RewardServiceServicer_to_server
from fourfold.rollout.client import RolloutClient
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.security import IDENTITIES, POLICY, PUBLIC_SERVICES, Security, check_token, read_tokens
from fourfold.server import Server
from tests.fakes.servicers import Reward, Rollout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder of certificates, and its token."""
    directory = tmp_path_factory.mktemp("certs") / "pki"
    return directory, certs.make(directory, ["trainer.internal", "10.0.0.5"])


def load(folder: tuple[Path, str], identity: str, *, tokens: bool = False) -> Security:
    directory = folder[0]
    config = SecurityConfig(directory=str(directory), tokens_file=str(directory / "tokens.txt") if tokens else "")
    security = Security.load(config, identity)
    assert security is not None
    return security


@pytest.fixture
async def internal(folder: tuple[Path, str]) -> AsyncIterator[str]:
    """An internal server with mTLS that carries RewardService."""
    server = Server(listen="localhost:0", security=load(folder, "reward"))
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


async def test_the_coordinator_may_and_others_may_not(folder: tuple[Path, str], internal: str) -> None:
    for identity in IDENTITIES:
        channel = open_channel(internal, load(folder, identity))
        client = RewardClient(channel, peer="reward-0")
        if identity == "coordinator":
            assert (await client.get_info(timeout=10)).name == "x@1"
        else:
            with pytest.raises(errors.PermissionDenied, match=rf"{identity} may not call fourfold\.reward\.v1"):
                await client.get_info(timeout=10)
        check = health_pb2.HealthCheckRequest()
        await health_pb2_grpc.HealthStub(channel).Check(check, timeout=10)  # everybody of ours may
        await channel.close()


class _Asks(Reward):
    """Answers with the name of its caller."""

    async def GetInfo(self, request: reward.GetInfoRequest, context: object) -> reward.GetInfoResponse:
        return reward.GetInfoResponse(name=str(principal.current()))


async def test_a_servicer_is_told_who_calls(folder: tuple[Path, str]) -> None:
    service = reward.DESCRIPTOR.services_by_name["RewardService"]
    for security, expected in ((None, "local"), (load(folder, "reward"), "coordinator")):
        server = Server(listen="127.0.0.1:0", security=security)
        server.add(service, add_RewardServiceServicer_to_server, _Asks())
        channel = open_channel(await server.start(), security and load(folder, "coordinator"))
        assert (await RewardClient(channel, peer="reward-0").get_info(timeout=10)).name == expected
        await channel.close()
        await server.stop(0)
    assert principal.current() == principal.LOCAL


async def test_who_has_no_certificate_of_ours_does_not_get_in(
    folder: tuple[Path, str], internal: str, tmp_path: Path
) -> None:
    certs.make(tmp_path / "other", [])
    other = load((tmp_path / "other", ""), "coordinator")
    ours = load(folder, "coordinator")
    stranger = Security(authority=ours.authority, certificate=other.certificate, key=other.key)
    without = Security.for_agent(folder[0] / "ca.pem")
    refused = "it hung up at once: .* or only one of us uses TLS, or it refuses our certificate"
    channels = [
        (grpc.aio.insecure_channel(internal), refused),
        (open_channel(internal, stranger), refused),
        (open_channel(internal, without), refused),
        (open_channel(internal, other), "its certificate is not of our CA"),  # does not trust the server, either
    ]
    for channel, text in channels:
        with pytest.raises(errors.Unavailable, match=f"reward-0, GetInfo: cannot connect: {text}"):
            await RewardClient(channel, peer="reward-0").get_info(timeout=10)
        await channel.close()


async def test_a_connection_that_does_not_come_about_is_explained(folder: tuple[Path, str], unused_port: int) -> None:
    ours, plain = load(folder, "coordinator"), Server(listen="127.0.0.1:0", security=None)
    for target, text in (
        (f"127.0.0.1:{unused_port}", r"nothing listens there \(.*Connection refused"),
        (await plain.start(), "it does not speak TLS"),
    ):
        channel = open_channel(target, ours)
        with pytest.raises(errors.Unavailable, match=f"cannot connect: {text}"):
            await RewardClient(channel, peer="reward-0").get_info(timeout=10)
        await channel.close()
    await plain.stop(0)


async def test_a_certificate_for_another_host_is_refused_by_the_client(folder: tuple[Path, str]) -> None:
    server = Server(listen="127.0.0.2:0", security=load(folder, "reward"))  # not among the certificate's names
    server.add(*Reward().servicer())
    channel = open_channel(await server.start(), load(folder, "coordinator"))
    with pytest.raises(errors.Unavailable, match="its certificate is not for that host"):
        await RewardClient(channel, peer="reward-0").get_info(timeout=10)
    await channel.close()
    await server.stop(0)


async def test_an_agent_comes_with_a_token_and_without_a_certificate(folder: tuple[Path, str], public: str) -> None:
    agent = Security.for_agent(folder[0] / "ca.pem")
    channel = open_channel(public, agent, token=folder[1])
    client = RolloutClient(channel, peer="rollout-0")
    await client.get_info(timeout=10)
    assert [load.policy_version async for load in client.watch_load()] == [7]
    await channel.close()


@pytest.mark.parametrize("token", ["", "wrong", "x" * 4000])
async def test_a_missing_or_unknown_token_is_refused_on_every_kind_of_call_but_health(
    folder: tuple[Path, str], public: str, token: str, caplog: pytest.LogCaptureFixture
) -> None:
    channel = open_channel(public, Security.for_agent(folder[0] / "ca.pem"), token=token)
    client = RolloutClient(channel, peer="rollout-0")
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
    await RolloutClient(channel, peer="r").get_info(timeout=5)
    await channel.close()
    await server.stop(0)
    with pytest.raises(errors.ConfigError, match="without TLS a service listens on loopback only"):
        Server(listen="0.0.0.0:0", security=None, public=True)
    with pytest.raises(errors.ConfigError, match="a public port needs bearer tokens"):
        Server(listen="127.0.0.1:0", security=load(folder, "rollout"), public=True)


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
        assert POLICY[name] <= set(IDENTITIES)
    assert set(PUBLIC_SERVICES) <= services
    assert descriptor_pool.Default().FindServiceByName("fourfold.trainer.v1.TrainerService")


def test_certificates_have_identity_names_and_private_keys(folder: tuple[Path, str]) -> None:
    directory, token = folder
    for identity in IDENTITIES:
        leaf = x509.load_pem_x509_certificate((directory / f"{identity}.pem").read_bytes())
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        assert uris == [f"spiffe://fourfold/svc/{identity}"]
        assert names.get_values_for_type(x509.DNSName) == ["localhost", "trainer.internal"]
        assert {str(a) for a in names.get_values_for_type(x509.IPAddress)} == {"127.0.0.1", "::1", "10.0.0.5"}
    for path in directory.iterdir():
        private = path.name.endswith("-key.pem") or path.name == "tokens.txt"
        assert stat.S_IMODE(path.stat().st_mode) == (0o600 if private else 0o644), path
        assert token not in path.read_text()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_certificates_are_never_overwritten_and_the_token_is_printed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = certs.make(tmp_path, [])
    assert capsys.readouterr().out.count(token) == 1
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(errors.ConfigError, match=r"ca\.pem: exists, and certificates are never overwritten"):
        certs.make(tmp_path, [])
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    with pytest.raises(errors.ConfigError, match="neither an address nor a name"):
        certs.make(tmp_path / "new", ["https://x"])
    assert not (tmp_path / "new").exists()


def test_files_that_are_missing_or_malformed_are_clear_errors(tmp_path: Path, folder: tuple[Path, str]) -> None:
    assert Security.load(SecurityConfig(), "rollout") is None
    with pytest.raises(errors.ConfigError, match=r"tokens never travel without TLS"):
        Security.load(SecurityConfig(tokens_file="x"), "rollout")


def test_a_machine_without_a_port_for_agents_needs_no_file_of_tokens(folder: tuple[Path, str], tmp_path: Path) -> None:
    config = SecurityConfig(directory=str(folder[0]), tokens_file=str(tmp_path / "absent"))
    for identity in IDENTITIES:
        if identity == "rollout":
            with pytest.raises(errors.ConfigError, match="absent: cannot read it"):
                Security.load(config, identity)
        else:
            assert Security.load(config, identity)
    with pytest.raises(errors.ConfigError, match=r"ca\.pem: cannot read it .*`fourfold certs DIR` makes"):
        Security.load(SecurityConfig(directory=str(tmp_path)), "rollout")
    file = tmp_path / "tokens.txt"
    for text, message in {
        "": "holds no token digest",
        "agent abc\n": r"tokens\.txt:1: no token digest",
        f"# mine\n\na {'0' * 64}\na {'1' * 64}\n": r":4: the name 'a' occurs twice",
    }.items():
        file.write_text(text)
        with pytest.raises(errors.ConfigError, match=message):
            read_tokens(file)
    tokens = read_tokens(folder[0] / "tokens.txt")
    assert check_token(f"Bearer {folder[1]}", tokens) == "agent"
    for header in (
        "",
        folder[1],
        f"Basic {folder[1]}",
        f"Bearer {folder[1]}x",
        "Bearer ",
        f"Bearer {tokens['agent'].hex()}",
    ):
        with pytest.raises(errors.Unauthenticated):
            check_token(header, tokens)


def test_nothing_of_it_shows_in_a_repr(folder: tuple[Path, str]) -> None:
    text = repr(load(folder, "rollout", tokens=True))
    assert "PRIVATE" not in text
    assert "CERTIFICATE" not in text
    assert "agent" not in text


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
        channel = open_channel(coordinator.registered[0].target, load(folder, "coordinator"))
        assert (await RewardClient(channel, peer="reward-0").get_info(timeout=5)).name == "sleeper@1"
        await channel.close()
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), 10)
    assert coordinator.deregistered == 1
    await server.stop(0)
