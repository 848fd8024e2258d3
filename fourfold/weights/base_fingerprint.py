"""Identifies the base weights of LoRA adapters by some elements of every tensor of the checkpoint.

Trainer and engine compute it on their own, each from what it has loaded or can read: the elements are rounded to
bfloat16, so that it does not depend on the dtype in which a side holds the weights. Two trained models differ in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

# Of each tensor. All elements would take minutes for a large model.
_ELEMENTS: Final = 1024


def sampled(count: int) -> Tensor:
    """Return the indices of the elements of a flattened tensor of `count` elements that are compared, int64 [m]."""
    return torch.arange(0, count, max(1, count // _ELEMENTS))


def fingerprint(tensors: Mapping[str, tuple[tuple[int, ...], Tensor]]) -> str:
    """Return the fingerprint, 64 hexadecimal digits.

    Args:
        tensors: by name in the checkpoint, the shape and the elements at `sampled`, of any floating dtype [m].
    """
    digest = hashlib.sha256()
    for name, (shape, elements) in sorted(tensors.items()):
        digest.update(f"{name} {tuple(shape)} ".encode())
        digest.update(elements.to("cpu", torch.bfloat16).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
