"""Converts the flags that all trainers of OpenRLHF have: data, optimizer, DeepSpeed, LoRA, checkpoints, trackers."""

from __future__ import annotations

from typing import Final

from fourfold_tools.migrate import common
from fourfold_tools.migrate.draft import Draft

_SINKS: Final = {"tensorboard": "logger.tensorboard_dir", "wandb": "logger.wandb.key"}
_LOGGING_KEYS: Final = {
    "logging.tensorboard_dir": "logger.tensorboard_dir",
    "logging.wandb_entity": "logger.wandb.org",
    "logging.group": "logger.wandb.group",
    "logging.project": "logger.wandb.project",
}


def sequence_parallel(draft: Draft) -> int:
    """Set the size of sequence parallelism, and return it."""
    ring = int(draft.flags["ds.ring_attn_size"])
    draft.set("trainer.sequence_parallel_size", ring, "ds.ring_attn_size")
    if ring > 1:
        draft.check(
            f"trainer.sequence_parallel_size = {ring} is Ulysses in place of ring attention; it must divide the "
            f"attention heads of the model, which `fourfold plan` checks"
        )
    return ring


def rates(draft: Draft, prefix: str, table: str, count: int) -> None:
    """Set the learning rate over `count` steps and the clip of gradients; `prefix` is that of `optimizer_rows`."""
    flags = draft.flags
    names = ("lr_scheduler", "lr_warmup_ratio", "min_lr_ratio", "max_norm")
    kind, warmup, least, limit = (f"{prefix}{name}" for name in names)
    common.schedule(
        draft, table, flags[kind], [kind], warmup=common.warmup_steps(flags[warmup], count), warmup_names=[warmup],
        final=flags[least] if flags[kind] == "cosine_with_min_lr" else 0.0, final_names=[least],
    )  # fmt: skip
    common.gradient_limit(draft, f"{table}.max_grad_norm", flags[limit], limit)


def optimizer(draft: Draft, prefix: str) -> None:
    """Set the optimizer of the model that is trained."""
    flags, momentum = draft.flags, f"{prefix}muon.momentum"
    muon = flags[f"{prefix}optim"] == "muon"
    draft.set("trainer.optimizer", "muon" if muon else "adamw", f"{prefix}optim")
    if muon:
        draft.set("trainer.muon_momentum", flags[momentum], momentum)
        draft.check(
            f"trainer.learning_rate = {flags[f'{prefix}adam.lr']} is that of AdamW: a Muon update has the size of an "
            f"AdamW update here, where OpenRLHF has a rate of its own for Muon ({flags[f'{prefix}muon.lr']})"
        )
    else:
        draft.leave("not needed without muon", momentum)


def deepspeed(draft: Draft) -> None:
    """Set types of weights, ZeRO, offloading and LoRA."""
    flags = draft.flags
    dtype, names = flags["ds.param_dtype"], ["ds.param_dtype"]
    if flags["bf16"]:
        names.append("bf16")
    draft.set("model.dtype", "float32" if dtype == "fp32" else "bfloat16", *names)
    if dtype == "fp16":
        draft.check("model.dtype = bfloat16: float16 has no equivalent")
    draft.set("trainer.zero_stage", max(flags["ds.zero_stage"], 1), "ds.zero_stage")
    hpz = flags["ds.zpg"]
    if flags["ds.zero_stage"] == 3:
        draft.set("trainer.zero_hpz_partition_size", hpz, "ds.zpg")
    else:
        draft.leave("not needed below ZeRO stage 3", "ds.zpg")
    offload = flags["ds.adam_offload"]
    draft.set("trainer.offload", "optimizer" if offload else "none", "ds.adam_offload")
    if flags["ds.tensor_parallel_size"] > 1:
        draft.check(
            "ds.tensor_parallel_size has no equivalent: set trainer.zero_stage = 3, which divides the model, too"
        )
    if flags["ds.load_in_4bit"]:
        draft.check("model.dtype: 4-bit weights have no equivalent; the memory of `fourfold plan` is that of bfloat16")
    if flags["ds.lora.rank"]:
        draft.set("trainer.lora.alpha", float(flags["ds.lora.alpha"]), "ds.lora.alpha")
        draft.set("trainer.lora.target_modules", list(flags["ds.lora.target_modules"]), "ds.lora.target_modules")
        if flags["ds.lora.dropout"]:
            draft.check("trainer.lora: there is no dropout, which would make log-probabilities random")
    else:
        draft.leave("not needed without lora.rank", "ds.lora.alpha", "ds.lora.target_modules")


def train_sources(draft: Draft, path: str, shares: str, split: str, template: str | None = None) -> int:
    """Set the sources of the training data, whose paths, weights and split are in these flags; return their number."""
    flags, size = draft.flags, "data.max_samples"
    paths = [part.strip() for part in (flags[path] or "").split(",") if part.strip()]
    weights = common.weights(draft, flags[shares] or "", len(paths))
    common.sources(draft, "data.train", [
        {
            "path": (one, path), "split": (flags[split], split), "weight": (weight, shares),
            "size": (flags[size] if flags.given(size) else None, size),
            **({"template": (template, "data.input_template")} if template else {}),
        } for one, weight in zip(paths, weights, strict=True)
    ])  # fmt: skip
    return len(paths)


def checkpoints_and_trackers(draft: Draft) -> None:
    """Set checkpoints, exports and trackers."""
    flags = draft.flags
    every = flags["ckpt.save_steps"]
    draft.set(
        "checkpoint.every_steps", every if every > 0 else 10, "ckpt.save_steps",
        note="" if every > 0 else "OpenRLHF writes none; a run here can always be resumed",
    )  # fmt: skip
    draft.set("checkpoint.export_every_steps", max(every, 0) if flags["ckpt.save_hf"] else 0, "ckpt.save_hf")
    common.trackers(draft, {sink: flag for sink, flag in _SINKS.items() if flags[flag]}, _LOGGING_KEYS)
