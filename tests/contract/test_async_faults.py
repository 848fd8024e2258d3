"""Asynchronous training under faults: no sample is trained twice, lost without a reason, or trained while stale.

Toy engines, trainer and reward service are real gRPC servers behind links that can be cut. The coordinator is a process
or lives in the test. `tests.fakes.witness` knows the weights of each token, and checks the coordinator independently.
A run that failed is repeated with FOURFOLD_FAULT_SEED: the same faults in the same phases.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from fourfold_bench import record
from fourfold_coordinator.reporting import report
from tests.support.fault_mutants import MUTANTS, mutated, run_mutant
from tests.support.fault_run import KINDS, PHASES, FaultRun, Tally, build_clock
from tests.support.fault_soak import FAULTS, STEPS
from tests.support.memory_folder import memory_folder

SEED: Final = int(os.environ.get("FOURFOLD_FAULT_SEED", "1"))
RESULT: Final = os.environ.get("FOURFOLD_FAULT_RESULTS", "")
_SAMPLES: Final = 100_000
_PROCESSES: Final = 2
_KILLS: Final = tuple(kind for kind in KINDS if kind.startswith("kill"))
_TURNS: Final = range(len(_KILLS))
_COUNTERS: Final = ("dropped", "coordinators", "errors", "violations", "samples_by_lag")


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
        await FaultRun(folder, clock, seed=SEED, steps=steps, tally=tally, given=faults).run(len(faults))
    assert tally.trained >= steps * 4 * 14 and tally.checks > 0
    struck = {phase for kind, phase in tally.faults if kind.startswith("kill")}
    assert struck >= set(PHASES)
    record_property("tally", tally.as_dict())


async def _soak(index: int, folder: Path) -> dict[str, Any]:
    out = folder / f"{index}.json"
    words = ["--seed", str(SEED + 1000 * index), "--samples", str(_SAMPLES // _PROCESSES), "--out", str(out)]
    with (folder / f"{index}.log").open("w") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.support.fault_soak", *words), stdout=log, stderr=log
        )
    try:
        assert await asyncio.wait_for(process.wait(), 3600) == 0, (folder / f"{index}.log").read_text()[-3000:]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def _merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums of the processes' tallies."""
    merged: dict[str, Any] = {"first_seeds": [part["first_seed"] for part in parts]}
    for name in ("runs", "faults", "samples", "trained", "mixed_version_samples", "invariant_checks", "restores"):
        merged[name] = sum(part[name] for part in parts)
    merged["seconds"] = max(part["seconds"] for part in parts)
    for name in _COUNTERS:
        merged[name] = dict(sorted(sum((Counter(part[name]) for part in parts), Counter()).items()))
    tables = [part["faults_by_kind_and_phase"] for part in parts]
    merged["faults_by_kind_and_phase"] = {
        kind: dict(sorted(sum((Counter(table[kind]) for table in tables), Counter()).items())) for kind in KINDS
    }
    return merged


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(3700)
async def test_a_hundred_thousand_samples_survive_faults_of_all_kinds(tmp_path: Path) -> None:
    parts = await asyncio.gather(*(_soak(index, tmp_path) for index in range(_PROCESSES)))
    assert [part["failures"] for part in parts] == [[]] * _PROCESSES
    merged = _merge(list(parts))
    assert merged["samples"] >= _SAMPLES and not merged["violations"]
    assert all(merged["faults_by_kind_and_phase"].values()), "each kind of fault struck"
    assert set(merged["samples_by_lag"]) == {"0", "1", "2", "3", "4"}
    if RESULT:
        result = record.document(
            "async-faults",
            command="python -m pytest tests/contract/test_async_faults.py -k hundred_thousand",
            parameters={"steps_of_a_run": STEPS, "faults_of_a_run": FAULTS, "processes": _PROCESSES, "seed": SEED},
            results=merged,
            libraries=("grpcio", "protobuf", "numpy"),
        )
        record.write(Path(RESULT), result)


@pytest.mark.parametrize("name", list(MUTANTS))
def test_each_fault_of_the_coordinator_has_its_place(name: str) -> None:
    assert mutated(MUTANTS[name])


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(1300)
def test_a_copy_of_the_coordinator_without_a_fault_passes(tmp_path: Path) -> None:
    assert run_mutant(None, tmp_path, seed=SEED, runs=1)["failures"] == []


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("name", list(MUTANTS))
def test_faults_of_the_coordinator_are_found(name: str, tmp_path: Path) -> None:
    result = run_mutant(MUTANTS[name], tmp_path, seed=SEED, runs=8)
    assert result["failures"], f"no invariant broke in {result['runs']} runs"
    message = result["failures"][0].split("\n")[0]
    assert any(text in message for text in MUTANTS[name].found_by), message
