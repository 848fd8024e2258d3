"""A critic with ranks of its own: the numbers of one in the policy's ranks, and checkpoints that move between both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
import transformers

from fourfold.errors import Unavailable
from fourfold.nn.forward import read_value_head
from fourfold.rpc.channel import open_channel
from fourfold.sample.wire import encode
from fourfold.trainer.client import AsyncTrainerClient
from tests.integration.test_trainer_deepspeed import PPO
from tests.integration.test_trainer_service import Service
from tests.integration.test_trainer_state import Copies
from tests.support.fork_server import run_cases
from tests.support.trainer_driver import Case, batch

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

SEEN = ("before", "straight", "straight_values", "back", "losses", "norms")


@pytest.fixture(scope="module")
def llama(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama", 0, "float32")


async def test_a_critic_apart_trains_saves_and_its_death_is_explained(llama: Path, tmp_path: Path) -> None:
    tables = '[algorithm]\npreset = "ppo"\n[critic]\nranks = 1\nlearning_rate = 1e-3'
    trainer = Service(llama, tmp_path, ranks=1, dtype="float32", timeout=120, tables=tables)
    try:
        channel = open_channel(trainer.wait_ready(), None)
        client = AsyncTrainerClient(channel, peer="trainer-0")
        answer = await client.train_step(1, [encode(s) for s in batch(1)], timeout=100)
        assert answer.metrics["train/critic_grad_norm"] > 0 and answer.policy_version == 1
        assert await client.save_checkpoint(timeout=60) == 1
        saved = trainer.run_dir / "checkpoints/step-000001"
        assert sorted(p.stem for p in saved.glob("*.safetensors")) == ["critic-000", "policy-000"]
        check_exported_critic(Path(await client.export_model("critic", critic=True, timeout=60)), llama, saved)
        (rank,) = trainer.ranks()
        rank.kill()
        with pytest.raises(Unavailable):
            await client.train_step(2, [encode(s) for s in batch(2)], timeout=100)
        await channel.close()
        assert trainer.process.wait(20) == 1
        last = trainer.log.read_text()[-1500:]
        assert "trainer-0: trainer-0-critic-rank-0 died" in last and "SIGKILL" in last
    finally:
        trainer.end()


def check_exported_critic(folder: Path, model: Path, checkpoint: Path) -> None:
    """Check that transformers and Fourfold read the critic, with the trained weights and the model's tokenizer."""
    found = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype="float32")
    assert type(found).__name__ == "LlamaForSequenceClassification" and found.config.num_labels == 1
    head = read_value_head(folder)
    assert head is not None and head.abs().max() > 0, "it was trained from zeros"
    assert torch.equal(found.score.weight, head)
    with safetensors.safe_open(checkpoint / "critic-000.safetensors", framework="pt") as shard:
        masters = torch.cat([shard.get_tensor(key).flatten() for key in shard.keys() if "master" in key])  # noqa: SIM118
    exported = torch.cat([value.flatten() for value in found.state_dict().values()])
    assert exported.numel() <= masters.numel() and torch.isin(exported, masters).all()
    assert (folder / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


def case(model: Path, folder: Path, ranks: int, critic_ranks: int, stage: int) -> Case:
    """Return one that saves after two steps, makes two more, and goes back."""
    name = f"{ranks} {critic_ranks} {stage}"
    (folder / name).mkdir()
    return Case(
        name=name,
        model=str(model),
        ranks=ranks,
        critic_ranks=critic_ranks,
        stage=stage,
        algorithm=PPO,
        mini_batches=2,
        budget=64,
        does="restore",
        folder=str(folder / name),
    )


@pytest.mark.parametrize(
    ("ranks", "critic_ranks", "stage"),
    [
        pytest.param(1, 1, 3, marks=pytest.mark.soak),
        (2, 1, 3),
        pytest.param(1, 2, 3, marks=pytest.mark.soak),
        (1, 2, 1),
    ],
)
def test_a_critic_apart_learns_what_it_learns_in_the_ranks_of_the_policy(
    llama: Path, tmp_path: Path, ranks: int, critic_ranks: int, stage: int
) -> None:
    apart, shared = case(llama, tmp_path, ranks, critic_ranks, stage), case(llama, tmp_path, 1, 0, stage)
    found = run_cases([apart, shared], tmp_path)
    mine, theirs = found[apart.name], found[shared.name]
    same: Any = np.testing.assert_array_equal
    if ranks + critic_ranks > 2:  # sums in another order, through an optimiser
        same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)  # noqa: E731
    for name in SEEN:
        same(mine[name], theirs[name])
    np.testing.assert_array_equal(mine["back"], mine["straight"])
    assert np.abs(mine["straight_values"]).max() > 0.01


def test_a_checkpoint_moves_between_a_critic_apart_and_one_in_the_ranks_of_the_policy(
    llama: Path, tmp_path: Path
) -> None:
    made = Copies(llama, tmp_path)
    made.run(
        made.case("apart", ranks=2, critic_ranks=1),
        made.case("shared", source="apart"),
        made.case("apart again", source="shared", critic_ranks=2, stage=1),
    )
    made.check("shared", "apart")
    made.check("apart again", "apart")
    for name in ("shared", "apart again"):
        np.testing.assert_array_equal(made.random(name, 0), made.random("apart", 0))
