"""Peaks and memory of GPUs."""

from __future__ import annotations

import pytest

from fourfold.host.gpu_speed import gpu_speed


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", (989.5, 3.35)),
        ("NVIDIA H200", (989.5, 4.8)),
        ("NVIDIA H100 PCIe", (756, 2)),
        ("NVIDIA H100 NVL", (835, 3.9)),
        ("NVIDIA GH200 480GB", (989.5, 4)),
        ("NVIDIA B200", (2250, 8)),
        ("NVIDIA GB200", (2500, 8)),
        ("NVIDIA A100-SXM4-40GB", (312, 1.555)),
        ("NVIDIA A100-SXM4-80GB", (312, 2)),
        ("NVIDIA L40S", (362, 0.864)),
        ("NVIDIA L40", (181, 0.864)),
        ("NVIDIA L4", (121, 0.3)),
        ("NVIDIA A10G", (70, 0.6)),
        ("NVIDIA A10", (125, 0.6)),
        ("NVIDIA GeForce RTX 4090", None),
        ("", None),
    ],
)
def test_the_speed_is_known_by_the_name_that_cuda_gives(name: str, tera: tuple[float, float] | None) -> None:
    assert gpu_speed(name) == (None if tera is None else pytest.approx(tuple(1e12 * value for value in tera)))
