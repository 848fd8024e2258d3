"""Membership in `fourfold conformance reward`: the services of this repository keep it, and faults are named."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from fourfold.cli import main as cli_main
from fourfold.coordinator.v1 import membership_service_pb2 as pb
from fourfold_tools import certs
from fourfold_tools.conformance import membership
from fourfold_tools.conformance.checks import Finding
from fourfold_tools.conformance.membership import MEMBERSHIP, REGISTRATION, FakeCoordinator, MembershipProbe, Started
from tests.conformance.conftest import FUNCTION
from tests.conformance.toy_member import ToyMember

TTL = 0.6
SERVICE = """
import fourfold
from function import reward

if __name__ == "__main__":
    options = {{"listen": "127.0.0.1:0", "coordinator": "127.0.0.1:{port}", "certs": "{certs}"}}
    raise SystemExit(fourfold.serve_reward(reward, **options))
"""


def variant(**changes: Any) -> type[ToyMember]:
    return type("Variant", (ToyMember,), changes)


VARIANTS: dict[str, tuple[type[ToyMember], str]] = {
    "another role": (variant(role=pb.ROLE_TRAINER), "register"),
    "port 0": (variant(target=lambda self, port: "127.0.0.1:0"), "register"),
    "a malformed address": (variant(target=lambda self, port: f"127.0.0.1 {port}"), "register"),
    "an address where nothing listens": (variant(target=lambda self, port: "127.0.0.1:1"), "register"),
    "another tokenizer": (variant(hash=b"h" * 32), "register"),
    "no deadline": (variant(timeout=None), "register"),
    "no keep-alive": (variant(factor=1000.0), "keep_alive"),
    "one keep-alive per time to live": (variant(factor=3.5), "keep_alive"),
    "keep-alive without a pause": (variant(factor=0.0), "keep_alive"),
    "ignores a new time to live": (variant(first_ttl_only=True), "new_time_to_live"),
    "stays out after NOT_FOUND": (variant(registers_again=False), "lost_lease"),
    "renews the lost lease": (variant(keeps_old_token=True), "lost_lease"),
    "a new incarnation for each registration": (variant(new_incarnation_each_time=True), "lost_lease"),
    "no pause after UNAVAILABLE": (variant(pause=0.0), "unavailable"),
    "ends when the coordinator is unavailable": (variant(exits_on_outage=True), "unavailable"),
    "ends when the coordinator is gone": (variant(exits_on_outage=True), "coordinator_restart"),
    "dials another address": (variant(dialled=lambda self: {self.coordinator, "192.0.2.1:443"}), "dialled"),
    "ignores a request to drain": (variant(heeds_drain=False), "drain"),
    "stays after a drain": (variant(ends=False), "drain"),
    "the same incarnation after a restart": (variant(incarnations=False), "second_start"),
    "another name after a restart": (variant(new_name=True), "second_start"),
    "ends a drain with an error": (variant(drain_code=3), "drain"),
    "registers on after a refusal": (variant(heeds_refusal=False), "refusal"),
    "ends with 0 after a refusal": (variant(refusal_code=0), "refusal"),
    "no Deregister on SIGTERM": (variant(deregisters=False), "sigterm"),
}


def probe_of(launcher: ToyMember | Started | None, *, seconds: float = 5.0, host: str = "127.0.0.1") -> MembershipProbe:
    return MembershipProbe(
        listen=f"{host}:0",
        security=None,
        seconds=seconds,
        ttl=TTL,
        launcher=launcher,
        open_target=lambda target: grpc.aio.insecure_channel(target),
    )


async def examine(
    member: ToyMember, *only: str, seconds: float = 5.0, host: str = "127.0.0.1", early: Sequence[str] = ()
) -> list[Finding]:
    async with probe_of(member, seconds=seconds, host=host) as probe:
        member.coordinator = probe.listen.replace("localhost", "127.0.0.1")
        findings = [*await REGISTRATION.run(probe)]
        probe.dialled.update(early)
        if "register" not in only:
            findings += await MEMBERSHIP.run(probe, only=only)
    return findings


def broken(findings: list[Finding]) -> set[str]:
    return {finding.name for finding in findings if finding.status == "broken"}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_connections_of_the_start_and_other_forms_of_an_address_are_no_fault(host: str) -> None:
    findings = await examine(ToyMember(), "dialled", host=host, early=["192.0.2.1:443"])
    assert {finding.status for finding in findings} == {"ok"}, findings


async def test_every_address_of_this_machine_is_one_of_a_wildcard() -> None:
    assert "127.0.0.1" in await membership._addresses("0.0.0.0")


async def test_a_process_that_dies_of_sigterm_after_deregister_is_no_fault() -> None:
    findings = await examine(variant(drain_code=-15)(), "sigterm")
    assert {finding.status for finding in findings} == {"ok"}, findings


def test_a_member_has_the_name_of_its_certificate() -> None:
    coordinator = FakeCoordinator(ttl=1.0, security=cast("Any", object()))
    context: Any = SimpleNamespace(
        auth_context=lambda: {"x509_subject_alternative_name": [b"spiffe://fourfold/svc/reward/reward-0"]}
    )
    assert coordinator._peer_fault(pb.RegisterRequest(member_id="reward-0"), context) == ""
    fault = coordinator._peer_fault(pb.RegisterRequest(member_id="reward-1"), context)
    assert "'reward-0', and member_id is 'reward-1'" in fault


async def test_a_correct_service_passes() -> None:
    findings = await examine(ToyMember())
    assert {finding.status for finding in findings} == {"ok"}, findings


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if index % 3 else ()) for index, name in enumerate(VARIANTS)]
)
async def test_a_variant_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A correct service would need more time; a broken one never does it.
    for constant, seconds in (("RETURN_SECONDS", 0.5), ("END_SECONDS", 0.5), ("_SLACK_SECONDS", 0.05)):
        monkeypatch.setattr(membership, constant, seconds)
    service, check = VARIANTS[name]
    findings = await examine(service(), check, seconds=1.0)
    assert check in broken(findings), [(f.name, f.status, f.text) for f in findings]


async def test_a_lease_that_was_lost_while_samples_were_scored_is_named() -> None:
    member = ToyMember()
    async with probe_of(member) as probe:
        member.coordinator = probe.listen
        await REGISTRATION.run(probe)
        member.factor = 6.0  # of the pause after the next renewal: two times to live
        await probe.watch(0.5 * TTL)
        member.factor = 1.0
        await probe.watch(2.5 * TTL)
        (finding,) = await MEMBERSHIP.run(probe, only=["keep_alive"])
    assert finding.status == "broken" and "passed without a KeepAlive" in finding.text


@pytest.mark.parametrize(
    ("launcher", "seconds", "text"),
    [
        (None, 0.2, "no service registered"),
        (Started([sys.executable, "-c", "raise SystemExit(3)"]), 20.0, "ended before it registered"),
    ],
    ids=["never registers", "ends at once"],
)
async def test_a_service_that_does_not_register_is_one_failure(
    launcher: Started | None, seconds: float, text: str
) -> None:
    async with probe_of(launcher, seconds=seconds) as probe:
        (finding,) = await REGISTRATION.run(probe)
    assert finding.status == "broken" and text in finding.text


@pytest.mark.slow
@pytest.mark.lock
def test_serve_reward_keeps_its_membership(
    tmp_path: Path, unused_port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "certs"
    certs.make(folder)
    (tmp_path / "function.py").write_text(FUNCTION)
    (tmp_path / "service.py").write_text(SERVICE.format(port=unused_port, certs=folder))
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *filter(None, sys.path)]))
    words = ["conformance", "reward", "--coordinator-listen", f"127.0.0.1:{unused_port}", "--ttl", "3"]
    words += ["--start", f"{sys.executable} {tmp_path / 'service.py'}", "--only", "single", "--certs", str(folder)]
    words += [word for name in MEMBERSHIP.names for word in ("--only", name)]
    assert cli_main.main(words) == 0, capsys.readouterr().out
    lines = capsys.readouterr().out
    assert all(f"ok       {name} " in lines for name in ("register", "info", "single", *MEMBERSHIP.names))


async def test_a_command_that_cannot_be_started_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exception, match="cannot be started"):
        await Started(["/no/such/program"]).start()
