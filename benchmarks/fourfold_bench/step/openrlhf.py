"""The same work in OpenRLHF: openrlhf 0.11.2, vLLM 0.26.0, DeepSpeed 0.19.8, torch 2.11 on two H200s.

Means of three steps after a warm-up, in seconds. separate: actor and reference on one GPU, an engine on the other,
weights by NCCL. hybrid: everything on both GPUs, two engines that sleep, weights by CUDA IPC. Its flash_attn import was
a stand-in (torch's attention without packing; all samples have one length, so that there is next to no padding).
"""

from __future__ import annotations

from typing import Final

from fourfold_bench.step.settings import Settings

SECONDS: Final[dict[str, dict[str, float]]] = {
    "separate": {"generate": 10.88, "reference": 3.69, "train": 8.41, "publish": 1.04, "wall": 24.0},
    "hybrid": {"generate": 5.44, "reference": 2.14, "train": 5.52, "publish": 1.84, "wall": 14.9},
}
"""By layout, under the names of our phases; its log-probabilities of the old policy are in "reference"."""


def same_work(settings: Settings) -> bool:
    """Whether a benchmark does what these numbers were measured on."""
    sizes = (settings.shape, settings.prompts, settings.group_size, settings.prompt_tokens, settings.new_tokens)
    return settings.gpus == 2 and sizes == ("0.43b", 64, 8, 64, 512) and settings.kl_coef > 0
