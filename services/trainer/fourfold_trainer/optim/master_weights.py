"""Maps the float32 master weights of one rank to elements of the model's parameters, at every ZeRO stage.

The optimizer updates the masters. DeepSpeed lays them out differently at each stage:

    0       one per parameter, whole on every rank
    1, 2    one per optimizer group: this rank's part of the concatenated parameters, cut at any element
    3       one per sub-group: partition `rank` of each parameter, concatenated; the last ranks have padding

`MasterSlice` describes all three layouts, so that a state written at one stage can be read at another. Padding is in no
slice. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterSlice:
    """Elements [first, first + count) of a flattened parameter: [offset, offset + count) of a flattened master."""

    name: str
    first: int
    count: int
    master: int
    """Index of the master."""
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MasterWeights:
    """The masters of one rank."""

    tensors: list[Tensor]
    slices: list[MasterSlice]
    sizes: Mapping[str, int]
    """Elements of each trained parameter, on all ranks together."""
    shared: bool = False
    """Every rank has the same masters."""


def find_master_weights(optimizer: Any, model: Any, *, stage: int, rank: int) -> MasterWeights:
    """Return the masters of this rank, from private fields of DeepSpeed's optimizers.

    `optimizer` and `model` are those of DeepSpeed's engine; at stage 0 that is the torch optimizer itself.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    find = (_whole_parameters, _group_parts, _group_parts, _parameter_partitions)[stage]
    tensors, slices = find(optimizer, names, rank)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # Under ZeRO-3 a parameter is empty between passes; `ds_numel` is its whole size.
    sizes = {name: int(getattr(p, "ds_numel", p.numel())) for name, p in trained.items()}
    return MasterWeights(tensors=tensors, slices=slices, sizes=sizes, shared=stage == 0)


def _whole_parameters(optimizer: Any, names: Mapping[int, str], _rank: int) -> tuple[list[Tensor], list[MasterSlice]]:
    """Return the masters of stage 0, which is float32 alone: the parameters themselves."""
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    return weights, [
        MasterSlice(name=names[id(weight)], first=0, count=weight.numel(), master=index, offset=0)
        for index, weight in enumerate(weights)
    ]


def _group_parts(optimizer: Any, names: Mapping[int, str], rank: int) -> tuple[list[Tensor], list[MasterSlice]]:
    """Return the masters of stages 1 and 2.

    Every parameter is a view into its group's flat buffer, and so is every rank's part. Addresses therefore give the
    slices, whatever alignment DeepSpeed puts between parameters.
    """
    if hasattr(optimizer, "bf16_groups"):  # DeepSpeed has another class for stage 1 in bfloat16
        groups, buffers = optimizer.bf16_groups, optimizer.bf16_groups_flat
        parts, masters = optimizer.bf16_partitioned_groups, optimizer.fp32_groups_flat_partition
    else:
        groups, buffers = optimizer.bit16_groups, optimizer.bit16_groups_flat
        parts, masters = optimizer.parallel_partitioned_bit16_groups, optimizer.single_partition_of_fp32_groups
    slices = []
    for index, (group, buffer, part) in enumerate(zip(groups, buffers, parts, strict=True)):
        begin = _position(part[rank], buffer)
        end = begin + part[rank].numel()
        assert masters[index].numel() == part[rank].numel(), "a master is its part in float32"
        for parameter in group:
            start = _position(parameter, buffer)
            first, last = max(begin, start), min(end, start + parameter.numel())
            if first < last:
                name, offset = names[id(parameter)], first - begin
                slices.append(
                    MasterSlice(name=name, first=first - start, count=last - first, master=index, offset=offset)
                )
    return list(masters), slices


def _parameter_partitions(
    optimizer: Any, names: Mapping[int, str], rank: int
) -> tuple[list[Tensor], list[MasterSlice]]:
    """Return the masters of stage 3; fourfold/weights/source/zero3.py describes the partitions."""
    masters, slices = list(optimizer.fp32_partitioned_groups_flat), []
    for index, (group, master) in enumerate(zip(optimizer.fp16_groups, masters, strict=True)):
        offset = 0
        for parameter in group:
            partition = int(parameter.ds_tensor.ds_numel)
            first = rank * partition
            count = min(partition, int(parameter.ds_numel) - first)
            if count > 0:
                name = names[id(parameter)]
                slices.append(MasterSlice(name=name, first=first, count=count, master=index, offset=offset))
            offset += partition
        assert offset == master.numel(), "a master is the concatenation of its sub-group's partitions"
    return masters, slices


def _position(view: Tensor, buffer: Tensor) -> int:
    """Return the element of the buffer at which a view begins."""
    position = (view.data_ptr() - buffer.data_ptr()) // buffer.element_size()
    assert 0 <= position <= buffer.numel() - view.numel(), "a parameter lies in its group's buffer"
    return position
