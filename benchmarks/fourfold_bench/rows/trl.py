"""Trains with TRL's SFTTrainer on the rows of the benchmark, and writes a line of metrics after each step.

torchrun --nproc-per-node RANKS -m fourfold_bench.sft.trl FOLDER

The package is used as it is. `--attention packed` registers the kernel that Fourfold has with transformers, because
flash-attn is not installed everywhere, and attention that reads a mask of the whole row would be slow.
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
from fourfold_bench.sft.benchmark import PACKED, SftSettings
from fourfold_bench.sft.measure import ROWS_FILE, SETTINGS_FILE

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


def batch_sizes(settings: SftSettings, mean_tokens: float) -> tuple[int, int]:
    """Return the batch size of a device and the passes of a step, with about the tokens of a step of rows."""
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
    settings = SftSettings.read(folder / SETTINGS_FILE)
    transformers.AttentionInterface.register(_ATTENTION, PackedAttention())
    transformers.AttentionMaskInterface.register(_ATTENTION, lambda *_, **__: None)
    rows = datasets.load_dataset("json", data_files=str(folder / ROWS_FILE), split="train", cache_dir=str(folder))
    mean = sum(map(len, rows["input_ids"])) / len(rows)
    size, passes = batch_sizes(settings, mean)
    packing, sharded = settings.peer == PACKED, settings.zero_stage > 0 and settings.ranks > 1
    copied = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")  # of the options
    plugin = {"zero_optimization": {"stage": settings.zero_stage}, "bf16": {"enabled": True}}
    plugin |= dict.fromkeys(copied, "auto")
    options = trl.SFTConfig(
        output_dir=str(folder / "trl-output"),
        max_steps=settings.last_step,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=passes,
        packing=packing,
        padding_free=True,
        max_length=settings.max_tokens if packing else None,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        bf16=settings.on_gpus,
        use_cpu=not settings.on_gpus,
        gradient_checkpointing=settings.checkpointing,
        use_liger_kernel=settings.liger,
        deepspeed=plugin if sharded else None,
        # Without DeepSpeed, float32 masters and autocast, as every other system here has masters.
        model_init_kwargs={
            "dtype": "bfloat16" if sharded else "float32",
            "attn_implementation": settings.attention,
        },
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "model" / "tokenizer.json"), pad_token="w0", eos_token="w0"
    )
    trainer = trl.SFTTrainer(
        model=str(folder / "model"),
        args=options,
        train_dataset=rows,
        processing_class=tokenizer,
        callbacks=[_recorder(transformers.TrainerCallback, folder / "runs" / settings.peer)],
    )
    trainer.train()


def _recorder(base: type[Any], folder: Path) -> Any:
    """Return a callback that writes the lines."""

    class Recorder(base):  # type: ignore[misc]
        ended, tokens = time.monotonic(), 0

        def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, Any], **_others: Any) -> None:
            if "loss" not in logs or not state.is_world_process_zero:
                return
            now, tokens = time.monotonic(), int(logs["num_tokens"])  # the loss was read, so that the device is done
            row = {"step": state.global_step, m.NLL: logs["loss"], m.DATA_TOKENS: tokens - self.tokens}
            row |= {m.TIME_STEP: now - self.ended, m.SKIPPED_STEPS: 0}
            self.ended, self.tokens = now, tokens
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    return Recorder()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
