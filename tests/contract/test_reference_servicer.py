"""Tests ReferenceService on a loopback server with a tiny real model against a plain float32 computation."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the reference service needs its extra: fourfold-reward[reference]")
transformers = pytest.importorskip("transformers", reason="the reference service needs fourfold-reward[reference]")

from fourfold.arrays import EMPTY_FLOATS, Float32Array  # noqa: E402
from fourfold.contract import CONTRACT_VERSION  # noqa: E402
from fourfold.errors import (  # noqa: E402
    ConfigError,
    DeadlinePassed,
    Internal,
    InvalidInput,
    Overloaded,
    Unavailable,
    WrongState,
)
from fourfold.model.tokenizer import tokenizer_sha256  # noqa: E402
from fourfold.nn import logprobs  # noqa: E402
from fourfold.reference.client import AsyncReferenceClient  # noqa: E402
from fourfold.reference.top_tokens import top_tokens  # noqa: E402
from fourfold.reference.v1 import reference_service_pb2 as pb  # noqa: E402
from fourfold.reference.v1.reference_service_pb2_grpc import add_ReferenceServiceServicer_to_server  # noqa: E402
from fourfold.rpc.codec import pack_ints  # noqa: E402
from fourfold.sample import Sample  # noqa: E402
from fourfold.types.v1.experience_pb2 import Experience  # noqa: E402
from fourfold_reward.reference import servicer as module  # noqa: E402
from fourfold_reward.reference.model import ReferenceModel, SampleRows, Stopped  # noqa: E402
from fourfold_reward.reference.servicer import ReferenceServicer  # noqa: E402
from tests.conftest import Serve  # noqa: E402
from tests.support.tiny_models import VOCABULARY_SIZE, write_tiny_model  # noqa: E402

pytestmark = pytest.mark.integration  # torch and transformers take seconds to import

CONTEXT = 64
Connect = Callable[..., Awaitable[AsyncReferenceClient]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "llama", "llama", dtype="float32")


def load(folder: Path, *, dtype: str = "float32", tokens_per_batch: int = 128, **options: bool) -> ReferenceModel:
    return ReferenceModel.load(
        folder, dtype=dtype, device="cpu", tokens_per_batch=tokens_per_batch, max_context_tokens=CONTEXT, **options
    )


@pytest.fixture
def failures() -> list[str]:
    """What the service ended with."""
    return []


@pytest.fixture
async def connect(serve: Serve, folder: Path, failures: list[str]) -> AsyncIterator[Connect]:
    servicers: list[ReferenceServicer] = []

    async def start(*, ready: bool = True, model: Any = None) -> AsyncReferenceClient:
        servicer = ReferenceServicer(name="tiny", max_context_tokens=CONTEXT, on_failure=failures.append)
        servicers.append(servicer)
        if ready:
            servicer.set_ready(model or load(folder), tokenizer_sha256=tokenizer_sha256(folder))
        channel = await serve(
            (pb.DESCRIPTOR.services_by_name["ReferenceService"], add_ReferenceServiceServicer_to_server, servicer)
        )
        return AsyncReferenceClient(channel, peer="reference-0")

    yield start
    for servicer in servicers:
        await servicer.close()


def experience(sample_id: str, ids: list[int], temperature: float = 1.0) -> Experience:
    return Experience(sample_id=sample_id, token_ids=pack_ints(ids), temperature=temperature)


def sample(sample_id: str, ids: list[int], temperature: float) -> Sample:
    tokens = np.array(ids, np.int32)
    mask = np.arange(len(ids)) > 0
    return Sample(
        sample_id=sample_id,
        group_id="g",
        token_ids=tokens,
        behavior_logprobs=EMPTY_FLOATS,
        action_mask=mask,
        loss_mask=mask,
        version_spans=(),
        temperature=temperature,
    )


async def ask(client: AsyncReferenceClient, *experiences: Experience, timeout: float = 30) -> list[Float32Array]:
    answer = await client._stub.ComputeLogprobs(pb.ComputeLogprobsRequest(experiences=experiences), timeout=timeout)
    return [np.frombuffer(row, "<f4") for row in answer.logprobs]


def naive(folder: Path, ids: list[int], temperature: float) -> Float32Array:
    """Compute the definition: one unpadded sample, all logits in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].float() / temperature
    rows = torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    result: Float32Array = np.concatenate([[np.nan], rows.numpy()]).astype(np.float32)
    return result


