"""Whole runs with trainer ranks and an engine on each of two machines, over TLS; each side is killed and resumed.

The machines are network namespaces with a loopback, host name, /tmp, shared memory and working folder of their own
(`tests/support/machines.py`). Nothing is shared but the programs.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import machines, tiny_run
from tests.support.machines import Machine, two_machines

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(machines.missing()), reason=f"needs {machines.missing()}"),
]

SECONDS = 300.0
TABLES = """
[trainer]
ranks = 2

[rollout]
replicas = 2
max_concurrent_samples = 16

[checkpoint]
every_steps = 1

[retry]
service_wait_seconds = 280

[security]
directory = "certs"
"""
MEMBERS = ("coordinator-0", "trainer-0", "rollout-0", "rollout-1", "reward-0")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    words = [word for member in MEMBERS for word in ("--member", member)]
    argv = [sys.executable, "-m", "fourfold", "certs", "certs", *words]
    subprocess.run(argv, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    with two_machines(tmp_path) as (a, b):
        for machine in (a, b):
            shutil.copytree(tmp_path / "certs", machine.folder / "certs")
        yield a, b


@pytest.fixture
def tiny_pair(pair: tuple[Machine, Machine], tiny_model: Callable[..., Path]) -> tuple[Machine, Machine]:
    for machine in pair:
        shutil.copytree(tiny_model("llama_tied", 0, "float32"), machine.folder / "model")
        tiny_run.write_run(machine.folder, Path("model"), prompts_per_step=4, tables=TABLES)
        recipe = machine.folder / "recipe.toml"
        recipe.write_text(recipe.read_text().replace("steps = 3", "steps = 8"))
    return pair


def start(a: Machine, b: Machine) -> None:
    """Start everything: the coordinator, rank 0, an engine and the scorer on `a`, rank 1 and an engine on `b`."""
    hub = f"--coordinator {a.address}:5000"
    a.fourfold("coordinator", f"serve coordinator recipe.toml --listen {a.address}:5000")
    a.fourfold("reward", f"serve reward recipe.toml --listen {a.address}:5002 {hub}")
    start_rank_zero(a)
    start_engine(a, a, 0)
    start_rank_one(a, b)
    start_engine(a, b, 1)


def start_rank_zero(a: Machine) -> None:
    line = f"serve trainer recipe.toml --listen {a.address}:5001 --coordinator {a.address}:5000 --rank 0"
    a.fourfold("trainer", line)


def start_rank_one(a: Machine, b: Machine) -> None:
    b.fourfold("ranks", f"serve trainer recipe.toml --coordinator {a.address}:5000 --rank 1")


def start_engine(a: Machine, machine: Machine, number: int) -> None:
    hub = f"--coordinator {a.address}:5000"
    line = f"serve rollout recipe.toml --listen {machine.address}:5003 {hub} --member-id rollout-{number}"
    machine.fourfold("rollout", line)


def steps(a: Machine) -> list[int]:
    path = a.folder / "runs" / "tiny" / "metrics.jsonl"
    return [json.loads(row)["step"] for row in path.read_text().splitlines()] if path.exists() else []


def wait(what: Callable[[], bool], text: str, *shown: tuple[Machine, str]) -> None:
    end = time.monotonic() + SECONDS
    while not what():
        if time.monotonic() > end:
            logs = "\n".join(f"== {m.name} {name}\n{m.output(name)[-3000:]}" for m, name in shown)
            pytest.fail(f"{text} did not come in {SECONDS:.0f} s\n{logs}")
        time.sleep(0.3)


def checkpoints(machine: Machine) -> dict[str, set[str]]:
    folder = machine.folder / "runs" / "tiny" / "checkpoints"
    return {
        path.parent.name: {file.name for file in path.parent.iterdir()} for path in folder.glob("step-*/trainer.json")
    }


def test_a_run_survives_the_loss_of_either_side(tiny_pair: tuple[Machine, Machine]) -> None:
    a, b = tiny_pair
    for machine in tiny_pair:
        recipe = machine.folder / "recipe.toml"
        recipe.write_text(recipe.read_text().replace("every_steps = 1\n", "every_steps = 100\n"))
    everything = [(a, "coordinator"), (a, "trainer"), (a, "rollout"), (b, "ranks"), (b, "rollout")]
    start(a, b)
    wait(lambda: len(steps(a)) >= 2, "step 2", *everything)

    b.processes["ranks"].terminate()  # rank 1 leaves with a notice: rank 0 saves a checkpoint first
    trainer = a.processes["trainer"]
    wait(lambda: trainer.poll() is not None, "the end of rank 0", *everything)
    last = a.output("trainer").splitlines()[-1]
    assert last == "trainer-0: rank 1 on host-b: its process was stopped"
    assert b.processes["ranks"].wait(30) == 0
    saved = int(max(checkpoints(a)).removeprefix("step-"))
    assert saved >= 2 and checkpoints(a) == checkpoints(b)
    start_rank_zero(a)
    start_rank_one(a, b)
    wait(lambda: len(steps(a)) >= saved + 2, "two steps after the loss of host-b's rank", *everything)
    restored = re.findall(r"restored: step=(\d+)", a.output("coordinator"))
    assert restored == [str(saved)], "nothing since the notice is lost"

    a.kill("trainer")  # rank 0: the holder of rank 1 waits for the next one
    start_rank_zero(a)
    coordinator = a.processes["coordinator"]
    wait(lambda: coordinator.poll() is not None, "the end of the run", *everything)
    assert coordinator.returncode == 0, a.output("coordinator")
    assert steps(a) == list(range(1, 9)), "no step is lost or repeated"
    report = json.loads((a.folder / "runs" / "tiny" / "report.json").read_text())
    assert (report["steps"], report["policy_version"]) == (8, report["policy_version"])
    assert (a.folder / "runs" / "tiny" / "model" / "model.safetensors").exists()
    wanted = {"trainer.json", "policy-000.safetensors", "policy-001.safetensors"}
    newest = max(checkpoints(a))
    assert checkpoints(a)[newest] == checkpoints(b)[newest] == wanted, "each file is on two machines"
    assert a.processes["trainer"].poll() is None
    a.processes["trainer"].terminate()
    assert a.processes["trainer"].wait(30) == 0
    assert b.processes["ranks"].wait(60) == 0, b.output("ranks")


@pytest.mark.soak
def test_a_run_goes_on_with_fewer_ranks_and_takes_the_others_back(tiny_pair: tuple[Machine, Machine]) -> None:
    """The process of rank 0 restarts its program with the remaining ranks, and later with all of them."""
    a, b = tiny_pair
    alone = {"trainer.json", "policy-000.safetensors"}
    for machine in tiny_pair:
        recipe = machine.folder / "recipe.toml"
        text = recipe.read_text().replace("steps = 8", "steps = 12")
        recipe.write_text(text.replace("ranks = 2", "ranks = 2\nmin_ranks = 1\nattach_seconds = 5"))
    everything = [(a, "coordinator"), (a, "trainer"), (a, "rollout"), (b, "ranks"), (b, "rollout")]
    start(a, b)
    wait(lambda: len(steps(a)) >= 2, "step 2", *everything)
    b.kill("ranks")
    wait(lambda: "training with 1 of 2 ranks: rank 0" in a.output("trainer"), "one rank", *everything)
    named = r"trainer-0: rank 1 on host-b: .*(ended|broke)"
    assert [line for line in a.output("trainer").splitlines() if re.fullmatch(named, line)]
    start_rank_one(a, b)
    wait(lambda: checkpoints(a)[max(checkpoints(a))] == alone, "a checkpoint of one rank", *everything)
    wait(lambda: "more ranks wait" in a.output("trainer"), "rank 1 again", *everything)
    coordinator = a.processes["coordinator"]
    wait(lambda: coordinator.poll() is not None, "the end of the run", *everything)
    assert coordinator.returncode == 0, a.output("coordinator")
    assert steps(a) == list(range(1, 9)), "no step is lost or repeated"
    newest = max(checkpoints(a))
    assert checkpoints(a)[newest] == checkpoints(b)[newest] == {*alone, "policy-001.safetensors"}
    assert a.processes["trainer"].poll() is None, "the process with rank 0 never ended"
