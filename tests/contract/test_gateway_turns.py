"""Turns that a gateway samples on toy engines: where they go, and what survives when an engine fails."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fourfold.config import Config
from fourfold.errors import DeadlinePassed, InvalidInput, Overloaded, Unavailable
from fourfold.rollout.group_requests import GroupRequest
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rpc.codec import pack_floats, pack_ints, read_ints
from fourfold_gateway.engines import EnginePool
from fourfold_gateway.turn_sampler import TurnRequest, TurnSampler, _Turn
from tests.fakes.stage import until
from tests.fakes.toy import END, START, VOCABULARY, make_config
from tests.fakes.toy_rollout import FakeRollout

PROMPT = [*b"3 * 4 =", START]
Start = Callable[[str], Awaitable[FakeRollout]]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(tmp_path)


@pytest.fixture
async def pool(config: Config) -> AsyncIterator[EnginePool]:
    engine = FakeRollout("any", config)
    pool = EnginePool(tokenizer_sha256=engine.tokenizer_sha256, vocabulary_size=VOCABULARY, security=None)
    yield pool
    await pool.close()


@pytest.fixture
async def start(config: Config, pool: EnginePool) -> AsyncIterator[Start]:
    engines: list[FakeRollout] = []

    async def start(name: str) -> FakeRollout:
        engine = FakeRollout(name, config)
        engine.weights = 10**6  # always right
        await engine.start()
        engines.append(engine)
        pool.set_members({e.member_id: e.target for e in engines})
        await until(lambda: len(pool.usable) == len(engines))
        return engine

    yield start
    for engine in engines:
        await engine.kill()


def turn(
    *, count: int = 1, flush: float | None = None, key: str = "s", separate: bool = False, grammar: str = ""
) -> TurnRequest:
    prompt = [byte_id(b) if b < START else b for b in PROMPT]
    params = rollout.SamplingParams(temperature=1.0, max_tokens=8, seed=5)
    if grammar:
        params.grammar.regex = grammar
    group = GroupRequest(name="t", prompt_token_ids=np.array(prompt, np.int32), params=params, count=count, version=0)
    return TurnRequest(group=group, key=key, flush_seconds=flush, separate=separate)


def byte_id(byte: int) -> int:
    """Return the token of a byte: the toy's vocabulary is the sorted alphabet of byte-level tokenizers."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return letters.index(chr(byte) if byte != 32 else chr(0x120))


ANSWER = [byte_id(ord("1")), byte_id(ord("2")), END]


async def sample(pool: EnginePool, request: TurnRequest, timeout: float = 10.0) -> dict[int, list[int]]:
    """Return the ids of each sample; check that each ends exactly once."""
    ids: dict[int, list[int]] = {i: [] for i in range(request.group.count)}
    ended: list[int] = []
    async with aclosing(TurnSampler(pool, stop_token_ids=(END,)).sample(request, timeout=timeout)) as chunks:
        async for chunk in chunks:
            ids[chunk.sample_index] += read_ints(chunk.token_ids).tolist()
            if chunk.finish_reason:
                ended.append(chunk.sample_index)
    assert sorted(ended) == list(ids)
    return ids


@pytest.mark.parametrize("separate", [False, True])
async def test_all_samples_of_a_turn_finish(pool: EnginePool, start: Start, separate: bool) -> None:
    engine = await start("a")
    assert await sample(pool, turn(count=3, separate=separate)) == dict.fromkeys(range(3), ANSWER)
    seeds = sorted(r.sampling_params.seed + i for r in engine.requests for i in range(r.sample_count))
    assert seeds == [5, 6, 7]


