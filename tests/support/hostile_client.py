"""A process that attacks a gateway, `python -m tests.support.hostile_client PLAN`, and `HostileProcess`, which runs it.

The process attacks from a line `attack` on stdin until a line `rest`, and then writes its `Report` as one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Final

from fourfold.host.process_tree import PARENT_PID_VARIABLE, die_with_parent
from tests.support.hostile_attacks import KINDS, LIMITS, SESSION_KINDS, Attacker, AttackKind, HostilePlan, open_sessions
from tests.support.session_run import ROOT

_STOP_SECONDS: Final = 30.0
_SLACK_SECONDS: Final = 5.0  # for the pause before an attack


@dataclass(slots=True)
class Report:
    """What the client did since it was started."""

    attacks: dict[str, Counter[str]] = field(default_factory=dict)
    """Number of each outcome, by the name of the attack."""
    failures: list[str] = field(default_factory=list)
    """Tracebacks of attacks that failed by themselves."""
    longest_phase: float = 0.0
    """In seconds; each attack begins anew in a phase."""

    def add(self, name: str, outcome: str) -> None:
        self.attacks.setdefault(name, Counter())[outcome] += 1

    def refused(self, reason: str) -> int:
        """Return the number of refusals with a reason, over both ports."""
        return sum(count for found in self.attacks.values() for name, count in found.items() if reason in name.upper())

    def faults(self) -> list[str]:
        """Return a line for each attack that had no time to end, or that had another outcome than a clear error."""
        expected = SESSION_KINDS | {name: kind.outcomes for name, kind in KINDS.items()}
        lines = list(self.failures)
        for name, outcomes in expected.items():
            found = self.attacks.get(name, Counter())
            late = name in KINDS and KINDS[name].seconds > self.longest_phase - _SLACK_SECONDS
            if found.keys() - outcomes - LIMITS or not (late or found.keys() & outcomes):
                lines.append(f"{name}: {dict(found)}, expected {sorted(outcomes)}")
        return lines


class _Client:
    """The process."""

    def __init__(self, plan: HostilePlan) -> None:
        self._plan = plan
        self._attacker = Attacker(plan)
        self._report = Report()
        self._left = plan.sessions
        self._random = random.Random(1)

    async def run(self) -> None:
        """Obey the lines of stdin until it ends."""
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            assert line == "attack\n", line
            began = time.monotonic()
            tasks = [asyncio.create_task(self._repeat(name, kind)) for name, kind in KINDS.items()]
            tasks.append(asyncio.create_task(open_sessions(self._attacker, self._opened, count=self._left)))
            line = await loop.run_in_executor(None, sys.stdin.readline)
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            self._report.failures += ["".join(traceback.format_exception(e)) for e in results if _failed(e)]
            await self._attacker.close()
            self._report.longest_phase = max(self._report.longest_phase, time.monotonic() - began)
            values = {each.name: getattr(self._report, each.name) for each in fields(Report)}  # asdict spoils Counters
            sys.stdout.write(json.dumps(values) + "\n")
            sys.stdout.flush()

    def _opened(self, name: str, outcome: str) -> None:
        self._left -= 1
        self._report.add(name, outcome)

    async def _repeat(self, name: str, kind: AttackKind) -> None:
        pause = self._plan.pause * kind.pause
        await asyncio.sleep(self._random.random() * min(pause, 2.0))
        while True:
            for outcome in await kind.run(self._attacker):
                self._report.add(name, outcome)
            await asyncio.sleep(pause * self._random.uniform(0.5, 1.5))


def _failed(result: object) -> bool:
    return isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError)


class HostileProcess:
    """A hostile client in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def attack(self) -> None:
        """Begin to attack."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"attack\n")
        await self._process.stdin.drain()

    async def rest(self) -> Report:
        """Stop attacking; return what happened in all phases so far."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(b"rest\n")
        async with asyncio.timeout(_STOP_SECONDS):
            line = await self._process.stdout.readline()
        values: Mapping[str, object] = json.loads(line)
        report = Report(**values)  # type: ignore[arg-type]
        report.attacks = {name: Counter(found) for name, found in report.attacks.items()}
        return report


@asynccontextmanager
async def hostile_process(plan: HostilePlan) -> AsyncIterator[HostileProcess]:
    """Start a client that attacks when it is told to, and kill it at the end."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.hostile_client", json.dumps(asdict(plan))),
        stdin=-1, stdout=-1, env=environment | {PARENT_PID_VARIABLE: str(os.getpid())}, limit=1 << 24,
    )  # fmt: skip
    try:
        yield HostileProcess(process)
    finally:
        process.kill()
        await process.wait()


def main() -> None:
    """Attack as the argument and stdin tell."""
    die_with_parent()
    plan = HostilePlan(**json.loads(sys.argv[1]))
    asyncio.run(_Client(plan).run())


if __name__ == "__main__":
    main()
