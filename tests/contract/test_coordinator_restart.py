"""Kill -9 of the coordinator in each phase; a new one at the same address continues, and the services keep their state.

The coordinator is a process, and ends itself at a call or at a write to its ledger (`tests/fault_injection`). The toy
services live in the test. Whatever the phase: no step is trained twice or lost, the batches are those of a run that
nobody disturbed, the trainer loads no checkpoint, and no engine is left paused or busy.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from fourfold.host.clock import SystemClock
from fourfold.rollout.v1 import rollout_control_service_pb2 as control
from fourfold.sample import Sample
from fourfold.trainer.v1 import trainer_service_pb2 as trainer
from fourfold_coordinator.launch.run_names import ADDRESS_FILE
from fourfold_coordinator.state.ledger import COORDINATOR_RESTARTED
from tests.fakes.stage import Stage, check_books, successor, until
from tests.fakes.toy import Context
from tests.fakes.toy_trainer import FakeTrainer

STEPS: Final = 6
FAULTS: Final = Path(__file__).parents[1] / "fault_injection"
Batches = list[list[tuple[bytes, float | None]]]
_undisturbed: Batches = []


class RealCalls(FakeTrainer):
    """Ends a step that it has begun, as the real trainer does, when its caller is gone."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.working = False

    def status(self) -> trainer.TrainerStatus:
        status = super().status()
        if self.working:
            status.phase = trainer.TRAINER_PHASE_TRAINING
        return status

    async def TrainStep(
        self, request_iterator: AsyncIterator[trainer.TrainStepRequest], context: Context
    ) -> trainer.TrainStepResponse:
        messages = [message async for message in request_iterator]

        async def replay() -> AsyncIterator[trainer.TrainStepRequest]:
            for message in messages:
                yield message

        self.working = True
        step = asyncio.ensure_future(super().TrainStep(replay(), context))
        step.add_done_callback(lambda _: setattr(self, "working", False))
        return await asyncio.shield(step)


class ImpatientClock(SystemClock):
    """Lets services renew their leases early: they notice a new coordinator at once, and not up to 5 s later."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.3))


class Restarted:
    """A stage whose coordinator is a process, started again at its address after each death."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.fault = stage, stage.folder.parent / "fault"
        self.listen = "127.0.0.1:0"
        self.process: asyncio.subprocess.Process | None = None
        self.batches: Batches = []
        stage.trainer.on_batch = self._note_batch
        for member in stage.members:
            member.clock = ImpatientClock()

    def _note_batch(self, samples: list[Sample]) -> None:
        self.batches.append([(s.token_ids.tobytes(), s.score) for s in samples])

    def doom(self, call: str, occurrence: int = 1) -> None:
        """Let the coordinator die at its next such call."""
        fresh = self.fault.with_suffix(".new")
        fresh.write_text(f"{call} {occurrence} 0")
        fresh.replace(self.fault)

    async def spawn(self) -> None:
        folder = self.stage.folder
        env = {**os.environ, "FOURFOLD_FAULT_CALL": str(self.fault)}
        env["PYTHONPATH"] = os.pathsep.join([str(FAULTS), *sys.path])
        words = ["serve", "coordinator", str(folder / "config.toml"), "--run-dir", str(folder), "--listen", self.listen]
        with (folder / "coordinator.log").open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "fourfold", *words, stdout=output, stderr=output, env=env
            )

    async def begin(self, *, join: bool = True) -> None:
        """Start the first coordinator; let the services register."""
        await self.spawn()
        await until((self.stage.folder / ADDRESS_FILE).exists, 30)
        self.listen = self.stage.address = (self.stage.folder / ADDRESS_FILE).read_text().strip()
        if join:
            for member in self.stage.members:
                await member.join(self.stage.address)

    async def end(self, seconds: float = 60.0) -> int:
        """Wait for the coordinator's end; return its exit code."""
        assert self.process is not None
        async with asyncio.timeout(seconds):
            return await self.process.wait()

    async def continue_run(self) -> float:
        """Start another coordinator and wait for the end of the run; return the seconds to the first progress of it."""
        began, steps = time.monotonic(), len(self.stage.trainer.batches)
        await self.spawn()
        ended = asyncio.ensure_future(self.end())
        while len(self.stage.trainer.batches) == steps and not ended.done():
            await asyncio.sleep(0.01)
        seconds = time.monotonic() - began
        assert await ended == 0, (self.stage.folder / "coordinator.log").read_text()[-4000:]
        return seconds


