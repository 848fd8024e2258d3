"""Attacks from inside the scoring processes: keys, run folders, network, other processes, memory and time."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fourfold import sandbox
from fourfold_reward import loader
from fourfold_reward.pool import WorkerPool
from fourfold_reward.protocol import Outcome
from fourfold_reward.verifiers import EVALUATING_TASKS, GYM_PREFIX
from fourfold_reward.worker_sandbox import WorkerSandbox
from tests.support.reward_jobs import make_job

pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::ResourceWarning")

# An attack that raises no exception has succeeded. The results are sent as the text of an exception.
ATTACKS = """
import ctypes, json, mmap, os, resource, signal, socket, subprocess
from pathlib import Path
libc = ctypes.CDLL(None, use_errno=True)
def failed():
    raise OSError(ctypes.get_errno(), "failed")
results = {}
for name, attack in {
    "key": lambda: Path(KEY).read_bytes(),
    "key through a link": lambda: Path(LINK).read_bytes(),
    "run folder": lambda: Path(RUN, "report.json").read_bytes(),
    "write into run folder": lambda: Path(RUN, "new").write_text("x"),
    "key's mode": lambda: os.chmod(KEY, 0o777),
    "file beside": lambda: Path(BESIDE).read_bytes(),
    "new file beside": lambda: Path(BESIDE + ".new").write_text("x"),
    "environment of the service": lambda: Path(f"/proc/{os.getppid()}/environ").read_bytes(),
    "memory of the service": lambda: open(f"/proc/{os.getppid()}/mem", "rb+"),
    "connect": lambda: socket.create_connection(("127.0.0.1", PORT), timeout=5).close(),
    "unix socket": lambda: socket.socket(socket.AF_UNIX).close(),
    "fork": lambda: os.fork() or os._exit(0),
    "program": lambda: subprocess.run(["/bin/true"], check=True),
    "kill the service": lambda: os.kill(os.getppid(), signal.SIGCONT),
    "kill everything": lambda: os.kill(-1, signal.SIGCONT),
    "leave the session": lambda: os.setsid(),
    "outlive the service": lambda: libc.prctl(1, 0) and failed(),
    "higher limits": lambda: resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY,) * 2),
    "limits of the service": lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CPU),
    "4 GiB": lambda: bytearray(4 << 30),
    "4 GiB shared": lambda: mmap.mmap(-1, 4 << 30),
    "mount": lambda: libc.umount2(b"/no/such/mount", 0) and failed(),
}.items():
    try:
        attack()
        results[name] = "done"
    except MemoryError:
        results[name] = "no memory"
    except ValueError:  # Python's error for EPERM from setrlimit
        results[name] = "EPERM"
    except OSError as error:
        results[name] = {1: "EPERM", 11: "EAGAIN", 12: "no memory", 13: "EACCES"}.get(error.errno, str(error))
results["secret"] = os.environ.get("FOURFOLD_TEST_SECRET", "absent")
results["core"] = resource.getrlimit(resource.RLIMIT_CORE)[0]
"""


needs_kernel = pytest.mark.skipif(not sandbox.probe().complete, reason="this machine has no Landlock or no seccomp")


@pytest.fixture
def secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the names and paths of a key, a run folder and a secret variable."""
    (tmp_path / "certs").mkdir()
    (tmp_path / "certs" / "reward-key.pem").write_text("key")
    (tmp_path / "link").symlink_to(tmp_path / "certs" / "reward-key.pem")
    (tmp_path / "runs" / "toy").mkdir(parents=True)
    (tmp_path / "runs" / "toy" / "report.json").write_text("{}")
    (tmp_path / "beside.txt").write_text("data")
    monkeypatch.setenv("FOURFOLD_TEST_SECRET", "hunter2")
    return {
        "KEY": str(tmp_path / "certs" / "reward-key.pem"),
        "LINK": str(tmp_path / "link"),
        "RUN": str(tmp_path / "runs" / "toy"),
        "BESIDE": str(tmp_path / "beside.txt"),
    }


@pytest.fixture
def attacks(secrets: dict[str, str]) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = "".join(f"{name} = {value!r}\n" for name, value in secrets.items())
        yield f"PORT = {server.getsockname()[1]}\n{names}{ATTACKS}"


def hide(tmp_path: Path, **options: Any) -> WorkerSandbox:
    return WorkerSandbox(hidden=(str(tmp_path / "certs"), str(tmp_path / "runs")), **options)


@contextlib.asynccontextmanager
async def pool_of(
    name: str, worker_sandbox: WorkerSandbox, *, tasks: dict[str, Any] | None = None, timeout: float = 20
) -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(
        verifier=loader.find(name, directory=Path.cwd()),
        options=tasks or {},
        processes=1,
        timeout_seconds=timeout,
        on_failure=lambda message: pytest.fail(message),
        sandbox=worker_sandbox,
    )
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


