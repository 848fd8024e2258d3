"""The service's side of the process that parses texts, without the process."""

from __future__ import annotations

import asyncio
import threading

from fourfold_rollout.vllm.text.process import TextProcess


class Lingering:
    """A killed process that the kernel does not end yet."""

    def __init__(self) -> None:
        self.killed, self.reaped, self.ends = threading.Event(), threading.Event(), threading.Event()

    def kill(self) -> None:
        self.killed.set()

    def wait(self, timeout: float | None = None) -> int:
        self.ends.wait(timeout)
        self.reaped.set()
        return -9


async def test_a_process_that_does_not_end_at_once_does_not_hold_the_event_loop_up() -> None:
    text, process = TextProcess("model", "hermes", ""), Lingering()
    text._process = process  # type: ignore[assignment]
    await text.close()
    assert process.killed.is_set() and not process.reaped.is_set()
    process.ends.set()
    assert await asyncio.to_thread(process.reaped.wait, 10)
