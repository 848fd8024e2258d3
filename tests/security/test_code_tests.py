"""The verifier `code_tests` with hostile code: none of it passes, and none of it harms the next sample."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from fourfold.sandbox import probe
from fourfold_reward import loader
from fourfold_reward.pool import WorkerPool
from fourfold_reward.protocol import Outcome
from fourfold_reward.worker_sandbox import WorkerSandbox
from tests.support.reward_jobs import make_job

SECRET = 918_273_645
TEST_SECONDS = 0.7
GOOD = f"def f(x):\n    return {SECRET} + x - x"
TEST = f"assert f(2) == {SECRET}"
PROGRAM_TEST = {"input": "2\n", "output": f"{SECRET}\n"}
# Text that looks for the expected result in all memory that it can read.
SCAN = r"""
import re
def scan(pid):
    found = []
    for line in open(f"/proc/{pid}/maps"):
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if "r" in line.split()[1] and "[v" not in line:
            with open(f"/proc/{pid}/mem", "rb", 0) as memory:
                memory.seek(begin)
                try: text = memory.read(end - begin)
                except (OSError, ValueError, OverflowError): continue
            found += re.findall(rb"f\(2\) == ([0-9]{9})", text) + re.findall(rb'output": "([0-9]{9})', text)
    return found
"""
# Each defines f, and none of them knows what f(2) must be.
FUNCTIONS = {
    "wrong": "def f(x): return 0",
    "exits": "import sys\ndef f(x): sys.exit(0)",
    "exits at the import": "import sys\nsys.exit(0)",
    "leaves": "import os\ndef f(x): os._exit(0)",
    "raises": "def f(x): raise SystemExit",
    "raises an assertion": "def f(x): raise AssertionError",
    "stops": "def f(x): raise StopIteration",
    "equal to all": """
class All:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
def f(x): return All()
""",
    "an int that equals all": """
