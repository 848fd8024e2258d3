"""Tests whom a pool gives its children, and when it starts and kills them. The children are no processes."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, cast

import pytest

from fourfold.workers import pool as pool_module
from fourfold.workers.child import Child, WorkerDied
from fourfold.workers.pool import Pool


class FakeChild:
    def __init__(self, pid: int) -> None:
        self.pid, self.fault, self.killed = pid, "", False

    async def idle_fault(self) -> str:
        return self.fault

    async def kill(self) -> None:
        await asyncio.sleep(0)
        self.killed = True


class Starts:
    """Starts children; those with the numbers `failing` cannot be started."""

    def __init__(self, *failing: int) -> None:
        self.failing, self.numbers, self.delay = set(failing), itertools.count(1), 0.0

    async def __call__(self) -> Child:
        number = next(self.numbers)
        await asyncio.sleep(self.delay)
        if number in self.failing:
            raise WorkerDied(f"number {number} died")
        return cast(Child, FakeChild(number))


def make_pool(starts: Any) -> Pool[Child]:
    return Pool(starts, title="test pool", on_failure=lambda message: pytest.fail(message))


async def rest() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_FIRST_BACKOFF_SECONDS", 0.05)


async def test_a_child_has_one_user_at_a_time() -> None:
    pool = make_pool(Starts())
    await pool.start(2)
    users = [await pool.take(), await pool.take()]
    assert sorted(child.pid for child in users) == [1, 2]
    waiting = asyncio.create_task(pool.take())
    await asyncio.sleep(0)
    pool.put(users[0])
    assert await waiting is users[0], "the first child that gets free"
    assert len(pool.free) == 0 and pool.pids() == [1, 2]
    await pool.close()


async def test_a_killed_child_is_replaced_once() -> None:
    starts = Starts()
    pool = make_pool(starts)
    await pool.start(1)
    await pool.kill(await pool.take())
    waiting = asyncio.create_task(pool.take())
    assert (await waiting).pid == 2, "the user waits for the child that is started anyway"
    await pool.kill(await waiting)
    await rest()
    assert pool.pids() == [3], "also when no user waits"
    assert next(starts.numbers) == 4
    await pool.close()


async def test_a_child_that_died_without_work_is_not_given_away(caplog: pytest.LogCaptureFixture) -> None:
    pool = make_pool(Starts())
    await pool.start(1)
    cast(Any, pool.free[0]).fault = "ended with exit code 7"
    assert (await pool.take()).pid == 2
    assert "ended with exit code 7" in caplog.text
    await pool.close()


async def test_a_child_that_died_with_its_last_work_is_not_given_to_a_waiting_user() -> None:
    pool = make_pool(Starts())
    await pool.start(1)
    child = await pool.take()
    waiting = asyncio.create_task(pool.take())
    await rest()
    cast(Any, child).fault = "ended with exit code 7"
    pool.put(child)
    assert (await waiting).pid == 2
    await pool.close()


async def test_a_failed_start_is_the_error_of_one_user_and_is_tried_again() -> None:
    starts = Starts(2, 3)
    pool = make_pool(starts)
    await pool.start(1)
    await pool.kill(await pool.take())
    for number in (2, 3):
        with pytest.raises(WorkerDied, match=f"number {number}"):
            await pool.take()
    pool.filled.clear()
    async with asyncio.timeout(5):
        await pool.filled.wait()
    assert pool.pids() == [4]
    await asyncio.sleep(0.2)
    assert next(starts.numbers) == 5
    await pool.close()


async def test_waits_between_failed_starts_grow() -> None:
    starts = Starts(*range(2, 100))
    pool = make_pool(starts)
    await pool.start(2)
    await asyncio.sleep(0.5)  # after 0.05, 0.15, 0.35 s
    assert 4 <= next(starts.numbers) <= 7
    await pool.close()


async def test_children_that_are_too_many_end_when_they_are_free() -> None:
    pool = make_pool(Starts())
    await pool.start(1)
    first = await pool.take()
    pool.resize(3)
    await rest()
    assert pool.pids() == [1, 2, 3]
    pool.resize(1)
    pool.resize(1)
    await rest()
    assert pool.pids() == [1]
    pool.put(first)
    assert list(pool.free) == [first]
    await pool.close()


async def test_close_kills_the_children_and_starts_none() -> None:
    starts = Starts()
    pool = make_pool(starts)
    await pool.start(2)
    children = [cast(Any, child) for child in pool.children]
    starts.delay = 10.0
    pool.resize(3)
    await asyncio.sleep(0)
    await pool.close()
    assert pool.pids() == [] and all(child.killed for child in children)
    number = next(starts.numbers)
    late = asyncio.create_task(pool.take())
    await rest()
    assert next(starts.numbers) == number + 1, "a late call starts none, too"
    late.cancel()


async def test_the_error_of_a_task_is_a_failure_of_the_pool() -> None:
    failures = list[str]()

    async def fail() -> None:
        raise KeyError("a bug")

    pool = Pool(Starts(), title="test pool", on_failure=failures.append)
    pool.tasks.add(fail())
    await rest()
    assert failures == ["the test pool failed: KeyError: 'a bug'"]
