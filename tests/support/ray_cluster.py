"""A Ray cluster of two machines (`tests/support/machines.py`) with a folder that both see.

The raylets work in folders of their machines, and know nothing of the PYTHONPATH of the driver.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.support.machines import Machine
from tests.support.tiny_run import logs_of

RAY: Final = (sys.executable, "-m", "ray.scripts.scripts")
_STARTED: Final = "Ray runtime started"
_START_SECONDS: Final = 120
_ENV: Final = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "a" * 64,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_period_ms": "1000",  # 3000 by default: a node that was killed is lost after 5 checks
    "RAY_raylet_start_wait_time_s": str(_START_SECONDS),  # 30 by default, too few while engines load on two cores
}


@dataclass
class RayCluster:
    """Head `a`, from where runs are started, and worker `b`; `folder` is shared."""

    a: Machine
    b: Machine
    folder: Path

    @property
    def address(self) -> str:
        return f"{self.a.address}:6379"

    def start_head(self, cpus: int, env: Mapping[str, str] | None = None) -> None:
        words = ["--head", "--port", "6379", "--include-dashboard=false"]
        self._start_node(self.a, words, cpus, env)

    def join(self, cpus: int, env: Mapping[str, str] | None = None) -> None:
        """Add a node on `b`."""
        self._start_node(self.b, ["--address", self.address], cpus, env)

    def leave(self) -> None:
        """Tell `ray start --block` on `b` to end: Ray gives notice, and the node leaves after 30 s."""
        self.b.processes["ray"].terminate()

    def run(self, *words: str, path: str = "") -> subprocess.Popen[bytes]:
        """Start `fourfold run` in the shared folder; `path` comes first in its PYTHONPATH."""
        line = ["run", *words, "--launcher", "ray", "--ray-address", self.address, "--listen", f"{self.a.address}:0"]
        paths = os.pathsep.join([path, *(path for path in sys.path if path)] if path else sys.path)
        env = {**_ENV, "PYTHONPATH": paths, "COLUMNS": "200"}
        return self.a.start("run", ["env", "-C", str(self.folder), sys.executable, "-m", "fourfold", *line], env)

    def wait(self, condition: Callable[[], Any], text: str, seconds: float = 180.0) -> None:
        """Wait for something to come; fail with all outputs if it does not, or if the run has ended."""
        end = time.monotonic() + seconds
        while not condition():
            run = self.a.processes.get("run")
            if time.monotonic() > end or (run is not None and run.poll() is not None and not condition()):
                outputs = "\n".join(
                    f"== {machine.name} {name}\n{machine.output(name)[-5000:]}"
                    for machine in (self.a, self.b)
                    for name in machine.processes
                )
                logs = "\n".join(logs_of(path) for path in self.folder.glob("runs/*"))
                raise AssertionError(f"{text} did not come\n{outputs}\n{logs}")
            time.sleep(0.2)

    def _start_node(self, machine: Machine, words: list[str], cpus: int, env: Mapping[str, str] | None) -> None:
        words += ["--node-ip-address", machine.address, "--num-cpus", str(cpus), "--object-store-memory", "80000000"]
        began = machine.output("ray").count(_STARTED) if "ray" in machine.processes else 0
        machine.start("ray", [*RAY, "start", "--block", *words], {**_ENV, "PYTHONPATH": "", **(env or {})})
        text = f"the raylet of {machine.name}"
        self.wait(lambda: machine.output("ray").count(_STARTED) > began, text, _START_SECONDS)