async def score(pool: WorkerPool, completion: str, *, answer: str = "", metadata: str = "") -> Outcome:
    return (await pool.score([make_job(completion, answer=answer, metadata_json=metadata)], timeout=50))[0]


def evaluated(code: str) -> str:
    """Return an answer that runs `code` when a scorer evaluates it."""
    return f"[exec({code!r}, {{}})]"


def report_of(outcome: Outcome) -> dict[str, Any]:
    found = re.search(r"\{.*\}", outcome.message)
    assert found, outcome
    result: dict[str, Any] = json.loads(found[0])
    return result


N_QUEENS = json.dumps({"valid_answers": ["x"], "solutions": [[[1]]], "num_removed": 1, "puzzle": [[0]]})
BUILTIN_EXPECTED = {
    **dict.fromkeys(("key", "key through a link", "run folder", "write into run folder"), "EACCES"),
    **dict.fromkeys(("file beside", "new file beside"), "EACCES"),
    **dict.fromkeys(("environment of the service", "memory of the service"), "EACCES"),
    **dict.fromkeys(("key's mode", "connect", "unix socket", "fork", "program", "mount"), "EPERM"),
    **dict.fromkeys(
        (
            "leave the session",
            "outlive the service",
            "kill the service",
            "kill everything",
            "higher limits",
            "limits of the service",
        ),
        "EPERM",
    ),
    "4 GiB": "no memory",
    "4 GiB shared": "EPERM",
    "secret": "absent",
    "core": 0,
}


@needs_kernel
async def test_answer_that_is_evaluated_can_touch_nothing(tmp_path: Path, attacks: str) -> None:
    code = attacks + "raise SystemExit(json.dumps(results))"
    async with pool_of(f"{GYM_PREFIX}n_queens", hide(tmp_path, required=True, evaluate=True)) as pool:
        outcome = await score(pool, evaluated(code), answer="x", metadata=N_QUEENS)
        assert report_of(outcome) == BUILTIN_EXPECTED
        assert await score(pool, "x", answer="x", metadata=N_QUEENS) == Outcome(score=1.0)


@needs_kernel
async def test_reward_function_reads_data_but_neither_keys_nor_runs(tmp_path: Path, attacks: str) -> None:
    (tmp_path / "mine.py").write_text(
        f"def reward(sample):\n exec({attacks!r}, names := {{}})\n raise ValueError"
        "(names['json'].dumps(names['results']))"
    )
    async with pool_of(f"{tmp_path}/mine.py:reward", hide(tmp_path, memory_gib=1)) as pool:
        results = report_of(await score(pool, ""))
    results.pop("kill everything")  # only kills its own children here
    done = {name for name, result in results.items() if result == "done"}
    # Operators may run their own code as root, which may raise limits.
    assert done - {"higher limits", "outlive the service"} == {
        "file beside",
        "fork",
        "program",
        "key's mode",
        "4 GiB shared",
    }
    for name in ("key", "key through a link", "run folder", "write into run folder", "environment of the service"):
        assert results[name] == "EACCES", name
    assert (results["connect"], results["kill the service"], results["4 GiB"]) == ("EPERM", "EPERM", "no memory")
    assert (results["secret"], results["core"]) == ("absent", 0)


async def test_recipe_gives_a_reward_function_network_and_variables(tmp_path: Path, attacks: str) -> None:
    (tmp_path / "mine.py").write_text(
        "import os, socket, tempfile\n"
        "def reward(sample):\n"
        "    socket.create_connection(('127.0.0.1', int(sample.completion)), timeout=5).close()\n"
        "    assert os.environ['FOURFOLD_TEST_SECRET'] == 'hunter2'\n"
        "    with tempfile.NamedTemporaryFile() as file:\n"
        "        file.write(b'x')\n"
        "    return 1.0\n"
    )
    port = re.search(r"PORT = (\d+)", attacks)
    worker_sandbox = hide(tmp_path, network=True, environment=("FOURFOLD_TEST_SECRET",))
    async with pool_of(f"{tmp_path}/mine.py:reward", worker_sandbox) as pool:
        assert port is not None
        assert await score(pool, port[1]) == Outcome(score=1.0)


