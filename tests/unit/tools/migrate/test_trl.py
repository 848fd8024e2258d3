"""`fourfold import trl`: every option, and what typical configurations become."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fourfold import config
from fourfold.config import Config
from fourfold.config.algorithm import AlgorithmConfig
from fourfold.errors import ConfigError
from fourfold_tools.migrate.common import Options
from fourfold_tools.migrate.draft import Draft
from fourfold_tools.migrate.flags import names_of
from fourfold_tools.migrate.trl import TABLE
from fourfold_tools.migrate.trl_rules import convert

OPTIONS = (Path(__file__).parent / "data" / "trl_options.txt").read_text().splitlines()[1:]
LEAST = "model_name_or_path: POLICY\ndataset_name: d.jsonl\nreward_funcs: [my.rewards.f]\n"


def draft_of(text: str, **options: Any) -> Draft:
    return convert(text, Options(source="grpo.yaml", **({"processes": 4} | options)), {}, {})


def recipe_of(text: str, **options: Any) -> Config:
    draft = draft_of(text, **options)
    return config.from_tables(tomllib.loads(draft.checked(draft.text("test"), "grpo.yaml")), source="test")


def test_every_option_of_trl_is_in_the_table() -> None:
    known = names_of(TABLE)
    assert [name for name in OPTIONS if name not in known] == []


def test_each_option_alone_is_converted_or_has_a_reason() -> None:
    """One test for all: pytest takes far longer for hundreds of tests than for what they do."""
    for name in TABLE:
        _check_alone(name)


def _check_alone(name: str) -> None:
    flag = TABLE[name]
    special = {
        "per_device_train_batch_size": "16", "num_generations": "4", "generation_batch_size": "64", "delta": "3",
        "lr_scheduler_kwargs": "{}", "scale_rewards": "batch", "reward_weights": "[0.5]", "loss_type": "sapo",
        "datasets": "[{path: a/b}]", "lr_scheduler_type": "cosine", "reward_model_name_or_path": "RM",
        "dataset_mixture": "{datasets: [{id: a/b}]}", "deepspeed_config": "{zero_stage: 2}",
    }  # fmt: skip
    number = {"int": "2", "float": "0.5", "bool": "true", "texts": "[a.b]"}.get(flag.kind, "x")
    value = special.get(name) or (flag.values[-1] if flag.values else number)
    least = re.sub(rf"(?m)^{name}:.*\n", "", LEAST)
    draft = draft_of(f"{least}{name}: {value}\n" + ("reward_weights: [1, 1]\n" if name == "x" else ""))
    draft.checked(draft.text("test"), "grpo.yaml")
    reasons = dict(draft.reasons())
    assert name in draft.converted or reasons[name].startswith(("not needed", "no equivalent")), reasons


def test_batch_and_schedule_are_in_steps() -> None:
    recipe = recipe_of(
        LEAST + "per_device_train_batch_size: 8\ngradient_accumulation_steps: 2\nsteps_per_generation: 8\n"
        "num_generations: 16\nnum_iterations: 2\nmax_steps: 1600\nwarmup_steps: 80\nsave_steps: 80\n"
    )
    batch = recipe.batch
    assert (batch.prompts_per_step, batch.group_size, batch.mini_batches_per_step, batch.epochs_per_step) == (
        16,
        16,
        4,
        2,
    )
    assert (recipe.steps, recipe.trainer.warmup_steps, recipe.checkpoint.every_steps) == (200, 10, 10)
    assert (recipe.trainer.schedule, recipe.trainer.final_learning_rate_share) == ("linear", 0.0)
    epochs = recipe_of(LEAST + "num_train_epochs: 2\nwarmup_ratio: 0.1\n", rows=400)
    assert (epochs.steps, epochs.trainer.warmup_steps) == (200, 20)


def test_samples_of_several_generations_are_one_step() -> None:
    recipe = recipe_of(
        LEAST + "per_device_train_batch_size: 8\ngradient_accumulation_steps: 4\nsteps_per_generation: 1\n"
    )
    assert (recipe.batch.prompts_per_step, recipe.batch.mini_batches_per_step) == (16, 1)


@pytest.mark.parametrize(
    ("options", "logging"),
    [
        ("", {}),
        ("report_to: none\nproject: p", {}),
        ("report_to: wandb\nproject: p\nlogging_dir: d", {"sinks": ["wandb"], "project": "p"}),
        (
            "report_to: [tensorboard, comet_ml, trackio]\nlogging_dir: d",
            {"sinks": ["tensorboard", "trackio"], "tensorboard_dir": "d"},
        ),
        ("report_to: all", {}),
    ],
)
def test_trackers(options: str, logging: dict[str, Any]) -> None:
    recipe = recipe_of(f"{LEAST}run_name: one\n{options}\n")
    assert recipe.name == "one"
    assert recipe.logging.model_dump(exclude_unset=True) == logging
    checks = [text for text in draft_of(LEAST + options).checks if text.startswith("logging.sinks: report_to has ")]
    assert len(checks) == ("all" in options or "comet_ml" in options)


def test_the_defaults_are_those_of_trl() -> None:
    recipe = recipe_of(LEAST)
    algorithm = recipe.algorithm
    assert algorithm.advantage.model_dump() == {"kind": "grpo", "epsilon": 1e-4}
    assert (algorithm.aggregation, algorithm.kl.coef, algorithm.whiten) == ("token-mean", 0.0, "off")
    assert algorithm.loss.model_dump() == {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0}
    assert (recipe.batch.prompts_per_step, recipe.batch.group_size) == (4, 8)
    assert (recipe.trainer.gradient_checkpointing, recipe.trainer.learning_rate, recipe.seed) == (True, 1e-6, 42)


@pytest.mark.parametrize(
    ("options", "aggregation", "loss"),
    [
        ("loss_type: grpo", "sequence-mean", {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0}),
        ("loss_type: dr_grpo\ndelta: 4", "constant-length", {"kind": "ppo", "dual_clip": 4.0}),
        ("loss_type: cispo\nepsilon_high: 5", "token-mean", {"kind": "cispo", "ratio_max": 5.0}),
        ("loss_type: sapo", "sequence-mean", {"kind": "sapo", "tau_positive": 1.0, "tau_negative": 1.05}),
        (
            "loss_type: vespo\nvespo_k_pos: 1.5\nvespo_lambda_pos: 2.5\nvespo_k_neg: 3.5\nvespo_lambda_neg: 0.5",
            "token-mean",
            {
                "kind": "vespo",
                "power_positive": 1.5,
                "rate_positive": 2.5,
                "power_negative": 3.5,
                "rate_negative": 0.5,
            },
        ),
        ("loss_type: luspo\nimportance_sampling_level: sequence", "sequence-sum", {"kind": "gspo", "form": "sequence"}),
        (
            "loss_type: grpo\nimportance_sampling_level: sequence\nepsilon: 3e-4\nepsilon_high: 4e-4",
            "sequence-mean",
            {"kind": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "form": "sequence"},
        ),
    ],
)
def test_losses(options: str, aggregation: str, loss: dict[str, Any]) -> None:
    algorithm = recipe_of(LEAST + options).algorithm
    assert algorithm.aggregation == aggregation
    assert loss.items() <= algorithm.loss.model_dump().items()


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ("scale_rewards: false", "dr-grpo"),
        ("scale_rewards: none", "dr-grpo"),
        ("multi_objective_aggregation: normalize_then_sum", "gdpo"),
    ],
)
def test_advantages(options: str, kind: str) -> None:
    assert recipe_of(LEAST + options).algorithm.advantage.kind == kind


def test_the_defaults_with_vllm_are_the_preset() -> None:
    recipe = recipe_of(LEAST + "use_vllm: true\n")
    assert recipe.algorithm == AlgorithmConfig.model_validate({"preset": "trl-grpo"})


@pytest.mark.parametrize(
    ("options", "correction"),
    [
        ("", ("none", 0.0, 2.0)),
        ("use_vllm: true\nvllm_importance_sampling_correction: false", ("none", 0.0, 2.0)),
        ("use_vllm: true", ("sequence-sum-mask-tis", 0.0, 3.0)),
        ("use_vllm: true\nvllm_importance_sampling_mode: sequence_truncate", ("sequence-tis", 0.0, 3.0)),
        ("use_vllm: true\nvllm_importance_sampling_mode: token_truncate", ("tis", 0.0, 3.0)),
        (
            "use_vllm: true\nvllm_importance_sampling_mode: token_mask\nvllm_importance_sampling_clip_min: 0.5\n"
            "vllm_importance_sampling_cap: 2",
            ("icepop", 0.5, 2.0),
        ),
        ("use_vllm: true\nvllm_importance_sampling_clip_max: null", ("sequence-sum-mask-tis", 0.0, 1e9)),
        ("use_vllm: true\nloss_type: vespo\nvllm_importance_sampling_mode: token_mask", ("none", 0.0, 2.0)),
        ("off_policy_mask_threshold: 0.5", ("off-policy-mask", math.exp(-0.5), 1.0)),
        ("use_vllm: true\nloss_type: vespo\noff_policy_mask_threshold: 1", ("off-policy-mask", math.exp(-1), 1.0)),
    ],
)
def test_corrections(options: str, correction: tuple[str, float, float]) -> None:
    found = recipe_of(LEAST + options).algorithm.correction
    assert (found.kind, found.low, found.high) == correction


def test_two_corrections_at_once_cannot_be_had() -> None:
    text = LEAST + "use_vllm: true\noff_policy_mask_threshold: 0.5\n"
    assert recipe_of(text).algorithm.correction.kind == "sequence-sum-mask-tis"
    draft = draft_of(text)
    assert any("write kind = off-policy-mask and low = 0.606531" in check for check in draft.checks)
    assert dict(draft.reasons())["off_policy_mask_threshold"].startswith("no equivalent beside")


def test_vespo_without_the_correction_of_trl_is_named() -> None:
    text = LEAST + "loss_type: vespo\nuse_vllm: true\nvllm_importance_sampling_correction: "
    assert any("compares with the engine" in check for check in draft_of(text + "false").checks)
    assert not any("compares with the engine" in check for check in draft_of(text + "true").checks)


def test_the_kl_term_keeps_its_importance_weight() -> None:
    text = LEAST + "use_bias_correction_kl: true\n"
    assert recipe_of(text + "beta: 0.01").algorithm.kl.importance_weighted is True
    assert recipe_of(LEAST + "beta: 0.01").algorithm.kl.importance_weighted is False
    assert recipe_of(text).algorithm.kl.importance_weighted is False
    sequence = draft_of(text + "beta: 0.01\nimportance_sampling_level: sequence")
    assert any("by the ratio of the sample" in check for check in sequence.checks)


@pytest.mark.parametrize(
    ("loss_type", "counted"), [("grpo", True), ("sapo", True), ("dr_grpo", True), ("luspo", True), ("dapo", False)]
)
def test_masked_completions_count_where_trl_averages_samples(loss_type: str, counted: bool) -> None:
    text = f"{LEAST}loss_type: {loss_type}\n"
    masked = recipe_of(text + "mask_truncated_completions: true").algorithm.shaping
    assert (masked.mask_truncated, masked.count_masked) == (True, counted)
    assert recipe_of(text).algorithm.shaping.mask_truncated is False


def test_rewards_with_weights_are_tables() -> None:
    recipe = recipe_of(
        "model_name_or_path: POLICY\ndataset_name: d.jsonl\n"
        "reward_funcs: [accuracy_reward, think_format_reward, a.b.c]\n"
        "reward_weights: [1.0, 0.2, 0.5]\n"
    )
    assert [(table.function, table.weight) for table in recipe.reward] == [
        ("math_verify", 1.0),
        ("format", 0.2),
        ("a.b:c", 0.5),
    ]
    assert recipe.data.answer_field == "solution"


def test_lora_and_placement() -> None:
    recipe = recipe_of(
        LEAST + "use_peft: true\nlora_r: 32\nlora_target_modules: [q_proj]\nuse_vllm: true\nbeta: 0.04\n"
    )
    assert (recipe.trainer.lora.rank, recipe.trainer.lora.alpha) == (32, 32.0)
    assert recipe.trainer.lora.target_modules == ("q_proj",)
    assert (recipe.placement.colocated, recipe.rollout.replicas, recipe.reference.replicas) == (True, 4, 4)
    server = recipe_of(LEAST + "use_vllm: true\nvllm_mode: server\n")
    assert (server.placement.colocated, server.rollout.replicas, server.trainer.ranks) == (False, 1, 4)


def test_a_command_line_with_its_launcher() -> None:
    recipe = recipe_of(
        "accelerate launch --num_processes 8 --config_file zero3.yaml -m trl.scripts.grpo --model_name_or_path P "
        "--dataset_name d.jsonl --reward_funcs a.b --max_steps 50 --use_peft False --beta=0.01",
        processes=0,
    )
    assert (recipe.trainer.ranks, recipe.trainer.zero_stage, recipe.steps, recipe.algorithm.kl.coef) == (8, 3, 50, 0.01)


def test_stage_0_becomes_stage_1_which_adds_gradients_in_float32() -> None:
    assert recipe_of(LEAST + "deepspeed: ds_zero0.json\n").trainer.zero_stage == 1


def test_the_stage_is_in_the_name_of_the_file_of_deepspeed() -> None:
    assert recipe_of(LEAST + "deepspeed_config: ds_zero3.json\n").trainer.zero_stage == 3
    assert recipe_of(LEAST + "deepspeed_config: {deepspeed_config_file: a/zero_2.json}\n").trainer.zero_stage == 2
    checks = draft_of(LEAST + "deepspeed_config: ds.json\n").checks
    assert any("the name of the DeepSpeed file has no stage" in text for text in checks)


def test_a_mixture_becomes_tables_with_splits_and_configurations() -> None:
    text = LEAST + "shuffle_dataset: false\ndatasets: [{path: a/b, name: main, split: test}, {path: rows.jsonl}]\n"
    recipe = config.from_tables(tomllib.loads(draft_of(text).text("test")), source="test")
    first, second = recipe.data.train
    assert (first.path, first.config, first.split, second.path, second.split) == (
        "hf:a/b",
        "main",
        "test",
        "rows.jsonl",
        "",
    )
    assert recipe.data.order == "file"


def test_the_held_out_set_is_a_split_of_the_training_data_or_a_set_of_its_own() -> None:
    hub = LEAST.replace("d.jsonl", "a/b") + "eval_strategy: steps\n"
    (split,) = recipe_of(hub + "dataset_test_split: dev\ndataset_config: main\n").data.eval
    assert (split.path, split.split, split.config) == ("hf:a/b", "dev", "main")
    (own,) = recipe_of(hub + "eval_dataset: c/d\ndataset_config: main\n").data.eval
    assert (own.path, own.split, own.config) == ("hf:c/d", "test", "")
    assert any("the file of the training data" in text for text in draft_of(LEAST + "eval_strategy: steps\n").checks)
    mixture = draft_of("model_name_or_path: P\ndatasets: [{path: a/b}]\neval_strategy: steps\n")
    assert any(text.startswith("data.eval.path: the configuration names no data") for text in mixture.checks)


def test_a_revision_of_a_model_is_kept() -> None:
    text = LEAST.replace("POLICY", "owner/policy") + "model_revision: v2\n"
    assert recipe_of(text).model.source == "hf:owner/policy@v2"
    assert recipe_of(LEAST + "model_revision: v2\n").model.source == "POLICY"


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ("load_dataset('a/b')['train']", "hf:a/b"),
        ("rows['train']", "hf:c/d"),
        ("part", "hf:e/f"),
        ("load_dataset('json', data_files='x.jsonl', split='train')", "x.jsonl"),
    ],
)
def test_the_data_set_of_a_python_file(data: str, path: str) -> None:
    text = "rows = load_dataset('c/d')\npart = load_dataset('e/f')['train']\n"
    text += f"GRPOTrainer(model='P', args=GRPOConfig(), train_dataset={data})\n"
    assert recipe_of(text).data.train[0].path == path


def test_switches_of_a_command_need_no_value() -> None:
    draft = draft_of("trl grpo --model P --dataset_name d --push_to_hub --no_gradient_checkpointing")
    assert draft.lines["trainer",]["gradient_checkpointing"].value is False
    assert dict(draft.reasons())["--push_to_hub"].startswith("no equivalent")


def test_a_python_file_is_read_and_not_run(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    draft = draft_of(
        f"import os; os.system('touch {touched}')\nfrom trl import GRPOConfig, GRPOTrainer\nfrom x.y import score\n"
        "NAME = 'm/n'\ndata = load_dataset('a/b', split='train')\n"
        "args = GRPOConfig(output_dir='out/run', beta=0.01, max_steps=100, "
        f"learning_rate=os.system('touch {touched}'))\n"
        "t = GRPOTrainer(model=NAME, reward_funcs=[score], args=args, train_dataset=data)\n"
    )
    recipe = config.from_tables(tomllib.loads(draft.text("test")), source="test")
    assert (recipe.name, recipe.model.source, recipe.algorithm.kl.coef) == ("run", "hf:m/n", 0.01)
    assert (recipe.reward[0].function, recipe.data.train[0].path) == ("x.y:score", "hf:a/b")
    assert any(text.startswith("learning_rate has a value that is only known") for text in draft.checks)
    assert not touched.exists()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (LEAST + "off_policy_mask_threshold: -1", "off_policy_mask_threshold = -1 must be above 0"),
        (LEAST + "loss_type: dappo", "did you mean `dapo`"),
        (LEAST + "num_generations: 7", "no multiple of num_generations = 7"),
        (LEAST + "reward_weights: [1, 2]", "2 numbers for 1 rewards"),
        (LEAST + "beta: high", "beta = high must be a number"),
        ("a: [", "not valid YAML"),
        (LEAST + "reward_weights: [x]", "reward_weights = ['x'] must be a list of numbers"),
        ("- 1\n- 2", "a list in place of names with values"),
        ("GRPOConfig(", "not valid Python"),
        ("python ppo.py --learning_rate 1", "no command that runs a trainer of TRL"),
        ("!!python/object/apply:os.system ['touch x']", "not valid YAML"),
    ],
)
def test_a_wrong_configuration_gives_value_rule_and_fix(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(error)):
        recipe_of(text)


def test_an_unknown_option_is_named_with_the_nearest() -> None:
    draft = draft_of(LEAST + "temprature: 1")
    assert "temprature is unknown, and not converted; did you mean temperature?" in draft.checks
    assert "1 not converted (1 of them unknown, see below)" in draft.report("grpo.yaml")


def test_the_options_of_open_r1() -> None:
    text = (
        "model_name_or_path: M\ndataset_name: a/b\ndataset_prompt_column: problem\nsystem_prompt: 'Think first.'\n"
        "reward_funcs: [accuracy, format, soft_overlong_punishment, tag_count]\nmax_completion_len: 1024\n"
        "soft_punish_cache: 256\nreport_to: [wandb]\nwandb_project: p\nwandb_entity: e\nwandb_run_group: g\n"
        "callbacks: [push_to_hub_revision]\nbenchmarks: [aime]\nchat_template: '{{ x }}'\ncosine_max_len: 5\n"
        "hub_model_revision: r\noverwrite_hub_revision: true\ncode_language: python\n"
    )
    draft, recipe = draft_of(text, processes=8), recipe_of(text, processes=8)
    assert draft.flags.unknown_count == 0
    assert (recipe.data.prompt_field, recipe.data.system_prompt, recipe.data.chat) == ("problem", "Think first.", True)
    assert [table.function for table in recipe.reward] == ["math_verify", "format", "length", "rewards.py:tag_count"]
    assert recipe.reward[2].options == {"target_tokens": 768, "max_tokens": 1024, "min": -1.0}
    assert (recipe.logging.project, recipe.logging.wandb_entity, recipe.logging.group) == ("p", "e", "g")
    assert not any("plain texts" in text for text in draft.checks)
    own = recipe_of(text.replace("[accuracy, format", "['mine.accuracy', 'mine.format'"), processes=8).reward
    assert [table.function for table in own[:2]] == ["mine:accuracy", "mine:format"]
    mixture = "dataset_mixture:\n  datasets:\n  - {id: a/b, config: c, split: s, weight: 0.5}\n  - {id: d/e}\n"
    sources = recipe_of(f"model_name_or_path: M\n{mixture}", processes=8).data.train
    assert [(one.path, one.split, one.config) for one in sources] == [("hf:a/b", "s", "c"), ("hf:d/e", "train", "")]


def test_the_file_of_accelerate_has_processes_and_stage() -> None:
    text = (
        "compute_environment: LOCAL_MACHINE\ndebug: false\ndeepspeed_config:\n  offload_optimizer_device: cpu\n"
        "  offload_param_device: none\n  zero3_init_flag: true\n  zero_stage: 2\ndistributed_type: DEEPSPEED\n"
        "downcast_bf16: 'no'\nmachine_rank: 0\nmain_training_function: main\nmixed_precision: bf16\n"
        "num_machines: 1\nnum_processes: 8\nrdzv_backend: static\nsame_network: true\ntpu_env: []\n"
        "tpu_use_cluster: false\ntpu_use_sudo: false\nuse_cpu: false\n"
    )
    draft, recipe = draft_of(text, processes=0), recipe_of(text, processes=0)
    assert draft.flags.unknown_count == 0
    assert (recipe.trainer.ranks, recipe.trainer.zero_stage, recipe.trainer.offload) == (8, 2, "optimizer")
    assert any("one of accelerate" in text for text in draft.checks)
