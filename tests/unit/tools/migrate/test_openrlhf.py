"""`fourfold import openrlhf`: every flag, every example command, and what the formulas become."""

from __future__ import annotations

import json
import os
import re
import shlex
import struct
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fourfold import config
from fourfold.config import Config, gpu_count
from fourfold.errors import ConfigError
from fourfold.plan.algorithm import algorithm_plan
from fourfold.plan.report import describe
from fourfold_tools.migrate.common import Options
from fourfold_tools.migrate.draft import Draft
from fourfold_tools.migrate.openrlhf import TABLE
from fourfold_tools.migrate.openrlhf_rules import convert

DATA = Path(__file__).parent / "data"
LEAST = "--actor.model_name_or_path POLICY --data.prompt_dataset d.jsonl --reward.remote_url r.py --vllm.num_engines 1"
GROUP = f"{LEAST} --rollout.n_samples_per_prompt 8"


def draft_of(command: str, **options: Any) -> Draft:
    return convert(command, Options(source="script.sh", **options), {}, {})


def recipe_of(command: str, **options: Any) -> Config:
    draft = draft_of(command, **options)
    return config.from_tables(tomllib.loads(draft.checked(draft.text("test"), "script.sh")), source="test")


def all_flags() -> list[tuple[str, Any]]:
    lines = (DATA / "openrlhf_flags.txt").read_text().splitlines()
    return [(name, json.loads(default)) for name, default in (line.split("\t") for line in lines[1:])]


def commands() -> Iterator[Any]:
    for line in (DATA / "openrlhf_commands.txt").read_text().splitlines()[1:]:
        name, _, command = line.partition(": ")
        yield pytest.param(command, id=name)


