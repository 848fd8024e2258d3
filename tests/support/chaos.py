"""Strikes a real run: kills, ends and stops each of its processes.

python -m tests.support.chaos --events 46 --seed 1 --out result.json
python -m tests.support.chaos --rows dpo --events 25 --seed 1 --out result.json

The first command strikes a run with agents at a lag of 1, and fills its disk, too. The second one kills the processes
of a run of rows, also while it encodes the rows and computes their reference, at any time of a step. Losses, rows and
gradient norms of its steps and the bytes of its weights must be those of the same run without events.

Engine, trainer, gateway, environment and rewards are real, and the model is tiny. After the events, the run is ended by
Ctrl-C, resumed, and trained to its end. The result has each event with the seconds until the next step, the longest
time in which the run neither made a step nor wrote a line, and what is wrong with the ledger. Full disks need root.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any, Final

import psutil

from fourfold.host.process_tree import descendants
from tests.support.tiny_models import write_tiny_model
from tests.support.tiny_run import ROWS_PER_STEP, logs_of, write_rows, write_run
from tests.support.trainer_driver import REPOSITORY

STEP_SECONDS: Final = 120.0  # an engine starts in 30 s on idle cores
DISK_MIB: Final = 400
FULL_SECONDS: Final = 15.0
STOP_SECONDS: Final = (5.0, 25.0)
SILENCE_SECONDS: Final = 20.0
LAST_STEPS: Final = 3
END_SECONDS: Final = 10.0  # in which the processes of a run that has ended must be gone

TABLES: Final = """
[rollout]
tool_parser = "hermes"

[trainer]
ranks = 2
learning_rate = 1e-5

[asynchrony]
max_policy_lag = 1

[agents]
source = "tasks"
reward = "service"

[gateway]
replicas = 1

[environment]
replicas = 1
processes = 2
tools = ["{calculator}:calculate"]
max_turns = 2
concurrent_episodes = 16
memory_gib = 2

[checkpoint]
every_steps = 2
"""
ROW_TABLES: Final = """
ranks = 2

