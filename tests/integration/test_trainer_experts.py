"""A tiny mixture of experts on real DeepSpeed engines: experts under every ZeRO stage, and the routers' loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.test_trainer_deepspeed import check
from tests.support.fork_server import run_cases
from tests.support.plain_trainer import Arrays, plain
from tests.support.trainer_driver import Case

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

COEF = 1.0


@pytest.fixture(scope="module")
def mixtral(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("mixtral", 0, "float32")


@pytest.fixture(scope="module")
def balanced(mixtral: Path) -> Arrays:
    return plain(mixtral, router_coef=COEF)


def case(name: str, mixtral: Path, *, coef: float = COEF, budget: int = 512, stage: int = 3, **more: Any) -> Case:
    return Case(name=name, model=str(mixtral), stage=stage, router_coef=coef, budget=budget, **more)


def test_experts_at_stage_3_learn_with_the_routers_loss_what_plain_pytorch_learns(
    mixtral: Path, balanced: Arrays, tmp_path: Path
) -> None:
    seen = run_cases([case("whole", mixtral), case("checkpointing", mixtral, checkpointing=True)], tmp_path)
    check(seen["whole"], balanced)
    check(seen["checkpointing"], balanced)  # a layer that runs again adds nothing
    norms = plain(mixtral)["norms"]
    assert np.abs(np.subtract(norms, balanced["norms"])).max() > 0.05  # the routers' loss is there


def test_experts_learn_the_same_at_every_stage_and_on_two_ranks(
    mixtral: Path, balanced: Arrays, tmp_path: Path
) -> None:
    truth = plain(mixtral)
    seen = run_cases([case(f"stage {n}", mixtral, coef=0.0, budget=48, stage=n) for n in range(4)], tmp_path)
    for found in seen.values():
        check(found, truth)
    check(run_cases([case("stage 0", mixtral, stage=0)], tmp_path)["stage 0"], balanced)
    check(run_cases([case("two", mixtral, coef=0.0, budget=64, ranks=2)], tmp_path)["two"], truth)


@pytest.mark.soak
def test_the_scale_of_the_routers_loss_does_not_depend_on_the_split(
    mixtral: Path, balanced: Arrays, tmp_path: Path
) -> None:
    split = run_cases([case("split", mixtral, budget=48)], tmp_path)["split"]
    two = run_cases([case("two", mixtral, budget=64, ranks=2)], tmp_path)["two"]
    alone = np.array(plain(mixtral)["norms"])
    for found in (split, two):
        # Its gradient is that of a product of means over a micro-batch: near that of the whole step, not the same.
        np.testing.assert_allclose(found["norms"][0], balanced["norms"][0], rtol=0.05)
        assert abs(found["norms"][0] - alone[0]) > 0.02


def test_ranks_that_share_a_row_have_the_routers_loss_of_the_whole_row(
    mixtral: Path, balanced: Arrays, tmp_path: Path
) -> None:
    check(run_cases([case("shared", mixtral, ranks=2, sequence=2, checkpointing=True)], tmp_path)["shared"], balanced)


def test_experts_are_sent_as_they_are_exported_at_every_stage(mixtral: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    cases = [
        case(f"stage {n}", mixtral, stage=n, does="stream", dtype=dtype, folder=str(tmp_path / "runs" / f"{n} {dtype}"))
        for n, dtype in ((0, "float32"), (1, "bfloat16"), (2, "bfloat16"), (3, "bfloat16"))
    ]
    for found in run_cases(cases, tmp_path).values():
        np.testing.assert_array_equal(found["streamed"], found["exported"])
        assert np.abs(found["exported"] - found["before"]).max() > 0
