"""Faults of the coordinator that the fault test must find: patches of a copy of its package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.support.trainer_driver import REPOSITORY

_PACKAGE: Final = REPOSITORY / "services" / "coordinator"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One replaced text in one file, and what the test says of it."""

    file: str
    old: str
    new: str
    found_by: tuple[str, ...]  # parts of the messages of the invariants that it may break first
    fault: tuple[str, str] | None = None  # kind and phase, if only this fault shows it


MUTANTS: Final = {
    "restore keeps groups of lost weights": Mutant(
        "training/recovery.py",
        "return [g for g in groups if all(v.policy_version <= newest for s in g.segments for v in s.version_spans)]",
        "return groups",
        ("lost weights", "groups admitted"),
    ),
    "versions are renumbered off by one": Mutant(
        "training/recovery.py",
        "policy_version=old.policy_version + raised - version)",
        "policy_version=old.policy_version + raised - version + 1)",
        ("wrong version of a token",),
    ),
    "step in flight is acknowledged and its groups are kept": Mutant(
        "training/recovery.py",
        "groups = [group for group in groups if group not in batch]",
        "pass",
        # The ledger refuses to lease or to drop them again, so that the trainer never gets them.
        ("is TRAINED; only READY samples are leased", "is TRAINED; it cannot become DROPPED"),
        ("kill coordinator", "training"),
    ),
}


def mutated(mutant: Mutant) -> str:
    """Return the text of the mutant's file; fail unless the text that it replaces is there once."""
    text = (_PACKAGE / "fourfold_coordinator" / mutant.file).read_text()
    assert text.count(mutant.old) == 1, f"{mutant.file} has changed; repair this mutant: {mutant.old}"
    return text.replace(mutant.old, mutant.new)


def run_mutant(mutant: Mutant | None, folder: Path, *, seed: int, runs: int) -> dict[str, Any]:
    """Run the fault test on a mutant, or on an unchanged copy, until an invariant breaks; return its tally."""
    package = folder / "coordinator"
    shutil.copytree(_PACKAGE, package)
    if mutant is not None:
        (package / "fourfold_coordinator" / mutant.file).write_text(mutated(mutant))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package), *filter(None, sys.path)])}
    words = ["--seed", str(seed), "--runs", str(runs), "--out", str(folder / "result.json")]
    words += ["--fault", *mutant.fault] if mutant is not None and mutant.fault else []
    with (folder / "output.log").open("w") as log:
        subprocess.run(
            [sys.executable, "-m", "tests.support.fault_soak", *words],
            cwd=REPOSITORY, env=env, check=True, timeout=1200, stdout=log, stderr=log,
        )  # fmt: skip
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result
