"""Prints the tables of docs/algorithms.md: every registered loss and estimator, those of other distributions included.

python -m fourfold.algorithm.tables
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from fourfold.algorithm.advantages import ADVANTAGES, AdvantageEstimator
from fourfold.algorithm.losses import LOSSES
from fourfold.algorithm.registry import Definition


def markdown() -> str:
    """Return the tables of estimators and losses, with the formulas at the default keys."""
    estimators, losses = _table(ADVANTAGES.definitions()), _table(LOSSES.definitions())
    return f"### `[algorithm.advantage]`\n\n{estimators}\n### `[algorithm.loss]`\n\n{losses}"


def _table(definitions: Mapping[str, type[Definition]]) -> str:
    table = "| kind | formula | keys and defaults | source |\n|---|---|---|---|\n"
    for kind, definition in definitions.items():
        cells = [cell.replace("|", "\\|") for cell in _cells(definition.model_validate({"kind": kind}))]
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
