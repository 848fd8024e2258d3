"""Partitions parameters for ZeRO-3 while they are read, and gathers them for passes before DeepSpeed's engine exists.

`deepspeed.zero.Init` makes each parameter whole on every rank, broadcasts it and keeps a part. Here a parameter begins
as its partition: rank r of W ranks holds the flat elements [r * p, (r + 1) * p) of n, with p = ceil(n / W), zeros after
the last one. Nothing is sent, so a rank can load without the others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus, ZeroParamStatus
from deepspeed.utils import groups
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fourfold.config import Config

Fill = Callable[[Tensor, int], None]
"""Writes the elements of a flattened parameter, from the given one on, into a 1-D tensor."""


class Placement(Protocol):
    """Makes the parameters of this rank."""

    def place(self, shape: tuple[int, ...], dtype: torch.dtype, fill: Fill) -> nn.Parameter:
        """Return a parameter whose elements on this rank come from `fill`."""


class WholePlacement:
    """Makes whole parameters, in place on their device: ZeRO stages 0 to 2."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def place(self, shape: tuple[int, ...], dtype: torch.dtype, fill: Fill) -> nn.Parameter:
        parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device=self._device))
        fill(parameter.detach().view(-1), 0)
        return parameter


class Zero3Placement:
    """Makes DeepSpeed's partitioned parameters: the same attributes that `deepspeed.zero.Init` sets."""

    def __init__(self, config: Config, device: torch.device) -> None:
        """Use the default process group. Partitions are in main memory if the recipe offloads parameters."""
        self._device = device
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        zero: dict[str, Any] = {"stage": 3, "zero_hpz_partition_size": config.trainer.zero_hpz_partition_size}
        self._home = device
        if config.trainer.offload == "optimizer+parameters":
            # DeepSpeed copies trained partitions to pinned buffers of its own, and torch never returns freed pinned
            # memory to the system: so they begin in memory that is not pinned.
            zero["offload_param"] = {"device": "cpu", "pin_memory": False}
            self._home = torch.device("cpu")
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": self._dtype is torch.bfloat16},
            "zero_optimization": zero,
        }
        # With a module, though an empty one, it replaces torch.nn.functional.linear by one that saves no gathered
        # weight for the backward pass.
        self._init = deepspeed.zero.Init(
            module=nn.Module(),
            config_dict_or_path=settings,
            dtype=self._dtype,
            # DeepSpeed makes the group for the first model of a process, and would fail at the second.
            zero_param_parallel_group=groups._get_zero_param_intra_parallel_group(),
        )

    def place(self, shape: tuple[int, ...], dtype: torch.dtype, fill: Fill) -> nn.Parameter:
        # ZeRO-3 keeps all parameters in the model's dtype, also those that transformers would keep in float32.
        # The expanded element gives DeepSpeed the shape and takes no memory.
        parameter: Any = nn.Parameter(torch.empty(1, dtype=self._dtype, device=self._device).expand(shape))
        self._init._convert_to_deepspeed_param(parameter)
        ranks, rank = parameter.ds_zero_partition_world_size, parameter.ds_zero_partition_rank
        partition: Any = torch.zeros(-(-parameter.ds_numel // ranks), dtype=self._dtype, device=self._home)
        first = rank * len(partition)
        if (count := min(len(partition), parameter.ds_numel - first)) > 0:
            fill(partition[:count], first)
        partition.ds_numel = len(partition)
        partition.status, partition.final_location = PartitionedParamStatus.AVAILABLE, None
        parameter.ds_tensor, parameter.ds_numel_aligned = partition, len(partition) * ranks
        parameter.data = torch.empty(0, dtype=self._dtype, device=self._device)
        parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
        result: nn.Parameter = parameter
        return result


def pin_frozen(model: nn.Module) -> None:
    """Pin the partitions of frozen parameters in main memory: DeepSpeed uses them in place."""
    for parameter in model.parameters():
        if not parameter.requires_grad and hasattr(parameter, "ds_tensor"):
            kept: Any = parameter.ds_tensor
            kept.data = kept.data.pin_memory()


@contextmanager
def gathered_modules(model: nn.Module) -> Iterator[None]:
    """Make passes of `model` work for the block: each block of layers is gathered for its own pass alone.

    DeepSpeed's engine does so, too, but it is made later. All ranks run the same passes. Without a partitioned
    parameter this does nothing.
    """
    blocks = set(getattr(model, "_no_split_modules", None) or ())
    held: dict[nn.Module, list[Any]] = {}

    def gather(module: nn.Module, _arguments: Any) -> None:
        parameters: list[Any] = list(module.parameters(recurse=type(module).__name__ in blocks))
        away = [p for p in parameters if getattr(p, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE]
        if away:
            away[0].all_gather(away)
            held[module] = away

    def release(module: nn.Module, _arguments: Any, _output: Any) -> None:
        if parameters := held.pop(module, None):
            parameters[0].partition(parameters)
            if parameters[0].device.type == "cpu":
                # glibc keeps freed blocks below 32 MiB: measured, all layers of a 1.5B model one after another.
                ctypes.CDLL(None).malloc_trim(0)

    # Hooks of all modules, because the block may add some to the model.
    hooks = [
        register_module_forward_pre_hook(gather),
        register_module_forward_hook(release, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
