"""Renewed certificates, revoked members and removed tokens, while the services run."""

from __future__ import annotations

import asyncio
import gc
import logging
import shutil
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import pytest

from fourfold import errors
from fourfold.config import SecurityConfig
from fourfold.coordinator.v1 import membership_service_pb2 as pb
from fourfold.reward.client import AsyncRewardClient
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold.rollout.client import AsyncRolloutClient
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rpc.channel import open_channel
from fourfold.rpc.server import Server
from fourfold.security.access import ROLLOUT, Security
from fourfold.security.principal import Principal
from fourfold_coordinator.routing.membership import CertificateMonitor
from fourfold_coordinator.routing.registry import Member, Registry
from fourfold_coordinator.state.run_board import RunBoard
from fourfold_tools import certs
from tests.fakes.clock import FakeClock
from tests.fakes.servicers import Reward, Rollout
from tests.security.pki import Pki

REWARD_0 = Principal("reward", "reward-0")


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path / "certs")


@dataclass
class Service:
    """A server, its address and its certificate folder."""

    server: Server
    target: str
    security: Security


@pytest.fixture
async def service(pki: Pki) -> AsyncIterator[Service]:
    """Serve a reward service."""
    security = pki.load("reward-0")
    server = Server(listen="127.0.0.1:0", security=security)
    server.add(*Reward().servicer())
    yield Service(server, await server.start(), security)
    await server.stop(0)


@pytest.fixture
async def public(pki: Pki) -> AsyncIterator[Service]:
    """Serve a rollout service's public port."""
    security = pki.load("rollout-0", tokens=True)
    server = Server(listen="127.0.0.1:0", security=security, public=True)
    server.add(*Rollout().servicer())
    yield Service(server, await server.start(), security)
    await server.stop(0)


async def test_a_revoked_member_is_refused_on_its_next_call_and_renewed_it_is_not(pki: Pki, service: Service) -> None:
    security = pki.load("coordinator-0")
    async with open_channel(service.target, security, server=REWARD_0) as channel:
        client = AsyncRewardClient(channel, peer="reward-0")
        await client.get_info(timeout=10)
        certs.renew(pki.folder, ["coordinator-0"])
        certs.revoke(pki.folder, ["coordinator-0"])  # both certificates so far, either of which may have been stolen
        with pytest.raises(errors.PermissionDenied, match="certificate of coordinator/coordinator-0 is revoked") as no:
            await client.get_info(timeout=10)
        assert no.value.reason == "CERTIFICATE_REVOKED"
        certs.renew(pki.folder, ["coordinator-0"])
        await client.get_info(timeout=10)


async def test_a_stolen_certificate_stays_revoked_when_its_owner_has_a_new_one(
    pki: Pki, service: Service, tmp_path: Path
) -> None:
    stolen = pki.copy(tmp_path / "stolen", "coordinator-0")
    certs.revoke(pki.folder, ["coordinator-0"])
    certs.renew(pki.folder, ["coordinator-0"])
    thief = pki.load_as(Principal("coordinator", "coordinator-0"), folder=stolen)
    for security, refused in ((thief, True), (pki.load("coordinator-0"), False)):
        async with open_channel(service.target, security, server=REWARD_0) as channel:
            call = AsyncRewardClient(channel, peer="reward-0").get_info(timeout=10)
            if refused:
                with pytest.raises(errors.PermissionDenied, match="is revoked"):
                    await call
            else:
                await call


async def test_a_server_shows_its_renewed_certificate_without_a_restart(pki: Pki, service: Service) -> None:
    """Each handshake uses the current certificate, and running calls continue."""
    before = service.security.material.certificate
    async with open_channel(service.target, pki.load("coordinator-0"), server=REWARD_0) as old:
        await AsyncRewardClient(old, peer="reward-0").get_info(timeout=10)
        certs.renew(pki.folder, ["reward-0"])
        assert await _shown(service.target, pki) == service.security.material.certificate != before
        await AsyncRewardClient(old, peer="reward-0").get_info(timeout=10)


async def _shown(target: str, pki: Pki) -> bytes:
    """Return the certificate that a server presents to a new connection."""
    context = ssl.create_default_context(cafile=str(pki.folder / "ca.pem"))
    context.load_cert_chain(pki.folder / "coordinator-0.pem")
    context.set_alpn_protocols(["h2"])
    host, _, port = target.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname="reward.fourfold")
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return ssl.DER_cert_to_PEM_cert(found).encode()


