"""The cause of an engine's death, found without blocking the event loop: the first error, a signal, the output task."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

import pytest

from fourfold_rollout.vllm.crash import CrashNote, CrashWatch
from tests.support.descriptors import open_descriptors

SECONDS = 5
# The watch looks 50 times for an exit code. If it blocked, the event loop would turn only about twice.
TURNS = 25


@pytest.fixture
def process() -> Iterator[BaseProcess]:
    """A child that lives until it is killed."""
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    child.start()
    yield child
    child.kill()
    child.join(SECONDS)


class Engine:
    """A watch over a fake launched engine, with its note and the reasons that its owner got."""

    def __init__(self, process: BaseProcess) -> None:
        self.text = ""
        self.processor = SimpleNamespace()
        self.told: list[str] = []
        launched: Any = SimpleNamespace(
            processes=(process,),
            note=SimpleNamespace(read=lambda: self.text),
            llm=SimpleNamespace(output_processor=self.processor),
        )
        self.watch = CrashWatch(launched, self.told.append)

    async def reason(self) -> str:
        return await asyncio.wait_for(asyncio.shield(self.watch.reason), SECONDS)


async def turns(work: Any) -> int:
    """Await `work`; return the number of turns of the event loop, which does not depend on the machine's speed."""
    task, count = asyncio.ensure_future(work), 0
    while not task.done():
        await asyncio.sleep(0.001)
        count += 1
    await task
    return count


async def test_a_killed_process_is_named_once(process: BaseProcess) -> None:
    engine = Engine(process)
    assert not engine.watch.begun
    process.kill()
    assert "killed by SIGKILL; its sender is unknown" in await engine.reason()
    engine.watch.begin()
    engine.processor.propagate_error(ValueError("of its end"))
    await asyncio.sleep(0)
    assert engine.told == [await engine.reason()]


async def test_the_first_error_of_the_process_comes_before_its_exit_code(process: BaseProcess) -> None:
    engine = Engine(process)
    engine.text = "ValueError: odd (core.py:7)"
    process.kill()
    assert await engine.reason() == "the engine died: ValueError: odd (core.py:7)"


async def test_an_error_of_the_output_task_is_the_engines_death_and_the_loop_goes_on(process: BaseProcess) -> None:
    engine = Engine(process)
    engine.processor.propagate_error(KeyError("token 7"))
    assert engine.watch.begun
    assert await turns(engine.reason()) > TURNS
    (reason,) = engine.told
    assert "vLLM's task for the engine's outputs failed: KeyError: 'token 7'" in reason
    assert process.is_alive()


async def test_a_death_that_others_notice_has_a_reason_too(process: BaseProcess) -> None:
    engine = Engine(process)
    engine.watch.begin()
    assert await turns(engine.reason()) > TURNS
    assert engine.told == ["the engine does not answer any more; see its log"]


@pytest.mark.parametrize("looking", [False, True], ids=["alive", "dying"])
async def test_an_engine_that_is_closed_did_not_die(process: BaseProcess, looking: bool) -> None:
    engine = Engine(process)
    if looking:
        engine.watch.begin()
    descriptors = open_descriptors("pidfd").total()
    engine.watch.close()
    assert open_descriptors("pidfd").total() == descriptors - (not looking)
    assert engine.watch.begun
    process.kill()
    engine.watch.begin()
    await asyncio.sleep(0.1)
    assert await engine.reason() == "the engine is closed"
    assert engine.told == []


def test_the_first_error_that_ends_it_is_kept() -> None:
    note, core = CrashNote(), logging.getLogger("vllm.v1.engine.core")

    def fails(words: str, message: str) -> None:
        try:
            raise ValueError(words)
        except ValueError:
            core.exception(message, "sleep")

    fails("no memory", "Invocation of %s method failed")
    fails("odd prompt", "Unexpected error pre-processing request %s")
    assert note.read() == "", "it goes on after those"
    fails("no such token", "EngineCore encountered a fatal error in %s.")
    fails("nobody there", "and what follows of it in %s")
    assert note.read().startswith("ValueError: no such token (")
