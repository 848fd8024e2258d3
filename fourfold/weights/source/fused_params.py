"""Maps a model's parameters to the tensors of its checkpoint; a fused parameter is several tensors, back to back.

transformers keeps the experts of a layer in two parameters. Checkpoints, and so engines, have three tensors per expert:

    experts.gate_up_proj [E, 2I, H] | experts.0.gate_proj [I, H] | experts.0.up_proj [I, H] | experts.1.gate_proj ...
    experts.down_proj    [E, H, I]  | experts.0.down_proj [H, I] | experts.1.down_proj [H, I] | ...

Only transformers has this mapping: `save_pretrained` applies `revert_weight_conversion` to a model's tensors to make
those of the checkpoint. Here the same function runs on meta tensors, and the storage offsets of its results are the
mapping. Names and shapes are therefore those that `save_pretrained` would write, for every architecture. A checkpoint
tensor that is not a contiguous slice of one parameter (transposed, interleaved) is refused: sending it needs a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold.errors import WrongState

Rename = Callable[[str], str]  # maps a parameter's name to the name that it is sent under; "" leaves the parameter out


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSlice:
    """A checkpoint tensor: elements [start, start + count) of a flattened parameter."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)


SentParameter: TypeAlias = tuple[str, Any, tuple[ParameterSlice, ...]]
"""Name of a parameter, the parameter, and its checkpoint tensors, which tile it."""


def whole_shape(parameter: Any) -> tuple[int, ...]:
    """Return the shape of a parameter on all ranks together: under ZeRO-3 it is empty between passes."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def named_weights(model: torch.nn.Module, rename: Rename | None = None) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield name and parameter of everything that is sent; tied parameters once.

    Raises WrongState: the model has persistent buffers, which are part of a checkpoint, but which no update sends.
    """
    for module_name, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                raise WrongState(
                    f"{type(model).__name__} keeps a persistent buffer {module_name}.{name}; only models whose whole "
                    f"state is in parameters can be sent"
                )
    for name, parameter in model.named_parameters(remove_duplicate=True):
        if sent := rename(name) if rename else name:
            yield sent, parameter


def sent_parameters(model: torch.nn.Module, rename: Rename | None = None) -> list[SentParameter]:
    """Return everything that is sent. Raises WrongState."""
    named = list(named_weights(model, rename))
    shapes = {name: whole_shape(parameter) for name, parameter in named}
    slices = checkpoint_slices(model, shapes)
    return [(name, parameter, slices[name]) for name, parameter in named]


def checkpoint_slices(
    model: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[ParameterSlice, ...]]:
    """Return for each parameter its checkpoint tensors, by start; they tile it exactly once.

    Every parameter of a model that is not Hugging Face's is one tensor. `shapes` has the full shapes of the parameters
    that are sent, by their names in the model without adapters.

    Raises WrongState: a checkpoint tensor is not a contiguous slice of one parameter.
    """
    if not hasattr(model, "save_pretrained"):
        return {name: (ParameterSlice(name=name, start=0, shape=shape),) for name, shape in shapes.items()}
    from transformers.core_model_loading import revert_weight_conversion

    whole = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    owners = {storage_id(tensor): name for name, tensor in whole.items()}
    try:
        with torch.no_grad(), _WithoutCopies():  # type: ignore[no-untyped-call]
            stored: Mapping[str, Any] = revert_weight_conversion(model, dict(whole))  # type: ignore[arg-type]
    except RuntimeError as error:  # such as a view of a permuted tensor, which needs a copy
        raise _refused(model, f"its checkpoint tensors cannot be located in its parameters ({error})") from None
    result: dict[str, list[ParameterSlice]] = {name: [] for name in shapes}
    for name, tensor in stored.items():
        owner = owners.get(storage_id(tensor))
        if owner is None or not tensor.is_contiguous():
            raise _refused(
                model, f"{name} {tuple(tensor.shape)} of its checkpoint is not a contiguous slice of a parameter"
            )
        result[owner].append(ParameterSlice(name=name, start=tensor.storage_offset(), shape=tuple(tensor.shape)))
    for name, slices in result.items():
        slices.sort(key=lambda one: one.start)
        reached = 0
        for one in slices:
            reached = reached + one.count if one.start == reached else -1
        if reached != math.prod(shapes[name]):
            raise _refused(model, f"its checkpoint does not hold parameter {name} {shapes[name]} exactly once")
    return {name: tuple(slices) for name, slices in result.items()}


class _WithoutCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's metaclass hook
    """Makes `clone` return its argument, so that the result still shows where in the parameter it lies."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return args[0]
        return func(*args, **(kwargs or {}))


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that is equal for tensors that share memory."""
    return int(tensor.untyped_storage()._cdata)


def _refused(model: torch.nn.Module, problem: str) -> WrongState:
    return WrongState(
        f"{type(model).__name__} cannot be sent: {problem}; train an architecture whose checkpoint stores experts one "
        f"by one"
    )
