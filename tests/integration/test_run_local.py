"""`fourfold run` with everything real: vLLM, DeepSpeed, gRPC, shared-memory weights, on a tiny model.

One run of a mixture of experts to its export, and Ctrl-C while the engines load, when most processes are young.
"""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fourfold.host.process_tree import descendants
from fourfold.model import folder as model_folder
from fourfold.model.tokenizer import tokenizer_sha256
from tests.fakes.command_line import until
from tests.support.tiny_run import logs_of, write_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

TABLES = """
[trainer]
learning_rate = 1e-3

[evaluation]
every_steps = 2

[checkpoint]
every_steps = 1
"""


class Folder:
    """A working folder and the runs in it."""

    def __init__(self, root: Path, model: Path, *, tables: str = TABLES) -> None:
        self.root = root
        self.run_dir = root / "runs" / "tiny"
        write_run(root, model, prompts_per_step=2, tables=tables)
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "fourfold", "run", *words], cwd=self.root, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def rows(self, name: str) -> list[dict[str, Any]]:
        path = self.run_dir / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def logs(self) -> str:
        return logs_of(self.run_dir)


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Callable[..., Path]) -> Iterator[Folder]:
    made = Folder(tmp_path, tiny_model("llama_tied"))
    yield made
    for process in made.processes:
        process.kill()
        process.communicate(timeout=10)


def alive(pids: set[int]) -> set[int]:
    """Those that still run; zombies that nobody collects in a container do not."""
    found = set()
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.add(pid)
        except OSError:
            continue
    return found


def engine_processes(pid: int) -> set[int]:
    """Those that the rollout service of a run has started."""
    commands = {child: Path(f"/proc/{child}/cmdline") for child in descendants({pid})}
    services = {child for child, path in commands.items() if path.exists() and b"rollout-0" in path.read_bytes()}
    return descendants(services) if services else set()


def check_agreement(folder: Folder) -> None:
    """Metrics, samples, evaluations, ledger, checkpoints and export tell of the same three steps."""
    metrics = folder.rows("metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3]
    drifts = [row["mismatch/logprob_diff_mean"] for row in metrics]
    assert max(drifts) < 0.2, drifts  # bfloat16 on both sides; stale weights would make it grow
    report = json.loads((folder.run_dir / "report.json").read_text())
    assert report["steps"] == 3 and report["seed"] == 5 and report["peak_memory_bytes"] > 1 << 28
    assert [row["step"] for row in report["evals"]] == [0, 2, 3]
    trained = [row["sample_id"] for row in folder.rows("samples.jsonl") if not row["dropped"]]
    assert len(trained) == len(set(trained)) == 3 * 2 * 4  # each sample entered one step
    with sqlite3.connect(folder.run_dir / "ledger.sqlite") as ledger:
        states = dict(ledger.execute("SELECT state, COUNT(*) FROM samples GROUP BY state").fetchall())
    assert set(states) <= {"TRAINED", "DROPPED"} and states["TRAINED"] == len(trained), states
    assert sorted(path.name for path in (folder.run_dir / "checkpoints").glob("step-*"))[-1] == "step-000003"
    exported = folder.run_dir / "model"
    source = Path(report_source(folder))
    assert model_folder.folder_shape(model_folder.resolve(str(exported))) == model_folder.folder_shape(source)
    assert tokenizer_sha256(exported) == tokenizer_sha256(source)


@pytest.mark.slow
def test_a_mixture_of_experts_is_trained_from_its_first_step_to_its_export(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    tables = TABLES.replace("1e-3", "1e-3\nrouter_aux_loss_coef = 1e-3") + "[weights]\nverify_every = 1\n"
    folder = Folder(tmp_path, tiny_model("qwen3_moe"), tables=tables)
    process = folder.start("recipe.toml")
    try:
        output, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, errors + folder.logs()
    assert "tiny is done: 3 steps" in output
    check_agreement(folder)
    for row in folder.rows("metrics.jsonl"):
        assert row["moe/aux_loss"] > 1.5 and row["moe/max_violation"] >= 0, "each token goes to two of three experts"


def report_source(folder: Folder) -> str:
    from fourfold import config

    return config.load(folder.run_dir / "config.toml").model.source


@pytest.mark.slow
def test_interrupt_while_the_engines_load_leaves_nothing(folder: Folder) -> None:
    process = folder.start("recipe.toml")
    until(lambda: engine_processes(process.pid) or process.poll() is not None, 120)
    assert process.poll() is None, folder.logs()
    assert not folder.rows("metrics.jsonl")
    everything = descendants({process.pid})
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - began < 20
    assert process.returncode == 130 and "Stopped by SIGINT" in errors
    until(lambda: not alive(everything), 10)
