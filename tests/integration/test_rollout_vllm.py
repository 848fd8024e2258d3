"""The rollout service as users start it: a process with a real vLLM CPU engine and a tiny model, called over gRPC."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from fourfold.errors import FourfoldError, InvalidInput, StaleEpoch, Unavailable, WrongState
from fourfold.rollout.client import AsyncRolloutClient, RolloutControlClient
from fourfold.rollout.v1 import rollout_control_service_pb2 as control_pb
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.rpc.channel import open_channel
from tests.support.rollout_process import (
    Publisher,
    Service,
    gone,
    plain,
    request,
    sampled_count,
    start,
    until_running,
    until_sampled,
)
from tests.support.tiny_models import VOCABULARY_SIZE

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

TinyModel = Callable[..., Path]


@pytest.fixture(scope="module")
def service(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    running = start(tiny_model("qwen2"), tmp_path_factory.mktemp("rollout"), program="tests.support.slow_rollout")
    yield running
    running.close()


@pytest.fixture
async def channel(service: Service) -> AsyncIterator[Any]:
    opened = open_channel(service.target, None)
    yield opened
    await opened.close()


@pytest.fixture
def client(channel: Any) -> AsyncRolloutClient:
    return AsyncRolloutClient(channel, peer="rollout-0")


@pytest.fixture
def control(channel: Any) -> RolloutControlClient:
    return RolloutControlClient(channel, peer="rollout-0")


@pytest.fixture
async def publisher(client: AsyncRolloutClient, control: RolloutControlClient) -> Publisher:
    return Publisher(control, version=(await client.get_info(timeout=5)).policy_version)


class TestSampling:
    async def test_logprobs_are_those_of_the_sampled_tokens(
        self, client: AsyncRolloutClient, control: RolloutControlClient
    ) -> None:
        message = request(samples=4, max_tokens=20)
        samples = await client.complete(message, timeout=60)
        assert len({tuple(s.token_ids) for s in samples}) == 4
        for sample in samples:
            prompt = list(message.prompt_token_ids)
            probe = await control.probe([*prompt, *sample.token_ids.tolist()], timeout=20)
            assert np.abs(probe[len(prompt) :] - sample.logprobs).mean() < 0.02
            assert sample.logprobs.max() <= 0

    async def test_temperature_and_top_k_are_in_the_logprobs(self, client: AsyncRolloutClient) -> None:
        (greedy,) = await client.complete(request(params={"temperature": 0.0}), timeout=60)
        (certain,) = await client.complete(request(params={"top_k": 1}), timeout=60)
        assert certain.token_ids.tolist() == greedy.token_ids.tolist()
        assert (certain.logprobs == 0).all()
        hot, cold = [
            (await client.complete(request(samples=16, params={"temperature": t}), timeout=60)) for t in (1.0, 0.25)
        ]
        assert np.mean([s.logprobs.mean() for s in cold]) > np.mean([s.logprobs.mean() for s in hot]) + 1

    @pytest.mark.parametrize(("every", "least"), [(0, 9), (10, 8), (9000, 8)], ids=["at once", "soon", "late"])
    async def test_flushed_tokens_are_the_packed_ones(self, client: AsyncRolloutClient, every: int, least: int) -> None:
        packed = await client.complete(request(samples=4, max_tokens=40, seed=5), timeout=60)
        message = request(samples=4, max_tokens=40, seed=5, flush=every * 1_000_000)
        async with aclosing(client.generate(message, timeout=60)) as chunks:
            parts = [c async for c in chunks]
        assert len(parts) >= least  # of each its first tokens at once, and the rest
        for sample in packed:
            mine = [c for c in parts if c.sample_index == sample.sample_index]
            assert b"".join(c.token_ids for c in mine) == sample.token_ids.tobytes()
            logprobs = np.frombuffer(b"".join(c.logprobs for c in mine), "<f4")
            assert np.abs(logprobs - sample.logprobs).max() < 0.02

    async def test_the_same_seeds_give_the_same_samples_in_any_order_of_arrival(
        self, client: AsyncRolloutClient
    ) -> None:
        async def wave(order: list[int]) -> list[Any]:
            calls = {
                i: client.complete(request(i, samples=8, seed=100 * i, name=f"wave-{i}"), timeout=60) for i in order
            }
            answers = dict(zip(calls, await asyncio.gather(*calls.values()), strict=True))
            return [plain(answers[i]) for i in sorted(order)]

        first = await wave([0, 1, 2, 3])
        assert await wave([3, 1, 0, 2]) == first
        assert await wave([0, 1, 2, 3]) == first


class TestLeaving:
    async def test_losing_the_client_aborts_the_engines_requests(
        self, service: Service, client: AsyncRolloutClient
    ) -> None:
        channel = open_channel(service.target, None)
        lost = AsyncRolloutClient(channel, peer="lost")
        answer = asyncio.create_task(lost.complete(request(samples=8, max_tokens=480), timeout=60))
        await until_running(client, True)
        await channel.close()
        await until_running(client, False, seconds=3)
        answer.cancel()


class TestWeights:
    async def test_a_manifest_that_is_none_is_refused(self, control: RolloutControlClient) -> None:
        with pytest.raises(InvalidInput):
            await control.open(
                epoch=1,
                backend="shm",
                manifest=b"{}",
                offers=[b"x"],
                receiver_count=1,
                first_receiver_index=0,
                timeout=10,
            )

    async def test_a_published_version_is_what_a_fresh_engine_would_serve(
        self, client: AsyncRolloutClient, control: RolloutControlClient, publisher: Publisher, tiny_model: TinyModel
    ) -> None:
        import torch

        ids = np.random.default_rng(9).integers(3, VOCABULARY_SIZE, 24).tolist()
        before = await control.probe(ids, timeout=20)
        samples_before = plain(await client.complete(request(samples=4), timeout=60))

        model = await publisher.open(tiny_model("qwen2", seed=1))
        running = asyncio.create_task(client.complete(request(samples=24, max_tokens=480, flush=0), timeout=60))
        await until_sampled(client, 24)
        await publisher.begin(control_pb.PAUSE_MODE_ABORT)
        aborted = await running
        assert {s.finish_reason for s in aborted} >= {pb.FINISH_REASON_ABORTED}
        assert {span.policy_version for s in aborted for span in s.version_spans} <= {0}

        late = asyncio.create_task(client.complete(request(samples=4, min_policy_version=1), timeout=60))
        await publisher.send()
        after = await control.probe(ids, timeout=20)  # before the commit
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].float()
        expected = torch.log_softmax(logits[:-1], -1)[torch.arange(23), torch.tensor(ids[1:])].numpy()
        assert np.abs(after[1:] - expected).mean() < 0.03 < np.abs(before[1:] - expected).mean()
        assert not late.done()
        await publisher.commit()
        samples_after = await late
        assert {span.policy_version for s in samples_after for span in s.version_spans} == {1}
        assert plain(samples_after) != samples_before

    async def test_probe_is_the_same_with_a_warm_prefix_cache(
        self, client: AsyncRolloutClient, control: RolloutControlClient
    ) -> None:
        ids = np.random.default_rng(3).integers(3, VOCABULARY_SIZE, 100).tolist()
        cold = await control.probe(ids, timeout=20)
        message = request(max_tokens=2)
        message.prompt_token_ids[:] = ids
        await client.complete(message, timeout=60)
        warm = await control.probe(ids, timeout=20)
        assert math.isnan(warm[0])
        assert len(warm) == 100
        assert warm[1:].tolist() == cold[1:].tolist()


class TestInFlight:
    """Updates that do not wait for running samples (PAUSE_MODE_KEEP), with and without a hold."""

    @pytest.mark.slow
    @pytest.mark.parametrize("streaming", [False, True])
    async def test_samples_go_on_and_every_token_has_the_version_that_sampled_it(
        self, client: AsyncRolloutClient, publisher: Publisher, tiny_model: TinyModel, streaming: bool
    ) -> None:
        def message() -> pb.GenerateRequest:
            return request(samples=24, max_tokens=480, seed=3, flush=0 if streaming else None)

        alone = await client.complete(message(), timeout=60)
        old = publisher.version
        await publisher.open(tiny_model("qwen2", seed=2 + streaming))
        running = asyncio.create_task(client.complete(message(), timeout=60))
        await until_sampled(client, 500)
        await publisher.begin()
        await publisher.send()
        before = await sampled_count(client)
        await asyncio.sleep(0.1)
        assert await sampled_count(client) == before  # nothing is sampled while weights change
        await publisher.commit()
        answers = await running
        assert {s.finish_reason for s in answers} <= {pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_STOP}
        crossed = 0
        for sample, reference in zip(answers, alone, strict=True):
            versions = [span.policy_version for span in sample.version_spans]
            assert versions in ([old], [old, old + 1])
            count = sample.version_spans[0].token_count
            assert sample.token_ids[:count].tolist() == reference.token_ids[:count].tolist()
            assert sample.logprobs[:count].tolist() == reference.logprobs[:count].tolist()
            if len(versions) == 2 and count < len(reference.logprobs):  # the very next token is of other weights
                assert sample.logprobs[count] != reference.logprobs[count]
                crossed += 1
        assert crossed >= 5

    async def test_abort_reaches_a_worker_that_waits_for_a_sender(
        self, control: RolloutControlClient, publisher: Publisher, tiny_model: TinyModel
    ) -> None:
        await publisher.open(tiny_model("qwen2"))
        await publisher.begin()
        waiting = control.receive(epoch=publisher.epoch, policy_version=publisher.version, timeout=40)
        receive = asyncio.create_task(waiting)
        await asyncio.sleep(0.2)
        began = time.monotonic()
        assert await publisher.abort() == control_pb.WEIGHT_STATE_CLEAN
        assert time.monotonic() - began < 20
        with pytest.raises(StaleEpoch):
            await receive

    @pytest.mark.slow
    async def test_held_tokens_wait_for_the_release(
        self, client: AsyncRolloutClient, control: RolloutControlClient, publisher: Publisher, tiny_model: TinyModel
    ) -> None:
        old = publisher.version
        running, fresh, chunks = await self._held(client, publisher, tiny_model("qwen2", seed=4))
        assert len(await control.probe([5, 6, 7], timeout=10)) == 3  # while others are sampled
        with pytest.raises(WrongState, match="not released"):
            await publisher.begin()
        assert not fresh.done()
        assert {c.policy_version for c in chunks} == {old}
        await publisher.release()
        (sample,) = await fresh
        assert [span.policy_version for span in sample.version_spans] == [old + 1]
        await running
        assert {c.policy_version for c in chunks} == {old, old + 1}
        assert pb.FINISH_REASON_ABORTED not in {c.finish_reason for c in chunks}

    async def test_no_held_token_leaves_a_version_that_is_given_up(
        self, client: AsyncRolloutClient, publisher: Publisher, tiny_model: TinyModel
    ) -> None:
        old = publisher.version
        running, fresh, chunks = await self._held(client, publisher, tiny_model("qwen2", seed=5))
        assert await publisher.abort() == control_pb.WEIGHT_STATE_DIRTY
        with pytest.raises(Unavailable, match="given up"):
            await fresh
        await running
        assert {c.policy_version for c in chunks} == {old}
        finishes = [c.finish_reason for c in chunks if c.finish_reason]
        assert len(finishes) == 6
        assert pb.FINISH_REASON_ABORTED in finishes
        assert (await client.get_info(timeout=5)).policy_version == old
        with pytest.raises(Unavailable, match="serves nothing"):
            await client.complete(request(), timeout=10)
        await publisher.open(tiny_model("qwen2", seed=6))
        await publisher.begin()
        await publisher.send()
        await publisher.commit()
        (sample,) = await client.complete(request(), timeout=60)
        assert sample.version_spans[0].policy_version == publisher.version

    async def _held(self, client: AsyncRolloutClient, publisher: Publisher, folder: Path) -> tuple[Any, Any, list[Any]]:
        """Commit with hold while a call streams; return it, a call after the commit, and the chunks so far."""
        chunks: list[pb.SampleChunk] = []

        async def stream() -> None:
            message = request(samples=6, max_tokens=480, flush=0, params={"temperature": 1.5})
            async with aclosing(client.generate(message, timeout=60)) as parts:
                async for part in parts:
                    chunks.append(part)

        await publisher.open(folder)
        running = asyncio.create_task(stream())
        await until_sampled(client, 100)
        await publisher.begin()
        await publisher.send()
        await publisher.commit(hold=True)
        fresh = asyncio.create_task(client.complete(request(max_tokens=4), timeout=60))
        await until_sampled(client, 100)
        return running, fresh, chunks


class TestProcess:
    async def test_the_public_port_samples_and_controls_nothing(self, service: Service) -> None:
        channel = open_channel(service.public, None)
        (sample,) = await AsyncRolloutClient(channel, peer="public").complete(request(max_tokens=3), timeout=60)
        assert 1 <= len(sample.token_ids) <= 3
        with pytest.raises(FourfoldError) as caught:
            await RolloutControlClient(channel, peer="public").describe(timeout=5)
        assert caught.value.reason == "UNIMPLEMENTED"
        await channel.close()

    def test_idle_service_uses_no_processor(self, service: Service) -> None:
        processes = [psutil.Process(service.process.pid), service.engine]
        before = [sum(p.cpu_times()[:2]) for p in processes]
        time.sleep(2)
        used = sum(sum(p.cpu_times()[:2]) for p in processes) - sum(before)
        assert used < 0.3

    def test_nothing_listens_beyond_loopback(self, service: Service) -> None:
        listening = [
            connection.laddr.ip
            for process in (psutil.Process(service.process.pid), service.engine)
            for connection in process.net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert listening
        assert {ip.removeprefix("::ffff:") for ip in listening} <= {"127.0.0.1", "::1"}

    async def test_the_death_of_the_engine_is_told_to_callers_and_ends_the_service(
        self, service: Service, client: AsyncRolloutClient
    ) -> None:
        # The last test of the module: it leaves nothing behind.
        answer = asyncio.create_task(client.complete(request(samples=8, max_tokens=480), timeout=60))
        await until_running(client, True)
        os.kill(service.engine.pid, signal.SIGKILL)
        with pytest.raises(Unavailable, match="killed by SIGKILL"):
            await answer
        assert await asyncio.to_thread(service.process.wait, 10) == 1
        last = service.errors.read_text().splitlines()[-1]
        assert "rollout-0: the engine's process" in last
        assert "killed by SIGKILL" in last


@pytest.mark.slow
async def test_a_fresh_engine_repeats_the_samples_and_dies_with_its_service(
    tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> None:
    temporary = tmp_path_factory.mktemp("t")  # short: sockets are in it

    async def sample(service: Service) -> list[Any]:
        channel = open_channel(service.target, None)
        client = AsyncRolloutClient(channel, peer="rollout-0")
        calls = [client.complete(request(i, samples=8, seed=i, name=f"fresh-{i}"), timeout=60) for i in range(4)]
        answers = await asyncio.gather(*calls)
        await channel.close()
        return [plain(a) for a in answers]

    results = []
    for ending in (signal.SIGKILL, signal.SIGTERM):
        folder = tmp_path_factory.mktemp(ending.name)
        service = start(tiny_model("qwen2"), folder, temporary, program="tests.support.slow_rollout")
        engine = service.engine
        (place,) = temporary.iterdir()  # what the killed one left is gone
        assert place.name.startswith("fourfold-engine-") and len([*place.glob("*-*-*-*-*")]) >= 3, "sockets are in it"
        results.append(await sample(service))
        service.process.send_signal(ending)
        assert gone(engine, 5)
        assert service.process.wait(5) == (0 if ending == signal.SIGTERM else -signal.SIGKILL)
        service.close()
    assert results[0] == results[1]
    assert [*temporary.iterdir()] == []
