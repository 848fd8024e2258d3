"""Tests the worker pool with real processes: a reward function cannot affect the outcome of another sample."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from fourfold.errors import ConfigError, Overloaded
from fourfold_reward import loader
from fourfold_reward.pool import WorkerPool
from fourfold_reward.protocol import Outcome, SampleFields
from tests.support.reward_jobs import make_job

# The completion of a sample selects the behaviour of the function.
FUNCTIONS = """
import asyncio, ctypes, json, math, multiprocessing, os, signal, subprocess, sys, threading, time
from fourfold_reward import Abstain, Score, ScoreInput
from fourfold_reward.scores import InvalidSample

calls, held = 0, []

class Broken(Exception):
    def __str__(self): raise SystemExit("no text")
    __repr__ = __str__

class NoName(type):
    __name__ = property(lambda cls: 1 / 0)

class Hidden(Exception, metaclass=NoName):
    __class__ = property(lambda self: 1 / 0)
    def __getattribute__(self, name): raise Broken

class BrokenSample(InvalidSample, Broken):
    def __init__(self): self.reason = "UNKNOWN_REASON"

def reward(sample: ScoreInput):
    global calls
    calls += 1
    print("this must not reach the pipe", flush=True)
    match sample.completion:
        case "raise": raise KeyError("no such thing")
        case "library": json.loads("{")
        case "exit": sys.exit(3)
        case "bad text": raise ValueError("\\ud800" + "x" * 5000)
        case "broken": raise Broken
        case "hidden": raise Hidden("x")
        case "broken sample": raise BrokenSample
        case "broken result": return Broken()
        case "hang": time.sleep(1000)
        case "hang in c":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
            ctypes.PyDLL(None).sleep(1000)  # holds the interpreter's lock
        case "fork":
            if os.fork() == 0: return 99.0
            os.wait(); return 1.0
        case "die": os._exit(7)
        case "oom": os.kill(os.getpid(), signal.SIGKILL)
        case "child":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", sample.metadata["mark"]])
            time.sleep(1000)
        case "own session":
            code = f"import time; time.sleep(1000)  # {os.getpid()}"
            subprocess.Popen([sys.executable, "-c", code, sample.metadata["mark"]], start_new_session=True)
            return 1.0
        case "semaphore":
            held.append(multiprocessing.get_context("spawn").Lock())
            raise ValueError(held[0]._semlock.name)
        case "print":
            for _ in range(100): sys.stdout.write("x" * 1000 + "\\n")
            os.write(1, b"raw\\n"); subprocess.run(["echo", "from a child"], check=True); return 1.0
        case "input": return float(len(input()))
        case "nan": return math.nan
        case "inf": return -math.inf
        case "huge": return 1e39
        case "text": return "1.0"
        case "list": return [1.0] * 100_000
        case "none": return None
        case "abstain": return Abstain("NOT_MY_TASK")
        case "dict": return {"score": 0.5, "components": {"format": 1, "length": 0.25}}
        case "dict none": return {"score": None}
        case "dict typo": return {"reward": 1.0}
        case "parts": return Score(0.5, {"a": math.nan})
        case "many parts": return Score(0.5, {str(i): 1.0 for i in range(100_000)})
        case "bool": return True
        case "pid": return float(os.getpid())
        case "thread": return float(threading.current_thread() is threading.main_thread())
        case "all": return float((sample.sample_id, sample.prompt, sample.answer, sample.metadata) ==
                                 ("s0", "prompt \\u00e9\\n", "answer", {"a": [1, None]}))
        case _: return float(sample.completion)

async def later(sample: ScoreInput) -> float:
    await asyncio.sleep(0.01)
    return 0.25

def two(sample, other): return 1.0
"""
# Looking for its source file never ends, so `inspect.unwrap` raises.
PROXY = """
import inspect

class Proxy:
    __signature__ = inspect.signature(lambda sample: 0)
    __wrapped__ = property(lambda self: self)
    def __call__(self, sample): raise KeyError(sample)

reward = Proxy()
"""

# Its reply to the request to load this file arrives before that of the worker.
WRITER = """
import os, struct

for descriptor in range(3, 64):
    try: os.write(descriptor, struct.pack("<I", 2) + b"{}")
    except OSError: pass

def reward(sample): return 1.0
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def make_pool(name: str, *, processes: int = 1, timeout: float = 1.2, waiting: int = 1000) -> WorkerPool:
    return WorkerPool(
        verifier=loader.find(name, directory=Path.cwd()),
        options={},
        processes=processes,
        timeout_seconds=timeout,
        on_failure=lambda message: pytest.fail(message),
        max_waiting_samples=waiting,
    )