@asynccontextmanager
async def restarted(stage: Stage) -> AsyncIterator[Restarted]:
    made = Restarted(stage)
    try:
        yield made
    finally:
        if made.process is not None and made.process.returncode is None:
            made.process.kill()
            await made.process.wait()


async def undisturbed(make_stage: Callable[..., Stage]) -> Batches:
    """Return the batches of a run without deaths."""
    if not _undisturbed:
        stage = make_stage(steps=STEPS)
        noted = Restarted(stage)
        await stage.start()
        assert await stage.finish() == 0
        _undisturbed.extend(noted.batches)
    return _undisturbed


async def check(stage: Stage, run: Restarted, expected: Batches, *, raised: tuple[int, ...] = (0,)) -> None:
    """Check what must hold after the deaths of a coordinator, whatever the phase."""
    check_books(stage)
    differing = [step for step, (own, other) in enumerate(zip(run.batches, expected, strict=True), 1) if own != other]
    assert not differing, "each step was trained once, on the samples of an undisturbed run"
    assert stage.trainer.loaded == [], "the trainer was not reset"
    for engine in stage.rollouts:
        assert engine.state == control.WEIGHT_STATE_CLEAN and not engine.held
        assert (engine.weights, engine.version) == (stage.trainer.weights, stage.trainer.version)
        assert engine.commits == sorted(set(engine.commits)), "no version is served twice"
    # An engine keeps weights of which the ledger knows that it has them; the number of others is used up.
    assert stage.trainer.version - stage.trainer.weights in raised
    report = stage.report()
    assert report["restarts"] == {"coordinator-0": 1} and report["resumes"] == 0
    assert [row["trainer_kept"] for row in report["recoveries"]] == [True]
    assert set(report["dropped"]) <= {COORDINATOR_RESTARTED}
    evals = [row["step"] for row in report["evals"]]
    assert evals == [0, 2, 4, 6]


# When the file of the fault is written, `from_start` or while the third step trains; and the moment.
MOMENTS: Final = {
    "joining": ("OpenWeights", True),
    "collecting": ("after:issue", False),
    "scoring": ("Score", False),
    "leased": ("after:lease", False),
    "answered": ("before:acknowledge", False),
    "acknowledged": ("after:acknowledge", False),
    "version recorded": ("after:publishing", False),
    "looking up": ("ComputeLogprobs", False),
    "pausing": ("BeginWeights", False),
    "transfer": ("ReceiveWeights", False),
    "commit": ("CommitWeights", False),
    "probe": ("ProbeLogprobs", False),
    "reporting": ("before:record_metrics", False),
    "reported": ("after:record_metrics", False),
    "evaluating": ("before:add_eval", False),
    "evaluated": ("after:add_eval", False),
    "saving": ("SaveCheckpoint", False),
    "saved": ("before:commit_checkpoint", False),
    "committed": ("after:commit_checkpoint", False),
    "exporting": ("ExportModel", False),
}
# All but one are slow. These are like the one before or after them.
_SOAK: Final = ("scoring", "answered", "looking up", "pausing", "probe", "reporting", "evaluated", "saving")


def _marks(moment: str) -> list[pytest.MarkDecorator]:
    soak = [pytest.mark.soak] if moment in _SOAK else []
    return [] if moment == "saved" else [pytest.mark.slow, *soak]


