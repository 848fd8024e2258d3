"""Tests what a group keeps when its calls are interrupted, and how often engines send unfinished tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import DeadlinePassed, FourfoldError, PeerFault, Unavailable
from fourfold.host.clock import SYSTEM_CLOCK
from fourfold.rollout.client import Completion
from fourfold.rollout.group_requests import GroupRequest
from fourfold.rollout.stream_check import StreamCheck
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rpc.channel import open_channel
from fourfold.rpc.codec import pack_floats, pack_ints
from fourfold_coordinator.routing.registry import Member, Registry
from fourfold_coordinator.routing.replica import GivenUp, Replica, RetryBudget
from fourfold_coordinator.routing.router import Router
from fourfold_coordinator.training import group_sampling
from fourfold_coordinator.training.group_sampling import GroupSampler

ABORTED, STOP, LENGTH = rollout.FINISH_REASON_ABORTED, rollout.FINISH_REASON_STOP, rollout.FINISH_REASON_LENGTH
PROMPT = np.array([7, 8, 9], np.int32)
MAX_TOKENS = 6
END = 19  # the stop token


def chunk(index: int, *ids: int, version: int = 1, reason: Any = 0) -> rollout.SampleChunk:
    """Tokens of a sample; the log-probability of each is minus its id."""
    return rollout.SampleChunk(
        sample_index=index,
        token_ids=pack_ints(ids),
        logprobs=pack_floats(-np.array(ids, np.float32)),
        policy_version=version,
        finish_reason=reason,
    )


Step = rollout.SampleChunk | FourfoldError | asyncio.Event


class Script:
    """The clients of one engine: its n-th call yields the n-th list of chunks; it raises errors, and awaits events."""

    def __init__(self, *calls: list[Step]) -> None:
        self.calls = list(calls)
        self.requests: list[rollout.GenerateRequest] = []

    async def generate(self, request: rollout.GenerateRequest, *, timeout: float) -> AsyncIterator[rollout.SampleChunk]:
        self.requests.append(request)
        check = StreamCheck(request, peer="rollout")
        for step in self.calls.pop(0):
            if isinstance(step, FourfoldError):
                raise step
            if isinstance(step, asyncio.Event):
                await step.wait()
                continue
            check.add(step)
            yield step
        check.check_end()


class Bench:
    """A router with scripted engines, and a group of two samples."""

    def __init__(self, *scripts: Script) -> None:
        self.registry = Registry(clock=SYSTEM_CLOCK, tokenizer_sha256=b"t" * 32, ttl=60)
        self.router = Router(self.registry, open_channel=lambda m: open_channel(m.target, None), wait_seconds=5)
        self.sampler = GroupSampler(self.router, timeout=9, newest_version=lambda: 3, stop_token_ids=[END])
        for index, script in enumerate(scripts):
            self._join(f"rollout-{index}", script)
        self.budget = RetryBudget(infrastructure=1, data=0)
        self.tries: list[str] = []

    def _join(self, name: str, script: Script) -> None:
        self.registry.register(
            Member(
                member_id=name,
                incarnation=name[-1] * 32,
                role=Role.ROLE_ROLLOUT,
                target="127.0.0.1:9",
                tokenizer_sha256=b"t" * 32,
            )
        )
        replica = self.replica(name)
        replica.rollout, replica.vocabulary_size, replica.version = script, 20, 1  # type: ignore[assignment]
        self.router.set_unusable_reason(replica, "")

    def replica(self, name: str) -> Replica:
        return next(r for r in self.router.replicas(Role.ROLE_ROLLOUT) if r.member.member_id == name)

    @asynccontextmanager
    async def on_try(self) -> AsyncIterator[None]:
        """Note the begin and the end of each try."""
        self.tries.append("begin")
        try:
            yield
        except FourfoldError as error:
            self.tries.append(error.reason)
            raise
        self.tries.append("end")

    async def sample(self, *, count: int = 2, max_tokens: int = MAX_TOKENS) -> list[Completion]:
        request = GroupRequest(
            name="g",
            prompt_token_ids=PROMPT,
            params=rollout.SamplingParams(max_tokens=max_tokens, seed=40),
            count=count,
            version=1,
        )
        async with asyncio.timeout(10):
            finished: list[Completion] = []
            await self.sampler.sample(request, spend=self.budget.spend, on_try=self.on_try, on_finished=finished.append)
            return sorted(finished, key=lambda completion: completion.sample_index)


def plain(completions: list[Completion]) -> list[tuple[list[int], list[tuple[int, int]], int]]:
    for completion in completions:
        assert (completion.logprobs == -completion.token_ids).all(), "log-probabilities belong to their tokens"
        assert sum(span.token_count for span in completion.version_spans) == len(completion.token_ids)
    return [
        (c.token_ids.tolist(), [(s.policy_version, s.token_count) for s in c.version_spans], c.finish_reason)
        for c in completions
    ]


@pytest.fixture
async def make(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(*scripts: Script) -> Bench:
        benches.append(Bench(*scripts))
        return benches[-1]

    monkeypatch.setattr(group_sampling, "FLUSH_SECONDS", (0.02, 0.02))
    yield make
    for bench in benches:
        for replica in bench.router.replicas():
            await replica.channel.close()


Make = Callable[..., Bench]


async def test_a_group_that_is_not_interrupted_is_one_plain_request(make: Make) -> None:
    engine = Script([chunk(0, 1, END, reason=STOP), chunk(1, 2, 2), chunk(1, 3, version=2, reason=LENGTH)])
    bench = make(engine)
    assert plain(await bench.sample()) == [([1, END], [(1, 2)], STOP), ([2, 2, 3], [(1, 2), (2, 1)], LENGTH)]
    (request,) = engine.requests
    request.ClearField("flush_interval")
    assert request == rollout.GenerateRequest(
        request_id="g-0",
        prompt_token_ids=[7, 8, 9],
        sampling_params=rollout.SamplingParams(max_tokens=MAX_TOKENS, seed=40),
        sample_count=2,
        min_policy_version=1,
    )
    assert bench.tries == ["begin", "end"] and bench.router.engine_metrics() == {}


@pytest.mark.parametrize(
    "end",
    [
        [Unavailable("the connection broke")],
        [DeadlinePassed("too long")],
        [chunk(1, reason=ABORTED)],
        [Unavailable("drains", reason="DRAINING")],
    ],
    ids=["killed", "deadline", "aborted", "drains"],
)
async def test_an_interrupted_sample_continues_from_its_ids_and_a_finished_one_is_kept(
    make: Make, end: list[Step]
) -> None:
    first = Script([chunk(1, 2, 3), chunk(0, 1, END, reason=STOP), chunk(1, 4, version=2), *end])
    other = Script([chunk(0, 5, 6, version=3), chunk(0, END, version=3, reason=STOP)])
    bench = make(first, other)
    samples = plain(await bench.sample())
    assert samples == [([1, END], [(1, 2)], STOP), ([2, 3, 4, 5, 6, END], [(1, 2), (2, 1), (3, 3)], STOP)]
    (request,) = other.requests
    assert (request.request_id, list(request.prompt_token_ids)) == ("g-1", [7, 8, 9, 2, 3, 4])
    assert (request.sample_count, request.sampling_params.max_tokens) == (1, MAX_TOKENS - 3)
    assert request.min_policy_version == 1
    assert bench.router.engine_metrics() == {"rollout/continued_tokens": 5.0}


async def test_samples_without_a_token_are_sampled_again_with_their_seeds(make: Make) -> None:
    first = Script([chunk(1, 2), Unavailable("gone")])
    other = Script([chunk(0, 1, reason=STOP), chunk(0, 3, reason=STOP)])
    other.calls = [[chunk(0, 1, reason=STOP)], [chunk(0, 3, reason=STOP)], [chunk(0, 5, reason=STOP)]]
    bench = make(first, other)
    await bench.sample(count=3)
    assert [(r.request_id, len(r.prompt_token_ids)) for r in other.requests] == [
        ("g-1-0", 3),
        ("g-1-1", 4),
        ("g-1-2", 3),
    ]
    assert [r.sampling_params.seed for r in other.requests][::2] == [40, 42]


async def test_an_abort_that_brought_tokens_costs_no_try_and_one_without_does(make: Make) -> None:
    aborts: list[list[Step]] = [[chunk(0, n, reason=ABORTED)] for n in range(1, MAX_TOKENS)]
    bench = make(Script(*aborts, [chunk(0, 9, reason=STOP)]))
    assert plain(await bench.sample(count=1)) == [([1, 2, 3, 4, 5, 9], [(1, 6)], STOP)]
    assert bench.budget.infrastructure == 1
    assert not bench.replica("rollout-0").breaker.failures, "an abort is no failure of the engine"
    empty: list[list[Step]] = [[chunk(0, reason=ABORTED)] for _ in range(3)]
    bench = make(Script(*empty))
    with pytest.raises(GivenUp) as error:
        await bench.sample(count=1)
    assert (error.value.reason, bench.tries) == ("ABORTED", ["begin", "ABORTED"] * 2)


async def test_a_partial_sample_that_is_complete_is_not_continued(make: Make) -> None:
    full: list[Step] = [chunk(0, *range(MAX_TOKENS)), chunk(1, 2, END), Unavailable("gone")]
    bench = make(Script(full), Script())
    assert plain(await bench.sample()) == [([0, 1, 2, 3, 4, 5], [(1, 6)], LENGTH), ([2, END], [(1, 2)], STOP)]


@pytest.mark.parametrize(
    "end",
    [
        [chunk(1, 2, 20), Unavailable("gone")],
        [chunk(1, 2, version=4), Unavailable("gone")],
        [chunk(1, 2, version=2), chunk(1, 3, version=1)],
        [chunk(1, 2), chunk(1, reason=77)],
        [chunk(1, 2), chunk(0, 5)],
        [chunk(1, reason=STOP)],
        [chunk(1, *range(MAX_TOKENS + 1))],
    ],
    ids=["vocabulary", "version", "order", "reason", "after-end", "empty", "too-many"],
)
async def test_tokens_that_break_a_rule_are_discarded_and_not_continued(make: Make, end: list[Step]) -> None:
    broken = Script([chunk(0, 1, reason=STOP), *end])
    other = Script([chunk(0, 6, reason=STOP)])
    bench = make(broken, other)
    assert plain(await bench.sample()) == [([1], [(1, 1)], STOP), ([6], [(1, 1)], STOP)]
    (request,) = other.requests
    assert list(request.prompt_token_ids) == [7, 8, 9] and request.sampling_params.seed == 41
    metrics = bench.router.engine_metrics()
    assert metrics.get("rollout/lost_tokens", 0) <= 2 and metrics["rollout/continued_tokens"] == 1


async def test_a_response_that_breaks_a_rule_costs_the_tokens_of_all_unfinished_samples(make: Make) -> None:
    broken = Script([chunk(0, 1), chunk(1, 2, 3), chunk(2, 4, reason=STOP), PeerFault("rollout", "BAD", "no")])
    other = Script([chunk(0, 5, reason=STOP), chunk(1, 6, reason=STOP)])
    bench = make(broken, other)
    assert [ids for ids, _, _ in plain(await bench.sample(count=3))] == [[5], [6], [4]]
    assert bench.router.engine_metrics() == {"rollout/continued_tokens": 1.0, "rollout/lost_tokens": 3.0}


async def test_a_continuation_that_breaks_a_rule_loses_only_its_own_tokens(make: Make) -> None:
    engines = (
        Script([chunk(0, 1, 2), Unavailable("gone")]),
        Script([chunk(0, 3), PeerFault("rollout", "BAD", "not in the contract")]),
        Script([chunk(0, 4, reason=STOP)]),
    )
    bench = make(*engines)
    bench.budget.infrastructure = 2
    assert plain(await bench.sample(count=1)) == [([1, 2, 4], [(1, 3)], STOP)]
    assert bench.router.engine_metrics() == {"rollout/continued_tokens": 2.0, "rollout/lost_tokens": 1.0}


async def test_the_tokens_of_an_engine_whose_lease_ends_continue(make: Make) -> None:
    never = asyncio.Event()
    bench = make(Script([chunk(0, 1, 2), never]), other := Script([chunk(0, 3, reason=STOP)]))
    task = asyncio.create_task(bench.sample(count=1))
    while not bench.replica("rollout-0").busy:
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    bench.replica("rollout-0").leave("its lease ended", cut=True)
    assert plain(await task) == [([1, 2, 3], [(1, 3)], STOP)]
    assert list(other.requests[0].prompt_token_ids) == [7, 8, 9, 1, 2]
    assert bench.tries == ["begin", "LEASE_ENDED", "begin", "end"]


async def test_a_call_that_is_cut_after_its_last_sample_is_not_repeated(make: Make) -> None:
    bench = make(first := Script([chunk(0, 1, 2, reason=STOP), asyncio.Event()]), other := Script())
    task = asyncio.create_task(bench.sample(count=1))
    async with asyncio.timeout(10):
        while not first.requests:
            await asyncio.sleep(0)
    bench.replica("rollout-0").leave("its lease ended", cut=True)
    assert plain(await task) == [([1, 2], [(1, 2)], STOP)]
    assert bench.tries == ["begin", "LEASE_ENDED", "begin", "end"] and not other.requests


async def test_tokens_of_a_group_that_is_given_up_are_lost(make: Make) -> None:
    bench = make(Script([chunk(0, 1, 2), Unavailable("a")], [chunk(0, 3), Unavailable("b", reason="B")]))
    with pytest.raises(GivenUp) as error:
        await bench.sample(count=1)
    assert error.value.reason == "B"
    assert bench.router.engine_metrics()["rollout/lost_tokens"] == 3


async def test_the_load_of_a_continuation_is_that_of_what_is_left(make: Make) -> None:
    sizes: list[tuple[int, int]] = []
    bench = make(Script([chunk(0, 1, reason=STOP), chunk(1, 2, 3), Unavailable("gone")]), other := Script())
    generate = other.generate
    other.calls = [[chunk(0, 6, reason=STOP)]]

    def noting(request: Any, *, timeout: float) -> Any:
        replica = bench.replica("rollout-1")
        sizes.append((replica.outstanding, replica.outstanding_size))
        return generate(request, timeout=timeout)

    other.generate = noting  # type: ignore[method-assign]
    await bench.sample()
    assert sizes == [(1, 3 + 2 + 4)]


class TestFlush:
    """How often engines send the tokens of unfinished samples."""

    def test_short_calls_are_not_flushed(self) -> None:
        sampler = Bench().sampler
        assert sampler.flush_seconds(900) is None and sampler.flush_seconds(1100) == 5.0
        sampler.pace.add(0.1, 1000)
        assert sampler.flush_seconds(30_000) is None
        sampler.pace = type(sampler.pace)()
        sampler.pace.add(100, 1000)
        assert [sampler.flush_seconds(n) for n in (99, 101, 240, 10_000)] == [None, 5.0, 6.0, 10.0]