async def test_calls_wait_while_the_engine_is_full(
    pool: EnginePool, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    await start("a")
    (engine,) = pool.usable
    assert engine.info is not None and engine.info.max_concurrent_samples == 8
    call, loads = engine.call, list[int]()

    @contextmanager
    def counted(samples: int) -> Iterator[None]:
        with call(samples):
            loads.append(engine.in_flight)
            yield

    monkeypatch.setattr(engine, "call", counted)
    await asyncio.gather(*(sample(pool, turn(count=2, key=f"k{n}")) for n in range(20)))
    assert max(loads) == 8 and len(loads) == 20 and pool.failures == 0


async def test_a_call_without_samples_does_not_wait_for_room(pool: EnginePool, start: Start) -> None:
    await start("a")
    (engine,) = pool.usable
    with engine.call(8):
        assert not engine.has_room(1)
        info = await pool.call("k", lambda client: client.get_info(timeout=5), timeout=2)
        assert info.max_concurrent_samples == 8
        with pytest.raises(Overloaded, match="8 of 8 samples in a") as caught:
            await pool.wait("k", seconds=0.2)
    assert (caught.value.reason, caught.value.retry_after) == ("TOO_MANY_SAMPLES", 1.0)


async def test_calls_with_one_key_go_to_one_engine_and_many_keys_to_all(pool: EnginePool, start: Start) -> None:
    engines = [await start(name) for name in "abc"]
    for _ in range(4):
        await sample(pool, turn(key="x"))
    assert sorted(len(e.requests) for e in engines) == [0, 0, 4]
    for number in range(30):
        await sample(pool, turn(key=f"k{number}"))
    assert all(len(e.requests) > 2 for e in engines)


async def test_a_full_engine_spills_over(pool: EnginePool, start: Start) -> None:
    for name in "ab":
        await start(name)
    first = pool.choose("x")
    assert first is not None and first is pool.choose("x")
    first.in_flight = 8
    other = pool.choose("x")
    assert other is not None and other is not first


@pytest.mark.parametrize("dies", [True, False])
async def test_a_turn_continues_from_its_ids_on_another_engine(pool: EnginePool, start: Start, dies: bool) -> None:
    """The first engine dies, or ends the turn for a drain, after one token."""
    engines = {name: await start(name) for name in "ab"}
    first = pool.choose("s")
    assert first is not None
    chosen = engines.pop(first.member_id)
    (other,) = engines.values()

    async def end() -> bool:
        if dies:
            task = asyncio.create_task(chosen.kill())
            await asyncio.sleep(30)
            await task
        chosen.on_generate = _fail
        return True

    async def _fail() -> None:
        raise Unavailable("draining")

    chosen.on_partial = end
    assert await sample(pool, turn(count=2, flush=0.0)) == {0: ANSWER, 1: ANSWER}
    assert [list(r.prompt_token_ids)[-1] for r in other.requests] == [ANSWER[0]] * 2, "after the ids so far"
    assert [r.sampling_params.max_tokens for r in other.requests] == [7, 7]
    assert pool.continuations == 2


class Bad(FakeRollout):
    """Breaks the contract in one way."""

    chunk: dict[str, Any]

    async def Generate(self, request: rollout.GenerateRequest, context: Any) -> AsyncIterator[rollout.GenerateResponse]:
        self.requests.append(request)
        fields: dict[str, Any] = {
            "token_ids": pack_ints([1]),
            "logprobs": pack_floats([-1.0]),
            "finish_reason": 1,
        } | self.chunk
        yield rollout.GenerateResponse(chunks=[rollout.SampleChunk(**fields)])


@pytest.mark.parametrize(
    "chunk",
    [
        {"token_ids": pack_ints([VOCABULARY])},
        {"token_ids": pack_ints([-1])},
        {"logprobs": pack_floats([0.5])},
        {"policy_version": 1 << 50},
        {"constrained_mask": b"\x02"},
        {"constrained_mask": b"\x00\x01"},
        {"finish_reason": 9},
        {"token_ids": b"", "logprobs": b""},
    ],
)
async def test_an_answer_that_breaks_the_contract_costs_one_try(
    config: Config, pool: EnginePool, start: Start, chunk: dict[str, Any]
) -> None:
    bad = Bad("bad", config)
    bad.chunk = chunk
    await bad.start()
    good = await start("good")
    pool.set_members({"bad": bad.target, "good": good.target})
    await until(lambda: len(pool.usable) == 2)
    first = next(f"k{i}" for i in range(99) if getattr(pool.choose(f"k{i}"), "member_id", "") == "bad")
    assert await sample(pool, turn(key=first)) == {0: ANSWER}
    assert (len(bad.requests), pool.failures) == (1, 1)
    await bad.kill()


async def test_a_refused_request_is_not_tried_elsewhere(pool: EnginePool, start: Start) -> None:
    engines = [await start(name) for name in "ab"]

    async def refuse() -> None:
        raise InvalidInput("the grammar does not compile")

    for engine in engines:
        engine.on_generate = refuse
    with pytest.raises(InvalidInput, match="does not compile"):
        await sample(pool, turn())
    assert sum(len(e.requests) for e in engines) == 1


@pytest.mark.parametrize("flush", [None, 0.0])
async def test_an_interrupted_turn_with_a_grammar_continues_after_its_tokens(
    pool: EnginePool, start: Start, flush: float | None
) -> None:
    engine = await start("a")

    async def end() -> bool:
        engine.on_partial = None
        return True

    engine.on_partial = end
    assert await sample(pool, turn(grammar="[0-9]*", flush=flush)) == {0: ANSWER}
    asked = [(len(r.prompt_token_ids) - len(PROMPT), r.grammar_prefix_count) for r in engine.requests]
    assert asked == [(0, 0), (1, 1)]
    assert engine.requests[1].sampling_params.grammar == engine.requests[0].sampling_params.grammar


async def test_a_turn_ends_at_its_deadline_and_when_its_agent_leaves(pool: EnginePool, start: Start) -> None:
    engine = await start("a")
    cancelled = asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            cancelled.set()

    engine.on_generate = hang
    with pytest.raises(DeadlinePassed):
        await sample(pool, turn(), timeout=0.3)
    await asyncio.wait_for(cancelled.wait(), 5)
    assert pool.failures == 0, "the deadline of the turn is no failure of the engine"
    cancelled.clear()
    chunks = TurnSampler(pool, stop_token_ids=(END,)).sample(turn(), timeout=30)
    task = asyncio.create_task(anext(chunks))
    await until(lambda: len(engine.requests) == 2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await chunks.aclose()
    await asyncio.wait_for(cancelled.wait(), 5)


async def test_a_long_turn_on_an_engine_that_recovers_holds_no_other_turn_up(pool: EnginePool, start: Start) -> None:
    """After three failures one call at a time shows that the engine works: until its first token, not until its end."""
    engine = await start("a")
    breaker = pool.engines[0].breaker
    breaker.open, breaker.failures = True, 3
    began, go_on = asyncio.Event(), asyncio.Event()

    async def hang() -> bool:
        began.set()
        await go_on.wait()
        return False

    engine.on_partial = hang
    first = asyncio.create_task(sample(pool, turn(flush=0.0)))
    await asyncio.wait_for(began.wait(), 5)
    await until(lambda: pool.choose("s") is not None)
    engine.on_partial = None
    assert await sample(pool, turn(), timeout=5) == {0: ANSWER}
    assert not breaker.open
    go_on.set()
    assert await first == {0: ANSWER}


async def test_a_turn_that_its_reader_ended_shows_that_the_engine_works(pool: EnginePool, start: Start) -> None:
    engine = await start("a")
    breaker = pool.engines[0].breaker
    breaker.open, breaker.failures = True, 3

    async def hang() -> None:
        await asyncio.sleep(30)

    engine.on_partial = hang
    request = turn(flush=0.0, separate=True)
    async with aclosing(TurnSampler(pool, stop_token_ids=(END,)).sample(request, timeout=5)) as chunks:
        async for chunk in chunks:
            request.stopped.add(chunk.sample_index)  # it has its stop string
    assert not breaker.open and breaker.failures == 0


async def test_a_failure_keeps_no_turn_in_memory(pool: EnginePool, start: Start) -> None:
    engines = [await start(name) for name in "ab"]
    failed = False

    async def fail() -> None:
        nonlocal failed
        if not failed:
            failed = True
            raise Unavailable("it drains")

    for engine in engines:
        engine.on_partial = fail
    assert await sample(pool, turn(flush=0.0)) == {0: ANSWER} and pool.failures == 1
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is _Turn]


async def test_a_call_that_is_refused_ends_the_others_of_its_turn(pool: EnginePool, start: Start) -> None:
    """After an interruption each sample has a call of its own. Nobody would read what the others still sample."""
    engine = await start("a")
    calls, cancelled = 0, asyncio.Event()

    async def interrupt() -> bool:
        return True

    async def answer() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            await until(lambda: calls == 3)
            raise InvalidInput("the prompt is too long for this engine")
        if calls == 3:
            try:
                await asyncio.sleep(30)
            finally:
                cancelled.set()

    engine.on_partial, engine.on_generate = interrupt, answer
    with pytest.raises(InvalidInput, match="too long"):
        await sample(pool, turn(count=2, flush=0.0))
    await asyncio.wait_for(cancelled.wait(), 5)
    assert pool.engines[0].in_flight == 0


async def test_an_engine_with_another_tokenizer_gets_no_calls(config: Config, pool: EnginePool) -> None:
    engine = FakeRollout("x", config)
    engine.tokenizer_sha256 = bytes(32)
    await engine.start()
    pool.set_members({"x": engine.target})
    await until(lambda: "tokenizer" in pool.engines[0].fault)
    with pytest.raises(Unavailable, match="tokenizer"):
        await pool.wait("s", seconds=0.0)
    await engine.kill()


async def test_a_member_that_is_missing_for_a_moment_keeps_its_calls(pool: EnginePool, start: Start) -> None:
    """A coordinator that restarts lists no members at first."""
    engine = await start("a")
    pool.set_members({}, grace=True)
    assert await sample(pool, turn()) == {0: ANSWER}
    pool.set_members({"a": engine.target}, grace=True)
    assert pool.engines[0].absent_since is None
    pool.set_members({})
    assert pool.engines == []
