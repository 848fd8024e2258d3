"""Converts the options that all trainers of TRL have: processes, model, data, optimizer, LoRA, checkpoints."""

from __future__ import annotations

import math
import re
from typing import Any, Final

from fourfold_tools.migrate import common
from fourfold_tools.migrate.common import Options
from fourfold_tools.migrate.draft import Draft

PLAIN_TEXTS: Final = (
    "data.chat = true: TRL applies the chat template to lists of messages alone; set false for plain texts"
)
_STAGE: Final = re.compile(r"(?:zero|stage)[^a-z0-9]{0,4}([0-3])")


def processes(draft: Draft, options: Options, launcher: str) -> None:
    """Set the ranks and the stage of ZeRO; `launcher` has the words before the program."""
    flags = draft.flags
    count, why = flags["num_processes"] or 0, ", with which the batch grows"
    common.ranks(draft, options, launcher, "num_processes", given=count, why=why)
    if options.processes or not flags["num_processes"]:
        draft.leave("not needed: the number of processes is known", "num_processes")
    given = flags["deepspeed_config"]
    if not isinstance(given, dict):
        given = {"deepspeed_config_file": given} if given else {}
    file = flags["deepspeed"] or given.get("deepspeed_config_file")
    stage = _STAGE.search(f"{file} zero{given.get('zero_stage', '')} {launcher}".lower())
    names = ["deepspeed_config"] if given else ["deepspeed"]
    draft.set("trainer.zero_stage", max(int(stage[1]), 1) if stage else 1, *names)
    if given.get("offload_optimizer_device") == "cpu":
        whole = given.get("offload_param_device") == "cpu"
        draft.set("trainer.offload", "optimizer+parameters" if whole else "optimizer", "deepspeed_config")
    if flags.given("compute_environment") and not flags["model_name_or_path"]:
        draft.check(
            "the file is one of accelerate, with processes and ZeRO stage alone; import that of the training, too"
        )
    if file and not stage:
        draft.check("trainer.zero_stage = 1: the name of the DeepSpeed file has no stage; write that of the file")


def warmup_share(draft: Draft) -> float:
    """Return the warm-up as a share of the steps; 0 if it is none, or a number of them."""
    given, ratio = draft.flags["warmup_steps"] or 0.0, draft.flags["warmup_ratio"] or 0.0
    return float(given if 0 < given < 1 else 0.0 if given else ratio)


def rates(draft: Draft, count: int, updates: int = 1) -> None:
    """Set the optimizer's rates over `count` steps, each with so many updates."""
    flags = draft.flags
    kind = str(flags["lr_scheduler_type"]).rpartition(".")[2].lower()
    share = warmup_share(draft)
    warmup = common.warmup_steps(share, count) if share else math.ceil((flags["warmup_steps"] or 0.0) / updates)
    more = flags["lr_scheduler_kwargs"] if isinstance(flags["lr_scheduler_kwargs"], dict) else {}
    final = float(more.get("min_lr_rate", 0.0)) if kind == "cosine_with_min_lr" else 0.0
    if "min_lr" in more and kind == "cosine_with_min_lr":
        final = float(more["min_lr"]) / flags["learning_rate"]
    common.schedule(
        draft, "trainer", kind, ["lr_scheduler_type"], warmup=warmup,
        warmup_names=["warmup_ratio" if share and share == flags["warmup_ratio"] else "warmup_steps"],
        final=final, final_names=["lr_scheduler_kwargs"],
    )  # fmt: skip
    for name in ("warmup_steps", "warmup_ratio"):
        if name not in draft.converted:
            draft.leave("not needed: the other option of the warm-up counts", name)
    draft.set("trainer.adam_betas", [flags["adam_beta1"], flags["adam_beta2"]], "adam_beta1", "adam_beta2")
    common.gradient_limit(draft, "trainer.max_grad_norm", flags["max_grad_norm"], "max_grad_norm")
    if flags.given("router_aux_loss_coef") and flags["router_aux_loss_coef"] is not None:
        draft.set("trainer.router_aux_loss_coef", flags["router_aux_loss_coef"], "router_aux_loss_coef")


def dtype(draft: Draft) -> None:
    """Set the type of the weights."""
    flags = draft.flags
    draft.set("model.dtype", "bfloat16" if flags["bf16"] is not False or flags["fp16"] else "float32", "bf16", "fp16")
    if flags["cast_lm_head_to_fp32"]:
        draft.set("model.head_dtype", "float32", "cast_lm_head_to_fp32")
    if flags["fp16"]:
        draft.check("model.dtype = bfloat16: float16 has no equivalent")


