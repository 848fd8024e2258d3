"""Runs one run through faults after another, until enough samples were issued; writes the tally as JSON.

python -m tests.support.fault_soak --seed 1 --samples 50000 --out result.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from fourfold_coordinator.reporting import report
from tests.support.fault_run import FaultRun, Tally, build_clock
from tests.support.memory_folder import memory_folder

STEPS: Final = 80
FAULTS: Final = 16


async def soak(seed: int, samples: int, *, most_runs: int, given: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return what happened in runs with the seeds `seed`, `seed` + 1, ... until there were so many samples.

    `given`, kinds and phases, are the faults that strike in turn, if there are any.
    """
    tally, began, runs = Tally(), time.monotonic(), 0
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as built:
        clock = build_clock(Path(built))
        while tally.samples < samples and runs < most_runs and not failures:
            with memory_folder() as folder:
                try:
                    run = FaultRun(folder, clock, seed=seed + runs, steps=STEPS, tally=tally, given=given)
                    await run.run(FAULTS)
                except (AssertionError, TimeoutError) as error:
                    failures.append(f"seed {seed + runs}: {error}")
            runs += 1
            sys.stdout.write(f"runs={runs} samples={tally.samples} seconds={time.monotonic() - began:.0f}\n")
            sys.stdout.flush()
    seconds = round(time.monotonic() - began, 1)
    return {"first_seed": seed, "runs": runs, "seconds": seconds, "failures": failures, **tally.as_dict()}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=1000, help="most of them")
    parser.add_argument("--fault", nargs=2, metavar=("KIND", "PHASE"), help="the only one that strikes")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    vars(report)["draw_curve"] = lambda path, *_, **__: path.write_bytes(b"")  # takes half a second
    given = [(options.fault[0], options.fault[1])] if options.fault else []
    result = asyncio.run(soak(options.seed, options.samples, most_runs=options.runs, given=given))
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
