"""A model's parameters as its checkpoint names them: some are several of its tensors, one behind another.

transformers keeps the experts of a layer in two parameters, where checkpoints, and so engines, have three tensors of
each expert:

    experts.gate_up_proj [E, 2I, H] | experts.0.gate_proj [I, H] | experts.0.up_proj [I, H] | experts.1.gate_proj ...
    experts.down_proj    [E, H, I]  | experts.0.down_proj [H, I] | experts.1.down_proj [H, I] | ...

What is stored how is known to transformers alone: `revert_weight_conversion`, by which `save_pretrained` makes a
checkpoint's tensors of a model's, is applied to tensors without memory, and where its results lie in the parameters is
read off them. So names and shapes are those that `save_pretrained` would write, whatever the architecture. A tensor
that is no run of elements of one parameter (a transposed or an interleaved one) is refused: it would need a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold.errors import WrongState

Rename = Callable[[str], str]
"""Gives the name that a parameter is sent under; empty: it is not sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A tensor of the checkpoint: elements [start, start + count) of a parameter."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def checkpoint_pieces(model: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[Piece, ...]]:
    """Return for each parameter the tensors of the checkpoint that it is, by their place; they tile it exactly once.

    Args:
        model: a Hugging Face model; any other one is sent as it is.
        shapes: of the parameters that are sent, whole, by their names in the model without adapters.

    Raises:
        WrongState: a tensor of the checkpoint is not a run of elements of one parameter; names it.
    """
    if not hasattr(model, "save_pretrained"):
        return {name: (Piece(name=name, start=0, shape=shape),) for name, shape in shapes.items()}
    from transformers.core_model_loading import revert_weight_conversion

    whole = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    owners = {_storage(tensor): name for name, tensor in whole.items()}
    try:
        with torch.no_grad(), _WithoutCopies():  # type: ignore[no-untyped-call]
            stored: Mapping[str, Any] = revert_weight_conversion(model, dict(whole))  # type: ignore[arg-type]
    except RuntimeError as error:  # of a view that only a copy could give
        raise _refused(model, f"its checkpoint cannot be read off its parameters ({error})") from None
    result: dict[str, list[Piece]] = {name: [] for name in shapes}
    for name, tensor in stored.items():
        owner = owners.get(_storage(tensor))
        if owner is None or not tensor.is_contiguous():
            raise _refused(
                model, f"{name} {tuple(tensor.shape)} of its checkpoint is no run of elements of a parameter"
            )
        result[owner].append(Piece(name=name, start=tensor.storage_offset(), shape=tuple(tensor.shape)))
    for name, pieces in result.items():
        pieces.sort(key=lambda piece: piece.start)
        reached = 0
        for piece in pieces:
            reached = reached + piece.count if piece.start == reached else -1
        if reached != math.prod(shapes[name]):
            raise _refused(model, f"parameter {name} {shapes[name]} is not all in the checkpoint, or twice")
    return {name: tuple(pieces) for name, pieces in result.items()}


class _WithoutCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's metaclass hook
    """Lets a copy be the tensor that it is made of, so that its place in a parameter can still be read off it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return args[0]
        return func(*args, **(kwargs or {}))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _refused(model: torch.nn.Module, what: str) -> WrongState:
    return WrongState(
        f"{type(model).__name__} cannot be sent: {what}; train an architecture whose experts are stored one by one"
    )
