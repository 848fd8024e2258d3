"""Tests what a queue of items keeps and gives out."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from fourfold.workers.queue import BatchQueue


@dataclass
class Item:
    name: str
    size_bytes: int = 10


def make_queue() -> BatchQueue[Item, str]:
    return BatchQueue[Item, str](lambda: None)


async def test_results_are_in_the_order_of_their_items_and_a_late_one_is_none() -> None:
    queue = make_queue()
    call = asyncio.create_task(queue.put([Item("a"), Item("b"), Item("c")], timeout=0.1))
    await asyncio.sleep(0)
    a, b = queue.take(2, 100)
    b.set_result("B")
    a.set_result("A")
    a.set_result("late")
    assert (len(queue), queue.size_bytes) == (1, 10)
    assert await call == ["A", "B", None]
    assert (len(queue), queue.size_bytes) == (0, 0)


async def test_a_cancelled_call_leaves_nothing_behind_and_its_taken_items_do_not_come_back() -> None:
    queue = make_queue()
    gone = asyncio.create_task(queue.put([Item("a"), Item("b")], timeout=10))
    stays = asyncio.create_task(queue.put([Item("c"), Item("d")], timeout=10))
    await asyncio.sleep(0)
    taken = queue.take(3, 100)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    queue.put_back(taken)
    assert [entry.item.name for entry in queue.take(9, 100)] == ["c", "d"]
    assert queue.size_bytes == 0
    stays.cancel()


async def test_a_batch_ends_at_its_bytes_and_has_at_least_one_item() -> None:
    queue = make_queue()
    call = asyncio.create_task(queue.put([Item("a", 100), Item("b", 1), Item("c", 1)], timeout=10))
    await asyncio.sleep(0)
    assert [entry.item.name for entry in queue.take(9, 50)] == ["a"]
    assert [entry.item.name for entry in queue.take(9, 50)] == ["b", "c"]
    call.cancel()
