"""Real DeepSpeed engines on tiny models, ZeRO stages 0 to 3, one and two ranks.

The truth is a plain PyTorch loop over the whole batch in this file: no micro-batches, no
DeepSpeed, no code of the trainer but its formulas' inputs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import transformers

from fourfold.channel import open_channel
from fourfold.errors import StaleEpoch, WrongState
from fourfold.tokenizer import tokenizer_sha256
from fourfold.trainer.client import TrainerClient, TrainerWeightClient
from fourfold.weights.manifest import Manifest
from fourfold.weights.transport import Deadline, Group, make_receiver
from fourfold.wire import encode
from tests.trainer_driver import LEARNING_RATE, VOCABULARY, Case, batch, write_cases

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

REPOSITORY = Path(__file__).parents[2]
SERVICES = ("rollout", "trainer", "reward", "coordinator")
Arrays = Mapping[str, Any]
TinyModel = Callable[..., Path]


def environment() -> dict[str, str]:
    paths = [str(REPOSITORY), *(str(REPOSITORY / "services" / name) for name in SERVICES)]
    # One thread: tiny models gain nothing from more, and threads that wait for each other crawl on a busy machine.
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def run(cases: Sequence[Case], folder: Path) -> dict[str, Arrays]:
    """Run cases in one process; return what each saw."""
    write_cases(folder / "cases.json", cases)
    argv = [sys.executable, "-m", "tests.trainer_driver", str(folder / "cases.json"), str(folder)]
    result = subprocess.run(argv, env=environment(), cwd=REPOSITORY, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr[-4000:]
    return {case.name: np.load(folder / f"{case.name}.npz") for case in cases}


# ---- the truth -----------------------------------------------------------------------


def plain(folder: Path, *, kl_coef: float = 0.0) -> Arrays:
    """Train the three steps in plain PyTorch, and look the fixed batch up before and after."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE)
    seen: dict[str, Any] = {"before": _lookup(model), "losses": [], "norms": []}
    for number in (1, 2, 3):
        loss, kl = _loss(model, number)
        optimizer.zero_grad()
        torch.autograd.backward(loss + kl_coef * kl)
        seen["losses"].append(float(loss.detach()))
        seen["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    return {**seen, "after": _lookup(model)}


def _rows(model: Any, ids: Any, temperature: float) -> torch.Tensor:
    tokens = torch.from_numpy(ids).long()[None]
    logits = model(input_ids=tokens).logits[0, :-1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, tokens[0, 1:, None]).squeeze(1)


def _loss(model: Any, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    samples = batch(number)
    total = sum(int(s.loss_mask.sum()) for s in samples)
    loss, kl = torch.zeros(()), torch.zeros(())
    for one in samples:
        scores = np.array([s.score for s in samples if s.group_id == one.group_id])
        spread = scores.std(ddof=1) if len(scores) > 1 else 0.0
        advantage = float((one.score - scores.mean()) / (spread + 1e-6)) if spread else 0.0
        mask = torch.from_numpy(one.loss_mask[1:])
        logprobs = _rows(model, one.token_ids, one.temperature)[mask]
        difference = torch.from_numpy(one.reference_logprobs[1:])[mask] - logprobs
        loss = loss - (torch.exp(logprobs - logprobs.detach()) * advantage).sum() / total
        kl = kl + (torch.exp(difference) - 1 - difference).clamp(max=10).sum() / total
    return loss, kl


@torch.no_grad()
def _lookup(model: Any) -> Any:
    return np.concatenate([_rows(model, s.token_ids, s.temperature).numpy() for s in batch(99)])


def check(found: Arrays, wanted: Arrays) -> None:
    """Same losses, gradients and updates, up to float32 rounding."""
    np.testing.assert_allclose(found["before"], wanted["before"], atol=2e-5)
    np.testing.assert_allclose(found["losses"], wanted["losses"], atol=2e-6)
    np.testing.assert_allclose(found["norms"], wanted["norms"], rtol=2e-5)
    np.testing.assert_allclose(found["after"], wanted["after"], atol=2e-4)
    assert np.abs(found["after"] - found["before"]).max() > 0.05  # it did learn something


# ---- one rank, many engines ----------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tiny_model: TinyModel) -> Path:
    return tiny_model("llama", 0, "float32")


@pytest.fixture(scope="module")
def truth(llama: Path) -> dict[float, Arrays]:
    """Return what plain PyTorch learns, by kl_coef."""
    return {kl_coef: plain(llama, kl_coef=kl_coef) for kl_coef in (0.0, 0.1)}


@pytest.fixture(scope="module")
def one_rank(llama: Path, tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Arrays]:
    folder = tmp_path_factory.mktemp("one-rank")
    model = str(llama)
    cases = [
        *(Case(name=f"stage {n}", model=model, stage=n, budget=48) for n in range(4)),
        Case(name="whole", model=model),
        Case(name="kl", model=model, kl_coef=0.1, budget=48),
        Case(name="gradient checkpointing", model=model, checkpointing=True, budget=48),
    ]
    for stage in range(4):
        for dtype in ("float32", "bfloat16"):
            name = f"resume {stage} {dtype}"
            (folder / name).mkdir()
            cases.append(
                Case(name=name, model=model, stage=stage, dtype=dtype, does="resume", folder=str(folder / name))
            )
        cases.append(Case(name=f"poison {stage}", model=model, stage=stage, kl_coef=0.1, does="poison", budget=48))
    cases.append(Case(name="poison bfloat16", model=model, kl_coef=0.1, dtype="bfloat16", does="poison"))
    cases.append(Case(name="clean bfloat16", model=model, kl_coef=0.1, dtype="bfloat16"))
    return run(cases, folder)


@pytest.mark.parametrize("name", ["stage 0", "stage 1", "stage 2", "stage 3", "whole", "gradient checkpointing"])
def test_every_stage_and_split_learns_what_plain_pytorch_learns(
    one_rank: dict[str, Arrays], truth: dict[float, Arrays], name: str
) -> None:
    check(one_rank[name], truth[0.0])


def test_the_kl_loss_learns_what_plain_pytorch_learns(one_rank: dict[str, Arrays], truth: dict[float, Arrays]) -> None:
    check(one_rank["kl"], truth[0.1])
    assert abs(one_rank["kl"]["norms"][0] - one_rank["whole"]["norms"][0]) > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_restored_checkpoint_goes_on_bit_for_bit(one_rank: dict[str, Arrays], stage: int, dtype: str) -> None:
    seen = one_rank[f"resume {stage} {dtype}"]
    assert (seen["loaded"] != seen["before"]).any() and (seen["loaded"] != seen["straight"]).any()
    np.testing.assert_array_equal(seen["after"], seen["straight"])
    np.testing.assert_array_equal(seen["back"], seen["straight"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_that_is_not_finite_changes_nothing(one_rank: dict[str, Arrays], stage: int) -> None:
    seen = one_rank[f"poison {stage}"]
    assert not np.isfinite(seen["poisoned_norm"])
    np.testing.assert_array_equal(seen["after_poison"], seen["before"])
    np.testing.assert_allclose(seen["norms"], one_rank["kl"]["norms"], rtol=2e-5)
    np.testing.assert_allclose(seen["after"], one_rank["kl"]["after"], atol=2e-4)


def test_a_gradient_that_is_not_finite_changes_nothing_in_bfloat16(one_rank: dict[str, Arrays]) -> None:
    seen = one_rank["poison bfloat16"]
    assert not np.isfinite(seen["poisoned_norm"])
    np.testing.assert_array_equal(seen["after"], one_rank["clean bfloat16"]["after"])


# ---- two ranks -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "stage",
    [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, 2))],
)
def test_two_ranks_learn_and_restore_as_one(
    llama: Path, truth: dict[float, Arrays], tmp_path: Path, stage: int
) -> None:
    (tmp_path / "saved").mkdir()
    case = Case(
        name="two", model=str(llama), stage=stage, ranks=2, budget=64, does="restore", folder=str(tmp_path / "saved")
    )
    seen = run([case], tmp_path)["two"]
    first = {"losses": seen["losses"][:3], "norms": seen["norms"][:3], "after": seen["straight"]}
    check({**seen, **first}, truth[0.0])
    np.testing.assert_array_equal(seen["after"], seen["straight"])
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == ["rank-000.safetensors", "rank-001.safetensors"]


# ---- the service ---------------------------------------------------------------------


class Service:
    """`fourfold serve trainer` as a process."""

    def __init__(self, model: Path, folder: Path, *, ranks: int, dtype: str = "bfloat16", stage: int = 3) -> None:
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
prompts_per_step = 5
group_size = 4
tokens_per_micro_batch = 64
[sampling]
max_new_tokens = 8
[trainer]
ranks = {ranks}
zero_stage = {stage}
learning_rate = {LEARNING_RATE}
step_timeout_seconds = 60
"""
        )
        self.log = folder / "service.log"
        argv = [sys.executable, "-m", "fourfold", "serve", "trainer", str(recipe), "--run-dir", str(self.run_dir)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, env=environment(), cwd=folder)
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
        return [child for child in children if "fourfold_trainer.rank" in child.cmdline()]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # its ranks end with it
        self.process.wait(10)


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
    receiver = make_receiver("shm", Group(epoch=1, manifest=manifest, receiver_count=1), 0)
    receiver.accept(offers)
    with pytest.raises(StaleEpoch):  # a late repetition does not close the epoch that is open
        await weights.make_offer(epoch=1, backend="shm", receiver_count=1, timeout=10)
    await weights.open(epoch=1, timeout=10)
    receiver.open(Deadline(10))
    sent = await weights.send(epoch=1, policy_version=1, timeout=10)
    shards = receiver.receive(1, None, Deadline(10))
    received = {spec.name: shards.tensor(i).clone() for i, spec in enumerate(manifest.tensors)}
    assert sent.sent_bytes > 0 and len(sent.weights_digest) == 32
    receiver.close()
    await weights.abort(epoch=1, timeout=10)
    return received


async def test_two_ranks_train_send_weights_save_export_and_say_who_died(
    service: Callable[..., Service], tiny_model: TinyModel
) -> None:
    model = tiny_model("qwen2")
    trainer = service(model, ranks=2)
    channel = open_channel(trainer.wait_ready(), None)
    client, weights = TrainerClient(channel, peer="trainer-0"), TrainerWeightClient(channel, peer="trainer-0")
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
    assert sorted(saved["files"]) == ["rank-000.safetensors", "rank-001.safetensors"]

    damaged = trainer.run_dir / "checkpoints/step-000001/rank-001.safetensors"
    damaged.write_bytes(b"\xff" * damaged.stat().st_size)
    with pytest.raises(WrongState, match="rank"):
        await client.load_checkpoint(1, timeout=60)
    untouched = await client.compute_logprobs(batch(99), timeout=60)
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(untouched, after, strict=True))

    received = await transfer(weights)

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
    np.testing.assert_allclose(_lookup(exported.float()), looked_up, atol=0.15)

    await channel.close()
    (rank,) = trainer.ranks()
    rank.kill()
    assert trainer.process.wait(8) == 1
    last = trainer.log.read_text()[-1500:]
    assert "trainer-0: trainer-0-rank-1 died" in last and "SIGKILL" in last


@pytest.mark.slow
def test_two_ranks_end_in_good_order(service: Callable[..., Service], llama: Path) -> None:
    trainer = service(llama, ranks=2)
    trainer.wait_ready()
    ranks = trainer.ranks()
    trainer.process.send_signal(signal.SIGTERM)
    assert trainer.process.wait(6) == 0
    assert gone(ranks)


def test_a_rank_does_not_outlive_the_service(service: Callable[..., Service], llama: Path) -> None:
    trainer = service(llama, ranks=2)
    end = time.monotonic() + 100
    while not trainer.ranks() and time.monotonic() < end:  # in the middle of its start
        time.sleep(0.05)
    ranks = trainer.ranks()
    assert ranks
    trainer.process.kill()
    assert gone(ranks)


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
