"""`fourfold run --launcher ray` on a cluster of two machines; one leaves, and comes back."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import machines, tiny_run
from tests.support.machines import two_machines
from tests.support.ray_cluster import RayCluster

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(machines.missing()), reason=f"needs {machines.missing()}"),
]

TABLES = """
[trainer]
ranks = 2

[placement]
trainer_nodes = 2
strategy = "spread"

[rollout]
replicas = 2
max_concurrent_samples = 16

[checkpoint]
every_steps = 1

[retry]
service_wait_seconds = 240

[security]
directory = "certs"
"""


@contextmanager
def cluster(tmp_path: Path) -> Iterator[RayCluster]:
    """A cluster of two machines that share a folder with recipe and certificates."""
    shared = tmp_path / "shared"
    argv = [sys.executable, "-m", "fourfold", "certs", "certs", "--recipe", "recipe.toml"]
    subprocess.run(argv, cwd=shared, check=True, capture_output=True, timeout=60)
    with two_machines(tmp_path, shared=shared) as (a, b):
        yield RayCluster(a, b, shared)


def steps(folder: Path) -> list[int]:
    path = folder / "metrics.jsonl"
    return [json.loads(row)["step"] for row in path.read_text().splitlines()] if path.exists() else []


def test_ranks_and_engines_on_two_nodes_train_and_survive_the_loss_of_one(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shutil.copytree(tiny_model("llama_tied", 0, "float32"), shared / "model")
    tiny_run.write_run(shared, Path("model"), prompts_per_step=4, tables=TABLES)
    recipe = shared / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("steps = 3", "steps = 8"))
    folder = shared / "runs" / "tiny"
    with cluster(tmp_path) as ray:
        a, b = ray.a, ray.b
        ray.start_head(4)
        ray.join(4)
        run = ray.run("recipe.toml")
        ray.wait(lambda: len(steps(folder)) >= 2, "step 2")
        for machine in (a, b):
            left = "".join(machine.programs().values())
            assert len(re.findall(r"serve rollout", left)) == 1, left
            assert len(re.findall(r"serve trainer \S+ --member-id trainer-0 --run-dir \S+ --rank ", left)) == 1, left

        b.kill("ray")
        ray.wait(lambda: f"(lost with node {b.address}:" in a.output("run"), "the loss of the node")
        ray.join(4)
        ray.wait(lambda: run.poll() is not None, "the end of the run", 300)
        assert run.returncode == 0, a.output("run")
        assert steps(folder) == list(range(1, 9)), "no step is lost or repeated"
        report = json.loads((folder / "report.json").read_text())
        assert report["steps"] == 8
        assert (folder / "model" / "model.safetensors").exists()
        text = a.output("run")
        lost = set(re.findall(rf"(\S+) died \(lost with node {b.address}", text))
        assert {"rollout", "trainer"} <= {name.partition("-")[0] for name in lost}, text
        assert [line for machine in (a, b) for line in machine.programs().values() if "fourfold serve" in line] == []
