"""Which GPUs a process may use, as CUDA reads CUDA_VISIBLE_DEVICES. The machine's GPUs are a fake NVML's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fourfold.cli import doctor
from fourfold.host import gpus
from fourfold.host.gpus import environment, machine_gpus, smallest_memory, visible_gpus
from tests.fakes.nvml import pynvml

GIB = 1 << 30


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three GPUs, the last one small."""
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    monkeypatch.setenv("FAKE_GPUS", "H200 141, H200 141, T400 4")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)


@pytest.fixture
def without_nvml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel's driver lists two GPUs, and nobody knows more."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(gpus, "_PROC", tmp_path)
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
    monkeypatch.setattr(gpus, "_PROC", tmp_path)
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
    assert environment(["2", "GPU-1"]) == {"CUDA_VISIBLE_DEVICES": "2,GPU-1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert environment([])["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert environment(["0"])["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST", "what the user says stays"


def test_the_doctor_says_what_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._gpus().text.startswith("3 GPUs: H200 with 141 GiB, H200 with 141 GiB, T400 with 4 GiB")
    assert "CUDA_VISIBLE_DEVICES" not in doctor._gpus().text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert "T400 with 4 GiB; CUDA_VISIBLE_DEVICES = '2,5' leaves 1 of them" in doctor._gpus().text
