"""Counts the tokens of the passes of a training step, from which flops.py computes its FLOP."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Numbers that determine the FLOP of a model."""

    parameters: int  # parameters of products with every token
    trained_parameters: int  # parameters of these that have a gradient
    head: int = 0  # parameters of the output embedding
    trained_head: int = 0  # the same number if it has a gradient, else 0
    attention: int  # layers times width of the attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The trainer's GPU and the sizes of its models."""

    policy: ModelSize
    critic: ModelSize | None = None
    gpu: str = ""  # name of the ranks' GPU in CUDA; empty on CPUs


@dataclass(slots=True, kw_only=True)
class Work:
    """Tokens of forward and backward passes through a model."""

    forward_tokens: int = 0
    forward_squares: int = 0  # sum of the squares of their lengths
    forward_rows: int = 0  # tokens whose log-probabilities are computed
    backward_tokens: int = 0
    backward_squares: int = 0
    backward_rows: int = 0

    def add(self, lengths: Iterable[int], *, rows: int, backward: bool) -> None:
        """Add a forward pass over samples and a backward pass; `rows` of their tokens need the output embedding."""
        lengths = list(lengths)
        tokens, squares = sum(lengths), sum(n * n for n in lengths)
        self.forward_tokens += tokens
        self.forward_squares += squares
        self.forward_rows += rows
        if backward:
            self.backward_tokens += tokens
            self.backward_squares += squares
            self.backward_rows += rows

    def flops(self, size: ModelSize) -> float:
        """Return the FLOP of all passes."""
        products = size.parameters * self.forward_tokens + size.head * self.forward_rows
        products += (size.parameters + size.trained_parameters) * self.backward_tokens
        products += (size.head + size.trained_head) * self.backward_rows
        attention = size.attention * (self.forward_squares + 2 * self.backward_squares)
        return 2.0 * (products + attention)
