"""Holds the timings of OpenRLHF on the same work, with which the table of `fourfold bench step` compares.

openrlhf 0.11.2, vLLM 0.26.0, DeepSpeed 0.19.8, torch 2.11 on two H200s; means of three steps after a warm-up.
separate: actor and reference on one GPU, an engine on the other, weights by NCCL. hybrid: everything on both GPUs, two
engines that sleep, weights by CUDA IPC. Its import of flash_attn was replaced by torch's attention without packing; all
samples have one length, so that there is almost no padding.
"""

from __future__ import annotations

from typing import Final

SECONDS: Final[dict[str, dict[str, float]]] = {
    "separate": {"generate": 10.88, "reference": 3.69, "train": 8.41, "publish": 1.04, "wall": 24.0},
    "hybrid": {"generate": 5.44, "reference": 2.14, "train": 5.52, "publish": 1.84, "wall": 14.9},
}
"""Seconds by layout and by the phases of `fourfold bench step`; "reference" includes the old log-probabilities."""
