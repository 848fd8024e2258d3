"""Drives one run of toy services through faults, and checks the books after each of them.

A fault strikes inside a call of its phase. Then the run must train two more steps, and ledger and trainer must agree.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import resource
import signal
import sqlite3
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, redirect_stderr, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fourfold import config as configuration
from fourfold_coordinator.launch.run_names import ADDRESS_FILE
from fourfold_coordinator.state.ledger import SampleState
from tests.fakes.stage import Stage, check_books
from tests.fakes.toy import make_config
from tests.fakes.witness import Linked, WitnessReward, WitnessRollout, WitnessTrainer, World

# The calls in which a fault of a phase strikes; `:done` stands for the moment before the response.
PHASES: Final = {
    "sampling": ("Generate", "Generate:done"),
    "scoring": ("Score", "Score:done"),
    "training": ("TrainStep", "TrainStep:done"),
    "sending": ("SendWeights", "SendWeights:done"),
    "pausing": ("BeginWeights", "BeginWeights:done"),
    "transfer": ("ReceiveWeights", "ReceiveWeights:done"),
    "commit": ("CommitWeights", "CommitWeights:done"),
    "probe": ("ProbeLogprobs", "ComputeLogprobs", "ProbeLogprobs:done"),
    "release": ("ReleaseWeights", "ReleaseWeights:done"),
    "checkpoint": ("SaveCheckpoint", "SaveCheckpoint:done"),
    "restoring": ("LoadCheckpoint", "LoadCheckpoint:done", "RaisePolicyVersion", "RaisePolicyVersion:done"),
    "joining": ("DescribeEngine", "DescribeEngine:done"),
}
KINDS: Final = (
    "reset",
    "black hole",
    "kill engine",
    "kill trainer",
    "kill reward",
    "kill coordinator",
    "kill coordinator and trainer",
    "kill all",
    "disk full",
    "clock jump",
)
PROCESS_ONLY: Final = ("disk full", "clock jump")
_JUMPS: Final = (-90000.0, -7200.0, -15.0, 15.0, 3600.0, 40000.0)  # seconds
_PROMPTS: Final = 4
_GROUP: Final = 16
_STALL_SECONDS: Final = 45.0
_SOURCE: Final = Path(__file__).parents[1] / "fault_injection" / "clock_jump.c"


@dataclass(slots=True)
class Tally:
    """What happened, over all runs of a test."""

    faults: Counter[tuple[str, str]] = field(default_factory=Counter)  # by kind and phase
    samples: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    lags: Counter[int] = field(default_factory=Counter)
    mixed: int = 0
    checks: int = 0
    coordinators: Counter[str] = field(default_factory=Counter)  # started, by kind
    restores: int = 0
    errors: Counter[str] = field(default_factory=Counter)  # coordinators that ended with an error
    violations: Counter[str] = field(default_factory=Counter)


def build_clock(folder: Path) -> Path:
    """Compile the library that moves the wall clock of a process; return its path."""
    library = folder / "clock_jump.so"
    subprocess.run(["g++", "-x", "c", "-O1", "-shared", "-fPIC", "-o", library, _SOURCE, "-ldl"], check=True)
    return library


class FaultRun:
    """One run, its services, and the faults that strike it."""

    def __init__(
        self, root: Path, clock: Path, *, seed: int, steps: int, tally: Tally, faults: Sequence[tuple[str, str]]
    ) -> None:
        """Prepare a run; `faults`, kinds and phases, strike in turn."""
        self.chance, self.seed, self.tally, self.root = random.Random(seed), seed, tally, root
        self._planned = faults
        self.filtered = self.chance.random() < 0.4
        self.steps, self.clock = steps, clock
        self.largest_lag = 0  # of the recipes so far
        self.world = World(on_call=self._on_call)
        self.stage = Stage(root, **self._recipe())
        config, world = self.stage.config, self.world
        self.stage.rollouts = [WitnessRollout(f"rollout-{i}", config, world) for i in range(2)]
        self.stage.trainer = WitnessTrainer("trainer-0", config, world)
        self.stage.reward = WitnessReward("reward-0", config, world, monotonous=self.filtered)
        self.process: asyncio.subprocess.Process | None = None
        self.faults: list[str] = []
        self._armed: tuple[str, ...] = ()
        self._fired = asyncio.Event()
        self._act: Callable[[], None] = lambda: None
        offset = root / "clock"
        offset.write_bytes(bytes(8))
        with offset.open("r+b") as file:
            self._offset = mmap.mmap(file.fileno(), 8)

    @property
    def log(self) -> Path:
        return self.stage.folder / "coordinator.log"

    @property
    def trainer(self) -> WitnessTrainer:
        assert isinstance(self.stage.trainer, WitnessTrainer)
        return self.stage.trainer

    def _recipe(self) -> dict[str, Any]:
        self.world.max_lag = self.chance.randint(1, 4)
        self.largest_lag = max(self.largest_lag, self.world.max_lag)
        rule = {"algorithm": {"filter": {"keep": "varied", "max_rounds": 40}}} if self.filtered else {}
        return {
            "steps": self.steps,
            "seed": self.seed % 2**31,
            "asynchrony": {"max_policy_lag": self.world.max_lag},
            "batch": {"prompts_per_step": _PROMPTS, "group_size": _GROUP, "tokens_per_micro_batch": 1024},
            "evaluation": {"every_steps": 12, "samples_per_prompt": 1},
            "checkpoint": {"every_steps": 4},
            "rollout": {"replicas": 2},
            "reward": {"timeout_seconds": 3.0, "lost_rounds": 50},
            "trainer": {"step_timeout_seconds": 4.0},
            "weights": {"timeout_seconds": 4.0},
            "retry": {"service_wait_seconds": 60.0, "restarts": 1000, "infrastructure": 8},
            **rule,
        }

    # -- coordinators -----------------------------------------------------------------------------------------------

    async def start(self, *, in_process: bool | None = None) -> None:
        """Start a coordinator with another lag limit, and let the services register.

        `in_process` tells whether it runs in this process; None: chance decides.
        """
        stage = self.stage
        stage.config = make_config(self.root, **self._recipe())
        (stage.folder / "config.toml").write_text(configuration.dump(stage.config))
        if in_process is None:
            in_process = self.chance.random() < 0.4
        self.tally.coordinators["in-process" if in_process else "process"] += 1
        self._offset[:] = struct.pack("<d", 0.0)
        if in_process:
            await stage.start(join=False)
        else:
            await self._spawn()
        for member in stage.members:
            await member.join(stage.address)

    async def _spawn(self) -> None:
        folder = self.stage.folder
        (folder / ADDRESS_FILE).unlink(missing_ok=True)
        env = {**os.environ, "LD_PRELOAD": str(self.clock), "CLOCK_JUMP_FILE": str(self.root / "clock")}
        words = ["serve", "coordinator", str(folder / "config.toml"), "--run-dir", str(folder)]
        with self.log.open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "fourfold", *words, stdout=output, stderr=output, env=env
            )
        async with asyncio.timeout(60):
            while not (folder / ADDRESS_FILE).exists() and not self.ended:
                await asyncio.sleep(0.02)
        self.stage.address = (folder / ADDRESS_FILE).read_text().strip()

    @property
    def ended(self) -> bool:
        return self.process.returncode is not None if self.process is not None else self.stage.ended

    async def _end_coordinator(self) -> int | str:
        """Reap the coordinator, killing it if it lives; return its exit code, or its error."""
        if self.process is not None:
            process, self.process = self.process, None
            with suppress(ProcessLookupError):
                process.kill()
            return await process.wait()
        run, self.stage.run = self.stage.run, None
        assert run is not None
        run.cancel()
        try:
            return await run
        except asyncio.CancelledError:
            return -signal.SIGKILL

    # -- faults -----------------------------------------------------------------------------------------------------

    async def _on_call(self, name: str) -> None:
        """Strike, if a fault is armed for this call."""
        if name in self._armed:
            self._armed = ()
            self._act()
            self._fired.set()
            await asyncio.sleep(0.02)

    async def _strike_in(self, phase: str, act: Callable[[], None]) -> str:
        """Let a fault strike in one call of a phase; return the phase, or `any` if it did not come in time."""
        self._fired.clear()
        self._act = act
        self._armed = (self.chance.choice(PHASES[phase]),)
        end = time.monotonic() + 10
        while not self._fired.is_set() and not self.ended and time.monotonic() < end:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await self._fired.wait()
        self._armed = ()
        if self._fired.is_set():
            return phase
        if not self.ended:
            act()
        return "any"

    def _kill_coordinator(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.kill()
        elif self.stage.run is not None:
            self.stage.run.cancel()

    def _kill(self, member: Linked) -> None:
        """Cut a member off at once; `_replace` ends it."""
        if member.link is not None:
            member.link.close()

    async def strike(self, kind: str, phase: str) -> None:
        """Let a fault strike, and bring back what it took."""
        if kind in PROCESS_ONLY and self.process is None:  # it would do nothing
            await self._end_coordinator()
            await self.start(in_process=False)
        if phase == "restoring":  # there is none without the death of a trainer before
            await self._replace([self.trainer])
        elif phase == "joining":
            await self._replace([self.stage.rollouts[0]])
        victims = self._victims(kind)
        phase = await self._strike_in(phase, self._action(kind, victims))
        self.tally.faults[kind, phase] += 1
        self.faults.append(f"{kind} in {phase}, trainer at step {self.trainer.step}")
        if kind == "disk full":
            await asyncio.sleep(self.chance.uniform(0.3, 1.5))
            self._set_file_limit(full=False)
        if kind.startswith("kill"):
            await asyncio.sleep(self.chance.choice([0.0, 0.0, 0.2, 1.0]))
            await self._replace(victims)

    def _victims(self, kind: str) -> list[Any]:
        stage = self.stage
        victims: dict[str, list[Any]] = {
            "kill engine": [self.chance.choice(stage.rollouts)],
            "kill trainer": [stage.trainer],
            "kill reward": [stage.reward],
            "kill coordinator and trainer": [stage.trainer],
            "kill all": [*stage.rollouts, stage.trainer, stage.reward],
        }
        return victims.get(kind, [])

    def _action(self, kind: str, victims: list[Any]) -> Callable[[], None]:
        """Return what the fault does at its moment."""
        links = [m.link for m in self.stage.members if isinstance(m, Linked) and m.link is not None]
        chosen = links if self.chance.random() < 0.3 else [self.chance.choice(links)]
        seconds, jump = self.chance.choice([0.5, 2.0, 6.0]), self.chance.choice(_JUMPS)

        def act() -> None:
            match kind:
                case "reset":
                    for link in chosen:
                        link.reset()
                case "black hole":
                    for link in chosen:
                        link.swallow(seconds)
                case "disk full":
                    self._set_file_limit(full=True)
                case "clock jump":
                    self._offset[:] = struct.pack("<d", jump)
            if "coordinator" in kind or kind == "kill all":
                self._kill_coordinator()
            for victim in victims:
                self._kill(victim)

        return act

    def _set_file_limit(self, *, full: bool) -> None:
        """Let the coordinator's files become no longer than a byte, or end that."""
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            hard = resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (1 if full else hard, hard))

    async def _replace(self, victims: list[Any]) -> None:
        """Start new processes in place of dead members."""
        stage, config, world = self.stage, self.stage.config, self.world
        for victim in victims:
            await victim.kill()
            fresh: Linked
            if isinstance(victim, WitnessTrainer):
                self.tally.restores += 1
                fresh = stage.trainer = victim.successor()
            elif isinstance(victim, WitnessRollout):
                fresh = WitnessRollout(victim.member_id, config, world)
                stage.rollouts = [fresh if engine is victim else engine for engine in stage.rollouts]
            else:
                fresh = stage.reward = WitnessReward(victim.member_id, config, world, monotonous=self.filtered)
            if not self.ended:
                await fresh.join(stage.address)

    # -- the run ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run to the end, through all faults; raise AssertionError for a broken invariant."""
        # A coordinator in this process ends as one in its own: the last line on stderr has the reason.
        with self.log.open("a", buffering=1) as errors, redirect_stderr(errors):
            await self._run()

    async def _run(self) -> None:
        try:
            await self.start()
            over = False
            for kind, phase in self._planned:
                if over := await self._progress(self.chance.randint(1, 3)):
                    break
                await self.strike(kind, phase)
                if over := await self._progress(2):
                    break
                self.check_now()
            assert over or await self._progress(10 * self.steps)
            self.check_end()
        finally:
            if self.process is not None or self.stage.run is not None:
                await self._end_coordinator()
            await self.stage.close()
            self.tally.violations += self.world.violations
            self.tally.lags += self.world.lags
            self.tally.mixed += self.world.mixed

    async def _progress(self, steps: int) -> bool:
        """Wait until so many further steps are trained; return whether the run is over. Replace dead coordinators."""
        last, goal = self.world.steps, self.world.steps + steps
        stalled = time.monotonic() + _STALL_SECONDS
        while self.world.steps < goal:
            if self.ended:
                code = await self._end_coordinator()
                if code == 0:
                    return True
                if code != -signal.SIGKILL:
                    error = self._last_error(code)
                    self.tally.errors[error] += 1
                    raise AssertionError(self._describe(f"the coordinator ended with an error: {error}"))
                await self.start()
                goal = self.world.steps + steps
            if self.world.steps != last:
                last, stalled = self.world.steps, time.monotonic() + _STALL_SECONDS
            assert time.monotonic() < stalled, self._describe(f"no step in {_STALL_SECONDS:g} s")
            await asyncio.sleep(0.02)
        return False

    def _last_error(self, code: int | str) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return f"exit {code}: {lines[-1][:300] if lines else ''}"

    def _describe(self, text: str) -> str:
        tail = self.log.read_text(errors="replace")[-6000:]
        place = f"trainer at step {self.trainer.step} of {self.steps}"
        return f"seed {self.seed}, faults {self.faults[-4:]}: {text}; {place}\n{tail}"

    # -- invariants -------------------------------------------------------------------------------------------------

    def check_now(self) -> None:
        """Check what holds at any moment."""
        self.tally.checks += 1
        self.check_violations()
        before = {name for names in list(self.trainer.batches.values())[:-1] for name in names}
        with closing(sqlite3.connect(f"file:{self.stage.folder}/ledger.sqlite?mode=ro", uri=True, timeout=5)) as db:
            rows = db.execute("SELECT sample_id, state, reason FROM samples").fetchall()
            live = "SELECT COUNT(DISTINCT group_id) FROM samples WHERE state NOT IN ('TRAINED', 'DROPPED')"
            ((admitted,),) = db.execute(live).fetchall()
        places = (self.largest_lag + 1) * _PROMPTS  # a filtered group keeps its state until its window ends
        assert self.filtered or admitted <= places, self._describe(f"{admitted} groups admitted, of {places}")
        after = {name for names in self.trainer.batches.values() for name in names}
        trained = {name for name, state, _ in rows if state == SampleState.TRAINED}
        assert trained <= after, self._describe(f"TRAINED and not trained: {sorted(trained - after)[:4]}")
        assert before <= trained, self._describe(f"trained and not TRAINED: {sorted(before - trained)[:4]}")
        assert all(reason for _, state, reason in rows if state == SampleState.DROPPED), "dropped without a reason"

    def check_violations(self) -> None:
        assert not self.world.violations, self._describe(f"{dict(self.world.violations)}: {self.world.examples}")

    def check_end(self) -> None:
        """Check what holds at the end of a run, and count its samples."""
        self.check_violations()
        check_books(self.stage)
        assert not list((self.stage.folder / "experiences").glob("*")), "segments are left"
        ledger = self.stage.ledger()
        with closing(sqlite3.connect(self.stage.folder / "ledger.sqlite")) as db:
            rows = db.execute("SELECT state, reason, COUNT(*) FROM samples GROUP BY state, reason").fetchall()
            again = "('TRAINER_RESTORED', 'COORDINATOR_RESTARTED')"
            lost = db.execute(
                f"SELECT position FROM samples GROUP BY position "
                f"HAVING SUM(state = 'DROPPED' AND reason IN {again}) = COUNT(*)"
            ).fetchall()
        ledger.close()
        assert not lost, f"positions without an end: {lost[:10]}"
        assert all(state == "TRAINED" or (state == "DROPPED" and reason) for state, reason, _ in rows), rows
        self.tally.samples += sum(count for _, _, count in rows)
        self.tally.trained += sum(count for state, _, count in rows if state == "TRAINED")
        for state, reason, count in rows:
            if state == "DROPPED":
                self.tally.dropped[reason] += count