async def test_refusal_of_the_sandbox_is_explained(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(sample):\n    raise PermissionError(1, 'Operation not permitted')\n")
    async with pool_of(f"{tmp_path}/mine.py:reward", hide(tmp_path)) as pool:
        outcome = await score(pool, "")
    assert outcome.error_reason == "RAISED"
    assert outcome.message.endswith("the sandbox may have refused this: see reward.network and reward.sandbox")


@pytest.mark.slow
async def test_evaluated_answer_that_loops_or_ends_its_process_harms_no_other_sample(tmp_path: Path) -> None:
    async with pool_of(f"{GYM_PREFIX}n_queens", hide(tmp_path, evaluate=True), timeout=1) as pool:
        for code, reason in (("while True: pass", "TIMEOUT"), ("import os; os._exit(3)", "WORKER_DIED")):
            outcome = await score(pool, evaluated(code), answer="x", metadata=N_QUEENS)
            assert outcome.error_reason == reason
            assert await score(pool, "x", answer="x", metadata=N_QUEENS) == Outcome(score=1.0)


POISON = """
import gc, json, os, struct
import reasoning_gym.games.n_queens as module
module.NQueensDataset.score_answer = lambda *arguments: 1.0
forged = json.dumps({"score": 1.0, "abstain_reason": "", "error_reason": "", "error_code": "", "message": "",
                     "components": {}}).encode()
for descriptor in range(64):
    try:
        os.write(descriptor, (struct.pack("<I", len(forged)) + forged) * 5)
    except OSError:
        pass
"""
GARBAGE = (
    "import os\nfor d in range(3, 64):\n try: os.write(d, b'\\xff\\xff\\xff\\xff' + b'{}' * 100)\n except OSError: pass"
)


async def test_evaluated_answer_changes_the_score_of_no_other_sample(tmp_path: Path) -> None:
    async with pool_of(f"{GYM_PREFIX}n_queens", hide(tmp_path, evaluate=True)) as pool:
        workers = pool.worker_pids()
        for code in (POISON, GARBAGE):
            await score(pool, evaluated(code), answer="x", metadata=N_QUEENS)  # a program may choose its own score
            for completion, right in (("y", 0.0), ("x", 1.0), ("y", 0.0)):
                assert await score(pool, completion, answer="x", metadata=N_QUEENS) == Outcome(score=right)
        assert pool.worker_pids() == workers


@pytest.mark.parametrize(
    "reply", ["{}", "[]", "x", "[" * 100_000, '{"score": 1, "components": {}, "error_reason": "NO", "error_code": ""}']
)
async def test_function_that_writes_into_the_pipe_costs_its_own_sample(tmp_path: Path, reply: str) -> None:
    (tmp_path / "mine.py").write_text(
        "import os, struct\n"
        "def reward(sample):\n"
        "    data = sample.completion.encode()\n"
        "    for descriptor in range(3, 64) if data else ():\n"
        "        try: os.write(descriptor, struct.pack('<I', len(data)) + data)\n"
        "        except OSError: pass\n"
        "    return 1.0\n"
    )
    async with pool_of(f"{tmp_path}/mine.py:reward", hide(tmp_path)) as pool:
        assert (await score(pool, reply)).error_reason == "WORKER_DIED"
        assert await score(pool, "") == Outcome(score=1.0)


def test_outcome_from_a_worker_is_checked() -> None:
    good = asdict(Outcome(score=1.0, components={"a": 1.0}))
    assert Outcome.from_json(good) == Outcome(score=1.0, components={"a": 1.0})
    assert Outcome.from_json(good | {"score": float("nan")}).error_reason == "NOT_FINITE"
    bad: tuple[dict[str, Any], ...] = (
        {"components": {"x" * 65: 1}},
        {"abstain_reason": "lower case"},
        {"error_reason": "RAISED", "error_code": "NO_SUCH_CODE"},
    )
    for change in bad:
        with pytest.raises(ValueError, match=r"component name|abstain reason|unknown error reason"):
            Outcome.from_json(good | change)


@pytest.mark.parametrize("code", ["open(PATH, 'w')", "__import__('os').system('touch ' + PATH)"])
async def test_no_task_lets_an_answer_write(tmp_path: Path, code: str) -> None:
    from reasoning_gym.factory import create_dataset

    path = tmp_path / "written"
    attack = code.replace("PATH", repr(str(path)))
    async with pool_of(
        "reasoning_gym", hide(tmp_path, evaluate=True), tasks={task: {} for task in EVALUATING_TASKS}
    ) as pool:
        for task in sorted(EVALUATING_TASKS):
            entry = create_dataset(task, size=1, seed=5)[0]
            metadata = {**entry["metadata"], "source_dataset": task}
            if task == "bitwise_arithmetic":
                metadata["problem"] = attack
            answer = attack if task == "number_sorting" else entry["answer"] or ""
            completion = "[1]" if task == "number_sorting" else attack
            outcome = await score(pool, completion, answer=answer, metadata=json.dumps(metadata))
            assert outcome.error_reason or (outcome.score or 0) < 1, task
            assert not path.exists(), task


def exists(path: str) -> bool:
    return Path(path).exists()


async def test_scratch_folder_is_gone_with_its_worker(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import tempfile\ndef reward(sample):\n    raise ValueError('in ' + tempfile.mkdtemp())\n"
    )
    async with pool_of(f"{tmp_path}/mine.py:reward", hide(tmp_path)) as pool:
        found = re.search(r"in (\S+)", (await score(pool, "")).message)
        assert found and exists(found[1])
    assert not exists(found[1])
