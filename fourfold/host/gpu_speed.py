"""The speed of a GPU by its name: dense products in bfloat16, and reads of its memory.

From the data sheets of NVIDIA and AMD: half of the FLOP/s advertised "with sparsity". A board with a lower power limit
has less.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple


class GpuSpeed(NamedTuple):
    """The speed of a GPU by its data sheet."""

    flops: float  # dense bfloat16 FLOP/s
    bytes_per_second: float  # of its memory


# By a part of the name in CUDA; the first match counts.
_SPEEDS: Final = (
    (r"\bGB[23]00\b", GpuSpeed(2500e12, 8e12)),  # nvidia.com/en-us/data-center/gb200-nvl72, gb300-nvl72: 360 PF of 72
    (r"\bB[23]00\b", GpuSpeed(2250e12, 8e12)),  # nvidia.com/en-us/data-center/hgx: 36 PFLOPS of 8, sparse
    (r"\bB100\b", GpuSpeed(1750e12, 8e12)),  # NVIDIA Blackwell architecture brief
    (r"\bH100 NVL\b", GpuSpeed(835e12, 3.9e12)),  # nvidia.com/en-us/data-center/h100
    (r"\bH100 PCIe\b", GpuSpeed(756e12, 2e12)),
    (r"\bH200 NVL\b", GpuSpeed(835e12, 4.8e12)),  # nvidia.com/en-us/data-center/h200
    (r"\bGH200 480GB\b", GpuSpeed(989.5e12, 4e12)),  # 96 GB of HBM3
    (r"\bG?H200\b", GpuSpeed(989.5e12, 4.8e12)),  # the SXM boards
    (r"\bG?H100\b|\bH800\b", GpuSpeed(989.5e12, 3.35e12)),
    (r"\bH20\b", GpuSpeed(148e12, 4e12)),
    (r"\bA100.*40GB\b", GpuSpeed(312e12, 1.555e12)),
    (r"\bA[18]00\b", GpuSpeed(312e12, 2e12)),  # nvidia.com/en-us/data-center/a100
    (r"\bA40\b", GpuSpeed(150e12, 0.696e12)),
    (r"\bA30\b", GpuSpeed(165e12, 0.933e12)),
    (r"\bA10G\b", GpuSpeed(70e12, 0.6e12)),  # aws.amazon.com/ec2/instance-types/g5
    (r"\bA10\b", GpuSpeed(125e12, 0.6e12)),
    (r"\bL40S\b", GpuSpeed(362e12, 0.864e12)),  # nvidia.com/en-us/data-center/l40s
    (r"\bL40\b", GpuSpeed(181e12, 0.864e12)),
    (r"\bL4\b", GpuSpeed(121e12, 0.3e12)),
    (r"\bMI300X\b", GpuSpeed(1307e12, 5.3e12)),  # amd.com/en/products/accelerators/instinct/mi300
)


def gpu_speed(name: str) -> GpuSpeed | None:
    """Return the speed of a GPU by its name in CUDA, or None when it is unknown."""
    return next((speed for pattern, speed in _SPEEDS if re.search(pattern, name)), None)
