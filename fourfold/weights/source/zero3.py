"""Reads weights straight from each rank's shard of a DeepSpeed ZeRO-3 engine, without a gather.

DeepSpeed keeps a rank's partitions of all trained parameters in one buffer, `optimizer.lp_param_buffer`. Each
`param.ds_tensor` is a view into it, in the order of the optimizer's parameter groups. Partition r of a parameter of n
elements over W ranks holds the flat elements [r * p, min((r + 1) * p, n)) with p = ceil(n / W); the rest is padding.

    buffer of rank r   | partition of group 0's 1st | of its 2nd | ... | of group 1's 1st | ...
    shard of rank r    = that buffer, byte for byte, then the frozen parameters; of a model that is all frozen but for
                         its adapters, the frozen parameters alone

A fused parameter (experts; see `fused_params`) is partitioned as a whole. The layout is the same on all ranks, so each
computes the whole manifest without communication. Persistent parameters (small ones that DeepSpeed keeps whole between
steps) have a partition in the buffer too, and reading it does not change their state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus, ZeroParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from fourfold.errors import WrongState
from fourfold.weights.manifest import Manifest, Span, TensorSpec, aligned, partition_count, partition_spans
from fourfold.weights.source.base import dtype_name, synchronize, torch_dtype
from fourfold.weights.source.fused_params import ParameterSlice, Rename, sent_parameters

_UNSUPPORTED: Final = "send from an engine without it, or use ZeRO stage 2"


@dataclass(frozen=True, slots=True)
class _Partitioned:
    name: str
    parameter: Any  # torch.nn.Parameter with DeepSpeed's ds_* attributes
    slices: tuple[ParameterSlice, ...]
    partition_count: int  # elements of each rank's partition, padding included
    position: int  # first byte in the concatenated buffers; -1: a frozen parameter, outside of them
    address: int


class Zero3Source:
    """The shard of one rank of a ZeRO-3 engine."""

    def __init__(self, engine: Any, *, dtype: torch.dtype | None = None, rename: Rename | None = None) -> None:
        """Describe the parameters of a stage-3 engine with an optimizer, without communication; see `DenseSource`.

        Raises WrongState: not stage 3, or a feature with another layout is on.
        """
        self._optimizer = _stage3_optimizer(engine)
        self._device = torch.device(engine.device)
        self._pointers = [buffer.data_ptr() for buffer in self._buffers]
        group = self._optimizer.dp_process_group
        rank_count = int(torch.distributed.get_world_size(group))
        self._parameters = [self._partitioned(*sent, rank_count) for sent in sent_parameters(engine.module, rename)]
        self._places = [(owner, part) for owner in self._parameters for part in owner.slices]  # of each tensor
        self._manifest = self._lay_out(rank_count, dtype)

    @property
    def slices(self) -> Sequence[tuple[str, ParameterSlice]]:
        return [(owner.name, part) for owner, part in self._places]

    def manifest(self) -> Manifest:
        return self._manifest

    def begin_round(self) -> None:
        """Wait for the optimizer, then check that every partition is still where the manifest places it.

        Raises WrongState: the engine's states are offloaded, or were moved.
        """
        synchronize(self._device)
        offloaded = [str(state) for state in self._optimizer.offloaded_states]
        if any("lp_params" in state for state in offloaded):
            raise WrongState(f"the engine's states {offloaded} are offloaded; call engine.reload_states() first")
        if [buffer.data_ptr() for buffer in self._buffers] != self._pointers:
            raise WrongState("the engine's parameters were moved, for example by offload_states; make a new source")
        for owner in self._parameters:
            partition, position = owner.parameter.ds_tensor, self._position(owner.parameter)
            there = partition.status is PartitionedParamStatus.AVAILABLE and partition.data_ptr() == owner.address
            if position != owner.position or partition.numel() != owner.partition_count or not there:
                raise WrongState(
                    f"the partition of {owner.name} is not where it was (byte {position}, was {owner.position}); "
                    f"make a new source"
                )

    def read(self, span: Span) -> torch.Tensor:
        """Return the elements of a span, which are contiguous in this rank's partition."""
        owner, part = self._places[span.tensor]
        partition: torch.Tensor = owner.parameter.ds_tensor.detach().reshape(-1)
        begin = part.start + span.start - span.rank * owner.partition_count
        return partition[begin : begin + span.count]

    def is_view(self, span: Span) -> bool:
        owner, _ = self._places[span.tensor]
        partition: torch.Tensor = owner.parameter.ds_tensor
        alike = (
            partition.dtype == torch_dtype(self._manifest.tensors[span.tensor].dtype)
            and partition.device.type == self._device.type
        )
        return alike and partition.is_contiguous()

    def end_round(self) -> None:
        """Do nothing: `read` allocates nothing."""

    def _partitioned(
        self, name: str, parameter: Any, slices: tuple[ParameterSlice, ...], rank_count: int
    ) -> _Partitioned:
        if not hasattr(parameter, "ds_tensor"):
            raise WrongState(f"parameter {name} is not partitioned by ZeRO-3; pass the engine that trains it")
        ranks = torch.distributed.get_world_size(parameter.ds_process_group)
        count = int(parameter.ds_tensor.numel())
        if ranks != rank_count or count != partition_count(int(parameter.ds_numel), rank_count):
            raise WrongState(
                f"parameter {name} has a partition of {count} of its {parameter.ds_numel} elements over {ranks} "
                f"ranks; {rank_count} equal parts were expected. {_UNSUPPORTED}"
            )
        position = self._position(parameter)
        if position < 0 and parameter.requires_grad:
            raise WrongState(f"the partition of {name} is not in DeepSpeed's buffer; {_UNSUPPORTED}")
        return _Partitioned(name, parameter, slices, count, position, parameter.ds_tensor.data_ptr())

    @property
    def _buffers(self) -> list[torch.Tensor]:
        """The partitions of all trained parameters: one buffer; with `offload_param` one per group in main memory."""
        if hasattr(self._optimizer, "lp_param_buffer"):
            return [self._optimizer.lp_param_buffer]
        return list(self._optimizer.param_groups_fp16_flat_cpu_memory)

    def _position(self, parameter: Any) -> int:
        """Return the first byte of a partition in the concatenated buffers, or -1 if it is in none."""
        partition, begin = parameter.ds_tensor, 0
        for buffer in self._buffers:
            distance, size = partition.data_ptr() - buffer.data_ptr(), buffer.numel() * buffer.element_size()
            alike = partition.dtype == buffer.dtype and partition.device == buffer.device
            if alike and 0 <= distance < size:
                return begin + int(distance)
            begin = aligned(begin + size)
        return -1

    def _lay_out(self, rank_count: int, dtype: torch.dtype | None) -> Manifest:
        as_is = dtype is None or dtype == self._buffers[0].dtype
        as_is = as_is and any(owner.position >= 0 for owner in self._parameters)
        # A shard in the buffers' own layout can be sent in place; one that is cast gets a layout of its own.
        end = 0
        for buffer in self._buffers if as_is else ():
            end = aligned(end + buffer.numel() * buffer.element_size())
        tensors: list[TensorSpec] = []
        spans: list[Span] = []
        for owner in self._parameters:
            name = dtype_name(dtype or owner.parameter.ds_tensor.dtype, owner.name)
            specs = [TensorSpec(name=part.name, dtype=name, shape=part.shape) for part in owner.slices]
            if as_is and owner.position >= 0:
                offset = owner.position
            else:
                offset, end = end, aligned(end + owner.partition_count * specs[0].item_bytes)
            spans += partition_spans(len(tensors), specs, rank_count, offset)
            tensors += specs
        return Manifest(tensors=tuple(tensors), spans=tuple(spans), shard_bytes=(end,) * rank_count)


