"""`fourfold import verl`: every option, and what typical configurations become."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fourfold import config
from fourfold.config import Config
from fourfold.config.algorithm import AlgorithmConfig
from fourfold.errors import ConfigError
from fourfold.plan.algorithm import algorithm_plan
from fourfold_tools.migrate.common import Options
from fourfold_tools.migrate.draft import Draft
from fourfold_tools.migrate.flags import names_of
from fourfold_tools.migrate.verl import PATTERNS, TABLE
from fourfold_tools.migrate.verl_rules import convert

OPTIONS = (Path(__file__).parent / "data" / "verl_options.txt").read_text().splitlines()[1:]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LEAST = f"python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=POLICY {ROLLOUT}.n=8 "
GRPO = LEAST + "algorithm.adv_estimator=grpo "
RS = "algorithm.rollout_correction.rollout_rs"

_BOMB = "a0: &a0 {x: 1, y: 1}\n" + "".join(f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}\n" for i in range(1, 18))


def draft_of(text: str, **options: Any) -> Draft:
    return convert(text, Options(source="run.sh", **options), {}, {})


def recipe_of(text: str, **options: Any) -> Config:
    draft = draft_of(text, **options)
    return config.from_tables(tomllib.loads(draft.checked(draft.text("test"), "run.sh")), source="test")


def test_every_option_of_verl_has_a_row_or_a_pattern() -> None:
    known = names_of(TABLE)
    assert [n for n in OPTIONS if n not in known and not any(p.search(n) for p, _ in PATTERNS)] == []


def test_every_pattern_is_that_of_an_option_or_of_an_example() -> None:
    others = "data.gen_batch_size actor_rollout_ref.model.torch_dtype reward.reward_manager hydra.run.dir defaults "
    others += "reward.custom_reward_function.reward_kwargs.timeout"
    names = [*OPTIONS, *others.split()]
    assert [p.pattern for p, _ in PATTERNS if not any(p.search(name) for name in names)] == []


def test_each_option_alone_is_converted_or_has_a_reason() -> None:
    """One test for all: pytest takes far longer for hundreds of tests than for what they do."""
    for name in TABLE:
        _check_alone(name)


def _check_alone(name: str) -> None:
    flag = TABLE[name]
    special = {
        f"{ACTOR}.policy_loss.loss_mode": "sapo", "algorithm.adv_estimator": "opo", f"{ACTOR}.clip_ratio_c": "3",
        "data.train_batch_size": "512", f"{ROLLOUT}.n": "4", f"{ACTOR}.optim.lr_scheduler_type": "cosine",
        f"{ACTOR}.optim.betas": "[0.9,0.95]", f"{ACTOR}.ulysses_sequence_parallel_size": "4",
        "critic.optim.lr_scheduler_type": "cosine", f"{ACTOR}.kl_loss_type": "mse", "algorithm.kl_penalty": "mse",
        f"{ROLLOUT}.max_num_batched_tokens": "4096", f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum",
        f"{ACTOR}.ppo_mini_batch_size": "64", "algorithm.rollout_correction.rollout_rs": "geometric",
        "algorithm.rollout_correction.rollout_is": "token",
    }  # fmt: skip
    number = {"int": "2", "float": "0.5", "bool": "True", "texts": "[a]"}.get(flag.kind, "x")
    value = special.get(name) or (flag.values[-1] if flag.values else number)
    draft = draft_of(f"{GRPO} {name}={value}")
    draft.checked(draft.text("test"), "run.sh")
    reasons = dict(draft.reasons())
    assert name in draft.converted or reasons[name].startswith(("not needed", "no equivalent")), reasons


def test_a_grpo_script_of_the_examples() -> None:
    recipe = recipe_of(
        GRPO + "data.train_files=/d/train.parquet data.val_files=/d/test.parquet data.train_batch_size=1024 "
        f"data.max_prompt_length=512 data.max_response_length=1024 {ACTOR}.optim.lr=1e-6 "
        f"{ACTOR}.ppo_mini_batch_size=256 "
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=32 {ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0.001 "
        f"{ACTOR}.kl_loss_type=low_var_kl {ROLLOUT}.tensor_model_parallel_size=2 trainer.n_gpus_per_node=8 "
        "trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15 $@",
        rows=7473,
    )
    batch, algorithm = recipe.batch, recipe.algorithm
    assert (batch.prompts_per_step, batch.group_size, batch.mini_batches_per_step) == (1024, 8, 4)
    assert (recipe.steps, recipe.model.max_context_tokens, batch.tokens_per_micro_batch) == (109, 1536, 49_152)
    assert (recipe.data.max_prompt_tokens, recipe.data.order) == (512, "shuffled")
    assert recipe_of(GRPO + "data.shuffle=False").data.order == "file"
    assert algorithm.loss.model_dump() == {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
    assert (algorithm.kl.coef, algorithm.kl.placement, algorithm.kl.estimator) == (0.001, "loss", "k3")
    assert (algorithm.advantage.kind, algorithm.whiten, algorithm.shaping.clip) == ("grpo", "off", 0.0)
    assert (recipe.trainer.ranks, recipe.rollout.replicas, recipe.rollout.gpus_per_replica) == (8, 4, 2)
    assert (recipe.trainer.weight_decay, recipe.trainer.schedule) == (0.01, "constant")
    assert (recipe.evaluation.every_steps, recipe.checkpoint.every_steps) == (5, 20)
    assert [one.temperature for one in recipe.data.eval] == [0.0]
    sampled = recipe_of(GRPO + f"trainer.test_freq=5 {ROLLOUT}.val_kwargs.temperature=0.7")
    assert [one.temperature for one in sampled.data.eval] == [0.7]
    assert recipe.data.answer_field == "reward_model.ground_truth"
    assert [one.path for one in (*recipe.data.train, *recipe.data.eval)] == ["/d/train.parquet", "/d/test.parquet"]


def test_ppo_with_a_reward_model_and_a_critic() -> None:
    recipe = recipe_of(
        f"{LEAST} critic.model.path=C critic.optim.lr=1e-5 critic.optim.lr_warmup_steps_ratio=0.05 algorithm.lam=0.95 "
        "reward_model.enable=True reward_model.model.path=RM trainer.critic_warmup=3 trainer.total_training_steps=200"
    )
    assert recipe.algorithm.advantage.model_dump()["lam"] == 0.95
    assert (recipe.algorithm.kl.coef, recipe.algorithm.whiten) == (0.0, "full")
    assert (recipe.critic.source, recipe.critic.warmup_steps, recipe.critic.policy_starts_at_step) == ("C", 10, 3)
    assert recipe.reward[0].model is not None
    assert recipe.reward[0].model.source == "RM"


@pytest.mark.parametrize(
    ("options", "loss", "aggregation"),
    [
        (
            f"{ACTOR}.policy_loss.loss_mode=gspo {ACTOR}.clip_ratio_low=0.0003 {ACTOR}.clip_ratio_high=0.0004",
            {"kind": "gspo", "form": "token", "clip_low": 3e-4, "clip_high": 4e-4},
            "sequence-mean",
        ),
        (f"{ACTOR}.policy_loss.loss_mode=sapo", {"kind": "sapo", "tau_negative": 1.05}, "sequence-mean"),
        (
            f"{ACTOR}.policy_loss.loss_mode=cispo {ACTOR}.clip_ratio_low=10 {ACTOR}.clip_ratio_high=4",
            {"kind": "cispo", "ratio_min": 0.0, "ratio_max": 5.0},
            "token-mean",
        ),
        (
            f"{ACTOR}.policy_loss.loss_mode=geo_mean {ACTOR}.clip_ratio_low=0.4 {ACTOR}.clip_ratio_high=0.3",
            {"kind": "gmpo", "clip_low": 0.4, "clip_high": 0.3},
            "sequence-mean",
        ),
        (f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", {"kind": "ppo"}, "sequence-mean"),
        (f"{ACTOR}.clip_ratio=0.3", {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.2}, "token-mean"),
    ],
)
def test_losses(options: str, loss: dict[str, Any], aggregation: str) -> None:
    algorithm = recipe_of(GRPO + options).algorithm
    assert algorithm.aggregation == aggregation
    assert loss.items() <= algorithm.loss.model_dump().items()


@pytest.mark.parametrize(("command", "preset"), [(LEAST, "verl-ppo"), (f"{GRPO}{ACTOR}.use_kl_loss=True", "verl-grpo")])
def test_the_defaults_of_verl_are_the_preset(command: str, preset: str) -> None:
    recipe = recipe_of(command)
    expected = recipe.model_copy(update={"algorithm": AlgorithmConfig.model_validate({"preset": preset})})
    assert recipe.algorithm.preset == preset
    assert algorithm_plan(recipe) == algorithm_plan(expected)


def test_the_estimators_of_pass_at_k_and_gpg() -> None:
    passk = f"{LEAST}algorithm.adv_estimator=grpo_passk "
    assert recipe_of(passk).algorithm.advantage.model_dump() == {
        "kind": "pass-at-k",
        "normalize": True,
        "epsilon": 1e-6,
    }
    plain = recipe_of(passk + "algorithm.norm_adv_by_std_in_grpo=False").algorithm.advantage
    assert plain.model_dump() == {"kind": "pass-at-k", "normalize": False, "epsilon": 1e-6}
    assert recipe_of(f"{LEAST}algorithm.adv_estimator=gpg").algorithm.advantage.kind == "gpg"


@pytest.mark.parametrize("estimator", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_the_optimal_token_baseline_is_otb(estimator: str) -> None:
    assert recipe_of(f"{LEAST}algorithm.adv_estimator={estimator}").algorithm.advantage.kind == "otb"


@pytest.mark.parametrize(
    ("kind", "estimator"),
    [("low_var_kl", "k3"), ("k3+", "k2"), ("low_var_kl+", "k2"), ("mse", "k2"), ("k1+", "k2"), ("kl", "k2")],
)
def test_a_kl_loss_has_the_gradient_of_its_type(kind: str, estimator: str) -> None:
    command = f"{GRPO}{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type={kind}"
    assert recipe_of(command).algorithm.kl.estimator == estimator
    assert any("k1 has no gradient" in text for text in draft_of(command).checks) == (kind == "kl")


@pytest.mark.parametrize(
    ("estimator", "compared", "warned"), [("rloo", True, False), ("remax", None, False), ("grpo", None, True)]
)
def test_kl_in_the_reward_is_compared_with_rloo(estimator: str, compared: bool | None, warned: bool) -> None:
    command = f"{LEAST}algorithm.adv_estimator={estimator} algorithm.use_kl_in_reward=True"
    algorithm = recipe_of(command).algorithm
    assert (algorithm.kl.placement, algorithm.advantage.model_dump().get("kl_in_score")) == ("reward", compared)
    assert any("before samples are compared" in text for text in draft_of(command).checks) == warned


@pytest.mark.parametrize(
    ("options", "correction", "check"),
    [
        ("", ("none", 0.0, 2.0), ""),
        ("is=token", ("tis", 0.0, 2.0), ""),
        ("is=sequence is_threshold=5", ("sequence-tis", 0.0, 5.0), ""),
        ("rs=seq_mean_k1 rs_threshold=0.8_1.6", ("sequence-mask", 0.625, 1.25), ""),
        ("rs=seq_mean_k1 rs_threshold=1.25", ("sequence-mask", 0.8, 1.25), ""),
        ("rs=seq_sum_k1 rs_threshold=0.5_4", ("sequence-sum-mask", 0.25, 2.0), ""),
        ("is=sequence rs=seq_sum_k1 rs_threshold=2", ("sequence-sum-mask-tis", 0.5, 2.0), ""),
        ("is=sequence rs=seq_sum_k1 rs_threshold=4", ("sequence-sum-mask-tis", 0.25, 4.0), "by at most 2"),
        ("is=token rs=seq_mean_k1 rs_threshold=1.25", ("sequence-mask-tis", 0.8, 1.25), "by at most 2"),
        ("is=token rs=token_k1 rs_threshold=0.5_2", ("icepop", 0.5, 2.0), ""),
        ("rs=token_k1 rs_threshold=0.5_2", ("icepop", 0.5, 2.0), "in verl by 1"),
        ("rs=token_k3 rs_threshold=0.02", ("token-k3-mask", 0.0, 0.02), ""),
        ("rs=seq_mean_k2 rs_threshold=0.02", ("sequence-k2-mask", 0.0, 0.02), ""),
        ("rs=seq_mean_k3 rs_threshold=0.02", ("sequence-k3-mask", 0.0, 0.02), ""),
        ("rs=geometric rs_threshold=1.25", ("sequence-mask", 0.8, 1.25), ""),
        ("rs=sequence rs_threshold=4 rs_threshold_lower=0.5", ("sequence-sum-mask", 0.5, 4.0), ""),
        ("rs=token is=token is_threshold=4", ("icepop", 0.25, 4.0), ""),
        ("is=token rs=seq_max_k2 rs_threshold=1", ("tis", 0.0, 2.0), "has no equivalent"),
        ("rs=seq_max_k2 rs_threshold=1", ("none", 0.0, 2.0), "has no equivalent"),
        ("rs=token_k3,seq_max_k2 rs_threshold=0.02,1", ("token-k3-mask", 0.0, 0.02), "has no equivalent"),
        ("is=sequence rs=token_k3 rs_threshold=0.02", ("token-k3-mask", 0.0, 0.02), "has no equivalent"),
    ],
)
def test_corrections(options: str, correction: tuple[str, float, float], check: str) -> None:
    command = GRPO + " ".join(f"algorithm.rollout_correction.rollout_{option}" for option in options.split())
    found = recipe_of(command).algorithm.correction
    assert (found.kind, found.low, found.high) == pytest.approx(correction)
    checks = [text for text in draft_of(command).checks if text.startswith("algorithm.correction")]
    assert len(checks) == bool(check)
    assert all(check in text for text in checks)


def test_gmpo_is_corrected_by_the_mean_of_a_sample() -> None:
    command = f"{GRPO}{ACTOR}.policy_loss.loss_mode=geo_mean algorithm.rollout_correction.rollout_is="
    assert recipe_of(command + "token").algorithm.correction.kind == "geometric-tis"
    assert recipe_of(command + "sequence").algorithm.correction.kind == "sequence-tis"


def test_kl_in_the_reward_overlong_and_filter() -> None:
    prefix = "+reward_model.reward_kwargs.overlong_buffer_cfg"
    algorithm = recipe_of(
        f"{LEAST} algorithm.adv_estimator=reinforce_plus_plus algorithm.use_kl_in_reward=True "
        "algorithm.kl_ctrl.kl_coef=0.01 "
        f"algorithm.kl_ctrl.type=adaptive {prefix}.enable=True {prefix}.len=128 {prefix}.penalty_factor=0.5 "
        "+algorithm.filter_groups.enable=True +algorithm.filter_groups.max_num_gen_batches=10"
    ).algorithm
    kl, shaping = algorithm.kl, algorithm.shaping
    assert (kl.coef, kl.placement, kl.estimator, kl.target, kl.horizon) == (0.01, "reward", "k1", 0.1, 10_000)
    assert (shaping.overlong_buffer, shaping.overlong_penalty) == (0.25, 0.5)
    assert (algorithm.filter.keep, algorithm.filter.max_rounds) == ("varied", 10)


def test_the_keys_of_a_reward_in_newer_versions() -> None:
    prefix = "+reward.reward_kwargs"
    command = (
        f"{GRPO} reward.reward_manager.name=dapo reward.num_workers=8 {prefix}.overlong_buffer_cfg.enable=True "
        f"{prefix}.overlong_buffer_cfg.len=128 {prefix}.overlong_buffer_cfg.penalty_factor=0.5 "
        f"{prefix}.overlong_buffer_cfg.log=False {prefix}.max_resp_len=512 reward.sandbox_fusion.url=u "
        "reward.custom_reward_function.path=f.py +reward.custom_reward_function.reward_kwargs.limit=3 "
        "reward.reward_model.rollout.name=vllm trainer.val_before_train=False trainer.val_only=False "
        f"{ROLLOUT}.over_sample_rate=0.1"
    )
    draft, shaping = draft_of(command), recipe_of(command).algorithm.shaping
    assert (shaping.overlong_buffer, shaping.overlong_penalty) == (0.25, 0.5)
    assert [text for text in draft.checks if "unknown" in text] == []
    reasons = dict(draft.reasons())
    assert reasons["trainer.val_before_train"].startswith("no equivalent of false")
    assert reasons[f"{ROLLOUT}.over_sample_rate"].startswith("no equivalent above 0")
    assert reasons["reward.custom_reward_function.reward_kwargs.limit"].startswith("no equivalent")
    command = f"{GRPO} reward.reward_model.enable=True reward.reward_model.model_path=RM"
    for pool in (False, True):
        model = recipe_of(f"{command} reward.reward_model.enable_resource_pool={pool}").reward[0].model
        assert model is not None and (model.source, model.own_gpus) == ("RM", pool)


def test_a_script_with_arithmetic_and_lists() -> None:
    recipe = recipe_of(
        "sp=1\nprompt=$((1024 * 2))\nresponse=$((1024 * 8))\nfiles=\"['/a.parquet', '/b.parquet']\"\n"
        f'{GRPO} data.max_prompt_length=${{prompt}} data.max_response_length=$response data.train_files="$files" '
        f"{ACTOR}.use_dynamic_bsz=True {ACTOR}.ppo_max_token_len_per_gpu=$(((prompt + response) * 2)) "
        'trainer.logger=\'["console","wandb"]\' \\\n  trainer.experiment_name="x-${sp}"'
    )
    assert (recipe.model.max_context_tokens, recipe.batch.tokens_per_micro_batch) == (10_240, 20_480)
    assert recipe.name == "x-1"
    assert [one.path for one in recipe.data.train] == ["/a.parquet", "/b.parquet"]


def test_a_yaml_file_with_references() -> None:
    recipe = recipe_of(
        "data: {max_prompt_length: 100, max_response_length: 300, train_batch_size: 64}\n"
        "algorithm: {adv_estimator: rloo}\ntrainer: {project_name: p, experiment_name: e}\n"
        "actor_rollout_ref:\n  model: {path: POLICY}\n  rollout: {n: 4, name: vllm}\n"
        "  actor: {ppo_mini_batch_size: '${data.train_batch_size}', optim: {lr: 1e-5}}\n"
    )
    assert (recipe.name, recipe.batch.mini_batches_per_step, recipe.trainer.learning_rate) == ("e", 1, 1e-5)
    assert (recipe.logging.sinks, recipe.logging.project) == (["wandb"], "p")
    assert recipe.algorithm.advantage.kind == "rloo"


@pytest.mark.parametrize(
    ("options", "sinks", "project", "reason"),
    [
        ("", ["wandb"], "verl_examples", {}),
        ("trainer.logger=console", [], "fourfold", {"trainer.logger": "not needed: no tracker"}),
        (
            "trainer.logger=['console','mlflow','tensorboard'] trainer.project_name=p",
            ["mlflow", "tensorboard"],
            "p",
            {},
        ),
        ("trainer.logger=[trackio,swanlab] trainer.project_name=p", ["trackio"], "p", {}),
        (
            "trainer.logger=[swanlab] trainer.project_name=p",
            [],
            "fourfold",
            {
                "trainer.logger": "no equivalent of these trackers",
                "trainer.project_name": "not needed without a tracker",
            },
        ),
    ],
)
def test_trackers(options: str, sinks: list[str], project: str, reason: dict[str, str]) -> None:
    draft, recipe = draft_of(GRPO + options), recipe_of(GRPO + options)
    assert (recipe.logging.sinks, recipe.logging.project) == (sinks, project)
    assert {name: text for name, text in draft.reasons() if name.startswith("trainer.")} == reason
    assert any("trainer.logger has swanlab, and the trackers are" in c for c in draft.checks) == ("swanlab" in options)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (f"{GRPO} {ACTOR}.policy_loss.loss_mode=kl_cov", "kl_cov has no equivalent"),
        (f"{GRPO}{RS}=seq_mean_k1", "rollout_rs_threshold = None must be a positive number"),
        (f"{GRPO}{RS}=seq_mean_k3 {RS}_threshold=0.5_2", "rollout_rs_threshold = 0.5_2 must be a positive number"),
        (f"{GRPO}{RS}=seq_mean_k1 {RS}_threshold=0_2", "rollout_rs_threshold = 0_2 must be a positive number"),
        (f"{LEAST} algorithm.adv_estimator=grop", "did you mean `grpo`"),
        (f"{GRPO} trainer.nnodes=$NODES", "--define NODES=VALUE"),
        ("echo hello", "no command of verl.trainer.main_ppo"),
        ("a: &a [x]\nb: " + "[" * 3000, "not valid YAML"),
        (_BOMB, "more than 20,000 values"),
    ],
)
def test_a_wrong_configuration_gives_value_rule_and_fix(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(error)):
        recipe_of(text)


def test_an_unknown_option_is_named_with_the_nearest() -> None:
    draft = draft_of(GRPO + "data.train_batchsize=2 --config-name=x foo")
    assert "data.train_batchsize is unknown, and not converted; did you mean data.train_batch_size?" in draft.checks
    draft = draft_of(GRPO + "actor_rollout_ref.actor.optim.learning_rate=1e-5")
    assert any("optim.learning_rate is unknown, and not converted" in text for text in draft.checks)
    draft = draft_of(GRPO + "--config-name=x foo")
    assert any("--config-name=x: its file has further options" in text for text in draft.checks)
    assert any("'foo' is no KEY=VALUE" in text for text in draft.checks)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        (f"{ACTOR}.optim.learning_rate", f"{ACTOR}.optim.lr"),
        ("critic.optim.learning_rate", "critic.optim.lr"),
        (f"{ACTOR}.optim.decay", f"{ACTOR}.optim.weight_decay"),
        ("actor.optim.lr", f"{ACTOR}.optim.lr"),
        ("data.val_file", "data.val_files"),
        (f"{ROLLOUT}.temprature", f"{ROLLOUT}.temperature"),
        (f"{ROLLOUT}.num_generations", ""),
        (f"{ROLLOUT}.nmae", f"{ROLLOUT}.name"),
        (f"{ROLLOUT}.val_kwargs.temprature", f"{ROLLOUT}.val_kwargs.temperature"),
        (f"{ACTOR}.policy_loss.loss_mod", f"{ACTOR}.policy_loss.loss_mode"),
        (RS + "s", RS),
        ("reward_model.enabled", "reward_model.enable"),
        ("reward_model.reward_kwargs.overlong_buffer_cfg.length", "reward_model.reward_kwargs.overlong_buffer_cfg.len"),
        ("actor_rollout_ref.model.lora.rnk", "actor_rollout_ref.model.lora.rank"),
    ],
)
def test_a_wrong_name_beside_converted_options_is_unknown_and_counted(name: str, meant: str) -> None:
    """No pattern may count a name that verl does not have as one that Fourfold knows."""
    draft = draft_of(f"{GRPO} {name}=1")
    assert f"{name} is unknown, and not converted{f'; did you mean {meant}?' if meant else ''}" in draft.checks
    assert draft.report("run.sh").startswith(
        "run.sh: 4 flags, 3 converted, 1 not converted (1 of them unknown, see below)\n"
    )


def test_adapters_are_merged_for_engines_where_verl_merges_them() -> None:
    options = GRPO + "actor_rollout_ref.model.lora_rank=8 "
    assert recipe_of(options).weights.adapters == "auto"
    assert recipe_of(options + "actor_rollout_ref.model.lora.merge=True").weights.adapters == "merged"


def test_a_script_of_another_trainer_is_refused_or_named() -> None:
    other = GRPO.replace("verl.trainer.main_ppo", "recipe.entropy.main_entropy").replace(" ", " \\\n")
    assert "the script runs recipe.entropy.main_entropy" in draft_of(other).checks[0]
    with pytest.raises(ConfigError, match=r"it runs verl\.trainer\.fsdp_sft_trainer, which has no equivalent"):
        draft_of("torchrun -m verl.trainer.fsdp_sft_trainer \\\n  data.train_files=a.parquet optim.lr=1e-4")


def test_a_flag_without_effect_has_a_reason() -> None:
    options = f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0.0 {ACTOR}.kl_loss_type=low_var_kl "
    options += "trainer.experiment_name= trainer.test_freq=5 data.val_files=['']"
    draft = draft_of(GRPO + options)
    assert not any("UNEXPLAINED" in reason for _, reason in draft.reasons())
    assert ("data", "eval") not in draft.lines
