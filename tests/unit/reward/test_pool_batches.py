"""Tests batches of the worker pool with real processes: what a sample does to others of its batch, and to the pool."""

from __future__ import annotations

import asyncio
import io
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fourfold.workers import frames
from fourfold_reward import batch as batch_module
from fourfold_reward import loader, protocol
from fourfold_reward import pool as pool_module
from fourfold_reward.batch import STUCK_SECONDS, Batch, FunctionTimes, Worker
from fourfold_reward.job import Job
from fourfold_reward.pool import WorkerPool
from fourfold_reward.protocol import Outcome
from tests.support.reward_jobs import make_job

# The first word of a completion selects the behaviour; each call is a line in the log.
FUNCTION = """
import json, os, struct, sys, threading, time

def own_number():
    caller = sys._getframe()
    while caller.f_code.co_name != "_answer_batch":
        caller = caller.f_back
    return caller.f_locals["number"]

def frame(value):
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<I", len(body)) + body

def write(data):
    for descriptor in range(3, 64):
        try: os.write(descriptor, data)
        except OSError: pass

def reward(sample):
    with open(os.path.dirname(__file__) + "/log", "a") as log:
        log.write(f"{sample.sample_id} {os.getpid()}\\n")
    word, _, number = sample.completion.partition(" ")
    match word:
        case "hang": time.sleep(1000)
        case "slow": time.sleep(2)
        case "late":  # after its own outcome, and then there is no work
            threading.Timer(0.2, write, [frame({"n": 99, "score": 9.0})]).start()
        case "brief": time.sleep(0.03)
        case "garbage": write(b"\\xff" * 100)
        case "huge": write(struct.pack("<I", 1 << 30))
        case "text": write(frame(b"no JSON"))
        case "empty": write(frame({}))
        case "unnumbered": write(frame({"score": 9.0}))
        case "next": write(frame({"n": own_number() + 1, "score": 9.0}))
        case "many":
            write(b"".join(frame({"n": own_number() + n, "score": 9.0}) for n in range(10)))
        case "ahead":  # replies for samples that come later, while they run
            first = own_number() + 1
            def forge():
                for n in range(first, first + 20): write(frame({"n": n, "score": 9.0}))
            threading.Timer(0.2, forge).start()
        case "dropped": write(frame({"n": own_number(), "dropped": True}))
        case "pid": return float(os.getpid())
    return float(number or 0)
"""


MakePool = Callable[..., Awaitable[WorkerPool]]


@pytest.fixture
async def make_pool(tmp_path: Path) -> AsyncIterator[MakePool]:
    (tmp_path / "mine.py").write_text(FUNCTION)
    pools: list[WorkerPool] = []

    async def make(*, processes: int = 1, timeout: float = 1.2) -> WorkerPool:
        pool = WorkerPool(
            verifier=loader.find(f"{tmp_path}/mine.py:reward", directory=Path.cwd()),
            options={},
            processes=processes,
            timeout_seconds=timeout,
            on_failure=lambda message: pytest.fail(message),
        )
        pools.append(pool)
        await pool.start()
        while len({o.score for o in await score(pool, *["pid", "brief"] * processes, name="warm")} - {0.0}) < processes:
            pass  # until each worker has scored its first sample, which may take longer than others
        pool._times.mean = 1e-4  # also on a busy machine
        return pool

    yield make
    for pool in pools:
        await pool.close()
        assert pool.worker_pids() == []


async def score(pool: WorkerPool, *completions: str, name: str = "s", timeout: float = 20) -> list[Outcome]:
    return await pool.score(make_jobs(pool, completions, name), timeout=timeout)


