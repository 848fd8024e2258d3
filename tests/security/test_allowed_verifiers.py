"""Tests that callers select no verifier but the configured one, and where the service refuses to run verifiers."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from google.rpc.code_pb2 import Code

from fourfold.config import Config, from_tables
from fourfold.errors import ConfigError
from fourfold.reward.client import AsyncRewardClient
from fourfold.reward.v1 import reward_service_pb2 as pb
from fourfold.reward.v1.reward_service_pb2_grpc import add_RewardServiceServicer_to_server
from fourfold.sandbox import SandboxSupport
from fourfold.types.v1.experience_pb2 import Experience
from fourfold_reward import worker_sandbox
from fourfold_reward.configured import ConfiguredFunction
from fourfold_reward.pool import WorkerPool
from fourfold_reward.servicer import RewardServicer
from tests.conftest import Serve

Start = Callable[[Config], Awaitable[AsyncRewardClient]]


def recipe(tmp_path: Path, *, data: str = "products", **reward: Any) -> Config:
    keys = "".join(f"{key} = {json.dumps(value)}\n" for key, value in reward.items() if key != "tls")
    tls = f'[security]\ndirectory = "{tmp_path}"\n' if reward.get("tls") else ""
    text = (
        f'name = "toy"\nsteps = 1\n[model]\nsource = "x"\n[data.train]\nreasoning_gym = "{data}"\nsize = 1\n[batch]\n'
        f"prompts_per_step = 1\ngroup_size = 2\n[sampling]\nmax_new_tokens = 4\n[reward]\n{keys}{tls}"
    )
    return from_tables(tomllib.loads(text), source="recipe.toml")


def function_of(config: Config) -> ConfiguredFunction:
    return ConfiguredFunction.from_config(config, config.reward[0])


def sandbox_of(config: Config, run_dir: Path | None, *, evaluating: str) -> worker_sandbox.WorkerSandbox:
    return worker_sandbox.from_config(config, config.reward[0], run_dir, evaluating=evaluating)


@pytest.mark.parametrize(
    ("data", "reward", "name"),
    [
        ("products", {"function": "reasoning_gym:countdown"}, "countdown"),
        ("puzzle24", {"function": "reasoning_gym"}, "puzzle24"),
    ],
)
def test_verifier_that_evaluates_text_needs_a_key(tmp_path: Path, data: str, reward: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"'reasoning_gym:{name}' runs text .* reward.evaluate_text = false; set"):
        function_of(recipe(tmp_path, data=data, **reward))
    function = function_of(recipe(tmp_path, data=data, evaluate_text=True, **reward))
    assert function.evaluating == f"reasoning_gym:{name}"


def test_recipe_that_scores_by_another_verifier_needs_no_key(tmp_path: Path) -> None:
    assert function_of(recipe(tmp_path, data="puzzle24", function="last_number")).evaluating == ""


def test_service_with_tls_refuses_evaluation_without_a_whole_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_sandbox, "probe", lambda: SandboxSupport(network=True, processes=True))
    with pytest.raises(ConfigError, match=r"'countdown' .* its sandbox: no Landlock .*\. \[security\] requires"):
        sandbox_of(recipe(tmp_path, tls=True), None, evaluating="countdown")
    assert not caplog.records
    for tls, evaluating in ((False, "countdown"), (True, "")):
        caplog.clear()
        assert not sandbox_of(recipe(tmp_path, tls=tls), None, evaluating=evaluating).required
        assert "sandbox of reward workers is enforced in part (network, processes)" in caplog.text
    caplog.clear()
    off = sandbox_of(recipe(tmp_path, tls=True, sandbox="off"), None, evaluating="countdown")
    assert not off.enabled
    assert 'reward.sandbox = "off"' in caplog.text


def test_keys_and_runs_of_the_recipe_are_hidden(tmp_path: Path) -> None:
    sandbox = sandbox_of(recipe(tmp_path, tls=True), tmp_path / "run", evaluating="")
    assert {str(tmp_path), str(tmp_path / "run"), str(Path.cwd() / "runs")} <= set(sandbox.hidden)


@pytest.fixture
async def start(serve: Serve) -> Any:
    pools: list[WorkerPool] = []

    async def start(config: Config) -> AsyncRewardClient:
        function = function_of(config)
        pool = WorkerPool(
            verifier=function.verifier,
            options=function.options,
            processes=1,
            timeout_seconds=20,
            on_failure=lambda message: pytest.fail(message),
        )
        pools.append(pool)
        await pool.start()
        servicer = RewardServicer(pool)
        servicer.set_ready()
        service = pb.DESCRIPTOR.services_by_name["RewardService"]
        return AsyncRewardClient(await serve((service, add_RewardServiceServicer_to_server, servicer)), peer="reward-0")

    yield start
    for pool in pools:
        await pool.close()


def item(sample_id: str, *, verifier: str = "", task: str = "") -> pb.ScoreItem:
    return pb.ScoreItem(
        experience=Experience(sample_id=sample_id),
        completion_text="12",
        answer="12",
        verifier=verifier,
        metadata_json=json.dumps({"source_dataset": task}) if task else "",
    )


async def test_caller_gets_the_configured_verifier_and_no_other(tmp_path: Path, start: Start) -> None:
    client = await start(recipe(tmp_path, function="last_number"))
    asked = ["", "last_number", "exact_match", "math_verify", "reasoning_gym", "reasoning_gym:products", "os:system"]
    scores = await client.score([item(str(i), verifier=name) for i, name in enumerate(asked)], timeout=20)
    assert [score.score for score in scores[:2]] == [1.0, 1.0]
    for name, score in zip(asked[2:], scores[2:], strict=True):
        assert (score.error.code, score.error.reason) == (Code.Value("NOT_FOUND"), "NOT_FOUND")
        assert name in score.error.message
        assert "is not known here; the scorer here is 'last_number'" in score.error.message


@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_metadata_names_tasks_of_the_recipe_and_no_other(tmp_path: Path, start: Start) -> None:
    client = await start(recipe(tmp_path, data="products", function="reasoning_gym"))
    tasks = ["products", "leg_counting", "countdown"]
    scores = await client.score([item(task, task=task) for task in tasks], timeout=50)
    assert [score.score for score in scores[:1]] == [1.0]
    for score in scores[1:]:
        assert (score.error.code, score.error.reason) == (Code.Value("NOT_FOUND"), "NOT_FOUND")
        assert "is not allowed here; allowed: products (the tasks of [data])" in score.error.message
