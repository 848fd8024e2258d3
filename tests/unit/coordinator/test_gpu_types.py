"""Types of GPUs: the local launcher finds them by the names that NVML gives, Ray by a resource of each node."""

from __future__ import annotations

from typing import Any

import pytest

from fourfold.errors import ConfigError
from fourfold.host.hardware import Gpu
from fourfold_coordinator.launch.fleet import serve_arguments, services_of
from fourfold_coordinator.launch.launcher import ServiceSpec
from fourfold_coordinator.launch.placement import assign_gpus, bundles, check_cluster_fits, is_of_type
from tests.unit.coordinator.test_fleet import recipe

H100, L40S = "NVIDIA H100 80GB HBM3", "NVIDIA L40S"
POOLS: list[dict[str, Any]] = [
    {"name": "big", "gpu": "H100", "gpus_per_replica": 1},
    {"name": "small", "gpu": "L40S", "gpus_per_replica": 1, "replicas": 2},
]


def services(trainer: str = "", **tables: Any) -> list[ServiceSpec]:
    return services_of(
        recipe(rollout={"pool": POOLS}, trainer={"ranks": 2, "device": "cuda", "gpu": trainer}, **tables)
    )


def machine(*names: str) -> list[Gpu]:
    return [Gpu(id=str(number), name=name) for number, name in enumerate(names)]


@pytest.mark.parametrize(
    ("name", "kind", "same"),
    [
        (H100, "H100", True),
        (L40S, "L40S", True),
        (L40S, "L40", False),
        ("NVIDIA L40", "L40S", False),
        ("NVIDIA A100-SXM4-80GB", "A100", True),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", True),
        ("NVIDIA GeForce RTX 3090", "RTX 4090", False),
    ],
)
def test_a_type_is_words_of_a_name(name: str, kind: str, same: bool) -> None:
    assert is_of_type(name, kind) is same


def test_each_pool_gets_gpus_of_its_type_and_others_what_is_left() -> None:
    found = assign_gpus(services(), machine(H100, L40S, H100, L40S, H100), colocated=None)
    assert found == {
        "rollout-big-0": ("0",), "rollout-small-0": ("1",), "rollout-small-1": ("3",), "trainer-0": ("2", "4"),
    }  # fmt: skip
    typed = assign_gpus(services("H100"), machine(H100, L40S, H100, L40S, H100), colocated=False)
    assert typed["trainer-0"] == ("2", "4")


def test_services_of_a_type_share_its_gpus_when_there_are_few() -> None:
    found = assign_gpus(services("H100"), machine(H100, L40S, H100), colocated=None)
    assert found["rollout-small-0"] == found["rollout-small-1"] == ("1",)
    assert set(found["trainer-0"]) == {"0", "2"} and found["rollout-big-0"][0] in ("0", "2")


def test_a_machine_without_the_type_is_refused_with_its_gpus() -> None:
    with pytest.raises(ConfigError) as error:
        assign_gpus(services(), machine(L40S, L40S, "NVIDIA L4", "NVIDIA L4", "NVIDIA L4"), colocated=None)
    assert error.value.message == (
        "rollout-big-0: 1 GPUs of type 'H100' are needed, and this machine offers 2 x NVIDIA L40S, 3 x NVIDIA L4; "
        "change `gpu` in the recipe, or see `fourfold doctor`"
    )
    with pytest.raises(ConfigError, match="rollout-small-0, rollout-small-1: 2 GPUs of type 'L40S' are needed, and"):
        assign_gpus(services(), machine(H100, L40S, H100, H100, H100), colocated=False)


def test_services_that_share_a_gpu_by_recipe_get_it_by_the_type_of_either() -> None:
    pool = {"name": "a", "gpu": "L40S", "gpus_per_replica": 1, "kv_cache_gib": 1}
    tables: dict[str, Any] = {"trainer": {"ranks": 2, "device": "cuda"}, "placement": {"colocated": True}}
    found = assign_gpus(services_of(recipe(rollout={"pool": [pool]}, **tables)), machine(H100, L40S), colocated=True)
    assert found == {"rollout-a-0": ("1",), "trainer-0": ("1", "0")}


def test_the_services_know_their_pool_and_type(tmp_path: Any) -> None:
    found = services("H100")
    assert [(s.name, s.pool, s.gpu) for s in found] == [
        ("rollout-big-0", "big", "H100"), ("rollout-small-0", "small", "L40S"), ("rollout-small-1", "small", "L40S"),
        ("trainer-0", "", "H100"), ("reward-0", "", ""),
    ]  # fmt: skip
    words = serve_arguments(found[1], run_dir=tmp_path, coordinator="127.0.0.1:1")
    assert words[words.index("--pool") + 1] == "small"
    assert "--pool" not in serve_arguments(services_of(recipe())[0], run_dir=tmp_path, coordinator="127.0.0.1:1")


def test_ray_reserves_the_type_and_the_table_shows_it() -> None:
    big, small, *_ = bundles(services())
    assert big.resources == {"CPU": 2, "GPU": 1, "accelerator_type:H100": 0.001}
    assert small.resources == {"CPU": 2, "GPU": 1, "accelerator_type:L40S": 0.001}
    nodes = [
        {"CPU": 16.0, "GPU": 3.0, "accelerator_type:H100": 1.0},
        {"CPU": 16.0, "GPU": 2.0, "accelerator_type:L40S": 1.0},
    ]
    check_cluster_fits(services(), nodes)
    with pytest.raises(ConfigError) as error:
        check_cluster_fits(services(), [nodes[0], {"CPU": 16.0, "GPU": 8.0}])
    assert error.value.message.splitlines()[:-1] == [
        "rollout-small-0 fits on no node of the cluster.",
        "                           CPU   GPU  type",
        "asked  rollout-big-0         2     1  H100",
        "asked  rollout-small-0       2     1  L40S",
        "asked  rollout-small-1       2     1  L40S",
        "asked  trainer-0             2     2",
        "asked  reward-0              1     0",
        "asked  together              9     5",
        "have   node 0               16     3  H100",
        "have   node 1               16     8",
    ]


def test_reference_and_reward_models_have_types_too() -> None:
    model = {"source": "m", "device": "cuda", "gpu": "L40S"}
    tables = {"reference": {"device": "cuda", "gpu": "L40S"}, "algorithm": {"kl": {"coef": 0.1}}}
    found = services_of(recipe(**tables, trainer={"device": "cuda"}, reward={"model": model}))
    types = {s.name: s.gpu for s in found}
    assert (types["reference-0"], types["reward-0"]) == ("L40S", "L40S")
    gpus = assign_gpus(found, machine(L40S, H100, L40S), colocated=None)
    assert gpus["reference-0"] != gpus["reward-0"] and {"1"}.isdisjoint(gpus["reference-0"] + gpus["reward-0"])
    assert next(b for b in bundles(found) if b.name == "reward-0").gpu_types == ["L40S"]
    for wrong in ({"reference": {"gpu": "L40S"}}, {"reward": {"model": {"source": "m", "gpu": "L40S"}}}):
        with pytest.raises(ValueError, match='gpu = "L40S" needs a GPU; set device = "cuda"'):
            recipe(**wrong)
    shared = {"rollout": {"gpus_per_replica": 1, "kv_cache_gib": 1}, "placement": {"colocated": True}}
    with pytest.raises(ValueError, match="they ask for H100 and L40S; ask for one type"):
        recipe(**tables, **shared, trainer={"device": "cuda", "gpu": "H100"})