[checkpoint]
every_steps = 5
"""
ROW_METRICS: Final = ("data/tokens", "policy/loss", "train/grad_norm")
ROWS_PER_EVENT: Final = 80  # two passes: 20 steps, and fewer pass between two events
# Where a victim is: the role of its service, and whether it is a child of the service's process.
VICTIMS: Final = [
    ("coordinator", False),
    ("trainer", False),
    ("trainer", True),
    ("rollout", False),
    ("rollout", True),
    ("gateway", False),
    ("environment", False),
    ("environment", True),
    ("reward", False),
    ("reward", True),
]
ROW_VICTIMS: Final = [("coordinator", False), ("trainer", False), ("trainer", True), ("launcher", False)]
SIGNALS: Final = [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM]


@dataclass
class Event:
    """What struck, when, and how long the next step took."""

    what: str
    at: float
    step: int
    seconds_to_step: float = 0.0
    lines: list[str] = field(default_factory=list)


class ChaosRun:
    """One `fourfold run`, its console, and what strikes it."""

    def __init__(self, root: Path, *, seed: int) -> None:
        self.root, self.run_dir = root, root / "runs" / "tiny"
        self.console: list[tuple[float, str]] = []
        self.stepped: list[float] = []
        self.events: list[Event] = []
        self._random = random.Random(seed)
        self._began = time.monotonic()
        self.process: subprocess.Popen[str]  # the launcher

    def now(self) -> float:
        """Return the seconds since the beginning."""
        return round(time.monotonic() - self._began, 1)

    def start(self, *words: str) -> None:
        """Start `fourfold run` and collect its console."""
        self.process = process = subprocess.Popen(
            [sys.executable, "-m", "fourfold", "run", *words], cwd=self.root, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                self.console.append((self.now(), line.rstrip()))

        threading.Thread(target=read, daemon=True).start()

    def steps(self) -> int:
        """Return the number of steps, and note the time of a new one."""
        path = self.run_dir / "metrics.jsonl"
        count = path.read_bytes().count(b"\n") if path.exists() else 0
        if count != len(self.stepped):
            self.stepped = self.stepped[:count]
            self.stepped += [self.now()] * (count - len(self.stepped))
        return count

    def wait(self, condition: Callable[[], bool], *, pause: float = 0.1) -> None:
        """Wait until `condition` is true; check it every `pause` seconds.

        Raises:
            AssertionError: The run ended, or the time ran out.
        """
        end = time.monotonic() + STEP_SECONDS
        while not condition():
            self.steps()
            assert self.process.poll() is None, f"the run ended with {self.process.returncode}"
            assert time.monotonic() < end, f"nothing happened for {STEP_SECONDS:.0f} s"
            time.sleep(pause)

    def strike(self, number: signal.Signals, role: str, child: bool) -> None:
        """Send a signal to a process of the run as soon as there is one, and wait for the second step after it."""
        found: list[psutil.Process] = []

        def look() -> bool:
            found[:] = self._victims(role, child)
            return bool(found)

        self.wait(look)
        victim = self._random.choice(found)
        name = f"{number.name} {role}{f' child {_title(victim)}' if child else ''}"
        with self._event(name):
            try:
                victim.send_signal(number)
                if number == signal.SIGSTOP:
                    time.sleep(self._random.choice(STOP_SECONDS))
                    victim.send_signal(signal.SIGCONT)
            except psutil.NoSuchProcess:  # it was ended, perhaps because it was stopped
                pass
            if role == "launcher":
                self.again()

    def fill_disk(self) -> None:
        """Leave no byte on the disk of the run for a while."""
        ballast = self.root / "ballast"
        with self._event("full disk"):
            with ballast.open("wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(1 << 16))
            time.sleep(FULL_SECONDS)
            ballast.unlink()

    @contextmanager
    def _event(self, what: str) -> Iterator[None]:
        before = self.steps()
        event = Event(what, self.now(), before)
        self.events.append(event)
        try:
            yield
            highest = before

            def stepped() -> bool:
                return self.steps() >= highest + 2

            self.wait(stepped)
        finally:
            event.seconds_to_step = round(self.now() - event.at, 1)
            event.lines = [line for at, line in self.console if at >= event.at]
            sys.stdout.write(f"{event.at:7.1f} step {before:4d} {what}: {event.seconds_to_step} s\n")
            sys.stdout.flush()
        time.sleep(self._random.uniform(0, 2))

    def _victims(self, role: str, child: bool) -> list[psutil.Process]:
        try:
            launcher = psutil.Process(self.process.pid)
            every = launcher.children(recursive=True)
            if role == "launcher":
                return [launcher]
            services = [each for each in every if _words(each)[3:5] == ["serve", role]]
            return [c for each in services for c in each.children() if _words(c)] if child else services
        except psutil.NoSuchProcess:
            return []

    def kill_start(self, condition: Callable[[], bool], when: str, role: str, *, child: bool = False) -> None:
        """Kill a process of the run as soon as something is so, before the first step."""
        self.wait(condition, pause=0.002)
        self.events.append(Event(f"SIGKILL {role}{' child' * child} {when}", self.now(), 0))
        for victim in self._victims(role, child)[:1]:
            victim.kill()
        if role == "launcher":
            self.again()

    def again(self) -> None:
        """Start the run again after its launcher was killed."""
        self.process.wait(END_SECONDS)
        has_folder = (self.run_dir / "config.toml").exists()
        self.start(*(("--resume", "runs/tiny") if has_folder else ("recipe.toml",)))

    def end(self) -> list[int]:
        """Wait for the end of the run; return its processes that are left. Raises AssertionError when it fails."""
        pids, moved, end = set[int](), -1, time.monotonic() + STEP_SECONDS
        while self.process.poll() is None and time.monotonic() < end:
            pids |= descendants({self.process.pid})
            if (steps := self.steps()) != moved:
                moved, end = steps, time.monotonic() + STEP_SECONDS
            time.sleep(0.5)
        assert self.process.returncode == 0, f"the run ended with {self.process.returncode}"
        end = time.monotonic() + END_SECONDS
        while (left := [pid for pid in pids if psutil.pid_exists(pid)]) and time.monotonic() < end:
            time.sleep(0.1)
        return left

    def close(self) -> None:
        """Kill the launcher and what it started."""
        for pid in descendants({self.process.pid}) | {self.process.pid}:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)

    def explain(self, failure: Exception) -> str:
        """Return an error with the last lines of the console and of all logs."""
        return f"{failure}\n" + "\n".join(line for _, line in self.console[-30:]) + logs_of(self.run_dir)

    def result(self, **found: Any) -> dict[str, Any]:
        """Return what is written to the file."""
        silences = [
            {"at": at, "seconds": seconds, "before": [line for when, line in self.console if when <= at][-1:]}
            for at, seconds in self.silences()
        ]
        events = [asdict(event) for event in self.events]
        return {"events": events, "steps": self.steps(), "seconds": self.now(), "silences": silences, **found}

    def silences(self) -> list[tuple[float, float]]:
        """Return the intervals without a step and without a line that are longer than the limit.

        After a line that says for whom the run waits, the next one about it is due after 30 s.
        """
        times = sorted(
            [(at, "waiting for" in line) for at, line in self.console] + [(at, False) for at in self.stepped]
        )
        return [(a, round(b - a, 1)) for (a, told), (b, _) in pairwise(times) if b - a > SILENCE_SECONDS + 11 * told]


def _words(process: psutil.Process) -> list[str]:
    """Return the command of a process, [] when it has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def _title(process: psutil.Process) -> str:
    """Return the module that a process runs, or the title that it gave itself."""
    words = _words(process)
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    return next((word for word in words if "resource_tracker" in word), words[0])[:60]


