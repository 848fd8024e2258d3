"""The schedulers that vLLM gets: vLLM's own, with less to do for samples that decode.

The core process has one thread for all samples, and what it takes to schedule them is time in which the GPU waits;
`python -m fourfold_bench.scheduler` measures it. Steps in which all samples decode go through decoding.py. In the
others, with prompts among them, the block manager has a short way for those that decode: vLLM asks it for slots, and
tells it later how far blocks may be cached; with blocks of 16 tokens both walk through four layers for nothing in 13
of 16 steps.

What is scheduled stays the same, block by block; tests/integration/test_scheduler.py compares them.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from fourfold_rollout.vllm.patches.decoding import DecodingScheduler, obstacle

_log = logging.getLogger(__name__)

# How vLLM's scheduler asks for the slots of a running sample when it speculates on no token.
_OF_RUNNING: Final = {"num_lookahead_tokens": 0}


class RolloutScheduler(DecodingScheduler):
    """vLLM's synchronous scheduler with the short way, and with short loops for steps in which samples decode."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.decodes = _shorten_or_say_why(self.kv_cache_manager) and _decodes_or_say_why(self)


class AsyncRolloutScheduler(RolloutScheduler, AsyncScheduler):
    """vLLM's asynchronous scheduler with both."""

    ahead = 1


def scheduler_for(config: Any) -> type[Scheduler]:
    """Return the class that takes the place of the one which vLLM would choose.

    Args:
        config: vLLM's VllmConfig, complete.
    """
    # vLLM warns of every class but its own that it may not fit. `shorten` looks, and leaves what it does not know.
    logging.getLogger("vllm.config.scheduler").addFilter(lambda record: "custom scheduler" not in str(record.msg))
    return AsyncRolloutScheduler if config.scheduler_config.async_scheduling else RolloutScheduler


def shorten(manager: KVCacheManager) -> str:
    """Let `manager` answer at once where it would change nothing.

    Returns:
        Why it cannot, for people, and nothing was changed; empty: it does.
    """
    if reason := _obstacle(manager):
        return reason
    only = manager.coordinator.single_type_managers[0]
    size, blocks_of, cached_of = only.block_size, only.req_to_blocks, only.num_cached_block
    allocate, cache, nothing = manager.allocate_slots, manager.cache_blocks, manager.empty_kv_cache_blocks

    def allocate_slots(request: Request, num_new_tokens: int, *rest: Any, **options: Any) -> KVCacheBlocks | None:
        if num_new_tokens == 1 and options == _OF_RUNNING and not rest:
            name, end = request.request_id, request.num_computed_tokens + 1
            has_room = end <= len(blocks_of.get(name, ())) * size
            if has_room and min(end, request.num_tokens) < (cached_of.get(name, 0) + 1) * size:
                return nothing
        return allocate(request, num_new_tokens, *rest, **options)

    def cache_blocks(request: Request, num_computed_tokens: int) -> None:
        if num_computed_tokens >= (cached_of.get(request.request_id, 0) + 1) * size:
            cache(request, num_computed_tokens)

    shortened: Any = manager
    shortened.allocate_slots, shortened.cache_blocks = allocate_slots, cache_blocks
    return ""


def _shorten_or_say_why(manager: KVCacheManager) -> bool:
    try:
        reason = shorten(manager)
    except AttributeError as error:  # another vLLM than those that this was written for
        reason = str(error)
    if reason:
        _log.info("the scheduler asks the block manager for every token: %s", reason)
    return not reason


def _decodes_or_say_why(scheduler: DecodingScheduler) -> bool:
    try:
        reason = obstacle(scheduler)
    except AttributeError as error:  # likewise
        reason = str(error)
    if reason:
        _log.info("vLLM plans the steps in which samples decode, too: %s", reason)
    return not reason


def _obstacle(manager: KVCacheManager) -> str:
    """Return what makes an answer depend on more than a sample's last block."""
    if not manager.enable_caching:
        return "the prefix cache is off"
    if type(manager.coordinator) is not UnitaryKVCacheCoordinator:
        return f"the layers' caches differ ({type(manager.coordinator).__name__})"
    only = manager.coordinator.single_type_managers[0]
    if type(only) is not FullAttentionManager:
        return f"blocks leave while a sample runs ({type(only).__name__})"
    if only.block_size != manager.block_pool.hash_block_size:
        return f"blocks of {only.block_size} tokens are cached in parts of {manager.block_pool.hash_block_size}"
    return ""
