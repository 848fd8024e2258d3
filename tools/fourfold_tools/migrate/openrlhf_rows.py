"""Lists the flags of OpenRLHF's `train_sft`, `train_rm` and `train_dpo`, version 0.11, and converts them.

Flags that `train_ppo_ray` has, too, are in `openrlhf.py`; what becomes of them is in `openrlhf_shared.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from fourfold_tools.migrate import common
from fourfold_tools.migrate import openrlhf_shared as shared
from fourfold_tools.migrate.common import Options
from fourfold_tools.migrate.draft import Draft
from fourfold_tools.migrate.flags import Flag, row, table_of
from fourfold_tools.migrate.openrlhf import TABLE, model_rows, optimizer_rows

_SHARED: Final = (
    "train.seed", "train.full_determinism_enable", "data.apply_chat_template", "data.disable_fast_tokenizer",
    "data.dataloader_num_workers", "use_ms", "local_rank", "bf16", "flash_attn",
)  # fmt: skip
_NOT_SHARED: Final = ("ds.enable_sleep", "ds.use_liger_kernel", "ds.value_head_prefix", "ckpt.best_metric_key")
_NO_EVALUATION: Final = "not needed: the command evaluates nothing without eval.dataset"
_TEMPLATE: Final = "no equivalent: rows are read as they are; write their prompts with the template"


def _rows(trainer: str, *, rate: float, passes: int, micro: int, context: int, split: str = "train") -> list[Flag]:
    """Return the flags that the three trainers have, with the defaults of one."""
    shared_rows = [
        flag
        for name, flag in TABLE.items()
        if name in _SHARED or (name.startswith(("ds.", "ckpt.", "logger.")) and name not in _NOT_SHARED)
    ]
    return [
        *shared_rows,
        dataclasses.replace(TABLE["logger.wandb.project"], default=f"openrlhf_train_{trainer}"),
        *model_rows("model."),
        *optimizer_rows("", "trainer", rate),
        row("train.batch_size", "int", 128, "batch.rows_per_step", older="train_batch_size"),
        row("train.micro_batch_size", "int", micro, "batch.tokens_per_micro_batch", "samples x data.max_len",
             older="micro_train_batch_size"),
        row("train.max_epochs", "int", passes, "data.passes", "with data.dataset_probs: steps", older="max_epochs"),
        row("data.max_len", "int", context, "model.max_context_tokens, data.too_long", "longer rows are cut",
             older="max_len"),
        row("data.dataset", "text", None, "data.train.path",
             "a name of the hub: hf:NAME; several: a table [[data.train]] each", older="dataset"),
        row("data.dataset_probs", "text", None, "data.train.weight", "of several sources", older="dataset_probs"),
        row("data.dataset_split", "text", "train", "data.train.split", "of data sets of the hub",
             older="dataset_split train_split"),
        row("data.max_samples", "int", 1_000_000, "data.train.size", "if given", older="max_samples"),
        row("data.tokenizer_chat_template", "text", None, "",
             "no equivalent: change the chat template of the model's folder", older="tokenizer_chat_template"),
        row("eval.dataset", "text", None, "data.eval.path", "a name of the hub: hf:NAME", older="eval_dataset"),
        row("eval.split", "text", split, "data.eval.split", "of data sets of the hub", older="eval_split"),
        row("eval.steps", "int", -1, "evaluation.every_steps", "with eval.dataset; -1, once per pass: 10",
             older="eval_steps"),
    ]  # fmt: skip


_SFT: Final = [
    TABLE["ds.use_liger_kernel"],
    row("model.pretrain_mode_enable", "bool", False, "algorithm.preset, data.form", "true: pretrain, with the texts of "
         "input_key", older="pretrain_mode"),
    row("data.input_key", "text", "input", "data.prompt_field, data.messages_field, data.answer_field",
         "the messages, with apply_chat_template and without output_key; the text, with pretrain_mode_enable",
         older="input_key"),
    row("data.output_key", "text", None, "data.answer_field", older="output_key"),
    row("data.input_template", "text", "User: {}\nAssistant: ", "data.train.template",
         "{} becomes {input_key}; not with apply_chat_template", older="input_template"),
    row("data.multiturn", "bool", False, "data.loss_on", "true: assistant. false: the last answer", older="multiturn"),
]  # fmt: skip

_PAIRS: Final = [
    row("data.prompt_key", "text", None, "data.prompt_field", older="prompt_key"),
    row("data.chosen_key", "text", "chosen", "data.chosen_field", older="chosen_key"),
    row("data.rejected_key", "text", "rejected", "data.rejected_field", older="rejected_key"),
    row("data.input_template", "text", None, "", _TEMPLATE, older="input_template"),
]  # fmt: skip

_RM: Final = [
    *_PAIRS,
    TABLE["ds.value_head_prefix"],
    row("model.loss_type", "text", "sigmoid", "algorithm.loss.kind", "bradley-terry, which all of them are",
         older="loss"),
    row("model.margin_loss_enable", "bool", False, "algorithm.loss.margin", older="margin_loss"),
    row("model.compute_fp32_loss_enable", "bool", False, "", "not needed: scores are float32",
         older="compute_fp32_loss"),
]  # fmt: skip

_DPO: Final = [
    *_PAIRS,
    TABLE["ds.use_liger_kernel"],
    row("model.beta", "float", 0.1, "algorithm.loss.beta", older="beta"),
    row("model.ipo_enable", "bool", False, "algorithm.loss.form", "true: ipo, of sums. false: sigmoid", older="ipo"),
    row("model.label_smoothing", "float", 0.0, "algorithm.loss.label_smoothing", "not with ipo_enable",
         older="label_smoothing"),
    row("model.nll_loss_coef", "float", 0.0, "algorithm.sft_coef", older="nll_loss_coef"),
    row("ref.model_name_or_path", "text", None, "reference.source", common.REFERENCE, older="ref_pretrain"),
    row("ref.offload", "bool", False, "", "not needed: the reference is computed before the first step",
         older="ref_offload"),
]  # fmt: skip

TABLES: Final[Mapping[str, Mapping[str, Flag]]] = {
    "train_sft": table_of([*_rows("sft", rate=5e-6, passes=2, micro=8, context=2048), *_SFT]),
    "train_rm": table_of([*_rows("rm", rate=9e-6, passes=1, micro=1, context=512), *_RM]),
    "train_dpo": table_of([*_rows("dpo", rate=1e-5, passes=1, micro=8, context=512, split="test"), *_DPO]),
}
"""The flags by trainer."""


def convert(draft: Draft, options: Options, launcher: str) -> None:
    """Convert the flags of a trainer whose data has the answers; `launcher` has the words before its program."""
    flags = draft.flags
    context = common.require(flags["data.max_len"], flags.title("data.max_len"), 8)
    rows = common.require(flags["train.batch_size"], flags.title("train.batch_size"))
    micro = common.require(flags["train.micro_batch_size"], flags.title("train.micro_batch_size"))
    common.ranks(draft, options, launcher)
    draft.set("batch.rows_per_step", rows, "train.batch_size")
    draft.set("model.max_context_tokens", context, "data.max_len")
    draft.set("data.too_long", "cut", "data.max_len")
    if flags["data.apply_chat_template"] and "ds.value_head_prefix" not in flags.table:
        draft.set("data.end", "token", note="OpenRLHF ends each row so")
    longest = 2 * context if "data.chosen_key" in flags.table else context  # a pair stays in one micro-batch
    wanted, names = micro * longest * shared.sequence_parallel(draft), ("train.micro_batch_size", "data.max_len")
    common.tokens(draft, "batch.tokens_per_micro_batch", wanted, longest, *names)
    common.model(draft, "model.source", flags["model.model_name_or_path"], "model.model_name_or_path")
    template = _template(draft)
    shared.train_sources(draft, "data.dataset", "data.dataset_probs", "data.dataset_split", template)
    (_pairs if longest > context else _answers)(draft)
    passes = common.require(flags["train.max_epochs"], flags.title("train.max_epochs"))
    counted = flags["lr_scheduler"] != "constant" and flags["lr_warmup_ratio"] > 0
    limit = flags["data.max_samples"] if flags.given("data.max_samples") else 0
    count = common.row_steps(draft, options, limit=limit, passes=passes, names=["train.max_epochs"], counted=counted)
    shared.rates(draft, "", "trainer", count)
    shared.optimizer(draft, "")
    shared.deepspeed(draft)
    _evaluation(draft, template)
    shared.checkpoints_and_trackers(draft)


def _answers(draft: Draft) -> None:
    """Set the columns, and what is in the loss, of `train_sft`."""
    flags = draft.flags
    prompt, answer, several = "data.input_key", "data.output_key", "data.multiturn"
    chat, texts = "data.apply_chat_template", flags["model.pretrain_mode_enable"]
    messages = flags[chat] and not flags[answer] and not texts
    draft.set("algorithm.preset", "pretrain" if texts else "openrlhf-sft", "model.pretrain_mode_enable")
    if texts:
        draft.set("data.form", "text", "model.pretrain_mode_enable")
        draft.leave("not needed: a text has no answer", answer, several, chat)
    elif flags[several] or messages:
        draft.set("data.loss_on", "assistant" if flags[several] else "last", several)
    key = "messages_field" if messages else "answer_field" if texts else "prompt_field"
    draft.set(f"data.{key}", flags[prompt], prompt)
    if not flags[answer] and not texts and not messages:
        draft.set("data.answer_field", "output", answer)
        draft.check("data.answer_field: the command has no data.output_key; write the column of the answers")


def _template(draft: Draft) -> str | None:
    """Return the template of the prompts of `train_sft`; None if it does not apply."""
    flags, name = draft.flags, "data.input_template"
    if "data.input_key" not in flags.table:
        return None
    unused = flags["data.apply_chat_template"] or flags["model.pretrain_mode_enable"] or not flags[name]
    template = None if unused else common.template(draft, flags[name], flags["data.input_key"])
    if not template:
        draft.leave("not needed with a chat template or texts; see the points to check", name)
    return template


def _pairs(draft: Draft) -> None:
    """Set the loss of `train_dpo` or `train_rm`."""
    flags, names = draft.flags, ("model.ipo_enable", "model.label_smoothing", "ref.model_name_or_path")
    if "model.beta" not in flags.table:
        draft.set("algorithm.preset", "openrlhf-rm")
        draft.set("algorithm.loss.kind", "bradley-terry", "model.loss_type")
        return
    ipo, smoothing, reference = (flags[name] for name in names)
    draft.set("algorithm.preset", "openrlhf-dpo")
    draft.set("algorithm.loss.form", "ipo" if ipo else "sigmoid", names[0])
    draft.set("algorithm.loss.average", False, names[0])
    if ipo:
        draft.leave("not needed: ipo has no label smoothing", names[1])
    else:
        draft.set("algorithm.loss.label_smoothing", smoothing, names[1])
    common.reference(draft, reference, names[2], "model.model_name_or_path")


def _evaluation(draft: Draft, template: str | None) -> None:
    """Set the held-out sets."""
    flags, names = draft.flags, ("eval.dataset", "eval.split", "eval.steps")
    if not flags[names[0]]:
        draft.leave(_NO_EVALUATION, *names)
        return
    keys, every = {"split": (flags[names[1]], names[1])}, flags[names[2]]
    keys |= {"template": (template, "data.input_template")} if template else {}
    paths = [part.strip() for part in flags[names[0]].split(",")]
    common.sources(draft, "data.eval", [{"path": (path, names[0]), **keys} for path in paths])
    note = "" if every > 0 else "OpenRLHF: once per pass"
    draft.set("evaluation.every_steps", every if every > 0 else 10, names[2], note=note)
