"""Tests RewardService on a loopback server with real workers: one test for each rule of its proto."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import grpc
import pytest
from google.rpc.code_pb2 import Code

from fourfold.contract import CONTRACT_VERSION
from fourfold.errors import DeadlinePassed, Overloaded, Unavailable
from fourfold.reward.client import AsyncRewardClient
from fourfold.reward.v1 import reward_service_pb2 as pb
from fourfold.reward.v1.reward_service_pb2_grpc import RewardServiceStub, add_RewardServiceServicer_to_server
from fourfold.rpc.codec import pack_ints
from fourfold.types.v1.experience_pb2 import Experience
from fourfold_reward import loader
from fourfold_reward import servicer as servicer_module
from fourfold_reward.pool import WorkerPool
from fourfold_reward.servicer import MAX_SAMPLES, RewardServicer
from tests.conftest import Serve

FUNCTION = """
import math, time
from fourfold_reward import ScoreInput

def reward(sample: ScoreInput) -> object:
    match sample.completion:
        case "raise": raise ValueError("no")
        case "hang": time.sleep(1000)
        case "nan": return math.nan
        case "none": return None
        case "text": return "x"
        case "parts": return {"score": 2, "components": {"format": 0.5}}
    return float(len(sample.completion))

def of_trl(prompts, completions, completion_ids, level, answer, **columns):
    if isinstance(prompts[0], str):
        return [None]
    (message,), (turn,), (ids,) = prompts[0], completions[0], completion_ids
    return [sum(ids) + 100.0 * (message["content"] == "2 + 2?") + 1000.0 * (turn["content"] == answer[0]) + level[0]]

def of_openrlhf(queries, prompts, labels, **kwargs):
    import torch
    right = torch.tensor([float(q == p + l) for q, p, l in zip(queries, prompts, labels)])
    return {"rewards": right, "scores": right, "extra_logs": {"mean": right.mean()}}
