"""The cosine of live and shadow gradients with real DeepSpeed, and a step that is the same with and without shadows.

The truth is one padded batch in plain transformers, in one process and float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
import transformers

from fourfold.metrics import GPU_PEAK
from tests.integration.test_trainer_state import content
from tests.support.fork_server import run_cases
from tests.support.plain_gradients import Gradients, group_advantages, policy_gradients, ragged
from tests.support.plain_trainer import Arrays
from tests.support.trainer_driver import VOCABULARY, Case, with_shadow_scores

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

TERMS: Final[dict[str, Any]] = {"kl": {"coef": 0.1}, "entropy_coef": 0.01}
NAMES: Final = ["shadow/gradient_cosine", "shadow/gradient_norm", "shadow/live_gradient_norm"]


@pytest.fixture(scope="module")
def llama(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama_tied", 0, "float32")


def truth(folder: Path, algorithm: dict[str, Any]) -> list[float]:
    """Return the cosine and both norms, of the shadow first, of the first step."""
    samples = with_shadow_scores(ragged("many", vocabulary=VOCABULARY))
    shadowed = [replace(one, score=one.shadow_score) for one in samples]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    kl_coef, entropy_coef = algorithm.get("kl", {}).get("coef", 0.0), algorithm.get("entropy_coef", 0.0)

    def flat(batch: Any) -> torch.Tensor:
        advantages = torch.from_numpy(group_advantages(batch)).double()[:, None]
        found: Gradients = policy_gradients(model, batch, advantages, kl_coef=kl_coef, entropy_coef=entropy_coef)
        return torch.cat([gradient.flatten() for gradient in found.values()])

    live, shadow = flat(samples), flat(shadowed)
    return [float(live @ shadow / live.norm() / shadow.norm()), float(shadow.norm()), float(live.norm())]


def case(name: str, llama: Path, folder: Path, **more: Any) -> Case:
    (folder / name).mkdir()
    return Case(name=name, model=str(llama), does="shadow", folder=str(folder / name), **{"budget": 64, **more})


def check_unchanged(seen: Arrays, folder: Path) -> None:
    """Weights, moments, random states and all other metrics are those of the step without shadow scores.

    Only the peak of a GPU's memory has the comparison in it.
    """
    plain, shadowed = content(folder / "plain"), content(folder / "shadowed")
    files = {path.name: path.read_bytes() for path in (folder / "plain").iterdir()}  # these have the random states
    assert files == {path.name: path.read_bytes() for path in (folder / "shadowed").iterdir()}
    assert plain.keys() == shadowed.keys() and len(plain) > 3
    for key, values in plain.items():
        np.testing.assert_array_equal(shadowed[key], values, err_msg=key)
    np.testing.assert_array_equal(seen["shadowed logprobs"], seen["plain logprobs"])
    metrics = [key for key in seen if GPU_PEAK not in key]
    names = {key.removeprefix("plain ") for key in metrics if key.startswith("plain ")}
    extra = {key.removeprefix("shadowed ") for key in metrics if key.startswith("shadowed ")} - names
    assert extra == {f"{step} {name}" for step in (1, 2) for name in [*NAMES, "shadow/seconds"]}
    for name in names:
        np.testing.assert_array_equal(seen[f"shadowed {name}"], seen[f"plain {name}"], err_msg=name)
    start = content(folder / "start")
    assert any((start[key] != plain[key]).any() for key in start.keys() & plain.keys())


def check(seen: Arrays, llama: Path, folder: Path, algorithm: dict[str, Any], *, tolerance: float = 1e-5) -> None:
    check_unchanged(seen, folder)
    found = [float(seen[f"shadowed 1 {name}"]) for name in NAMES]
    wanted = truth(llama, algorithm)
    assert abs(wanted[0]) < 0.9
    assert found[0] == pytest.approx(wanted[0], abs=tolerance)
    assert found[1:] == pytest.approx(wanted[1:], rel=tolerance)


@pytest.mark.parametrize(
    ("ranks", "mini_batches"),
    [(1, 1), (2, 1), (2, 2)],
)
def test_zero_3_compares_as_one_process_in_float64_and_changes_nothing(
    llama: Path, tmp_path: Path, ranks: int, mini_batches: int
) -> None:
    seen = run_cases([case("case", llama, tmp_path, ranks=ranks, mini_batches=mini_batches)], tmp_path)["case"]
    check(seen, llama, tmp_path / "case", {})


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_every_stage_compares_all_terms_of_the_loss(llama: Path, tmp_path: Path, ranks: int) -> None:
    # Under ZeRO-3 a case with several ranks must be the first of its process.
    kinds: dict[str, dict[str, Any]] = {
        "stage 3": {"stage": 3},
        **{f"stage {n}": {"stage": n} for n in range(3)},
        "muon": {"stage": 2, "optimizer": "muon", "mini_batches": 2},
        "offload": {"stage": 2, "offload": "optimizer"},
    }
    if ranks == 1:
        kinds |= {
            "offload all": {"offload": "optimizer+parameters", "optimizer": "muon"},
            "checkpointing": {"checkpointing": True, "ema": 0.9},
        }
    run_cases(
        cases := [case(name, llama, tmp_path, ranks=ranks, algorithm=TERMS, **kinds[name]) for name in kinds], tmp_path
    )
    for one in cases:
        check(np.load(tmp_path / f"{one.name}.npz"), llama, tmp_path / one.name, TERMS)


def test_other_models_change_nothing(llama: Path, tmp_path: Path) -> None:
    kinds: dict[str, dict[str, Any]] = {
        **{f"bfloat16 {n}": {"dtype": "bfloat16", "stage": n} for n in (1, 2, 3)},
        "adapters": {"lora": {"rank": 4}},
        "critic": {"algorithm": {"preset": "ppo"}},
    }
    seen = run_cases([case(name, llama, tmp_path, **kinds[name]) for name in kinds], tmp_path)
    for name in kinds:
        check_unchanged(seen[name], tmp_path / name)
        assert -1 < float(seen[name][f"shadowed 1 {NAMES[0]}"]) < 0.999
    wanted = truth(llama, {})
    for n in (1, 2, 3):
        assert float(seen[f"bfloat16 {n}"][f"shadowed 1 {NAMES[0]}"]) == pytest.approx(wanted[0], abs=0.02)
