"""Writes the log-probabilities of sampled tokens to a table in vLLM's V1 model runner (CPU, and CUDA without V2).

    Sampler.forward --> Sampler.sample --> TopKTopPSampler    returns the filtered logits instead of the log_softmax of
                                                              all of them, which vLLM computes even if it is not used
          '-- our `sample`: writes the log-probabilities of the sampled tokens; log_softmax only on request

The runner knows the token of each row: the request's length after this step, less its prompt. Rows whose token vLLM
discards (chunked prompts, also after a preemption) write nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fourfold.arrays import Float32Array, Int32Array
from fourfold_rollout.vllm.logprob_table import slot_of

# (filtered logits [r, vocabulary], sampled ids [r], slots [r], prompt lengths [r], lengths with the last input [r])
Write = Callable[[Tensor, Tensor, Int32Array, Int32Array, Int32Array], None]

_SAMPLER_MODE: Final = "processed_logprobs"
_FILTERED: Final = "processed_logits"


class LogprobSampler:
    """Replaces `sample` of a runner's sampler."""

    def __init__(self, runner: Any) -> None:
        """Look up the parts of the runner, without changing it. Raises AttributeError: an unknown version of vLLM."""
        self.write: Write | None = None  # None: this worker does not write
        self._runner = runner
        self._sampler = runner.sampler
        self._filter = self._sampler.topk_topp_sampler
        self._sample = self._sampler.sample
        self._batch_of(0)

    def install(self) -> str:
        """Replace `sample`; return why it cannot be done, or an empty text."""
        if (self._sampler.logprobs_mode, self._filter.logprobs_mode) != (_SAMPLER_MODE, _SAMPLER_MODE):
            return f"the sampler's logprobs_mode is {self._sampler.logprobs_mode}, not {_SAMPLER_MODE}"
        self._sampler.logprobs_mode = self._filter.logprobs_mode = _FILTERED
        self._sampler.sample = self.sample
        return ""

    def sample(self, logits: Tensor, metadata: Any, *options: Any, **more: Any) -> tuple[Tensor, Tensor | None]:
        """Return sampled ids [r], and log-probabilities [r, vocabulary] if a request asks vLLM for them."""
        sampled, filtered = self._sample(logits, metadata, *options, **more)
        if filtered is None:  # all rows are greedy
            filtered = logits
        has_requests = self._runner.input_batch.num_reqs == len(logits)  # False in vLLM's dry runs
        if has_requests and self.write is not None:
            self._write(self.write, filtered, sampled)
        wanted = metadata.max_num_logprobs is not None or metadata.logprob_token_ids
        return sampled, self._sampler.compute_logprobs(filtered) if wanted else None

    def _write(self, write: Write, filtered: Tensor, sampled: Tensor) -> None:
        req_ids, discarded, prompts, lengths = self._batch_of(len(sampled))
        requests = self._runner.requests
        slots = np.fromiter((slot_of(requests[r].sampling_params) for r in req_ids), np.int32, len(sampled))
        slots[discarded] = -1
        if (slots >= 0).any():
            write(filtered, sampled, slots, prompts, lengths)

    def _batch_of(self, count: int) -> tuple[list[str], NDArray[np.bool_], Int32Array, Int32Array]:
        """Return, for the rows of this step: request id, whether the token is discarded, prompt length, length."""
        runner = self._runner
        batch = runner.input_batch
        lengths: Int32Array = runner.optimistic_seq_lens_cpu[:count].numpy()
        return batch.req_ids, runner.discard_request_mask.np[:count], batch.num_prompt_tokens[:count], lengths


def write_on_cpu(table: Float32Array) -> Write:
    """Return a writer to the table, float32 [slots, width], for logits in the host's memory."""

    def write(filtered: Tensor, sampled: Tensor, slots: Int32Array, prompts: Int32Array, lengths: Int32Array) -> None:
        chosen = filtered.gather(1, sampled.long().unsqueeze(1)).squeeze(1).float()
        values = (chosen - filtered.float().logsumexp(1)).numpy()
        indices = lengths - prompts
        mine = (slots >= 0) & (indices < table.shape[1])
        table[slots[mine], indices[mine]] = values[mine]

    return write


def write_on_gpu(table: Tensor) -> Write:
    """Return a writer to the table as mapped on the GPU. It copies 3 numbers per row and starts one kernel."""
    from fourfold_rollout.vllm.logprob_kernel import write_logprobs

    rows = torch.arange(0, device=table.device)

    def write(filtered: Tensor, sampled: Tensor, slots: Int32Array, prompts: Int32Array, lengths: Int32Array) -> None:
        nonlocal rows
        if len(rows) < len(slots):
            rows = torch.arange(2 * len(slots), device=table.device)
        numbers = torch.from_numpy(np.stack([slots, prompts, lengths - 1])).pin_memory()
        on_gpu = numbers.to(table.device, non_blocking=True)
        write_logprobs(
            filtered,
            sampled,
            states=rows,
            slots=on_gpu[0],
            prompt_lengths=on_gpu[1],
            prefill_lengths=on_gpu[1],
            positions=on_gpu[2],
            table=table,
        )

    return write
