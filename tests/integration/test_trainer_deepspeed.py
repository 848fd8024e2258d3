"""Real DeepSpeed engines on tiny models, ZeRO stages 0 to 3, one and two ranks.

The truth is a plain PyTorch loop over the whole batch: `tests/support/plain_trainer.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.fork_server import run_cases
from tests.support.plain_trainer import Arrays, plain, plain_parts, plain_ppo
from tests.support.tiny_models import write_tiny_model
from tests.support.trainer_driver import REPOSITORY, Case, config_of

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

KL = {"kl": {"coef": 0.1}}
PPO = {"preset": "ppo"}
# Matrices above the size that DeepSpeed keeps whole on every rank.
WIDE = {"hidden_size": 256, "intermediate_size": 512}
TinyModel = Callable[..., Path]


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
def truth_of_parts(llama: Path) -> Arrays:
    return plain_parts(llama)


@pytest.fixture(scope="module")
def one_rank(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Arrays]:
    model = str(llama)
    cases = [
        *(Case(name=f"stage {n}", model=model, stage=n, budget=48) for n in range(4)),
        *(Case(name=f"parts {n}", model=model, stage=n, budget=48, does="parts") for n in range(4)),
        Case(name="whole", model=model),
        Case(name="kl", model=model, algorithm=KL, budget=48),
        Case(name="ppo", model=model, algorithm=PPO, budget=48, mini_batches=2),
        Case(name="gradient checkpointing", model=model, checkpointing=True, budget=48),
        *(Case(name=f"poison {n}", model=model, stage=n, algorithm=KL, does="poison", budget=48) for n in range(4)),
        Case(name="poison bfloat16", model=model, algorithm=KL, dtype="bfloat16", does="poison"),
        Case(name="clean bfloat16", model=model, algorithm=KL, dtype="bfloat16"),
        Case(name="float32 logits", model=model, algorithm=KL, dtype="bfloat16", head_dtype="float32"),
    ]
    return run_cases(cases, tmp_path_factory.mktemp("one-rank"))


# Its gradients would be summed in bfloat16.
REFUSED = [(0, "bfloat16")]
STAGES = range(4)


@pytest.fixture(scope="module")
def resumed(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Arrays]:
    """Run the cases that save and load."""
    folder = tmp_path_factory.mktemp("resumed")
    kinds: dict[str, dict[str, Any]] = {
        "float32": {},
        "bfloat16": {"dtype": "bfloat16"},
        "critic": {"algorithm": PPO},
    }
    cases = []
    for stage, (kind, more) in itertools.product(STAGES, kinds.items()):
        if (stage, kind) in REFUSED:
            continue
        name = f"resume {kind} {stage}"
        (folder / name).mkdir()
        cases.append(Case(name=name, model=str(llama), stage=stage, does="resume", folder=str(folder / name), **more))
    return run_cases(cases, folder)


@pytest.mark.parametrize("name", ["stage 0", "stage 1", "stage 2", "stage 3", "whole", "gradient checkpointing"])
def test_every_stage_and_split_learns_what_plain_pytorch_learns(
    one_rank: dict[str, Arrays], truth: dict[float, Arrays], name: str
) -> None:
    check(one_rank[name], truth[0.0])


def check_parts(found: Arrays, wanted: Arrays) -> None:
    """The same, and what was discarded left nothing."""
    np.testing.assert_array_equal(found["after_discard"], found["before"])
    np.testing.assert_allclose(found["entropies"], wanted["entropies"], atol=2e-5)
    check(found, wanted)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_of_parts_learns_what_plain_pytorch_learns(
    one_rank: dict[str, Arrays], truth_of_parts: Arrays, stage: int
) -> None:
    check_parts(one_rank[f"parts {stage}"], truth_of_parts)


def test_the_kl_loss_learns_what_plain_pytorch_learns(one_rank: dict[str, Arrays], truth: dict[float, Arrays]) -> None:
    check(one_rank["kl"], truth[0.1])
    assert abs(one_rank["kl"]["norms"][0] - one_rank["whole"]["norms"][0]) > 0.1


def test_ppo_with_a_critic_in_two_updates_learns_what_plain_pytorch_learns(
    one_rank: dict[str, Arrays], llama: Path
) -> None:
    wanted = plain_ppo(llama, config_of(Case(name="ppo", model=str(llama), algorithm=PPO, mini_batches=2)))
    check(one_rank["ppo"], wanted)
    np.testing.assert_allclose(one_rank["ppo"]["values"], wanted["values"], atol=2e-4)
    assert np.abs(one_rank["ppo"]["values"]).max() > 0.05


@pytest.mark.parametrize(
    ("stage", "kind"), [c for c in itertools.product(STAGES, ("float32", "bfloat16", "critic")) if c not in REFUSED]
)
def test_a_restored_checkpoint_goes_on_bit_for_bit(resumed: dict[str, Arrays], stage: int, kind: str) -> None:
    seen = resumed[f"resume {kind} {stage}"]
    assert (seen["loaded"] != seen["before"]).any() and (seen["loaded"] != seen["straight"]).any()
    np.testing.assert_array_equal(seen["after"], seen["straight"])
    np.testing.assert_array_equal(seen["back"], seen["straight"])
    np.testing.assert_array_equal(seen["values"], seen["straight_values"])
    assert bool(len(seen["values"])) == (kind == "critic")


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


def test_float32_logits_change_the_gradient_by_the_rounding_alone(one_rank: dict[str, Arrays]) -> None:
    rounded, exact = one_rank["clean bfloat16"]["norms"], one_rank["float32 logits"]["norms"]
    assert not np.array_equal(rounded, exact)
    np.testing.assert_allclose(rounded, exact, rtol=0.05)


# ---- two ranks -----------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.soak), 2, 3])
def test_two_ranks_learn_and_restore_as_one(
    llama: Path, truth: dict[float, Arrays], tmp_path: Path, stage: int
) -> None:
    check_restored(Case(name="two", model=str(llama), stage=stage, ranks=2, budget=64), truth[0.0], tmp_path)


@pytest.mark.soak
def test_ranks_with_a_second_partition_learn_and_restore_as_one(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", "llama_tied", sizes=WIDE, dtype="float32")
    case = Case(name="four", model=str(model), ranks=4, hpz=2, budget=64)
    check_restored(case, plain(model, kl_coef=0.0), tmp_path)


def check_restored(case: Case, truth: Arrays, folder: Path) -> None:
    saved = folder / "saved"
    saved.mkdir()
    (seen,) = run_cases([replace(case, does="restore", folder=str(saved))], folder).values()
    first = {"losses": seen["losses"][:6], "norms": seen["norms"][:3], "after": seen["straight"]}
    check({**seen, **first}, truth)
    np.testing.assert_array_equal(seen["after"], seen["straight"])
    assert sorted(p.name for p in saved.iterdir()) == [f"policy-{rank:03}.safetensors" for rank in range(case.ranks)]


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.soak), 2, 3])
def test_a_step_of_parts_on_two_ranks_learns_the_same(
    llama: Path, truth_of_parts: Arrays, tmp_path: Path, stage: int
) -> None:
    case = Case(name="two", model=str(llama), stage=stage, ranks=2, budget=64, does="parts")
    check_parts(run_cases([case], tmp_path)["two"], truth_of_parts)


# ---- exports while parameters are in flight ------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "lora"),
    [pytest.param(1, {}, id="1"), pytest.param(2, {}, id="2"), pytest.param(2, {"rank": 4}, id="2-adapters")],
)
def test_an_export_after_a_pass_without_gradients_has_all_weights(
    tmp_path: Path, ranks: int, lora: dict[str, int]
) -> None:
    model = write_tiny_model(tmp_path / "model", "llama_tied", sizes=WIDE, dtype="float32")
    more: dict[str, Any] = {"budget": 32, "algorithm": KL, "lora": lora, "folder": str(tmp_path / "folder")}
    case = Case(name="export", model=str(model), ranks=ranks, does="export", **more)
    found = run_cases([case], tmp_path, first=REPOSITORY / "tests/prefetch/sitecustomize.py")["export"]
    assert found["in_flight"] > 0, "or this tests nothing: see tests/prefetch"
    assert found["after pass"] == found["after step"]
    np.testing.assert_array_equal(found["logprobs again"], found["logprobs"])
    assert np.isfinite(found["losses"]).all()
