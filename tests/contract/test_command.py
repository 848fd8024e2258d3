"""The backend `command` with real programs: correct ones, and ones that break each rule."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from fourfold.errors import ConfigError
from fourfold.workers.child import Child
from fourfold_reward.job import Job
from fourfold_reward.protocol import Outcome
from fourfold_reward.scorers import command as command_module
from fourfold_reward.scorers.command import CommandPool
from fourfold_reward.worker_sandbox import WorkerSandbox
from tests.fakes.stage import until
from tests.support.reward_jobs import make_job

EXAMPLE = Path(__file__).parents[2] / "examples/rewards/command_scorer.py"
# The completion of a sample selects the behaviour of the program.
PROGRAM = """
import json, math, os, socket, subprocess, sys, time

calls = 0
for line in sys.stdin:
    sample = json.loads(line)
    calls += 1
    result = {"id": sample["id"]}
    match sample["completion"]:
        case "number": result = 0.5
        case "whole": result = 3
        case "parts": result |= {"score": 1, "components": {"a": 2}, "turn_rewards": [0.5]}
        case "no id": result = {"score": 1}
        case "abstain": result |= {"abstain": "NO_IDEA"}
        case "null": result |= {"score": None}
        case "error": result |= {"error": "cannot \\x1b[31m read"}
        case "calls": result = calls
        case "row": result |= {"score": float(sample["metadata"] == {"n": [1]} and sample["answer"] == "a\\nb")}
        case "pid": result = os.getpid()
        case "variable": result = len(os.environ.get("SECRET", "")) + 100 * len(os.environ.get("ALLOWED", ""))
        case "socket":
            try: socket.socket(); result = 1
            except OSError: result = 0
        case "key file":
            try: open(sample["answer"]).read(); result = 1
            except OSError: result = 0
        case "wrong id": result = {"id": "other", "score": 1}
        case "nan": result |= {"score": math.nan}
        case "huge": result |= {"score": 1e39}
        case "text": result = "1"
        case "bool": result = True
        case "list": result = [1]
        case "typo": result |= {"reward": 1}
        case "bad abstain": result |= {"abstain": "no idea"}
        case "too many parts": result |= {"score": 1, "components": {str(i): 1 for i in range(65)}}
        case "garbage": print("Loading..."); continue
        case "deep": print("[" * 100_000); continue
        case "not utf-8": sys.stdout.buffer.write(b"\\xff\\n"); sys.stdout.buffer.flush(); continue
        case "long line": print("x" * (2 << 20)); continue
        case "endless line":
            while True: sys.stdout.write("x" * 4096)
        case "two lines":
            print(json.dumps(result | {"score": 1}))
            result |= {"score": 7}
        case "silence": continue
        case "hang": time.sleep(1000)
        case "exit": sys.exit(3)
        case "die": os.abort()
        case "close": os.close(1); time.sleep(1000)
        case "child":
            code = "import os, time; os.setsid(); time.sleep(1000)"
            subprocess.Popen([sys.executable, "-c", code, sample["answer"]])
            time.sleep(1000)
    print(json.dumps(result), flush=True)