@pytest.mark.parametrize("moment", [pytest.param(name, marks=_marks(name)) for name in MOMENTS])
async def test_a_coordinator_that_is_killed_is_replaced_without_loss(
    make_stage: Callable[..., Stage], moment: str, record_property: Callable[[str, object], None]
) -> None:
    expected = await undisturbed(make_stage)
    stage = make_stage(steps=STEPS)
    call, from_start = MOMENTS[moment]
    async with restarted(stage) as run:

        async def doom(step: int) -> None:
            if step == 3 and len(stage.trainer.batches) == 2:
                run.doom(call)

        if from_start:
            run.doom(call)
        else:
            stage.trainer.on_train = doom
        await run.begin()
        assert await run.end() == -signal.SIGKILL
        seconds = await run.continue_run()
    # The first groups are issued when the engine samples, while its probe is compared.
    raised = {"probe": (1,), "collecting": (0, 1)}.get(moment, (0,))
    await check(stage, run, expected, raised=raised)
    dropped = stage.report()["dropped"].get(COORDINATOR_RESTARTED, 0)
    sys.stdout.write(f"\n{moment}: {seconds:.1f} s, {dropped} samples dropped\n")
    record_property("seconds", seconds)
    assert seconds < 60, "training continues"


@pytest.mark.slow
@pytest.mark.parametrize("received", [True, False])
async def test_a_step_in_flight_is_kept_if_the_trainer_received_it(
    make_stage: Callable[..., Stage], received: bool
) -> None:
    expected = await undisturbed(make_stage)
    stage = make_stage(steps=STEPS)
    if received:
        stage.trainer = RealCalls("trainer-0", stage.config)
    async with restarted(stage) as run:

        async def die(step: int) -> None:
            if step == 3 and len(stage.trainer.batches) == 2 and run.process is not None and not killed.is_set():
                killed.set()
                run.process.kill()
                await asyncio.sleep(4.0)  # the next coordinator is there before the step is done

        killed = asyncio.Event()
        stage.trainer.on_train = die
        await run.begin()
        assert await run.end() == -signal.SIGKILL
        seconds = await run.continue_run()
    await check(stage, run, expected)
    dropped = stage.report()["dropped"]
    assert dropped == {}, "its batch is trained, or leased again"
    sys.stdout.write(f"\nin flight, received={received}: {seconds:.1f} s, dropped {dropped}\n")


@pytest.mark.slow
async def test_engines_are_idle_after_the_death_of_their_caller(make_stage: Callable[..., Stage]) -> None:
    expected = await undisturbed(make_stage)
    stage = make_stage(steps=STEPS)
    begun = ended = 0

    async def hang() -> None:
        nonlocal begun, ended
        if len(stage.trainer.batches) == 3 and not died:
            begun += 1
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                ended += 1
                raise

    died = False
    stage.rollouts[0].on_generate = hang
    async with restarted(stage) as run:
        await run.begin()
        await until(lambda: begun == 2, 30)  # eight samples fill the engine
        assert run.process is not None
        run.process.kill()
        await run.end()
        died = True
        await until(lambda: ended == 2, 5)  # the calls end with their connection
        seconds = await run.continue_run()
    # Engines sample before the ledger notes their weights: a number is used up if the kill came in between.
    await check(stage, run, expected, raised=(0, 1))
    sys.stdout.write(f"\nsampling: {seconds:.1f} s\n")


@pytest.mark.slow
async def test_a_coordinator_that_is_killed_while_it_waits_for_services(make_stage: Callable[..., Stage]) -> None:
    expected = await undisturbed(make_stage)
    stage = make_stage(steps=STEPS)
    async with restarted(stage) as run:
        await run.begin(join=False)
        for member in (stage.trainer, stage.reward):
            await member.join(stage.address)
        assert run.process is not None
        run.process.kill()
        await run.end()
        await stage.rollouts[0].join(stage.address)
        seconds = await run.continue_run()
    check_books(stage)
    assert run.batches == expected
    sys.stdout.write(f"\nwaiting for services: {seconds:.1f} s\n")


@pytest.mark.slow
async def test_a_trainer_that_dies_with_the_coordinator_is_restored(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=STEPS)
    async with restarted(stage) as run:
        stage.trainer.on_train = lambda step: _doom_at(run, step, "before:lease")
        await run.begin()
        assert await run.end() == -signal.SIGKILL
        old = stage.trainer
        await old.kill()
        stage.trainer = successor(old)
        await stage.trainer.join(stage.address)
        await run.continue_run()
    check_books(stage)
    assert stage.trainer.loaded == [2]
    assert [row["trainer_kept"] for row in stage.report()["recoveries"]] == [False]


async def _doom_at(run: Restarted, step: int, call: str) -> None:
    if step == 3:
        run.doom(call)
