"""The GPUs that a process may use (from a fake NVML), and processors that multiply bfloat16 slowly."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from fourfold import config as configuration
from fourfold.cli import doctor
from fourfold.host import hardware
from fourfold.host.hardware import gpu_environment, machine_gpus, smallest_memory, visible_gpus
from fourfold_coordinator.cli import run
from tests.fakes.nvml import pynvml

GIB = 1 << 30
RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide three GPUs; the last one is small."""
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    monkeypatch.setenv("FAKE_GPUS", "H200 141, H200 141, T400 4")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)


@pytest.fixture
def without_nvml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove NVML; the kernel's driver lists two GPUs by their addresses."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(hardware, "_DRIVER", tmp_path)
    for name in ("0000:4b:00.0", "0000:05:00.0"):
        (tmp_path / name).mkdir()


def test_without_the_variable_all_are_visible() -> None:
    assert visible_gpus() == machine_gpus()
    assert [(gpu.id, gpu.name, gpu.memory_bytes) for gpu in visible_gpus()] == [
        ("0", "H200", 141 * GIB),
        ("1", "H200", 141 * GIB),
        ("2", "T400", 4 * GIB),
    ]


@pytest.mark.parametrize(
    ("named", "ids", "smallest"),
    [
        ("0,1", ["0", "1"], 141),
        (" 2, 0 ", ["2", "0"], 4),
        ("", [], None),
        ("-1", [], None),
        ("1,7,0", ["1"], 141),  # CUDA stops at the first that is not there
        ("GPU-1aaa,GPU-2", ["GPU-1aaa", "GPU-2"], 4),
        ("GPU-", [], None),  # which one is not said
        ("GPU-7", [], None),
        ("MIG-abc", ["MIG-abc"], None),
    ],
)
def test_the_variable_is_read_as_cuda_does(
    named: str, ids: list[str], smallest: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert [gpu.id for gpu in visible_gpus()] == ids
    assert smallest_memory(visible_gpus()) == (smallest and smallest * GIB)


def test_a_machine_without_gpus_shows_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hardware, "_DRIVER", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,GPU-1,MIG-2")
    for told in ("no driver", "H200 141, lost 141", ""):
        monkeypatch.setenv("FAKE_GPUS", told)
        assert visible_gpus() == []


def test_without_nvml_the_driver_counts_them(without_nvml: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [(gpu.id, gpu.name, gpu.memory_bytes) for gpu in visible_gpus()] == [
        ("0", "0000:05:00.0", None),
        ("1", "0000:4b:00.0", None),
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f,1,2")
    assert [gpu.id for gpu in visible_gpus()] == ["GPU-8f", "1"]
    assert smallest_memory(visible_gpus()) is None


def test_memory_that_the_driver_does_not_tell_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_GPUS", "GB10 none, H200 141")
    assert [gpu.memory_bytes for gpu in visible_gpus()] == [None, 141 * GIB]
    assert doctor.find_gpus() == ["GB10", "H200 with 141 GiB"]


def test_a_process_is_given_gpus_by_the_drivers_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_environment(["2", "GPU-1"]) == {"CUDA_VISIBLE_DEVICES": "2,GPU-1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert gpu_environment([])["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert gpu_environment(["0"])["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST", "what the user says stays"


def test_the_doctor_says_what_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._gpus().text.startswith("3 GPUs: H200 with 141 GiB, H200 with 141 GiB, T400 with 4 GiB")
    assert "CUDA_VISIBLE_DEVICES" not in doctor._gpus().text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert "T400 with 4 GiB; CUDA_VISIBLE_DEVICES = '2,5' hides all but 1" in doctor._gpus().text


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
    assert hardware.has_fast_bfloat16(path) is fast


def test_an_unknown_processor_counts_as_fast(tmp_path: Path) -> None:
    assert hardware.has_fast_bfloat16(tmp_path / "none")


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
    monkeypatch.setattr(run, "has_fast_bfloat16", lambda: fast)
    launch("quickstart", dtype)
    error = capsys.readouterr().err
    assert told in error and bool(told) == bool(error)


def test_the_quickstart_needs_no_such_processor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "has_fast_bfloat16", lambda: False)
    launch("quickstart")
    assert capsys.readouterr().err == ""


def launch(name: str, dtype: str = "") -> None:
    """Make the launcher of a recipe, optionally in another dtype."""
    config = configuration.load(RECIPES / f"{name}.toml")
    if dtype:
        config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    words = argparse.Namespace(launcher="local", ray_address="", listen="127.0.0.1:0")
    run.make_launcher(words, config, Path("run"))


def test_the_doctor_names_a_slow_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "has_fast_bfloat16", lambda: False)
    (check,) = [check for check in doctor.machine() if "without AVX-512" in check.text]
    assert check.state == "ok" and 'model.dtype = "float32"' in check.fix
