"""The examples in other languages, built as their READMEs say, against real servers, a real engine and real runs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.rpc.code_pb2 import INVALID_ARGUMENT
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fourfold.cli import main as cli_main
from fourfold.config import SecurityConfig
from fourfold.coordinator.v1 import membership_service_pb2 as membership
from fourfold.coordinator.v1.membership_service_pb2_grpc import add_MembershipServiceServicer_to_server
from fourfold.errors import InvalidInput, Overloaded, PermissionDenied, Unavailable
from fourfold.host.clock import SYSTEM_CLOCK
from fourfold.reward.client import AsyncRewardClient
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold.reward.v1.reward_service_pb2_grpc import RewardServiceStub
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rpc.channel import open_channel, translate_errors
from fourfold.rpc.server import Server
from fourfold.security.access import Security
from fourfold.security.principal import LOCAL, Principal
from fourfold.types.v1.experience_pb2 import Experience
from fourfold_coordinator.routing.membership import MembershipServicer
from fourfold_coordinator.routing.registry import Member, MemberChange, Registry
from fourfold_tools import certs
from tests.fakes.agent_service import RUN, AgentGateway
from tests.fakes.command_line import Stage, staged
from tests.fakes.servicers import Rollout, generated
from tests.support.example_builds import Command, build_go, build_typescript, run
from tests.support.example_reward import NAME, serving
from tests.support.rollout_process import Service, start

# Slow: `npm install`, and the build of gRPC for Go, take up to two minutes.
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def typescript(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Command]:
    return build_typescript(tmp_path_factory.mktemp("typescript"))


@pytest.fixture(scope="module")
def go(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Command]:
    return build_go(tmp_path_factory.mktemp("go"))


@pytest.fixture(scope="module", params=["typescript", "go"])
def example(request: pytest.FixtureRequest) -> tuple[Path, Command]:
    """Return the folder of an example that is built, and the command of each of its programs."""
    built: tuple[Path, Command] = request.getfixturevalue(request.param)
    return built


async def _call(example: tuple[Path, Command], program: str, *words: str, **env: str) -> str:
    folder, command = example
    proxy = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")  # which must not be used
    return await asyncio.to_thread(run, [*command(program), *words], folder, 60, {**os.environ, **proxy, **env})


async def test_an_agent_plays_every_task_once_through_every_fault_that_may_be_repeated(
    example: tuple[Path, Command],
) -> None:
    gateway, server = AgentGateway(30), Server(listen="127.0.0.1:0", security=None, public=True)
    server.add(*gateway.servicer())
    output = await _call(example, "agent", await server.start())
    await server.stop(0)
    assert all(gateway.faults[kind] > 1 for kind in ("no task in time", "overloaded", "broken stream", "lost response"))
    assert gateway.rewards == {task: float(a % 2 == 0) for task, (a, _) in gateway.tasks.items()}
    assert gateway.abandoned == []
    assert output.splitlines() == [f"model toy, run {RUN}", "30 tasks, mean reward 0.500"]


class _Busy(Rollout):
    """Refuses the first two calls, and breaks the third one after a token."""

    def __init__(self) -> None:
        super().__init__(generated(0, 17, 18, version=3), generated(0, 300_000, version=4, done=True))
        self.calls: list[rollout.GenerateRequest] = []

    async def Generate(self, request, context):  # type: ignore[no-untyped-def]  # as of Rollout
        self.calls.append(request)
        if len(self.calls) == 1:
            raise Overloaded("too many samples", retry_after=0.05)
        if len(self.calls) == 2:
            raise Unavailable("the engine is asleep")
        async for response in super().Generate(request, context):
            yield response
            if len(self.calls) == 4:
                raise Unavailable("the engine died")


async def test_sampling_repeats_a_refused_call_and_never_a_begun_one(
    example: tuple[Path, Command], tmp_path: Path
) -> None:
    token = certs.make(tmp_path / "certs", [], [certs.parse_member("rollout-0")])
    files = SecurityConfig(directory=str(tmp_path / "certs"), tokens_file=str(tmp_path / "certs/tokens.txt"))
    security, servicer = Security.load(files, Principal("rollout", "rollout-0")), _Busy()
    server = Server(listen="127.0.0.1:0", security=security, public=True)
    server.add(*servicer.servicer())
    target, ca = await server.start(), str(tmp_path / "certs/ca.pem")
    output = await _call(example, "sample", target, "1,2,3", FOURFOLD_CA=ca, FOURFOLD_TOKEN=token)
    tokens = ["version 3: 17 18", "version 4: 300000"]
    assert output.splitlines()[1:] == [*tokens, "3 tokens, log-probability -1.500, FINISH_REASON_STOP"]
    assert len(servicer.calls) == 3 and len({call.request_id for call in servicer.calls}) == 3
    with pytest.raises(AssertionError, match=r"sample: UNAVAILABLE: the engine died"):
        await _call(example, "sample", target, "1,2,3", FOURFOLD_CA=ca, FOURFOLD_TOKEN=token)
    assert len(servicer.calls) == 4
    with pytest.raises(AssertionError, match=r"sample: UNAUTHENTICATED: unknown bearer token"):
        await _call(example, "sample", target, "1,2,3", FOURFOLD_CA=ca, FOURFOLD_TOKEN="x" * 43)
    await server.stop(0)


@pytest.fixture(scope="module")
def service(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    running = start(tiny_model("qwen2"), tmp_path_factory.mktemp("rollout"))
    yield running
    running.close()


async def test_tokens_of_a_real_engine_arrive_as_they_are_sampled(
    example: tuple[Path, Command], service: Service
) -> None:
    output = await _call(example, "sample", service.public, "1,2,3")
    chunks = re.findall(r"^version 0: ([0-9 ]+)$", output, re.MULTILINE)
    ids = [int(word) for chunk in chunks for word in chunk.split()]
    assert 1 <= len(ids) <= 16 and all(0 <= token < 512 for token in ids)
    assert re.search(rf"^{len(ids)} tokens, log-probability -[0-9.]+, FINISH_REASON_(STOP|LENGTH)$", output, re.M)


# -- the reward service ---------------------------------------------------------------------------------------------


def _certificates(folder: Path) -> Path:
    members = ("coordinator-0", "reward-0", "reward-1", "rollout-0", "trainer-0", "viewer-0")
    certs.make(folder, [], [certs.parse_member(member) for member in members])
    return folder


def _security(folder: Path, member: str) -> Security:
    loaded = Security.load(SecurityConfig(directory=str(folder)), certs.parse_member(member))
    assert loaded is not None
    return loaded


@pytest.mark.parametrize("tls", [False, True])
def test_the_reward_service_keeps_the_contract(
    typescript: tuple[Path, Command], tmp_path: Path, tls: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--certs", str(_certificates(tmp_path / "certs"))] if tls else []
    with serving(typescript, "127.0.0.1:0", *words) as service:
        assert cli_main.main(["conformance", "reward", service.target, *words]) == 0, capsys.readouterr().out
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[1] for line in lines if line.startswith(("skipped", "not run"))] == ["tokenizer"]
        assert service.stop() == 0


def _item(sample_id: str, completion: str, metadata_json: str = "") -> reward.ScoreItem:
    experience = Experience(sample_id=sample_id)
    return reward.ScoreItem(experience=experience, completion_text=completion, metadata_json=metadata_json)


async def test_the_reward_service_tells_what_it_cannot_judge(typescript: tuple[Path, Command]) -> None:
    with serving(typescript, "127.0.0.1:0") as service:
        async with open_channel(service.target, None) as channel:
            client, stub = AsyncRewardClient(channel, peer="service"), RewardServiceStub(channel)
            items = [
                _item("a", "x" * 250),
                _item("b", "\U0001f600" * 25, '{"max_characters": 100}'),
                _item("c", "\0"),
                _item("d", "x", '{"max_characters": "many"}'),
                _item("e", "x", json.dumps({"long": "x" * 70_000})),
            ]
            scores = await client.score(items, timeout=5)
            assert [score.score for score in scores[:2]] == [0.75, 0.75]
            assert dict(scores[1].components) == {"characters": 25}
            assert scores[2].abstain_reason == "NOT_A_TEXT"
            assert {(score.error.code, score.error.reason) for score in scores[3:]} == {
                (INVALID_ARGUMENT, "BAD_METADATA")
            }
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", "fourfold.reward.v1.RewardService"):
                response = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
                assert response.status == health_pb2.HealthCheckResponse.SERVING
            for timeout, items, reason in [(None, [_item("a", "")], "NO_DEADLINE"), (5, [], "INVALID_INPUT")]:
                with pytest.raises(InvalidInput) as caught, translate_errors(peer="service", name="Score", timeout=5):
                    await stub.Score(reward.ScoreRequest(items=items), timeout=timeout)
                assert caught.value.reason == reason


_BROKEN_SCORER = """
import * as grpc from "@grpc/grpc-js";
import { addRewardService } from "./service.js";

