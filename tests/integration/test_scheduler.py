"""Compares Fourfold's schedulers with vLLM's own on the same random work: every step must be equal, block by block."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler

from fourfold_rollout.vllm.logprob_table import FIRST
from fourfold_rollout.vllm.patches.decoding import obstacle
from fourfold_rollout.vllm.patches.scheduler import AsyncRolloutScheduler, RolloutScheduler, skip_idle_calls
from tests.support.bare_scheduler import BLOCK_TOKENS, TOKENS, BareScheduler

pytestmark = pytest.mark.integration

SAMPLES = 24
STEPS = 600
STEP_TOKENS = 60  # so that prompts are chunked
CONTEXT = 128
WANTED: list[dict[str, Any]] = [
    {},
    {},
    {"stop_token_ids": [7, 30]},
    {"stop_token_ids": [7, 30], "min_tokens": 20},
    {"logprobs": 0},
]
CACHED = ["req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens", "num_output_tokens", "all_token_ids"]
STEP = [
    "num_scheduled_tokens",
    "total_num_scheduled_tokens",
    "num_common_prefix_blocks",
    "preempted_req_ids",
    "finished_req_ids",
    "has_structured_output_requests",
    "pending_structured_output_tokens",
]
REQUEST = [
    "status",
    "output_token_ids",
    "all_token_ids",
    "num_computed_tokens",
    "num_in_flight_tokens",
    "num_output_placeholders",
    "num_stale_output_tokens",
    "async_tokens_to_discard",
    "is_prefill_chunk",
    "spec_token_ids",
    "block_hashes",
    "num_preemptions",
    "stop_reason",
]
PAIRS = [(Scheduler, RolloutScheduler), (AsyncScheduler, AsyncRolloutScheduler)]


def step(bare: BareScheduler) -> dict[str, Any]:
    """Run a step; return its schedule, the outputs of the step that ended, and the scheduler's state."""
    asked, outputs = bare.step()
    cached, pool = asked.scheduled_cached_reqs, bare.scheduler.kv_cache_manager.block_pool
    given = [output for client in outputs.values() for output in client.outputs]
    stats = [client.scheduler_stats for client in outputs.values() if client.scheduler_stats is not None]
    return {
        "new": [(new.req_id, new.block_ids, new.num_computed_tokens) for new in asked.scheduled_new_reqs],
        "running": {name: getattr(cached, name) for name in CACHED},
        "step": {name: getattr(asked, name) for name in STEP if hasattr(asked, name)},
        "order": list(asked.num_scheduled_tokens),
        "given": sorted(
            (
                output.request_id,
                output.new_token_ids,
                output.finish_reason,
                output.prefill_stats is None,
                output.new_logprobs is None,
                [event.type for event in output.events or ()],
            )
            for output in given
        ),
        "counts": [(one.num_running_reqs, one.num_waiting_reqs, one.kv_cache_usage) for one in stats],
        "gone": [client.finished_requests for client in outputs.values()],
        "requests": {name: state(request) for name, request in bare.scheduler.requests.items()},
        "left": [request.request_id for request in bare.scheduler.running],
        "free blocks": pool.get_num_free_blocks(),
        "cached blocks": len(pool.cached_block_hash_to_block),
    }


def state(request: Any) -> dict[str, Any]:
    """Return vLLM's fields of a sample."""
    return {name: list(value) if name.endswith("token_ids") else value for name, value in known(request)}


def known(request: Any) -> list[tuple[str, Any]]:
    return [(name, getattr(request, name)) for name in REQUEST if hasattr(request, name)]


