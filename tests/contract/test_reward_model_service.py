"""Tests RewardService on a loopback server with a tiny real reward model on CPU."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from google.rpc.code_pb2 import Code

torch = pytest.importorskip("torch", reason="reward models need their extra: fourfold-reward[models]")

from fourfold.config.reward import RewardModelConfig  # noqa: E402
from fourfold.errors import ConfigError, Overloaded  # noqa: E402
from fourfold.model.classifier import ClassifierFolder  # noqa: E402
from fourfold.model.tokenizer import Tokenizer  # noqa: E402
from fourfold.reward.client import AsyncRewardClient  # noqa: E402
from fourfold.reward.v1 import reward_service_pb2 as pb  # noqa: E402
from fourfold.reward.v1.reward_service_pb2_grpc import add_RewardServiceServicer_to_server  # noqa: E402
from fourfold.types.v1.experience_pb2 import Experience  # noqa: E402
from fourfold_reward.models.backend import RewardModelBackend  # noqa: E402
from fourfold_reward.servicer import RewardServicer  # noqa: E402
from tests.conftest import Serve  # noqa: E402
from tests.fakes.stage import until  # noqa: E402
from tests.support.reward_models import plain_scores, plain_step_scores, write_reward_model  # noqa: E402

pytestmark = pytest.mark.integration  # torch and transformers take seconds to import

MESSAGES = [{"role": "user", "content": "What is 2 * 3?"}]
Connect = Callable[..., Awaitable[tuple[AsyncRewardClient, RewardModelBackend]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward_model(tmp_path_factory.mktemp("models") / "tiny-rm", "qwen2")


@pytest.fixture
async def connect(serve: Serve, folder: Path) -> AsyncIterator[Connect]:
    backends: list[RewardModelBackend] = []

    async def start(*, waiting: int = 5000) -> tuple[AsyncRewardClient, RewardModelBackend]:
        table = RewardModelConfig(source=str(folder), dtype="float32", tokens_per_batch=512)
        backends.append(backend := RewardModelBackend(table, max_waiting_samples=waiting))
        await backend.start()
        servicer = RewardServicer(backend)
        servicer.set_ready()
        service = pb.DESCRIPTOR.services_by_name["RewardService"]
        channel = await serve((service, add_RewardServiceServicer_to_server, servicer))
        return AsyncRewardClient(channel, peer="reward-0"), backend

    yield start
    for backend in backends:
        await backend.close()


def item(name: str, completion: str) -> pb.ScoreItem:
    return pb.ScoreItem(
        experience=Experience(sample_id=name),
        prompt_text="not read",
        completion_text=completion,
        prompt_messages_json=json.dumps(MESSAGES),
    )


def expected(folder: Path, completions: list[str]) -> list[float]:
    tokenizer = Tokenizer.load(folder)
    chats = [[*MESSAGES, {"role": "assistant", "content": completion}] for completion in completions]
    return plain_scores(
        folder, [tokenizer.encode(tokenizer.render_chat(chat, add_generation_prompt=False)) for chat in chats]
    )


async def test_calls_at_the_same_time_have_the_scores_of_each_text_alone(connect: Connect, folder: Path) -> None:
    client, backend = await connect()
    info = await client.get_info()
    assert (info.name, info.reads_messages, info.pure) == (backend.scorer, True, True)
    assert info.name.startswith("tiny-rm@") and len(info.name) == len("tiny-rm@") + 12
    completions = ["the answer is 6. " * (1 + n % 7) for n in range(60)]
    calls = [
        client.score([item(f"s{n}", completions[n]) for n in range(first, first + 6)], timeout=30)
        for first in range(0, 60, 6)
    ]
    scores = [score for part in await asyncio.gather(*calls) for score in part]
    assert [score.WhichOneof("outcome") for score in scores] == ["score"] * 60
    wanted = expected(folder, completions[:7])
    assert np.abs(np.subtract([score.score for score in scores[:7]], wanted)).max() < 1e-5
    assert scores[0].score == pytest.approx(scores[7].score, abs=1e-5), "the same text in another call"
    assert backend.thread.samples == 60


async def test_an_error_concerns_its_sample_alone(connect: Connect) -> None:
    client, _ = await connect()
    good, bad = await client.score([item("a", "6"), item("b", "word " * 2000)], timeout=30)
    assert good.WhichOneof("outcome") == "score"
    assert (bad.error.reason, bad.error.code) == ("TOO_LONG", Code.INVALID_ARGUMENT)


async def test_a_full_queue_is_told_to_the_caller(connect: Connect) -> None:
    client, backend = await connect(waiting=8)
    results = await asyncio.gather(
        *(client.score([item(f"{n}-{k}", "6 " * 100) for k in range(6)], timeout=30) for n in range(8)),
        return_exceptions=True,
    )
    refused = [result for result in results if isinstance(result, Overloaded)]
    assert refused and refused[0].retry_after and len(refused) < 8
    assert all(isinstance(result, list | Overloaded) for result in results)
    await until(lambda: (backend.waiting_samples, backend.busy) == (0, 0))


async def test_scores_of_steps_are_token_rewards_and_those_of_transformers(serve: Serve, tmp_path: Path) -> None:
    folder = write_reward_model(tmp_path / "tiny-prm", "qwen2", steps=True)
    table = RewardModelConfig(kind="process", steps="\n\n", source=str(folder), dtype="float32")
    backend = RewardModelBackend(table, policy=str(folder))
    await backend.start()
    assert backend.reads == (True, True) and backend.thread.kind == "packed"
    servicer = RewardServicer(backend)
    servicer.set_ready(b"0" * 32)
    channel = await serve(
        (pb.DESCRIPTOR.services_by_name["RewardService"], add_RewardServiceServicer_to_server, servicer)
    )
    tokenizer, steps = Tokenizer.load(folder), [["2 * 3 = 6", "so 6", "yes"], ["6"], ["a", "b"]]
    items, sampled = [], []
    for number, parts in enumerate(steps):
        sampled.append([1, 2, *tokenizer.encode("\n\n".join(parts))])
        mask = bytes([0, 0]) + bytes([1]) * (len(sampled[-1]) - 2)
        arrays = Experience(sample_id=f"s{number}", token_ids=np.array(sampled[-1], "<i4").tobytes(), action_mask=mask)
        one = item(f"s{number}", "\n\n".join(parts))
        one.experience.CopyFrom(arrays)
        items.append(one)
    scores = await AsyncRewardClient(channel, peer="reward-0").score(items, timeout=30)
    await backend.close()
    for parts, ids, score in zip(steps, sampled, scores, strict=True):
        text, ends = tokenizer.encode(tokenizer.render_chat(MESSAGES)), []
        for part in parts:
            text += tokenizer.encode(part + "\n\n")
            ends.append(len(text) - 1)
        wanted = plain_step_scores(folder, text)[ends]
        rewards = np.frombuffer(score.token_rewards, "<f4")
        assert score.score == pytest.approx(wanted[-1], abs=1e-5)
        assert rewards[rewards != 0].tolist() == pytest.approx(wanted[:-1].tolist(), abs=1e-5)
        assert len(rewards) == (len(ids) if len(parts) > 1 else 0)
        assert score.components["steps"] == len(parts)


def test_a_model_of_the_other_kind_is_refused(folder: Path, tmp_path: Path) -> None:
    steps = write_reward_model(tmp_path / "prm", "qwen2", steps=True)
    with pytest.raises(ConfigError, match=r"Qwen2ForTokenClassification, which scores steps, .* set kind = \"process"):
        ClassifierFolder.read(str(steps))
    with pytest.raises(ConfigError, match=r"Qwen2ForSequenceClassification, which scores the whole text, .* = \"score"):
        ClassifierFolder.read(str(folder), process=True)
    assert ClassifierFolder.read(str(steps), process=True).labels == 2
    three = write_reward_model(tmp_path / "three", "qwen2", steps=True, labels=3)
    with pytest.raises(ConfigError, match="has 3 labels; a process reward model has one"):
        ClassifierFolder.read(str(three), process=True)
    with pytest.raises(ValueError, match=r"steps = '\\n' is for scores of steps, and kind = \"score\"; set kind"):
        RewardModelConfig(source="x", steps="\n")
