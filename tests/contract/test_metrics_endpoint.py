"""The metrics endpoint of each service: what docs/monitoring.md promises, and the numbers after some work."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.metrics_core import Metric

from fourfold import errors
from fourfold.metrics import METRICS
from fourfold.reward.client import AsyncRewardClient
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold.rpc.call_stats import CallStats
from fourfold.rpc.channel import open_channel
from fourfold.rpc.server import Server
from fourfold.service.exporter import TEXT, Exporter, Source
from fourfold.service.lifecycle import ServeOptions
from fourfold.types.v1.experience_pb2 import Experience
from fourfold_reward import serve as reward_serve
from fourfold_rollout.metrics_source import rollout_source
from tests.conftest import Serve
from tests.fakes.rollout import request, rollout_service
from tests.fakes.servicers import Reward
from tests.fakes.stage import Stage, hang_in_step, until
from tests.fakes.toy import make_config
from tests.support.scrape import check_exported, discovered, http, parse, value

if TYPE_CHECKING:
    from tests.fakes.trainer_service import Trainer

REPOSITORY = Path(__file__).parents[2]
SCORE = "fourfold.reward.v1.RewardService/Score"


def item(text: str, *, sample_id: str = "a", verifier: str = "") -> reward.ScoreItem:
    experience = Experience(sample_id=sample_id)
    return reward.ScoreItem(
        experience=experience, prompt_text=text, completion_text=text, answer="4", verifier=verifier
    )


async def scrape(target: str) -> dict[str, Metric]:
    code, _, page = await http(target)
    assert code == 200
    return parse(page)


async def page_of(role: str, source: Source) -> dict[str, Metric]:
    """Return the page of a service with one source."""
    exporter = Exporter(role, stats=CallStats(), ready=lambda: True)
    exporter.add(source)
    return parse((await exporter.page(TEXT)).decode())


async def test_the_coordinator_shows_its_run(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(metrics={"endpoint": True})
    hangs = hang_in_step(stage, 3)
    await stage.start()
    await asyncio.wait_for(hangs.wait(), 10)
    target = discovered(stage.folder, "coordinator")
    families = await scrape(target)
    check_exported(families, "coordinator")
    assert value(families, "fourfold_run_phase", phase="TRAINING") == 1
    assert sum(s.value for s in families["fourfold_run_phase"].samples) == 1
    assert (value(families, "fourfold_run_step"), value(families, "fourfold_run_steps")) == (2, 4)
    assert value(families, "fourfold_run_policy_version") == 2
    for role, count in {"rollout": 1, "trainer": 1, "reward": 1, "reference": 0}.items():
        assert value(families, "fourfold_run_members", role=role, state="live") == count
    assert value(families, "fourfold_run_samples", state="TRAINED") == 2 * 12
    assert value(families, "fourfold_run_samples", state="LEASED") == 12
    shown = {s.labels["metric"]: s.value for s in families["fourfold_run_metric"].samples}
    row = stage.lines("metrics.jsonl")[-1]
    assert shown == {name: number for name, number in row.items() if name in METRICS and number is not None}
    assert value(families, "fourfold_ready") == 1
    calls = {s.labels["method"]: s.value for s in families["fourfold_calls_total"].samples}
    assert calls["fourfold.coordinator.v1.MembershipService/Register"] == 3
    await stage.kill()
    with pytest.raises(OSError):
        await http(target)
    assert not (stage.folder / "metrics" / "coordinator.json").exists()


async def test_without_the_key_nothing_listens(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage()
    hangs = hang_in_step(stage, 1)
    await stage.start()
    await asyncio.wait_for(hangs.wait(), 10)
    assert not (stage.folder / "metrics").exists()


async def test_the_reward_service_counts_its_samples(tmp_path: Path, unused_port: int) -> None:
    (tmp_path / "model-folder").mkdir()
    listen = f"127.0.0.1:{unused_port}"
    config = make_config(tmp_path, reward={"processes": 2}, metrics={"endpoint": True})
    options = ServeOptions(role="reward", recipe=Path(), config=config, member_id="reward-0", listen=listen)
    options = replace(options, run_dir=tmp_path)
    serving = asyncio.create_task(reward_serve.serve(options))
    await until(lambda: (tmp_path / "metrics" / "reward-0.json").exists() or serving.done(), 20)
    target = discovered(tmp_path, "reward-0")
    families = await scrape(target)
    check_exported(families, "reward")
    assert value(families, "fourfold_reward_samples_total", outcome="SCORED") == 0
    async with asyncio.timeout(30):
        while value(families := await scrape(target), "fourfold_ready") == 0:
            await asyncio.sleep(0.2)
    channel = open_channel(listen, None)
    client = AsyncRewardClient(channel, peer="reward-0")
    await client.score([item("4"), item("5", sample_id="b")], timeout=20)
    await client.score([item("4", verifier="a_name_of_the_caller")], timeout=20)
    await channel.close()
    await asyncio.sleep(1.1)  # a page is kept for a second
    families = await scrape(target)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    outcomes = {s.labels["outcome"]: s.value for s in families["fourfold_reward_samples_total"].samples}
    assert {name: count for name, count in outcomes.items() if count} == {"SCORED": 2, "NOT_FOUND": 1}
    assert value(families, "fourfold_reward_sample_seconds_count") == 2
    assert value(families, "fourfold_reward_workers", state="idle") == 2
    assert value(families, "fourfold_child_processes") >= 2
    assert value(families, "fourfold_children_resident_memory_bytes") > 1 << 20


async def test_the_rollout_service_shows_engine_and_weights(serve: Serve) -> None:
    async with rollout_service(serve) as service:
        source = rollout_source(service.servicer, service.servicer._weights, kv_cache_tokens=100)
        answer = asyncio.create_task(service.client.complete(request(sample_count=3), timeout=5))
        await service.running(3)
        service.engine.tick(2)
        families = await page_of("rollout", source)
        check_exported(families, "rollout")
        assert value(families, "fourfold_rollout_samples", state="running") == 3
        assert value(families, "fourfold_rollout_samples", state="waiting") == 0
        assert value(families, "fourfold_rollout_sampled_tokens_total") == 6
        assert value(families, "fourfold_rollout_kv_cache_free_tokens") < 100
        service.engine.tick(10)
        await answer
        await service.pause()
        blocked = asyncio.create_task(service.client.complete(request("late", sample_count=2), timeout=5))
        await until(lambda: service.servicer.waiting_samples == 2)
        await asyncio.sleep(0.05)
        families = await page_of("rollout", source)
        assert value(families, "fourfold_rollout_samples", state="waiting") == 2
        assert value(families, "fourfold_rollout_update_seconds_total", phase="PAUSED") >= 0.05
        await service.control.receive(epoch=1, policy_version=1, timeout=2)
        await service.control.commit(epoch=1, policy_version=1, timeout=2)
        await service.running(2)
        assert service.servicer.waiting_samples == 0
        service.engine.tick(10)
        await blocked
        families = await page_of("rollout", source)
        assert value(families, "fourfold_rollout_policy_version") == 1
        assert value(families, "fourfold_rollout_samples", state="running") == 0


async def test_a_call_that_leaves_while_it_waits_is_no_longer_counted(serve: Serve) -> None:
    async with rollout_service(serve) as service:
        await service.pause()
        blocked = asyncio.create_task(service.client.complete(request(sample_count=2), timeout=5))
        await until(lambda: service.servicer.waiting_samples == 2)
        blocked.cancel()
        await until(lambda: service.servicer.waiting_samples == 0)


async def test_the_trainer_counts_tokens_and_phases(trainer: Trainer) -> None:
    from fourfold_trainer.service.metrics_source import trainer_source
    from tests.contract.test_trainer_step import USEFUL

    source = trainer_source(trainer.core)
    first = await trainer.train(1, USEFUL)
    await trainer.train(1, USEFUL)  # its stored answer
    families = await page_of("trainer", source)
    check_exported(families, "trainer")
    assert value(families, "fourfold_trainer_step") == value(families, "fourfold_trainer_policy_version") == 1
    assert value(families, "fourfold_trainer_trained_tokens_total") == first.metrics["train/tokens_per_step"] > 0
    assert value(families, "fourfold_trainer_phase", phase="WAITING") == 1
    assert sum(s.value for s in families["fourfold_trainer_phase"].samples) == 1
    assert value(families, "fourfold_trainer_phase_seconds_total", phase="TRAINING") > 0
    assert value(families, "fourfold_trainer_checkpoint_step") == -1


async def test_calls_are_counted_by_the_status_with_which_they_end() -> None:
    class Scorer(Reward):
        async def Score(self, request: reward.ScoreRequest, context: Any) -> reward.ScoreResponse:
            match request.items[0].prompt_text:
                case "bad":
                    raise errors.InvalidInput("bad")
                case "bug":
                    raise KeyError("bug")
                case "full":
                    raise errors.Overloaded("full", reason="QUEUE_FULL")
                case "abort":
                    await context.abort(grpc.StatusCode.OUT_OF_RANGE, "gone")
                case "hang":
                    await asyncio.sleep(30)
            return reward.ScoreResponse(scores=[reward.SampleScore(sample_id="a", score=1)])

    stats = CallStats()
    server = Server(listen="127.0.0.1:0", security=None, stats=stats)
    server.add(*Scorer().servicer())
    channel = open_channel(await server.start(), None)
    client = AsyncRewardClient(channel, peer="r")
    for text, timeout in (("", 5), ("", 5), ("bad", 5), ("bug", 5), ("full", 5), ("abort", 5), ("hang", 1)):
        await asyncio.gather(client.score([item(text)], timeout=timeout), return_exceptions=True)
    await until(lambda: sum(stats.ended.values()) == 7)  # a call is counted after its client has the status
    leaving = asyncio.create_task(client.score([item("hang")], timeout=20))
    await until(lambda: stats.in_flight[SCORE] == 1)
    leaving.cancel()
    await until(lambda: not stats.in_flight[SCORE])
    unknown: Any = channel.unary_unary("/fourfold.reward.v1.RewardService/Nothing")
    with pytest.raises(grpc.aio.AioRpcError):
        await unknown(b"", timeout=5)
    stub = health_pb2_grpc.HealthStub(channel)
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.Check(health_pb2.HealthCheckRequest(service="x"), timeout=5)
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.List(health_pb2.HealthListRequest(), timeout=5)
    await until(lambda: sum(stats.ended.values()) == 10)
    ended = {code: count for (method, code), count in stats.ended.items() if method == SCORE}
    assert ended == {
        "OK": 2, "INVALID_ARGUMENT": 1, "INTERNAL": 1, "RESOURCE_EXHAUSTED": 1, "OUT_OF_RANGE": 1,
        "DEADLINE_EXCEEDED": 1, "CANCELLED": 1,
    }  # fmt: skip
    others = {key: count for key, count in stats.ended.items() if key[0] != SCORE}
    assert others == {
        ("grpc.health.v1.Health/Check", "NOT_FOUND"): 1, ("grpc.health.v1.Health/List", "UNIMPLEMENTED"): 1,
    }, "callers cannot add methods"  # fmt: skip
    assert sum(stats.seconds[SCORE].counts) == 8 and stats.seconds[SCORE].sum >= 0.3
    assert stats.refused == {"QUEUE_FULL": 1}
    await channel.close()
    await server.stop(0)


async def test_hostile_scrapers_do_not_stop_a_service(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.fakes.service", "--metrics-listen", "127.0.0.1:0", "--run-dir", str(tmp_path)),
        stdout=PIPE, stderr=PIPE, cwd=REPOSITORY, env={**os.environ},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        ready = (await asyncio.wait_for(process.stdout.readline(), 20)).decode().split()
        target = discovered(tmp_path, "reward-0")
        host, _, port = target.rpartition(":")
        clients = [await asyncio.open_connection(host, int(port)) for _ in range(500)]
        for _, writer in clients[::2]:
            writer.write(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 100_000)
        for _, writer in clients[1::2]:
            writer.write(b"G")
        channel = open_channel(ready[1], None)
        client = AsyncRewardClient(channel, peer="reward-0")
        (score,) = await client.score([item("0")], timeout=5)
        assert score.score == 1
        for _, writer in clients:
            writer.close()
        async with asyncio.timeout(15):
            while (await http(target))[0] != 200:
                await asyncio.sleep(0.1)
        families = await scrape(target)
        assert value(families, "fourfold_calls_total", method=SCORE, code="OK") == 1
        assert value(families, "fourfold_ready") == 1
        await channel.close()
        process.terminate()
        _, stderr = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 0 and b"Traceback" not in stderr
        assert f"metrics endpoint started: http://{target}/metrics" in stderr.decode()
        assert not (tmp_path / "metrics" / "reward-0.json").exists()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
