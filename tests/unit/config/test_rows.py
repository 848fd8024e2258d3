"""Recipes of runs of rows: what they need, and the keys that they refuse, each with its reason."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from fourfold import config
from fourfold.config.rows import ROW_PRESETS, RowKeys
from fourfold.errors import ConfigError

RECIPE = """\
name = "tiny"
[model]
source = "builtin:tiny"
max_context_tokens = 64
[data]
passes = 2
[data.train]
path = "rows.jsonl"
[batch]
rows_per_step = 8
[algorithm]
preset = "sft"
"""


def load(folder: Path, *assignments: str, recipe: str = RECIPE) -> config.Config:
    path = folder / "recipe.toml"
    path.write_text(recipe)
    return config.load(path, assignments)


def refused(folder: Path, assignments: Sequence[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, *assignments)
    return caught.value.message.replace(str(folder), "DIR")


@pytest.mark.parametrize("preset", ROW_PRESETS)
def test_a_run_of_rows_needs_no_engine_and_no_scorer(tmp_path: Path, preset: str) -> None:
    teacher = preset == "distill"
    found = load(tmp_path, f"algorithm.preset={preset}", *["reference.source=teacher"] * teacher)
    assert not found.needs_engines and not found.needs_scorer and found.needs_reference == teacher
    assert found.batch.samples_per_step == 8
    assert config.from_tables(tomllib.loads(config.dump(found)), source="dump") == found


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("sampling.max_new_tokens=3", "`sampling.max_new_tokens` has no effect in a run of rows"),
        ("rollout.replicas=2", "`rollout.replicas` has no effect in a run of rows (batch.rows_per_step): no engine"),
        ("weights.pause=wait", "`weights.pause` has no effect in a run of rows (batch.rows_per_step): no engine gets"),
        ("asynchrony.max_policy_lag=1", "`asynchrony.max_policy_lag` has no effect"),
        ("reward.function=last_number", "`reward` has no effect in a run of rows (batch.rows_per_step): no answer is"),
        ("agents.source=tasks", "`agents.source` has no effect in a run of rows (batch.rows_per_step): no agent"),
        ("reference.replicas=2", "`reference.replicas` has no effect in a run of rows (batch.rows_per_step): referenc"),
        ("critic.learning_rate=0.1", "`critic.learning_rate` has no effect"),
        ("algorithm.kl.coef=0.1", "`algorithm.kl.coef` has no effect in a run of rows (batch.rows_per_step): the loss"),
        ("algorithm.correction.kind=tis", "`algorithm.correction.kind` has no effect"),
        ("algorithm.filter.keep=varied", "`algorithm.filter.keep` has no effect"),
        ("algorithm.shaping.clip=1.0", "`algorithm.shaping.clip` has no effect"),
        ("algorithm.whiten=full", "`algorithm.whiten` has no effect"),
        ("data.curriculum.success=0.5", "`data.curriculum` has no effect"),
        ("data.holdout.groups=2", "data.holdout.field = `expression` and unordered_numbers read metadata, which rows"),
        ("data.eval={path='x.jsonl', temperature=0.5}", "data.eval x: samples_per_prompt, temperature and max_new_tok"),
        ("algorithm.preset=grpo", "algorithm.loss.kind = `ppo` is no loss of such tokens; set algorithm.preset to one"),
        ("algorithm.advantage.kind=grpo", "algorithm.advantage.kind = `grpo` needs samples of the policy"),
        ("batch.prompts_per_step=3", "prompts_per_step = 3 is for answers that engines sample, and rows_per_step = 8"),
        ("batch.epochs_per_step=2", "batch.epochs_per_step = 2 trains on the rows of a step several times"),
        ("batch.rows_per_step=0", "`prompts_per_step` is missing or 0"),
        ("trainer.ranks=16", "batch.rows_per_step = 8 cannot feed 16 trainer ranks in 1 mini-batches; raise it to at"),
        (
            "algorithm.aggregation=constant-length",
            "algorithm.aggregation = `constant-length` divides by sampling.max_new",
        ),
        ("placement.colocated=true", "placement.colocated = true shares GPUs with engines"),
        ("data.passes=0", "`steps` and `data.passes` are missing or 0; set one of them"),
        ("data.train.weight=1.0", "data.passes = 2: sources with a weight are drawn at different rates"),
        ("data.form=pair", "data.form = 'pair': input should be 'auto'"),
        ("data.chosen_field=x", "`data.chosen_field` has no effect in this run: algorithm.loss.kind = `nll` reads ans"),
    ],
)
def test_what_rows_do_not_read_is_refused_with_the_reason(tmp_path: Path, assignment: str, message: str) -> None:
    found = refused(tmp_path, [assignment])
    assert message in found
    if "has no effect" in message and "`reward`" not in message and "`data." not in message:
        assert found.startswith("--set "), "the place is that of the key"


@pytest.mark.parametrize(
    "assignment", ["loss_on=last", "turns=each", "end=token", "trust_special_tokens=true"], ids=lambda text: text[:5]
)
def test_a_reward_model_reads_the_text_that_it_scores_later(tmp_path: Path, assignment: str) -> None:
    key = assignment.partition("=")[0]
    found = refused(tmp_path, ["algorithm.preset=reward-model", f"data.{assignment}"])
    assert f"data.{key} = " in found and "a reward model scores the whole text" in found


def test_labelled_steps_have_keys_of_their_own(tmp_path: Path) -> None:
    steps = ["algorithm.preset=process-reward", "data.step_separator= ", "data.label_field=good"]
    found = load(tmp_path, *steps, "data.trust_special_tokens=true", "data.holdout={field='', groups=2}")
    assert (found.algorithm.loss.reads, found.data.step_separator, found.samples_per_row) == ("steps", " ", 1)
    text = refused(tmp_path, ["algorithm.preset=dpo", "data.step_separator=x"])
    assert "`data.step_separator` has no effect in this run: algorithm.loss.kind = `dpo` reads pairs; remove" in text
    assert "`step-labels` reads labelled steps; remove it" in refused(tmp_path, [*steps, "data.weight_field=w"])


@pytest.mark.parametrize(
    ("preset", "assignment", "message"),
    [
        ("distill", "data.passes=1", "algorithm.loss.kind = `distill` learns from a teacher; set reference.source to"),
        (
            "sft",
            "reference.source=m",
            "reference.source names, for a loss that reads a reference or a teacher; remove it",
        ),
        (
            "sft",
            "algorithm.sft_coef=0.5",
            "sft_coef = 0.5 weighs the preferred answers of pairs, or answers beside a t",
        ),
        ("sft", "evaluation.metric=accuracy", "is not measured with algorithm.loss.kind = `nll`, whose held-out rows"),
        ("reward-model", "evaluation.metric=loss", "whose held-out rows have a score by their accuracy alone"),
        (
            "dpo",
            "data.loss_on=last",
            "data.loss_on = `last` has no effect where algorithm.loss.kind = `dpo` reads pairs",
        ),
        ("kto", "data.loss_on=assistant", "data.loss_on = `assistant` has no effect where"),
        ("dpo", "reference.source=builtin:tiny", "reference services run another model than model.source, which re"),
        ("simpo", "reference.source=m", "`reference.source` has no effect in a run of rows (batch.rows_per_step): ref"),
        ("kto", "reference.device=cuda", "`reference.device` has no effect in a run of rows"),
        ("dpo", "data.weight_field=w", "`data.weight_field` has no effect in this run"),
        (
            "kto",
            "data.rejected_field=r",
            "`data.rejected_field` has no effect in this run: algorithm.loss.kind = `kto`",
        ),
        ("dpo", "algorithm.advantage.kind=rloo", "algorithm.advantage.kind = `rloo` has no effect where"),
        ("kto", "batch.rows_per_step=1", "batch.rows_per_step = 1, and algorithm.loss.kind = `kto` joins prompts with"),
        ("kto", "algorithm.sft_coef=1.0", "sft_coef = 1 weighs the preferred answers of pairs"),
    ],
)
def test_runs_of_pairs_and_labels_refuse_what_they_do_not_read(
    tmp_path: Path, preset: str, assignment: str, message: str
) -> None:
    assert message in refused(tmp_path, [f"algorithm.preset={preset}", assignment])


def test_the_values_of_presets_are_those_of_their_papers(tmp_path: Path) -> None:
    def loss(preset: str) -> dict[str, object]:
        algorithm = load(tmp_path, f"algorithm.preset={preset}").algorithm
        return {**algorithm.loss.model_dump(), "sft_coef": algorithm.sft_coef}

    assert loss("dpo") == loss("trl-dpo") == loss("openrlhf-dpo")
    assert loss("dpo") | {"form": "ipo"} == loss("ipo")
    assert (loss("dpo")["beta"], loss("cdpo")["label_smoothing"], loss("robust-dpo")["form"]) == (0.1, 0.1, "robust")
    assert loss("dpo") | {"average": True, "beta": 5.0} == loss("dpo-norm")
    assert (loss("simpo")["gamma"], loss("simpo")["beta"], loss("simpo")["sft_coef"]) == (0.5, 2.0, 0.0)
    assert loss("cpo")["sft_coef"] == loss("orpo")["sft_coef"] == 1.0
    assert loss("kto") == loss("trl-kto")


def test_a_run_with_engines_refuses_the_keys_of_rows(tmp_path: Path) -> None:
    engines = RECIPE.replace("passes = 2", "").replace("rows_per_step = 8", "prompts_per_step = 2\ngroup_size = 4")
    engines = engines.replace('preset = "sft"', 'preset = "grpo"') + "[sampling]\nmax_new_tokens = 8\n"
    assert load(tmp_path, "steps=3", recipe=engines).needs_engines
    with pytest.raises(ConfigError, match="`steps` is missing or 0"):
        load(tmp_path, recipe=engines)
    with pytest.raises(ConfigError, match=r"`sampling.max_new_tokens` is missing or 0"):
        load(tmp_path, "steps=3", recipe=engines.replace("max_new_tokens = 8", ""))
    with pytest.raises(
        ConfigError, match=r"`bradley-terry` trains on rows of the data, not on samples; set batch.rows_"
    ):
        load(tmp_path, "steps=3", "algorithm.loss.kind=bradley-terry", recipe=engines)
    with pytest.raises(ConfigError, match=r'algorithm.preset = "sft" trains on the answers of the data'):
        load(tmp_path, "steps=3", "algorithm.preset=sft", recipe=engines)
    values = {"passes": "2", "max_dropped": "0.5", "trust_special_tokens": "true", "form": "text", "turns": "each"}
    values |= {"end": "token", "too_long": "cut", "bad_rows": "drop", "loss_on": "all"}
    for key in RowKeys.model_fields:
        with pytest.raises(ConfigError, match=f"data.{key} = .* is for rows whose answers are trained on"):
            load(tmp_path, "steps=3", f"data.{key}={values.get(key, 'x')}", recipe=engines)


def test_a_teacher_is_read_by_rows_alone_and_limits_the_length_of_a_sample(tmp_path: Path) -> None:
    teacher = ["algorithm.preset=distill", "reference.source=m"]
    sampled = ["batch.rows_per_step=0", "batch.prompts_per_step=8", "batch.group_size=2", "sampling.max_new_tokens=8"]
    found = refused(tmp_path, [*teacher, *sampled, "steps=2", "data.passes=0"])
    assert 'algorithm.preset = "distill" trains on the answers of the data; set batch.rows_per_step' in found
    long = ["model.max_context_tokens=9000", "batch.tokens_per_micro_batch=9000", "reference.tokens_per_batch=9000"]
    load(tmp_path, *teacher, *long)
    found = refused(tmp_path, [*teacher, *long, "algorithm.loss.top_k=64"])
    assert "a sample of that length has 4770000 bytes, and TrainStep carries at most 4194304" in found
