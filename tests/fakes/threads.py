"""A group of ranks that are threads of this process: the all-to-all of Ulysses without a process group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from fourfold.nn.sequence import Kernel

T = TypeVar("T")
_TIMEOUT = 30.0


class ThreadGroup:
    """The rendezvous of the ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=_TIMEOUT)
        self._slots: list[Any] = [None] * size

    def share(self, rank: int, value: T) -> list[T]:
        """Return the values of all ranks."""
        self._slots[rank] = value
        self._barrier.wait()
        values = list(self._slots)
        self._barrier.wait()
        return values

    def run(self, work: Callable[[ThreadExchange], T]) -> list[T]:
        """Return what each rank's `work` gives; when one fails, the others do not wait for it."""

        def one(rank: int) -> T:
            try:
                return work(ThreadExchange(self, rank))
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(one, rank) for rank in range(self.size)]
            errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]


class ThreadExchange:
    """The `Exchange` of one of them."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.group, self.rank, self.size = group, rank, group.size

    def attend(self, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Deal the heads, collect the tokens, and back."""
        heads = [_Swap.apply(x, self, 2, 1) for x in (query, key, value)]  # type: ignore[no-untyped-call]
        tokens: Tensor = _Swap.apply(kernel(*heads), self, 1, 2)  # type: ignore[no-untyped-call]
        return tokens

    def add(self, numbers: Tensor) -> None:
        """Sum over the ranks."""
        numbers.copy_(torch.stack([part.clone() for part in self.group.share(self.rank, numbers.clone())]).sum(0))


class _Swap(torch.autograd.Function):
    """Deal dimension `dealt` to the ranks and collect `collected` from them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: ThreadExchange, dealt: int, collected: int) -> Tensor:
        ctx.exchange, ctx.dims = exchange, (collected, dealt)
        parts = exchange.group.share(exchange.rank, x.detach().chunk(exchange.size, dealt))
        return torch.cat([part[exchange.rank] for part in parts], collected)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        swapped: Tensor = _Swap.apply(gradients[0], ctx.exchange, *ctx.dims)  # type: ignore[no-untyped-call]
        return swapped, None, None, None
