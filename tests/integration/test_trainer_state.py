"""Checkpoints between engines of other numbers of ranks and other ZeRO stages, and the average of the weights."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers

from fourfold_trainer.checkpoint.shards import STEP
from tests.integration.test_trainer_deepspeed import PPO
from tests.support.fork_server import run_cases
from tests.support.plain_trainer import Arrays, lookup, plain
from tests.support.trainer_driver import Case

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

DECAY = 0.6


@pytest.fixture(scope="module")
def llama(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama", 0, "float32")


def content(folder: Path) -> dict[str, Any]:
    """Return what the files of a checkpoint say together, by kind and parameter, without the random state."""
    pieces: dict[str, dict[int, Any]] = defaultdict(dict)
    for path in folder.glob("*.safetensors"):
        model = path.name.split("-")[0]
        for key, value in safetensors.numpy.load_file(path).items():
            if not key.startswith("rng."):
                kind, first, name = key.split("/", 2)
                assert int(first) not in pieces[f"{model}/{kind}/{name}"], "written by two ranks"
                pieces[f"{model}/{kind}/{name}"][int(first)] = value
    found = {}
    for key, parts in pieces.items():
        values = [parts[first] for first in sorted(parts)]
        if f"/{STEP}/" in key:
            found[key] = np.unique(values)
            continue
        ends = np.cumsum([0, *map(len, values)])
        assert sorted(parts) == ends[:-1].tolist(), f"{key} has holes"
        found[key] = np.concatenate(values)
    return found


def check_copy(source: Path, target: Path, *, muon: bool = False) -> None:
    """The same in both, bit for bit, whoever wrote it."""
    wanted, found = content(source), content(target)
    assert set(found) == set(wanted)
    kinds = ["master", "exp_avg", "exp_avg_sq", "step", *(["momentum"] if muon else [])]
    assert {key.rsplit("/", 1)[0] for key in wanted} == {
        *(f"{model}/{kind}" for model in ("policy", "critic") for kind in kinds),
        "policy/ema",
    }
    for key, value in wanted.items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)


def check_step(found: Arrays, wanted: Arrays) -> None:
    """The third step does what it does without an interruption, up to float32 rounding."""
    np.testing.assert_allclose(found["losses"][:2], wanted["losses"][4:6], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found["norms"], wanted["norms"][4:6], rtol=2e-5)
    np.testing.assert_allclose(found["straight"], wanted["straight"], atol=2e-5)
    np.testing.assert_allclose(found["straight_values"], wanted["straight_values"], atol=2e-5)


class Copies:
    """Runs cases of PPO with an average; every case has a folder for its checkpoint."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder = str(model), folder
        self.seen: dict[str, Arrays] = {}

    def case(self, name: str, *, source: str = "", **more: Any) -> Case:
        (self.folder / name).mkdir()
        return Case(
            name=name,
            model=self.model,
            algorithm=PPO,
            ema=DECAY,
            does="copy" if source else "restore",
            source=str(self.folder / source),
            folder=str(self.folder / name),
            **more,
        )

    def run(self, *cases: Case) -> None:
        self.seen |= run_cases(cases, self.folder)

    def check(self, name: str, source: str) -> None:
        assert (self.folder / f"{name}.json").read_text() == (self.folder / f"{source}.json").read_text()
        check_copy(self.folder / source, self.folder / name)
        check_step(self.seen[name], self.seen[source])

    def random(self, name: str, rank: int) -> Any:
        return safetensors.numpy.load_file(self.folder / name / f"policy-{rank:03d}.safetensors")["rng.cpu"]


