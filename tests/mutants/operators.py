"""Two mutation operators that Cosmic Ray lacks: a step that is left out, and an argument that is not passed on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cosmic_ray.plugins
from cosmic_ray.operators.operator import Example, Operator
from parso.python.tree import Keyword

Position = tuple[tuple[int, int], tuple[int, int]]


class RemoveStatement(Operator):  # type: ignore[misc]  # Cosmic Ray has no types
    """Replaces a call whose result is not used, or an assignment to an attribute or an item, by `pass`."""

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        """Yield the statement if it is one of those."""
        if node.type != "simple_stmt":
            return
        statement = node.children[0]
        target = statement.children[0] if statement.type == "expr_stmt" else statement
        if target.type in ("atom_expr", "power"):
            yield statement.start_pos, statement.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """Put `pass` in its place."""
        statement = node.children[0]
        node.children[0] = Keyword("pass", statement.start_pos, prefix=statement.get_first_leaf().prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        """Show what it does."""
        return (Example("f(1)\n", "pass\n"), Example("x.y = 1\n", "pass\n"), Example("await f()\n", "pass\n"))


class KeywordArgumentToNone(Operator):  # type: ignore[misc]
    """Replaces the value of a keyword argument of a call by None."""

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        """Yield the value unless it is None."""
        if node.type == "argument" and node.children[1] == "=" and node.children[2].get_code().strip() != "None":
            yield node.children[2].start_pos, node.children[2].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """Put None in its place."""
        node.children[2] = Keyword("None", node.children[2].start_pos)
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        """Show what it does."""
        return (Example("f(timeout=3)", "f(timeout=None)"),)


def register() -> None:
    """Let Cosmic Ray find these operators by name."""
    operators = (RemoveStatement, KeywordArgumentToNone)
    cosmic_ray.plugins.OPERATOR_PROVIDERS["fourfold"] = {operator.__name__: operator for operator in operators}
