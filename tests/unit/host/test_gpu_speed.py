"""Peaks of GPUs."""

from __future__ import annotations

import pytest

from fourfold.host.gpu_speed import gpu_speed


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA L4", 121),
        ("NVIDIA A10G", 70),
        ("NVIDIA A10", 125),
        ("NVIDIA GeForce RTX 4090", None),
        ("", None),
    ],
)
def test_the_peak_is_known_by_the_name_that_cuda_gives(name: str, tera: float | None) -> None:
    found = gpu_speed(name)
    assert (found.flops if found else None) == (None if tera is None else tera * 1e12)
