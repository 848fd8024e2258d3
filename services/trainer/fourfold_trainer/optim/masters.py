"""Which elements of which parameter one rank's masters are, at every ZeRO stage.

A master is a float32 tensor that Adam changes. DeepSpeed keeps other ones at each stage:

    0       one per parameter, whole on every rank
    1, 2    one per optimizer group: a rank's part of the group's parameters, one after another, cut where it comes
    3       one per sub-group: partition r of each parameter, one after another; that of the last ranks is padded

`Slice` says the same of all of them, so that what was written at one stage can be read at another. Padding belongs
to no slice. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Elements [first, first + count) of a flattened parameter: [offset, offset + count) of a flattened master."""

    name: str
    first: int
    count: int
    master: int
    """Index of it."""
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Masters:
    """The masters of one rank."""

    tensors: list[Tensor]
    slices: list[Slice]
    """Of all of them."""
    sizes: Mapping[str, int]
    """Elements of each parameter that is trained, on all ranks together."""
    shared: bool = False
    """Every rank has the same."""


def find(optimizer: Any, model: Any, *, stage: int, rank: int) -> Masters:
    """Return the masters of this rank.

    Args:
        optimizer: the engine's, DeepSpeed's or at stage 0 in float32 the plain one.
        model: the engine's.
        stage: of ZeRO.
        rank: of this process.
    """
    if stage == 0:
        return _of_parameters(optimizer, model)
    return (_of_partitions if stage == 3 else _of_parts)(optimizer, model, rank=rank)


def _of_parameters(optimizer: Any, model: Any) -> Masters:
    """Return those of stage 0: in float32 the parameters themselves, else a copy of each."""
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = weights
    if hasattr(optimizer, "fp32_groups"):
        weights = [p for group in optimizer.fp16_groups for p in group]
        tensors = [copy for group in optimizer.fp32_groups for copy in group]
    names = _names(model)
    slices = [
        Slice(name=names[id(weight)], first=0, count=weight.numel(), master=index, offset=0)
        for index, weight in enumerate(weights)
    ]
    return Masters(tensors=tensors, slices=slices, sizes=_sizes(model), shared=True)


def _of_parts(optimizer: Any, model: Any, *, rank: int) -> Masters:
    """Return those of stages 1 and 2.

    Every parameter is a view into its group's flat buffer, and so is every rank's part. Where they lie in memory says
    all, whatever DeepSpeed puts between them.
    """
    names = _names(model)
    if hasattr(optimizer, "bf16_groups"):  # another class of DeepSpeed's, for stage 1 in bfloat16
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
                slices.append(
                    Slice(
                        name=names[id(parameter)],
                        first=first - start,
                        count=last - first,
                        master=index,
                        offset=first - begin,
                    )
                )
    return Masters(tensors=list(masters), slices=slices, sizes=_sizes(model))


def _of_partitions(optimizer: Any, model: Any, *, rank: int) -> Masters:
    """Return those of stage 3: fourfold/weights/source/zero3.py explains them."""
    names, masters, slices = _names(model), optimizer.fp32_partitioned_groups_flat, []
    for index, (group, master) in enumerate(zip(optimizer.fp16_groups, masters, strict=True)):
        offset = 0
        for parameter in group:
            partition = int(parameter.ds_tensor.ds_numel)
            first = rank * partition
            count = min(partition, int(parameter.ds_numel) - first)
            if count > 0:
                slices.append(Slice(name=names[id(parameter)], first=first, count=count, master=index, offset=offset))
            offset += partition
        assert offset == master.numel(), "a master is its sub-group's partitions, one after another"
    return Masters(tensors=list(masters), slices=slices, sizes=_sizes(model))


def _names(model: Any) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _sizes(model: Any) -> dict[str, int]:
    named = model.named_parameters()
    return {name: int(getattr(p, "ds_numel", p.numel())) for name, p in named if p.requires_grad}


def _position(view: Tensor, buffer: Tensor) -> int:
    """Return where a view begins in the buffer, in elements."""
    position = (view.data_ptr() - buffer.data_ptr()) // buffer.element_size()
    assert 0 <= position <= buffer.numel() - view.numel(), "a parameter lies in its group's buffer"
    return position
