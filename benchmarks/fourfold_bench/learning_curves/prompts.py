"""Writes the training prompts of a recipe to a JSONL file, for machines without reasoning-gym.

python -m fourfold_bench.learning_curves.prompts RECIPE FILE
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

from fourfold import config as configuration
from fourfold_coordinator.data.sources import read_rows


def write_prompts(recipe: Path, path: Path) -> int:
    """Write the rows of `[data.train]`; return their number."""
    rows = itertools.chain.from_iterable(map(read_rows, configuration.load(recipe).data.train))
    lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    return len(lines)


if __name__ == "__main__":
    print(write_prompts(Path(sys.argv[1]), Path(sys.argv[2])), "prompts")
