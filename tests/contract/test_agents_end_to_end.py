"""Runs of the real coordinator whose trajectories come from real clients through a real gateway; engines are toys."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fourfold.agent.client import AsyncAgentClient
from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import FourfoldError
from fourfold.model.tokenizer import Tokenizer
from fourfold.rpc.channel import open_channel
from fourfold.sample import Sample
from fourfold.service.lifecycle import ServeOptions, ServiceHost
from fourfold_coordinator.state.ledger import SampleState
from fourfold_gateway import serve as gateway_serve
from tests.fakes.real_gateway import real_gateway
from tests.fakes.stage import Stage, check_books, until
from tests.fakes.toy_gateway import FakeGateway

ROOT = Path(__file__).parents[2]
AGENTS = {"source": "tasks", "lease_seconds": 20.0, "group_seconds": 30.0}


async def attempt_tasks(target: str) -> int:
    """Attempt tasks until the run ends: two turns each, and a reward for the right answer; return their number."""
    count = 0
    async with open_channel(target, None) as channel:
        agent = AsyncAgentClient(channel, peer="gateway")
        async for task in agent.tasks():
            try:
                session = f"s-{task.task_id}"
                await agent.open_session(session, task_id=task.task_id)
                messages = list(task.messages) or [pb.Message(role="user", content=task.text)]
                first = await agent.chat(session, messages)
                messages += [first, pb.Message(role="user", content="2 * 3 =")]
                second = await agent.chat(session, messages)
                await agent.close_session(session, reward=float(task.sample_index % 2), metrics={"right": 1.0})
            except FourfoldError:  # no engine is there yet; the task is leased again
                await asyncio.sleep(0.05)
                continue
            assert second.role == "assistant"
            count += 1
    return count


async def test_a_run_trains_on_sessions_of_a_gateway(make_stage: Callable[..., Stage], tmp_path: Path) -> None:
    stage, batches = make_stage(steps=3, agents=AGENTS), list[list[Sample]]()
    stage.trainer.on_batch = batches.append
    stage.others.append(FakeGateway("gateway-0", stage.config))  # a member; the gateway below has no registration
    await stage.start()
    async with real_gateway(stage.config, tmp_path / "gateway", run=stage.address) as gateway:
        agents = [asyncio.create_task(attempt_tasks(gateway.target)) for _ in range(8)]
        assert await stage.finish() == 0
        async with asyncio.timeout(20):
            counts = await asyncio.gather(*agents)
    assert sum(counts) >= 36 and min(counts) > 0
    check_books(stage)
    assert stage.ledger().counts()[SampleState.TRAINED] == 36
    samples = [sample for batch in batches for sample in batch]
    assert {sample.segment_count for sample in samples} <= {0, 1}, "every second turn extends the first"
    for sample in samples:
        turns = sum(span.policy_version >= 0 for span in sample.version_spans)
        assert turns == 2 and sample.action_mask[-1] and not sample.action_mask[0]
    assert all(row["agents/metrics/right"] == 1 for row in stage.lines("metrics.jsonl"))


async def test_an_unchanged_openai_client_trains_a_run_to_its_end(
    make_stage: Callable[..., Stage], tmp_path: Path
) -> None:
    stage, batches = make_stage(steps=2, agents=AGENTS, data={"holdout": None}), list[list[Sample]]()
    stage.trainer.on_batch = batches.append
    stage.others.append(FakeGateway("gateway-0", stage.config))
    await stage.start()
    async with real_gateway(stage.config, tmp_path / "gateway", run=stage.address, http=True) as gateway:
        command = [sys.executable, "examples/agent_openai.py", f"{gateway.url}/v1"]
        agent = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=-1, stderr=-1)
        try:
            assert await stage.finish() == 0
            async with asyncio.timeout(20):
                out, errors = await agent.communicate()
        finally:
            if agent.returncode is None:
                agent.kill()
    assert (agent.returncode, errors.decode()) == (0, "") and out.startswith(b"24 tasks, mean reward ")
    check_books(stage)
    assert stage.ledger().counts() == {SampleState.TRAINED: 24}
    assert all(sample.scorer == "agent" for batch in batches for sample in batch)


async def test_a_gateway_that_drains_slowly_ends_without_an_error(
    make_stage: Callable[..., Stage], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its tasks called the coordinator on a channel that the drain had closed."""
    stage = make_stage(agents=AGENTS, gateway={"http_listen": ""})
    await stage.start()
    options = ServeOptions(
        role="gateway",
        recipe=stage.folder / "config.toml",
        config=stage.config,
        member_id="gateway-0",
        coordinator=stage.address,
        run_dir=tmp_path,
    )
    host, tokenizer = ServiceHost(options, role=Role.ROLE_GATEWAY), Tokenizer.load(stage.config.model.source)
    host.tokenizer_sha256 = tokenizer.sha256
    gateway = asyncio.create_task(gateway_serve._serve(host, tokenizer))
    await until(lambda: "gateway-0 joined" in caplog.messages or gateway.done())
    host.on_drain.append(lambda: asyncio.sleep(1.5))  # longer than the pause before the run is watched again
    host.stop()
    assert await gateway == 0
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