def make_jobs(pool: WorkerPool, completions: Sequence[str], name: str = "s") -> list[Job]:
    return [make_job(each, sample_id=f"{name}{i}") for i, each in enumerate(completions)]


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the size of each batch."""
    sizes: list[int] = []

    class Recorded(Batch):
        async def run(self) -> None:
            sizes.append(len(self._entries))
            await super().run()

    monkeypatch.setattr(pool_module, "Batch", Recorded)
    return sizes


def calls(folder: Path) -> Counter[str]:
    """Return how often the function was called for each sample, without those that warm a pool up."""
    names = (line.split()[0] for line in (folder / "log").read_text().splitlines())
    return Counter(name for name in names if not name.startswith("warm"))


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        await asyncio.sleep(0.02)
    assert condition()


async def test_fast_samples_go_in_batches_and_come_back_in_order(make_pool: MakePool, batches: list[int]) -> None:
    pool = await make_pool(processes=2)
    batches.clear()
    outcomes = await score(pool, *(f"ok {i}" for i in range(1500)))
    assert outcomes == [Outcome(score=float(i)) for i in range(1500)]
    assert sum(batches) == 1500
    assert len(batches) < 300


async def test_slow_samples_spread_over_the_workers(make_pool: MakePool, tmp_path: Path, batches: list[int]) -> None:
    pool = await make_pool(processes=2)
    await score(pool, *["brief"] * 30, name="warm")
    batches.clear()
    pids = {o.score for o in await score(pool, *["pid", "brief"] * 20)} - {0.0}
    assert pids == set(pool.worker_pids())
    assert max(batches) <= 8  # 50 ms; the mean lags behind


async def test_samples_behind_one_that_hangs_are_scored_once_and_at_once(
    make_pool: MakePool, tmp_path: Path, batches: list[int]
) -> None:
    pool = await make_pool(timeout=2.5)
    (worker,) = pool.worker_pids()
    batches.clear()
    call = asyncio.create_task(score(pool, "ok 1", "ok 2", "hang", "ok 3", "ok 4"))
    await until(lambda: calls(tmp_path)["s4"] > 0)
    assert batches[0] == 5
    assert (await score(pool, "ok 5", name="other"))[0].score == 5.0
    assert worker in pool.worker_pids() and not call.done()
    outcomes = await call
    assert [o.score for o in outcomes] == [1.0, 2.0, None, 3.0, 4.0]
    assert (outcomes[2].error_reason, outcomes[2].error_code) == ("TIMEOUT", "DEADLINE_EXCEEDED")
    assert worker not in pool.worker_pids()
    assert calls(tmp_path) == Counter(["s0", "s1", "s2", "s3", "s4", "other0"])


@pytest.mark.slow
async def test_sample_that_is_only_slow_keeps_its_worker(
    make_pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool_module, "_SPARE_SECONDS", 2.5)
    pool = await make_pool(timeout=20)
    outcomes = await score(pool, "ok 1", "slow 2", "ok 3", "ok 4")
    assert [o.score for o in outcomes] == [1.0, 2.0, 3.0, 4.0]
    await until(lambda: pool.busy == 0)
    assert calls(tmp_path) == Counter(["s0", "s1", "s2", "s3"])  # the slow worker gave up those behind it
    assert "worker lost" not in caplog.text
    # The extra worker ends; the one that stays is either of the two.
    await until(lambda: len(pool.worker_pids()) == 1 and pool.process_count == 1)
    assert (await score(pool, "ok 5"))[0].score == 5.0


@pytest.mark.slow
async def test_extra_workers_are_bounded_and_end_with_the_stuck_ones(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_EXTRA_PER_PROCESS", 2)
    monkeypatch.setattr(pool_module, "_SPARE_SECONDS", 0.5)
    monkeypatch.setattr(batch_module, "_FIRST_STUCK_SECONDS", 0.1)
    monkeypatch.setattr(batch_module, "_FIRST_STUCK_SHARE", 0.0)
    pool = await make_pool(timeout=5)
    start, started = Worker.start, list[int]()

    async def start_late(*args: Any, **kwargs: Any) -> Worker:
        started.append(1)
        if len(started) > 1:  # the second sample is stuck by then, and has no room for another worker
            await until(lambda: pool.stuck >= 2)
        return await start(*args, **kwargs)

    monkeypatch.setattr(Worker, "start", start_late)
    (first,) = pool.worker_pids()
    call = asyncio.create_task(score(pool, *["hang"] * 4))
    most = 0
    while not call.done():
        if first in pool.worker_pids():
            most = max(most, pool.process_count)
        assert len(pool.worker_pids()) <= 3
        await asyncio.sleep(0.02)
    assert {o.error_reason for o in call.result()} == {"TIMEOUT"}
    assert most == 3, "the spare worker did not take the third sample before the time of the first was up"
    assert (pool.process_count, pool.stuck, pool.busy) == (1, 0, 0)
    await until(lambda: len(pool.worker_pids()) == 1)
    assert (await score(pool, "ok 5"))[0].score == 5.0


@pytest.mark.parametrize("attack", ["garbage", "huge", "text", "empty", "unnumbered", "next", "dropped"])
async def test_function_that_writes_into_the_pipe_costs_its_own_sample(
    make_pool: MakePool, attack: str, batches: list[int]
) -> None:
    pool = await make_pool()
    (worker,) = pool.worker_pids()
    batches.clear()
    outcomes = await score(pool, "ok 1", "ok 2", attack, "ok 3", "ok 4")
    assert batches[0] == 5
    assert [o.score for o in outcomes] == [1.0, 2.0, None, 3.0, 4.0]
    assert outcomes[2].error_reason == "WORKER_DIED"
    assert worker not in pool.worker_pids()
    assert (await score(pool, "ok 5"))[0].score == 5.0


async def test_more_outcomes_than_samples_reach_no_other_call(make_pool: MakePool) -> None:
    pool = await make_pool()
    (worker,) = pool.worker_pids()
    # The function runs in the worker, so it can forge what the worker sends, and does so for its own batch.
    assert [o.score for o in await score(pool, "many", "ok 1")] == [9.0, 9.0]
    assert [o.score for o in await score(pool, "ok 5", "ok 6")] == [5.0, 6.0]
    assert worker not in pool.worker_pids()


async def test_replies_forged_for_later_samples_reach_none_of_them(make_pool: MakePool) -> None:
    pool = await make_pool()
    (worker,) = pool.worker_pids()
    assert [o.score for o in await score(pool, "ahead 1")] == [1.0]
    later = await score(pool, "slow 2", "ok 3", "ok 4")  # they run when the forged replies arrive
    assert later[0].error_reason == "WORKER_DIED"
    assert [o.score for o in later[1:]] == [3.0, 4.0]
    assert worker not in pool.worker_pids()


async def test_worker_that_writes_without_a_request_is_replaced_before_the_next_sample(make_pool: MakePool) -> None:
    pool = await make_pool()
    (worker,) = pool.worker_pids()
    assert [o.score for o in await score(pool, "late 1")] == [1.0]
    await asyncio.sleep(0.4)
    assert [o.score for o in await score(pool, "ok 5", "ok 6")] == [5.0, 6.0]
    assert worker not in pool.worker_pids()


@pytest.mark.slow
async def test_cancelled_and_late_calls_leave_nothing_in_the_queue(
    make_pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_EXTRA_PER_PROCESS", 0)
    pool = await make_pool(timeout=2)
    hanging = asyncio.create_task(score(pool, "hang", name="hanging"))
    await until(lambda: calls(tmp_path)["hanging0"] > 0)
    cancelled = asyncio.create_task(score(pool, *["ok 1"] * 50, name="cancelled"))
    await asyncio.sleep(0)
    assert pool.waiting_samples == 50
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    assert pool.waiting_samples == 0
    late = await score(pool, *["ok 1"] * 50, name="late", timeout=0.2)
    assert {(o.error_reason, o.error_code) for o in late} == {("TIMEOUT", "UNAVAILABLE")}
    assert pool.waiting_samples == 0
    assert [o.error_code for o in await hanging] == ["DEADLINE_EXCEEDED"]
    assert [o.score for o in await score(pool, "ok 5", name="next")] == [5.0]
    assert calls(tmp_path) == Counter(["hanging0", "next0"])


def test_a_long_sample_hides_no_stuck_one() -> None:
    times = FunctionTimes()
    assert times.stuck_seconds == 1.0  # nothing is known
    times.add(100, 0.01)
    assert times.stuck_seconds == STUCK_SECONDS
    times.add(1, 60.0)
    assert times.stuck_seconds <= 3 * STUCK_SECONDS
    for _ in range(100):
        times.add(1, 2.0)
    assert 35 < times.stuck_seconds < 40.1


def test_samples_of_a_batch_arrive_as_they_were_sent() -> None:
    texts = {"sample_id": "a", "prompt": "\u00e9\n", "metadata_json": '{"a": 1}'}
    job = make_job("\ud800x", **texts, completion_ids=[1, 2**31 - 1])
    stream = io.BytesIO(protocol.pack_batch(7, [job, job]) + b"rest")
    request = frames.read(stream)
    assert request is not None
    assert request["first"] == 7
    first, second = protocol.read_batch(stream, request["sizes"])
    assert first == second == ("a", "\u00e9\n", "?x", "", '{"a": 1}', "", [1, 2**31 - 1])
    assert stream.read() == b"rest"
