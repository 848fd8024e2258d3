"""The command `fourfold conformance`: TLS, tokens, chosen rules, and wrong usage."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from fourfold.cli import main as cli_main
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rollout.v1.rollout_service_pb2_grpc import add_RolloutServiceServicer_to_server
from fourfold.rpc.server import Server
from fourfold.security.principal import CallerLimits
from fourfold_tools import certs
from tests.conformance.toy_gateway import gateway
from tests.conformance.toy_rollout import ToyRollout
from tests.security.pki import Pki

ROLLOUT = rollout.DESCRIPTOR.services_by_name["RolloutService"]


async def run(*words: str) -> int:
    """Run the command in a thread, because it has an event loop of its own."""
    return await asyncio.to_thread(cli_main.main, ["conformance", *words])


@pytest.mark.parametrize("public", [False, True], ids=["certificate", "token"])
async def test_a_rollout_service_with_tls(public: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pki = Pki(tmp_path / "certs")
    server = Server(listen="127.0.0.1:0", security=pki.load("rollout-0", tokens=True), public=public)
    server.add(ROLLOUT, add_RolloutServiceServicer_to_server, ToyRollout())
    target = await server.start()
    server.set_ready(True)
    (tmp_path / "token").write_text(pki.token + "\n")
    authority = ["--certs", str(pki.folder / "ca.pem"), "--token", f"@{tmp_path / 'token'}"]
    try:
        code = await run("rollout", target, *(authority if public else ["--certs", str(pki.folder)]))
    finally:
        await server.stop(0)
    assert code == 0, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.lock
async def test_a_public_gateway_with_https(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "certs", tmp_path / "findings.json"
    pki = Pki(folder)
    certs.add(folder, [certs.parse_member("gateway-0")])
    async with gateway(tmp_path, security=pki.load("gateway-0", tokens=True)) as running:
        words = [running.target, "--certs", str(folder), "--token", pki.token, "--http", running.url]
        assert running.url.startswith("https://")
        code = await run("gateway", *words, "--json", str(out))
    assert code == 0, capsys.readouterr().out
    findings = json.loads(out.read_text())["findings"]
    assert {f["name"] for f in findings if f["status"] == "skipped"} == {"tokenizer", "call_rate"}


async def test_the_limit_of_calls_of_a_public_gateway(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "certs"
    pki = Pki(folder)
    certs.add(folder, [certs.parse_member("gateway-0")])
    security = pki.load("gateway-0", tokens=True)
    async with gateway(tmp_path, security=security, limits=CallerLimits(calls_per_second=20)) as running:
        words = [running.target, "--certs", str(folder / "ca.pem"), "--token", pki.token, "--only", "call_rate"]
        code = await run("gateway", *words)
    assert code == 0 and "ok       call_rate" in capsys.readouterr().out


async def test_a_low_limit_of_calls_is_no_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "certs"
    pki = Pki(folder)
    certs.add(folder, [certs.parse_member("gateway-0")])
    security = pki.load("gateway-0", tokens=True)
    async with gateway(tmp_path, security=security, limits=CallerLimits(calls_per_second=20)) as running:
        words = [running.target, "--certs", str(folder / "ca.pem"), "--token", pki.token, "--http", running.url]
        rules = ("open", "concurrent_sessions", "cancelled_turn", "watch", "http_session", "http_models")
        code = await run("gateway", *words, *(word for rule in rules for word in ("--only", rule)))
    out = capsys.readouterr().out
    assert code == 0 and all(f"ok       {rule}" in out for rule in rules), out


async def test_chosen_rules_alone_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    server = Server(listen="127.0.0.1:0", security=None)
    server.add(ROLLOUT, add_RolloutServiceServicer_to_server, ToyRollout())
    target = await server.start()
    server.set_ready(True)
    try:
        assert await run("rollout", target, "--only", "greedy", "--only", "seeds") == 0
    finally:
        await server.stop(0)
    names = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("ok ")]
    assert names == ["info", "greedy", "seeds"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["reward"], "the address HOST:PORT of the service is missing"),
        (["rollout", "127.0.0.1:1", "--timeout", "0"], "--timeout 0"),
        (["rollout", "127.0.0.1:1", "--token", "x"], "--token without --certs"),
        (["rollout", "127.0.0.1:1", "--only", "greedi"], "did you mean greedy?"),
        (["rollout", "nowhere"], "is not an address"),
        (["reward", "127.0.0.1:1", "--start", "x"], "--start without --coordinator-listen"),
        (["reward", "--coordinator-listen", "192.0.2.1:1"], "listens on loopback only"),
        (["gateway", "127.0.0.1:1", "--token", "@/no/file", "--certs", "x"], "cannot be read"),
        (["rollout", "127.0.0.1:1", "--tolerance", "nan"], "--tolerance nan: it must be above 0"),
        (["reward", "127.0.0.1:1", "--timeout", "inf"], "--timeout inf"),
        (["reward", "127.0.0.1:1", "--score-tolerance", "nan"], "--score-tolerance nan"),
        (["reward", "127.0.0.1:1", "--json", "/no/such/folder/x.json"], "cannot be written"),
        (["reward", "--coordinator-listen", "127.0.0.1:0", "--start", "a 'b"], "No closing quotation"),
        (["reward", "--coordinator-listen", "127.0.0.1:0", "--start", " "], "give a program"),
        (["gateway", "127.0.0.1:1", "--http", "ftp://127.0.0.1"], "give a URL such as"),
        (["gateway", "127.0.0.1:1", "--http", "http://[::1"], "give a URL such as"),
        (["gateway", "127.0.0.1:1", "--http", "http://127.0.0.1:99999"], "give a URL such as"),
        (["gateway", "127.0.0.1:1", "--http", "https://127.0.0.1:1"], "https needs --certs"),
    ],
)
def test_wrong_usage_has_exit_code_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["conformance", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"completion": 1', "line 1: not JSON"),
        ('\n{"metadata": ' + "[" * 100_000 + "}", "line 2: not JSON"),
        ('{"completion": "\\ud800"}', "line 1: half of a surrogate pair"),
        ('{"text": ""}', "line 1: it must be an object of prompt"),
        ('{"completion": "a\u2028b"}\n\n{"completion": ""}\n', ""),
    ],
)
def test_lines_of_samples_that_cannot_be_judged(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "samples.jsonl").write_text(text, encoding="utf-8")
    words = ["127.0.0.1:1", "--unscorable", str(tmp_path / "samples.jsonl"), "--only", "tokenizer"]
    assert cli_main.main(["conformance", "reward", *words]) == (2 if said else 1)
    assert said in capsys.readouterr().err


def test_an_unknown_service_has_exit_code_2() -> None:
    with pytest.raises(SystemExit) as caught:
        cli_main.main(["conformance", "trainer", "127.0.0.1:1"])
    assert caught.value.code == 2