@pytest.mark.parametrize(("theirs", "ours"), PAIRS, ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("blocks", [40, 400], ids=["too small", "roomy"])
@pytest.mark.parametrize("second_runner", [False, True], ids=["runner 1", "runner 2"])
def test_every_step_is_vllms(theirs: type[Scheduler], ours: type[Scheduler], blocks: int, second_runner: bool) -> None:
    """Groups that share prompts, of all lengths, with aborts, salts, and, where the cache is small, preemption."""
    work = random.Random(blocks)
    vllm, fourfold = (
        BareScheduler(kind, samples=SAMPLES, blocks=blocks, step_tokens=STEP_TOKENS, context=CONTEXT, log_stats=True)
        for kind in (theirs, ours)
    )
    for bare in (vllm, fourfold):
        bare.scheduler.use_v2_model_runner = second_runner
    counts = {"hits": 0, "preempted": 0, "finished": 0}
    names: list[str] = []
    for number in range(STEPS):
        if work.random() < 0.1:
            prompt = [work.randrange(50)] * work.randrange(1, 70)
            salt, tokens, wanted = work.choice(["", "a", "b"]), work.randrange(1, 120), work.choice(WANTED)
            tokens = max(tokens, wanted.get("min_tokens", 0))
            for member in range(work.randrange(1, 5)):
                names.append(f"{number}-{member}")
                for bare in (vllm, fourfold):
                    bare.add(names[-1], prompt, tokens=tokens + member, salt=salt, **wanted)
        if names and work.random() < 0.03:
            name = work.choice(names)
            for bare in (vllm, fourfold):
                bare.abort(name)
        if number % 50 in (40, 44):
            for bare in (vllm, fourfold):
                bare.scheduler.set_pause_state(PauseState.PAUSED_ALL if number % 50 == 40 else PauseState.UNPAUSED)
        if number % 100 == 70:
            for bare in (vllm, fourfold):
                bare.scheduler.reset_prefix_cache(reset_running_requests=True)
        expected = step(vllm)
        assert step(fourfold) == expected, f"step {number}"
        counts["hits"] += sum(computed > 0 for _, _, computed in expected["new"])
        # The two model runners get preemptions in different fields.
        counts["preempted"] += len(expected["step"]["preempted_req_ids"] or ()) + len(
            expected["running"]["resumed_req_ids"]
        )
        counts["finished"] += sum(reason is not None for _, _, reason, *_ in expected["given"])
    assert counts["finished"] > 50, counts
    assert counts["hits"] > 10, counts
    if blocks < 100:
        assert counts["preempted"] > 5, counts


@pytest.mark.parametrize(("theirs", "ours"), PAIRS, ids=["synchronous", "asynchronous"])
def test_the_block_manager_is_asked_at_the_ends_of_blocks_alone(
    theirs: type[Scheduler], ours: type[Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the short path is used: the test above would pass without it, too."""
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


def test_what_a_sample_does_not_end_with_is_not_looked_at_by_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the loops are used: the comparison would pass without them, too."""
    planned: list[int] = []
    taken: list[list[int]] = []
    plan, take = Scheduler._update_after_schedule, AsyncScheduler._update_request_with_output

    def planning(self: Any, step: Any) -> None:
        planned.extend(step.num_scheduled_tokens.values())
        plan(self, step)

    def taking(self: Any, request: Any, tokens: list[int], *options: Any, **more: Any) -> Any:
        taken.append(tokens)
        return take(self, request, tokens, *options, **more)

    monkeypatch.setattr(Scheduler, "_update_after_schedule", planning)
    monkeypatch.setattr(AsyncScheduler, "_update_request_with_output", taking)
    bare = BareScheduler(AsyncRolloutScheduler, samples=1, blocks=100)
    bare.add("one", [1] * 40, tokens=100)
    for _ in range(102):
        bare.step()
    assert not bare.scheduler.running
    assert planned == [40]
    assert taken == [[0], [99 % TOKENS]]


def test_samples_whose_tokens_were_computed_again_go_through_the_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[list[int]] = []
    take = AsyncScheduler._update_request_with_output

    def taking(self: Any, request: Any, tokens: list[int], *options: Any, **more: Any) -> Any:
        taken.append(list(tokens))
        return take(self, request, tokens, *options, **more)

    monkeypatch.setattr(AsyncScheduler, "_update_request_with_output", taking)
    bare = BareScheduler(AsyncRolloutScheduler, samples=1, blocks=100, step_tokens=100)
    bare.add("one", [1] * 40, tokens=100)
    for _ in range(50):
        bare.step()
    bare.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    bare.step()  # the step in flight ends
    bare.scheduler.reset_prefix_cache(reset_running_requests=True)
    bare.scheduler.set_pause_state(PauseState.UNPAUSED)
    asked, _ = bare.step()
    assert asked.num_scheduled_tokens == {"one": 40 + 50}
    for _ in range(60):
        bare.step()
    assert not bare.scheduler.running
    assert taken == [[0], [50 % TOKENS], [99 % TOKENS]], "the first token, the first after the prefill, the last"


@pytest.mark.parametrize(("theirs", "ours"), PAIRS, ids=["synchronous", "asynchronous"])
def test_prefixes_are_forgotten_while_samples_run(theirs: type[Scheduler], ours: type[Scheduler]) -> None:
    def waiting_hit(kind: type[Scheduler], *, forget: bool) -> tuple[bool, int]:
        """Return the answer to the reset, and the tokens that the waiting sample finds in the cache."""
        bare = BareScheduler(kind, samples=1, blocks=100)
        for name in ("runs", "waits"):
            bare.add(name, [1] * (2 * BLOCK_TOKENS + 1), tokens=30)
        bare.step()
        answer = not forget or bare.scheduler.reset_prefix_cache()
        started = [new for _ in range(60) for new in bare.step()[0].scheduled_new_reqs]
        assert [new.req_id for new in started] == ["waits"]
        return answer, started[0].num_computed_tokens

    assert waiting_hit(theirs, forget=True) == (False, 2 * BLOCK_TOKENS), "vLLM refuses while a sample runs"
    assert waiting_hit(ours, forget=False) == (True, 2 * BLOCK_TOKENS)
    assert waiting_hit(ours, forget=True) == (True, 0)


def test_without_waiting_samples_forgetting_touches_no_block() -> None:
    bare = BareScheduler(AsyncRolloutScheduler, samples=1, blocks=100)
    bare.add("runs", [1] * (2 * BLOCK_TOKENS + 1), tokens=30)
    bare.step()
    assert bare.scheduler.reset_prefix_cache()
    assert len(bare.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block) == 2


@pytest.mark.parametrize("ours", [RolloutScheduler, AsyncRolloutScheduler])
def test_a_probe_is_computed_before_samples_that_wait(ours: type[Scheduler]) -> None:
    bare = BareScheduler(ours, samples=4, blocks=100, step_tokens=64)
    for index in range(4):
        bare.add(f"{index}", [index] * 40, tokens=30)
    for _ in range(8):
        bare.step()
    bare.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    bare.step()
    bare.scheduler.reset_prefix_cache(reset_running_requests=True)
    bare.scheduler.set_pause_state(PauseState.UNPAUSED)
    bare.add("probe", [5] * 50, tokens=1, prompt_logprobs=0, extra_args={FIRST: True})
    asked, _ = bare.step()
    assert asked.num_scheduled_tokens["probe"] == 50
    assert len(asked.num_scheduled_tokens) == 2, "the others do not fit into the step"


def test_what_every_step_must_know_of_is_left_to_vllm() -> None:
    scheduler: Any = BareScheduler(AsyncRolloutScheduler, samples=1, blocks=10).scheduler
    assert obstacle(scheduler) == ""
    scheduler.num_spec_tokens = 2
    assert obstacle(scheduler) == "vLLM's num_spec_tokens is in use"


def test_what_it_does_not_know_stays_vllms() -> None:
    manager = BareScheduler(Scheduler, samples=1, blocks=10).scheduler.kv_cache_manager
    manager.enable_caching = False
    assert skip_idle_calls(manager) == "the prefix cache is off"
    assert "allocate_slots" not in vars(manager)
