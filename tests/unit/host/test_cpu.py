"""Processors that multiply bfloat16 slowly, and who is told."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from fourfold import config as configuration
from fourfold.cli import doctor
from fourfold.host import cpu
from fourfold_coordinator.cli import run

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.mark.parametrize(
    ("text", "fast"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512bw\n\nprocessor\t: 1\nflags\t\t: fpu avx2\n", True),
        ("processor\t: 0\nmodel name\t: some with avx512bw\nflags\t\t: fpu avx2 f16c\n", False),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", True),
    ],
    ids=["avx512", "avx2", "arm"],
)
def test_avx512_is_what_bfloat16_needs(text: str, fast: bool, tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    assert cpu.multiplies_bfloat16(path) is fast


def test_where_the_system_tells_nothing_there_is_no_warning(tmp_path: Path) -> None:
    assert cpu.multiplies_bfloat16(tmp_path / "none")


@pytest.mark.parametrize(
    ("dtype", "fast", "told"),
    [
        ("bfloat16", False, 'bfloat16": rollout-0, trainer-0 will take 4 to'),
        ("bfloat16", True, ""),
        ("float32", False, ""),
    ],
)
def test_a_run_says_that_its_dtype_is_slow_here(
    dtype: str, fast: bool, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "multiplies_bfloat16", lambda: fast)
    launch("quickstart", dtype)
    error = capsys.readouterr().err
    assert told in error and bool(told) == bool(error)


def test_the_quickstart_needs_no_such_processor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "multiplies_bfloat16", lambda: False)
    launch("quickstart")
    assert capsys.readouterr().err == ""


def launch(name: str, dtype: str = "") -> None:
    """Make the launcher of a recipe, perhaps in another dtype."""
    config = configuration.load(RECIPES / f"{name}.toml")
    if dtype:
        config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    words = argparse.Namespace(launcher="local", ray_address="", listen="127.0.0.1:0")
    run._launcher(words, config, Path("run"))


def test_the_doctor_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "multiplies_bfloat16", lambda: False)
    (check,) = [check for check in doctor.machine() if "without AVX-512" in check.text]
    assert check.state == "ok" and 'model.dtype = "float32"' in check.fix
