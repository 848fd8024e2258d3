"""Replaces vLLM's schedulers with subclasses that do less work for samples that decode.

The core process schedules all samples in one thread while the GPU waits. Steps in which all samples decode go through
decoding.py. In steps with prompts, `skip_idle_calls` shortens the calls of the KV cache manager for the samples that
decode: vLLM allocates a slot for each token and then caches the blocks that are full. With blocks of 16 tokens both
calls pass four layers and change nothing in 13 of 16 steps.

The schedule is the same, block by block; tests/integration/test_scheduler.py compares them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from fourfold_rollout.vllm.logprob_table import FIRST, GRAMMAR
from fourfold_rollout.vllm.patches.decoding import DecodingScheduler, obstacle
from fourfold_rollout.vllm.patches.grammars import EngineGrammars

_log = logging.getLogger(__name__)

# The options of `allocate_slots` with which vLLM's scheduler allocates the slot of a decoding sample.
_DECODE_OPTIONS: Final = {"num_lookahead_tokens": 0}


class RolloutScheduler(DecodingScheduler):
    """vLLM's synchronous scheduler with the short path and the decoding loops."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._grammars = EngineGrammars(self.vllm_config.model_config, self.structured_output_manager)
        self.decodes = _applied(
            "Short path of the KV cache manager", lambda: skip_idle_calls(self.kv_cache_manager)
        ) and _applied("Fast decode path", lambda: obstacle(self))

    def add_request(self, request: Request) -> None:
        """Queue a request; the probe comes first, because the new version's tokens are held back until it is compared.

        Samples that wait for memory, or whose tokens are computed again, would delay the probe by minutes.
        """
        wanted = request.sampling_params
        extra = (wanted.extra_args if wanted is not None else None) or {}
        if GRAMMAR in extra:
            self._grammars.attach(request, extra)
        super().add_request(request)
        if FIRST in extra:
            self.waiting.remove_request(request)
            self.waiting.prepend_request(request)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Remove all blocks from the prefix cache, also while samples run, when vLLM would refuse.

        Running samples keep their blocks for themselves. Only waiting samples could still read a cached block, because
        new samples have another cache salt; without waiting samples this costs nothing.
        """
        if reset_running_requests or not self.running:
            return super().reset_prefix_cache(reset_running_requests, reset_connector)
        if self.get_request_counts()[1]:
            pool = self.kv_cache_manager.block_pool
            pool.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})
        return True


class AsyncRolloutScheduler(RolloutScheduler, AsyncScheduler):
    """The same for vLLM's asynchronous scheduler."""

    ahead = 1


def scheduler_for(config: Any) -> type[Scheduler]:
    # vLLM warns that a custom scheduler may not fit. `skip_idle_calls` and `obstacle` check that: drop the warning.
    logging.getLogger("vllm.config.scheduler").addFilter(lambda record: "custom scheduler" not in str(record.msg))
    return AsyncRolloutScheduler if config.scheduler_config.async_scheduling else RolloutScheduler


def skip_idle_calls(manager: KVCacheManager) -> str:
    """Make `allocate_slots` and `cache_blocks` of `manager` return at once where they would change nothing.

    Returns why the manager was left unchanged, or an empty text.
    """
    if reason := _manager_obstacle(manager):
        return reason
    single_type = manager.coordinator.single_type_managers[0]  # the coordinator has one: all layers cache alike
    size, blocks_of, cached_of = single_type.block_size, single_type.req_to_blocks, single_type.num_cached_block
    allocate, cache, no_blocks = manager.allocate_slots, manager.cache_blocks, manager.empty_kv_cache_blocks

    def allocate_slots(request: Request, num_new_tokens: int, *rest: Any, **options: Any) -> KVCacheBlocks | None:
        if num_new_tokens == 1 and options == _DECODE_OPTIONS and not rest:
            name, end = request.request_id, request.num_computed_tokens + 1
            has_room = end <= len(blocks_of.get(name, ())) * size
            # vLLM's call would also cache the blocks that are full; here the first uncached block is not full.
            if has_room and min(end, request.num_tokens) < (cached_of.get(name, 0) + 1) * size:
                return no_blocks
        return allocate(request, num_new_tokens, *rest, **options)

    def cache_blocks(request: Request, num_computed_tokens: int) -> None:
        if num_computed_tokens >= (cached_of.get(request.request_id, 0) + 1) * size:
            cache(request, num_computed_tokens)

    shortened: Any = manager
    shortened.allocate_slots, shortened.cache_blocks = allocate_slots, cache_blocks
    return ""


def _applied(what: str, apply: Callable[[], str]) -> bool:
    """Run a check or a patch and return whether it succeeded; log the reason if not."""
    try:
        reason = apply()
    except AttributeError as error:  # an unknown version of vLLM
        reason = str(error)
    if reason:
        _log.info("%s disabled; using vLLM's scheduler: %s", what, reason)
    return not reason


def _manager_obstacle(manager: KVCacheManager) -> str:
    """Return why the result of a call may depend on more than a sample's last block; empty if it does not."""
    if not manager.enable_caching:
        return "the prefix cache is off"
    if type(manager.coordinator) is not UnitaryKVCacheCoordinator:
        return f"the layers' caches differ ({type(manager.coordinator).__name__})"
    single_type = manager.coordinator.single_type_managers[0]
    if type(single_type) is not FullAttentionManager:
        return f"blocks are freed while a sample runs ({type(single_type).__name__})"
    if single_type.block_size != manager.block_pool.hash_block_size:
        return f"blocks of {single_type.block_size} tokens are cached in parts of {manager.block_pool.hash_block_size}"
    return ""
