"""The coordinator process of the benchmark: it traces another share of the samples in each step, in turns.

python -m fourfold_bench.tracing.coordinator RATIOS RECIPE RUN_DIR RESULT.json
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fourfold import config as configuration
from fourfold.tracing import export
from fourfold_bench.engines.coordinator import run
from fourfold_coordinator import serve
from fourfold_coordinator.state.sample_traces import SampleTraces


def main(ratios: Sequence[float], recipe: Path, folder: Path, result: Path) -> int:
    """Run to the last step; return the exit code."""
    prompts = configuration.load(recipe).batch.prompts_per_step

    class AlternatingTraces(SampleTraces):
        def __init__(self, **_: Any) -> None:
            super().__init__()
            self._limits = [SampleTraces(ratio=ratio)._limit for ratio in ratios]

        def issue(self, sample_ids: Sequence[str]) -> None:
            position = int(sample_ids[0].split("-")[0][1:])
            self._limit = self._limits[position // prompts % len(self._limits)]
            super().issue(sample_ids)

    setattr(serve, "SampleTraces", AlternatingTraces)  # noqa: B010
    # A step's spans are written in that step, and not in the next one, which has another share.
    setattr(export, "_PERIOD_SECONDS", 0.05)  # noqa: B010
    return asyncio.run(run(recipe, folder, result))


if __name__ == "__main__":
    sys.exit(main([float(ratio) for ratio in sys.argv[1].split(",")], *map(Path, sys.argv[2:])))
