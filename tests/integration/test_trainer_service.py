"""`fourfold serve trainer` as a process: what it answers, and how it and its ranks end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import transformers

from fourfold.errors import StaleEpoch, WrongState
from fourfold.host.scratch import Scratch
from fourfold.model.tokenizer import tokenizer_sha256
from fourfold.rpc.channel import open_channel
from fourfold.sample.wire import encode
from fourfold.trainer.client import AsyncTrainerClient, TrainerWeightClient
from fourfold.weights.manifest import Manifest
from fourfold.weights.transport.base import TransferGroup, make_receiver
from fourfold.weights.transport.waiting import Deadline
from tests.support.plain_trainer import lookup
from tests.support.trainer_driver import LEARNING_RATE, REPOSITORY, VOCABULARY, batch, trainer_environment
from tests.support.weight_peers import Collector

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

TinyModel = Callable[..., Path]


class Service:
    """`fourfold serve trainer` as a process. A later one with the same folder goes on with the run."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        ranks: int,
        dtype: str = "bfloat16",
        stage: int = 3,
        timeout: int = 60,
        batch: str = "",
        samples: str = "prompts_per_step = 5\ngroup_size = 4\n[sampling]\nmax_new_tokens = 8",
        trainer: str = "",
        tables: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.run_dir = folder / "run"
        recipe = folder / "recipe.toml"
        recipe.write_text(
            f"""
name = "service"
steps = 10
[model]
source = "{model}"
dtype = "{dtype}"
max_context_tokens = 32
[data.train]
path = "train.jsonl"
[batch]
tokens_per_micro_batch = 64
{batch}
{samples}
[trainer]
ranks = {ranks}
zero_stage = {stage}
learning_rate = {LEARNING_RATE}
step_timeout_seconds = {timeout}
{trainer}
{tables}
"""
        )
        self.log = folder / "service.log"
        argv = [sys.executable, "-m", "fourfold", "serve", "trainer", str(recipe), "--run-dir", str(self.run_dir)]
        with self.log.open("wb") as log:
            env = trainer_environment() | dict(environment or {})
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, env=env, cwd=folder)
        self.target = ""

    def wait_ready(self, timeout: float = 150.0) -> str:
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            for line in self.log.read_text().splitlines():
                if line.startswith("READY "):
                    return line.split()[1]
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            time.sleep(0.1)
        raise AssertionError(f"not ready: {self.log.read_text()[-4000:]}")

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of ranks above 0."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        ranks = []
        for child in children:
            with suppress(psutil.NoSuchProcess):  # a helper of the start that has just ended
                if "fourfold_trainer.ranks.main" in child.cmdline():
                    ranks.append(child)
        return ranks

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # its ranks end with it
        self.process.wait(10)


@pytest.fixture(scope="module")
def llama(tiny_model: TinyModel) -> Path:
    return tiny_model("llama", 0, "float32")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    services: list[Service] = []

    def make(model: Path, **more: Any) -> Service:
        services.append(Service(model, tmp_path, **more))
        return services[-1]

    yield make
    for one in services:
        one.end()


def gone(processes: Sequence[psutil.Process], timeout: float = 5.0) -> bool:
    return not psutil.wait_procs(list(processes), timeout=timeout)[1]


async def transfer(weights: TrainerWeightClient) -> dict[str, torch.Tensor]:
    """Send version 1 to a receiver in this process; return the tensors by name."""
    described = await weights.get_manifest(timeout=10)
    manifest = Manifest.from_bytes(described.manifest)
    offers = await weights.make_offer(epoch=1, backend="shm", receiver_count=1, timeout=10)
    receiver = make_receiver("shm", TransferGroup(epoch=1, manifest=manifest, receiver_count=1), 0, torch.device("cpu"))
    receiver.accept(offers)
    with pytest.raises(StaleEpoch):  # a late repetition does not close the epoch that is open
        await weights.make_offer(epoch=1, backend="shm", receiver_count=1, timeout=10)
    await weights.open(epoch=1, timeout=10)
    receiver.open(Deadline(10))
    sent = await weights.send(epoch=1, policy_version=1, timeout=10)
    sink = Collector(manifest)
    receiver.receive(1, sink, Deadline(10))
    received = {spec.name: tensor for spec, tensor in zip(manifest.tensors, sink.tensors(), strict=True)}
    assert sent.sent_bytes > 0 and len(sent.weights_digest) == 32
    receiver.close()
    await weights.abort(epoch=1, timeout=10)
    return received


async def end_a_transfer_that_waits(weights: TrainerWeightClient) -> None:
    """Let both ranks wait for a receiver that takes nothing, and abort: the ranks' own threads wait in the transfer."""
    manifest = Manifest.from_bytes((await weights.get_manifest(timeout=10)).manifest)
    offers = await weights.make_offer(epoch=2, backend="gloo", receiver_count=1, timeout=10)
    receiver = make_receiver(
        "gloo", TransferGroup(epoch=2, manifest=manifest, receiver_count=1), 0, torch.device("cpu")
    )
    receiver.accept(offers)
    await asyncio.gather(weights.open(epoch=2, timeout=10), asyncio.to_thread(receiver.open, Deadline(10)))
    sending = asyncio.create_task(weights.send(epoch=2, policy_version=1, timeout=60))
    await asyncio.sleep(0.5)
    assert not sending.done()
    began = time.monotonic()
    await weights.abort(epoch=2, timeout=10)
    with pytest.raises(StaleEpoch, match="aborted"):  # of both: the answers of all ranks are in it
        await sending
    assert time.monotonic() - began < 20
    receiver.abort()
    receiver.close()