def random_ids(seed: int, count: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, VOCABULARY_SIZE, count)]


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_model_equals_the_definition(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_model(tmp_path, family, dtype="float32")
    monkeypatch.setattr(logprobs, "_CHUNK_ELEMENTS", 7 * VOCABULARY_SIZE)  # chunks of 7 rows
    samples = [random_ids(i, n) for i, n in enumerate([5, 64, 2, 33, 33, 17, 50])]
    temperatures = [1.0, 0.7, 2.0, 1.0, 0.1, 1.5, 1.0]
    found = load(folder).logprobs([np.array(s, np.int32) for s in samples], temperatures)
    for ids, temperature, row in zip(samples, temperatures, found, strict=True):
        assert row.logprobs.dtype == np.float32
        np.testing.assert_allclose(row.logprobs, naive(folder, ids, temperature), atol=2e-4, rtol=1e-4)


def test_model_is_frozen_and_deterministic(folder: Path) -> None:
    model = load(folder, dtype="bfloat16")
    assert not any(p.requires_grad for p in model._model.parameters())
    ids = [np.array(random_ids(1, 20), np.int32)]
    first, second = (model.logprobs(ids, [1.0])[0].logprobs for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_float32_logits_of_a_bfloat16_model(folder: Path) -> None:
    ids = [np.array(random_ids(1, 40), np.int32)]
    rounded, exact = (
        load(folder, dtype="bfloat16", float32_logits=asked).logprobs(ids, [1.0])[0].logprobs[1:]
        for asked in (False, True)
    )
    assert 1e-4 < np.abs(rounded - exact).max() < 0.1


async def test_info(connect: Connect, folder: Path) -> None:
    info = await (await connect()).get_info(timeout=5)
    assert (info.model, info.max_context_tokens, info.vocabulary_size) == ("tiny", CONTEXT, VOCABULARY_SIZE)
    assert info.tokenizer_sha256 == tokenizer_sha256(folder)
    assert info.contract_version == CONTRACT_VERSION


async def test_rows_come_back_in_order(connect: Connect, folder: Path) -> None:
    client = await connect()
    samples = [(random_ids(i, 3 + 7 * i % 60), 1.0 + i / 20) for i in range(12)]
    rows = await ask(client, *(experience(f"s{i}", ids, t) for i, (ids, t) in enumerate(samples)))
    assert len(rows) == len(samples)
    for (ids, temperature), row in zip(samples, rows, strict=True):
        np.testing.assert_allclose(row, naive(folder, ids, temperature), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (experience("bad", [1, VOCABULARY_SIZE]), "sample bad: token id 512 is outside"),
        (experience("bad", [1] * 65), "sample bad: 65 tokens; it must have 2 to 64"),
        (experience("bad", [1, 2], 0.0), "sample bad: temperature is 0.0"),
        (experience("bad", [1, 2], 2.5), "sample bad: temperature is 2.5"),
        (experience("bad", [1, 2], float("nan")), "sample bad: temperature is nan"),
        (experience("b d", [1, 2]), "sample_id is 'b d'"),
    ],
    ids=["id", "long", "no temperature", "hot", "nan", "name"],
)
async def test_malformed_sample_is_refused_before_anything_is_computed(
    connect: Connect, bad: Experience, text: str
) -> None:
    slow = Slow()
    client = await connect(model=slow)
    with pytest.raises(grpc.aio.AioRpcError, match=text) as refused:
        await ask(client, experience("good", [1, 2]), bad)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert slow.calls == 0


@pytest.mark.parametrize(
    ("samples", "text"),
    [([], "no experiences"), ([experience(f"s{i}", [1] * 64) for i in range(32_000)], "at most 8388608 fit")],
    ids=["empty", "oversize"],
)
async def test_malformed_request_is_refused(connect: Connect, samples: list[Experience], text: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=text) as refused:
        await ask(await connect(model=Slow()), *samples)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_loading_service_is_unavailable(connect: Connect) -> None:
    client = await connect(ready=False)
    with pytest.raises((Unavailable, DeadlinePassed)):  # the channel retries UNAVAILABLE
        await client.get_info(timeout=2)


class Slow:
    """A fake model: `logprobs` blocks until `go` is set or its `stopped` returns True."""

    vocabulary_size = ids_below = VOCABULARY_SIZE
    tokens_per_batch = 4

    def __init__(self) -> None:
        self.calls = 0
        self.batches: list[int] = []
        """Tokens of each batch."""
        self.began = threading.Event()
        self.running = 0
        self.most_running = 0
        self.stopped = 0
        self.go = threading.Event()

    def logprobs(
        self, token_ids: list[Any], temperatures: list[float], *, top_k: int, stopped: Callable[[], bool]
    ) -> list[Any]:
        self.calls += 1
        self.batches.append(sum(map(len, token_ids)))
        self.began.set()
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            while not self.go.wait(0.01):
                if stopped():
                    self.stopped += 1
                    raise Stopped
            return [SampleRows.of(len(ids), top_k) for ids in token_ids]
        finally:
            self.running -= 1


async def test_the_likeliest_tokens_are_those_of_the_definition(connect: Connect, folder: Path) -> None:
    client = await connect()
    asked = [sample(f"s{i}", random_ids(i, n), temperature) for i, (n, temperature) in enumerate([(5, 1.0), (40, 0.7)])]
    rows, others = await asyncio.gather(
        top_tokens(client, asked, top_k=4, vocabulary_size=VOCABULARY_SIZE, timeout=30),
        top_tokens(client, asked[:1], top_k=9, vocabulary_size=VOCABULARY_SIZE, timeout=30),  # perhaps in one batch
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for one, top in zip(asked, rows, strict=True):
        logits = model(torch.from_numpy(one.token_ids)[None].long()).logits[0, :-1] / one.temperature
        wanted, order = torch.log_softmax(logits.detach(), -1).sort(descending=True)
        assert np.isnan(top.logprobs[0]).all() and not top.ids[0].any()
        np.testing.assert_allclose(top.logprobs[1:], wanted[:, :4], atol=2e-4)
        np.testing.assert_array_equal(top.ids[1:], order[:, :4])
    assert others[0].ids.shape == (5, 9) and np.array_equal(others[0].ids[:, :4], rows[0].ids)


async def test_the_ids_of_likely_tokens_are_those_of_the_smaller_vocabulary(folder: Path) -> None:
    model = load(folder)
    model.ids_below = 20
    (row,) = model.logprobs([np.array(random_ids(0, 30), np.int32)], [1.0], top_k=20)
    assert (np.sort(row.top_ids[1:], 1) == np.arange(20)).all()
    assert (np.exp(row.top_logprobs[1:]).sum(1) < 0.9).all(), "of the probability of all tokens"


@pytest.mark.parametrize(
    ("top_k", "count", "rule"),
    [(-1, 1, "top_k is -1"), (65, 1, "top_k is 65"), (64, 300, "bytes; at most 8388608 fit: split the request")],
)
async def test_a_number_of_likely_tokens_that_cannot_be_sent_is_refused(
    connect: Connect, top_k: int, count: int, rule: str
) -> None:
    client = await connect()
    request = pb.ComputeLogprobsRequest(
        experiences=[experience(f"s{i}", random_ids(0, CONTEXT)) for i in range(count)], top_k=top_k
    )
    with pytest.raises(InvalidInput, match=rule):
        await client._call(client._stub.ComputeLogprobs, request, 30)


async def test_info_is_answered_while_one_call_at_a_time_computes(connect: Connect) -> None:
    slow = Slow()
    client = await connect(model=slow)
    calls = [asyncio.create_task(ask(client, experience("s0", [1, 2])))]
    assert await asyncio.to_thread(slow.began.wait, 10)
    calls += [asyncio.create_task(ask(client, experience(f"s{i}", [1, 2]))) for i in (1, 2)]
    await asyncio.sleep(0.2)
    await client.get_info(timeout=10)  # no batch ends before `go`
    slow.go.set()
    assert len(await asyncio.gather(*calls)) == 3
    assert (slow.batches, slow.most_running) == ([2, 4], 1), "two calls arrived while the first batch was computed"


async def test_waiting_calls_form_a_batch_and_get_their_own_rows(connect: Connect, folder: Path) -> None:
    slow = Slow()
    client = await connect(model=slow)

    def call(i: int) -> asyncio.Task[Any]:
        return asyncio.create_task(ask(client, *(experience(f"s{i}-{j}", [1, 2]) for j in range(4))))

    calls = [call(0)]
    assert await asyncio.to_thread(slow.began.wait, 10)
    calls += [call(i) for i in range(1, 12)]
    await asyncio.sleep(1.0)
    slow.go.set()
    assert [len(rows) for rows in await asyncio.gather(*calls)] == [4] * 12
    assert slow.batches == [8, 32, 32, 24], "a batch has whole calls, at most 8 passes of 4 tokens"

    client = await connect()
    samples = [[random_ids(10 * i + j, 9 + i + j) for j in range(3)] for i in range(8)]
    asked = [ask(client, *(experience(f"s{i}-{j}", ids) for j, ids in enumerate(s))) for i, s in enumerate(samples)]
    for ids, rows in zip(samples, await asyncio.gather(*asked), strict=True):
        for one, row in zip(ids, rows, strict=True):
            np.testing.assert_allclose(row, naive(folder, one, 1.0), atol=2e-4, rtol=1e-4)


async def test_cancelled_call_does_not_stop_the_other_calls_of_its_batch(connect: Connect) -> None:
    slow = Slow()
    client = await connect(model=slow)
    first = asyncio.create_task(ask(client, experience("first", [1, 2])))
    while not slow.running:
        await asyncio.sleep(0.01)
    leaves, stays = (asyncio.create_task(ask(client, experience(f"s{i}", [1, 2]))) for i in range(2))
    await asyncio.sleep(0.2)
    first.cancel()  # starts the second batch, which has two calls
    await asyncio.sleep(0.2)
    leaves.cancel()
    await asyncio.sleep(0.2)
    slow.go.set()
    assert len(await stays) == 1
    assert (slow.batches, slow.stopped) == ([2, 4], 1)


def failing(error: Exception) -> Callable[..., list[Any]]:
    def fail(*_args: Any, **_kwargs: Any) -> list[Any]:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (RuntimeError("a bug"), Internal, "internal error"),
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            WrongState,
            "no memory.* reference.tokens_per_batch = 4",
        ),
    ],
)
async def test_failed_batch_is_an_error_of_its_calls_only(
    connect: Connect, failures: list[str], error: Exception, kind: type[Exception], text: str
) -> None:
    slow = Slow()
    broken = slow.logprobs
    client = await connect(model=slow)
    slow.logprobs = failing(error)  # type: ignore[method-assign]
    with pytest.raises(kind, match=text):
        await client_call(client)
    slow.logprobs = broken  # type: ignore[method-assign]
    slow.go.set()
    assert len(await ask(client, experience("b", [1, 2]))) == 1
    assert not failures


