"""Trains with a trainer of TRL on the rows of the benchmark, and writes a line of metrics after each step.

torchrun --nproc-per-node RANKS -m fourfold_bench.rows.trl FOLDER

The package is used as it is. `--attention packed` registers the kernel that Fourfold has with transformers, because
flash-attn is not installed everywhere, and attention that reads a mask of the whole row would be slow. Pairs are padded
on the right, so that causal attention needs no mask.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch

from fourfold import metrics as m
from fourfold.nn import attention
from fourfold_bench.rows.benchmark import PACKED, RowsSettings
from fourfold_bench.rows.measure import END, ROWS_FILE, SETTINGS_FILE

_ATTENTION: Final = "packed"


class PackedAttention:
    """Attention over the segments of a row, which begin where the positions are 0."""

    def __init__(self) -> None:
        self._positions: torch.Tensor | None = None
        self._segments: attention.Segments | None = None

    def __call__(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, *, position_ids: Any, **options: Any
    ) -> Any:
        """Return [1, t, h, d] and None, as `attention.attend`."""
        if position_ids is not self._positions:  # once in a pass, which waits for the device
            starts = (position_ids[0] == 0).nonzero().flatten().cpu()
            lengths = torch.diff(starts, append=torch.tensor([position_ids.shape[1]]))
            self._positions, self._segments = position_ids, attention.Segments(lengths, query.device)
        scaling = options.get("scaling")
        return attention.attend(module, query, key, value, None, scaling=scaling, segments=self._segments)


def batch_sizes(settings: RowsSettings, mean_tokens: float) -> tuple[int, int]:
    """Return the batch size of a device and the passes of a step, with about the tokens of a step of rows."""
    if settings.has_pairs:
        return settings.peer_pairs, settings.rows_per_step // (settings.ranks * settings.peer_pairs)
    share = settings.rows_per_step * mean_tokens / settings.ranks  # tokens of a step on a device
    passes = math.ceil(share / settings.tokens_per_micro_batch)
    if settings.peer == PACKED:
        return max(round(share / passes / settings.max_tokens), 1), passes
    rows = settings.rows_per_step // settings.ranks
    passes = next(n for n in range(passes, rows + 1) if rows % n == 0)
    return rows // passes, passes


def main(folder: Path) -> None:
    """Train to the last step."""
    datasets, transformers, trl = (importlib.import_module(name) for name in ("datasets", "transformers", "trl"))
    settings = RowsSettings.read(folder / SETTINGS_FILE)
    attend = transformers.AttentionInterface()["sdpa"] if settings.has_pairs else PackedAttention()
    transformers.AttentionInterface.register(_ATTENTION, attend)
    transformers.AttentionMaskInterface.register(_ATTENTION, lambda *_, **__: None)
    rows = datasets.load_dataset("json", data_files=str(folder / ROWS_FILE), split="train", cache_dir=str(folder))
    if settings.has_pairs:  # a reference for those that are trained on alone, as in Fourfold
        rows = rows.select(range(min(len(rows), settings.last_step * settings.rows_per_step)))
    size, passes = batch_sizes(settings, 0 if settings.has_pairs else sum(map(len, rows["input_ids"])) / len(rows))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "model" / "tokenizer.json"),
        # Otherwise these texts are found inside other words, such as w1 in w1234.
        pad_token=transformers.AddedToken("w0", single_word=True),
        eos_token=transformers.AddedToken(END, single_word=True),
    )
    packing = settings.peer == PACKED
    kinds: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "sft": (
            trl.SFTConfig,
            trl.SFTTrainer,
            {"packing": packing, "padding_free": True, "max_length": settings.max_tokens if packing else None},
        ),
        "dpo": (trl.DPOConfig, trl.DPOTrainer, {"precompute_ref_log_probs": True, "max_length": None}),
        "reward-training": (
            trl.RewardConfig,
            trl.RewardTrainer,
            # Liger's loss of a language model would replace the pass of a model that has none.
            {"max_length": None, "liger_kernel_config": {"fused_linear_cross_entropy": False}},
        ),
    }
    config, trainer, more = kinds[settings.kind]
    options = config(
        output_dir=str(folder / "trl-output"),
        per_device_train_batch_size=size,
        gradient_accumulation_steps=passes,
        **_common(settings),
        **more,
    )
    trainer(
        model=str(folder / "model"),
        args=options,
        train_dataset=rows,
        processing_class=tokenizer,
        callbacks=[_recorder(transformers.TrainerCallback, folder / "runs" / settings.peer)],
    ).train()


def _common(settings: RowsSettings) -> dict[str, Any]:
    """Return the options that all trainers have."""
    sharded = settings.zero_stage > 0 and settings.ranks > 1
    copied = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")  # of the options
    plugin = {"zero_optimization": {"stage": settings.zero_stage}, "bf16": {"enabled": True}}
    plugin |= dict.fromkeys(copied, "auto")
    return {
        "max_steps": settings.last_step,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "bf16": settings.on_gpus,
        "use_cpu": not settings.on_gpus,
        "gradient_checkpointing": settings.checkpointing,
        "use_liger_kernel": settings.liger,
        "deepspeed": plugin if sharded else None,
        # Without DeepSpeed, float32 masters and autocast, as every other system here has masters.
        "model_init_kwargs": {
            "dtype": "bfloat16" if sharded else "float32",
            "attn_implementation": settings.attention,
        },
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
    }


def _recorder(base: type[Any], folder: Path) -> Any:
    """Return a callback that writes the lines."""

    class Recorder(base):  # type: ignore[misc]
        ended, tokens = time.monotonic(), 0

        def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, Any], **_others: Any) -> None:
            if "loss" not in logs or not state.is_world_process_zero:
                return
            now, tokens = time.monotonic(), int(logs["num_tokens"])  # the loss was read, so that the device is done
            row = {"step": state.global_step, m.POLICY_LOSS: logs["loss"], m.DATA_TOKENS: tokens - self.tokens}
            row |= {m.TIME_STEP: now - self.ended, m.SKIPPED_STEPS: 0}
            if torch.cuda.is_available():
                row[m.GPU_PEAK] = torch.cuda.max_memory_allocated() / (1 << 30)
                row[m.GPU_RESERVED] = torch.cuda.max_memory_reserved() / (1 << 30)
                torch.cuda.reset_peak_memory_stats()
            self.ended, self.tokens = now, tokens
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    return Recorder()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