async def test_two_ranks_train_send_weights_save_export_and_say_who_died(
    service: Callable[..., Service], tiny_model: TinyModel
) -> None:
    model = tiny_model("qwen2")
    trainer = service(model, ranks=2)
    channel = open_channel(trainer.wait_ready(), None)
    client, weights = AsyncTrainerClient(channel, peer="trainer-0"), TrainerWeightClient(channel, peer="trainer-0")
    status = await client.get_status(timeout=10)
    assert (status.rank_count, status.vocabulary_size) == (2, VOCABULARY)
    assert status.tokenizer_sha256 == tokenizer_sha256(model)
    before = await client.compute_logprobs(batch(99), timeout=60)
    answer = await client.train_step(1, [encode(s) for s in batch(1)], timeout=60)
    assert (answer.policy_version, answer.skipped_reason) == (1, "")
    after = await client.compute_logprobs(batch(99), timeout=60)
    assert max(np.abs(new - old)[1:].max() for new, old in zip(after, before, strict=True)) > 0.01
    assert await client.save_checkpoint(timeout=60) == 1
    saved = json.loads((trainer.run_dir / "checkpoints/step-000001/trainer.json").read_text())
    assert sorted(saved["files"]) == ["policy-000.safetensors", "policy-001.safetensors"]

    damaged = trainer.run_dir / "checkpoints/step-000001/policy-001.safetensors"
    damaged.write_bytes(b"\xff" * damaged.stat().st_size)
    with pytest.raises(WrongState, match=r"policy-001\.safetensors cannot be read"):
        await client.load_checkpoint(1, timeout=60)
    untouched = await client.compute_logprobs(batch(99), timeout=60)
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(untouched, after, strict=True))

    received = await transfer(weights)
    await end_a_transfer_that_waits(weights)

    folder = Path(await client.export_model("model", timeout=60))
    exported: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert exported.dtype == torch.bfloat16
    parameters = dict(exported.named_parameters())
    assert set(parameters) == set(received)
    for name, tensor in received.items():
        assert torch.equal(parameters[name], tensor), name
    transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer_sha256(folder) == tokenizer_sha256(model)
    assert (folder / "generation_config.json").read_bytes() == (model / "generation_config.json").read_bytes()
    looked_up = np.concatenate([row[1:] for row in after])
    np.testing.assert_allclose(lookup(exported.float()), looked_up, atol=0.15)

    await channel.close()
    (rank,) = trainer.ranks()
    rank.kill()
    assert trainer.process.wait(8) == 1
    last = trainer.log.read_text()[-1500:]
    assert "trainer-0: trainer-0-rank-1 died: killed by SIGKILL" in last, "it was ready"


@pytest.mark.slow
def test_the_example_trains_with_a_loss_of_its_own(service: Callable[..., Service], llama: Path) -> None:
    trainer = service(llama, ranks=1, dtype="float32", stage=1)
    example = REPOSITORY / "examples" / "custom_loss.py"
    argv = [sys.executable, str(example), trainer.wait_ready(), str(llama)]
    for first in (1, 11):  # the second time it goes on where it ended
        done = subprocess.run(argv, env=trainer_environment(), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        lines = [re.fullmatch(r"step (\d+): loss (\S+), gradient (\S+)", line) for line in done.stdout.splitlines()]
        found = [(int(line[1]), float(line[2]), float(line[3])) for line in lines if line]
        assert [step for step, _, _ in found] == list(range(first, first + 10))
        losses = [loss for _, loss, _ in found]
        assert losses[-1] < losses[0] * 0.8 and all(norm > 0 for _, _, norm in found)


@pytest.mark.slow
def test_two_ranks_end_in_good_order(service: Callable[..., Service], llama: Path) -> None:
    trainer = service(llama, ranks=2)
    trainer.wait_ready()
    ranks = trainer.ranks()
    trainer.process.send_signal(signal.SIGTERM)
    assert trainer.process.wait(6) == 0
    assert gone(ranks)


@pytest.mark.slow
def test_a_rank_does_not_outlive_the_service(
    service: Callable[..., Service],
    llama: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    temporary = tmp_path_factory.mktemp("tmp")
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    trainer = service(llama, ranks=2)
    end = time.monotonic() + 100
    while not trainer.ranks() and time.monotonic() < end:  # in the middle of its start
        time.sleep(0.05)
    ranks = trainer.ranks()
    assert ranks
    (folder,) = temporary.glob("fourfold-ranks-*")
    os.utime(folder, (0, 0))
    Scratch("ranks").remove()
    assert folder.exists()
    trainer.process.kill()
    assert gone(ranks)
    Scratch("ranks").remove()  # as the next trainer does
    assert not folder.exists()


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_ends_the_service_with_one_clear_message(
    service: Callable[..., Service], llama: Path, tmp_path: Path
) -> None:
    unknown = tmp_path / "unknown"
    shutil.copytree(llama, unknown)
    (unknown / "config.json").write_text((llama / "config.json").read_text().replace('"llama"', '"nonsense"'))
    trainer = service(unknown, ranks=1)
    assert trainer.process.wait(100) == 1
    text = trainer.log.read_text()
    assert f"trainer-0: model.source: {unknown} cannot be loaded as a causal language model" in text
    assert "nonsense" in text and "Traceback" not in text
