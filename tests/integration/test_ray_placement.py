"""Tests the GPUs that a real Ray gives to services that share them, and to others. The GPUs are numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

# In a process of its own: Ray leaves files and processes of its own to the end of whoever started it.
DRIVER = """
import json, sys, time
from pathlib import Path
from fourfold.host.process import Command
from fourfold_coordinator.launch import ray as ray_launcher
from fourfold_coordinator.launch.launcher import ServiceSpec

CHILD = "import os, time; print('SEES', os.environ.get('CUDA_VISIBLE_DEVICES', 'all')); print('READY x', flush=True)"
CHILD += "; time.sleep(60)"
root, init, ray = Path.cwd(), ray_launcher.ray.init, ray_launcher.ray
ray_launcher.ray.init = lambda **options: init(**options | {"num_gpus": 3, "num_cpus": 8})
places = json.loads(sys.argv[1])
services = [ServiceSpec(role=name.partition("-")[0], name=name, place=tuple(place)) for name, place in places.items()]
launcher = ray_launcher.RayLauncher(
    services, run_dir=root, address="", secured=False, coordinator_listen="127.0.0.1:0",
    check_gpu=lambda size: print("SMALLEST", size >> 30),
)

def start(service):
    argv = (sys.executable, "-c", CHILD, "--listen", "127.0.0.1:0")
    launcher.start(service, Command(name=service.name, argv=argv))

def seen():
    lines = {s.name: (root / "logs" / f"{s.name}.log").read_text().splitlines() for s in services}
    return {name: [l.removeprefix("SEES ") for l in all if l.startswith("SEES ")] for name, all in lines.items()}

lost = []

def wait(done):
    end = time.monotonic() + 180
    while not done():
        assert time.monotonic() < end, lost
        lost.extend(launcher.deaths())
        time.sleep(0.2)

try:
    for service in services:
        start(service)
    wait(lambda: all(launcher.is_ready(service.name) for service in services))
    ray.kill(launcher._actors[services[0].name])  # and with it its child
    for _ in range(2):
        start(services[0])  # nobody knows yet
    ray.wait(list(launcher._polls), num_returns=len(launcher._polls), timeout=60)
    wait(lambda: lost)
    assert [death.name for death in lost] == [services[0].name], lost
    start(services[0])
    wait(lambda: launcher.is_ready(services[0].name))
    answer = seen()
finally:
    launcher.stop()
print("SHOWN", json.dumps(answer))
"""


@pytest.mark.slow
@pytest.mark.soak
def test_services_see_their_gpus_and_those_that_share_some_the_same_ones(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    places = {"rollout-0": [0], "rollout-1": [1], "rollout-2": [2], "trainer-0": [0, 1], "reward-0": []}
    nvml = Path(__file__).parents[1] / "fakes" / "nvml"
    told = {"PYTHONPATH": os.pathsep.join([str(nvml), *sys.path]), "FAKE_GPUS": "H200 141, H200 40, H200 4"}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(places)], cwd=tmp_path, text=True, capture_output=True, timeout=380,
        env={k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"} | told, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    shown = json.loads(done.stdout.rpartition("SHOWN ")[2])
    first, second = shown["trainer-0"][-1].split(",")
    assert set(shown["rollout-0"]) == {first}, "also when it was started again"
    assert shown["rollout-1"] == [second]
    assert {first, second, *shown["rollout-2"]} == {"0", "1", "2"}, "it shares none"
    assert shown["reward-0"] == [""], "it has none"
    smallest = {"0": 141, "1": 40, "2": 4}
    assert f"SMALLEST {min(smallest[first], smallest[second])}\n" in done.stdout, "of those that are shared"