"""
TEXT = f"#!{sys.executable}\n{PROGRAM}"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "scorer.py"
    path.write_text(TEXT)
    path.chmod(0o755)
    return path


def job(completion: str, *, number: int = 0, answer: str = "", metadata: str = "") -> Job:
    return make_job(completion, sample_id=f"s{number}", prompt="p \u00e9\n", answer=answer, metadata_json=metadata)


@asynccontextmanager
async def backend(
    *command: str, processes: int = 1, timeout: float = 5.0, sandbox: WorkerSandbox | None = None
) -> AsyncIterator[CommandPool]:
    made = CommandPool(
        command,
        processes=processes,
        timeout_seconds=timeout,
        sandbox=sandbox or WorkerSandbox(),
        on_failure=lambda message: pytest.fail(message),
    )
    try:
        await made.start()
        yield made
    finally:
        await made.close()
    assert made.worker_pids() == []


async def one(pool: CommandPool, completion: str, **fields: Any) -> Outcome:
    (outcome,) = await pool.score([job(completion, **fields)], timeout=20)
    return outcome


async def test_every_form_of_a_result_is_read(program: Path) -> None:
    async with backend(str(program)) as pool:
        assert pool.scorer == f"scorer.py@{hashlib.sha256(TEXT.encode()).hexdigest()[:12]}"
        assert await one(pool, "number") == Outcome(score=0.5)
        assert await one(pool, "whole") == Outcome(score=3)
        assert await one(pool, "no id") == Outcome(score=1)
        assert await one(pool, "parts") == Outcome(score=1, components={"a": 2}, turn_rewards=(0.5,))
        assert await one(pool, "abstain") == Outcome(abstain_reason="NO_IDEA")
        assert await one(pool, "null") == Outcome(abstain_reason="NO_SCORE")
        assert await one(pool, "row", answer="a\nb", metadata='{"n": [1]}') == Outcome(score=1)
        assert await one(pool, "error") == Outcome.error("RAISED", "cannot  read")
        assert (await one(pool, "row", metadata="[]")).error_reason == "BAD_METADATA"
        assert await one(pool, "calls") == Outcome(score=9)  # the same process for all of them
        assert not pool.pure and (pool.busy, pool.waiting_samples, pool.process_count) == (0, 0, 1)


async def test_a_row_just_below_the_depth_of_the_parser_is_an_error_of_its_sample(program: Path) -> None:
    async with backend(str(program)) as pool:
        rows = ['{"a": ' + "[" * depth + "]" * depth + "}" for depth in range(940, 1000)]
        reasons = [(await one(pool, "number", metadata=row)).error_reason for row in rows]
    assert reasons[-1] == "BAD_METADATA" and set(reasons) <= {"", "BAD_METADATA", "WORKER_DIED"}


FAULTS = {
    "wrong id": "BAD_RESPONSE",
    "nan": "NOT_FINITE",
    "huge": "NOT_FINITE",
    "text": "BAD_RESPONSE",
    "bool": "BAD_RESPONSE",
    "list": "BAD_RESPONSE",
    "typo": "BAD_RESPONSE",
    "bad abstain": "BAD_RESPONSE",
    "too many parts": "BAD_RESPONSE",
    "garbage": "BAD_RESPONSE",
    "deep": "BAD_RESPONSE",
    "not utf-8": "BAD_RESPONSE",
    "long line": "BAD_RESPONSE",
    "endless line": "BAD_RESPONSE",
    "silence": "TIMEOUT",
    "hang": "TIMEOUT",
    "exit": "WORKER_DIED",
    "die": "WORKER_DIED",
    "close": "WORKER_DIED",
}


@pytest.mark.slow
async def test_a_fault_is_an_error_of_its_sample_and_the_program_is_restarted(program: Path) -> None:
    async def check(pool: CommandPool, name: str, reason: str) -> None:
        (pid,) = pool.worker_pids()
        outcome = await one(pool, name)
        assert (outcome.error_reason, outcome.score) == (reason, None), (name, outcome)
        assert outcome.message and outcome.message.isprintable()
        assert await one(pool, "calls") == Outcome(score=1), name  # a new process
        assert not psutil.pid_exists(pid)

    async with backend(str(program), timeout=0.5) as pool:
        for name, reason in FAULTS.items():
            pool._timeout = 0.5 if reason == "TIMEOUT" else 10.0
            await check(pool, name, reason)


async def test_a_line_that_no_sample_asked_for_is_not_taken_for_the_next_one(program: Path) -> None:
    async with backend(str(program)) as pool:
        for number in range(4):
            assert (await one(pool, "two lines", number=number)).score == 1
            # If the line comes before this sample is sent, the program is restarted; if later, its id is wrong.
            following = await one(pool, "calls", number=100 + number)
            assert following.score == 1 or following.error_reason == "BAD_RESPONSE", following


async def test_samples_are_spread_over_the_processes(program: Path) -> None:
    async with backend(str(program), processes=2, timeout=1.0) as pool:
        outcomes = await pool.score([job("pid", number=number) for number in range(100)], timeout=20)
        assert {int(outcome.score or 0) for outcome in outcomes} == set(pool.worker_pids())
        mixed = [job("hang" if number == 3 else "number", number=number) for number in range(40)]
        outcomes = await pool.score(mixed, timeout=20)
        assert [o.error_reason for o in outcomes].count("TIMEOUT") == 1
        assert [o.score for o in outcomes].count(0.5) == 39


@pytest.mark.slow
async def test_programs_that_it_started_end_with_it(program: Path, tmp_path: Path) -> None:
    mark = f"mark-{tmp_path.name}-{os.getpid()}"

    def marked() -> list[int]:
        return [process.pid for process in psutil.process_iter(["cmdline"]) if mark in (process.info["cmdline"] or [])]

    async with backend(str(program), timeout=2.0) as pool:
        scoring = asyncio.create_task(one(pool, "child", answer=mark))
        await until(lambda: bool(marked()), 10)
        assert (await scoring).error_reason == "TIMEOUT"
        await until(lambda: not marked(), 10)


async def test_a_failed_start_is_an_error_of_the_recipe_or_is_tried_again(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing, started, real = {1}, list[int](), Child.start_program

    async def start(*args: Any, **kwargs: Any) -> Child:
        started.append(len(started) + 1)
        if started[-1] in failing:
            raise OSError("no process is left")
        return await real(*args, **kwargs)

    monkeypatch.setattr(Child, "start_program", start)
    with pytest.raises(ConfigError, match="cannot be started: no process is left"):
        async with backend(str(program), processes=2):
            pass
    assert len(started) == 1, "the others would fail, too"
    started.clear()
    failing = {2, 3}
    async with backend(str(program), processes=2) as pool:
        await until(lambda: len(pool.worker_pids()) == 2, 20)
    assert len(started) == 4


async def test_the_sandbox_is_that_of_functions(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "xxx")
    monkeypatch.setenv("ALLOWED", "xx")
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "key").write_text("x")
    strict = WorkerSandbox(environment=("ALLOWED",), hidden=(str(tmp_path / "keys"),))
    async with backend(str(program), sandbox=strict) as pool:
        assert (await one(pool, "variable")).score == 200
        assert (await one(pool, "socket")).score == 0
        assert (await one(pool, "key file", answer=str(tmp_path / "keys" / "key"))).score == 0
    async with backend(str(program), sandbox=WorkerSandbox(network=True)) as pool:
        assert (await one(pool, "socket")).score == 1
    async with backend(str(program), sandbox=WorkerSandbox(enabled=False)) as pool:
        assert (await one(pool, "variable")).score == 203
        assert (await one(pool, "key file", answer=str(tmp_path / "keys" / "key"))).score == 1


async def test_the_example_is_a_scorer() -> None:
    async with backend(sys.executable, str(EXAMPLE)) as pool:
        assert pool.scorer.startswith(f"{Path(sys.executable).name} command_scorer.py@")
        assert await one(pool, "the end", answer="the beginning") == Outcome(score=0.5, components={"words": 2})
        assert await one(pool, "the end") == Outcome(abstain_reason="NO_ANSWER")


async def test_a_program_that_changed_is_not_run_under_the_old_version(program: Path) -> None:
    async with backend(str(program)) as pool:
        assert (await one(pool, "number")).score == 0.5
        await asyncio.to_thread(program.write_text, TEXT + "\n# new\n")
        assert (await one(pool, "exit")).error_reason == "WORKER_DIED"
        outcome = await one(pool, "number")
        assert outcome.error_reason == "WORKER_DIED" and "restart the service" in outcome.message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: ["no-such-program-here"], "there is no program"),
        (lambda folder: [str(folder / "plain.py")], "is not executable; run `chmod"),
        (lambda folder: [str(folder / "bad")], "cannot be started: .*(No such file|Exec format)"),
        (
            lambda folder: [sys.executable, "-c", "raise SystemExit(3)"],
            "ended with exit code 3 before the first",
        ),
    ],
)
async def test_a_program_that_cannot_run_is_named_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], list[str]], message: str
) -> None:
    monkeypatch.setattr(command_module, "_WATCHED_SECONDS", 20.0)
    (tmp_path / "plain.py").write_text("print(1)")
    (tmp_path / "bad").write_text("#!/no/such/interpreter\n")
    (tmp_path / "bad").chmod(0o755)
    with pytest.raises(ConfigError, match=message):
        async with backend(*make(tmp_path)):
            pass
