"""Muon and offloading in real DeepSpeed engines: what plain PyTorch makes of the same steps, at every ZeRO stage."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.integration.test_trainer_deepspeed import KL, check, check_parts
from tests.integration.test_trainer_state import Copies, check_copy, check_step, content
from tests.support.fork_server import run_cases
from tests.support.plain_muon import PlainMuon
from tests.support.plain_trainer import Arrays, plain, plain_parts
from tests.support.trainer_driver import Case

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

ALL = "optimizer+parameters"
OFFLOADS = [(1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, ALL)]
# Their code is that of the others.
REPEATED = [(1, "none"), (1, "optimizer"), (3, "optimizer")]
MUON = "muon"


@pytest.fixture(scope="module")
def llama(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama", 0, "float32")


@pytest.fixture(scope="module")
def truth(llama: Path) -> dict[str, Arrays]:
    return {"adamw": plain(llama), MUON: plain(llama, optimizer_of=PlainMuon)}


@pytest.fixture(scope="module")
def seen(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Arrays]:
    folder, model = tmp_path_factory.mktemp("optimizers"), str(llama)
    (folder / "saved").mkdir()
    cases = [
        Case(name="muon", model=model, stage=0, budget=48, optimizer=MUON),
        Case(name="offload", model=model, stage=2, budget=48, offload="optimizer"),
        Case(name="muon and offload", model=model, budget=48, optimizer=MUON, offload=ALL),
        Case(name="stream", model=model, dtype="bfloat16", offload=ALL, does="stream", folder=str(folder / "saved")),
    ]
    return run_cases(cases, folder)


@pytest.mark.parametrize("name", ["muon", "offload", "muon and offload"])
def test_an_engine_learns_what_plain_pytorch_learns(
    seen: dict[str, Arrays], truth: dict[str, Arrays], name: str
) -> None:
    check(seen[name], truth[MUON if MUON in name else "adamw"])
    assert np.abs(truth[MUON]["after"] - truth["adamw"]["after"]).max() > 0.01


def check_restored(seen: Arrays, truth: Arrays) -> None:
    """Three steps are those of plain PyTorch, and the third is made again from a checkpoint, bit for bit."""
    first = {"losses": seen["losses"][:6], "norms": seen["norms"][:3], "after": seen["straight"]}
    check({**seen, **first}, truth)
    np.testing.assert_array_equal(seen["after"], seen["straight"])


def test_deepspeed_keeps_in_main_memory_what_the_recipe_says(seen: dict[str, Arrays]) -> None:
    found = {name: arrays["offloads"].tolist() for name, arrays in seen.items() if "offloads" in arrays}
    kept = {"muon": [False, False], "offload": [True, False], "muon and offload": [True, True]}
    assert found == kept


def test_weights_stream_from_main_memory(seen: dict[str, Arrays]) -> None:
    found = seen["stream"]
    np.testing.assert_array_equal(found["streamed"], found["exported"])
    assert (found["exported"] != found["before"]).any()


@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        pytest.param(*case, marks=pytest.mark.soak if case in REPEATED else ())
        for case in [(0, "none"), (1, "none"), (2, "none"), (3, "none"), *OFFLOADS]
    ],
)
def test_muon_at_every_stage(llama: Path, truth: dict[str, Arrays], tmp_path: Path, stage: int, offload: str) -> None:
    folders = [str(tmp_path / name) for name in ("two ranks", "one rank")]
    for folder in folders:
        Path(folder).mkdir()
    model = str(llama)
    two = Case(name="two", model=model, stage=stage, offload=offload, optimizer=MUON, budget=64, ranks=2,
               does="restore", folder=folders[0])  # fmt: skip
    one = Case(name="one", model=model, stage=stage, offload=offload, optimizer=MUON, budget=48,
               does="resume", folder=folders[1])  # fmt: skip
    poison = Case(name="poison", model=model, stage=stage, offload=offload, optimizer=MUON, budget=48, algorithm=KL,
                  does="poison")  # fmt: skip
    seen = run_cases([two, one, poison], tmp_path)
    check_restored(seen["two"], truth[MUON])
    np.testing.assert_array_equal(seen["one"]["after"], seen["one"]["straight"])
    np.testing.assert_array_equal(seen["poison"]["after_poison"], seen["poison"]["before"])
    wanted = plain(llama, kl_coef=0.1, optimizer_of=PlainMuon)
    np.testing.assert_allclose(seen["poison"]["after"], wanted["after"], atol=2e-4)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.soak)])
def test_offloading_changes_where_things_are_and_nothing_else(llama: Path, tmp_path: Path, dtype: str) -> None:
    kinds = ("train", "parts", "poison")
    engines = [(1, "none"), (2, "none"), (3, "none"), *OFFLOADS]
    cases = [
        Case(
            name=f"{does} {stage} {offload}",
            model=str(llama),
            dtype=dtype,
            stage=stage,
            offload=offload,
            does=does,
            algorithm=KL,
            budget=48,
        )
        for (stage, offload), does in itertools.product(engines, kinds)
    ]
    seen = run_cases(cases, tmp_path)
    # Norms are summed in another order, which may round a weight of 8 bits another way.
    tolerance = 2e-5 if dtype == "float32" else 0.02
    for (stage, offload), does in itertools.product(OFFLOADS, kinds):
        found, wanted = seen[f"{does} {stage} {offload}"], seen[f"{does} {stage} none"]
        np.testing.assert_allclose(found["norms"], wanted["norms"], rtol=2e-5)
        np.testing.assert_allclose(found["after"], wanted["after"], atol=tolerance)
        assert found["offloads"].tolist() == [True, offload == ALL]
        assert np.abs(found["after"] - found["before"]).max() > 0.05
        if does == "poison":
            assert not np.isfinite(found["poisoned_norm"])
            np.testing.assert_array_equal(found["after_poison"], found["before"])
        if does == "parts" and dtype == "float32":
            check_parts(found, plain_parts(llama))


def goes_on(made: Copies, source: str, names: Sequence[str], dtype: str) -> None:
    """Each of these engines has loaded and saved the source's state, and made the third step."""
    for name in names:
        check_copy(made.folder / source, made.folder / name, muon=True)
        if dtype == "float32":
            check_step(made.seen[name], made.seen[source])
        else:
            np.testing.assert_allclose(made.seen[name]["straight"], made.seen[source]["straight"], atol=0.1)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.soak)])
