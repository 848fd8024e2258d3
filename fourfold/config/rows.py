"""Defines the keys of a run of rows, which trains on the answers of its data, and refuses what rows do not read.

Such a run has `batch.rows_per_step` in place of `batch.prompts_per_step`. It starts no engine and no reward service.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import Field

from fourfold.table import Table

if TYPE_CHECKING:
    from fourfold.config.schema import Config

STEP_SEPARATOR: Final = "\n\n"
"""Text after each step of an answer, if no key names another."""

# A mean over the tokens of a step, each of which weighs as much as its row.
ROW_PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "sft": {"advantage": {"kind": "constant"}, "loss": {"kind": "nll"}},
    # The twins have the same loss; their importers set what is in it (data.loss_on).
    "openrlhf-sft": {"advantage": {"kind": "constant"}, "loss": {"kind": "nll"}},
    "trl-sft": {"advantage": {"kind": "constant"}, "loss": {"kind": "nll"}},
    "pretrain": {"advantage": {"kind": "constant"}, "loss": {"kind": "nll"}},
    # arXiv 2508.05629.
    "dft": {"advantage": {"kind": "constant"}, "loss": {"kind": "dft"}},
    # A teacher's likeliest tokens at each position of the answers: arXiv 2306.13649, and 1503.02531 for beta = 0.
    "distill": {"advantage": {"kind": "constant"}, "loss": {"kind": "distill"}},
    # A reward model, from pairs. arXiv 2203.02155; the twins have the same defaults.
    "reward-model": {"loss": {"kind": "bradley-terry"}},
    "openrlhf-rm": {"loss": {"kind": "bradley-terry"}},
    "trl-reward": {"loss": {"kind": "bradley-terry"}},
    # A process reward model, from labelled steps. arXiv 2312.08935.
    "process-reward": {"loss": {"kind": "step-labels"}},
    # Pairs, compared with the model that training begins with. arXiv 2305.18290; the twins have the same defaults.
    "dpo": {"loss": {"kind": "dpo"}},
    "openrlhf-dpo": {"loss": {"kind": "dpo"}},
    "trl-dpo": {"loss": {"kind": "dpo"}},
    # arXiv 2310.12036, on means as in TRL; OpenRLHF's has average = false.
    "ipo": {"loss": {"kind": "dpo", "form": "ipo"}},
    # E. Mitchell, "A note on DPO with noisy preferences", 2023; arXiv 2403.00409. Both say that a tenth is wrong.
    "cdpo": {"loss": {"kind": "dpo", "label_smoothing": 0.1}},
    "robust-dpo": {"loss": {"kind": "dpo", "form": "robust", "label_smoothing": 0.1}},
    # Tulu 3, arXiv 2411.15124.
    "dpo-norm": {"loss": {"kind": "dpo", "average": True, "beta": 5.0}},
    # Pairs without a reference: arXiv 2405.14734, 2401.08417, 2403.07691.
    "simpo": {"loss": {"kind": "simpo"}},
    "cpo": {"loss": {"kind": "cpo"}, "sft_coef": 1.0},
    "orpo": {"loss": {"kind": "orpo"}, "sft_coef": 1.0},
    # Labelled answers: arXiv 2402.01306; the twin has the same defaults.
    "kto": {"loss": {"kind": "kto"}},
    "trl-kto": {"loss": {"kind": "kto"}},
}
"""The presets of runs of rows, as `PRESETS`."""
ROW_LOSSES: Final = ("nll", "dft", "distill")
"""Losses of the tokens that data has; those of whole answers train on rows, too."""
_NO_ENGINE: Final = "no engine samples"
_NO_UPDATE: Final = "no engine gets new weights"
_NO_AGENT: Final = "no agent attempts a task"
# Tables that rows do not read, and why.
_UNREAD_TABLES: Final = {
    "sampling": _NO_ENGINE,
    "rollout": _NO_ENGINE,
    "weights": _NO_UPDATE,
    "asynchrony": _NO_UPDATE,
    "reward": "no answer is scored",
    "reference": "reference services run another model than model.source, which reference.source names, for a loss "
    "that reads a reference or a teacher",
    "agents": _NO_AGENT,
    "gateway": _NO_AGENT,
    "environment": _NO_AGENT,
    "critic": "the advantage of a row is its weight",
}
_UNREAD_OF_ALGORITHM: Final = {
    "kl": "the loss has no reference",
    "correction": "no engine has log-probabilities to correct",
    "shaping": "a row has no score to shape",
    "filter": "a row has no group to compare with",
    "selection": "a row has no group to select from",
    "whiten": "the advantage of a row is its weight",
}
# Keys of [data] that only some losses read, by what the loss reads.
_FIELDS_OF: Final[Mapping[str, Sequence[str]]] = {
    "trajectories": ("weight_field",),
    "pairs": ("chosen_field", "rejected_field"),
    "labels": ("label_field",),
    "steps": ("label_field", "step_separator", "step_marker"),
}
_UNREAD_OF_DATA: Final = {
    "curriculum": "a row has no success rate",
    "columns": "no scorer reads metadata",
    "scorers_field": "no answer is scored",
    "answer_from_messages": "the answer of a row is trained on",
    "max_prompt_tokens": "model.max_context_tokens limits a row and data.too_long says what becomes of longer ones",
}


class RowKeys(Table):
    """The keys of [data] that a run of rows reads."""

    passes: float = Field(default=0.0, ge=0, le=10_000)
    """Passes over the rows, in place of `steps`: `fourfold run` counts the steps that they need, and writes both into
    the config.toml of the run. Services that are started by hand need both. 0: `steps` says it. With
    `batch.rows_per_step`."""
    form: Literal[
        "auto", "tokens", "messages", "glaive", "completion", "alpaca", "text",
        "pairs", "pairs-in-transcripts", "pairs-sharegpt", "labelled", "steps", "steps-in-text",
    ] = "auto"  # fmt: skip
    """Form of the rows. auto: recognised by their columns. With `batch.rows_per_step`."""
    loss_on: Literal["", "assistant", "completion", "last", "all"] = ""
    """Tokens in the loss. assistant: every answer of the assistant. completion: the answer that a row has as such.
    last: the last answer. all: all tokens. Empty: assistant for messages, else completion."""
    turns: Literal["all", "each"] = "all"
    """all: a conversation is one sample. each: every answer is one, with the prompt that an engine would get; for chat
    templates that write earlier turns in another way."""
    end: Literal["template", "token"] = "template"
    """End of an answer, which is in the loss. template: as the chat template writes it. token: the model's end token is
    added to a last answer without one."""
    too_long: Literal["", "drop", "cut", "split"] = ""
    """Rows above `model.max_context_tokens`. drop: they are left out. cut: they end there. split: a text without a
    prompt becomes several samples. Empty: split with the preset `pretrain`, else drop."""
    bad_rows: Literal["error", "drop"] = "error"
    """Rows with a wrong value, such as an unknown role. drop: they are left out and counted."""
    max_dropped: float = Field(default=0.05, ge=0, le=1)
    """Largest share of rows that may be left out for one reason."""
    trust_special_tokens: bool = False
    """Read the texts of special tokens in messages as these tokens. false: as plain text, so that no row forges a
    turn."""
    messages_field: str = ""
    """Column with the messages of a row. Empty: `messages` or `conversations`."""
    chosen_field: str = ""
    """Column with the preferred answer of a pair. Empty: `chosen`."""
    rejected_field: str = ""
    """Column with the other answer of a pair. Empty: `rejected`."""
    label_field: str = ""
    """Column that says whether a labelled answer is desirable: true or false, or 1 or 0. Empty: `label` or
    `kto_tag`. With `step_marker`, the column with the labels of the steps."""
    step_separator: str = ""
    """Text that is put after each labelled step, and after which the step has its score: `reward.model.steps` where the
    model is served. Empty: a blank line."""
    step_marker: str = ""
    """Text that ends each step in a text of several; its labels are in `label_field`, as a list, or as the same text
    with + or - in place of each mark."""
    weight_field: str = ""
    """Column with the weight of a row in the loss. Empty: each weighs 1."""
    cache: str = ""
    """Folder of the encoded rows, which runs share. Empty: `~/.cache/fourfold/tokens`."""

    @property
    def separator(self) -> str:
        """The text after each labelled step."""
        return self.step_marker or self.step_separator or STEP_SEPARATOR


def check_rows(config: Config) -> None:
    """Check a run of rows; ValueError has value, rule and fix of the first mistake."""
    rows = f"batch.rows_per_step = {config.batch.rows_per_step}"
    algorithm = config.algorithm
    if algorithm.loss.kind not in ROW_LOSSES and not algorithm.loss.of_answers:
        raise ValueError(
            f"{rows} trains on the answers of the data, and algorithm.loss.kind = `{algorithm.loss.kind}` is no loss "
            f"of such tokens; set algorithm.preset to one of {', '.join(ROW_PRESETS)}, or "
            f"batch.prompts_per_step in place of rows_per_step"
        )
    if algorithm.advantage.model_dump() != {"kind": "constant", "value": None} and not algorithm.loss.of_answers:
        raise ValueError(
            f"{rows}: algorithm.advantage.kind = `{algorithm.advantage.kind}` needs samples of the policy, and a row "
            f'has a weight; set kind = "constant" without `value`'
        )
    _check_unread(config)
    _check_step(config)
    if algorithm.loss.trains == "scores":
        _check_scores(config)
    if algorithm.loss.of_answers:
        _check_answers(config)
    only = "accuracy" if algorithm.loss.trains == "scores" else "loss"
    if config.evaluation.metric not in ("", only) and (only == "accuracy" or not algorithm.loss.of_answers):
        raise ValueError(
            f"evaluation.metric = `{config.evaluation.metric}` is not measured with algorithm.loss.kind = "
            f"`{algorithm.loss.kind}`, whose held-out rows have a score by their {only} alone; remove it"
        )
    if (holdout := config.data.holdout) is not None and (holdout.field or holdout.unordered_numbers):
        raise ValueError(
            f"data.holdout.field = `{holdout.field}` and unordered_numbers read metadata, which rows have not; set "
            f'field = "" and remove unordered_numbers: rows with the same prompt form a group'
        )
    for source in config.data.eval:
        given = (source.samples_per_prompt, source.temperature, source.max_new_tokens)
        if any(value is not None for value in given):
            raise ValueError(
                f"data.eval {source.title}: samples_per_prompt, temperature and max_new_tokens are for answers of "
                f"engines, and in a run of rows {_NO_ENGINE}; remove them"
            )


def _check_step(config: Config) -> None:
    rows = f"batch.rows_per_step = {config.batch.rows_per_step}"
    if config.placement.colocated:
        raise ValueError(
            f"placement.colocated = true shares GPUs with engines, and with {rows} {_NO_ENGINE}; remove it"
        )
    if config.batch.epochs_per_step > 1:
        raise ValueError(
            f"batch.epochs_per_step = {config.batch.epochs_per_step} trains on the rows of a step several times; with "
            f"{rows}, set data.passes"
        )
    if not config.steps and not config.data.passes:
        raise ValueError("`steps` and `data.passes` are missing or 0; set one of them")
    if config.algorithm.aggregation == "constant-length":
        raise ValueError(
            f"algorithm.aggregation = `constant-length` divides by sampling.max_new_tokens, and with {rows} "
            f"{_NO_ENGINE}; use `token-mean`"
        )
    if config.data.passes and any(source.weight is not None for source in config.data.train):
        raise ValueError(
            f"data.passes = {config.data.passes:g}: sources with a weight are drawn at different rates, so that a pass "
            f"has no end; set steps, or remove the weights"
        )


def _check_scores(config: Config) -> None:
    """Refuse keys of [data] that give a reward model other texts than those that it scores when it is used."""
    trust = () if config.algorithm.loss.reads == "steps" else ("trust_special_tokens",)  # a mark may be such a token
    for key in ("loss_on", "turns", "end", *trust):
        if (value := getattr(config.data, key)) != RowKeys.model_fields[key].get_default():
            raise ValueError(
                f"data.{key} = {value!r} has no effect on algorithm.loss.kind = `{config.algorithm.loss.kind}`: a "
                f"reward model scores the whole text, as the chat template writes it; remove it"
            )


def _check_answers(config: Config) -> None:
    """Check a run whose loss compares whole answers."""
    loss, data = config.algorithm.loss, config.data
    of_answers = f"algorithm.loss.kind = `{loss.kind}` reads {loss.reads}"
    advantage = config.algorithm.advantage
    if advantage != type(config.algorithm).model_fields["advantage"].get_default():
        raise ValueError(
            f"algorithm.advantage.kind = `{advantage.kind}` has no effect where {of_answers}, and no advantages; "
            f"remove it"
        )
    if data.loss_on not in ("", "completion") and (loss.reads, data.loss_on) != ("pairs", "assistant"):
        raise ValueError(
            f"data.loss_on = `{data.loss_on}` has no effect where {of_answers}: the answer is in the loss; remove it"
        )
    if loss.measures_distance and config.batch.rows_per_step < 2:
        raise ValueError(
            f"batch.rows_per_step = {config.batch.rows_per_step}, and algorithm.loss.kind = `{loss.kind}` joins "
            f"prompts with the answers of other rows of the step; set it to at least 2"
        )
    if loss.measures_distance and any(source.weight is not None for source in data.train):
        raise ValueError(
            f"data.train: algorithm.loss.kind = `{loss.kind}` joins prompts with the answers of other rows, which "
            f"change from step to step where sources have weights, and their reference is computed before step 1; "
            f"remove the weights"
        )


def _check_unread(config: Config) -> None:
    """Refuse tables and keys that rows do not read."""
    for prefix, table, unread in (
        ("", config, _UNREAD_TABLES),
        ("algorithm.", config.algorithm, _UNREAD_OF_ALGORITHM),
        ("data.", config.data, _UNREAD_OF_DATA),
    ):
        fields = type(table).model_fields
        for key, reason in unread.items():
            if key == "reference" and config.needs_reference:
                continue
            value, default = getattr(table, key), fields[key].get_default()
            if value != default:
                raise ValueError(
                    f"`{prefix}{key}{_changed_key(value, default)}` has no effect in a run of rows "
                    f"(batch.rows_per_step): {reason}; remove it"
                )
    loss = config.algorithm.loss
    for names in _FIELDS_OF.values():
        unread_fields = [name for name in names if name not in _FIELDS_OF[loss.reads]]
        if given := next((name for name in unread_fields if getattr(config.data, name)), None):
            read = {"trajectories": "answers", "labels": "labelled answers", "steps": "labelled steps"}
            raise ValueError(
                f"`data.{given}` has no effect in this run: algorithm.loss.kind = `{loss.kind}` reads "
                f"{read.get(loss.reads, loss.reads)}; remove it"
            )


def _changed_key(value: object, default: object) -> str:
    """Return the first key of a table that differs from its default, as ".replicas"; empty for what is no table."""
    if not isinstance(value, Table) or not isinstance(default, Table):
        return ""
    changed = (name for name, one in value if one != getattr(default, name, one))
    return "".join(f".{name}" for name in itertools.islice(changed, 1))


def check_no_rows(config: Config) -> None:
    """Refuse keys of rows in a run with engines, and what such a run lacks."""
    if not config.steps:
        raise ValueError("`steps` is missing or 0; set it to at least 1")
    if not config.sampling.max_new_tokens:
        raise ValueError("`sampling.max_new_tokens` is missing or 0; set it to at least 1")
    if config.algorithm.preset in ROW_PRESETS:
        raise ValueError(
            f'algorithm.preset = "{config.algorithm.preset}" trains on the answers of the data; set '
            f"batch.rows_per_step in place of prompts_per_step and group_size"
        )
    if (loss := config.algorithm.loss).trains == "scores" or loss.teacher_tokens:
        raise ValueError(
            f"algorithm.loss.kind = `{loss.kind}` trains on rows of the data, not on samples; set "
            f"batch.rows_per_step in place of prompts_per_step and group_size"
        )
    if metric := config.evaluation.metric:
        raise ValueError(
            f"evaluation.metric = `{metric}` is for held-out rows, and this run scores sampled answers; remove it, or "
            f"set batch.rows_per_step in place of prompts_per_step"
        )
    for key, field in RowKeys.model_fields.items():
        if (value := getattr(config.data, key)) != field.get_default():
            raise ValueError(
                f"data.{key} = {value!r} is for rows whose answers are trained on; set batch.rows_per_step in place of "
                f"prompts_per_step, or remove it"
            )
