"""Seeded sampling of a whole batch at once in vLLM's first model runner on CUDA.

There, vLLM draws the noise of every seeded request in a Python loop of its own generators: 5 ms a step at 512 requests,
and all of ours have seeds. Its second runner has a kernel that makes the noise of a token from the request's seed and
the token's position; here the first one uses it, too. What a seed gives is not what the loop would give, as between
the two runners; it is the same in every batch and after a preemption.
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
    """Takes the place of `forward` in the TopKTopPSampler of a runner, which must give filtered logits."""

    def __init__(self, runner: Any) -> None:
        """Find what it needs; nothing is changed yet.

        Raises:
            AttributeError: this vLLM has another runner.
        """
        self._runner = runner
        self._sampler = runner.sampler.topk_topp_sampler
        self._forward = self._sampler.forward
        _ = runner.input_batch.greedy_reqs, runner.optimistic_seq_lens_cpu
        count, device = int(runner.max_num_reqs), runner.device
        self._rows = torch.arange(count, dtype=torch.int32, device=device)
        self._ones = torch.ones(count, dtype=torch.float32, device=device)
        named = inspect.signature(gumbel_sample).parameters
        self._options: dict[str, Any] = {"is_drafting": False} if "is_drafting" in named else {}  # 0.32 asks for it

    def install(self) -> None:
        """Begin. Every worker of an engine must, or none."""
        self._sampler.forward = self.forward

    def forward(
        self, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return sampled ids [r] and the logits that they were sampled from, [r, vocabulary].

        Greedy rows have no generator; their ids are not used.
        """
        count, batch = len(logits), self._runner.input_batch
        if batch.num_reqs != count or len(generators) + len(batch.greedy_reqs) != count:
            sampled, filtered = self._forward(logits, generators, k, p)  # somebody sampled without a seed
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
