"""A run by deploy/slurm/run.sbatch under a real SLURM of one node, which the test starts on loopback."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from fourfold.host.process_tree import descendants
from tests.support import tiny_run

ROOT = Path(__file__).parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
MISSING = [name for name in PROGRAMS if shutil.which(name) is None]

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(os.geteuid() != 0 or bool(MISSING), reason=f"needs root, and SLURM and munge: {MISSING}"),
]

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=2
PartitionName=all Nodes=ALL Default=YES State=UP
"""
TABLES = """
[rollout]
replicas = 0
max_concurrent_samples = 16

[trainer]
replicas = 0
ranks = 1

[reward]
replicas = 0
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Start munge and SLURM; yield the environment of their clients."""
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(host=socket.gethostname().split(".")[0], folder=folder, ports=free_ports(2)))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o400)
    env = {**os.environ, "SLURM_CONF": str(config), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    files = [
        f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("pid-file", "log-file", "seed-file", "key-file")
    ]
    lines = [
        ["munged", "--force", "--foreground", f"--socket={folder}/munge.sock", *files],
        ["slurmctld", "-D", "-f", str(config)],
        ["slurmd", "-D", "-f", str(config)],
    ]
    running = []
    try:
        for line in lines:
            with (folder / f"{line[0]}.out").open("wb") as out:
                running.append(subprocess.Popen(line, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out))
            time.sleep(1.0)
        yield env
    finally:
        pids = {process.pid for process in running}
        for pid in pids | descendants(pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        for process in running:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()


def test_a_job_trains(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    tmp_path.chmod(0o755)
    tiny_run.write_run(tmp_path, tiny_model("llama_tied", 0, "float32"), prompts_per_step=2, tables="")
    recipe = tmp_path / "recipe.toml"
    text = recipe.read_text().replace("steps = 3", "steps = 2").replace("[reward]", TABLES.strip())
    recipe.write_text(text)
    port = free_ports(1)[0]
    words = ["sbatch", "--parsable", "--cpus-per-task=2", str(ROOT / "deploy/slurm/run.sbatch"), str(recipe), str(port)]
    with slurm(tmp_path / "slurm") as env:
        # Not `sbatch --wait`, which asks after 2, 10, 42 s and so on.
        job = call(words, tmp_path, env).strip()
        end = time.monotonic() + 350
        while True:
            state = call(["scontrol", "show", "job", job], tmp_path, env)
            if not re.search("JobState=(PENDING|CONFIGURING|RUNNING|COMPLETING)", state):
                break
            assert time.monotonic() < end, f"{state}\n{logs(tmp_path)}"
            time.sleep(0.5)
    assert "JobState=COMPLETED" in state and "ExitCode=0:0" in state, f"{state}\n{logs(tmp_path)}"
    assert len((tmp_path / "runs/tiny/metrics.jsonl").read_text().splitlines()) == 2


def call(words: Sequence[str], folder: Path, env: Mapping[str, str]) -> str:
    """Run a client of SLURM; return its output."""
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=True, timeout=60).stdout


def logs(folder: Path) -> str:
    """Return the ends of the job's logs."""
    return "\n".join(path.read_text()[-6000:] for path in folder.glob("fourfold-*.log"))
