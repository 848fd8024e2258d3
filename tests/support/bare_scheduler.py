"""Drives a scheduler of vLLM, or one of Fourfold's, without a model.

vLLM's core process has one thread for all samples. In every step the thread decides what the GPU computes next
(`schedule`) and handles what the GPU sampled (`update_from_output`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from fourfold_bench.models import write_config

BLOCK_TOKENS: Final = 16
TOKENS: Final = 50
"""Size of the vocabulary: a sample gets its tokens in turn."""
_CONTEXT: Final = 1024
_PROMPT_TOKENS: Final = 64


class BareScheduler:
    """A scheduler and its block manager, without a model."""

    def __init__(
        self,
        kind: type[Scheduler],
        *,
        samples: int,
        blocks: int,
        step_tokens: int = 0,
        context: int = _CONTEXT,
        log_stats: bool = False,
    ) -> None:
        """Make the scheduler.

        Args:
            kind: its class.
            samples: samples that run at once.
            blocks: blocks of the KV cache, of BLOCK_TOKENS tokens each.
            step_tokens: most tokens of a step; 0: the prompts of all samples.
            context: tokens of the longest sample.
            log_stats: collect statistics, as vLLM does for its logs.
        """
        config = _config(
            asynchronous=issubclass(kind, AsyncScheduler),
            samples=samples,
            blocks=blocks,
            step_tokens=step_tokens or samples * _PROMPT_TOKENS,
            context=context,
        )
        attention = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32)
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, hash_function)
        self._awaited: list[tuple[SchedulerOutput, set[str]]] = []
        self._ahead = 1 if issubclass(kind, AsyncScheduler) else 0
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)]
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            log_stats=log_stats,
            include_finished_set=log_stats,
        )

    def add(self, name: str, prompt: Sequence[int], *, tokens: int, salt: str = "", **wanted: Any) -> None:
        """Request `tokens` tokens after `prompt`; `wanted` are sampling parameters of vLLM."""
        parameters = SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True, **wanted)
        self.scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=list(prompt),
                sampling_params=parameters,
                pooling_params=None,
                cache_salt=salt or None,
                block_hasher=self._hasher,
            )
        )

    def abort(self, name: str) -> None:
        """Abort a sample that runs, waits or has ended."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> tuple[SchedulerOutput, Any]:
        """Schedule one step; return it, and the outputs of the step that ended, by client."""
        asked = self.scheduler.schedule()
        requests = self.scheduler.requests
        within_prompt = {name for name in asked.num_scheduled_tokens if requests[name].is_prefill_chunk}
        self._awaited.append((asked, within_prompt))
        if len(self._awaited) <= self._ahead:
            return asked, {}
        ended, within_prompt = self._awaited.pop(0)
        names = list(ended.num_scheduled_tokens)
        sampled = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=[[] if name in within_prompt else [self._sampled(name)] for name in names],
            logprobs=self._logprobs(names),
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        return asked, self.scheduler.update_from_output(ended, sampled)

    def _logprobs(self, names: Sequence[str]) -> LogprobsLists | None:
        """Return zeros if a sample requests log-probabilities."""
        requests = [self.scheduler.requests[name] for name in names if name in self.scheduler.requests]
        wanted: list[Any] = [request.sampling_params for request in requests]
        if all(one.num_logprobs is None for one in wanted):
            return None
        column = np.zeros((len(names), 1), np.int32)
        return LogprobsLists(column, column.astype(np.float32), column[:, 0])

    def _sampled(self, name: str) -> int:
        """Return the next token of a sample, which depends on its length only."""
        request = self.scheduler.requests.get(name)
        return request.num_output_tokens % TOKENS if request is not None else 0


def _config(*, asynchronous: bool, samples: int, blocks: int, step_tokens: int, context: int) -> VllmConfig:
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), "0.43b", context=context)
        config = VllmConfig(
            model_config=ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=context),
            cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=samples,
                max_num_batched_tokens=step_tokens,
                max_model_len=context,
                is_encoder_decoder=False,
                async_scheduling=asynchronous,
            ),
        )
    config.cache_config.num_gpu_blocks = blocks
    return config
