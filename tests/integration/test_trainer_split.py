"""The gradient of every parameter does not depend on how a step is split: ranks, ZeRO stage, micro-batches, packing.

A case makes the first step of several batches with real DeepSpeed and no clipping, and saves: Adam's first moment is
then the gradient times 1 - beta1, element by element, whoever held it. The truth is one padded batch in plain
transformers and float64. tests/unit/trainer/test_split.py has the same without DeepSpeed, in float64.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers

from tests.integration.test_trainer_state import content
from tests.support.fork_server import run_cases
from tests.support.plain_gradients import (
    Gradients,
    check_gradients,
    group_advantages,
    policy_gradients,
    ragged,
    value_gradients,
)
from tests.support.trainer_driver import SPLITS, VOCABULARY, Case

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

TOLERANCE: Final = 1e-5
BETA: Final = 0.9
RECIPES: Final[dict[str, dict[str, Any]]] = {
    "grpo": {"kl": {"coef": 0.1}, "entropy_coef": 0.01},
    "ppo": {"preset": "ppo", "kl": {"coef": 0.0}},
}


@pytest.fixture(scope="module")
def llama(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama", 0, "float32")


@pytest.fixture(scope="module")
def critic(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a reward model, because a new critic's body has no gradient."""
    folder = tmp_path_factory.mktemp("critic")
    config = transformers.AutoConfig.from_pretrained(llama, num_labels=1)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        make: Any = transformers.AutoModelForSequenceClassification.from_config
        model = make(config, dtype=torch.float32)
    model.save_pretrained(folder)
    for path in llama.glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


def truth(recipe: str, kind: str, llama: Path, critic: Path) -> dict[str, Gradients]:
    """Return the gradients of policy and critic."""
    # A segment repeats the history, so that its tokens have the gradient of the whole trajectory.
    samples = ragged("few" if kind == "segments" else kind, vocabulary=VOCABULARY)
    policy: Any = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float64)
    if recipe == "grpo":
        advantages = torch.from_numpy(group_advantages(samples)).double()[:, None]
        return {"policy": policy_gradients(policy, samples, advantages, kl_coef=0.1, entropy_coef=0.01)}
    classifier = transformers.AutoModelForSequenceClassification
    wanted, advantages = value_gradients(classifier.from_pretrained(critic, dtype=torch.float64), samples)
    return {"policy": policy_gradients(policy, samples, advantages, kl_coef=0, entropy_coef=0), "critic": wanted}


def compare(recipe: str, ranks: int, stages: Sequence[int], llama: Path, critic: Path, folder: Path) -> None:
    cases = []
    for stage in stages:
        (folder / str(stage)).mkdir()
        cases.append(
            Case(
                name=str(stage),
                model=str(llama),
                stage=stage,
                ranks=ranks,
                algorithm=RECIPES[recipe],
                does="split",
                folder=str(folder / str(stage)),
                max_grad_norm=1e9,
                critic_source=str(critic),
            )
        )
    run_cases(cases, folder)
    for kind, budgets in SPLITS.items():
        wanted = truth(recipe, kind, llama, critic)
        for stage in stages:
            for budget in budgets:
                check(folder / str(stage) / f"{kind} {budget}", wanted)


def check(checkpoint: Path, wanted: dict[str, Gradients]) -> None:
    found = content(checkpoint)
    for model, gradients in wanted.items():
        prefix = f"{model}/exp_avg/"
        moments = {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}
        mine = {name: torch.from_numpy(value).double() / (1 - BETA) for name, value in moments.items()}
        check_gradients(mine, gradients, TOLERANCE)


@pytest.mark.parametrize(
    ("recipe", "ranks"),
    [
        ("grpo", 2),
        *(
            pytest.param(recipe, n, marks=pytest.mark.soak)
            for recipe, n in (("grpo", 1), ("grpo", 3), ("ppo", 1), ("ppo", 2), ("ppo", 3))
        ),
    ],
)
def test_any_ranks_and_stage_have_the_gradients_of_one_padded_batch(
    llama: Path, critic: Path, tmp_path: Path, recipe: str, ranks: int
) -> None:
    compare(recipe, ranks, [3, 2, 1, 0], llama, critic, tmp_path)
