"""Texts that are decoded in few calls of another thread, each for the group that asked."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest

from fourfold.arrays import Int32Array
from fourfold_coordinator.data.texts import TextDecoder


def ids(*values: int) -> Int32Array:
    return np.array(values, np.int32)


async def test_groups_that_come_while_others_are_decoded_share_a_call() -> None:
    calls: list[int] = []

    def decode(sequences: Sequence[Int32Array]) -> list[str]:
        assert threading.current_thread() is not threading.main_thread()
        calls.append(len(sequences))
        time.sleep(0.02)
        return [str(s.tolist()) for s in sequences]

    decoder = TextDecoder(decode)
    texts = await asyncio.gather(*(decoder.decode([ids(n), ids(n, n)]) for n in range(50)))
    assert texts == [[f"[{n}]", f"[{n}, {n}]"] for n in range(50)]
    assert calls == [2, 98]
    large = np.zeros((1 << 20) + 1, np.int32)
    await asyncio.gather(decoder.decode([ids(1)]), decoder.decode([large]), decoder.decode([ids(2)]))
    assert calls[2:] == [1, 1, 1], "a call is limited, so that the first groups do not wait for all"
    assert await decoder.decode([]) == []


async def test_a_failed_or_cancelled_call_leaves_the_others_alone() -> None:
    failures = [1]

    def decode(sequences: Sequence[Int32Array]) -> list[str]:
        time.sleep(0.01)
        if failures and len(sequences) > 1:
            raise ValueError(failures.pop())
        return ["x"] * len(sequences)

    decoder = TextDecoder(decode)
    tasks = [asyncio.create_task(decoder.decode([ids(n)])) for n in range(6)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(outcomes[0], asyncio.CancelledError)
    assert [str(o) for o in outcomes[1:] if isinstance(o, ValueError)] == ["1"]
    assert outcomes.count(["x"]) == 4
    with pytest.raises(ValueError, match="2"):
        failures.append(2)
        await decoder.decode([ids(1), ids(2)])
