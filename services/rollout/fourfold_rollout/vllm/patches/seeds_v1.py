"""Samples the seeded requests of a batch at once in vLLM's first model runner on CUDA.

That runner draws the noise of each seeded request in a Python loop over generators: 5 ms per step with 512 requests,
and all our requests have seeds. vLLM's second runner has a kernel that computes the noise from the request's seed and
the token's position; here the first runner uses it, too. A seed gives other tokens than the loop, as it does in the
second runner, but the same tokens in every batch and after a preemption.
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
        _ = runner.input_batch.greedy_reqs, runner.optimistic_seq_lens_cpu
        count, device = int(runner.max_num_reqs), runner.device
        self._rows = torch.arange(count, dtype=torch.int32, device=device)
        self._ones = torch.ones(count, dtype=torch.float32, device=device)
        named = inspect.signature(gumbel_sample).parameters
        self._options: dict[str, Any] = {"is_drafting": False} if "is_drafting" in named else {}  # new in 0.32

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
        numbers = np.zeros((2, count), np.int64)
        for row, generator in generators.items():
            numbers[0, row] = _signed(generator.initial_seed())
        numbers[1] = self._runner.optimistic_seq_lens_cpu[:count].numpy() - 1
        seeds, positions = torch.from_numpy(numbers).pin_memory().to(logits.device, non_blocking=True)
        sampled = gumbel_sample(
            filtered, self._rows[:count], self._ones, seeds, positions, apply_temperature=False, **self._options
        )
        return sampled, filtered


def _signed(seed: int) -> int:
    return seed - (1 << 64) if seed >= 1 << 63 else seed
