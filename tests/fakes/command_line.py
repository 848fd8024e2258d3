"""`fourfold` as a process, in a folder of its own, with toy engines in the place of the real ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from fourfold import config as configuration
from tests.fakes.toy import make_config
from tests.fakes.toy_services import DELAY_VARIABLE, install

ROOT = Path(__file__).parents[2]


class Stage:
    """A working folder with a recipe, and `fourfold` processes in it."""

    def __init__(self, root: Path, **changes: Any) -> None:
        self.root = root
        config = make_config(root, **{"reward": {"function": "exact_match"}, **changes})
        (root / "toy.toml").write_text(configuration.dump(config))
        self._fakes = install(root / "fakes")
        self.processes: list[subprocess.Popen[str]] = []

    @property
    def run_dir(self) -> Path:
        return self.root / "runs" / "toy"

    def start(
        self, *words: str, delay: float = 0.0, command: str = "run", output: Path | None = None
    ) -> subprocess.Popen[str]:
        """Start a command. Its output goes to a file, or to pipes, which a long run would fill."""
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(self._fakes), str(ROOT), *sys.path])}
        env |= {DELAY_VARIABLE: str(delay), "COLUMNS": "200"}
        with output.open("w") if output is not None else nullcontext(subprocess.PIPE) as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "fourfold", command, *words], cwd=self.root, env=env, text=True,
                stdin=subprocess.PIPE, stdout=out, stderr=out,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def log(self, name: str) -> str:
        path = self.run_dir / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def steps(self) -> int:
        path = self.run_dir / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def wait_for_step(self, process: subprocess.Popen[str], count: int, seconds: float = 40.0) -> None:
        """Wait until the run has done so many steps; fail with what it said when it ends before."""
        try:
            until(lambda: self.steps() >= count or process.poll() is not None, seconds)
        except AssertionError:
            logs = "\n".join(f"== {path.name}\n{path.read_text()[-2000:]}" for path in self.run_dir.glob("logs/*.log"))
            raise AssertionError(f"no step {count} after {seconds} s\n{logs}") from None
        assert process.poll() is None, process.communicate()

    def descendants(self) -> dict[int, str]:
        """Pids and command lines of every process that works in this stage's folder."""
        return working_in(self.root)

    def pid_of(self, role: str) -> int:
        (pid,) = [pid for pid, line in self.descendants().items() if f"-m fourfold serve {role} " in line]
        return pid

    def parent_of(self, role: str) -> str:
        """Command line of the process that started a service."""
        parent = Path(f"/proc/{self.pid_of(role)}/stat").read_text().rpartition(")")[2].split()[1]
        return Path(f"/proc/{parent}/cmdline").read_bytes().replace(b"\0", b" ").decode()


@contextmanager
def staged(root: Path) -> Iterator[Callable[..., Stage]]:
    """Give a maker of stages; end their processes afterwards."""
    stages: list[Stage] = []

    def make(**changes: Any) -> Stage:
        stages.append(Stage(root, **changes))
        return stages[-1]

    yield make
    for stage in stages:
        for process in stage.processes:
            process.kill()
            process.communicate(timeout=10)


def working_in(root: Path) -> dict[int, str]:
    """Pids and command lines of the other processes whose working folder this is."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "cwd").readlink() == root and path.name != str(os.getpid()):
                found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def listening(pids: dict[int, str]) -> set[str]:
    """Local addresses, in the hexadecimal of /proc/net, on which these processes listen."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inodes |= set(re.findall(r"socket:\[(\d+)\]", str(link.readlink())))
            except OSError:
                continue
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and row[9] in inodes}
