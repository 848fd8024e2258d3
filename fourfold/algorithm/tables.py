"""Prints the tables of docs/algorithms.md: every registered loss and estimator, and every correction.

Those of other distributions are included.

python -m fourfold.algorithm.tables
"""

from __future__ import annotations

import sys
from typing import Any

from fourfold.algorithm.advantages import ADVANTAGES, AdvantageEstimator
from fourfold.algorithm.corrections import DEFAULT_BOUNDS, FORMULAS, UNREAD
from fourfold.algorithm.losses import LOSSES
from fourfold.algorithm.registry import Definition, Registry


def markdown() -> str:
    """Return the tables of estimators, losses and corrections, with the formulas at the default keys."""
    tables = {"advantage": _table(ADVANTAGES), "loss": _table(LOSSES), "correction": _corrections()}
    return "\n".join(f"### `[algorithm.{name}]`\n\n{table}" for name, table in tables.items())


def _corrections() -> str:
    table = "| kind | formula | keys and defaults |\n|---|---|---|\n"
    for kind, (low, high) in DEFAULT_BOUNDS.items():
        keys = [f"`{key}` {value}" for key, value in (("low", low), ("high", high)) if key != UNREAD.get(kind)]
        table += f"| `{kind}` | {FORMULAS[kind].format(low=low, high=high)} | {', '.join(keys)} |\n"
    return table


def _table(registry: Registry[Any]) -> str:
    table = "| kind | formula | keys and defaults | source |\n|---|---|---|---|\n"
    for kind in registry.kinds():
        cells = [cell.replace("|", "\\|") for cell in _cells(registry.find(kind).model_validate({"kind": kind}))]
        table += f"| {' | '.join(cells)} |\n"
    return table


def _cells(definition: Definition) -> list[str]:
    keys = {name: value for name, value in definition.model_dump().items() if name != "kind"}
    # The formula of an estimator that is not per token is the right-hand side only: one A for the whole sample.
    per_sample = isinstance(definition, AdvantageEstimator) and not definition.per_token
    return [
        f"`{definition.kind}`",
        ("A = " if per_sample else "") + definition.formula(),
        ", ".join(f"`{name}` {value}" for name, value in keys.items()) or "none",
        definition.source,
    ]


if __name__ == "__main__":
    sys.stdout.write(markdown())
