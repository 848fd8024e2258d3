"""What stays in main memory: settings of DeepSpeed, and a model's way there.

    optimizer               masters and moments in main memory; gradients go there, and updated weights come back
    optimizer+parameters    weights, too: each layer's come to the GPU for its passes

The update runs on the CPU with the optimizer of settings.py; no operator of DeepSpeed is compiled.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch

from fourfold.config import Config


def offload_settings(config: Config) -> dict[str, Any]:
    """Return what `zero_optimization` says besides; pinned memory where there is a GPU to copy to."""
    place = {"device": "cpu", "pin_memory": config.trainer.device == "cuda"}
    match config.trainer.offload:
        case "none":
            return {}
        case "optimizer":
            return {"offload_optimizer": place}
        case "optimizer+parameters":
            return {"offload_optimizer": place, "offload_param": place}


def partition(model: torch.nn.Module, settings: dict[str, Any], device: torch.device) -> None:
    """Cut a model into the ranks' partitions, in main memory, parameter by parameter; its buffers go to the device.

    `deepspeed.initialize` would do the same after it has moved the whole model to the GPU, which it need not fit.

    Args:
        model: whole, on the CPU. Its parameters stay the same objects, but they hold nothing then.
        settings: of DeepSpeed.
        device: of this rank.
    """
    zero = settings["zero_optimization"]
    # DeepSpeed copies trained partitions to pinned buffers of its own. Freed pinned memory is kept by torch: none here.
    unpinned = {**settings, "zero_optimization": {**zero, "offload_param": {"device": "cpu", "pin_memory": False}}}
    deepspeed.zero.Init(module=model, config_dict_or_path=unpinned, dtype=next(model.parameters()).dtype)
    for parameter in model.parameters():
        if zero["offload_param"]["pin_memory"] and not parameter.requires_grad:
            kept: Any = parameter.ds_tensor  # type: ignore[attr-defined]
            kept.data = kept.data.pin_memory()
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