@contextmanager
def gathering(engine: Any) -> Iterator[None]:
    """Partition all parameters, so that the block may gather them outside of a forward or backward pass.

    A pass without gradients leaves parameters in flight: DeepSpeed 0.19.8 prefetches what the recorded trace needs
    next. Gathering skips such a parameter, and partitioning it again fails ("Cannot partition a param in flight").
    DeepSpeed's checkpoints make the same two calls: the first waits for parameters in flight and partitions everything,
    the second makes the small ("persistent") parameters whole again. Both are collectives.
    """
    engine.optimizer.checkpoint_event_prologue()
    try:
        yield
    finally:
        engine.optimizer.checkpoint_event_epilogue()


def make_whole(engine: Any, parameters: Sequence[Any]) -> None:
    """Make persistent parameters whole on this rank where one is not, until DeepSpeed partitions them again.

    A collective when there are any; DeepSpeed keeps parameters below its persistence threshold whole between its steps.
    """
    if any(p.ds_status is not ZeroParamStatus.AVAILABLE for p in parameters):
        with gathering(engine):
            pass


def _stage3_optimizer(engine: Any) -> Any:
    optimizer = engine.optimizer
    if not isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        raise WrongState(
            f"the engine's optimizer is a {type(optimizer).__name__}, not ZeRO stage 3; use DenseSource(engine.module)"
        )
    if optimizer.params_in_nvme_and_cpu:
        raise WrongState(f"the engine offloads its parameters to a disk; {_UNSUPPORTED}")
    config = engine._config.zero_config
    for name in ("zero_quantized_weights", "mics_shard_size"):
        if getattr(config, name, 0) not in (0, 1, -1, False):
            raise WrongState(f"the engine uses {name} = {getattr(config, name)}; {_UNSUPPORTED}")
    return optimizer