def lora(draft: Draft) -> None:
    """Set the adapters."""
    flags = draft.flags
    names = ("lora_r", "lora_alpha", "lora_target_modules", "use_rslora")
    if not flags["use_peft"]:
        draft.set("trainer.lora.rank", 0, "use_peft")
        draft.leave("not needed without use_peft", *names, "lora_dropout")
        return
    draft.set("trainer.lora.rank", flags["lora_r"], "use_peft", "lora_r")
    draft.set("trainer.lora.alpha", flags["lora_alpha"], "lora_alpha")
    modules = flags["lora_target_modules"]
    draft.set("trainer.lora.target_modules", list(modules) or ["q_proj", "v_proj"], "lora_target_modules")
    draft.set("trainer.lora.use_rslora", flags["use_rslora"], "use_rslora")
    if not modules:
        draft.check("trainer.lora.target_modules: PEFT's default depends on the architecture; all-linear learns more")
    if flags["lora_dropout"]:
        draft.check("trainer.lora: there is no dropout, which would make log-probabilities random")


def model_and_sources(draft: Draft) -> None:
    """Set the model and the sources of the training data."""
    flags = draft.flags
    source, revision = flags["model_name_or_path"], flags["model_revision"]
    if source and revision and common.is_hub_name(source):
        common.model(draft, "model.source", f"{source}@{revision}", "model_name_or_path", "model_revision")
    else:
        common.model(draft, "model.source", source, "model_name_or_path")
        draft.leave("not needed: a folder has no revisions", "model_revision")
    mixture, name, (path, config) = flags["datasets"], "datasets", ("path", "name")
    sources: list[dict[str, tuple[Any, str]]] = []
    if isinstance(flags["dataset_mixture"], dict):
        name, (path, config) = "dataset_mixture", ("id", "config")
        mixture = flags[name].get("datasets")
        draft.check("data.train: a weight of dataset_mixture is the share of the rows that open-r1 draws; write size")
    if isinstance(mixture, list | tuple) and mixture:
        for part in (part for part in mixture if isinstance(part, dict) and part.get(path)):
            found = {"path": part[path], "split": part.get("split") or "train", "config": part.get(config)}
            sources.append({key: (value, name) for key, value in found.items()})
        draft.leave(f"not needed: {name} is set", "dataset_name", "dataset_config", "dataset_train_split")
    elif flags["dataset_name"]:
        names = {"path": "dataset_name", "split": "dataset_train_split", "config": "dataset_config"}
        sources.append({key: (flags[flag], flag) for key, flag in names.items()})
    common.sources(draft, "data.train", sources)


def evaluation_and_checkpoints(draft: Draft, count: int, updates: int = 1, samples: str = "") -> None:
    """Set evaluations and checkpoints, of `count` steps with so many updates; `samples` are those of a prompt."""
    flags = draft.flags

    def every(value: float | None) -> int:
        share = value or 0.0
        return max(math.ceil(share * count) if 0 < share < 1 else math.ceil(share / updates), 1)

    if flags["eval_strategy"] == "no":
        unused = ("eval_steps", *filter(None, [samples]), "dataset_test_split", "eval_dataset")
        draft.leave("not needed: eval_strategy is no", *unused)
        draft.set("evaluation.every_steps", 10, "eval_strategy")
    else:
        steps = every(flags["eval_steps"]) if flags["eval_steps"] else 10
        draft.set("evaluation.every_steps", steps, "eval_strategy", "eval_steps")
        if samples:
            number = flags[samples] or flags["num_generations"]
            draft.set("evaluation.samples_per_prompt", number, samples)
        _held_out(draft)
    saves = flags["save_strategy"] == "steps"
    draft.set("checkpoint.every_steps", every(flags["save_steps"]) if saves else 10, "save_strategy", "save_steps")
    if flags["save_total_limit"]:
        draft.set("checkpoint.keep", flags["save_total_limit"], "save_total_limit")


def _held_out(draft: Draft) -> None:
    """Set the held-out set: one of its own, or another split of the training data."""
    flags = draft.flags
    name = "eval_dataset" if flags["eval_dataset"] else "dataset_name"
    keys = {"path": (flags[name], name), "split": (flags["dataset_test_split"], "dataset_test_split")}
    if name == "dataset_name":
        keys["config"] = (flags["dataset_config"], "dataset_config")
    common.sources(draft, "data.eval", [keys] if flags[name] else [])
    if flags[name] == flags["dataset_name"] and not common.is_hub_name(flags[name] or ""):
        draft.check("data.eval.path: it is the file of the training data, which has no splits; write a held-out file")
