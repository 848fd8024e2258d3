"""Checks every token of samples that run while weights change against a plain forward pass of transformers.

The engine is a real vLLM on CPU with a tiny float32 model. The versions are unrelated random weights, so that a token
whose keys and values come from the wrong version has another log-probability.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from fourfold.rollout.client import AsyncRolloutClient, Completion, RolloutControlClient
from fourfold.rollout.v1 import rollout_control_service_pb2 as control_pb
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.rpc.channel import open_channel
from tests.support.rollout_process import Publisher, Service, plain, request, start, until_sampled
from tests.support.tiny_models import VOCABULARY_SIZE

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

TinyModel = Callable[..., Path]
KEEP, RECOMPUTE = control_pb.PAUSE_MODE_KEEP, control_pb.PAUSE_MODE_RECOMPUTE
PATIENCE: Final = 60.0
TOLERANCE: Final = 1e-3  # nats; unrelated weights differ by several
PROMPT: Final = 70  # tokens: two full blocks of 32, which other samples of the prompt share
FLUSH: Final = (None, 20_000_000)  # nanoseconds between messages; None: one message at the end
RUNNING: Final = 16  # samples that run at once; more wait in vLLM's queue


@pytest.fixture(scope="module")
def service(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    model = tiny_model("qwen2", dtype="float32")
    folder = tmp_path_factory.mktemp("in-flight")
    running = start(model, folder, program="tests.support.slow_rollout", dtype="float32", running=RUNNING)
    yield running
    running.close()


class Engine:
    """Clients of the service, and the weights of every version as a transformers model."""

    def __init__(self, client: AsyncRolloutClient, control: RolloutControlClient, version: int, folder: Path) -> None:
        import torch
        import transformers

        self.client, self.control = client, control
        self.publisher = Publisher(control, version=version, dtype="float32")
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.models: dict[int, Any] = {version: load(folder, dtype=torch.float32)}

    def start(
        self, prompt: list[int], *, samples: int, max_tokens: int, seed: int = 0, flush: int | None = None
    ) -> asyncio.Task[Any]:
        message = request(samples=samples, max_tokens=max_tokens, seed=seed, flush=flush)
        message.prompt_token_ids[:] = prompt
        return asyncio.create_task(self.client.complete(message, timeout=2 * PATIENCE))

    async def update(self, folder: Path, mode: Any) -> None:
        await self.publish(await self.publisher.open(folder), mode)

    async def publish(self, model: Any, mode: Any, *, hold: bool = False) -> None:
        """Publish the opened weights; with `hold`, probe them before the release, as the coordinator does."""
        publisher = self.publisher
        await publisher.begin(mode)
        await publisher.send()
        self.models[publisher.version] = model
        await publisher.commit(hold=hold)
        if hold:
            ids = prompt_of(99)
            probe = await self.control.probe(ids, timeout=PATIENCE)
            expected = forward([(len(ids) - 1, model)], ids)
            assert np.abs(probe[1:] - expected).max() < TOLERANCE
            await publisher.release()

    def expected(self, prompt: list[int], sample: Completion, *, keep: bool) -> Any:
        """Return the log-probabilities that the sample must have; with `keep`, old keys and values stay."""
        ids, spans = [*prompt, *sample.token_ids.tolist()], sample.version_spans
        ends = list(itertools.accumulate(span.token_count for span in spans))
        if keep:
            # The keys and values of a token are computed when the next one is sampled.
            pieces = [(len(prompt) - 1 + e, self.models[s.policy_version]) for e, s in zip(ends, spans, strict=True)]
            return forward(pieces, ids)[len(prompt) - 1 :]
        rows = {s.policy_version: forward([(len(ids) - 1, self.models[s.policy_version])], ids) for s in spans}
        parts = [
            rows[s.policy_version][len(prompt) - 1 + e - s.token_count : len(prompt) - 1 + e]
            for e, s in zip(ends, spans, strict=True)
        ]
        return np.concatenate(parts)


def forward(pieces: Sequence[tuple[int, Any]], ids: list[int]) -> Any:
    """Return the log-probability of each id after the first; each model computes the inputs up to its index."""
    import torch
    from transformers import DynamicCache

    cache, at, logits = DynamicCache(), 0, []
    with torch.no_grad():
        for end, model in pieces:
            logits.append(model(torch.tensor([ids[at:end]]), past_key_values=cache, use_cache=True).logits[0])
            at = end
    assert at == len(ids) - 1
    rows = torch.log_softmax(torch.cat(logits).double(), -1)
    return rows[torch.arange(at), torch.tensor(ids[1:])].numpy()


def prompt_of(seed: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(3, VOCABULARY_SIZE, PROMPT).tolist()
    return tokens


def versions(sample: Completion) -> list[int]:
    return [span.policy_version for span in sample.version_spans]


@pytest.fixture
async def engine(service: Service) -> AsyncIterator[Engine]:
    channel = open_channel(service.target, None)
    client = AsyncRolloutClient(channel, peer="rollout-0")
    version = (await client.get_info(timeout=5)).policy_version
    made = Engine(client, RolloutControlClient(channel, peer="rollout-0"), version, service.model)
    if version:  # an earlier test has published other weights
        await made.update(service.model, control_pb.PAUSE_MODE_WAIT)
    yield made
    await channel.close()


@pytest.mark.parametrize("mode", [KEEP, RECOMPUTE], ids=["keep", "recompute"])
async def test_every_token_is_that_of_its_version_over_several_updates(
    engine: Engine, tiny_model: TinyModel, mode: Any
) -> None:
    prompt, first = prompt_of(0), engine.publisher.version
    running = [
        engine.start(prompt, samples=4, max_tokens=440, seed=4 * i, flush=flush) for i, flush in enumerate(FLUSH)
    ]
    for number in range(3):
        model = await engine.publisher.open(tiny_model("qwen2", seed=20 + number, dtype="float32"))
        await until_sampled(engine.client, 100, PATIENCE)
        left = engine.start(prompt_of(5), samples=2, max_tokens=400)
        await until_sampled(engine.client, 40, PATIENCE)
        left.cancel()  # its end and the pause reach the engine together
        await engine.publish(model, mode, hold=number == 1)
        running.append(engine.start(prompt, samples=2, max_tokens=60, seed=100 * number))
    calls = await asyncio.gather(*running)
    old, fresh = [sample for call in calls[:2] for sample in call], calls[2:]
    for sample in (s for call in calls for s in call):
        assert versions(sample) == sorted(versions(sample))
        assert np.abs(sample.logprobs - engine.expected(prompt, sample, keep=mode == KEEP)).max() < TOLERANCE
    for number, call in enumerate(fresh, 1):
        assert {versions(sample)[0] for sample in call} == {first + number}
    crossed = [sample for sample in old if len(versions(sample)) > 2]
    assert crossed, "some samples ran during several updates"
    for sample in crossed:  # the two modes differ, so that the comparison above has a meaning
        assert np.abs(sample.logprobs - engine.expected(prompt, sample, keep=mode != KEEP)).max() > 0.5


async def test_recomputed_samples_draw_the_tokens_that_they_would_have_drawn(service: Service, engine: Engine) -> None:
    """Publish the same weights as a new version: prefill, seeds, stop conditions and lengths must continue exactly."""
    prompt = prompt_of(1)
    alone = await engine.start(prompt, samples=8, max_tokens=440)
    running = engine.start(prompt, samples=8, max_tokens=440)
    for _ in range(3):
        model = await engine.publisher.open(service.model)
        await until_sampled(engine.client, 200, PATIENCE)
        await engine.publish(model, RECOMPUTE)
    answers = await running
    assert max(len(versions(sample)) for sample in answers) > 2
    for sample, reference in zip(answers, alone, strict=True):
        assert sample.token_ids.tolist() == reference.token_ids.tolist()
        assert sample.finish_reason == reference.finish_reason
        assert np.abs(sample.logprobs - reference.logprobs).max() < TOLERANCE


async def test_an_update_that_is_given_up_recomputes_nothing(engine: Engine, tiny_model: TinyModel) -> None:
    prompt = prompt_of(2)
    alone = await engine.start(prompt, samples=4, max_tokens=150)
    await engine.publisher.open(tiny_model("qwen2", seed=30, dtype="float32"))
    running = engine.start(prompt, samples=4, max_tokens=150)
    await until_sampled(engine.client, 100, PATIENCE)
    await engine.publisher.begin(RECOMPUTE)
    assert await engine.publisher.abort() == control_pb.WEIGHT_STATE_CLEAN
    assert plain(await running) == plain(alone)


async def test_weights_that_are_received_and_aborted_end_the_samples(engine: Engine, tiny_model: TinyModel) -> None:
    """The coordinator aborts like this when digests differ."""
    prompt, first = prompt_of(3), engine.publisher.version
    await engine.publisher.open(tiny_model("qwen2", seed=31, dtype="float32"))
    running = engine.start(prompt, samples=8, max_tokens=240)
    await until_sampled(engine.client, 100, PATIENCE)
    await engine.publisher.begin(RECOMPUTE)
    await engine.publisher.send()
    assert await engine.publisher.abort() == control_pb.WEIGHT_STATE_DIRTY
    ended = await running
    assert pb.FINISH_REASON_ABORTED in {sample.finish_reason for sample in ended}
    for sample in ended:
        assert versions(sample) == [first]
        assert np.abs(sample.logprobs - engine.expected(prompt, sample, keep=False)).max() < TOLERANCE
    await engine.update(tiny_model("qwen2", seed=32, dtype="float32"), RECOMPUTE)
    for sample in await engine.start(prompt, samples=2, max_tokens=20):
        assert np.abs(sample.logprobs - engine.expected(prompt, sample, keep=False)).max() < TOLERANCE


async def test_a_held_version_is_aborted_while_tokens_are_computed_again(engine: Engine, tiny_model: TinyModel) -> None:
    prompt, first, publisher = prompt_of(7), engine.publisher.version, engine.publisher
    await publisher.open(tiny_model("qwen2", seed=33, dtype="float32"))
    running = engine.start(prompt, samples=RUNNING, max_tokens=300)
    await until_sampled(engine.client, 30 * RUNNING, PATIENCE)
    await publisher.begin(RECOMPUTE)
    await publisher.send()
    await publisher.commit(hold=True)
    assert await publisher.abort() == control_pb.WEIGHT_STATE_DIRTY
    ended = await running
    assert pb.FINISH_REASON_ABORTED in {sample.finish_reason for sample in ended}
    for sample in ended:
        assert versions(sample) == [first]
        assert np.abs(sample.logprobs - engine.expected(prompt, sample, keep=False)).max() < TOLERANCE
    await engine.update(tiny_model("qwen2", seed=34, dtype="float32"), RECOMPUTE)
    for sample in await engine.start(prompt, samples=RUNNING, max_tokens=20):
        assert np.abs(sample.logprobs - engine.expected(prompt, sample, keep=False)).max() < TOLERANCE


@pytest.mark.parametrize("mode", list(control_pb.PauseMode.values())[1:], ids=lambda m: control_pb.PauseMode.Name(m))
async def test_new_samples_of_a_cached_prompt_read_nothing_old(
    engine: Engine, tiny_model: TinyModel, mode: Any
) -> None:
    prompt, first = prompt_of(4), engine.publisher.version
    model = await engine.publisher.open(tiny_model("qwen2", seed=40 + mode, dtype="float32"))
    running = engine.start(prompt, samples=2, max_tokens=100)
    await until_sampled(engine.client, 8, PATIENCE)  # of both samples
    await engine.publish(model, mode)
    for sample in await engine.start(prompt, samples=2, max_tokens=20):
        assert versions(sample) == [engine.publisher.version]
        assert np.abs(sample.logprobs - engine.expected(prompt, sample, keep=False)).max() < TOLERANCE
    for sample in await running:
        assert set(versions(sample)) <= ({first, first + 1} if mode in (KEEP, RECOMPUTE) else {first})
        assert np.abs(sample.logprobs - engine.expected(prompt, sample, keep=mode == KEEP)).max() < TOLERANCE


@pytest.mark.parametrize("mode", [KEEP, RECOMPUTE], ids=["keep", "recompute"])
async def test_samples_that_waited_in_the_engine_read_nothing_old(
    engine: Engine, tiny_model: TinyModel, mode: Any
) -> None:
    """Samples in vLLM's queue have the cache salt of their submission, with which the old prompt was cached."""
    prompt, first = prompt_of(6), engine.publisher.version
    model = await engine.publisher.open(tiny_model("qwen2", seed=50, dtype="float32"))
    running = engine.start(prompt, samples=2 * RUNNING, max_tokens=150)
    await until_sampled(engine.client, 10 * RUNNING, PATIENCE)
    await engine.publish(model, mode)
    answers = await running
    late = [sample for sample in answers if versions(sample) == [first + 1]]
    assert late, "some samples waited until the update"
    for sample in late if mode == KEEP else answers:
        assert np.abs(sample.logprobs - engine.expected(prompt, sample, keep=False)).max() < TOLERANCE