def check_ledger(run_dir: Path) -> list[str]:
    """Return what is wrong with the samples of a run that has ended."""
    lines = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as ledger:
        rows = ledger.execute("SELECT sample_id, state, reason, position, group_id FROM samples").fetchall()
    wrong = [f"{name}: {state} {reason!r}" for name, state, reason, *_ in rows if state not in ("TRAINED", "DROPPED")]
    wrong += [
        f"{name}: dropped without a reason" for name, state, reason, *_ in rows if state == "DROPPED" and not reason
    ]
    if len(lines) != len({row["sample_id"] for row in lines}):
        wrong.append("a sample is in samples.jsonl twice")
    written = {row["sample_id"] for row in lines if not row["dropped"]}
    trained = {name for name, state, *_ in rows if state == "TRAINED"}
    wrong += [f"{name}: trained in one of ledger and samples.jsonl" for name in sorted(written ^ trained)]
    prompts = {(position, group) for _, state, _, position, group in rows if state == "TRAINED"}
    if len({position for position, _ in prompts}) != len(prompts):
        wrong.append("a prompt was trained twice")
    return wrong


def plan(events: int, seed: int, *, disk: bool) -> list[tuple[signal.Signals, str, bool] | None]:
    """Return the events in their order; None is a full disk."""
    every: list[tuple[signal.Signals, str, bool] | None] = [
        (number, *victim) for number in SIGNALS for victim in VICTIMS
    ]
    chosen = list(islice(cycle([*every, *[None] * (2 * disk)]), events))
    random.Random(seed).shuffle(chosen)
    return chosen


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a small file system at a folder; yield whether that was possible."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    try:
        yield mounted.returncode == 0
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def run_chaos(folder: Path, events: int, seed: int, *, disk: bool) -> dict[str, Any]:
    """Return the result of one run."""
    run, error, wrong, left = ChaosRun(folder, seed=seed), "", list[str](), list[int]()
    write_agents(folder)
    run.start("recipe.toml")
    try:
        run.wait(lambda: run.steps() >= 2)
        for event in plan(events, seed, disk=disk):
            if event is None:
                run.fill_disk()
            else:
                run.strike(*event)
        run.process.send_signal(signal.SIGINT)
        code = run.process.wait(60)
        assert code == 128 + signal.SIGINT, f"Ctrl-C ended the run with {code}"
        run.start("--resume", "runs/tiny", "--set", f"steps={run.steps() + LAST_STEPS}")
        left, wrong = run.end(), check_ledger(run.run_dir)
    except (AssertionError, subprocess.TimeoutExpired) as failure:
        error = run.explain(failure)
    finally:
        run.close()
    return run.result(seed=seed, wrong=wrong, processes_left=left, error=error)


