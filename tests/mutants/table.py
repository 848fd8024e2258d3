"""The two tables of `make mutants`: the tests that must notice a fault of a module, and the verdicts on survivors."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
MODULES = Path(__file__).with_name("modules.toml")
VERDICTS = Path(__file__).with_name("verdicts.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A module and the fast tests of it. Paths are relative to the repository."""

    path: str
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The judgement on a mutant that survives; text of the line, not its number, so that it outlives other edits."""

    module: str
    before: str
    after: str
    verdict: Literal["equivalent", "survives"]
    reason: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What names the mutant."""
        return self.module, self.before, self.after


def load_modules(path: Path = MODULES, root: Path = ROOT) -> list[Module]:
    """Read the table of modules.

    Raises:
        ValueError: a file of the table is missing, or a module is there twice or has no tests.
    """
    modules: list[Module] = []
    for row in tomllib.loads(path.read_text(encoding="utf-8"))["module"]:
        module = Module(path=row["path"], tests=tuple(row["tests"]))
        missing = [name for name in (module.path, *module.tests) if not (root / name).is_file()]
        if missing:
            raise ValueError(f"{path.name}: {missing} missing in {root}; correct the row of {module.path}")
        if not module.tests or module.path in {m.path for m in modules}:
            raise ValueError(f"{path.name}: {module.path} needs one row that names at least one test file")
        modules.append(module)
    return modules


def load_verdicts(path: Path = VERDICTS) -> dict[tuple[str, str, str], Verdict]:
    """Read the judgements.

    Raises:
        ValueError: a row has an unknown verdict, no reason, or judges a mutant that another row judges.
    """
    verdicts: dict[tuple[str, str, str], Verdict] = {}
    for row in tomllib.loads(path.read_text(encoding="utf-8")).get("mutant", []):
        verdict = Verdict(**row)
        if verdict.verdict not in ("equivalent", "survives") or not verdict.reason or verdict.key in verdicts:
            raise ValueError(
                f"{path.name}: the row of {verdict.key} must be the only one, with a reason and the verdict "
                f"'equivalent' or 'survives'"
            )
        verdicts[verdict.key] = verdict
    return verdicts
