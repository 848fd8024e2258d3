"""Processes that die, stop or lie in every phase of a weight update: the rest is in order, and the next one is right.

Everything is real but the coordinator's loop: see `weight_fleet.py` and `weight_coordinator.py` in
tests/support, also for how to run this on GPUs. After every fault

    - the update ends within its deadline, and every engine that is left serves whole weights under their own version,
      or nothing;
    - the next update brings every engine to the trainer's weights: its samples are those of a fresh engine with them.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import StaleEpoch, WrongState
from tests.support.signals import go_on, kill, stop, terminate
from tests.support.trainer_driver import REPOSITORY, trainer_environment
from tests.support.weight_coordinator import (
    UPDATE_SECONDS,
    Coordinator,
    after,
    ends_in,
    ends_well,
    repeat,
    until,
    write_task,
)
from tests.support.weight_fleet import BACKENDS, Engine, Fleet

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(500)]

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
    await asyncio.to_thread(fleet.trainer.wait_ready)
    async with Coordinator(fleet.config(backend), fleet.members(engines), ledger) as coordinator:
        yield coordinator


def half_sent(fleet: Fleet, coordinator: Coordinator) -> int:
    """Stop a rank of the trainer before it sends its half; return its pid."""
    rank = fleet.trainer.rank
    coordinator.tap.on("before", "trainer-0", "SendWeights", after(0, (stop, rank)))
    return rank


ENGINE_MOMENTS = ("in open", "after begin", "in receive", "after commit")
ENGINE_DEATHS = [
    *((moment, ("core", "service")[number % 2], BACKENDS[0]) for number, moment in enumerate(ENGINE_MOMENTS)),
    *(("in receive", "core", backend) for backend in BACKENDS[1:]),
    *(
        pytest.param(moment, ("service", "core")[number % 2], BACKENDS[0], marks=pytest.mark.soak)
        for number, moment in enumerate(ENGINE_MOMENTS)
    ),
    *(pytest.param("in open", "core", backend, marks=pytest.mark.soak) for backend in BACKENDS[1:]),
]


@pytest.mark.parametrize(("moment", "who", "backend"), ENGINE_DEATHS)
async def test_an_engine_is_killed(fleet: Fleet, moment: str, who: str, backend: str) -> None:
    survivor, victim = fleet.engines(2)
    core, name, rank = victim.core, victim.member_id, 0
    death = (kill, victim.pid if who == "service" else core)
    async with coordinating(fleet, survivor, victim, backend=backend) as coordinator:
        tap = coordinator.tap
        match moment:
            case "in open":
                tap.on("before", name, "OpenWeights", after(0, (stop, core)))
                tap.on("during", name, "OpenWeights", after(0.3, death))
            case "after begin":
                tap.on("after", name, "BeginWeights", after(0, death))
            case "in receive":
                rank = half_sent(fleet, coordinator)
                tap.on("during", name, "ReceiveWeights", after(0.5, death))
            case _:
                tap.on("after", name, "CommitWeights", after(0, death))
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
        assert name not in coordinator.versions() or moment == "after commit"
        coordinator.leave(name)
        version = await fleet.turn()
        await ends_well(_DEATH_SECONDS, coordinator.publish(version))
        await fleet.check_whole(survivor, version)


TRAINER_DEATHS = [
    ("offer", "service", BACKENDS[0]),
    ("open", "rank", BACKENDS[-1]),
    ("send", "rank", BACKENDS[0]),
    ("sent", "service", BACKENDS[0]),
    pytest.param("open", "service", BACKENDS[-1], marks=pytest.mark.soak),
    pytest.param("send", "service", BACKENDS[0], marks=pytest.mark.soak),
    *(pytest.param("send", "rank", backend, marks=pytest.mark.soak) for backend in BACKENDS[1:]),
]


@pytest.mark.parametrize(("moment", "who", "backend"), TRAINER_DEATHS)
async def test_the_trainer_is_killed(fleet: Fleet, moment: str, who: str, backend: str) -> None:
    if who == "rank" and not fleet.two_ranks:
        pytest.skip("the trainer has one rank: there are no GPUs for two")
    engines = fleet.engines(2)
    first, trainer = engines[0], fleet.trainer
    death = (kill, trainer.rank if who == "rank" else trainer.pid)
    async with coordinating(fleet, *engines, backend=backend) as coordinator:
        version = await fleet.turn()
        tap = coordinator.tap
        match moment:
            case "offer":
                tap.on("before", "trainer-0", "MakeOffer", after(0, death))
            case "open":  # the trainer waits for an engine that does not come yet
                tap.on("before", first.member_id, "OpenWeights", after(0, (stop, first.core)))
                tap.on("during", "trainer-0", "OpenWeights", after(0.3, death, (go_on, first.core)))
            case "send":
                half_sent(fleet, coordinator)
                tap.on("during", first.member_id, "ReceiveWeights", after(0.5, death))
            case _:
                tap.on("before", first.member_id, "CommitWeights", after(0, death))
        await ends_in(_DEATH_SECONDS, coordinator.settle(version))
        assert not tap.pending
        await asyncio.to_thread(trainer.wait, 10)
        fleet.next_trainer()
        for engine in engines:
            await fleet.check_settled(engine, _WATCHDOG_SECONDS)
        await asyncio.to_thread(fleet.trainer.wait_ready)
        coordinator.join(fleet.members([])[0])
        await coordinator.session.connect()
        version = await fleet.turn()
        await ends_well(_DEATH_SECONDS, coordinator.settle(version))
        for engine in engines:
            await fleet.check_whole(engine, version)


COORDINATOR_DEATHS = {
    "opening": ("during", "", "OpenWeights"),
    "receiving": ("during", "", "ReceiveWeights"),
    "one committed": ("after", "", "CommitWeights"),
}


@pytest.mark.parametrize("moment", COORDINATOR_DEATHS)
async def test_the_coordinator_is_killed(fleet: Fleet, tmp_path: Path, moment: str) -> None:
    engines = fleet.engines(2)
    when, who, method = COORDINATOR_DEATHS[moment]
    rank = fleet.trainer.rank
    version = await fleet.turn()
    write_task(
        tmp_path / "task.json",
        fleet.members(engines),
        recipe=str(fleet.recipe),
        ledger=str(tmp_path / "ledger.sqlite"),
        version=version,
        die=[when, who or engines[0].member_id, method],
        seconds=0.5 if moment == "receiving" else 0.0,
        stop=rank if moment == "receiving" else 0,
        hold=engines[1].member_id if moment == "one committed" else "",
    )
    argv = [sys.executable, "-m", "tests.support.weight_coordinator", str(tmp_path / "task.json")]
    done = await asyncio.to_thread(
        subprocess.run, argv, env=trainer_environment(), cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    go_on(rank)
    for engine in engines:
        await fleet.check_settled(engine, _WATCHDOG_SECONDS)
    async with coordinating(fleet, *engines) as coordinator:
        version = await fleet.turn()
        await ends_well(_DEATH_SECONDS, coordinator.settle(version))
        for engine in engines:
            await fleet.check_whole(engine, version)


@pytest.mark.parametrize(
    ("who", "backend"),
    [
        ("core", BACKENDS[0]),
        ("service", BACKENDS[-1]),
        pytest.param("service", BACKENDS[0], marks=pytest.mark.soak),
        pytest.param("core", BACKENDS[-1], marks=pytest.mark.soak),
    ],
)
async def test_an_engine_stops_answering(fleet: Fleet, who: str, backend: str) -> None:
    survivor, victim = fleet.engines(2)
    pid = victim.pid if who == "service" else victim.core
    async with coordinating(fleet, survivor, victim, backend=backend) as coordinator:
        coordinator.tap.on("before", victim.member_id, "ReceiveWeights", after(0, (stop, pid)))
        version = await fleet.turn()
        try:
            await ends_well(_SILENCE_SECONDS, coordinator.settle(version))
            coordinator.keep()  # where all meet, nobody can tell who hangs: each is tried alone then
            await until(lambda: survivor.member_id in coordinator.versions(), 2 * _SILENCE_SECONDS)
            assert coordinator.versions() == {survivor.member_id: version}
            await fleet.check_whole(survivor, version)
        finally:
            go_on(pid)
        await until(lambda: victim.member_id in coordinator.versions(), 2 * _SILENCE_SECONDS)
        for engine in (survivor, victim):
            await fleet.check_whole(engine, version)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_rank_of_the_trainer_stops_answering(fleet: Fleet, backend: str) -> None:
    engines = fleet.engines(2)
    async with coordinating(fleet, *engines, backend=backend) as coordinator:
        version = await fleet.turn()
        rank = half_sent(fleet, coordinator)
        try:
            await ends_in(_SILENCE_SECONDS, coordinator.settle(version))
            assert coordinator.versions() == {}
            for engine in engines:
                await fleet.check_settled(engine, _WATCHDOG_SECONDS)
        finally:
            go_on(rank)
        version = await fleet.turn()
        await ends_well(_SILENCE_SECONDS, coordinator.settle(version))
        for engine in engines:
            await fleet.check_whole(engine, version)


@pytest.mark.skipif(BACKENDS[0] != "shm", reason="only shared memory can be written by this process")
async def test_a_bit_that_flips_on_the_way(fleet: Fleet) -> None:
    (engine,) = fleet.engines(1)
    name, sent = engine.member_id, asyncio.Event()

    async def flip() -> None:
        await fleet.flip_sent_bit("model.layers.1.mlp.down_proj.weight")
        sent.set()

    async def wait() -> None:
        await sent.wait()

    async with coordinating(fleet, engine) as coordinator:
        coordinator.tap.on("after", "trainer-0", "SendWeights", flip)
        coordinator.tap.on("before", name, "ReceiveWeights", wait)
        version = await fleet.turn()
        await ends_well(_DEATH_SECONDS, coordinator.settle(version))
        assert coordinator.versions() == {}
        assert (name, "CommitWeights") not in coordinator.tap.seen
        said = coordinator.router.explain(Role.ROLE_ROLLOUT)
        await fleet.check_settled(engine, 1.0)
        coordinator.keep()
        await until(lambda: coordinator.versions() == {name: version}, _DEATH_SECONDS)
        await fleet.check_whole(engine, version)
        assert "digest" in said and "model.layers.1.mlp.down_proj.weight" in said


async def test_an_engine_of_another_shape_is_left_out_and_goes_on(
    fleet: Fleet, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    (engine,) = fleet.engines(1)
    other = fleet.other_model(narrower(tiny_model("llama"), tmp_path / "narrower"))
    before = await other.sample()
    async with coordinating(fleet, engine, other) as coordinator:
        version = await fleet.turn()
        await ends_well(_DEATH_SECONDS, coordinator.settle(version))
        assert coordinator.versions() == {engine.member_id: version}
        assert (other.member_id, "BeginWeights") not in coordinator.tap.seen
        assert "down_proj" in coordinator.router.explain(Role.ROLE_ROLLOUT)
        await fleet.check_whole(engine, version)
    assert await other.sample() == before
    other.end()


async def test_calls_that_come_again_or_too_late_change_nothing(fleet: Fleet) -> None:
    (engine,) = fleet.engines(1)
    async with coordinating(fleet, engine) as coordinator:
        tap = coordinator.tap
        version = await fleet.turn()
        await ends_well(_DEATH_SECONDS, coordinator.settle(version))
        again = [m for m in ("CommitWeights", "ReleaseWeights") if (engine.member_id, m) in tap.seen]
        for method in again:
            await repeat(engine.target, tap, engine.member_id, method)
        for process, methods in (
            (engine, ("OpenWeights", "BeginWeights", "ReceiveWeights", *again, "AbortWeights")),
            (fleet.trainer, ("MakeOffer", "OpenWeights", "SendWeights", "AbortWeights")),
        ):
            for method in methods:
                with pytest.raises(StaleEpoch):
                    await repeat(process.target, tap, process.member_id, method, epochs_earlier=1)
        with pytest.raises(WrongState, match="not above the served version"):
            await repeat(engine.target, tap, engine.member_id, "BeginWeights")
        await fleet.check_whole(engine, version)
        version = await fleet.turn()
        await ends_well(_DEATH_SECONDS, coordinator.publish(version))
        await fleet.check_whole(engine, version)
        assert tap.seen.count(("trainer-0", "MakeOffer")) == 1, "the epoch was still open"


async def test_an_engine_that_comes_late_is_filled_before_it_serves(fleet: Fleet) -> None:
    first, late = fleet.engines(2)
    (joiner,) = fleet.members([late])[1:]
    trainer = fleet.trainer
    async with coordinating(fleet, first, backend=BACKENDS[-1]) as coordinator:
        version = await fleet.turn()
        await ends_well(_DEATH_SECONDS, coordinator.settle(version))
        coordinator.keep()
        tap = coordinator.tap
        updates = tap.seen.count((first.member_id, "BeginWeights"))
        sends = tap.seen.count(("trainer-0", "SendWeights"))
        coordinator.join(joiner)  # between two versions
        await until(lambda: late.member_id in coordinator.versions(), _DEATH_SECONDS)
        await fleet.check_whole(late, version)
        assert tap.seen.count((first.member_id, "BeginWeights")) == updates
        if BACKENDS[-1] == "gloo":
            assert (first.member_id, "FeedWeights") in tap.seen
            assert tap.seen.count(("trainer-0", "SendWeights")) == sends, "the trainer was not disturbed"

    async def join() -> None:
        coordinator.join(joiner)
        await asyncio.sleep(1)
        assert late.member_id not in coordinator.versions()

    async with coordinating(fleet, first) as coordinator:
        coordinator.keep()
        coordinator.tap.on("before", "trainer-0", "SendWeights", join)
        version = await fleet.turn()
        await ends_well(_DEATH_SECONDS, coordinator.settle(version))
        assert not coordinator.tap.pending
        await until(lambda: late.member_id in coordinator.versions(), _DEATH_SECONDS)
        for engine in (first, late):
            await fleet.check_whole(engine, version)
        version = await fleet.turn()
        await ends_well(_DEATH_SECONDS, coordinator.publish(version))
        for engine in (first, late):
            await fleet.check_whole(engine, version)
    assert fleet.trainer is trainer and trainer.alive


async def test_an_engine_that_leaves_in_an_update_is_not_waited_for(fleet: Fleet) -> None:
    stays, leaves = fleet.engines(2)
    async with coordinating(fleet, stays, leaves) as coordinator:
        coordinator.tap.on("after", leaves.member_id, "BeginWeights", after(0, (terminate, leaves.pid)))
        version = await fleet.turn()
        await ends_well(_DEATH_SECONDS, coordinator.settle(version))
        assert await asyncio.to_thread(leaves.wait, 10) == 0
        coordinator.leave(leaves.member_id)
        await fleet.check_whole(stays, version)
        version = await fleet.turn()
        await ends_well(_DEATH_SECONDS, coordinator.publish(version))
        await fleet.check_whole(stays, version)


def narrower(model: Path, folder: Path) -> Path:
    """Write a model of the same kind with smaller layers."""
    import torch
    import transformers

    shutil.copytree(model, folder)
    config = transformers.AutoConfig.from_pretrained(model)
    config.intermediate_size //= 2
    made: Any = transformers.LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    made.to(torch.bfloat16).save_pretrained(folder)
    return folder
