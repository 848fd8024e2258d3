"""`fourfold import` for trainers whose data has the answers: every flag, and what typical commands become."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

from fourfold import config
from fourfold.cli import main as cli_main
from fourfold.config import Config
from fourfold.config.rows import ROW_PRESETS
from fourfold.errors import ConfigError
from fourfold_tools.migrate import openrlhf_rules, trl_rules
from fourfold_tools.migrate.common import Options
from fourfold_tools.migrate.draft import Draft
from fourfold_tools.migrate.flags import Flag, names_of
from fourfold_tools.migrate.pages import ROW_TABLES
from tests.unit.tools.migrate.test_openrlhf import write_model

OPTIONS = json.loads((Path(__file__).parent / "data" / "row_options.json").read_text())
TRAINERS = [(system, trainer) for system, tables in ROW_TABLES.items() for trainer in tables]
RULES: Final[dict[str, Any]] = {"openrlhf": openrlhf_rules, "trl": trl_rules}
OPENRLHF = (
    "deepspeed --num_gpus 4 --module openrlhf.cli.train_{} --model.model_name_or_path POLICY --data.dataset d.jsonl"
)
TRL = "model_name_or_path: POLICY\ndataset_name: d.jsonl\n"


def draft_of(system: str, text: str, **options: Any) -> Draft:
    draft: Draft = RULES[system].convert(text, Options(source="source", **options), {}, {})
    return draft


def recipe_of(system: str, text: str, **options: Any) -> Config:
    draft = draft_of(system, text, **options)
    return config.from_tables(tomllib.loads(draft.checked(draft.text("test"), "source")), source="test")


def openrlhf(trainer: str, flags: str = "", **options: Any) -> Config:
    return recipe_of("openrlhf", f"{OPENRLHF.format(trainer)} {flags}", **options)


def trl(trainer: str, lines: str = "", **options: Any) -> Config:
    return recipe_of("trl", f"{TRL}{lines}", **({"processes": 4, "trainer": trainer} | options))


def checked(draft: Draft) -> None:
    """Check the recipe, if this version has its preset."""
    if draft.lines["algorithm",]["preset"].value in ROW_PRESETS:
        draft.checked(draft.text("test"), "source")


def with_flag(system: str, trainer: str, name: str, value: str) -> str:
    """Return the least configuration of a trainer, with a value of a flag."""
    if system == "trl":
        return re.sub(rf"(?m)^{name}:.*\n", "", TRL) + f"{name}: {value}\n"
    least = re.sub(rf" --{re.escape(name)} \S+", "", OPENRLHF.format(trainer.removeprefix("train_")))
    return f"{least} --{name} {value}"


@pytest.mark.parametrize(("system", "trainer"), TRAINERS)
def test_every_flag_is_in_the_table_with_its_default(system: str, trainer: str) -> None:
    table = ROW_TABLES[system][trainer]
    known = names_of(table)
    assert [name for name in OPTIONS[system][trainer] if name not in known] == []
    defaults = {name: table[known[name]].default for name in OPTIONS[system][trainer] if table[known[name]].to}
    assert {name: _plain(default) for name, default in defaults.items()} == {
        name: _plain(OPTIONS[system][trainer][name]) for name in defaults
    } | ({"model_revision": None} if system == "trl" else {})


def _plain(default: Any) -> Any:
    """Return a default as JSON has it; what is empty is None."""
    return (
        ["all-linear"]
        if default == "all-linear"
        else (list(default) if isinstance(default, tuple) else default) or None
    )


@pytest.mark.parametrize(("system", "trainer"), TRAINERS)
def test_each_flag_alone_is_converted_or_has_a_reason(system: str, trainer: str) -> None:
    for flag in ROW_TABLES[system][trainer].values():
        draft = draft_of(system, with_flag(system, trainer, flag.name, _value(flag)), trainer=trainer)
        checked(draft)
        reasons = dict(draft.reasons())
        title = draft.flags.title(flag.name)
        assert flag.name in draft.converted or reasons[title].startswith(("not needed", "no equivalent")), reasons


def _value(flag: Flag) -> str:
    special = {
        "data.max_len": "64", "train.batch_size": "64", "max_length": "64", "lr_scheduler_type": "cosine",
        "lr_scheduler_kwargs": "{}", "datasets": "[{path: a/b}]", "dataset_mixture": "{datasets: [{id: a/b}]}",
        "deepspeed_config": "{zero_stage: 2}", "loss_weights": "[0.5]",
    }  # fmt: skip
    number = {"int": "2", "float": "0.25", "pair": "0.1 0.3", "bool": "true", "texts": "q_proj"}.get(flag.kind, "x")
    if flag.name == "loss_type" and flag.kind == "texts":
        return "[ipo]"
    return special.get(flag.name) or (flag.values[-1] if flag.values else number)


@pytest.mark.parametrize(("system", "trainer"), TRAINERS)
def test_no_value_of_a_flag_ends_in_a_traceback(system: str, trainer: str) -> None:
    for name in ROW_TABLES[system][trainer]:
        for value in ("null", "0", "-1", "[]", "x", "[{a: 1}]"):
            with suppress(ConfigError):
                text = with_flag(system, trainer, name, shlex.quote(value) if system == "openrlhf" else value)
                draft = draft_of(system, text, trainer=trainer)
                checked(draft)


@pytest.mark.parametrize(
    ("trainer", "flags"),
    [
        ("train_sft", "--data.input_key question --data.output_key response --data.max_samples 500000 --adam.lr 5e-6"),
        ("train_rm", "--data.apply_chat_template --data.chosen_key chosen --data.rejected_key rejected --adam.lr 9e-6"),
        ("train_dpo", "--data.apply_chat_template --data.chosen_key c --data.rejected_key rejected --model.beta 0.1"),
    ],
)
def test_an_example_of_openrlhf_converts(trainer: str, flags: str) -> None:
    """The examples give their command to deepspeed by a here-document."""
    script = (
        f"read -r -d '' command <<EOF\nopenrlhf.cli.{trainer} --model.model_name_or_path POLICY --train.batch_size 256 "
        f"--data.dataset d.jsonl {flags} --train.max_epochs 1 --ckpt.load_enable --ds.packing_samples\nEOF\n"
        f"if [[ ${{1}} != slurm ]]; then\n deepspeed --module $command\nfi\n"
    )
    draft = draft_of("openrlhf", script, rows=1000, processes=8)
    assert draft.checks == []
    lines = draft.lines
    assert (lines["batch",]["rows_per_step"].value, lines["trainer",]["ranks"].value) == (256, 8)
    checked(draft)


def test_a_recipe_of_rows_has_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "POLICY")
    (tmp_path / "sft.sh").write_text(f"{OPENRLHF.format('sft')} --data.output_key response")
    assert cli_main.main(["import", "openrlhf", "sft.sh", "--rows", "1000"]) == 0
    (tmp_path / "recipe.toml").write_text(capsys.readouterr().out)
    assert cli_main.main(["plan", "recipe.toml", "--skip-checks"]) == 0
    assert "POLICY" in capsys.readouterr().out


def test_the_defaults_of_openrlhf_sft() -> None:
    recipe = openrlhf("sft", "--data.output_key response", rows=12_800)
    assert (recipe.algorithm.preset, recipe.batch.rows_per_step, recipe.data.passes) == ("openrlhf-sft", 128, 2)
    assert (recipe.data.prompt_field, recipe.data.answer_field, recipe.data.chat) == ("input", "response", False)
    assert (recipe.model.max_context_tokens, recipe.data.too_long) == (2048, "cut")
    assert recipe.batch.tokens_per_micro_batch == 8 * 2048
    trainer = recipe.trainer
    assert (trainer.learning_rate, trainer.schedule, trainer.warmup_steps) == (5e-6, "cosine", 6)
    assert (trainer.ranks, trainer.zero_stage, trainer.adam_betas) == (4, 2, (0.9, 0.95))
    assert recipe.data.train[0].template == "User: {input}\nAssistant: "


@pytest.mark.parametrize(
    ("flags", "data"),
    [
        ("--data.input_key m", {"messages_field": "m", "loss_on": "last"}),
        ("--data.input_key m --data.multiturn", {"messages_field": "m", "loss_on": "assistant"}),
        ("--data.output_key o", {"prompt_field": "input", "answer_field": "o"}),
    ],
)
def test_columns_with_a_chat_template(flags: str, data: dict[str, Any]) -> None:
    recipe = openrlhf("sft", f"--data.apply_chat_template {flags}", rows=256)
    expected = {"passes": 2.0, "too_long": "cut", "chat": True, "end": "token", **data}
    assert recipe.data.model_dump(exclude_unset=True, exclude={"train"}) == expected


def test_pretraining_reads_texts() -> None:
    recipe = openrlhf("sft", "--model.pretrain_mode_enable --data.input_key text", rows=256)
    assert (recipe.algorithm.preset, recipe.data.form, recipe.data.answer_field) == ("pretrain", "text", "text")


def test_a_mixture_has_steps_in_place_of_passes() -> None:
    command = OPENRLHF.format("sft").replace("d.jsonl", "a.jsonl,b.jsonl")
    recipe = recipe_of("openrlhf", f"{command} --data.dataset_probs 0.75,0.25 --data.output_key o", rows=6400)
    assert (recipe.steps, recipe.data.passes) == (100, 0)
    assert [source.weight for source in recipe.data.train] == [0.75, 0.25]


def test_rows_are_asked_for_only_where_the_warm_up_needs_them() -> None:
    asked = "trainer.warmup_steps and other shares of the steps are for 156 steps (10,000 rows x 2 / 128 rows)"
    assert any(asked in text for text in draft_of("openrlhf", OPENRLHF.format("sft")).checks)
    constant = draft_of("openrlhf", f"{OPENRLHF.format('sft')} --lr_scheduler constant --data.output_key o")
    assert not any("number of rows" in text for text in constant.checks)


@pytest.mark.parametrize(
    ("trainer", "columns"), [("sft", "--data.output_key o"), ("rm", "--data.prompt_key q"), ("dpo", "")]
)
def test_held_out_rows(trainer: str, columns: str) -> None:
    held_out = openrlhf(trainer, f"--eval.dataset e.jsonl --eval.steps 5 {columns}", rows=2560)
    assert ([source.path for source in held_out.data.eval], held_out.evaluation.every_steps) == (["e.jsonl"], 5)


def test_held_out_pairs_and_labels() -> None:
    flags = "eval_strategy: steps\neval_steps: 5\neval_dataset: e.jsonl"
    for kind in ("reward", "dpo", "kto"):
        assert [source.path for source in trl(kind, flags).data.eval] == ["e.jsonl"]


def test_older_names_are_the_flags_of_today() -> None:
    old = recipe_of(
        "openrlhf",
        "deepspeed --num_gpus 4 --module openrlhf.cli.train_sft --pretrain POLICY --dataset d.jsonl --output_key o "
        "--learning_rate 2e-6 --max_epochs 1 --train_batch_size 64 --l2 0.1 --bf16 --flash_attn",
        rows=6400,
    )
    new = "--data.output_key o --adam.lr 2e-6 --train.max_epochs 1 --train.batch_size 64 --adam.weight_decay 0.1"
    assert old == openrlhf("sft", new, rows=6400)


def test_flags_alone_are_those_of_the_trainer_that_knows_them() -> None:
    flags = "--model.model_name_or_path POLICY --data.dataset d.jsonl --data.input_key q"
    assert recipe_of("openrlhf", f"{flags} --data.output_key o").algorithm.preset == "openrlhf-sft"
    with pytest.raises(ConfigError, match=re.escape("--trainer sft is unknown")):
        draft_of("openrlhf", flags, trainer="sft")
    draft = draft_of("openrlhf", flags, trainer="train_ppo_ray")
    unknown = "--model.model_name_or_path is unknown, and not converted; did you mean --actor.model_name_or_path?"
    assert unknown in draft.checks


def test_the_defaults_of_trl_sft() -> None:
    recipe = trl("sft", "gradient_accumulation_steps: 2\n")
    assert (recipe.algorithm.preset, recipe.batch.rows_per_step, recipe.data.passes) == ("trl-sft", 64, 3)
    assert (recipe.model.max_context_tokens, recipe.batch.tokens_per_micro_batch) == (1024, 8192)
    trainer = recipe.trainer
    assert (trainer.learning_rate, trainer.schedule, trainer.gradient_checkpointing) == (2e-5, "linear", True)
    assert (recipe.data.too_long, recipe.data.order, recipe.data.loss_on, recipe.data.eval) == (
        "cut",
        "shuffled",
        "",
        (),
    )


@pytest.mark.parametrize(
    ("lines", "data"),
    [
        ("assistant_only_loss: true", {"loss_on": "assistant"}),
        ("completion_only_loss: false", {"loss_on": "all"}),
        ("dataset_text_field: body", {"answer_field": "body", "form": "text"}),
        ("packing: true\npacking_strategy: wrapped", {"too_long": "split"}),
        ("train_sampling_strategy: sequential", {"order": "file"}),
        ("eval_strategy: epoch\neval_dataset: e.jsonl", {}),
    ],
)
def test_what_trl_trains_on(lines: str, data: dict[str, Any]) -> None:
    recipe = trl("sft", lines)
    assert recipe.data.model_dump(include=set(data)) == data
    assert bool(recipe.data.eval) == ("eval_strategy" in lines)


def test_a_script_of_trl_names_its_trainer(tmp_path: Path) -> None:
    command = "accelerate launch --num_processes 2 trl/scripts/sft.py --model_name_or_path P --dataset_name d.jsonl "
    recipe = recipe_of("trl", command + "--max_steps 50 --loss_type dft --warmup_steps 0.1")
    assert (recipe.steps, recipe.trainer.warmup_steps, recipe.trainer.ranks) == (50, 5, 2)
    assert (recipe.algorithm.preset, recipe.batch.rows_per_step) == ("dft", 16)
    assert recipe_of("trl", "trl sft --dataset_name d.jsonl --model P", processes=1).batch.rows_per_step == 8
    program = (
        "from trl import SFTConfig, SFTTrainer\nSFTTrainer(model='P', args=SFTConfig(max_length=64, packing=True))"
    )
    draft = draft_of("trl", program, processes=1)
    assert draft.lines["model",]["max_context_tokens"].value == 64
    assert any("with packing, TRL counts sequences" in text for text in draft.checks)


def test_a_file_that_names_no_trainer_is_read_by_its_options() -> None:
    by_options = draft_of("trl", TRL + "assistant_only_loss: true", processes=1)
    assert by_options.lines["algorithm",]["preset"].value == "trl-sft"
    draft = draft_of("trl", TRL, processes=1)
    assert any("it is read as a configuration of grpo; for sft" in text for text in draft.checks)


@pytest.mark.parametrize(
    ("system", "trainer", "options", "expected"),
    [
        ("openrlhf", "train_dpo", "", {"preset": "openrlhf-dpo", "form": "sigmoid", "average": False, "beta": 0.1}),
        (
            "openrlhf",
            "train_dpo",
            " --model.ipo_enable --model.beta 0.2 --model.nll_loss_coef 0.5 --data.max_len 100",
            {"form": "ipo", "average": False, "beta": 0.2, "sft_coef": 0.5, "tokens_per_micro_batch": 1600},
        ),
        ("openrlhf", "train_dpo", " --model.label_smoothing 0.1", {"form": "sigmoid", "label_smoothing": 0.1}),
        ("openrlhf", "train_rm", " --model.margin_loss_enable", {"preset": "openrlhf-rm", "margin": True}),
        (
            "openrlhf",
            "train_rm",
            " --data.prompt_key p --data.chosen_key c",
            {"prompt_field": "p", "chosen_field": "c"},
        ),
        ("trl", "dpo", "", {"preset": "trl-dpo", "form": "sigmoid", "average": False, "sft_coef": 0.0, "beta": 0.1}),
        ("openrlhf", "train_dpo", " --ref.model_name_or_path SFT", {"source": "SFT", "device": "cuda"}),
        ("trl", "kto", "ref_model: org/sft\nmax_length: 9000", {"source": "hf:org/sft", "tokens_per_batch": 9000}),
        ("trl", "dpo", "ref_model: POLICY", {"source": "POLICY"}),
        ("trl", "dpo", "loss_type: ipo", {"form": "ipo", "average": True}),
        ("trl", "dpo", "loss_type: [sigmoid_norm, sft]\nloss_weights: [0.5, 1]", {"average": True, "sft_coef": 2.0}),
        ("trl", "dpo", "loss_type: robust\nlabel_smoothing: 0.1", {"form": "robust", "label_smoothing": 0.1}),
        ("trl", "kto", "desirable_weight: 1.5", {"preset": "trl-kto", "desirable_weight": 1.5, "order": "file"}),
        ("trl", "reward", "center_rewards_coefficient: 0.01", {"preset": "trl-reward", "center_coef": 0.01}),
        ("trl", "reward", "", {"too_long": "drop", "learning_rate": 1e-4, "tokens_per_micro_batch": 16_384}),
    ],
)
def test_losses_of_pairs_and_labels(system: str, trainer: str, options: str, expected: dict[str, Any]) -> None:
    least = TRL if system == "trl" else OPENRLHF.format(trainer.removeprefix("train_"))
    draft = draft_of(system, f"{least}{options}", trainer=trainer, processes=4)
    found = {key: line.value for lines in draft.lines.values() for key, line in lines.items()}
    assert {key: found[key] for key in expected} == expected
    checked(draft)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("loss_type: exo_pair", "loss_type = exo_pair with loss_weights = None has no equivalent; give one"),
        ("loss_type: [sigmoid, ipo]", "loss_type = sigmoid, ipo with"),
        ("loss_weights: [-1]", "loss_type = sigmoid with loss_weights = [-1] has"),
    ],
)
def test_a_loss_without_equivalent_is_an_error(options: str, error: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(error)):
        draft_of("trl", TRL + options, trainer="dpo")
