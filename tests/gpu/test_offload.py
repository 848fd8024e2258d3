"""Offloading and Muon on real GPUs: what stays in main memory changes nothing but where it is.

Skipped on a machine without a GPU; two of them are needed for the last test alone. Run them with `pytest tests/gpu`.
Every case is an engine of DeepSpeed in a process of `tests.support.trainer_driver`, which all cases of a fixture share.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.fork_server import run_cases
from tests.support.plain_trainer import Arrays
from tests.support.tiny_models import write_tiny_model
from tests.support.trainer_driver import Case

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]

ALL = "optimizer+parameters"
OFFLOADS = [(1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, ALL)]
# Log-probabilities after three steps, in nats: float32 differs by the order of sums, which Adam's division by small
# roots enlarges; in bfloat16 a master that differs in its last bits may round to another weight.
TOLERANCE = {"float32": 5e-3, "bfloat16": 0.1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "llama", dtype="float32")


def close(found: Arrays, wanted: Arrays, dtype: str) -> None:
    """Same losses and gradients, and the same model after three steps that changed it."""
    for kind in ("losses", "norms"):
        np.testing.assert_allclose(found[kind], wanted[kind], rtol=1e-3 if dtype == "float32" else 0.05, atol=1e-3)
    difference = np.abs(found["after"] - wanted["after"])
    assert difference.max() < TOLERANCE[dtype] and difference.mean() < TOLERANCE[dtype] / 5
    assert np.abs(wanted["after"] - wanted["before"]).max() > 0.05, "the steps change the model"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloading_changes_nothing(model: Path, tmp_path: Path, dtype: str) -> None:
    """Three steps of two parts each, whose losses depend on the weights; a gradient that is not finite comes first."""
    shared = Case(name="", model=str(model), dtype=dtype, budget=48, device="cuda", does="parts")
    engines = [(1, "none"), (2, "none"), (3, "none"), *OFFLOADS]
    cases = [dataclasses.replace(shared, name=f"{s} {o}", stage=s, offload=o) for s, o in engines]
    seen = run_cases(cases, tmp_path)
    for stage, offload in OFFLOADS:
        found = seen[f"{stage} {offload}"]
        assert found["offloads"].tolist() == [True, offload == ALL], f"stage {stage}, {offload}"
        np.testing.assert_array_equal(found["after_discard"], found["before"])
        close(found, seen[f"{stage} none"], dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_muon_with_and_without_offloading(model: Path, tmp_path: Path, dtype: str) -> None:
    """The matrices are made orthogonal on the GPU, wherever the momentum is."""
    shared = Case(name="", model=str(model), dtype=dtype, budget=48, device="cuda", optimizer="muon")
    engines = [(0, "none"), (3, "none"), (2, "optimizer"), (3, ALL)]
    seen = run_cases([dataclasses.replace(shared, name=f"{s} {o}", stage=s, offload=o) for s, o in engines], tmp_path)
    for stage, offload in engines[2:]:
        close(seen[f"{stage} {offload}"], seen["3 none"], dtype)
    if dtype == "float32":  # in bfloat16 stage 0 sums micro-batches in another type
        close(seen["0 none"], seen["3 none"], dtype)


@pytest.mark.parametrize("offload", ["optimizer", ALL])
def test_offloaded_state_is_saved_and_restored(model: Path, tmp_path: Path, offload: str) -> None:
    """A new engine goes on from a checkpoint as the old one did, and an old one goes back."""
    (tmp_path / "saved").mkdir()
    case = Case(name="one", model=str(model), dtype="bfloat16", offload=offload, optimizer="muon", budget=48,
                device="cuda", does="resume", folder=str(tmp_path / "saved"))  # fmt: skip
    seen = run_cases([case], tmp_path)["one"]
    for name in ("back", "after"):
        np.testing.assert_allclose(seen[name], seen["straight"], atol=TOLERANCE["bfloat16"])
    assert np.abs(seen["loaded"] - seen["straight"]).max() > 0.01, "the third step changes the model"


@pytest.mark.parametrize("offload", ["none", "optimizer", ALL])
def test_weights_stream_from_where_they_are(model: Path, tmp_path: Path, offload: str) -> None:
    (tmp_path / "saved").mkdir()
    case = Case(name="one", model=str(model), dtype="bfloat16", offload=offload, device="cuda", does="stream",
                folder=str(tmp_path / "saved"))  # fmt: skip
    seen = run_cases([case], tmp_path)["one"]
    np.testing.assert_array_equal(seen["streamed"], seen["exported"])
    assert (seen["exported"] != seen["before"]).any()
    assert set(seen["streamed_from"].tolist()) == {"cpu" if offload == ALL else "cuda"}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(("stage", "offload"), [(2, "none"), (3, "none"), (3, ALL)])
def test_muon_on_two_gpus_is_muon_on_one(model: Path, tmp_path: Path, stage: int, offload: str) -> None:
    two = Case(name="two", model=str(model), stage=stage, offload=offload, optimizer="muon", budget=64, device="cuda",
               ranks=2)  # fmt: skip
    seen = run_cases([two, dataclasses.replace(two, name="one", ranks=1)], tmp_path)
    close(seen["two"], seen["one"], "float32")
