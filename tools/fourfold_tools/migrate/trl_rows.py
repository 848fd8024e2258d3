"""Lists the options of TRL's SFT, DPO, KTO and reward trainers, version 1.16, and converts them.

Options that all trainers have are in `trl.py`; what becomes of them is in `trl_shared.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fourfold.errors import ConfigError
from fourfold.text import clean
from fourfold_tools.migrate import common
from fourfold_tools.migrate import trl_shared as shared
from fourfold_tools.migrate.common import Options
from fourfold_tools.migrate.draft import Draft
from fourfold_tools.migrate.flags import Flag, row, table_of, unconverted
from fourfold_tools.migrate.trl import SHARED

_CONTEXT: Final = 32_768
_FORMS: Final = {
    "sigmoid": "sigmoid", "sigmoid_norm": "sigmoid", "hinge": "hinge", "ipo": "ipo", "robust": "robust",
    "apo_zero": "apo-zero", "apo_down": "apo-down",
}  # fmt: skip
_TEMPLATE: Final = "no equivalent: change the chat template of the model's folder"


def _rows(rate: float, *, order: str = "random", too_long: str = "cut") -> list[Flag]:
    """Return the options that these trainers have, with the defaults of one."""
    return [
        *SHARED,
        row("per_device_train_batch_size", "int", 8, "batch.rows_per_step, batch.tokens_per_micro_batch",
             "x processes x gradient_accumulation_steps"),
        row("gradient_accumulation_steps", "int", 1, "batch.rows_per_step", "see per_device_train_batch_size"),
        row("num_train_epochs", "float", 3.0, "data.passes", "without max_steps"),
        row("learning_rate", "float", rate, "trainer.learning_rate"),
        row("router_aux_loss_coef", "float", None, "trainer.router_aux_loss_coef"),
        row("max_length", "int", 1024, "model.max_context_tokens, data.too_long",
             f"longer rows: {too_long}. null, no limit: {_CONTEXT}", older="max_seq_length"),
        row("truncation_mode", "text", "keep_start", "", "no equivalent of keep_end: rows are cut at their end",
             values=("keep_start", "keep_end")),
        row("train_sampling_strategy", "text", order, "data.order", "sequential: file. random: shuffled"),
        *unconverted("not needed: every pass has an order of its own", "shuffle_dataset"),
        *unconverted("not needed: rows are encoded once, on all cores", "dataset_num_proc"),
        *unconverted("not needed: samples are always packed, without padding", "padding_free eval_packing pad_token"),
        *unconverted("no equivalent: use trainer.gradient_checkpointing", "activation_offloading"),
        *unconverted("no equivalent: end tokens are those of the model's folder", "eos_token"),
        *unconverted(_TEMPLATE, "chat_template_path chat_template"),
    ]  # fmt: skip


_SFT: Final = [
    row("loss_type", "text", "nll", "algorithm.preset", "nll, chunked_nll: trl-sft. dft: dft",
         values=("nll", "dft", "chunked_nll")),
    row("packing", "bool", False, "data.too_long", "with packing_strategy bfd_split or wrapped: split"),
    row("packing_strategy", "text", "bfd", "data.too_long", "with packing"),
    row("completion_only_loss", "bool", None, "data.loss_on", "true: completion. false: all"),
    row("assistant_only_loss", "bool", False, "data.loss_on", "true: assistant"),
    row("dataset_text_field", "text", "text", "data.answer_field, data.form", "if given: that column, as text"),
    *unconverted("no equivalent: rows are always prepared", "dataset_kwargs"),
]  # fmt: skip

_COMPARED: Final = [
    row("beta", "float", 0.1, "algorithm.loss.beta"),
    row("ref_model", "text", None, "reference.source", common.REFERENCE),
    *unconverted("not needed: the reference is computed before the first step",
                 "precompute_ref_log_probs precompute_ref_batch_size"),
]  # fmt: skip

_DPO: Final = [
    *_COMPARED,
    row("loss_type", "texts", ("sigmoid",), "algorithm.loss.form, algorithm.loss.average, algorithm.sft_coef",
         "sigmoid, hinge, ipo, robust, apo_zero, apo_down: form. sigmoid_norm: sigmoid with average. Beside one of "
         "them, sft: sft_coef"),
    row("loss_weights", "any", None, "algorithm.sft_coef", "weight of sft / weight of the other loss_type"),
    row("label_smoothing", "float", 0.0, "algorithm.loss.label_smoothing", "with robust"),
    row("ld_alpha", "float", None, "algorithm.loss.ld_alpha"),
    *unconverted("no equivalent: the divergence is the reverse KL", "f_divergence_type f_alpha_divergence_coef"),
    *unconverted("no equivalent: each pair has the same weight", "use_weighting"),
    *unconverted("not needed: it belongs to the loss discopop", "discopop_tau"),
]  # fmt: skip

_KTO: Final = [
    *_COMPARED,
    row("loss_type", "text", "kto", "algorithm.preset", "kto: trl-kto. apo_zero_unpaired has no equivalent",
         values=("kto",)),
    row("desirable_weight", "float", 1.0, "algorithm.loss.desirable_weight"),
    row("undesirable_weight", "float", 1.0, "algorithm.loss.undesirable_weight"),
]  # fmt: skip

_REWARD: Final = [
    row("center_rewards_coefficient", "float", None, "algorithm.loss.center_coef"),
]  # fmt: skip

TABLES: Final[Mapping[str, Mapping[str, Flag]]] = {
    "sft": table_of([*_rows(2e-5), *_SFT]),
    "dpo": table_of([*_rows(1e-6), *_DPO]),
    "reward": table_of([*_rows(1e-4, too_long="drop"), *_REWARD]),
    "kto": table_of([*_rows(1e-6, order="sequential"), *_KTO]),
}
"""The options by trainer."""


def convert(draft: Draft, options: Options, trainer: str) -> None:
    """Convert the options of a trainer whose data has the answers, after `trl_shared.processes`."""
    flags = draft.flags
    ranks = draft.lines["trainer",]["ranks"].value
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    each, accumulated = (common.require(flags[name], name) for name in names)
    draft.set("batch.rows_per_step", each * ranks * accumulated, *names, note=f"{ranks} processes")
    context = common.require(flags["max_length"] or _CONTEXT, "max_length", 8)
    draft.set("model.max_context_tokens", context, "max_length")
    if not flags["max_length"]:
        draft.check(f"model.max_context_tokens = {context}: max_length is null, and a limit is needed; choose yours")
    longest = 2 * context if trainer in ("dpo", "reward") else context  # a pair stays in one micro-batch
    common.tokens(draft, "batch.tokens_per_micro_batch", each * longest, longest, names[0], "max_length")
    draft.set("data.too_long", "drop" if trainer == "reward" else "cut", "max_length")
    shared.model_and_sources(draft)
    draft.check(shared.PLAIN_TEXTS)
    order = "train_sampling_strategy"
    draft.set("data.order", "file" if flags[order] == "sequential" else "shuffled", order)
    if trainer == "sft":
        _answers(draft)
    else:
        draft.set("algorithm.preset", f"trl-{trainer}", *(["loss_type"] if trainer == "kto" else []))
    if "ref_model" in flags.table:
        common.reference(draft, flags["ref_model"], "ref_model", "model_name_or_path")
    if trainer == "dpo":
        _preferences(draft)
    fixed = max(flags["max_steps"], 0)
    shares = (shared.warmup_share(draft), flags["save_steps"], flags["eval_steps"])
    count = common.row_steps(
        draft, options, limit=0, passes=flags["num_train_epochs"], fixed=fixed,
        names=["max_steps" if fixed else "num_train_epochs"], counted=any(0 < (share or 0) < 1 for share in shares),
    )  # fmt: skip
    other = "num_train_epochs" if fixed else "max_steps"
    draft.leave("not needed: the other option of the length counts", other)
    shared.rates(draft, count)
    shared.dtype(draft)
    shared.lora(draft)
    shared.evaluation_and_checkpoints(draft, count)


def _answers(draft: Draft) -> None:
    """Set what is in the loss of SFT."""
    flags = draft.flags
    kind, packing, strategy, column = "loss_type", "packing", "packing_strategy", "dataset_text_field"
    completion, assistant = "completion_only_loss", "assistant_only_loss"
    draft.set("algorithm.preset", "dft" if flags[kind] == "dft" else "trl-sft", kind)
    if flags[packing]:
        draft.check(
            "batch.rows_per_step counts rows; with packing, TRL counts sequences of max_length tokens, each of several "
            "rows: multiply it by max_length / mean tokens of a row"
        )
    if flags[packing] and flags[strategy] != "bfd":
        draft.set("data.too_long", "split", packing, strategy)
    else:
        draft.leave("not needed: rows are cut at max_length", packing, strategy)
    if flags.given(column):
        draft.set("data.answer_field", flags[column], column)
        draft.set("data.form", "text", column)
    loss_on = "assistant" if flags[assistant] else {True: "completion", False: "all", None: ""}[flags[completion]]
    draft.set("data.loss_on", loss_on, assistant, completion)
    if not loss_on:
        draft.check(
            "data.loss_on: TRL has all tokens of messages in the loss, here those of the assistant alone are; set all "
            "to train as TRL does"
        )


def _preferences(draft: Draft) -> None:
    """Set the loss of DPO.

    Raises:
        ConfigError: the loss has no equivalent.
    """
    flags = draft.flags
    kinds, weights = list(flags["loss_type"]), flags["loss_weights"]
    form = next((kind for kind in kinds if kind in _FORMS), "")
    try:
        shares = dict(zip(kinds, map(float, weights or [1.0] * len(kinds)), strict=True))
    except (TypeError, ValueError):
        shares = {}
    if not shares.keys() <= {form, "sft"} or shares.get(form, 0.0) <= 0 or min(shares.values()) < 0:
        raise ConfigError(
            f"loss_type = {', '.join(kinds)} with loss_weights = {clean(str(weights), 80)} has no equivalent; give one "
            f"of {', '.join(_FORMS)}, alone or with sft, and a number as weight of each"
        )
    draft.set("algorithm.loss.form", _FORMS[form], "loss_type")
    draft.set("algorithm.loss.average", form in ("ipo", "sigmoid_norm"), "loss_type")
    draft.set("algorithm.sft_coef", shares.get("sft", 0.0) / shares[form], "loss_type", "loss_weights")
    if form == "robust":
        draft.set("algorithm.loss.label_smoothing", flags["label_smoothing"], "label_smoothing")
    else:
        draft.leave("not needed: in TRL, robust alone reads it", "label_smoothing")
