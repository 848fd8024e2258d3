"""The rollout service as users start it: a process with a real vLLM CPU engine and a tiny model, called over gRPC."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import pytest

from fourfold.channel import open_channel
from fourfold.errors import FourfoldError, InvalidInput, Unavailable
from fourfold.process import PARENT_PID_VARIABLE
from fourfold.rollout.client import Completion, RolloutClient, RolloutControlClient
from fourfold.rollout.v1 import rollout_control_service_pb2 as control_pb
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.tokenizer import tokenizer_sha256
from tests.tiny_models import VOCABULARY_SIZE

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

CONTEXT: Final = 512
SAMPLES: Final = 32
START_SECONDS: Final = 100.0
_names = itertools.count()
TinyModel = Callable[..., Path]

RECIPE: Final = """
name = "tiny"
steps = 1
model = {{ source = "{model}", max_context_tokens = {context} }}
data = {{ train = {{ reasoning_gym = "products", size = 8 }} }}
batch = {{ prompts_per_step = 1, group_size = 2 }}
sampling = {{ max_new_tokens = 8 }}
rollout = {{ max_concurrent_samples = {samples}, public_listen = "{public}" }}
weights = {{ timeout_seconds = 20.0 }}
"""


@dataclass(slots=True)
class Service:
    """A service process."""

    process: subprocess.Popen[str]
    target: str
    public: str
    errors: Path
    model: Path

    def close(self) -> None:
        """kill -9, and let go of its pipe."""
        self.process.kill()
        self.process.wait(10)
        if self.process.stdout is not None:
            self.process.stdout.close()

    @property
    def engine(self) -> psutil.Process:
        """The engine's process."""
        (child,) = psutil.Process(self.process.pid).children()
        return child


def start(model: Path, folder: Path, temporary: Path | None = None) -> Service:
    """Start a service and wait for its READY line; its temporary files go to `temporary`."""
    recipe, errors = folder / "tiny.toml", folder / "stderr.log"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        public = f"127.0.0.1:{probe.getsockname()[1]}"
    recipe.write_text(RECIPE.format(model=model, context=CONTEXT, samples=SAMPLES, public=public))
    env = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "OMP_"))}
    env |= {PARENT_PID_VARIABLE: str(os.getpid()), "PYTHONPATH": os.pathsep.join(sys.path)}
    env |= {"TMPDIR": str(temporary)} if temporary else {}
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "fourfold", "serve", "rollout", str(recipe)],
            stdout=subprocess.PIPE, stderr=stderr, text=True, env=env, cwd=folder,
        )  # fmt: skip
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], START_SECONDS)
    line = process.stdout.readline() if readable else ""
    if not line.startswith("READY "):
        process.kill()
        raise AssertionError(f"the service is not ready: {line!r}\n{errors.read_text()[-4000:]}")
    return Service(process, line.split()[1], public, errors, model)