async def test_a_lost_gpu_ends_the_service(connect: Connect, failures: list[str]) -> None:
    slow = Slow()
    client = await connect(model=slow)
    slow.logprobs = failing(RuntimeError("CUDA error: device-side assert triggered"))  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(Unavailable, match="stopping; try another one"):
            await client_call(client)
    assert failures == ["the reference model failed: RuntimeError: CUDA error: device-side assert triggered"]


async def test_too_many_calls_are_refused_with_a_delay(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CALLS", 2)
    slow = Slow()
    client = await connect(model=slow)
    calls = [asyncio.create_task(ask(client, experience(f"s{i}", [1, 2]))) for i in range(2)]
    await asyncio.sleep(0.2)
    with pytest.raises(Overloaded) as refused:
        await asyncio.wait_for(client_call(client), 5)
    assert refused.value.retry_after and refused.value.retry_after > 0
    slow.go.set()
    await asyncio.gather(*calls)


async def client_call(client: AsyncReferenceClient) -> None:
    from fourfold.rpc.status import from_rpc

    try:
        await ask(client, experience("x", [1, 2]))
    except grpc.aio.AioRpcError as error:
        raise from_rpc(error, peer="reference-0") from None


async def test_call_whose_client_went_away_stops(connect: Connect) -> None:
    slow = Slow()
    client = await connect(model=slow)
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await ask(client, experience("a", [1, 2]), timeout=1.5)
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    cancelled = asyncio.create_task(ask(client, experience("b", [1, 2])))
    async with asyncio.timeout(10):
        while not (slow.stopped and slow.running):
            await asyncio.sleep(0.01)
    cancelled.cancel()
    slow_end = time.monotonic() + 15
    while slow.stopped < 2 and time.monotonic() < slow_end:
        await asyncio.sleep(0.02)
    assert slow.stopped == 2
    slow.go.set()
    assert len(await ask(client, experience("c", [1, 2]))) == 1


def test_model_that_cannot_be_served_is_a_config_error(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reference.tokens_per_batch = 32 cannot hold"):
        load(folder, tokens_per_batch=32)
    with pytest.raises(ConfigError, match="cannot be read as a causal language model"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="more than the 512 positions"):
        ReferenceModel.load(folder, dtype="float32", device="cpu", tokens_per_batch=4096, max_context_tokens=1024)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="torch sees no GPU"):
            ReferenceModel.load(folder, dtype="float32", device="cuda", tokens_per_batch=64, max_context_tokens=CONTEXT)
