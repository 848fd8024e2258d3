"""Tests on a real Ray of two nodes that a pool gets GPUs of its type; the GPUs and types are numbers and names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

# In a process of its own: Ray leaves files and processes of its own to the end of whoever started it.
DRIVER = """
import json, sys, time
from pathlib import Path
from ray.cluster_utils import Cluster
from ray.util import placement_group_table
from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold.host.process import Command
from fourfold_coordinator.launch import ray as ray_launcher
from fourfold_coordinator.launch.fleet import services_of

cluster = Cluster()
for kind in ("H100", "L40S"):
    cluster.add_node(num_cpus=16, num_gpus=4, resources={f"accelerator_type:{kind}": 1}, include_dashboard=False)

def launch(*pools):
    config = Config.model_validate({
        "name": "types", "steps": 1, "model": {"source": "tiny"}, "data": {"train": {"path": "train.jsonl"}},
        "batch": {"prompts_per_step": 1, "group_size": 2}, "sampling": {"max_new_tokens": 8},
        "rollout": {"gpus_per_replica": 1, "pool": list(pools)}, "trainer": {"device": "cuda"},
    })
    services = services_of(config)
    return services, ray_launcher.RayLauncher(
        services, run_dir=Path.cwd(), address=cluster.address, secured=True, coordinator_listen="10.0.0.1:0",
        check_gpu=lambda size: None,
    )

try:
    launch({"name": "absent", "gpu": "B200"})
    print("REFUSED", json.dumps(""))
except ConfigError as error:
    print("REFUSED", json.dumps(error.message))
ray_launcher.ray.shutdown()

services, launcher = launch({"name": "big", "gpu": "H100"}, {"name": "small", "gpu": "L40S", "replicas": 2})
try:
    child = "import time; print('READY x', flush=True); time.sleep(60)"
    for service in services:
        argv = (sys.executable, "-c", child, "--listen", "127.0.0.1:0")
        launcher.start(service, Command(name=service.name, argv=argv))
    end = time.monotonic() + 120
    while not all(launcher.is_ready(service.name) for service in services):
        assert time.monotonic() < end and not launcher.deaths()
        time.sleep(0.2)
    types = {
        node["NodeID"]: key for node in ray_launcher.ray.nodes() for key in node["Resources"] if "_type:" in key
    }
    nodes = placement_group_table(launcher._group)["bundles_to_node_id"]
    found = {bundle.name: types[nodes[index]] for index, bundle in enumerate(launcher._bundles)}
    print("PLACED", json.dumps(found))
finally:
    launcher.stop()
    cluster.shutdown()
"""


def test_a_pool_is_placed_on_the_node_with_its_type_of_gpu(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    env = {"PYTHONPATH": os.pathsep.join(sys.path), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], cwd=tmp_path, text=True, capture_output=True, timeout=280, check=False,
        env={key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"} | env,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("REFUSED ", "PLACED ")))
    refused = json.loads(lines["REFUSED"])
    assert refused.startswith("rollout-absent-0 fits on no node of the cluster.") and "H100" in refused, refused
    placed = json.loads(lines["PLACED"])
    assert placed["rollout-big-0"] == "accelerator_type:H100"
    # One node has room for all: without a type Ray would pack them together.
    assert placed["rollout-small-0"] == placed["rollout-small-1"] == "accelerator_type:L40S"