async function score(item) {
  switch (item.completionText) {
    case "slow": await new Promise((done) => setTimeout(done, 60_000));
    case "nan": return { score: NaN };
    case "large": return { score: 1, components: { part: 1e300 } };
    case "nothing": return undefined;
    case "throws": throw new Error("line 1\\nline 2" + "x".repeat(2000));
    default: return { score: 0 };
  }
}

const server = new grpc.Server();
addRewardService(server, { name: "broken@1", pure: false, score }, () => undefined);
server.bindAsync("127.0.0.1:0", grpc.ServerCredentials.createInsecure(), (_, port) => {
  console.log(`READY 127.0.0.1:${port}`);
});
"""


async def test_no_fault_of_a_scorer_becomes_a_score(typescript: tuple[Path, Command]) -> None:
    (typescript[0] / "dist/reward/broken.js").write_text(_BROKEN_SCORER)
    with serving(typescript, program="reward/broken") as service:
        async with open_channel(service.target, None) as channel:
            client = AsyncRewardClient(channel, peer="service")
            texts = ["zero", "slow", "nan", "large", "nothing", "throws"]
            request = reward.ScoreRequest(items=[_item(text, text) for text in texts])
            # Not by the client, which makes an error of a score that is not finite.
            first, *others = (await RewardServiceStub(channel).Score(request, timeout=2)).scores
            assert first.HasField("score") and first.score == 0
            reasons = ["TIMEOUT", "NOT_FINITE", "NOT_FINITE", "RAISED", "RAISED"]
            assert [score.error.reason for score in others] == reasons
            assert others[-1].error.message.startswith("Error: line 1 line 2xx")
            # Samples that wait: 8 calls fill the service until their caller leaves.
            calls = [asyncio.ensure_future(client.score(_slow_items(number), timeout=60)) for number in range(8)]
            async with asyncio.timeout(30):
                while await _is_free(client):
                    await asyncio.sleep(0.05)
                for call in calls:
                    call.cancel()
                while not await _is_free(client):
                    await asyncio.sleep(0.05)


async def _is_free(client: AsyncRewardClient) -> bool:
    try:
        (score,) = await client.score([_item("one", "zero")], timeout=10)
        return score.HasField("score")
    except Overloaded as error:
        assert (error.reason, error.retry_after) == ("TOO_MANY_SAMPLES", 1.0)
        return False


def _slow_items(number: int) -> list[reward.ScoreItem]:
    return [_item(f"s{number}-{index}", "slow") for index in range(1024)]


async def test_the_reward_service_answers_only_coordinators_of_its_deployment(
    typescript: tuple[Path, Command], tmp_path: Path
) -> None:
    folder = _certificates(tmp_path / "certs")

    async def call(security: Security | None) -> str:
        async with open_channel(target, security, server=Principal("reward", "reward-1")) as channel:
            return (await AsyncRewardClient(channel, peer="service").get_info(timeout=5)).name

    with serving(typescript, "127.0.0.1:0", "--certs", str(folder), "--member-id", "reward-1") as service:
        target = service.target
        coordinator = _security(folder, "coordinator-0")
        assert await call(coordinator) == NAME
        with pytest.raises(PermissionDenied, match="only a coordinator"):
            await call(_security(folder, "reward-0"))
        for stranger in (None, _security(_certificates(tmp_path / "others"), "coordinator-0")):
            with pytest.raises(Unavailable):
                await call(stranger)
        certs.revoke(folder, ["coordinator-0"])
        with pytest.raises(PermissionDenied) as caught:
            await call(coordinator)
        assert caught.value.reason == "CERTIFICATE_REVOKED"


class _Members(MembershipServicer):
    """The membership of a coordinator, with leases of 0.6 s."""

    def __init__(self, security: Security) -> None:
        self.registry = Registry(
            clock=SYSTEM_CLOCK, tokenizer_sha256=b"t" * 32, security=security, ttl=0.6, scorers=["length", "math"]
        )
        super().__init__(self.registry)
        self.calls, self.changes, self.drains = Counter[str](), list[MemberChange](), False
        self.registry.add_listener(lambda _member, change: self.changes.append(change))

    async def Register(self, request: membership.RegisterRequest, context: Any) -> membership.RegisterResponse:
        self.calls["Register"] += 1
        return await super().Register(request, context)

    async def KeepAlive(self, request: membership.KeepAliveRequest, context: Any) -> membership.KeepAliveResponse:
        self.registry.expire()
        self.calls["KeepAlive"] += 1
        response = await super().KeepAlive(request, context)
        response.drain_requested = self.drains
        return response

    async def serve(self, listen: str, security: Security) -> tuple[Server, str]:
        server = Server(listen=listen, security=security)
        service = membership.DESCRIPTOR.services_by_name["MembershipService"]
        server.add(service, add_MembershipServiceServicer_to_server, self)
        return server, await server.start()

    async def member(self, *, renewals: int = 0) -> Member:
        """Wait for a member with so many renewals, and return it."""
        while self.calls["KeepAlive"] < renewals or not self.registry.members():
            await asyncio.sleep(0.02)
        (found,) = self.registry.members()
        return found


async def test_the_reward_service_stays_a_member_whatever_happens_to_the_coordinator(
    typescript: tuple[Path, Command], tmp_path: Path
) -> None:
    folder = _certificates(tmp_path / "certs")
    security = _security(folder, "coordinator-0")
    first, second, third = (_Members(security) for _ in range(3))
    server, target = await first.serve("127.0.0.1:0", security)
    words = ["--certs", str(folder), "--coordinator", target, "--scorer", "math"]
    with serving(typescript, "127.0.0.1:0", *words) as service:
        async with asyncio.timeout(20):
            member = await first.member(renewals=5)
            assert (member.member_id, member.target, member.pool) == ("reward-0", service.target, "math")
            assert first.calls["Register"] == 1 and first.changes == [MemberChange.JOINED]
            service.send(signal.SIGSTOP)
            while not first.registry.expire():
                await asyncio.sleep(0.02)
            service.send(signal.SIGCONT)
            assert await first.member() == member
            # A coordinator that knows no lease, at once; then one that comes back after a while.
            await server.stop(0)
            server, _ = await second.serve(target, security)
            assert (await second.member(renewals=3)).incarnation == member.incarnation
            await server.stop(0)
            await asyncio.sleep(1.0)
            server, _ = await third.serve(target, security)
            assert (await third.member(renewals=3)).incarnation == member.incarnation
            third.drains = True
            code, _ = await asyncio.to_thread(service.wait)
        assert code == 0 and third.changes == [MemberChange.JOINED, MemberChange.LEFT]
    third.drains = False
    with serving(typescript, "127.0.0.1:0", *words) as service:
        async with asyncio.timeout(20):
            await third.member()
            assert await asyncio.to_thread(service.stop) == 0
        assert third.changes[2:] == [MemberChange.JOINED, MemberChange.LEFT]
    await server.stop(0)


@pytest.mark.parametrize("reason", ["INCARNATION_FENCED", "UNKNOWN_SCORER", "CERTIFICATE_REVOKED"])
async def test_the_reward_service_ends_when_the_coordinator_will_never_accept_it(
    typescript: tuple[Path, Command], tmp_path: Path, reason: str
) -> None:
    folder = _certificates(tmp_path / "certs")
    security = _security(folder, "coordinator-0")
    members = _Members(security)
    server, target = await members.serve("127.0.0.1:0", security)
    words = ["--certs", str(folder), "--coordinator", target]
    words += ["--scorer", "unknown"] if reason == "UNKNOWN_SCORER" else []
    with serving(typescript, "127.0.0.1:0", *words) as service:
        async with asyncio.timeout(20):
            if reason != "UNKNOWN_SCORER":
                await members.member(renewals=1)
            if reason == "CERTIFICATE_REVOKED":
                certs.revoke(folder, ["reward-0"])
            if reason == "INCARNATION_FENCED":
                members.registry.register(
                    Member(
                        member_id="reward-0",
                        incarnation="1" * 32,
                        role=membership.ROLE_REWARD,
                        target=service.target,
                        tokenizer_sha256=b"",
                    ),
                    LOCAL,
                )
            code, errors = await asyncio.to_thread(service.wait)
    assert code == 1 and f"reward: {reason}: " in errors
    await server.stop(0)


@pytest.fixture
def make_stage(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    with staged(tmp_path) as make:
        yield make


@pytest.mark.parametrize("way", ["address", "registration"])
def test_a_run_trains_with_the_reward_service_and_loses_no_sample_when_it_is_killed(
    typescript: tuple[Path, Command],
    make_stage: Callable[..., Stage],
    tmp_path: Path,
    unused_tcp_port_factory: Callable[[], int],
    way: str,
) -> None:
    address, coordinator = (f"127.0.0.1:{unused_tcp_port_factory()}" for _ in range(2))
    words, table, tables = [address], dict[str, Any](target=address), dict[str, Any]()
    stage_words = ["toy.toml", "--listen", coordinator]
    if way == "registration":
        folder = _certificates(tmp_path / "certs")
        words += ["--certs", str(folder), "--coordinator", coordinator]
        table, tables = {"replicas": 0}, {"security": {"directory": str(folder)}}
    with serving(typescript, *words) as service:
        stage = make_stage(steps=4, reward=table, **tables)
        process = stage.start(*stage_words, delay=0.1)
        stage.wait_for_step(process, 1)
        service.stop(signal.SIGKILL)
    before = stage.steps()
    with serving(typescript, *words):
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert before < 4 and stage.descendants() == {}
    report = json.loads((stage.run_dir / "report.json").read_text())
    assert (report["steps"], report["dropped"]) == (4, {})
    rows = [json.loads(line) for line in (stage.run_dir / "samples.jsonl").read_text().splitlines()]
    assert {row["scorer"] for row in rows} == {NAME}
    assert all(row["score"] == pytest.approx(1 - len(row["completion"]) / 1000) for row in rows)
