"""Samples the seeded requests of a batch with one kernel in vLLM's V1 model runner on CUDA.

The V1 runner draws the noise of each seeded request in a Python loop over generators: 5 ms per step with 512 requests,
and all our requests have seeds. Model Runner V2 has a kernel that computes the noise from the request's seed and the
token's position; this patch calls that kernel in the V1 runner. A seed then gives other tokens than the loop would.
They depend neither on the other requests of the batch nor on preemptions.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample


class SeededSampling:
    """Replaces `forward` of a runner's TopKTopPSampler, which `logprobs_v1.py` must have set to filtered logits."""

    def __init__(self, runner: Any) -> None:
        """Look up the parts of the runner, without changing it. Raises AttributeError: an unknown version of vLLM."""
        self._runner = runner
        self._sampler = runner.sampler.topk_topp_sampler
        self._forward = self._sampler.forward
        _ = runner.input_batch.greedy_reqs, runner.optimistic_seq_lens_cpu  # fails here, not in the first step
        count, device = int(runner.max_num_reqs), runner.device
        self._rows = torch.arange(count, dtype=torch.int32, device=device)
        # The logits are already divided by the temperature. The kernel reads it only to skip the noise where it is 0.
        self._temperatures = torch.ones(count, dtype=torch.float32, device=device)
        parameters = inspect.signature(gumbel_sample).parameters
        self._options: dict[str, Any] = {"is_drafting": False} if "is_drafting" in parameters else {}  # new in 0.32

    def install(self) -> None:
        """Replace `forward`. All workers of an engine must do so, or none."""
        self._sampler.forward = self.forward

    def forward(
        self, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return sampled ids [r] and the filtered logits, [r, vocabulary]. vLLM ignores the ids of greedy rows."""
        count, batch = len(logits), self._runner.input_batch
        if batch.num_reqs != count or len(generators) + len(batch.greedy_reqs) != count:
            sampled, filtered = self._forward(logits, generators, k, p)  # a row has neither a seed nor greedy sampling
            return sampled, filtered
        filtered = apply_top_k_top_p(logits, k, p)
        # One array for seeds and positions, so that a step makes one copy to the GPU.
        seeds_and_positions = np.zeros((2, count), np.int64)
        for row, generator in generators.items():
            seeds_and_positions[0, row] = _as_int64(generator.initial_seed())
        seeds_and_positions[1] = self._runner.optimistic_seq_lens_cpu[:count].numpy() - 1
        seeds, positions = torch.from_numpy(seeds_and_positions).pin_memory().to(logits.device, non_blocking=True)
        sampled = gumbel_sample(
            filtered, self._rows[:count], self._temperatures, seeds, positions, apply_temperature=False, **self._options
        )
        return sampled, filtered


def _as_int64(seed: int) -> int:
    """Return the int64 with the same bits: torch's seeds are unsigned, and the kernel takes int64."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