class _Slow(Reward):
    """A reward service that answers `Score` on demand and records its callers' certificates."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[bytes] = []
        self.called, self.go = asyncio.Event(), asyncio.Event()

    async def GetInfo(self, request: reward.GetInfoRequest, context: object) -> reward.GetInfoResponse:
        (pem,) = context.auth_context()["x509_pem_cert"]  # type: ignore[attr-defined]
        self.shown.append(bytes(pem))
        if len(self.shown) == 1:
            self.called.set()
            await self.go.wait()
        return reward.GetInfoResponse(name="x@1")


async def test_a_client_uses_its_renewed_certificate_and_running_calls_finish(pki: Pki) -> None:
    servicer, security = _Slow(), pki.load("coordinator-0")
    server = Server(listen="127.0.0.1:0", security=pki.load("reward-0"))
    server.add(*servicer.servicer())
    async with open_channel(await server.start(), security, server=REWARD_0) as channel:
        client = AsyncRewardClient(channel, peer="reward-0")
        first = security.material.certificate
        begun = asyncio.create_task(client.get_info(timeout=20))
        await servicer.called.wait()
        certs.renew(pki.folder, ["coordinator-0"])
        await client.get_info(timeout=10)
        gc.collect()  # grpc destroys the old channel after its last call
        servicer.go.set()
        assert (await begun).name == "x@1"
        assert servicer.shown == [first, security.material.certificate]
        assert first != security.material.certificate
    await server.stop(0)


async def test_an_unusable_renewed_file_changes_nothing(
    pki: Pki, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    before = service.security.material
    file = pki.folder / "reward-0.pem"
    for content, said in (
        (b"", "its certificate and key do not belong to each other and to ca.pem"),
        ((pki.folder / "reward-1.pem").read_bytes(), "this is not the certificate of reward/reward-0"),
    ):
        caplog.clear()
        file.write_bytes(content)
        for _ in range(2):
            assert service.security.material is before
        assert [r.levelno for r in caplog.records] == [logging.ERROR]
        assert "its previous content stays in force" in caplog.text and said in caplog.text
    file.unlink()
    assert service.security.material is before
    certs.renew(pki.folder, ["reward-0"])
    assert service.security.material is not before


async def test_a_removed_token_is_refused_on_its_next_call_and_a_new_one_is_taken(pki: Pki, public: Service) -> None:
    path = pki.folder / "tokens.txt"
    async with open_channel(public.target, pki.agent(), server=ROLLOUT, token=pki.token) as channel:
        client = AsyncRolloutClient(channel, peer="rollout-0")
        await client.get_info(timeout=10)
        certs.remove_token(path, "agent")  # the file is empty now
        with pytest.raises(errors.Unauthenticated, match="unknown bearer token"):
            await client.get_info(timeout=10)
    other = certs.add_token(path, "other")
    async with open_channel(public.target, pki.agent(), server=ROLLOUT, token=other) as channel:
        await AsyncRolloutClient(channel, peer="rollout-0").get_info(timeout=10)


async def test_a_token_allows_its_scopes_until_it_expires(pki: Pki, public: Service) -> None:
    path = pki.folder / "tokens.txt"
    tokens = {
        "reader": certs.add_token(path, "reader", scopes=["info"]),
        "writer": certs.add_token(path, "writer", scopes=["generate"]),
        "late": certs.add_token(path, "late", days=-1),
    }
    for name, said in (
        ("reader", "'reader' may not call Generate: its scopes are info"),
        ("writer", "'writer' may not call GetInfo: its scopes are generate"),
        ("late", "'late' expired at 20"),
    ):
        async with open_channel(public.target, pki.agent(), server=ROLLOUT, token=tokens[name]) as channel:
            client = AsyncRolloutClient(channel, peer="rollout-0")
            with pytest.raises((errors.PermissionDenied, errors.Unauthenticated), match=said):
                if name == "reader":
                    async with aclosing(client.watch_load()) as loads:
                        await anext(loads)
                    await client.complete(rollout.GenerateRequest(), timeout=10)
                else:
                    await client.get_info(timeout=10)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_a_key_that_others_may_read_is_refused(pki: Pki, mode: int) -> None:
    file = pki.folder / "reward-0.pem"
    file.chmod(mode)
    with pytest.raises(errors.ConfigError, match=rf"reward-0\.pem: other users may read .* `chmod 600 {file}`"):
        pki.load("reward-0")
    (pki.folder / "ca-key.pem").chmod(mode)
    with pytest.raises(errors.ConfigError, match=r"ca-key\.pem: other users may read"):
        certs.renew(pki.folder)


def test_files_of_another_member_or_authority_are_refused_before_anything_listens(pki: Pki, tmp_path: Path) -> None:
    other = Pki(tmp_path / "other")
    folder = pki.copy(tmp_path / "mixed", "reward-0")
    shutil.copy(other.folder / "trainer-0.pem", folder)
    shutil.copy(pki.folder / "reward-1.pem", folder / "reward-2.pem")
    certs.renew(pki.folder, ["rollout-0"], days=-1)
    for name, used, said in (
        ("trainer-0", folder, "not a certificate of the CA in ca.pem"),
        ("reward-2", folder, "this is not the certificate of reward/reward-2"),
        ("rollout-0", pki.folder, "has expired; `fourfold certs renew"),
        ("rollout-7", pki.folder, "cannot read it .* `fourfold certs add DIR rollout/rollout-7` makes it"),
        ("Rollout_7", pki.folder, "--member-id 'Rollout_7': with certificates a member id has 1 to 63 lower-case"),
    ):
        with pytest.raises(errors.ConfigError, match=said):
            pki.load_as(Principal(name.partition("-")[0], name), folder=used)
    with pytest.raises(errors.ConfigError, match="this is not the certificate of trainer/reward-0"):
        Security.load(SecurityConfig(directory=str(folder)), Principal("trainer", "reward-0"))


def test_a_certificate_whose_principal_is_another_one_is_refused(pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certs, "uri", lambda who: f"spiffe://fourfold/svc/trainer/{who.name}")
    certs.renew(pki.folder, ["reward-0"])
    with pytest.raises(errors.ConfigError, match="has no URI spiffe://fourfold/svc/reward/reward-0"):
        pki.load("reward-0")


def test_the_run_tells_which_certificate_expires_soon(pki: Pki, clock: FakeClock) -> None:
    clock._time = certs.current(pki.folder)[0].expires.timestamp() - 300 * 86_400
    registry = Registry(clock=clock, tokenizer_sha256=b"t" * 32)
    board = RunBoard(name="run", step_count=1)
    found = CertificateMonitor(pki.load("coordinator-0"), registry, board, own="coordinator-0", clock=clock)
    token = registry.register(
        Member(
            member_id="reward-0",
            incarnation="a" * 32,
            role=pb.ROLE_REWARD,
            target="127.0.0.1:9",
            tokenizer_sha256=b"",
        )
    )
    found.record(REWARD_0, _leaf(pki, clock, days=3.0))
    found.check()
    (condition,) = board.status.conditions
    assert condition.subject == "certificate of reward-0"
    assert condition.text.startswith("the certificate of reward-0 expires in 3.0 days; run `fourfold certs renew DIR")
    assert found.metrics() == {"security/certificate_seconds": pytest.approx(3 * 86_400, abs=5)}
    found.record(REWARD_0, _leaf(pki, clock, days=200.0))
    found.check()
    assert not board.status.conditions
    found.record(REWARD_0, _leaf(pki, clock, days=-1.0))
    found.check()
    assert "has expired" in board.status.conditions[0].text
    registry.deregister(token)
    found.check()
    assert not board.status.conditions, "who is gone needs no certificate"
    assert CertificateMonitor(None, registry, board, own="c", clock=clock).metrics() == {}


def _leaf(pki: Pki, clock: FakeClock, *, days: float) -> bytes:
    """Return a certificate that expires `days` after the clock's time."""
    (issued,) = certs.renew(pki.folder, ["reward-0"], days=(clock.now() - time.time()) / 86_400 + days)
    assert issued.member == REWARD_0
    return (pki.folder / "reward-0.pem").read_bytes().partition(b"-----BEGIN PRIVATE")[0]
