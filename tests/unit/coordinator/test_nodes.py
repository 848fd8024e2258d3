"""Tests the services of a run on several nodes of a Ray cluster: their division, room, folders and environment."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fourfold.errors import ConfigError
from fourfold.host.process import Command
from fourfold_coordinator.cli.run import local_gpus
from fourfold_coordinator.launch import ray
from fourfold_coordinator.launch.fleet import serve_arguments, services_of
from fourfold_coordinator.launch.placement import bundles, check_cluster_fits
from tests.unit.coordinator.test_fleet import recipe


def test_a_trainer_is_divided_among_its_nodes() -> None:
    services = services_of(recipe(trainer={"ranks": 6, "device": "cuda"}, placement={"trainer_nodes": 3}))
    parts = [service for service in services if service.role == "trainer"]
    assert [(s.name, s.member_id, s.place, s.cpus) for s in parts] == [
        ("trainer-0", "trainer-0", (0, 1), 2),
        ("trainer-0-ranks-2-3", "trainer-0", (2, 3), 2),
        ("trainer-0-ranks-4-5", "trainer-0", (4, 5), 2),
    ]
    assert [(b.name, b.gpus) for b in bundles(services)][1:4] == [(part.name, 2) for part in parts]
    words = [serve_arguments(part, run_dir=Path("/r"), coordinator="h:1") for part in parts]
    assert [line[line.index("--rank") + 1] for line in words] == ["0-1", "2-3", "4-5"]
    assert {line[line.index("--member-id") + 1] for line in words} == {"trainer-0"}
    whole = next(s for s in services_of(recipe(trainer={"ranks": 6})) if s.role == "trainer")
    assert "--rank" not in serve_arguments(whole, run_dir=Path("/r"), coordinator="h:1")


def test_each_node_of_a_colocated_trainer_has_its_engines() -> None:
    tables: dict[str, Any] = {
        "rollout": {"replicas": 2, "gpus_per_replica": 2, "kv_cache_gib": 1},
        "trainer": {"ranks": 4, "device": "cuda"},
    }
    services = services_of(recipe(**tables, placement={"colocated": True, "trainer_nodes": 2}))
    assert [b.name for b in bundles(services)] == ["rollout-0, trainer-0", "rollout-1, trainer-0-ranks-2-3", "reward-0"]
    check_cluster_fits(services, [{"CPU": 9, "GPU": 2}, {"CPU": 9, "GPU": 2}])


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"trainer": {"ranks": 3}}, "must divide trainer.ranks = 3: every node holds as many ranks; set it to a "
         "divisor, or trainer.ranks to 4"),
        ({"algorithm": {"preset": "ppo"}, "critic": {"ranks": 2}}, "and critic.ranks = 2 exclude each other"),
        ({"weights": {"backend": "shm"}}, 'and weights.backend = "shm" exclude each other'),
        ({"trainer": {"ranks": 4, "attach_seconds": 50.0, "step_timeout_seconds": 50.0}}, "must be below"),
        ({"trainer": {"ranks": 4, "min_ranks": 2}}, "must be below retry.service_wait_seconds = 120"),
        ({"trainer": {"ranks": 4, "min_ranks": 1, "attach_seconds": 9.0}}, "must be a multiple of the 2 ranks on each"),
        ({"trainer": {"ranks": 4, "min_ranks": 6, "attach_seconds": 9.0}}, "min_ranks = 6 must be at most ranks = 4"),
        ({"trainer": {"ranks": 4, "min_ranks": 3, "sequence_parallel_size": 2}}, "and a multiple of 2 (sequence_par"),
        ({"trainer": {"ranks": 6, "device": "cuda"}, "rollout": {"gpus_per_replica": 2, "kv_cache_gib": 1},
          "placement": {"trainer_nodes": 2, "colocated": True}}, "does not divide the 3 GPUs"),
    ],
)  # fmt: skip
def test_what_cannot_be_on_several_nodes_is_refused(tables: dict[str, Any], message: str) -> None:
    base: dict[str, Any] = {"trainer": {"ranks": 4}, "placement": {"trainer_nodes": 2}}
    recipe(**base)
    with pytest.raises(ValueError, match=re.escape(message)):
        recipe(**base | tables)


def test_one_machine_cannot_be_several() -> None:
    with pytest.raises(ConfigError, match=r"placement.trainer_nodes = 2 needs several machines"):
        local_gpus(recipe(trainer={"ranks": 2}, placement={"trainer_nodes": 2}))
    with pytest.raises(ConfigError, match=r'placement.strategy = "strict_spread" needs several machines'):
        local_gpus(recipe(placement={"strategy": "strict_spread"}))


def test_a_strategy_that_the_cluster_cannot_meet_is_named_with_the_table() -> None:
    services = services_of(recipe(rollout={"replicas": 2}))  # 2, 2, 1 and 1 CPUs
    two, three, large = {"CPU": 4.0}, {"CPU": 3.0}, {"CPU": 6.0}
    check_cluster_fits(services, [two, two], "pack")
    check_cluster_fits(services, [two, two], "spread")
    check_cluster_fits(services, [two, large], "strict_pack")
    check_cluster_fits(services, [two, two, three, three], "strict_spread")
    with pytest.raises(ConfigError) as error:
        check_cluster_fits(services, [two, two], "strict_pack")
    lines = error.value.message.splitlines()
    assert lines[0] == (
        "rollout-0, rollout-1, trainer-0, reward-0 fit on no node of the cluster together "
        '(placement.strategy = "strict_pack").'
    )
    assert [line.split()[-2:] for line in lines if "together  " in line or "have" in line] == [
        ["6", "0"], ["4", "0"], ["4", "0"],
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"reward-0 finds no node of its own \(placement.strategy"):
        check_cluster_fits(services, [large, large, large], "strict_spread")


def test_a_node_without_the_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray.ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    monkeypatch.setattr(ray.ray, "get_runtime_context", FakeContext)
    command = Command(name="reward-0", argv=("python", "-c", ""))
    for working_dir, wanted in (
        (tmp_path / "gone", "gone, the folder in which"),
        (tmp_path, "config.toml, the recipe"),
    ):
        actor = ray.ServiceActor(str(tmp_path / "runs" / "x"), str(working_dir), {"OMP_NUM_THREADS": "1"})
        started = actor.start(command, False, None, ())
        assert started.error.startswith(f"node 10.0.0.7 has no {tmp_path}") and wanted in started.error
        assert "start the run in a folder of storage that they share" in started.error


class FakeContext:
    def get_node_id(self) -> str:
        return "abc"


def test_services_get_the_variables_of_libraries_and_the_named_ones() -> None:
    kept = {"NCCL_DEBUG": "INFO", "VLLM_USE_V1": "1", "OMP_NUM_THREADS": "2", "FOURFOLD_X": "1", "CUDA_HOME": "/c"}
    own = {"CUDA_VISIBLE_DEVICES": "0", "RAY_AUTH_TOKEN": "x", "PATH": "/bin", "HOME": "/root", "OTHER_KEY": "y"}
    assert ray.passed_environment({**kept, **own, "MY_KEY": "z"}, ["MY_KEY"]) == {**kept, "MY_KEY": "z"}


def test_relative_folders_of_pythonpath_are_those_of_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "lib:/other")
    assert ray._python_path() == {"runtime_env": {"env_vars": {"PYTHONPATH": f"{tmp_path}/lib:/other:${{PYTHONPATH}}"}}}
    monkeypatch.delenv("PYTHONPATH")
    assert ray._python_path() == {}
