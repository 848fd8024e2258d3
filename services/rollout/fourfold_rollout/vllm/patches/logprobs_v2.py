"""Writes the log-probabilities of sampled tokens to a table in vLLM's Model Runner V2 (dense models on CUDA).

    add_request           stores the number of the request's table row, by the request's index in the runner
    apply_staged_writes   copies these numbers to the GPU with the runner's own state, only after a request was added
    sample                starts one more kernel after the sampler's, which reads the filtered logits

There is no Python work per token, no wait for the GPU and nothing inside a CUDA graph: vLLM samples after the graph.
vLLM's copy of the sampled ids waits for the stream that all of this runs on, so a value arrives before its token.
"""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from torch import Tensor
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor

from fourfold_rollout.vllm.logprob_kernel import write_logprobs
from fourfold_rollout.vllm.logprob_table import NO_SLOT, slot_of

# Arguments of vLLM's `sample` that are read here. Their positions differ between versions of vLLM.
_ARGUMENTS: Final = ("expanded_idx_mapping", "idx_mapping_np", "pos")


class LogprobSampler:
    """Wraps three methods of a runner's sampler; `table` is float32 [slots, width], mapped on the GPU."""

    def __init__(self, runner: Any, table: Tensor) -> None:
        """Look up the parts of the runner, without changing it. Raises AttributeError, ValueError: an unknown vLLM."""
        self._sampler = runner.sampler
        self._states = runner.req_states
        self._table = table
        self._add_request = self._sampler.add_request
        self._apply_staged_writes = self._sampler.apply_staged_writes
        self._sample = self._sampler.sample
        names = list(inspect.signature(self._sample).parameters)
        self._rows_at, self._rows_np_at, self._positions_at = (names.index(name) for name in _ARGUMENTS)
        self._slots = UvaBackedTensor(self._states.max_num_reqs, dtype=torch.int32)
        self._slots.np[:] = NO_SLOT
        self._slots.copy_to_uva()
        self._has_new_requests = True
        _ = self._states.prompt_len.gpu, self._states.prefill_len.gpu  # fails here, not in the first step

    def install(self) -> None:
        self._sampler.add_request = self.add_request
        self._sampler.apply_staged_writes = self.apply_staged_writes
        self._sampler.sample = self.sample

    def add_request(self, req_idx: int, *arguments: Any) -> None:
        """Store the row of a request that is new or resumed. The last argument is its `SamplingParams`."""
        self._has_new_requests = True
        self._slots.np[req_idx] = slot_of(arguments[-1])
        self._add_request(req_idx, *arguments)

    def apply_staged_writes(self) -> None:
        """Copy the state of new requests to the GPU, if there are any. vLLM's copies in every step take 5 % of it."""
        if not self._has_new_requests:
            return
        self._has_new_requests = False
        self._slots.copy_to_uva()
        self._apply_staged_writes()

    def sample(self, logits: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Return sampled ids [r] and the logits after temperature, top-k and top-p, [r, vocabulary]."""
        all_arguments = (logits, *arguments)
        if not (self._slots.np[all_arguments[self._rows_np_at]] >= 0).any():
            sampled, processed = self._sample(*all_arguments, **options)
            return sampled, processed
        # Without this option a fused sampler does not return the logits after top-k and top-p.
        sampled, processed = self._sample(*all_arguments, **(options | {"return_logprobs": True}))
        write_logprobs(
            processed,
            sampled,
            states=all_arguments[self._rows_at],
            slots=self._slots.gpu,
            prompt_lengths=self._states.prompt_len.gpu,
            prefill_lengths=self._states.prefill_len.gpu,
            positions=all_arguments[self._positions_at],
            table=self._table,
        )
        return sampled, processed
