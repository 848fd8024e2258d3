"""Tests the processes that a recipe needs, and their restarts. The launcher and the deaths are fakes."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fourfold.cli import main as cli_main
from fourfold.config import Config, dump, gpu_places
from fourfold.coordinator.v1 import run_service_pb2 as run_pb
from fourfold.errors import ConfigError
from fourfold.host.clock import Clock, SystemClock
from fourfold.host.hardware import Gpu
from fourfold.host.postmortem import Death
from fourfold.host.process import Command
from fourfold_coordinator.cli.dashboard import _PHASES
from fourfold_coordinator.launch.fleet import COORDINATOR, Fleet, services_of
from fourfold_coordinator.launch.launcher import ServiceSpec
from fourfold_coordinator.launch.placement import assign_gpus, bundles, check_cluster_fits, shared_gpus
from fourfold_coordinator.launch.run_folder import make_run_dir
from fourfold_coordinator.launch.run_names import DEATH_VARIABLE
from fourfold_coordinator.routing.registry import ROLE_NAMES
from fourfold_coordinator.training.context import RunContext

ROOT = Path(__file__).parents[3]


def recipe(**tables: Any) -> Config:
    base: dict[str, Any] = {
        "name": "t",
        "steps": 1,
        "model": {"source": "m"},
        "data": {"train": {"path": "x.jsonl"}},
        "batch": {"prompts_per_step": 5, "group_size": 4},
        "sampling": {"max_new_tokens": 10},
    }
    return Config.model_validate(base | tables)


class FakeLauncher:
    """Notes what is started; the test says what dies and what is ready."""

    def __init__(self) -> None:
        self.started: list[Command] = []
        self.dying: list[Death] = []
        self.ready: set[str] = set()
        self.waiting: set[str] = set()
        self.obstacles: dict[str, str] = {}

    def start(self, service: ServiceSpec, command: Command) -> None:
        assert service.name == command.name
        self.started.append(command)

    def deaths(self) -> list[Death]:
        dying, self.dying = self.dying, []
        return dying

    def is_ready(self, name: str) -> bool:
        return name in self.ready

    def obstacle(self, name: str) -> str:
        return "" if name in self.ready else self.obstacles.get(name, "")

    def is_placed(self, name: str) -> bool:
        return name not in self.waiting

    def stop(self) -> None: ...

    def kill(self) -> None: ...

    def names(self) -> list[str]:
        return [command.name for command in self.started]


class FakeClock(SystemClock):
    seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


def death(name: str, *, code: int = 1, number: int = 0, was_ready: bool = True) -> Death:
    return Death(
        name=name, time=0.0, exit_code=code, signal=number, oom_kills=0, was_ready=was_ready, log=f"logs/{name}.log",
        last_lines=(f"{name} says why",),
    )  # fmt: skip


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def started(tmp_path: Path, config: Config, clock: Clock) -> tuple[Fleet, FakeLauncher, list[str]]:
    """A fleet whose coordinator listens and whose services were started."""
    launcher, notes = FakeLauncher(), list[str]()
    fleet = Fleet(config, run_dir=tmp_path, launcher=launcher, notify=notes.append, clock=clock)
    fleet.start()
    assert launcher.names() == [COORDINATOR]
    assert fleet.tick() is None and launcher.names() == [COORDINATOR]  # nobody starts before it listens
    (tmp_path / "coordinator.address").write_text("127.0.0.1:4000\n")
    assert fleet.tick() is None
    return fleet, launcher, notes


def test_services_of_a_recipe() -> None:
    config = recipe(rollout={"replicas": 2, "gpus_per_replica": 2}, trainer={"ranks": 4, "device": "cuda"})
    assert [(s.name, s.gpus) for s in services_of(config)] == [
        ("rollout-0", 2), ("rollout-1", 2), ("trainer-0", 4), ("reward-0", 0),
    ]  # fmt: skip
    assert "reference-0" in [s.name for s in services_of(recipe(algorithm={"kl": {"coef": 0.1}}))]
    agents = recipe(agents={"source": "tasks"}, environment={"replicas": 2, "source": "x.py:X"})
    assert [s.name for s in services_of(agents)][-2:] == ["environment-0", "environment-1"]
    by_hand = recipe(rollout={"replicas": 0}, trainer={"replicas": 0})
    assert [s.name for s in services_of(by_hand)] == ["reward-0"]
    assert [s.name for s in services_of(by_hand, manual=True)] == ["rollout-0", "trainer-0"]


def test_an_evaluation_waits_for_the_services_that_it_starts() -> None:
    context: Any = SimpleNamespace(config=recipe(algorithm={"kl": {"coef": 0.1}}))
    waits = {ROLE_NAMES[role] for role in RunContext.required_services(context, evaluate=True)}
    assert waits == {service.role for service in services_of(context.config, evaluate=True)} == {"rollout", "reward"}


def test_services_of_a_recipe_with_agents() -> None:
    environment = {"replicas": 2, "source": "game.py:Game", "processes": 3}
    config = recipe(agents={"source": "tasks"}, gateway={"replicas": 1}, environment=environment)
    found = [(service.name, service.cpus) for service in services_of(config)]
    assert found == [("rollout-0", 2), ("trainer-0", 1), ("gateway-0", 1), ("environment-0", 3), ("environment-1", 3)]
    assert [service.name for service in services_of(recipe(agents={"source": "tasks"}), manual=True)] == ["gateway-0"]
    scored = services_of(recipe(agents={"source": "tasks", "reward": "service"}))
    assert [service.name for service in scored] == ["rollout-0", "trainer-0", "reward-0"]


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ({"data": {}}, "data.train is missing"),
        ({"agents": {"source": "groups"}}, "data.train is set"),
        ({"agents": {"source": "groups"}, "data": {"eval": {"path": "x.jsonl"}}}, "data.eval needs scores"),
        ({"agents": {"source": "groups"}, "data": {"holdout": {"groups": 1}}}, "`train`, which is missing"),
    ],
)
def test_the_data_of_a_recipe_fits_to_its_agents(tables: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        recipe(**tables)


def test_what_keeps_a_service_from_being_ready_is_told_once(tmp_path: Path, clock: FakeClock) -> None:
    fleet, launcher, notes = started(tmp_path, recipe(), clock)
    launcher.obstacles["rollout-0"] = "cannot register"
    for _ in range(3):
        fleet.tick()
    assert notes == ["rollout-0 is not ready: cannot register"]
    assert ("rollout-0", "starting") in fleet.states()
    launcher.obstacles["rollout-0"] = "cannot register yet"
    fleet.tick()
    assert len(notes) == 2
    launcher.ready.add("rollout-0")
    fleet.tick()
    assert len(notes) == 2


def test_coordinator_starts_first_and_its_address_is_handed_on(tmp_path: Path, clock: FakeClock) -> None:
    (tmp_path / "coordinator.address").write_text("stale")
    fleet, launcher, _ = started(tmp_path, recipe(), clock)
    assert launcher.names() == [COORDINATOR, "rollout-0", "trainer-0", "reward-0"]
    words = launcher.started[1].argv
    assert words[1:5] == ("-m", "fourfold", "serve", "rollout")
    assert words[words.index("--coordinator") + 1] == fleet.address == "127.0.0.1:4000"
    assert words[words.index("--listen") + 1] == "127.0.0.1:0"
    assert "--coordinator" not in launcher.started[0].argv


def test_keys_of_the_command_line_reach_the_services_until_the_recipe_of_the_run_has_them(
    tmp_path: Path, clock: FakeClock
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(dump(recipe()))
    launcher, words = FakeLauncher(), ("steps=5", "seed=7")
    config = recipe().model_copy(update={"steps": 5, "seed": 7})
    fleet = Fleet(config, run_dir=tmp_path, launcher=launcher, notify=print, assignments=list(words), clock=clock)
    fleet.start()
    (tmp_path / "coordinator.address").write_text("127.0.0.1:4000\n")
    fleet.tick()
    assert len(launcher.started) > 1
    assert all(command.argv[-4:] == ("--set", words[0], "--set", words[1]) for command in launcher.started)
    assert fleet.assignments == list(words), "nothing has accepted them yet"
    file.write_text(dump(config))
    launcher.dying = [death("rollout-0")]
    fleet.tick()
    assert launcher.started[-1].name == "rollout-0" and "--set" not in launcher.started[-1].argv
    file.write_text("# edited\n" + dump(config))
    fleet = Fleet(config, run_dir=tmp_path, launcher=launcher, notify=print, assignments=list(words), clock=clock)
    assert fleet.assignments == (), "the file has these values already"


def test_coordinator_decides_how_the_run_ended(tmp_path: Path, clock: FakeClock) -> None:
    fleet, launcher, _ = started(tmp_path, recipe(), clock)
    launcher.dying = [death(COORDINATOR, code=0)]
    ending = fleet.tick()
    assert ending is not None and ending.done
    launcher.dying = [death(COORDINATOR, code=1)]
    ending = fleet.tick()
    assert ending is not None and not ending.done and "coordinator-0 says why" in ending.text


def test_a_coordinator_that_is_killed_is_started_again_at_its_address(tmp_path: Path, clock: FakeClock) -> None:
    fleet, launcher, notes = started(tmp_path, recipe(), clock)
    launcher.ready = {COORDINATOR, "rollout-0", "trainer-0", "reward-0"}
    launcher.dying = [death(COORDINATOR, code=0, number=signal.SIGKILL)]
    launcher.ready.discard(COORDINATOR)
    assert fleet.tick() is None
    again = launcher.started[-1]
    assert again.argv[again.argv.index("--listen") + 1] == "127.0.0.1:4000"
    assert dict(again.env) == {DEATH_VARIABLE: "killed by SIGKILL"}
    assert launcher.names()[1:] == ["rollout-0", "trainer-0", "reward-0", COORDINATOR], "the services keep running"
    assert "coordinator-0 died (killed by SIGKILL); restarting it" in notes[-1]
    assert (COORDINATOR, "restarting") in fleet.states()
    clock.seconds += 2
    launcher.ready.add(COORDINATOR)
    assert fleet.tick() is None
    assert notes[-1] == "coordinator-0 is ready again after 2 s" and (COORDINATOR, "ready") in fleet.states()
    clock.seconds += 3000
    assert fleet.tick() is None, "no deadline is left"


def test_a_coordinator_that_dies_at_each_start_ends_the_run_with_its_cause(tmp_path: Path, clock: FakeClock) -> None:
    fleet, launcher, _ = started(tmp_path, recipe(retry={"restarts": 2}), clock)
    launcher.dying = [death(COORDINATOR, code=0, number=signal.SIGKILL)]
    assert fleet.tick() is None
    waits = []
    while (ending := fleet.tick()) is None:
        count = launcher.names().count(COORDINATOR)
        launcher.dying = [death(COORDINATOR, was_ready=False)]  # for example, its port is taken
        if (ending := fleet.tick()) is not None:
            break
        began = clock.seconds
        while launcher.names().count(COORDINATOR) == count:
            clock.seconds += 0.5
            assert fleet.tick() is None
        waits.append(clock.seconds - began)
    assert waits == [1.0], "the first restart is at once, and the second waits"
    assert not ending.done and "coordinator-0 died before it was ready" in ending.text
    assert "coordinator-0 says why" in ending.text and "restarted 2 times already (retry.restarts = 2)" in ending.text


def test_a_restarted_coordinator_that_never_listens_is_told(tmp_path: Path, clock: FakeClock) -> None:
    fleet, launcher, _ = started(tmp_path, recipe(), clock)
    launcher.ready = {"rollout-0", "trainer-0", "reward-0"}
    launcher.dying = [death(COORDINATOR, code=0, number=signal.SIGKILL)]
    assert fleet.tick() is None
    clock.seconds += 121
    ending = fleet.tick()
    assert ending is not None and "coordinator-0 did not listen within 120 s" in ending.text


def test_service_dead_at_its_first_start_ends_the_run_with_its_words(tmp_path: Path, clock: FakeClock) -> None:
    fleet, launcher, _ = started(tmp_path, recipe(), clock)
    launcher.dying = [death("rollout-0", was_ready=False), death(COORDINATOR, code=1)]
    ending = fleet.tick()
    assert ending is not None and "rollout-0 died before it was ready" in ending.text
    assert "rollout-0 says why" in ending.text and COORDINATOR not in ending.text  # the first death, not the cascade


@pytest.mark.parametrize("name", ["rollout-0", "reward-0", "trainer-0"])
def test_service_that_dies_is_started_again_a_few_times(tmp_path: Path, clock: FakeClock, name: str) -> None:
    fleet, launcher, notes = started(tmp_path, recipe(retry={"restarts": 2}), clock)
    for restart in (1, 2):
        launcher.dying = [death(name, code=0, number=signal.SIGKILL)]
        assert fleet.tick() is None
        clock.seconds += 60
        assert fleet.tick() is None
        assert launcher.names().count(name) == 1 + restart
        assert len(notes) == restart and f"{name} died (killed by SIGKILL)" in notes[-1]
    launcher.dying = [death(name, was_ready=False)]
    ending = fleet.tick()
    assert ending is not None and "restarted 2 times already (retry.restarts = 2)" in ending.text
    assert fleet.survived_deaths == notes


def test_second_restart_waits_a_little(tmp_path: Path, clock: FakeClock) -> None:
    fleet, launcher, _ = started(tmp_path, recipe(), clock)
    launcher.dying = [death("reward-0")]
    fleet.tick()
    assert launcher.names().count("reward-0") == 2  # at once
    launcher.dying = [death("reward-0")]
    fleet.tick()
    assert launcher.names().count("reward-0") == 2 and ("reward-0", "restarting") in fleet.states()
    clock.seconds += 1.01
    fleet.tick()
    assert launcher.names().count("reward-0") == 3


def test_lost_replica_is_given_up_while_another_lives(tmp_path: Path, clock: FakeClock) -> None:
    fleet, launcher, notes = started(tmp_path, recipe(rollout={"replicas": 2}, retry={"restarts": 0}), clock)
    launcher.dying = [death("rollout-0")]
    assert fleet.tick() is None
    assert ("rollout-0", "lost") in fleet.states() and "continues without it" in notes[-1]
    launcher.dying = [death("rollout-1")]
    ending = fleet.tick()
    assert ending is not None and not ending.done


def test_coordinator_that_never_listens_is_told(tmp_path: Path, clock: FakeClock) -> None:
    fleet = Fleet(recipe(), run_dir=tmp_path, launcher=FakeLauncher(), notify=print, clock=clock)
    fleet.start()
    clock.seconds += 1000
    ending = fleet.tick()
    assert ending is not None and "coordinator-0 did not listen within" in ending.text


def test_service_that_never_gets_ready_is_told(tmp_path: Path, clock: FakeClock) -> None:
    fleet, launcher, _ = started(tmp_path, recipe(retry={"service_wait_seconds": 5}), clock)
    launcher.ready = {"rollout-0", "reward-0"}
    clock.seconds += 1000
    ending = fleet.tick()
    assert ending is not None and ending.text.startswith("trainer-0 not ready in time")


@pytest.mark.parametrize(("critic_ranks", "gpus"), [(0, 2), (3, 5)])
def test_a_critic_apart_has_gpus_of_its_own(critic_ranks: int, gpus: int) -> None:
    tables = {"trainer": {"device": "cuda", "ranks": 2}, "critic": {"ranks": critic_ranks}}
    (trainer,) = [s for s in services_of(recipe(algorithm={"preset": "ppo"}, **tables)) if s.role == "trainer"]
    assert (trainer.gpus, trainer.cpus) == (gpus, gpus)
    (without,) = [s for s in services_of(recipe(**tables)) if s.role == "trainer"]
    assert without.gpus == 2


def gpus_named(*ids: str) -> list[Gpu]:
    return [Gpu(id=name, name="NVIDIA H100 80GB HBM3") for name in ids]


def test_gpus_are_dealt_out_in_order_and_shared_when_there_are_few() -> None:
    services = services_of(
        recipe(rollout={"replicas": 2, "gpus_per_replica": 1}, trainer={"ranks": 2, "device": "cuda"})
    )
    assert assign_gpus(services, gpus_named("4", "5", "6", "7"), colocated=None) == {
        "rollout-0": ("4",), "rollout-1": ("5",), "trainer-0": ("6", "7"),
    }  # fmt: skip
    few = assign_gpus(services, gpus_named("0", "1"), colocated=None)
    assert few == {"rollout-0": ("0",), "rollout-1": ("1",), "trainer-0": ("0", "1")}
    assert shared_gpus(few) == {"0": ["rollout-0", "trainer-0"], "1": ["rollout-1", "trainer-0"]}
    with pytest.raises(ConfigError, match="trainer-0 asks for 2 GPUs and this machine offers 1"):
        assign_gpus(services, gpus_named("0"), colocated=None)


def test_colocated_services_share_gpus_and_others_do_not() -> None:
    tables: dict[str, Any] = {
        "rollout": {"replicas": 2, "gpus_per_replica": 2, "kv_cache_gib": 1},
        "trainer": {"ranks": 4, "device": "cuda"},
        "algorithm": {"kl": {"coef": 0.1}},
        "reference": {"device": "cuda", "replicas": 2, "tokens_per_batch": 8192},
    }
    together = services_of(recipe(**tables, placement={"colocated": True}))
    names = gpus_named("4", "5", "6", "7")
    assert assign_gpus(together, names, colocated=True) == {
        "rollout-0": ("4", "5"), "rollout-1": ("6", "7"), "trainer-0": ("4", "5", "6", "7"),
        "reference-0": ("4",), "reference-1": ("5",),
    }  # fmt: skip
    with pytest.raises(ConfigError, match="services share GPUs and ask for 5 GPUs, this machine offers 4"):
        five = tables | {"rollout": {"replicas": 5, "gpus_per_replica": 1, "kv_cache_gib": 1}}
        assign_gpus(services_of(recipe(**five, placement={"colocated": True})), names, colocated=True)
    apart = services_of(recipe(**tables, placement={"colocated": False}))
    assert shared_gpus(assign_gpus(apart, gpus_named(*map(str, range(10))), colocated=False)) == {}
    with pytest.raises(ConfigError, match="services have their own and ask for 10 GPUs, this machine offers 4"):
        assign_gpus(apart, names, colocated=False)


def test_reward_models_share_gpus_in_turn_unless_they_ask_for_their_own() -> None:
    def model(name: str, replicas: int = 1, **keys: Any) -> dict[str, Any]:
        return {"name": name, "replicas": replicas, "model": {"source": "m", "device": "cuda"} | keys}

    rewards = [model("a"), model("b", 2), model("c", gpus_per_replica=3), model("own", own_gpus=True)]
    tables: dict[str, Any] = {
        "rollout": {"replicas": 2, "gpus_per_replica": 2, "kv_cache_gib": 1},
        "trainer": {"ranks": 4, "device": "cuda"},
        "reward": [*rewards, {"name": "f", "function": "last_number"}],
    }
    places = gpu_places(recipe(**tables, placement={"colocated": True}))
    assert {name: place for name, place in places.items() if name.startswith("reward")} == {
        "reward-a-0": (0,), "reward-b-0": (1,), "reward-b-1": (2,), "reward-c-0": (0, 1, 2), "reward-own-0": (4,),
    }  # fmt: skip
    apart = gpu_places(recipe(**tables))
    assert apart["reward-a-0"] == (8,) and apart["reward-own-0"] == (14,)
    tables["reward"] = [model("a"), model("b", 2, gpus_per_replica=2)]
    places = gpu_places(recipe(**tables, placement={"colocated": True}))
    assert sorted(places[f"reward-b-{index}"] for index in range(2)) == [(0, 1), (2, 3)], "no GPU has two copies"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"reward": {"replicas": 2, "model": {"source": "m", "device": "cuda"}}},
            "[[reward]] 'reward'.replicas = 2 on 1 shared GPUs puts two copies of one model on a GPU; set it to at "
            "most 1, or set own_gpus = true",
        ),
        (
            {
                "trainer": {"device": "cuda", "gpu": "H100"},
                "reward": {"model": {"source": "m", "device": "cuda", "gpu": "L40S"}},
            },
            "they ask for H100 and L40S; ask for one type of GPU, set own_gpus = true for a reward model",
        ),
        ({"trainer": {"device": "cpu"}}, 'trainer.device = "cpu"; set it to "cuda"'),
        ({"rollout": {"replicas": 1, "kv_cache_gib": 1}}, "rollout.gpus_per_replica = 0; set it to at least 1"),
        ({"rollout": {"gpus_per_replica": 1}}, "needs rollout.kv_cache_gib"),
        ({"weights": {"backend": "nccl"}}, "NCCL refuses two ranks"),
        ({"reference": {"device": "cuda", "replicas": 2}}, "two copies of one model on a GPU; set it to at most 1"),
    ],
)
def test_what_cannot_share_gpus_is_refused(change: dict[str, Any], message: str) -> None:
    tables: dict[str, Any] = {
        "rollout": {"gpus_per_replica": 1, "kv_cache_gib": 1},
        "trainer": {"device": "cuda"},
        "algorithm": {"kl": {"coef": 0.1}},
        "placement": {"colocated": True},
    }
    recipe(**tables)
    with pytest.raises(ValueError, match=re.escape(message)):
        recipe(**tables | change)


def test_cluster_that_is_too_small_is_refused_with_a_table() -> None:
    services = services_of(
        recipe(rollout={"replicas": 2, "gpus_per_replica": 2}, trainer={"ranks": 4, "device": "cuda"})
    )
    check_cluster_fits(services, [{"CPU": 64, "GPU": 4}, {"CPU": 64, "GPU": 4}])
    with pytest.raises(ConfigError) as error:  # 8 GPUs in all, but none has 4 left for the trainer
        check_cluster_fits(services, [{"CPU": 64, "GPU": 3}, {"CPU": 64, "GPU": 3}, {"CPU": 64, "GPU": 2}])
    first, *table, advice = error.value.message.splitlines()
    assert first == "trainer-0 fits on no node of the cluster." and len(table) == 9
    assert "asked  together              9     8" in table
    assert advice.startswith(
        "Lower rollout.replicas, rollout.gpus_per_replica, trainer.ranks or critic.ranks, let serv"
    )
    with pytest.raises(ConfigError, match="reward-0 fits on no node"):  # CPUs run out
        check_cluster_fits(services, [{"CPU": 8, "GPU": 8}])


def test_services_that_share_gpus_are_set_aside_together() -> None:
    tables: dict[str, Any] = {
        "rollout": {"replicas": 3, "gpus_per_replica": 1, "kv_cache_gib": 1},
        "trainer": {"ranks": 2, "device": "cuda"},
    }
    services = services_of(recipe(**tables, placement={"colocated": True}))
    together, alone, reward = bundles(services)
    assert (together.name, together.gpus, together.cpus) == ("rollout-0, rollout-1, trainer-0", 2, 6)
    assert (alone.name, alone.gpus, alone.shares) == ("rollout-2", 1, False)
    assert (reward.name, reward.gpus) == ("reward-0", 0)
    assert [together.local_indices(service) for service in together.services] == [(0,), (1,), (0, 1)]
    check_cluster_fits(services, [{"CPU": 9, "GPU": 3}])
    with pytest.raises(ConfigError, match="rollout-0, rollout-1, trainer-0 fits on no node"):
        check_cluster_fits(services, [{"CPU": 64, "GPU": 1}] * 3)


def test_run_folder_takes_a_free_name_and_keeps_the_recipe(tmp_path: Path) -> None:
    from fourfold import config as configuration

    names = [make_run_dir(recipe(), "demo", tmp_path)[0].name for _ in range(3)]
    assert names == ["demo", "demo-2", "demo-3"]
    written = configuration.load(tmp_path / "demo-2" / "config.toml")
    assert written == configuration.with_date(recipe(), written.data.date).model_copy(update={"name": "demo-2"})
    with pytest.raises(ConfigError, match=r"name = '\.\./x'"):
        make_run_dir(recipe(), "../x", tmp_path)


def test_bad_input_of_run_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    separate = (ROOT / "recipes" / "separate_gpu.toml").read_text()
    good = (ROOT / "recipes" / "quickstart.toml").read_text()
    shared = good.replace("[trainer]", "[trainer]\nranks = 2\nsequence_parallel_size = 2")
    for text, words, code, message in (
        (good + "\n[rolout]\n", ["r.toml"], 1, "rolout: no such key. Did you mean `rollout`?"),
        (good.replace("builtin:smollm2-135m-instruct", "gone"), ["r.toml"], 1, "model.source = 'gone': no such folder"),
        (shared, ["r.toml"], 1, "trainer.sequence_parallel_size = 2 does not divide the 9 attention heads"),
        (good, [], 2, "give recipes, or --resume RUN_DIR"),
        (good, ["nowhere.toml"], 1, "nowhere.toml: cannot read the recipe"),
        (good, ["--resume", "nowhere"], 1, "nowhere: not the folder of a run"),
        (good, ["--resume", "nowhere", "--name", "x"], 1, "--name and --resume exclude each other"),
        (separate, ["r.toml"], 1, "rollout-0 asks for 1 GPU and this machine offers 0"),
    ):
        (tmp_path / "r.toml").write_text(text)
        assert cli_main.main(["run", *words]) == code
        assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_every_phase_of_a_run_has_words() -> None:
    assert set(_PHASES) == set(run_pb.RunPhase.values()) - {run_pb.RUN_PHASE_UNSPECIFIED}


def test_the_return_of_a_service_is_told_with_its_time(tmp_path: Path, clock: FakeClock) -> None:
    fleet, launcher, notes = started(tmp_path, recipe(), clock)
    for number in (1, 2):
        launcher.ready.discard("rollout-0")
        launcher.dying = [death("rollout-0")]
        fleet.tick()
        clock.seconds += 12
        fleet.tick()
        assert len(notes) == 2 * number - 1
        launcher.ready.add("rollout-0")
        fleet.tick()
        fleet.tick()
        assert notes[-1] == "rollout-0 is ready again after 12 s" and len(notes) == 2 * number


def test_the_line_of_a_death_has_the_cause_in_the_services_own_words(tmp_path: Path, clock: FakeClock) -> None:
    fleet, launcher, notes = started(tmp_path, recipe(), clock)
    words = "trainer-0-rank-1 died: killed by SIGKILL; its sender is unknown"
    launcher.dying = [replace(death("trainer-0"), message=words)]
    fleet.tick()
    assert f"trainer-0 died (ended with exit code 1: {words}); restarting it" in notes[0]


def lost(name: str, *, was_ready: bool = True) -> Death:
    return replace(death(name, code=0, number=9, was_ready=was_ready), node="10.0.0.2", message="preempted")


def test_a_run_that_trains_on_may_lose_a_process_again_and_again(tmp_path: Path, clock: FakeClock) -> None:
    fleet, launcher, _ = started(tmp_path, recipe(retry={"restarts": 1}), clock)
    for step in range(1, 6):
        launcher.ready = set(launcher.names())
        assert fleet.tick() is None
        fleet.on_step(step)
        launcher.dying = [death("rollout-0", number=9)]
        assert fleet.tick() is None and launcher.names()[-1] == "rollout-0"
    fleet.on_step(5)  # trained again after a restored checkpoint
    assert fleet.tick() is None
    launcher.dying = [death("rollout-0", number=9)]
    assert (ending := fleet.tick()) is not None and "(retry.restarts = 1)" in ending.text


def test_a_coordinator_that_sigterm_ended_is_restarted(tmp_path: Path, clock: FakeClock) -> None:
    fleet, launcher, _ = started(tmp_path, recipe(), clock)
    launcher.dying = [death(COORDINATOR, code=128 + signal.SIGTERM)]
    assert fleet.tick() is None and launcher.names()[-1] == COORDINATOR


def test_a_service_lost_with_its_node_waits_for_another_one_and_keeps_its_restarts(
    tmp_path: Path, clock: FakeClock
) -> None:
    fleet, launcher, notes = started(tmp_path, recipe(rollout={"replicas": 2}, retry={"restarts": 1}), clock)
    for number in (1, 2, 3):
        launcher.waiting, launcher.dying = {"rollout-1"}, [lost("rollout-1", was_ready=number != 2)]
        assert fleet.tick() is None
        assert launcher.names().count("rollout-1") == 1 + number, "Ray has it wait"
        assert ("rollout-1", "waiting for a node") in fleet.states()
        assert "rollout-1 died (lost with node 10.0.0.2: preempted); it starts again when" in notes[-1]
        clock.seconds += 5000
        assert fleet.tick() is None, "the run goes on"
        launcher.waiting = set()
        assert ("rollout-1", "starting") in fleet.states()
        launcher.ready.add("rollout-1")
        assert fleet.tick() is None and ("rollout-1", "ready") in fleet.states()
        launcher.ready.discard("rollout-1")
    launcher.dying = [death("rollout-1")]
    assert fleet.tick() is None
    assert launcher.names().count("rollout-1") == 5, "its one restart was left"


def divided(tmp_path: Path, clock: FakeClock, restarts: int) -> tuple[Fleet, FakeLauncher, list[str]]:
    tables: dict[str, Any] = {"trainer": {"ranks": 4}, "placement": {"trainer_nodes": 2}}
    found = started(tmp_path, recipe(**tables, retry={"restarts": restarts}), clock)
    assert found[1].names()[2:4] == ["trainer-0", "trainer-0-ranks-2-3"]
    return found


@pytest.mark.parametrize("rank_zero_first", [True, False])
def test_the_end_of_rank_0_for_lack_of_a_lost_nodes_ranks_uses_up_no_restart(
    tmp_path: Path, clock: FakeClock, rank_zero_first: bool
) -> None:
    fleet, launcher, _ = divided(tmp_path, clock, restarts=1)
    deaths = [[death("trainer-0")], [lost("trainer-0-ranks-2-3")]]
    for launcher.dying in deaths if rank_zero_first else reversed(deaths):
        assert fleet.tick() is None
    for _ in range(3):  # it waits for the ranks in vain
        clock.seconds += 600
        assert fleet.tick() is None
        launcher.dying = [death("trainer-0", was_ready=False)]
        assert fleet.tick() is None
    clock.seconds += 10
    launcher.ready = {"trainer-0", "trainer-0-ranks-2-3"}
    assert fleet.tick() is None
    launcher.dying = [death("trainer-0")]
    assert fleet.tick() is None, "a restart is left"
    launcher.dying = [death("trainer-0")]
    assert (ending := fleet.tick()) is not None and "(retry.restarts = 1)" in ending.text


def test_ranks_that_use_up_their_restarts_end_the_run(tmp_path: Path, clock: FakeClock) -> None:
    fleet, launcher, _ = divided(tmp_path, clock, restarts=0)
    launcher.dying = [death("trainer-0-ranks-2-3")]
    assert (ending := fleet.tick()) is not None and "trainer-0-ranks-2-3 says why" in ending.text
