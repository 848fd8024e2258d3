"""Shares one packed row among several ranks, each with a slice of its tokens: Ulysses sequence parallelism.

    row [t] -> slice [t / n] -> layers -> hidden states of the slice -> head on the rows asked in it -> every rank: [k]
                                  |
             attention:   t / n tokens of h heads -- all-to-all --> t tokens of h / n heads -- kernel -- and back

Everything else in a layer works token by token, so only attention needs the other slices. It sees the whole row with
fewer heads: segments, windows and kernels stay as they are (Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv 2309.14509).

Every rank of a group gets all [k] results and computes the same loss from them. The gradient flows back only into the
rank's own slice, so the gradients of the weights must be summed over the ranks of a group, as over all others.

Legend: n ranks of a group, t tokens of a row (a multiple of n), k target rows, h query heads, g key and value heads,
d head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fourfold.errors import ConfigError

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]


def to_device(array: NDArray[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy an array of any shape to `device` as `dtype` (None: the array's); with CUDA the copy is still in flight."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # from pageable memory, CUDA waits for all earlier work before it copies
    return tensor.to(device, non_blocking=True).to(dtype or tensor.dtype)


class Exchange(Protocol):
    """The ranks that share a row. The methods are collectives: all ranks call the same one at the same time."""

    @property
    def rank(self) -> int:
        """Index of this rank in the group, and of its slice in the row."""

    @property
    def size(self) -> int:
        """Number of ranks, n."""

    def attend(self, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return this rank's slice, [1, t / n, h, d], of what `kernel` computes for the whole row; differentiable.

        Args:
            kernel: [1, t, h / n, d], [1, t, g / n, d] twice -> [1, t, h / n, d].
            query: [1, t / n, h, d], h a multiple of n.
            key: [1, t / n, g, d], g a multiple of n.
            value: as `key`.
        """

    def add(self, numbers: Tensor) -> None:
        """Replace `numbers` by their sum over the ranks, in place."""


class RowSlice:
    """This rank's slice of a packed row and the target rows in it; without an exchange, the whole row."""

    def __init__(self, exchange: Exchange | None, lengths: Tensor, rows: Tensor, device: torch.device) -> None:
        """Divide a row of segments of `lengths`, [s] integers on the CPU, with target rows `rows`, int64 [k].

        All ranks of `exchange` pass the same arguments; None: this rank alone.
        """
        self.exchange = exchange
        self.lengths = lengths
        """Lengths of the segments. A last one of padding, without target rows, makes the row a multiple of n."""
        self.rows = _send(rows, device)  # int64 [k']: the target rows in this slice, as indices of the slice
        if exchange is None:
            return
        if padding := -int(lengths.sum()) % exchange.size:
            self.lengths = functional.pad(lengths, (0, 1), value=padding)
        self._row_count = len(rows)
        self._size = int(self.lengths.sum()) // exchange.size
        self._start = exchange.rank * self._size
        rows = rows.cpu() - self._start
        places = ((rows >= 0) & (rows < self._size)).nonzero().squeeze(1)
        self._places, self.rows = _send(places, device), _send(rows[places], device)

    def tokens(self, row: Tensor) -> Tensor:
        """Return this slice, [t / n], of a row, [t] or without its padding."""
        if self.exchange is None:
            return row
        own = row[self._start : self._start + self._size]
        return functional.pad(own, (0, self._size - len(own)))

    def asked(self, column: Tensor) -> Tensor:
        """Return the entries of `column`, one or a row per target row [k], that belong to this slice, [k']."""
        return column if self.exchange is None else column[self._places]

    def gather(self, column: Tensor) -> Tensor:
        """Return the [k] numbers, or [k, m], of all ranks from this rank's [k']; the gradient flows only to these."""
        if self.exchange is None:
            return column
        whole: Tensor = _Gather.apply(column, self.exchange, self._places, self._row_count)  # type: ignore[no-untyped-call]
        return whole


def _send(indices: Tensor, device: torch.device) -> Tensor:
    return indices if indices.device == device else to_device(indices.numpy(), device)


class _Gather(torch.autograd.Function):
    """[k'] of every rank -> [k]. All ranks compute the same loss of it, so each takes its part of one gradient."""

    @staticmethod
    def forward(ctx: Any, column: Tensor, exchange: Exchange, places: Tensor, row_count: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.set_materialize_grads(False)  # keeps None, with which the head skips work
        whole = column.new_zeros(row_count, *column.shape[1:]).index_copy_(0, places, column)
        exchange.add(whole)  # adds only zeros to each number, so all ranks have the same bits
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return None if gradients[0] is None else gradients[0][places], None, None, None


def attend(exchange: Exchange, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return [1, t / n, h, d]; arguments as in `Exchange.attend`, but g may be any divisor of h.

    If n does not divide g, key and value heads are repeated first, as few times as possible, so that a rank has the key
    heads of all its query heads.
    """
    repeats = exchange.size // math.gcd(exchange.size, key.shape[2])
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, dim=2) for x in (key, value))
    return exchange.attend(kernel, query, key, value)


def check(model: Any, size: int) -> None:
    """Check that `size` ranks can share the rows of a model.

    Raises ConfigError: `size` does not divide its heads, or its positions depend on the longest sample of a row.
    """
    config = model.config.get_text_config()
    if config.num_attention_heads % size:
        raise ConfigError(
            f"trainer.sequence_parallel_size = {size} does not divide the {config.num_attention_heads} attention heads "
            f"of {type(model).__name__}; set it to a divisor of {config.num_attention_heads}"
        )
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(r for r in ropes.values() if isinstance(r, dict))):
        kind = str(rope.get("rope_type", ""))
        if "dynamic" in kind or kind == "longrope":
            raise ConfigError(
                f"the rotary embedding of {type(model).__name__}, rope_type = {kind!r}, depends on the longest sample "
                f"of a row, which a slice does not show; set trainer.sequence_parallel_size = 1, or use a model with "
                f"another rotary embedding"
            )
