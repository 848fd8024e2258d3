"""Log-probabilities of sampled tokens in vLLM's second model runner, the default for dense models on CUDA.

    add_request           notes the request's row of the table, at its place among the runner's requests
    apply_staged_writes   lets the GPU see the notes, as it does the runner's own; only after a request came
    sample                one kernel more behind the sampler's: it reads the logits that were sampled from

Nothing in it is done per token in Python, waits for the GPU, or is inside a CUDA graph: vLLM samples after the graph.
vLLM's copy of the sampled ids waits for the stream that all of this is on, so a value is there before its token.
"""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from torch import Tensor
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor

from fourfold_rollout.vllm.logprob_kernel import write_logprobs
from fourfold_rollout.vllm.logprob_table import NO_SLOT, slot_of

_NEEDED: Final = ("expanded_idx_mapping", "idx_mapping_np", "pos")


class LogprobSampler:
    """Stands before three methods of a runner's sampler."""

    def __init__(self, runner: Any, table: Tensor) -> None:
        """Find what it needs; nothing is changed yet.

        Args:
            runner: vLLM's.
            table: float32 [slots, width], as the GPU sees it.

        Raises:
            AttributeError, ValueError: this vLLM has another sampler.
        """
        self._sampler = runner.sampler
        self._states = runner.req_states
        self._table = table
        self._add_request = self._sampler.add_request
        self._apply_staged_writes = self._sampler.apply_staged_writes
        self._sample = self._sampler.sample
        names = list(inspect.signature(self._sample).parameters)
        self._rows_at, self._rows_np_at, self._positions_at = (names.index(name) for name in _NEEDED)
        self._slots = UvaBackedTensor(self._states.max_num_reqs, dtype=torch.int32)
        self._slots.np[:] = NO_SLOT
        self._slots.copy_to_uva()
        self._unseen = True
        _ = self._states.prompt_len.gpu, self._states.prefill_len.gpu

    def install(self) -> None:
        """Begin."""
        self._sampler.add_request = self.add_request
        self._sampler.apply_staged_writes = self.apply_staged_writes
        self._sampler.sample = self.sample

    def add_request(self, req_idx: int, *arguments: Any) -> None:
        """Note the row of a request that is new, or comes back after a preemption; its parameters come last."""
        self._unseen = True
        self._slots.np[req_idx] = slot_of(arguments[-1])
        self._add_request(req_idx, *arguments)

    def apply_staged_writes(self) -> None:
        """Let the GPU see what came with new requests. vLLM copies it all in every step: a twentieth of a step."""
        if not self._unseen:
            return
        self._unseen = False
        self._slots.copy_to_uva()
        self._apply_staged_writes()

    def sample(self, logits: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Return sampled ids [r] and the logits that they were sampled from, [r, vocabulary]."""
        everything = (logits, *arguments)
        if not (self._slots.np[everything[self._rows_np_at]] >= 0).any():
            sampled, processed = self._sample(*everything, **options)
            return sampled, processed
        # A fused sampler would not show what it sampled from.
        sampled, processed = self._sample(*everything, **(options | {"return_logprobs": True}))
        write_logprobs(
            processed,
            sampled,
            states=everything[self._rows_at],
            slots=self._slots.gpu,
            prompt_lengths=self._states.prompt_len.gpu,
            prefill_lengths=self._states.prefill_len.gpu,
            positions=everything[self._positions_at],
            table=self._table,
        )
        return sampled, processed
