"""Runs tests without a fault, and against the faults of mutants.toml; lists faults that no test finds.

    .venv/bin/python -m tests.lock.mutants [TEXT]    # only those whose file or change has the text

Each fault is put into a module while a process imports it; no file changes. Before the first fault of some tests, they
must pass in such a process with the module as it is: otherwise they would fail with every fault. The processes are
forks of one that has imported the large libraries, which takes longer than most of these tests.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import time
import tomllib
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
TABLE: Final = Path(__file__).with_name("mutants.toml")
_TEST_SECONDS: Final = 30
_FEW_EXAMPLES: Final = 5  # show that tests pass in a fork
_FOUND: Final = (1, 2)  # exit codes of pytest: a test failed, or could not be collected


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One replaced text in one module, and the test files of which one must fail."""

    path: str
    tests: tuple[str, ...]
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}: {self.old} -> {self.new}"

    def module(self) -> str:
        """Return the module without the fault."""
        return (ROOT / self.path).read_text(encoding="utf-8")

    def source(self) -> str:
        """Return the module with the fault; raise ValueError unless the text that it replaces is there once."""
        text = self.module()
        if text.count(self.old) != 1:
            raise ValueError(
                f"{TABLE.name}: {self.path} has {self.old!r} {text.count(self.old)} times; repair this fault"
            )
        return text.replace(self.old, self.new)


def load() -> list[Mutant]:
    """Return the faults of the table."""
    modules = tomllib.loads(TABLE.read_text(encoding="utf-8"))["module"]
    return [
        Mutant(path=module["path"], tests=tuple(module["tests"]), old=old, new=new)
        for module in modules
        for old, new in module["faults"]
    ]


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    """Gives one file another source."""

    def __init__(self, path: Path, source: str) -> None:
        self._path, self._source = path, source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.rpartition(".")[2] != self._path.stem or path is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.origin is None or Path(spec.origin).resolve() != self._path:
            return None
        return importlib.util.spec_from_file_location(
            fullname, spec.origin, loader=_Loader(fullname, spec.origin, self._source)
        )


def is_found(mutant: Mutant) -> bool:
    """Return whether the tests of a mutant fail with it, in a fork of this process."""
    source = mutant.source()
    compile(source, mutant.path, "exec")  # pytest cannot collect a fault that is no Python, which would count as found
    return tests_fail(mutant, source)


def tests_fail(mutant: Mutant, source: str, *, examples: int | None = None) -> bool:
    """Return whether the tests of a mutant fail with a text of its module, in a fork of this process.

    `examples` is the most that Hypothesis tries in a test; None: as many as the everyday tests.
    """
    pid = os.fork()
    if not pid:
        code = 3  # pytest's code of an error of its own
        try:
            code = _run(mutant, source, examples)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code not in (0, *_FOUND):
        raise RuntimeError(f"pytest ended with {code} for the tests of {mutant}")
    return code in _FOUND


class _Examples:
    """A plugin that keeps Hypothesis from looking for a smaller example of a failure, which takes minutes."""

    def __init__(self, most: int | None) -> None:
        self._most = most

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings

        parent = settings.get_profile("fourfold")
        most = self._most or parent.max_examples
        settings.register_profile("lock", parent, phases=(Phase.explicit, Phase.generate), max_examples=most)
        settings.load_profile("lock")


def _run(mutant: Mutant, source: str, examples: int | None) -> int:
    import pytest

    os.chdir(ROOT)
    sys.meta_path.insert(0, _Finder(ROOT / mutant.path, source))
    words = ["-x", "-q", "--no-header", "--tb=no", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist"]
    return int(pytest.main([*words, f"--timeout={_TEST_SECONDS}", *mutant.tests], plugins=[_Examples(examples)]))


def main() -> int:
    """Run the command; 0 when each fault is found."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests/conftest.py sets it in the forks, after torch was imported
    import pytest
    import torch

    assert pytest and torch, "imported for the forks"
    assert not any(name.partition(".")[0].startswith("fourfold") for name in sys.modules), "a fork must import these"
    chosen = [mutant for mutant in load() if not sys.argv[1:] or sys.argv[1] in str(mutant)]
    missed = []
    passed = set[tuple[str, ...]]()  # the tests that pass without a fault
    for mutant in chosen:
        began = time.monotonic()
        if mutant.tests not in passed:
            if tests_fail(mutant, mutant.module(), examples=_FEW_EXAMPLES):
                sys.stderr.write(f"{', '.join(mutant.tests)} fail without a fault; repair them first\n")
                return 1
            passed.add(mutant.tests)
            sys.stderr.write(f"passed {time.monotonic() - began:4.1f} s  {', '.join(mutant.tests)}\n")
            began = time.monotonic()
        if not is_found(mutant):
            missed.append(mutant)
        sys.stderr.write(f"{'missed' if mutant in missed else 'found '} {time.monotonic() - began:4.1f} s  {mutant}\n")
    sys.stderr.write("".join(f"no test finds {mutant}\n" for mutant in missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
