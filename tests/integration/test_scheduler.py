"""Fourfold's schedulers beside vLLM's own on the same random work: every step must be the same, block by block."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from benchmarks.scheduler import BLOCK_TOKENS, BareScheduler
from fourfold_rollout.vllm.scheduler import AsyncRolloutScheduler, RolloutScheduler, shorten

pytestmark = pytest.mark.integration

SAMPLES = 24
STEPS = 600
PAIRS = [(Scheduler, RolloutScheduler), (AsyncScheduler, AsyncRolloutScheduler)]


def step(bare: BareScheduler) -> dict[str, Any]:
    """What one step asks of the GPU, what the step that ended gave, and what is left."""
    asked, outputs = bare.step()
    cached = asked.scheduled_cached_reqs
    return {
        "new": [(new.req_id, new.block_ids, new.num_computed_tokens) for new in asked.scheduled_new_reqs],
        "running": (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens),
        "resumed": cached.resumed_req_ids,
        "tokens": asked.num_scheduled_tokens,
        "preempted": asked.preempted_req_ids,
        "finished": asked.finished_req_ids,
        "given": [
            (given.request_id, given.new_token_ids, given.finish_reason)
            for client in outputs.values()
            for given in client.outputs
        ],
        "free blocks": bare.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
    }


@pytest.mark.parametrize(("theirs", "ours"), PAIRS, ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("blocks", [40, 400], ids=["too small", "roomy"])
@pytest.mark.parametrize("second_runner", [False, True], ids=["runner 1", "runner 2"])
def test_every_step_is_vllms(theirs: type[Scheduler], ours: type[Scheduler], blocks: int, second_runner: bool) -> None:
    """Groups that share prompts, of all lengths, with aborts, salts, and, where the cache is small, preemption."""
    work = random.Random(blocks)
    vllm, fourfold = (BareScheduler(kind, samples=SAMPLES, blocks=blocks) for kind in (theirs, ours))
    for bare in (vllm, fourfold):
        bare.scheduler.use_v2_model_runner = second_runner
    counts = {"hits": 0, "preempted": 0, "finished": 0}
    names: list[str] = []
    for number in range(STEPS):
        if work.random() < 0.1:
            prompt = [work.randrange(50)] * work.randrange(1, 70)
            salt, tokens = work.choice(["", "a", "b"]), work.randrange(1, 120)
            for member in range(work.randrange(1, 5)):
                names.append(f"{number}-{member}")
                for bare in (vllm, fourfold):
                    bare.add(names[-1], prompt, tokens=tokens + member, salt=salt)
        if names and work.random() < 0.03:
            name = work.choice(names)
            for bare in (vllm, fourfold):
                bare.abort(name)
        expected = step(vllm)
        assert step(fourfold) == expected, f"step {number}"
        counts["hits"] += sum(computed > 0 for _, _, computed in expected["new"])
        # Either runner is told of preemption in a way of its own.
        counts["preempted"] += len(expected["preempted"] or ()) + len(expected["resumed"])
        counts["finished"] += sum(reason is not None for _, _, reason in expected["given"])
    assert counts["finished"] > 50, counts
    assert counts["hits"] > 10, counts
    if blocks < 100:
        assert counts["preempted"] > 5, counts


@pytest.mark.parametrize(("theirs", "ours"), PAIRS, ids=["synchronous", "asynchronous"])
def test_the_block_manager_is_asked_at_the_ends_of_blocks_alone(
    theirs: type[Scheduler], ours: type[Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The short way is taken: the test above would pass without it, too."""
    asked: list[int] = []
    manager_class = type(BareScheduler(theirs, samples=1, blocks=10).scheduler.kv_cache_manager)
    allocate = manager_class.allocate_slots

    def counted(self: Any, request: Any, *arguments: Any, **options: Any) -> Any:
        asked.append(request.num_computed_tokens)
        return allocate(self, request, *arguments, **options)

    monkeypatch.setattr(manager_class, "allocate_slots", counted)
    bare = BareScheduler(ours, samples=1, blocks=100)
    bare.add("one", [1] * 40, tokens=20 * BLOCK_TOKENS)
    for _ in range(20 * BLOCK_TOKENS + 2):
        bare.step()
    assert not bare.scheduler.running
    assert len(asked) < 20 * 4


def test_what_it_does_not_know_stays_vllms() -> None:
    manager = BareScheduler(Scheduler, samples=1, blocks=10).scheduler.kv_cache_manager
    manager.enable_caching = False
    assert shorten(manager) == "the prefix cache is off"
    assert "allocate_slots" not in vars(manager)
