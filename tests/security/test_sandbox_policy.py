"""The rights of a process after `enter`, on kernels with and without Landlock and seccomp."""

from __future__ import annotations

import os
import site
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fourfold import sandbox
from fourfold.sandbox import Policy

needs_kernel = pytest.mark.skipif(not sandbox.probe().complete, reason="this machine has no Landlock or no seccomp")


def enter_and_run(policy: Policy, code: str, *, before: str = "") -> str:
    program = (
        f"import sys\nfrom fourfold import sandbox\n{before}\nsandbox.enter(sandbox.Policy.from_json(sys.argv[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program + code, policy.to_json()],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return f"{done.returncode} {done.stdout}{done.stderr.strip().splitlines()[-1] if done.stderr.strip() else ''}"


def narrow(**options: Any) -> Policy:
    return Policy(read=sandbox.python_paths(), **{"memory_bytes": 1 << 30, "cpu_seconds": 20, **options})


@needs_kernel
def test_program_writes_to_its_own_folder_and_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    policy = narrow(write=(str(tmp_path / "own"),), file_bytes=1000)
    template = "from pathlib import Path\nPath({!r}).write_text('x' * {})\nprint(Path({!r}).stat().st_size)"
    inside, outside = str(tmp_path / "own" / "a"), str(tmp_path / "a")
    assert enter_and_run(policy, template.format(inside, 10, inside)) == "0 10\n"
    assert "File too large" in enter_and_run(policy, template.format(inside, 2000, inside))
    assert "Permission denied" in enter_and_run(policy, template.format(outside, 10, outside))
    assert "Permission denied" in enter_and_run(policy, f"import os; os.rename('{inside}', '{outside}')")


def test_cpu_time_is_bounded() -> None:
    assert enter_and_run(narrow(cpu_seconds=1), "while True: pass").startswith("-24 ")  # SIGXCPU


def test_open_files_are_bounded() -> None:
    text = enter_and_run(narrow(open_files=20), "files = [open('/dev/null') for _ in range(30)]")
    assert "Too many open files" in text


@needs_kernel
def test_threads_are_still_there_without_processes() -> None:
    code = "import threading\nthread = threading.Thread(target=print, args=('here',))\nthread.start(); thread.join()"
    assert enter_and_run(narrow(), code) == "0 here\n"


@needs_kernel
def test_threads_are_bounded_also_for_root() -> None:
    code = """
import os, threading, time
threading.stack_size(32768)
count = 0
def start():
    global count
    try:
        while count < 3000:
            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
            count += 1
    except RuntimeError: pass
start()
first = count
for call in (lambda: os.setresuid(0, 0, 0), lambda: os.setuid(0), lambda: os.setreuid(0, 0)):
    try: call()
    except OSError: pass
start()
print(sandbox.policy.MAX_THREADS - 5 <= first == count <= sandbox.policy.MAX_THREADS, flush=True)
os._exit(0)
"""
    assert enter_and_run(narrow(memory_bytes=8 << 30), code) == "0 True\n"


@needs_kernel
def test_there_is_no_shared_memory_that_no_limit_counts() -> None:
    assert "Operation not permitted" in enter_and_run(narrow(), "import mmap; mmap.mmap(-1, 4096)")
    assert enter_and_run(narrow(), "import mmap; mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE)") == "0 "
    assert enter_and_run(narrow(processes=100), "import mmap; mmap.mmap(-1, 4096)") == "0 "


def test_packages_of_the_user_can_be_read_although_pythonpath_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", site.getusersitepackages())  # as of workers, which get all of sys.path
    for enabled in (True, False):
        monkeypatch.setattr(site, "ENABLE_USER_SITE", enabled)
        assert (site.getusersitepackages() in sandbox.interpreter_paths()) is enabled


@pytest.mark.parametrize("part", ["landlock.abi = lambda: 0", "seccomp._library = lambda: None"])
def test_required_policy_is_refused_where_the_kernel_lacks_a_part(part: str) -> None:
    before = f"from fourfold.sandbox import landlock, seccomp\n{part}"
    assert "SandboxUnavailable: no " in enter_and_run(narrow(required=True), "print('ran')", before=before)
    assert enter_and_run(narrow(), "print('ran')", before=before) == "0 ran\n"


def test_limits_hold_where_the_kernel_has_neither() -> None:
    before = "from fourfold.sandbox import landlock, seccomp\nlandlock.abi = lambda: 0\nseccomp._library = lambda: None"
    assert "MemoryError" in enter_and_run(narrow(), "bytearray(4 << 30)", before=before)
