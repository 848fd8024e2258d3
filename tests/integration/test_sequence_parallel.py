"""Sequence parallelism with real ranks: DeepSpeed's exchange over gloo, and whole steps under ZeRO.

What one rank alone gives is the truth; tests/unit/nn/test_sequence.py has the same with ranks that are threads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch

from tests.support.fork_server import run_cases, run_modules
from tests.support.plain_trainer import Arrays
from tests.support.sequence_cases import CASES, check, float64_alone, make_model, run
from tests.support.trainer_driver import Case

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(400)]

TinyModel = Callable[..., Path]
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"kl": {"coef": 0.1}},
    "gspo": {"preset": "gspo"},
    "ppo": {"preset": "ppo"},
    # What a sample's other tokens are decides about each: its ratio as a whole.
    "masked": {"correction": {"kind": "sequence-mask", "low": 0.5, "high": 2.0}, "entropy_coef": 0.01},
}


@pytest.mark.parametrize(("count", "size"), [(4, 2), *(pytest.param(n, n, marks=pytest.mark.soak) for n in (2, 4))])
def test_the_exchange_of_deepspeed_gives_what_one_rank_gives(count: int, size: int, tmp_path: Path) -> None:
    run_modules(
        [("tests.support.sequence_ranks", *map(str, (rank, count, size, tmp_path))) for rank in range(count)],
        tmp_path / "ranks.log",
    )
    for index, case in enumerate(CASES):
        for seed in range(count // size):
            ranks = range(seed * size, (seed + 1) * size)
            parts = [safetensors.torch.load_file(tmp_path / f"{index}-{rank}.safetensors") for rank in ranks]
            with float64_alone():
                check(parts, run(case, make_model(case), seed=seed))


# ---- whole steps ---------------------------------------------------------------------


def case_of(name: str, model: Path, folder: Path, **settings: Any) -> Case:
    algorithm = ALGORITHMS[name]
    mini_batches = 2 if name == "ppo" else 1
    does = "parts" if settings.get("does") == "parts" else "train"
    named = f"{name} {does}"
    return Case(
        **{**settings, "does": does},
        name=named,
        model=str(model),
        algorithm=algorithm,
        budget=64,
        mini_batches=mini_batches,
        folder=str(folder / "x"),
    )


@pytest.fixture(scope="module")
def llama(tiny_model: TinyModel) -> Path:
    return tiny_model("llama", 0, "float32")


@pytest.fixture(scope="module")
def one_rank(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Arrays]:
    folder = tmp_path_factory.mktemp("one-rank")
    cases = [*(case_of(name, llama, folder) for name in ALGORITHMS), case_of("grpo", llama, folder, does="parts")]
    return run_cases(cases, folder)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("masked", {"ranks": 2}),
        ("ppo", {"ranks": 2}),
        ("gspo", {"ranks": 4, "checkpointing": True}),
        ("grpo", {"ranks": 2, "does": "parts"}),
        ("gspo", {"ranks": 2, "stage": 1}),
        *(
            pytest.param(name, settings, marks=pytest.mark.soak)
            for name, settings in (
                ("grpo", {"ranks": 2}),
                ("gspo", {"ranks": 2}),
                ("grpo", {"ranks": 4}),
                ("gspo", {"ranks": 2, "stage": 0}),
                ("gspo", {"ranks": 2, "stage": 2}),
            )
        ),
    ],
)
def test_ranks_that_share_rows_learn_as_one(
    one_rank: dict[str, Arrays], llama: Path, tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    case = case_of(name, llama, tmp_path, sequence=2, **settings)
    found, wanted = run_cases([case], tmp_path)[case.name], one_rank[case.name]
    np.testing.assert_allclose(found["before"], wanted["before"], atol=1e-5)
    np.testing.assert_allclose(found["losses"], wanted["losses"], atol=1e-5)
    np.testing.assert_allclose(found["norms"], wanted["norms"], rtol=1e-5)
    np.testing.assert_allclose(found["metrics"], wanted["metrics"], rtol=1e-4, atol=1e-5)  # tokens among them
    np.testing.assert_allclose(found["after"], wanted["after"], atol=2e-4)
    assert np.abs(found["after"] - found["before"]).max() > 0.05  # it did learn something
    np.testing.assert_allclose(found["values"], wanted["values"], atol=2e-4)
    if case.does == "train":
        # Adam makes a whole step of a gradient that is nearly 0, whatever its sign: a few elements may differ by more.
        np.testing.assert_allclose(found["weights"], wanted["weights"], atol=2e-4)
        assert np.linalg.norm(found["weights"] - wanted["weights"]) < 1e-6 * np.linalg.norm(wanted["weights"])
        assert len(found["metrics"]) > 30