@pytest.fixture(scope="module")
def copies(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Copies:
    """Two ranks at stage 3 save; one rank at every stage goes on; one rank saves for the other tests."""
    made = Copies(llama, tmp_path_factory.mktemp("copies"))
    made.run(
        made.case("two", ranks=2),
        *(made.case(f"one at {stage}", source="two", stage=stage) for stage in (3, 2, 1, 0)),
        made.case("one"),
    )
    return made


@pytest.mark.parametrize("stage", [3, 2, 1, 0])
def test_what_two_ranks_saved_one_goes_on_with_at_any_stage(copies: Copies, stage: int) -> None:
    copies.check(f"one at {stage}", "two")
    np.testing.assert_array_equal(copies.random(f"one at {stage}", 0), copies.random("two", 0))


@pytest.mark.parametrize(
    ("ranks", "stage"), [(3, 3), (2, 0), pytest.param(2, 1, marks=pytest.mark.soak), (2, 2), (2, 3)]
)
def test_what_one_rank_saved_several_go_on_with(copies: Copies, ranks: int, stage: int) -> None:
    name = f"{ranks} at {stage}"
    copies.run(copies.case(name, source="one", ranks=ranks, stage=stage))
    copies.check(name, "one")
    np.testing.assert_array_equal(copies.random(name, 0), copies.random("one", 0))
    for rank in range(1, ranks):  # new ones have random numbers of their own: of seed 0, after 2 updates
        seed = int.from_bytes(hashlib.sha256(f"0 {rank} 2".encode()).digest()[:8], "little")
        np.testing.assert_array_equal(copies.random(name, rank), torch.Generator().manual_seed(seed).get_state())


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.soak), 2, 3])
def test_bfloat16_keeps_its_masters_at_any_stage(llama: Path, tmp_path: Path, stage: int) -> None:
    made = Copies(llama, tmp_path)
    made.run(
        made.case("two", ranks=2, stage=stage, dtype="bfloat16"),
        *(made.case(f"one at {n}", source="two", stage=n, dtype="bfloat16") for n in (1, 2, 3)),
    )
    for n in (1, 2, 3):
        check_copy(tmp_path / "two", tmp_path / f"one at {n}")
        np.testing.assert_allclose(made.seen[f"one at {n}"]["straight"], made.seen["two"]["straight"], atol=0.1)


# ---- the average of the weights -------------------------------------------------------


@pytest.fixture(scope="module")
def averages(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Arrays]]:
    folder = tmp_path_factory.mktemp("averages")
    cases = [average_case(llama, folder, ranks=2, stage=3)]
    cases += [average_case(llama, folder, ranks=1, stage=stage) for stage in range(4)]
    return folder, run_cases(cases, folder)


def average_case(model: Path, folder: Path, *, ranks: int, stage: int) -> Case:
    name = f"average {ranks} {stage}"
    (folder / name).mkdir()
    return Case(
        name=name, model=str(model), ranks=ranks, stage=stage, ema=DECAY, does="average", folder=str(folder / name)
    )


def check_average(folder: Path, name: str, seen: Arrays, model: Path) -> None:
    wanted = seen["weights 0"]
    np.testing.assert_array_equal(seen["average 0"], wanted)
    for number in (1, 2, 3):
        wanted = DECAY * wanted + (1 - DECAY) * seen[f"weights {number}"]
    np.testing.assert_allclose(seen["average 3"], wanted, rtol=1e-5, atol=1e-7)
    assert np.abs(seen["average 3"] - seen["weights 3"]).max() > 5e-4
    np.testing.assert_array_equal(seen["after export"], seen["after"])  # the weights are back in their place
    np.testing.assert_array_equal(seen["again"], seen["weights 3"])
    np.testing.assert_array_equal(seen["average again"], seen["average 3"])
    exported: Any = transformers.AutoModelForCausalLM.from_pretrained(folder / f"{name} average 3")
    np.testing.assert_allclose(lookup(exported), plain(model, ema=DECAY)["average"], atol=2e-4)


@pytest.mark.parametrize(
    ("ranks", "stage"), [(1, 0), pytest.param(1, 1, marks=pytest.mark.soak), (1, 2), (1, 3), (2, 3)]
)
def test_the_average_is_what_plain_pytorch_averages(
    averages: tuple[Path, dict[str, Arrays]], llama: Path, ranks: int, stage: int
) -> None:
    folder, seen = averages
    name = f"average {ranks} {stage}"
    check_average(folder, name, seen[name], llama)


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.soak), 2])
def test_two_ranks_average_as_one(llama: Path, tmp_path: Path, stage: int) -> None:
    case = average_case(llama, tmp_path, ranks=2, stage=stage)
    check_average(tmp_path, case.name, run_cases([case], tmp_path)[case.name], llama)