def gone(process: psutil.Process, seconds: float) -> bool:
    """Whether a process has ended, or does so in time."""
    end = time.monotonic() + seconds
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture(scope="module")
def service(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    running = start(tiny_model("qwen2"), tmp_path_factory.mktemp("rollout"))
    yield running
    running.close()


@pytest.fixture
async def channel(service: Service) -> AsyncIterator[Any]:
    opened = open_channel(service.target, None)
    yield opened
    await opened.close()


@pytest.fixture
def client(channel: Any) -> RolloutClient:
    return RolloutClient(channel, peer="rollout-0")


@pytest.fixture
def control(channel: Any) -> RolloutControlClient:
    return RolloutControlClient(channel, peer="rollout-0")


def request(
    prompt: int = 0, *, samples: int = 1, max_tokens: int = 8, seed: int = 1, name: str = "", **fields: Any
) -> pb.GenerateRequest:
    """Return a request with prompt number `prompt`."""
    params = {"max_tokens": max_tokens, "seed": seed, **fields.pop("params", {})}
    return pb.GenerateRequest(
        request_id=name or f"call-{next(_names)}",
        prompt_token_ids=np.random.default_rng(prompt).integers(3, VOCABULARY_SIZE, 12).tolist(),
        sample_count=samples,
        sampling_params=pb.SamplingParams(**params),
        **fields,
    )


async def running_count(client: RolloutClient) -> int:
    async with aclosing(client.watch_load(period=0.05, timeout=5)) as reports:
        return (await anext(reports)).running_sample_count


async def until_running(client: RolloutClient, some: bool, seconds: float = 10) -> None:
    """Wait until samples are in the engine, or none is."""
    async with asyncio.timeout(seconds):
        while (await running_count(client) > 0) != some:
            await asyncio.sleep(0.01)


def plain(samples: list[Completion]) -> list[tuple[list[int], list[float]]]:
    return [(s.token_ids.tolist(), s.logprobs.tolist()) for s in samples]


class TestSampling:
    async def test_info_is_that_of_the_folder(self, service: Service, client: RolloutClient) -> None:
        info = await client.get_info(timeout=5)
        assert info.tokenizer_sha256 == tokenizer_sha256(service.model)
        assert (info.max_context_tokens, info.vocabulary_size) == (CONTEXT, VOCABULARY_SIZE)
        assert info.max_concurrent_samples == SAMPLES

    async def test_logprobs_are_those_of_the_sampled_tokens(
        self, client: RolloutClient, control: RolloutControlClient
    ) -> None:
        message = request(samples=4, max_tokens=20)
        samples = await client.complete(message, timeout=60)
        assert len({tuple(s.token_ids) for s in samples}) == 4
        for sample in samples:
            prompt = list(message.prompt_token_ids)
            probe = await control.probe([*prompt, *sample.token_ids.tolist()], timeout=20)
            assert np.abs(probe[len(prompt) :] - sample.logprobs).mean() < 0.02
            assert sample.logprobs.max() <= 0

    async def test_temperature_and_top_k_are_in_the_logprobs(self, client: RolloutClient) -> None:
        (greedy,) = await client.complete(request(params={"temperature": 0.0}), timeout=60)
        (certain,) = await client.complete(request(params={"top_k": 1}), timeout=60)
        assert certain.token_ids.tolist() == greedy.token_ids.tolist()
        assert (certain.logprobs == 0).all()
        hot, cold = [
            (await client.complete(request(samples=16, params={"temperature": t}), timeout=60)) for t in (1.0, 0.25)
        ]
        assert np.mean([s.logprobs.mean() for s in cold]) > np.mean([s.logprobs.mean() for s in hot]) + 1

    async def test_a_stop_token_ends_a_sample_and_belongs_to_it(self, client: RolloutClient) -> None:
        (greedy,) = await client.complete(request(params={"temperature": 0.0}), timeout=60)
        stop = int(greedy.token_ids[3])
        first = greedy.token_ids.tolist().index(stop)
        (sample,) = await client.complete(request(params={"temperature": 0.0, "stop_token_ids": [stop]}), timeout=60)
        assert sample.token_ids.tolist() == greedy.token_ids.tolist()[: first + 1]
        assert sample.finish_reason == pb.FINISH_REASON_STOP

    async def test_a_sample_ends_where_the_context_does(self, client: RolloutClient) -> None:
        message = request(samples=8, max_tokens=100_000)
        message.prompt_token_ids[:] = [7] * (CONTEXT - 3)
        samples = await client.complete(message, timeout=60)
        assert {len(s.token_ids) for s in samples if s.finish_reason == pb.FINISH_REASON_LENGTH} == {3}

    async def test_flushed_tokens_are_those_of_the_packed_samples(self, client: RolloutClient) -> None:
        packed = await client.complete(request(samples=4, max_tokens=40, seed=5), timeout=60)
        message = request(samples=4, max_tokens=40, seed=5)
        message.flush_interval.FromNanoseconds(0)
        async with aclosing(client.generate(message, timeout=60)) as chunks:
            parts = [c async for c in chunks]
        assert len(parts) > 8
        for sample in packed:
            mine = [c for c in parts if c.sample_index == sample.sample_index]
            assert b"".join(c.token_ids for c in mine) == sample.token_ids.tobytes()
            logprobs = np.frombuffer(b"".join(c.logprobs for c in mine), "<f4")
            assert np.abs(logprobs - sample.logprobs).max() < 0.02

    async def test_the_same_seeds_give_the_same_samples_in_any_order_of_arrival(self, client: RolloutClient) -> None:
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
    async def test_cancelling_the_call_aborts_the_engines_requests(self, client: RolloutClient) -> None:
        answer = asyncio.create_task(client.complete(request(samples=SAMPLES, max_tokens=480), timeout=60))
        await until_running(client, True)
        answer.cancel()
        await until_running(client, False, seconds=3)
        (sample,) = await client.complete(request(max_tokens=2), timeout=60)  # and the engine goes on
        assert len(sample.token_ids) == 2

    async def test_losing_the_client_aborts_the_engines_requests(self, service: Service, client: RolloutClient) -> None:
        channel = open_channel(service.target, None)
        lost = RolloutClient(channel, peer="lost")
        answer = asyncio.create_task(lost.complete(request(samples=8, max_tokens=480), timeout=60))
        await until_running(client, True)
        await channel.close()
        await until_running(client, False, seconds=3)
        answer.cancel()


class TestWeights:
    """Without a trainer: joining an epoch of nobody, pausing, giving up. Real updates: test_weight_update.py."""

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
        self, client: RolloutClient, control: RolloutControlClient, tiny_model: TinyModel
    ) -> None:
        import torch
        import transformers

        from fourfold.weights.digest import combine_digest
        from fourfold.weights.sender import WeightSender
        from fourfold.weights.source import DenseSource

        model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model("qwen2", seed=1), dtype=torch.bfloat16)
        sender = WeightSender(DenseSource(model, dtype=torch.bfloat16), rank=0, rank_count=1)
        ids = np.random.default_rng(9).integers(3, VOCABULARY_SIZE, 24).tolist()
        before = await control.probe(ids, timeout=20)
        samples_before = plain(await client.complete(request(samples=4), timeout=60))

        offer = sender.make_offer(1, "shm", 1, timeout=10)
        opened, _ = await asyncio.gather(
            control.open(
                epoch=1, backend="shm", manifest=sender.manifest().to_bytes(), offers=[offer],
                receiver_count=1, first_receiver_index=0, timeout=10,
            ),
            asyncio.to_thread(sender.open, 1, timeout=10),
        )  # fmt: skip
        assert opened.reload_tensor_count + opened.direct_tensor_count > 0
        running = asyncio.create_task(client.complete(request(samples=8, max_tokens=480), timeout=60))
        await until_running(client, True)
        await control.begin(epoch=1, policy_version=1, pause_mode=control_pb.PAUSE_MODE_ABORT, timeout=10)
        aborted = await running
        assert {s.finish_reason for s in aborted} >= {pb.FINISH_REASON_ABORTED}
        assert {span.policy_version for s in aborted for span in s.version_spans} <= {0}

        late = asyncio.create_task(client.complete(request(samples=4, min_policy_version=1), timeout=60))
        sent, digest = await asyncio.gather(
            asyncio.to_thread(sender.send, 1, 1, timeout=10), control.receive(epoch=1, policy_version=1, timeout=10)
        )
        assert digest == combine_digest(sender.manifest(), [sent.partial_sums])
        after = await control.probe(ids, timeout=20)  # before the commit
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].float()
        expected = torch.log_softmax(logits[:-1], -1)[torch.arange(23), torch.tensor(ids[1:])].numpy()
        assert np.abs(after[1:] - expected).mean() < 0.03 < np.abs(before[1:] - expected).mean()
        assert not late.done()
        await control.commit(epoch=1, policy_version=1, timeout=10)
        samples_after = await late
        assert {span.policy_version for s in samples_after for span in s.version_spans} == {1}
        assert plain(samples_after) != samples_before

    async def test_probe_is_the_same_with_a_warm_prefix_cache(
        self, client: RolloutClient, control: RolloutControlClient
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


class TestProcess:
    async def test_the_public_port_samples_and_controls_nothing(self, service: Service) -> None:
        channel = open_channel(service.public, None)
        (sample,) = await RolloutClient(channel, peer="public").complete(request(max_tokens=3), timeout=60)
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
        self, service: Service, client: RolloutClient
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
        client = RolloutClient(channel, peer="rollout-0")
        calls = [client.complete(request(i, samples=8, seed=i, name=f"fresh-{i}"), timeout=60) for i in range(4)]
        answers = await asyncio.gather(*calls)
        await channel.close()
        return [plain(a) for a in answers]

    results = []
    for ending in (signal.SIGKILL, signal.SIGTERM):
        folder = tmp_path_factory.mktemp(ending.name)
        service = start(tiny_model("qwen2"), folder, temporary)
        engine = service.engine
        (place,) = temporary.glob("fourfold-engine-*")  # what the killed one left is gone
        os.utime(place, (0, 0))  # a minute later
        results.append(await sample(service))
        service.process.send_signal(ending)
        assert gone(engine, 5)
        assert service.process.wait(5) == (0 if ending == signal.SIGTERM else -signal.SIGKILL)
        service.close()
    assert results[0] == results[1]
    assert [*temporary.glob("fourfold-engine-*"), *temporary.glob("vllm_dist_*")] == []
