"""A tool that the model may call; a recipe names it in `environment.tools`. See recipes/agents_calculator.toml.

The type hints and the docstring become the description that the model reads.
"""

from __future__ import annotations

from typing import Literal


def calculate(operation: Literal["add", "subtract", "multiply"], a: float, b: float) -> float:
    """Calculates with two numbers.

    Args:
        operation: what to do
        a: first number
        b: second number
    """
    match operation:
        case "add":
            return a + b
        case "subtract":
            return a - b
    return a * b