@pytest.fixture
async def pool(file: Path) -> AsyncIterator[WorkerPool]:
    pool = make_pool(f"{file}:reward", processes=2)
    await pool.start()
    yield pool
    await pool.close()
    assert pool.worker_pids() == []


async def score(pool: WorkerPool, *completions: str, metadata: str = "", timeout: float = 20) -> list[Outcome]:
    fields = {"prompt": "prompt \u00e9\n", "answer": "answer", "metadata_json": metadata}
    jobs = [make_job(completion, sample_id=f"s{i}", **fields) for i, completion in enumerate(completions)]
    return await pool.score(jobs, timeout=timeout)


def alive(mark: str) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if mark in (process.info["cmdline"] or []):
            found.append(process.pid)
    return found


def line_of(text: str) -> int:
    return next(i for i, line in enumerate(FUNCTIONS.splitlines(), 1) if text in line)


async def test_function_that_raises_is_an_error_with_type_text_and_place(pool: WorkerPool) -> None:
    raised, ended, long, library, other = await score(pool, "raise", "exit", "bad text", "library", "1")
    assert (raised.error_reason, raised.error_code) == ("RAISED", "UNKNOWN")
    assert raised.message.startswith("KeyError: 'no such thing' (functions.py:")
    assert ended.message.startswith("SystemExit: 3")
    assert len(long.message) == 1000 and long.message.endswith(f"... (functions.py:{line_of('bad text')})")
    assert long.message.isprintable(), "no control characters"
    assert library.message.startswith("JSONDecodeError: ")
    assert library.message.endswith(f"(functions.py:{line_of('json.loads')})"), "the function's line, not the library's"
    assert other == Outcome(score=1.0)


async def test_function_that_hangs_is_killed_and_loses_only_its_sample(pool: WorkerPool) -> None:
    before = set(pool.worker_pids())
    started = time.monotonic()
    outcomes = await score(pool, "1", "hang", "hang in c", "2", "3")
    assert time.monotonic() - started < 15
    assert [o.score for o in outcomes] == [1.0, None, None, 2.0, 3.0]
    for outcome in outcomes[1:3]:
        assert (outcome.error_reason, outcome.error_code) == ("TIMEOUT", "DEADLINE_EXCEEDED")
        assert "1.2 s" in outcome.message
    assert not before & set(pool.worker_pids())
    assert not any(psutil.pid_exists(pid) for pid in before)
    assert len(await score(pool, "4")) == 1


async def test_worker_that_dies_is_an_error_and_is_replaced(pool: WorkerPool) -> None:
    outcomes = await score(pool, "die", "oom", "1", "2")
    assert [o.error_reason for o in outcomes] == ["WORKER_DIED", "WORKER_DIED", "", ""]
    assert "exit code 7" in outcomes[0].message
    assert "was killed by SIGKILL" in outcomes[1].message
    assert outcomes[0].error_code == "UNAVAILABLE"
    async with asyncio.timeout(20):
        while len(pool.worker_pids()) < 2:
            await asyncio.sleep(0.02)


async def test_processes_of_a_function_end_with_its_worker(pool: WorkerPool) -> None:
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    task = asyncio.create_task(score(pool, "child", metadata=f'{{"mark": "{mark}"}}'))
    end = time.monotonic() + 20
    while not alive(mark) and time.monotonic() < end:
        await asyncio.sleep(0.02)
    assert alive(mark)
    assert (await task)[0].error_reason == "TIMEOUT"
    while alive(mark) and time.monotonic() < end:
        await asyncio.sleep(0.02)
    assert not alive(mark)


async def test_a_process_in_a_session_of_its_own_ends_with_the_pool(file: Path) -> None:
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    pool = make_pool(f"{file}:reward")
    await pool.start()
    try:
        assert await score(pool, "own session", metadata=f'{{"mark": "{mark}"}}') == [Outcome(score=1.0)]
        end = time.monotonic() + 20
        while not alive(mark) and time.monotonic() < end:
            await asyncio.sleep(0.02)
        assert alive(mark)
    finally:
        await pool.close()
    while alive(mark) and time.monotonic() < end:
        await asyncio.sleep(0.02)
    assert not alive(mark)


def semaphore_exists(name: str) -> bool:
    return Path("/dev/shm", f"sem.{name}").exists()


async def test_killed_workers_leave_no_semaphore_behind(file: Path) -> None:
    pool = make_pool(f"{file}:reward")
    await pool.start()
    try:
        (outcome,) = await score(pool, "semaphore")
        name = re.search(r"/(mp-\w+)", outcome.message)
        assert name is not None, outcome
        assert semaphore_exists(name[1])
        children = [child for pid in pool.worker_pids() for child in psutil.Process(pid).children()]
        while not all(child.cmdline() for child in children):  # of a tracker that has just been started
            await asyncio.sleep(0.01)
    finally:
        await pool.close()
    assert not semaphore_exists(name[1])


