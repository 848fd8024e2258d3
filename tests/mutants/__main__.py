"""Run the tests of each central module against small faults of it, and write which faults they miss.

    make mutants                                        # the whole sample; the result goes to benchmarks/results
    .venv/bin/python -m tests.mutants --module fourfold/rpc/codec.py --out result.json

The faults are made in copies of the tree in a temporary folder.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import queue
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cosmic_ray.testing import run_tests
from cosmic_ray.work_item import TestOutcome

from .sample import SEED, Mutant, draw
from .table import ROOT, Module, load_modules, load_verdicts

IMPORT_FOLDERS = (
    ".",
    "services/rollout",
    "services/trainer",
    "services/reward",
    "services/coordinator",
    "services/gateway",
    "tools",
)
BASELINE_SECONDS = 300.0
TEST_SECONDS = 30
TARGET = 0.95
_NO_REASON = "no reason: write a test that finds it, or judge it in tests/mutants/verdicts.toml"


def main() -> int:
    """Run the command; 0 when enough faults are found and each survivor has a reason."""
    options = _parse()
    modules = [m for m in load_modules() if not options.module or m.path in options.module]
    mutants = {module: draw(ROOT, module.path, options.count) for module in modules}
    if options.only:
        mutants = {module: [m for m in drawn if m.id in options.only] for module, drawn in mutants.items()}
        modules = [module for module in modules if mutants[module]]
    if options.list:
        for mutant in (m for drawn in mutants.values() for m in drawn):
            print(f"{mutant.id} {mutant.module}:{mutant.line} {mutant.family}\n  - {mutant.before}\n  + {mutant.after}")
        return 0
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fourfold-mutants-") as folder:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(options.jobs):
            trees.put(_copy(Path(folder) / str(number)))
        with ThreadPoolExecutor(options.jobs) as pool:
            seconds = dict(zip(modules, pool.map(lambda m: _baseline(trees, m), modules), strict=True))
            work = [(module, mutant) for module in modules for mutant in mutants[module]]
            rows = list(pool.map(lambda pair: _try(trees, pair[0], pair[1], seconds[pair[0]]), work))
    result = _result(modules, seconds, rows, time.monotonic() - started)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return _say(result, options.out)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--module", action="append", default=[], help="path of one module (default: all of the table)")
    parser.add_argument("--only", action="append", default=[], metavar="ID", help="one mutant")
    parser.add_argument("--count", type=int, default=12, help="mutants of each module (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tested at the same time (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the sample and run nothing")
    default = ROOT / f"benchmarks/results/mutants-{datetime.datetime.now(datetime.UTC).date()}.json"
    parser.add_argument("--out", type=Path, default=default, help="file of the result (default: %(default)s)")
    return parser.parse_args()


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return run.stdout


def _copy(to: Path) -> Path:
    """Copy what git knows or would add, with compiled files that Python checks by content."""
    names = _git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    compiled = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", str(to)]
    subprocess.run(compiled, check=True, timeout=300)
    return to


@contextmanager
def _tree(trees: queue.SimpleQueue[Path]) -> Iterator[Path]:
    tree = trees.get()
    try:
        yield tree
    finally:
        trees.put(tree)


def _run(tree: Path, tests: Sequence[str], timeout: float) -> tuple[TestOutcome, str]:
    """Run tests in a tree; return the outcome and the output."""
    path = os.pathsep.join(str(tree / folder) for folder in IMPORT_FOLDERS)
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    command = ["env", "-C", str(tree), f"PYTHONPATH={path}", *pytest, f"--timeout={TEST_SECONDS}", *tests]
    return run_tests(shlex.join(command), timeout)  # type: ignore[no-any-return]


def _baseline(trees: queue.SimpleQueue[Path], module: Module) -> float:
    """Return the seconds of a module's tests without a fault. A test that fails gets a second chance.

    Raises:
        RuntimeError: they fail.
    """
    with _tree(trees) as tree:
        for _ in range(2):
            started = time.monotonic()
            outcome, output = _run(tree, module.tests, BASELINE_SECONDS)
            if outcome is TestOutcome.SURVIVED:
                return round(time.monotonic() - started, 1)
    raise RuntimeError(f"the tests of {module.path} fail without a fault; repair them first:\n{output[-4000:]}")


def _try(trees: queue.SimpleQueue[Path], module: Module, mutant: Mutant, baseline: float) -> dict[str, Any]:
    """Run a module's tests against one mutant and return its row of the result."""
    started = time.monotonic()
    with _tree(trees) as tree:
        path = tree / mutant.module
        original = path.read_bytes()
        path.write_text(mutant.code, encoding="utf-8")
        try:
            outcome, killed_by = _judge(tree, module, 3 * baseline + TEST_SECONDS)
        finally:
            path.write_bytes(original)
    row: dict[str, Any] = {
        "id": mutant.id, "module": mutant.module, "line": mutant.line, "definition": mutant.definition,
        "operator": mutant.operator.partition("/")[2], "before": mutant.before, "after": mutant.after,
        "outcome": outcome, "killed_by": killed_by, "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip
    print(f"{outcome:9} {mutant.id} {mutant.module}:{mutant.line} ({row['seconds']} s)", flush=True)
    return row


def _judge(tree: Path, module: Module, timeout: float) -> tuple[str, str]:
    """Return "killed" or "survived", and what killed it. A failure counts when it comes again: tests may be flaky."""
    for _ in range(2):
        outcome, output = _run(tree, module.tests, timeout)
        if outcome is TestOutcome.SURVIVED:
            break
        failed = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", output, re.MULTILINE)
        if failed is None:
            return "killed", "a timeout" if output == "timeout" else "the end of pytest"
        if _run(tree, [failed[1]], timeout)[0] is not TestOutcome.SURVIVED:
            return "killed", failed[1]
    return "survived", ""


def _result(modules: list[Module], seconds: dict[Module, float], rows: list[dict[str, Any]], took: float) -> Any:
    verdicts = load_verdicts()
    for row in rows:
        verdict = verdicts.get((row["module"], row["before"], row["after"]))
        if row["outcome"] == "survived" and verdict is not None:
            row["reason"] = verdict.reason
            if verdict.verdict == "equivalent":
                row["outcome"] = "equivalent"
    return {
        "commit": _git("rev-parse", "HEAD").strip(),
        "changed_since": sorted(line[3:] for line in _git("status", "--porcelain").splitlines()),
        "python": sys.version.split()[0],
        "tool": "cosmic-ray",
        "seed": SEED,
        "minutes": round(took / 60, 1),
        "total": _count(rows),
        "modules": [
            {"module": m.path, "tests": list(m.tests), "seconds_without_a_fault": seconds[m]}
            | _count(row for row in rows if row["module"] == m.path)
            for m in modules
        ],
        "mutants": rows,
    }


def _count(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    count = Counter(row["outcome"] for row in rows)
    judged = count["killed"] + count["survived"]
    share = round(count["killed"] / judged, 4) if judged else None
    return {"mutants": count.total(), **{k: count[k] for k in ("killed", "survived", "equivalent")}, "share": share}


def _say(result: Any, out: Path) -> int:
    """Print the survivors and the sums; return the exit code."""
    survivors = [row for row in result["mutants"] if row["outcome"] == "survived"]
    for row in survivors:
        print(f"\n{row['id']} {row['module']}:{row['line']} in {row['definition']}")
        print(f"  - {row['before']}\n  + {row['after']}\n  {row.get('reason', _NO_REASON)}")
    for line in result["modules"]:
        print(f"{line['module']:58} {', '.join(f'{line[k]} {k}' for k in ('killed', 'survived', 'equivalent'))}")
    total = result["total"]
    print(
        f"{total['mutants']} mutants, {total['equivalent']} equivalent; of the others {total['killed']} killed "
        f"({total['share']:.1%}; at least {TARGET:.0%} wanted) in {result['minutes']} minutes; {out}"
    )
    return 0 if total["share"] >= TARGET and all("reason" in row for row in survivors) else 1


if __name__ == "__main__":
    sys.exit(main())