def run_row_chaos(folder: Path, preset: str, events: int, seed: int) -> dict[str, Any]:
    """Return the result of a run of rows, which is compared with the same run without events."""
    calm, run = ChaosRun(folder / "calm", seed=seed), ChaosRun(folder / "struck", seed=seed)
    model, cache = write_tiny_model(folder / "model", "llama_tied", dtype="float32"), run.root / "cache"
    for each in (calm, run):
        write_rows(each.root, model, preset=preset, count=ROWS_PER_EVENT * events, more=ROW_TABLES)
    wrong, error, left = list[str](), "", list[int]()
    calm.start("recipe.toml")
    calm.end()
    run.start("recipe.toml")
    try:
        run.kill_start(lambda: any(cache.glob("fourfold-tokens-*")), "while it encodes", "launcher")
        for role, child in ROW_VICTIMS if preset == "dpo" else ():
            grown = partial(lambda was: blocks(cache) != was, blocks(cache))
            run.kill_start(grown, "while it computes the reference", role, child=child)
        run.wait(lambda: run.steps() >= 2)
        victims = list(islice(cycle(ROW_VICTIMS), events - len(run.events)))
        random.Random(seed).shuffle(victims)
        for role, child in victims:
            run.strike(signal.SIGKILL, role, child)
        left = run.end()
        wrong = differences(calm.run_dir, run.run_dir)
    except (AssertionError, subprocess.TimeoutExpired) as failure:
        error = run.explain(failure)
    finally:
        run.close()
    return run.result(preset=preset, seed=seed, wrong=wrong, processes_left=left, error=error)


def differences(calm: Path, struck: Path) -> list[str]:
    """Return in what a run differs from the same run without events."""
    found = list[str]()
    rows = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (calm, struck)]
    if [row["step"] for row in rows[1]] != list(range(1, len(rows[0]) + 1)):
        found.append("a step is missing or doubled")
    for name in ROW_METRICS:
        steps = [a["step"] for a, b in zip(*rows, strict=False) if a.get(name) != b.get(name)]
        found += [f"{name} differs in steps {steps[:10]}"] * bool(steps)
    with closing(sqlite3.connect(struck / "ledger.sqlite")) as ledger:
        taken = [position for (position,) in ledger.execute("SELECT data_position FROM steps ORDER BY step")]
    found += [f"after step {i} {n} rows were taken" for i, n in enumerate(taken, 1) if n != i * ROWS_PER_STEP]
    for path in sorted((calm / "model").iterdir()):
        if path.suffix != ".md" and path.read_bytes() != (struck / "model" / path.name).read_bytes():
            found.append(f"model/{path.name} differs")
    return found


def blocks(cache: Path) -> list[int]:
    """Return how much is written of the references."""
    return [file.stat().st_blocks for file in cache.glob("reference-*")]


def write_agents(root: Path) -> None:
    """Write the recipe, the data and the model of a run with agents."""
    calculator = REPOSITORY / "examples/environments/calculator.py"
    model = write_tiny_model(root / "model", "llama_tied")
    write_run(root, model, prompts_per_step=2, tables=TABLES, calculator=calculator)
    recipe = root / "recipe.toml"
    text = recipe.read_text().replace("steps = 3", "steps = 100000")
    text = text.replace("max_context_tokens = 64", "max_context_tokens = 384")
    recipe.write_text(text.replace("tokens_per_micro_batch = 128", "tokens_per_micro_batch = 768"))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=int, default=46)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", choices=("sft", "dpo"), help="the preset of a run of rows")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        if options.rows:
            result = run_row_chaos(folder, options.rows, options.events, options.seed)
        else:
            with small_disk(folder) as disk:
                result = run_chaos(folder, options.events, options.seed, disk=disk)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        sys.stdout.write(json.dumps({key: value for key, value in result.items() if key != "events"}, indent=1))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