async def test_an_exception_with_broken_methods_is_an_error_with_its_place(pool: WorkerPool) -> None:
    before = set(pool.worker_pids())
    outcomes = await score(pool, "broken", "broken sample", "broken result", "1", "hidden", timeout=60)
    assert [outcome.error_reason for outcome in outcomes[:2]] == ["RAISED", "RAISED"]
    line = line_of('"broken": raise')
    assert outcomes[0].message == f"Broken, whose __str__ raised SystemExit (functions.py:{line})"
    assert "SystemExit" in outcomes[1].message and "(functions.py:" in outcomes[1].message
    assert outcomes[2].error_reason in ("RAISED", "NOT_A_NUMBER")
    assert outcomes[3] == Outcome(score=1.0)
    assert (outcomes[4].error_reason, outcomes[4].message) == ("RAISED", f"Hidden: x (functions.py:{line + 1})")
    assert before <= set(pool.worker_pids())


async def test_function_that_forks_returns_one_score(pool: WorkerPool) -> None:
    outcomes = await score(pool, "fork", "fork", "2", "3", "4")
    assert [o.score for o in outcomes] == [1.0, 1.0, 2.0, 3.0, 4.0]


async def test_print_and_input_do_not_disturb_the_pipe(pool: WorkerPool, capfd: pytest.CaptureFixture[str]) -> None:
    outcomes = await score(pool, "print", "input", "print", "5")
    assert [o.score for o in outcomes] == [1.0, None, 1.0, 5.0]
    assert outcomes[1].message.startswith("EOFError")


@pytest.mark.parametrize(
    ("completion", "reason", "text"),
    [
        ("nan", "NOT_FINITE", "score is nan"),
        ("inf", "NOT_FINITE", "score is -inf"),
        ("huge", "NOT_FINITE", "finite in 32 bits"),
        ("parts", "NOT_FINITE", "component 'a' is nan"),
        ("text", "NOT_A_NUMBER", "'1.0' (str)"),
        ("list", "NOT_A_NUMBER", "(list)"),
        ("dict typo", "RAISED", "'reward'"),
        ("many parts", "RAISED", "at most 64"),
    ],
)
def test_invalid_result_is_an_error(completion: str, reason: str, text: str, file: Path) -> None:
    # Without a process, because the checks are in the worker's code.
    from fourfold_reward.worker import Worker

    worker = Worker()
    verifier = loader.find(f"{file}:reward", directory=Path.cwd())
    assert worker.load({"load": asdict(verifier), "options": {}})["version"] == verifier.version
    outcome = worker.score(SampleFields("s", "", completion, "", "", "", ()))
    assert Outcome.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome
    assert (outcome.score, outcome.error_reason) == (None, reason)
    assert text in outcome.message
    assert len(outcome.message) <= 1000


async def test_valid_results(pool: WorkerPool) -> None:
    outcomes = await score(pool, "none", "abstain", "dict", "dict none", "bool", "thread")
    assert outcomes == [
        Outcome(abstain_reason="NO_SCORE"),
        Outcome(abstain_reason="NOT_MY_TASK"),
        Outcome(score=0.5, components={"format": 1.0, "length": 0.25}),
        Outcome(abstain_reason="NO_SCORE"),
        Outcome(score=1.0),
        Outcome(score=1.0),
    ]


async def test_function_sees_the_whole_sample(pool: WorkerPool) -> None:
    assert await score(pool, "all", metadata='{"a": [1, null]}') == [Outcome(score=1.0)]


@pytest.mark.parametrize("metadata", ["{", "[1]", "null", "[" * 60_000])
async def test_bad_metadata_is_an_error(pool: WorkerPool, metadata: str) -> None:
    (outcome,) = await score(pool, "1", metadata=metadata)
    assert outcome.error_reason == "BAD_METADATA"


async def test_deadline_keeps_the_finished_scores(pool: WorkerPool) -> None:
    outcomes = await score(pool, "1", "2", "hang", "hang", timeout=0.8)
    assert [o.score for o in outcomes] == [1.0, 2.0, None, None]
    assert {(o.error_reason, o.error_code) for o in outcomes[2:]} == {("TIMEOUT", "UNAVAILABLE")}
    assert await score(pool, "5") == [Outcome(score=5.0)]  # the withdrawn samples are not scored first


