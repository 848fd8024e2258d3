"""The recipe of each tutorial, and imported ones, train with everything real, on a CPU with a tiny model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.tutorials import PAGES, RECIPES, ROOT, commands_of, files_of, train

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(800)]


@pytest.mark.parametrize("name", PAGES)
def test_the_recipe_of_a_tutorial_trains(name: str, tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    if name == "other_language" and shutil.which("node") is None:
        pytest.skip("needs node")
    for path, text in (files_of(PAGES["own_data"]) | files_of(PAGES[name])).items():  # others use the data of the first
        (tmp_path / path).write_text(text)
    subprocess.run([sys.executable, "make_data.py"], cwd=tmp_path, check=True, timeout=30)
    command = next(words for words in commands_of(PAGES[name]) if words[:2] == ["fourfold", "run"] and name in words[2])
    model = tiny_model("llama_tied", 0, "float32")
    steps = 3 if name == "async_cpu" else 1  # the first one trains on samples of its own weights
    rows, run_dir = train(tmp_path, ROOT / command[2], model, *command[3:], steps=str(steps))
    row = rows[-1]
    assert row["step"] == len(rows) == steps
    if name == "async_cpu":
        assert max(row["async/token_lag_max"] for row in rows) >= 1, rows
    if name == "lora_gpu":
        assert (run_dir / "model/adapter").is_dir()
    if name == "ppo":
        assert "value/loss" in row
        assert (run_dir / "critic/config.json").exists()
    if name == "agents_guessing":
        assert row["agents/metrics/tries"] >= 1
    assert RECIPES[name].name in command[2]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "values"),
    [
        # Scores of a tiny model do not vary, so that dynamic sampling would keep no group.
        (
            "long_context",
            {"trainer__ranks": "2", "trainer__sequence_parallel_size": "2", "algorithm__filter__keep": '"all"'},
        ),
        ("mixture", {"data__max_prompt_tokens": "0"}),  # a token of the tiny model is a letter
    ],
)
def test_a_recipe_without_a_tutorial_trains(
    name: str, values: dict[str, str], tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    for path, text in files_of(PAGES["own_data"]).items():
        (tmp_path / path).write_text(text)
    subprocess.run([sys.executable, "make_data.py"], cwd=tmp_path, check=True, timeout=30)
    model = tiny_model("llama_tied", 0, "float32")
    (row,), _ = train(tmp_path, ROOT / f"recipes/{name}.toml", model, **values)
    assert row["step"] == 1
    if name == "mixture":
        assert row["data/products/share"] + row["data/sums/share"] == pytest.approx(1.0)


_REWARDS = """
def reward_func(queries, prompts, labels, **kwargs):
    return [len(query) % 5 / 4 + (label == "0") for query, label in zip(queries, labels, strict=True)]


def by_length(completions, solution, **kwargs):
    return [len(text[0]["content"]) % 5 / 4 + (answer == "0") for text, answer in zip(completions, solution)]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums" and extra_info == {"index": int(ground_truth) // 2} and ground_truth.isdecimal()
    return len(solution_str) % 5 / 4


def fourfold_reward(sample):  # the adapter of the report
    return compute_score(
        sample.metadata["data_source"], sample.completion, sample.answer, sample.metadata.get("extra_info")
    )
"""
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_CONFIGURATIONS = {
    "openrlhf": "deepspeed --module openrlhf.cli.train_ppo_ray --actor.model_name_or_path POLICY "
    "--data.prompt_dataset rows.jsonl --data.input_key question --data.label_key answer --data.apply_chat_template "
    "--reward.remote_url rewards.py --vllm.num_engines 1 --rollout.n_samples_per_prompt 4 "
    "--rollout.batch_size 4 --train.batch_size 16 --algo.advantage.estimator group_norm --algo.kl.init_coef 0",
    "trl": "model_name_or_path: POLICY\ndataset_name: rows.jsonl\nreward_funcs: [rewards.by_length]\n"
    "num_generations: 4\nper_device_train_batch_size: 16\ngradient_accumulation_steps: 1\nreport_to: none\n",
    "verl": f"python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=POLICY {_ROLLOUT}.n=4 "
    "algorithm.adv_estimator=grpo data.train_files=rows.parquet data.train_batch_size=4 trainer.logger=console "
    f"{_ACTOR}.ppo_mini_batch_size=4 {_ROLLOUT}.tensor_model_parallel_size=1 trainer.n_gpus_per_node=1 "
    "custom_reward_function.path=rewards.py",
}


@pytest.mark.soak
@pytest.mark.parametrize("system", _CONFIGURATIONS)
def test_an_imported_recipe_trains(system: str, tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    (tmp_path / "rewards.py").write_text(_REWARDS)
    sums = [(f"{n} + {n}?", str(2 * n)) for n in range(20)]
    key = "solution" if system == "trl" else "answer"
    rows = [{"prompt" if system == "trl" else "question": text, key: answer} for text, answer in sums]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    nested = [
        {
            "prompt": [{"role": "user", "content": text}],
            "data_source": "sums",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"index": index},
        }
        for index, (text, answer) in enumerate(sums)
    ]
    pq.write_table(pa.Table.from_pylist(nested), tmp_path / "rows.parquet")
    (tmp_path / "configuration").write_text(_CONFIGURATIONS[system])
    made = subprocess.run(
        [sys.executable, "-m", "fourfold", "import", system, "configuration"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(made.stdout)
    values = {"steps": "2", "trainer__warmup_steps": "0"}
    if system == "trl":
        values["data__answer_field"] = '"solution"'
    trained, _ = train(tmp_path, recipe, tiny_model("llama_tied", 0, "float32"), **values)
    assert [row["step"] for row in trained] == [1, 2]
    assert trained[0]["reward/std"] > 0
