"""Asynchronous training under faults: no sample is trained twice, lost without a reason, or trained while stale.

Toy engines, trainer and reward service are real gRPC servers behind links that can be cut. The coordinator is a process
or lives in the test. `tests.fakes.witness` knows the weights of each token, and checks the coordinator independently.
A run that failed is repeated with FOURFOLD_FAULT_SEED: the same faults in the same phases.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from fourfold_coordinator.reporting import report
from tests.support.fault_run import KINDS, PHASES, FaultRun, Tally, build_clock
from tests.support.memory_folder import memory_folder

SEED: Final = int(os.environ.get("FOURFOLD_FAULT_SEED", "1"))
_KILLS: Final = tuple(kind for kind in KINDS if kind.startswith("kill"))
_TURNS: Final = range(len(_KILLS))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("turn", [pytest.param(n, marks=pytest.mark.soak if n else pytest.mark.lock) for n in _TURNS])
async def test_samples_survive_kills_in_every_phase_and_faults_of_all_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None], turn: int
) -> None:
    """All turns together have each kind of kill in each phase, which takes too long for the lock."""
    monkeypatch.setattr(report, "draw_curve", lambda path, *_, **__: path.write_bytes(b""))
    kills = [(_KILLS[(number + turn + SEED - 1) % len(_KILLS)], phase) for number, phase in enumerate(PHASES)]
    faults = [*kills, *((kind, "training") for kind in KINDS)]
    tally, clock, steps = Tally(), build_clock(tmp_path), 6 * len(faults)
    with memory_folder() as folder:
        await FaultRun(folder, clock, seed=SEED, steps=steps, tally=tally, faults=faults).run()
    assert tally.trained >= steps * 4 * 14 and tally.checks > 0
    struck = {phase for kind, phase in tally.faults if kind.startswith("kill")}
    assert struck >= set(PHASES)
    record_property("tally", str(tally))