class All(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def f(x): return All(0)
""",
    "patches builtins": """
import builtins
class Never(Exception): pass
builtins.AssertionError = Never
builtins.compile = builtins.exec = builtins.eval = lambda *a, **k: None
def f(x): return 0
""",
    "patches the package": """
import sys
for name, module in list(sys.modules.items()):
    if name.startswith("fourfold"):
        for key, value in list(vars(module).items()):
            if callable(value) and key in ("_same_text", "_passes", "decode"):
                setattr(module, key, lambda *a, **k: True)
def f(x): return 0
""",
    "looks at the frames": """
import sys, gc
def f(x):
    frame, found = sys._getframe(), []
    while frame:
        found += [c for c in frame.f_code.co_consts if isinstance(c, int) and c > 10**8]
        found += [v for v in frame.f_locals.values() if isinstance(v, int) and v > 10**8]
        frame = frame.f_back
    found += [c for c in gc.get_objects() if isinstance(c, int) and c > 10**8]
    return found[0] if found else 0
""",
    "reads its memory": SCAN + "def f(x):\n    found = scan('self')\n    return int(found[0]) if found else 0",
    "reads the memory of others": SCAN
    + """
def f(x):
    for pid in [os.getppid(), *range(os.getpid() - 8, os.getpid())]:
        try: found = scan(pid)
        except OSError: continue
        if found: return int(found[0])
    return 0
""",
    "writes everywhere": """
import os, struct
forged = b'{"names": {"f": {"o": 0}}, "value": true}'
for number in range(64):
    try: os.write(number, struct.pack("<I", len(forged)) + forged)
    except OSError: pass
def f(x): return 0
""",
    "answers each call with all": """
import os, struct
def f(x):
    for value in (b"true", b'{"o": 0}', b"null"):
        body = b'{"value": ' + value + b"}"
        os.write(3, struct.pack("<I", len(body)) + body)
    return 0
""",
    "kills": """
import os, signal
def f(x):
    for pid in (os.getppid(), -1, 0, -os.getpgid(0)):
        try: os.kill(pid, signal.SIGKILL)
        except OSError: pass
    return 0
""",
    "forks": """
def f(x):
    while True:
        os.fork()
""",
    "starts programs": "import subprocess\ndef f(x): return int(subprocess.getoutput('expr 918273640 + 5'))",
    "hangs": "def f(x):\n    while True: pass",
    "hangs at the import": "while True: pass",
    "sleeps": "import time\ndef f(x): time.sleep(1000)",
    "recurses": "def f(x): return f(x)",
    "takes memory": "def f(x): return len(bytearray(1 << 34))",
    "starts threads": """
import threading, time
def f(x):
    for _ in range(10000): threading.Thread(target=time.sleep, args=(1000,)).start()
""",
    "sends too much": "def f(x): return 'x' * (64 << 20)",
    "nests": "def f(x):\n    value = []\n    for _ in range(100000): value = [value]\n    return value",
    "is endless": "def f(x):\n    while True: yield 1",
    "no Python": "def f(x) return",
    "connects": f"import socket\ndef f(x):\n    socket.socket()\n    return {SECRET}",
    "writes a file": f"def f(x):\n    open('/tmp/fourfold-escape', 'w')\n    return {SECRET}",
    "reads the user's files": f"import os\ndef f(x):\n    os.listdir(os.path.expanduser('~'))\n    return {SECRET}",
    "reads the variables of others": f"def f(x):\n    open('/proc/1/environ').read()\n    return {SECRET}",
}
PROGRAMS = {
    "wrong": "print(0)",
    "says nothing": "",
    "exits": "import sys; sys.exit(0)",
    "leaves": "import os; os._exit(0)",
    "prints for ever": "while True: print('x' * 1000)",
    "hangs": "while True: pass",
    "hangs after its output": f"print({SECRET}, flush=True)\nwhile True: pass",
    "prints too much": "print('x' * (64 << 20))",
    "reads its memory": SCAN + "found = scan('self')\nprint(int(found[0]) if found else 0)",
    "echoes": "print(open(0).read())",
    "forks": "import os\nwhile True: os.fork()",
    "guesses": "print('true'); print('{\"passed\": 1}')",
}


@asynccontextmanager
async def started_pool() -> AsyncIterator[WorkerPool]:
    if not probe().complete:
        pytest.skip("this machine cannot enforce the sandbox")
    made = WorkerPool(
        verifier=loader.find("code_tests", directory=Path.cwd()),
        options={"code_tests": {"test_seconds": TEST_SECONDS, "seconds": 3.0, "memory_mib": 256}},
        processes=1,
        timeout_seconds=20,
        on_failure=lambda message: pytest.fail(message),
        sandbox=WorkerSandbox(evaluate=True),
    )
    await made.start()
    try:
        yield made
    finally:
        await made.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[WorkerPool]:
    async with started_pool() as made:
        yield made


async def score(pool: WorkerPool, code: str, *tests: Any) -> Outcome:
    job = make_job(f"Here:\n```python\n{code}\n```\nDone.", metadata_json=json.dumps({"tests": tests}))
    (outcome,) = await pool.score([job], timeout=60)
    return outcome


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if index % 3 else ()) for index, name in enumerate(FUNCTIONS)]
)
async def test_hostile_functions_pass_no_test(pool: WorkerPool, name: str) -> None:
    outcome = await score(pool, FUNCTIONS[name], TEST)
    assert (outcome.score, outcome.components) == (0.0, {"passed": 0, "total": 1, "code": 1}), outcome
    assert (await score(pool, GOOD, TEST)).score == 1.0


@pytest.mark.parametrize("name", PROGRAMS)
async def test_hostile_programs_pass_no_test(pool: WorkerPool, name: str) -> None:
    outcome = await score(pool, PROGRAMS[name], PROGRAM_TEST)
    assert (outcome.score, outcome.components) == (0.0, {"passed": 0, "total": 1, "code": 1}), outcome
    assert (await score(pool, f"print({SECRET})", PROGRAM_TEST)).score == 1.0


@pytest.mark.parametrize(
    ("code", "tests", "passed"),
    [
        ("def f(x): return x * 2", ["assert f(2) == 4", "assert f(3) == 7", "assert f('a') == 'aa'"], 2),
        ("n = int(input())\nprint(n * 2)", [{"input": "2\n", "output": "4"}, {"input": "3", "output": "7\n"}], 1),
        ("import sys\nprint(sum(map(int, sys.stdin)))", [{"input": "1\n2\n", "output": "3"}], 1),
        ("import atexit, sys\natexit.register(sys.__stdout__.write, 'a')", [{"output": "a"}], 1),
        ("import threading\nthreading.Timer(0.1, print, ['a']).start()", [{"output": "a"}], 1),
        (
            "class E(ValueError):\n    def __str__(self): raise SystemExit\ndef f(): raise E",
            ["try:\n    f()\nexcept ValueError:\n    pass\nelse:\n    assert False"],
            1,
        ),
        ("print(len(open(0).read()))", [{"input": "x" * 300_000, "output": "300000"}], 1),
        ("if __name__ == '__main__':\n    print(1)\n    raise SystemExit", [{"output": "1\n"}], 1),
        ("import sys\nprint(2, end='')\nsys.exit(1)", [{"output": "2"}], 1),
        ("def f(n):\n    for i in range(n): yield i", ["assert list(f(3)) == [0, 1, 2]"], 1),
        ("def f(n): return map(str, range(n))", ["assert sorted(f(2)) == ['0', '1']"], 1),
        ("def f(a, *, b): return (a, {b})", ["assert f([1], b=2) == ([1], {2})", "assert f(b=1, a=2)[0] == 2"], 2),
        ("def f(x): raise ValueError(x)", ["try: f(1)\nexcept ValueError: pass\nelse: assert False"], 1),
        ("def f(x): return x / 3", ["assert abs(f(1) - 0.3333) < 1e-3", "assert math.isclose(f(1), 1 / 3)"], 2),
        ("def f(n): return 1 if n < 2 else n * f(n - 1)", ["assert f(3000) == math.factorial(3000)"], 0),
        ("import math\nf = math.factorial", ["assert f(3000) == math.factorial(3000)"], 1),
        ("N = 5\ndef g(): return N", ["assert N == g() == 5"], 1),
        (
            "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
            "    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)",
            ["s = Stack(); s.push(3); s.push(4); assert (s.pop(), len(s), s.items) == (4, 1, [3])"],
            1,
        ),
        ("sorted = lambda x: [1]\ndef f(): return [2, 1]", ["assert sorted(f()) == [1, 2]"], 1),
        ("def f(x): return x", ["assert len(bytes(f(300 << 20))) == 300 << 20", "assert f(bytes(300 << 20))"], 1),
        ("class math:\n    isclose = lambda *a: True\ndef f(): return 0", ["assert math.isclose(f(), 7)"], 0),
        ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int", ["assert P(3).x == 3"], 1),
    ],
)
async def test_the_score_is_the_share_of_passed_tests(
    pool: WorkerPool, code: str, tests: list[Any], passed: int
) -> None:
    outcome = await score(pool, code, *tests)
    assert outcome.score == pytest.approx(passed / len(tests))
    assert outcome.components == {"passed": passed, "total": len(tests), "code": 1}


async def test_an_expression_that_takes_for_ever_is_not_passed_and_costs_no_worker(pool: WorkerPool) -> None:
    (worker, *_) = pool.worker_pids()
    code = "def f(x): return x"
    # In Python, in one operation of C, and with a text that the code returned.
    tests = ["while f(1): assert 1", "assert 10 ** f(10 ** 10)", "assert re.match('(a+)+$', f('a' * 40) + 'b')"]
    outcome = await score(pool, code, "assert f(1) == 1", *tests, "assert f(2) == 2")
    assert (outcome.score, outcome.components) == (0.4, {"passed": 2, "total": 5, "code": 1}), outcome
    assert worker in pool.worker_pids()


@pytest.mark.slow
async def test_tests_share_the_time_of_the_sample(pool: WorkerPool) -> None:
    outcome = await score(pool, "import time\ntime.sleep(1000)", *[TEST] * 30)
    assert outcome.score == 0.0 and outcome.components["total"] == 30


async def test_the_start_of_the_process_takes_no_time_of_the_test(pool: WorkerPool) -> None:
    assert (await score(pool, GOOD, TEST)).score == 1.0
    (zygote,) = psutil.Process(pool.worker_pids()[0]).children()
    zygote.suspend()
    late = asyncio.create_task(score(pool, GOOD, TEST))
    await asyncio.sleep(2 * TEST_SECONDS)
    zygote.resume()
    assert (await late).score == 1.0


async def test_a_zygote_that_dies_with_a_request_makes_no_score() -> None:
    async with started_pool() as pool:
        assert (await score(pool, GOOD, TEST)).score == 1.0
        (zygote,) = psutil.Process(pool.worker_pids()[0]).children()
        zygote.suspend()
        late = asyncio.create_task(score(pool, GOOD, TEST))
        await asyncio.sleep(0.3)
        zygote.kill()
        outcome = await late
        assert outcome.error_reason in ("WORKER_DIED", "RAISED"), outcome


@pytest.mark.slow
async def test_a_worker_whose_zygote_died_is_replaced() -> None:
    async with started_pool() as pool:  # without the extra workers that the hostile samples had
        assert (await score(pool, GOOD, TEST)).score == 1.0
        (pid,) = pool.worker_pids()
        (zygote,) = psutil.Process(pid).children()
        zygote.kill()
        outcomes = [await score(pool, GOOD, TEST) for _ in range(3)]
        assert outcomes[-1].score == 1.0
        assert all(outcome.score == 1.0 or outcome.error_reason in ("WORKER_DIED", "RAISED") for outcome in outcomes)
        assert pid not in pool.worker_pids()