def test_one_rank_goes_on_with_momentum_and_offloaded_moments_of_two_at_any_stage(
    llama: Path, tmp_path: Path, dtype: str
) -> None:
    made = Copies(llama, tmp_path)
    first = 0 if dtype == "float32" else 1  # stage 0 is refused in bfloat16
    engines = {f"{stage} {offload}": (stage, offload) for stage, offload in [(first, "none"), (3, "none"), *OFFLOADS]}
    common = {"optimizer": MUON, "dtype": dtype}
    made.run(
        made.case("two", ranks=2, stage=2, offload="optimizer", **common),
        *(made.case(n, source="two", stage=s, offload=o, **common) for n, (s, o) in engines.items()),
    )
    goes_on(made, "two", list(engines), dtype)


@pytest.mark.parametrize(
    ("stage", "offload"),
    [(2, "none"), *(pytest.param(*case, marks=pytest.mark.soak) for case in ((1, "none"), (3, ALL)))],
)
def test_two_ranks_go_on_with_momentum_and_offloaded_moments_of_one(
    llama: Path, tmp_path: Path, stage: int, offload: str
) -> None:
    made = Copies(llama, tmp_path)
    made.run(made.case("one", offload=ALL, optimizer=MUON))
    made.run(made.case("two", source="one", ranks=2, stage=stage, offload=offload, optimizer=MUON))
    goes_on(made, "one", ["two"], "float32")


def test_another_optimizer_begins_without_moments_of_what_it_trains_otherwise(llama: Path, tmp_path: Path) -> None:
    made = Copies(llama, tmp_path)
    made.run(
        made.case("adamw"),
        made.case("muon", source="adamw", optimizer=MUON),
        made.case("adamw again", source="muon"),
    )
    before, after, again = (content(tmp_path / name) for name in ("adamw", "muon", "adamw again"))
    kinds = ("exp_avg", "exp_avg_sq", "step")
    matrices = {f"{model}/{kind}" for model in ("policy", "critic") for kind in kinds}
    lost = set(before) - set(after)
    assert lost and {key.rsplit("/", 1)[0] for key in lost} == matrices
    assert all("_proj." in key for key in lost)
    # Moments that count less updates than their neighbours would be corrected too little: none of these is kept.
    assert not any("_proj." in key for key in again if key.rsplit("/", 1)[0] in matrices)
    assert np.isfinite(made.seen["muon"]["straight"]).all() and np.isfinite(made.seen["adamw again"]["straight"]).all()