def write_model(folder: Path, *, head: str = "lm_head.weight", rows: int = 512) -> None:
    """Write a model folder of two layers, whose weights are a hole in a file."""
    folder.mkdir()
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    kind = "LlamaForCausalLM" if rows > 1 else "LlamaForSequenceClassification"
    (folder / "config.json").write_text(
        json.dumps(
            {**shape, "num_key_value_heads": 2, "vocab_size": 512, "model_type": "llama", "architectures": [kind]}
            | {"max_position_embeddings": 131_072, "tie_word_embeddings": False, "id2label": {"0": "LABEL_0"}}
        )
    )
    (folder / "tokenizer.json").write_text("{}")
    shapes = {"model.embed_tokens.weight": [512, 64], "model.norm.weight": [64], head: [rows, 64]}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{name}_proj.weight": [64, 64] for name in "qkvo"}
        shapes |= {f"{prefix}.mlp.{name}_proj.weight": [128, 64] for name in ("gate", "up")}
        shapes |= {f"{prefix}.mlp.down_proj.weight": [64, 128]}
        shapes |= {f"{prefix}.{name}_layernorm.weight": [64] for name in ("input", "post_attention")}
    header: dict[str, Any] = {}
    end = 0
    for name, sizes in shapes.items():
        begin, end = end, end + 2 * sizes[0] * (sizes[1] if len(sizes) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": sizes, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def test_every_flag_of_openrlhf_is_in_the_table_with_its_default() -> None:
    differing = {
        name: (TABLE[name].default if name in TABLE else "missing", default)
        for name, default in all_flags()
        if name not in TABLE or _plain(TABLE[name].default) != _plain(default)
    }
    assert differing == {}


def _plain(default: Any) -> Any:
    if default == "all-linear":
        return ["all-linear"]
    return list(default) if isinstance(default, tuple) else default


@pytest.mark.parametrize("command", commands())
def test_an_example_of_openrlhf_converts_and_has_a_plan(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "POLICY")
    write_model(tmp_path / "REWARD", head="score.weight", rows=1)
    draft = draft_of(command)
    (tmp_path / "recipe.toml").write_text(draft.checked(draft.text("test"), "script.sh"))
    assert [text for text in draft.checks if "unknown" in text or "UNEXPLAINED" in text] == []
    assert [name for name, reason in draft.reasons() if not reason.startswith(("not needed", "no equivalent"))] == []
    loaded = config.load(tmp_path / "recipe.toml")
    assert "POLICY" in describe(loaded)
    if loaded.placement.colocated:
        engines = sum(pool.replicas * pool.gpus_per_replica for pool in loaded.rollout_pools)
        assert gpu_count(loaded) == max(loaded.trainer.ranks, engines), "no service needs one more GPU"


def test_each_flag_alone_is_converted_or_has_a_reason() -> None:
    """One test for all: pytest takes far longer for hundreds of tests than for what they do."""
    for name in [name for name in TABLE if TABLE[name].kind != "bool" or not TABLE[name].default]:
        _check_alone(name)


def _check_alone(name: str) -> None:
    """A flag with a key of the recipe must have a line there, or a reason that fits the other flags."""
    flag = TABLE[name]
    number = {"int": "2", "float": "0.5", "pair": "0.1 0.3", "bool": "", "texts": "q_proj v_proj"}.get(flag.kind, "x")
    special = {"train.batch_size": "64", "data.max_len": "64", "actor.dual_clip": "3", "reward.remote_url": "http://x"}
    value = special.get(name) or (flag.values[-1] if flag.values else number)
    command = re.sub(rf"--{re.escape(name)} \S+", "", GROUP) + f" --{name} {value}"
    draft = draft_of(command)
    draft.checked(draft.text("test"), "script.sh")
    reasons = dict(draft.reasons())
    assert name in draft.converted or reasons[f"--{name}"].startswith(("not needed", "no equivalent")), reasons


def test_each_older_name_is_the_flag_of_today() -> None:
    new = recipe_of(GROUP + " --train.batch_size 64 --algo.kl.init_coef 0.02 --ds.zero_stage 3 --actor.adam.lr 3e-7")
    old = recipe_of(
        "--pretrain POLICY --prompt_data d.jsonl --remote_rm_url r.py --vllm_num_engines 1 --n_samples_per_prompt 8 "
        "--train_batch_size 64 --init_kl_coef 0.02 --zero_stage 3 --actor_learning_rate 3e-7"
    )
    assert old == new


def test_the_older_schedule_is_that_of_policy_and_critic() -> None:
    old = recipe_of(LEAST + " --lr_scheduler constant --max_norm 0.5 --l2 0.1")
    assert (old.trainer.schedule, old.critic.schedule) == ("constant", "constant")
    assert (old.trainer.max_grad_norm, old.critic.max_grad_norm, old.critic.weight_decay) == (0.5, 0.5, 0.1)


def test_prompt_and_completion_of_older_scripts_add_up() -> None:
    recipe = recipe_of(LEAST + " --prompt_max_len 512 --generate_max_len 1536")
    assert (recipe.model.max_context_tokens, recipe.sampling.max_new_tokens) == (2048, 1536)


@pytest.mark.parametrize(
    ("estimator", "preset"),
    [
        ("gae", "openrlhf-ppo"),
        ("reinforce", "openrlhf-reinforce++"),
        ("reinforce_baseline", "openrlhf-reinforce++-baseline"),
        ("rloo", "openrlhf-rloo"),
        ("group_norm", "openrlhf-grpo"),
        ("dr_grpo", "openrlhf-dr-grpo"),
        ("group_norm --actor.policy_loss_type gspo", "openrlhf-gspo"),
    ],
)
def test_the_defaults_of_openrlhf_are_the_formulas_of_the_preset(estimator: str, preset: str) -> None:
    recipe = recipe_of(f"{GROUP} --algo.advantage.estimator {estimator}")
    table = recipe.model_dump() | {"algorithm": {"preset": preset}}
    expected = config.from_tables(json.loads(json.dumps(table)), source="test")
    assert recipe.algorithm == expected.algorithm
    assert algorithm_plan(recipe) == algorithm_plan(expected)


def test_grpo_with_its_kl_in_the_loss() -> None:
    recipe = recipe_of(
        GROUP + " --algo.advantage.estimator group_norm --algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.init_coef "
        "1e-3 --actor.eps_clip_low_high 0.2 0.27 --actor.dual_clip 3 --actor.entropy_coef 0.01"
    )
    kl, loss = recipe.algorithm.kl, recipe.algorithm.loss.model_dump()
    assert (kl.coef, kl.placement, kl.estimator) == (1e-3, "loss", "k3")
    assert loss == {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.27, "dual_clip": 3.0}
    assert recipe.algorithm.entropy_coef == 0.01


def test_k1_in_the_loss_becomes_k2_and_is_named() -> None:
    draft = draft_of(GROUP + " --algo.kl.use_loss")
    assert draft.lines["algorithm", "kl"]["estimator"].value == "k2"
    assert any("k1 has no gradient" in text for text in draft.checks)


def test_a_batch_becomes_mini_batches_and_steps() -> None:
    recipe = recipe_of(
        GROUP + " --rollout.batch_size 128 --train.batch_size 256 --train.max_epochs 2 --train.num_episodes 3",
        rows=12_800,
    )
    batch = recipe.batch
    assert (batch.prompts_per_step, batch.group_size, batch.mini_batches_per_step, batch.epochs_per_step) == (
        128,
        8,
        4,
        2,
    )
    assert recipe.steps == 300
    assert recipe.trainer.warmup_steps == 9
    assert (recipe.trainer.schedule, recipe.trainer.final_learning_rate_share) == ("cosine", 0.1)
    assert (recipe.trainer.adam_betas, recipe.seed, recipe.trainer.zero_stage) == ((0.9, 0.95), 42, 2)


def test_stage_0_becomes_stage_1_which_adds_gradients_in_float32() -> None:
    assert recipe_of(f"{GROUP} --ds.zero_stage 0").trainer.zero_stage == 1


def test_a_batch_that_does_not_divide_is_named() -> None:
    draft = draft_of(GROUP + " --rollout.batch_size 100 --train.batch_size 128")
    assert draft.lines["batch",]["mini_batches_per_step"].value == 6
    assert any("do not divide" in text for text in draft.checks)


def test_unknown_rows_are_named() -> None:
    assert any("number of rows" in text for text in draft_of(LEAST).checks)
    assert not any("number of rows" in text for text in draft_of(LEAST, rows=5_000).checks)
    nowhere = draft_of(LEAST.replace("d.jsonl", "~no-user/d.jsonl"))
    assert any("number of rows" in text for text in nowhere.checks)


def test_dynamic_batches_and_ring_attention() -> None:
    recipe = recipe_of(
        GROUP
        + " --train.dynamic_batch_enable --train.max_tokens_per_gpu 8192 --ds.ring_attn_size 2 --data.max_len 4096"
    )
    assert (recipe.batch.tokens_per_micro_batch, recipe.trainer.sequence_parallel_size) == (16_384, 2)
    recipe = recipe_of(GROUP + " --train.dynamic_batch_enable --train.max_tokens_per_gpu 1024")
    assert recipe.batch.tokens_per_micro_batch == 2048


def test_placement_and_services() -> None:
    shared = recipe_of(
        GROUP + " --actor.num_nodes 2 --actor.num_gpus_per_node 4 --train.colocate_all --vllm.num_engines 4 "
        "--vllm.tensor_parallel_size 2 --vllm.enable_sleep --ref.num_gpus_per_node 8"
    )
    assert (shared.trainer.ranks, shared.placement.trainer_nodes, shared.placement.colocated) == (8, 2, True)
    assert (shared.rollout.replicas, shared.rollout.gpus_per_replica, shared.rollout.sleep_mode) == (4, 2, True)
    assert shared.reference.replicas == 8
    asynchronous = recipe_of(
        GROUP + " --train.colocate_all --train.async_enable --train.async_queue_size 2 --train.partial_rollout_enable"
    )
    assert (asynchronous.placement.colocated, asynchronous.asynchrony.max_policy_lag) == (False, 2)
    assert asynchronous.weights.pause == "recompute"


def test_rewards_of_each_kind() -> None:
    (function,) = recipe_of(LEAST).reward
    assert function.function == "r.py:reward_func"
    (server,) = recipe_of(LEAST.replace("r.py", "http://a:5000/get_reward")).reward
    assert server.http == "http://a:5000/get_reward"
    model = recipe_of(LEAST.replace("--reward.remote_url r.py", "--reward.model_name_or_path RM"))
    assert model.reward[0].model is not None
    assert (model.reward[0].model.source, model.critic.source) == ("RM", "RM")
    agent = recipe_of(LEAST + " --train.agent_func_path agent.py")
    assert (agent.environment.kind, agent.environment.source) == ("openrlhf", "agent.py:AgentExecutor")
    assert (agent.agents.source, agent.agents.reward, agent.gateway.replicas) == ("tasks", "agent", 1)


def test_length_penalties_filter_and_correction() -> None:
    recipe = recipe_of(
        GROUP + " --algo.advantage.estimator rloo --rollout.max_new_tokens 1000 --reward.overlong_buffer_len 200 "
        "--reward.overlong_penalty_factor 0.5 --reward.stop_properly_penalty_coef -0.5 --algo.dynamic_filtering_enable "
        "--algo.advantage.is_correction_enable --algo.advantage.is_correction_type seq-mask-tis"
    )
    shaping, correction = recipe.algorithm.shaping, recipe.algorithm.correction
    assert (shaping.overlong_buffer, shaping.overlong_penalty, shaping.truncated) == (0.2, 0.5, -0.5)
    assert (recipe.algorithm.filter.keep, recipe.algorithm.filter.low, recipe.algorithm.filter.high) == (
        "mean-inside",
        0,
        1,
    )
    assert (correction.kind, correction.low, correction.high) == ("sequence-mask-tis", 0.5, 5.0)


@pytest.mark.parametrize(
    ("bounds", "clip", "expected", "warned"),
    [
        ("-1 5", 5.0, (-1.0, 5.0), False),
        ("0 1", 1.0, (0.0, 1.0), False),
        ("-3 3", 3.0, (-3.0, 3.0), False),
        ("1 2", 2.0, (-2.0, 2.0), True),
        ("-2 -1", 2.0, (-2.0, 2.0), True),
    ],
)
def test_bounds_around_zero_are_those_of_the_clip(
    bounds: str, clip: float, expected: tuple[float, float], warned: bool
) -> None:
    command = f"{GROUP} --reward.clip_range {bounds}"
    shaping = recipe_of(command).algorithm.shaping
    assert (shaping.clip, shaping.bounds) == (clip, expected)
    assert any("clip in the reward function" in text for text in draft_of(command).checks) == warned


def test_evaluations_keep_the_best_checkpoint() -> None:
    recipe = recipe_of(
        GROUP + " --eval.dataset e.jsonl --eval.steps 5 --eval.n_samples_per_prompt 2 --ckpt.save_steps 5"
    )
    (held_out,) = recipe.data.eval
    assert (held_out.path, recipe.evaluation.every_steps, recipe.checkpoint.keep_best) == ("e.jsonl", 5, 1)
    assert recipe_of(GROUP + " --eval.dataset e.jsonl").data.eval == ()


def test_held_out_sets_keep_their_split_and_temperature() -> None:
    command = GROUP + " --eval.steps 5 --eval.split test --eval.dataset owner/a,x/rows.jsonl,y/rows.jsonl"
    sets = recipe_of(command).data.eval
    assert [(one.path, one.split, one.temperature) for one in sets] == [
        ("hf:owner/a", "test", 0.6),
        ("x/rows.jsonl", "", 0.6),
        ("y/rows.jsonl", "", 0.6),
    ]
    assert [one.title for one in sets] == ["a", "rows", "rows-2"]
    assert recipe_of(command + " --eval.temperature 0").data.eval[0].temperature == 0
    agents = draft_of(command + " --eval.temperature 1 --train.agent_func_path agent.py")
    assert config.from_tables(tomllib.loads(agents.text("t")), source="t").data.eval[0].temperature is None
    assert dict(agents.reasons())["--eval.temperature"].startswith("no equivalent: agents sample")


def test_training_files_of_the_same_name_have_names_of_their_own() -> None:
    train = recipe_of(GROUP.replace("d.jsonl", "a/train.jsonl,b/train.jsonl")).data.train
    assert [source.title for source in train] == ["train", "train-1"]


def test_several_sources_become_tables_with_their_shares() -> None:
    command = GROUP.replace("d.jsonl", "owner/a,my/b.jsonl") + (
        " --data.prompt_probs 0.75,0.25 --data.prompt_split train --data.max_samples 100 --data.input_key q"
        " --data.input_template " + shlex.quote("Q: {}\nA:")
    )
    draft = draft_of(command)
    first, second = config.from_tables(tomllib.loads(draft.text("t")), source="t").data.train
    assert (first.path, first.split, first.weight, first.size) == ("hf:owner/a", "train", 0.75, 100)
    assert (second.path, second.split, second.weight, second.size) == ("my/b.jsonl", "", 0.25, 100)
    assert first.template == second.template == "Q: {q}\nA:"
    unclear = draft_of(command.replace("0.75,0.25", "0.75,x"))
    assert any("the weights '0.75,x' are not 2 positive numbers" in check for check in unclear.checks)
    assert any("hf:owner/a is downloaded from the Hugging Face Hub" in check for check in draft.checks)
    assert "[[data.train]]" in draft.text("t") and "weight = 0.75  # --data.prompt_probs" in draft.text("t")


def test_the_rows_of_a_file_on_this_machine_are_counted(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text('{"a": 1}\n' * 64 + "\n")
    command = GROUP.replace("d.jsonl", str(data)) + " --rollout.batch_size 8 --train.batch_size 64"
    draft = draft_of(command)
    assert "steps = 8  # " in draft.text("t") and not any(check.startswith("steps = ") for check in draft.checks)
    assert "steps = 4  # " in draft_of(command, rows=32).text("t"), "the user knows better"
    assert "steps = 2  # " in draft_of(command + " --data.max_samples 16").text("t")
    data.unlink()
    os.mkfifo(data)  # reading it would wait for a writer
    assert any("10,000 are assumed" in check for check in draft_of(command).checks)
    advice = "or correct steps, and warmup_steps where it is not 0"
    assert any(advice in check for check in draft_of(command).checks)


def test_a_template_that_computes_is_left_to_the_user() -> None:
    draft = draft_of(GROUP + " --data.input_template " + shlex.quote("{0.__class__}"))
    assert any("is not converted (it has no {})" in check for check in draft.checks)
    assert "template = " not in draft.text("t").replace("# ", "").split("[data.train]")[1].split("[")[0]


def test_each_line_names_its_flag_and_the_rest_is_listed() -> None:
    text = draft_of(GROUP + " --actor.adam.lr 5e-7 --ds.packing_samples").text("title")
    assert "learning_rate = 5e-07  # --actor.adam.lr" in text
    assert "seed = 42  # --train.seed (default)" in text
    assert "#   --ds.packing_samples: not needed" in text


def test_a_default_that_depends_on_the_device_is_left_to_fourfold() -> None:
    assert recipe_of(GROUP).rollout.enforce_eager is None
    assert recipe_of(GROUP + " --vllm.enforce_eager").rollout.enforce_eager is True


def test_a_micro_batch_of_short_samples_keeps_its_size() -> None:
    text = draft_of(GROUP + " --data.max_len 128 --train.micro_batch_size 4").text("title")
    assert "tokens_per_micro_batch = 512  # --train.micro_batch_size 4, --data.max_len 128\n" in text


def test_an_unknown_flag_is_named_with_the_nearest() -> None:
    draft = draft_of(GROUP + " --actor.adam.lrr 5e-7")
    assert "--actor.adam.lrr is unknown, and not converted; did you mean --actor.adam.lr?" in draft.checks
    assert "not converted (1 of them unknown, see below)" in draft.report("run.sh")


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("echo hello", "no command of openrlhf.cli.train_ppo_ray"),
        ("deepspeed --module openrlhf.cli.serve_rm --max_len 1", "it runs serve_rm, which has no equivalent"),
        (GROUP + " --train.batch_size many", "--train.batch_size = many must be a whole number"),
        (GROUP + " --train.batch_size 1.5", "must be a whole number"),
        (GROUP + " --train.batch_size 0", "must be at least 1"),
        (GROUP + " --train.batch_size", "--train.batch_size has no value and must be a whole number"),
        (GROUP + " --algo.advantage.estimator group_nrm", "did you mean `group_norm`"),
        (GROUP + " --actor.num_nodes $NODES", "--define NODES=VALUE"),
        (LEAST + " --algo.advantage.estimator rloo", "compares the samples of a prompt"),
    ],
)
def test_a_wrong_configuration_gives_value_rule_and_fix(command: str, error: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(error)):
        recipe_of(command)


def test_a_secret_is_not_repeated() -> None:
    draft = draft_of(GROUP + " --logger.wandb.key SECRET")
    assert "SECRET" not in draft.text("title") + draft.report("script.sh")


def test_text_of_a_script_cannot_leave_its_comment() -> None:
    draft = draft_of(
        GROUP + " " + shlex.quote("--x\nsteps = 9\x1b[31m") + " --data.input_key " + shlex.quote('a"\n[x]')
    )
    recipe = config.from_tables(tomllib.loads(draft.text("title\nseed = 9")), source="test")
    assert recipe.data.prompt_field == 'a"\n[x]'
    assert recipe.seed == 42
    assert "\x1b" not in draft.text("title") + draft.report("x")