async def test_cancelled_call_leaves_the_queue(pool: WorkerPool) -> None:
    task = asyncio.create_task(score(pool, "hang", "hang", *["hang"] * 50))
    await asyncio.sleep(0.1)
    task.cancel()
    assert await asyncio.wait_for(score(pool, "5"), 20) == [Outcome(score=5.0)]


async def test_full_queue_refuses_with_a_delay(file: Path) -> None:
    pool = make_pool(f"{file}:reward", waiting=3)
    await pool.start()
    first = asyncio.create_task(score(pool, "hang", "1", "2"))
    await asyncio.sleep(0.1)
    with pytest.raises(Overloaded, match="2 samples wait") as refused:
        await score(pool, "1", "2")
    assert refused.value.retry_after and 0.1 <= refused.value.retry_after <= 30
    assert [o.score for o in await first] == [None, 1.0, 2.0]
    assert [o.score for o in await score(pool, "1", "2", "3")] == [1.0, 2.0, 3.0]
    await pool.close()


async def test_async_function_and_version(file: Path) -> None:
    pool = make_pool(f"{file}:later")
    await pool.start()
    assert await score(pool, "x", "y") == [Outcome(score=0.25)] * 2
    assert len(pool.verifier.version) == 12
    await pool.close()


async def test_edited_file_does_not_change_a_running_service(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import os\ndef reward(s):\n    return os._exit(1) if s.completion == 'die' else 1.0\n")
    pool = make_pool(f"{path}:reward")
    await pool.start()
    path.write_text("def reward(s): return 2.0\n")
    assert [o.score for o in await score(pool, "die", "x")] == [None, 1.0]
    await pool.close()


async def test_edited_module_is_refused_by_a_new_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "my_rewards.py"
    path.write_text("import os\ndef reward(s):\n    return os._exit(1) if s.completion == 'die' else 1.0\n")
    pool = make_pool("my_rewards:reward")
    await pool.start()
    path.write_text("def reward(s): return 2.0\n")
    outcomes = await score(pool, "die", "x")
    assert outcomes[1].error_reason == "WORKER_DIED"
    assert "changed from" in outcomes[1].message
    await pool.close()


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("def rewards(s): return 1\n", "reward", "did you mean 'rewards'"),
        ("import no_such_package\n", "reward", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("def reward(s) return 1\n", "reward", "SyntaxError"),
        ("def reward(s, t): return 1\n", "reward", r"it takes \(s, t\), and missing a required argument"),
        ("reward = 3\n", "reward", "must be a function"),
        ("import os; os._exit(9)\n", "reward", "exit code 9"),
        ("import sys; sys.exit(9)\n", "reward", "SystemExit"),
        (WRITER, "reward", "the worker sent an invalid reply"),
        (PROXY, "reward", "ValueError: wrapper loop"),
    ],
)
async def test_function_that_cannot_be_loaded_is_a_config_error(
    tmp_path: Path, text: str, name: str, message: str
) -> None:
    (tmp_path / "mine.py").write_text(text)
    pool = make_pool(f"{tmp_path}/mine.py:{name}")
    with pytest.raises(ConfigError, match=message) as error:
        await pool.start()
    assert str(error.value).startswith("reward.function: ")
    assert pool.worker_pids() == []
    await pool.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("last_numbr", "did you mean 'last_number'.*Known: exact_match"),
        ("rewards/none.py:reward", "cannot read .*No such file"),
        ("a b:reward", "neither a module nor a .py file"),
        ("module:", "is not a verifier"),
        ("", "is not a verifier"),
    ],
)
def test_unknown_name_is_refused_before_a_worker_starts(name: str, message: str) -> None:
    with pytest.raises(loader.VerifierError, match=message):
        loader.find(name, directory=Path.cwd())


def test_workers_die_with_their_service(file: Path) -> None:
    code = f"""
import asyncio, os, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from fourfold_reward import loader
from fourfold_reward.job import Job
from fourfold_reward.pool import WorkerPool

async def main():
    verifier = loader.find({str(file)!r} + ":reward", directory=Path("/"))
    pool = WorkerPool(verifier=verifier, options={{}}, processes=2, timeout_seconds=100, on_failure=print)
    await pool.start()
    job = dict(prompt="", completion="hang in c", answer="", metadata_json="", size_bytes=1)
    asyncio.create_task(pool.score([Job(sample_id="a", **job)], timeout=100))
    await asyncio.sleep(0.3)
    print(*pool.worker_pids(), flush=True)
    await asyncio.sleep(100)

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        assert all(psutil.pid_exists(pid) for pid in pids)
        process.send_signal(signal.SIGKILL)
    end = time.monotonic() + 20
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(psutil.pid_exists(pid) for pid in pids)