"""

Connect = Callable[..., Awaitable[AsyncRewardClient]]


def item(
    sample_id: str, completion: str = "", *, answer: str = "", metadata: str = "", verifier: str = ""
) -> pb.ScoreItem:
    return pb.ScoreItem(
        experience=Experience(sample_id=sample_id),
        completion_text=completion,
        answer=answer,
        metadata_json=metadata,
        verifier=verifier,
    )


@pytest.fixture
async def connect(serve: Serve, tmp_path: Path) -> AsyncIterator[Connect]:
    pools: list[WorkerPool] = []
    (tmp_path / "mine.py").write_text(FUNCTION)

    async def start(
        *, ready: bool = True, timeout: float = 1.2, waiting: int = 5000, function: str = "reward", hashed: bytes = b""
    ) -> AsyncRewardClient:
        pool = WorkerPool(
            verifier=loader.find(f"mine.py:{function}", directory=tmp_path),
            options={},
            processes=1,
            timeout_seconds=timeout,
            on_failure=lambda message: pytest.fail(message),
            max_waiting_samples=waiting,
        )
        pools.append(pool)
        servicer = RewardServicer(pool)
        channel = await serve(
            (pb.DESCRIPTOR.services_by_name["RewardService"], add_RewardServiceServicer_to_server, servicer)
        )
        if ready:
            await pool.start()
            servicer.set_ready(hashed)
        return AsyncRewardClient(channel, peer="reward-0")

    yield start
    for pool in pools:
        await pool.close()


async def test_info_names_function_and_version(connect: Connect) -> None:
    info = await (await connect()).get_info(timeout=5)
    name, version = info.name.split("@")
    assert name == "mine.py:reward"
    assert len(version) == 12
    assert info.max_sample_count == MAX_SAMPLES
    assert info.contract_version == CONTRACT_VERSION
    assert info.tokenizer_sha256 == b""


async def test_a_function_of_trl_gets_messages_tokens_and_columns(connect: Connect) -> None:
    client = await connect(function="of_trl", hashed=b"h" * 32)
    info = await client.get_info(timeout=5)
    assert info.reads_messages and info.tokenizer_sha256 == b"h" * 32
    chat, plain = (item(name, "4", answer="4", metadata='{"level": 3}') for name in ("chat", "plain"))
    chat.prompt_messages_json = '[{"role": "user", "content": "2 + 2?"}]'
    chat.experience.token_ids = pack_ints([1, 2, 30, 40])
    chat.experience.action_mask = bytes([0, 0, 1, 1])
    bad, lost = item("bad", "4"), item("lost", "4", metadata='{"level": 3}')
    bad.prompt_messages_json, lost.prompt_messages_json = '["x"]', '{"role": "user"'
    scores = await client.score([chat, plain, bad, lost], timeout=20)
    assert scores[0].score == 70 + 100 + 1000 + 3
    assert scores[1].abstain_reason == "NO_SCORE"
    assert [score.error.reason for score in scores[2:]] == ["BAD_METADATA", "BAD_METADATA"]


async def test_every_outcome_reaches_the_caller_in_order(connect: Connect) -> None:
    client = await connect()
    texts = ["abc", "raise", "hang", "nan", "none", "text", "parts", "ab"]
    items = [item(f"s{i}", text) for i, text in enumerate(texts)]
    scores = await client.score(items, timeout=20)
    assert [s.sample_id for s in scores] == [f"s{i}" for i in range(8)]
    kinds = [s.WhichOneof("outcome") for s in scores]
    assert kinds == ["score", "error", "error", "error", "abstain_reason", "error", "score", "score"]
    assert [s.score for s in scores if s.HasField("score")] == [3.0, 2.0, 2.0]
    assert scores[4].abstain_reason == "NO_SCORE"
    errors = {s.error.reason: Code.Name(s.error.code) for s in scores if s.HasField("error")}
    assert errors == {
        "RAISED": "UNKNOWN",
        "TIMEOUT": "DEADLINE_EXCEEDED",
        "NOT_FINITE": "OUT_OF_RANGE",
        "NOT_A_NUMBER": "INVALID_ARGUMENT",
    }
    assert dict(scores[6].components) == {"format": 0.5}


@pytest.mark.parametrize("name", ["os:system", "math_verify"])
async def test_another_verifier_is_an_error_of_its_sample(connect: Connect, name: str) -> None:
    client = await connect()
    items = [item("a", "12", verifier=name), item("b", "12", verifier="mine.py:reward")]
    first, second = await client.score(items, timeout=20)
    assert (first.error.code, first.error.reason) == (Code.Value("NOT_FOUND"), "NOT_FOUND")
    assert name in first.error.message
    assert second.score == 2.0


@pytest.mark.parametrize("metadata", ["[]", "{", '{"a": "' + "x" * (64 << 10) + '"}'])
async def test_bad_metadata_is_an_error_of_its_sample(connect: Connect, metadata: str) -> None:
    client = await connect()
    first, second = await client.score([item("a", "12", metadata=metadata), item("b", "12")], timeout=20)
    assert first.error.reason == "BAD_METADATA"
    assert second.score == 2.0


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ([], "no items"),
        ([item("a"), item("a")], "sample a occurs twice"),
        ([item("a b")], "sample_id is 'a b'"),
        ([item("")], "sample_id is ''"),
        ([item(f"s{i}") for i in range(MAX_SAMPLES + 1)], f"at most {MAX_SAMPLES} fit"),
        ([item("a", "x" * (9 << 20))], "at most 8388608 fit"),
    ],
    ids=["empty", "repeated", "bad id", "no id", "too many", "oversize"],
)
async def test_malformed_request_is_refused(connect: Connect, items: list[pb.ScoreItem], text: str) -> None:
    client = await connect()
    # Without the client, which splits requests that are too large.
    with pytest.raises(grpc.aio.AioRpcError, match=text) as refused:
        await client._stub.Score(pb.ScoreRequest(items=items), timeout=10)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_full_queue_is_resource_exhausted_with_a_delay(connect: Connect) -> None:
    client = await connect(waiting=3)
    first = asyncio.create_task(client.score([item("a", "hang"), item("b"), item("c")], timeout=10))
    await asyncio.sleep(0.2)
    with pytest.raises(Overloaded, match="2 samples wait") as refused:
        await client.score([item("d"), item("e")], timeout=10)
    assert refused.value.reason == "QUEUE_FULL"
    assert refused.value.retry_after and refused.value.retry_after >= 0.1
    assert [s.WhichOneof("outcome") for s in await first] == ["error", "score", "score"]


async def test_starting_service_is_unavailable(connect: Connect) -> None:
    client = await connect(ready=False)
    for call in (client.get_info(timeout=2), client.score([item("a")], timeout=2)):
        with pytest.raises((Unavailable, DeadlinePassed)):  # the channel retries UNAVAILABLE
            await call


@pytest.mark.slow
async def test_deadline_returns_the_finished_scores(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer_module, "_ANSWER_MARGIN_SECONDS", 2.0)
    client = await connect(timeout=60)
    scores = await client.score([item("a", "x"), item("b", "hang"), item("c", "y")], timeout=6)
    assert (scores[0].score, scores[2].score) == (1.0, 1.0)
    assert (Code.Name(scores[1].error.code), scores[1].error.reason) == ("UNAVAILABLE", "TIMEOUT")


# The tests below start the whole service as a process.

RECIPE = """
name = "test"
steps = 1
[model]
source = "none"
[data.train]
path = "none.jsonl"
[sampling]
max_new_tokens = 4
[batch]
prompts_per_step = 1
group_size = 2
[reward]
function = "{verifier}"
processes = 2
"""
MAIN = """
import sys
from pathlib import Path
from fourfold.config import load
from fourfold.errors import FourfoldError
from fourfold.service.lifecycle import ServeOptions
from fourfold_reward.serve import main

recipe = Path(sys.argv[1])
try:
    sys.exit(main(ServeOptions(role="reward", recipe=recipe, config=load(recipe), member_id="reward-0")))
except FourfoldError as error:
    sys.exit(error.message)
"""


@contextlib.contextmanager
def service(folder: Path, verifier: str) -> Iterator[subprocess.Popen[str]]:
    (folder / "recipe.toml").write_text(RECIPE.format(verifier=verifier))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(
        [sys.executable, "-c", MAIN, "recipe.toml"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_service_scores_and_drains_on_sigterm(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    with service(tmp_path, "mine.py:reward") as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("READY 127.0.0.1:")
        with grpc.insecure_channel(line.split()[1]) as channel:
            stub = RewardServiceStub(channel)
            answer = stub.Score(pb.ScoreRequest(items=[item("a", "abc")]), timeout=10)
        assert answer.scores[0].score == 3.0
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, text = process.communicate(timeout=20)
        assert process.returncode == 0, text
        assert time.monotonic() - started < 15


@pytest.mark.parametrize(
    ("verifier", "text"),
    [
        (
            "last_numbr",
            "reward.function = 'last_numbr' is not a verifier; did you mean 'last_number'? Known: exact_match, ",
        ),
        ("mine.py:rewards", "reward.function: 'mine.py:rewards': no 'rewards' there; did you mean 'reward'?"),
    ],
)
def test_bad_verifier_ends_the_service_with_one_line(tmp_path: Path, verifier: str, text: str) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    with service(tmp_path, verifier) as process:
        output, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "READY" not in output
    assert text in errors.splitlines()[-1]
    assert "Traceback" not in errors
