"""Processes that die, stop or lie in every phase of a weight update: what is left is defined, and the next one is right.

Everything is real but the coordinator's loop: see `tests/weight_fleet.py` and `tests/weight_coordinator.py`, also for
how to run this on GPUs. After every fault

    - the update ends within its deadline, and every engine that is left serves whole weights under their own version,
      or nothing;
    - the next update brings every engine to the trainer's weights: its samples are those of a fresh engine with them.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fourfold.errors import FourfoldError
from tests.trainer_driver import trainer_environment
from tests.weight_coordinator import Coordinator, write_task
from tests.weight_fleet import BACKENDS, UPDATE_SECONDS, Engine, Fleet, go_on, kill, stop

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

# Of an update in which somebody dies: that shows at once.
_DEATH_SECONDS = 20.0
# Of one in which somebody does not answer: a deadline of the calls, one of the abort, and the update of the others.
_SILENCE_SECONDS = 2 * UPDATE_SECONDS + 20.0
# After this long nobody waits for a coordinator any more.
_WATCHDOG_SECONDS = UPDATE_SECONDS + 8.0
_numbers = itertools.count()


@pytest.fixture(scope="module")
def fleet(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tiny_model("llama"), tmp_path_factory.mktemp("fleet"))
    try:
        asyncio.run(made.learn())
        yield made
    finally:
        made.close()


@asynccontextmanager
async def coordinating(fleet: Fleet, *engines: Engine, backend: str = "") -> AsyncIterator[Coordinator]:
    """Run a new coordinator, with a ledger of its own."""
    ledger = fleet.folder / f"ledger-{next(_numbers)}.sqlite"
    async with Coordinator(fleet.config(backend), fleet.members(engines), ledger) as coordinator:
        yield coordinator


async def ends_in(seconds: float, work: Awaitable[None]) -> None:
    """Await an update, which may fail but must end."""
    try:
        async with asyncio.timeout(seconds):
            await work
    except FourfoldError as error:
        print(f"the update ended with {type(error).__name__}: {error}")


def after(seconds: float, *actions: tuple[Callable[[int], None], int]) -> Callable[[], Awaitable[None]]:
    """Return an action that waits, then signals processes one after the other."""

    async def act() -> None:
        await asyncio.sleep(seconds)
        for action, pid in actions:
            action(pid)

    return act


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("who", ["service", "core"])
@pytest.mark.parametrize("moment", ["before open", "in open", "after begin", "in receive", "before commit", "committed"])
async def test_an_engine_that_is_killed(fleet: Fleet, moment: str, who: str, backend: str) -> None:
    if backend != BACKENDS[0] and moment not in ("in open", "in receive"):
        pytest.skip("no byte travels then")
    survivor, victim = fleet.engines(2)
    pid, core, name, rank = victim.pid if who == "service" else victim.core, victim.core, victim.member_id, 0
    async with coordinating(fleet, survivor, victim, backend=backend) as coordinator:
        tap = coordinator.tap
        match moment:
            case "before open":
                tap.on("before", name, "OpenWeights", after(0, (kill, pid)))
            case "in open":
                tap.on("before", name, "OpenWeights", after(0, (stop, core)))
                tap.on("during", name, "OpenWeights", after(0.3, (kill, pid)))
            case "after begin":
                tap.on("after", name, "BeginWeights", after(0, (kill, pid)))
            case "in receive":  # half of the bytes are there
                rank = fleet.trainer.rank
                tap.on("before", "trainer-0", "SendWeights", after(0, (stop, rank)))
                tap.on("during", name, "ReceiveWeights", after(0.5, (kill, pid)))
            case "before commit":
                tap.on("before", name, "CommitWeights", after(0, (kill, pid)))
            case _:
                tap.on("after", name, "CommitWeights", after(0, (kill, pid)))
        version = await fleet.turn()
        update = asyncio.create_task(ends_in(_DEATH_SECONDS, coordinator.settle(version)))
        if rank:
            await asyncio.to_thread(victim.wait, 30)
            await asyncio.sleep(1)
            go_on(rank)
        await update
        assert not tap.pending
        await asyncio.to_thread(victim.wait, 10)
        fleet.prepare(2)
        await fleet.check_whole(survivor, version)
        coordinator.leave(name)
        version = await fleet.turn()
        async with asyncio.timeout(_DEATH_SECONDS):
            await coordinator.publish(version)
        await fleet.check_whole(survivor, version)
