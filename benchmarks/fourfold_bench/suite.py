"""Runs the configurations of a suite, each in a process of its own with a time limit; prints one table at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from fourfold.errors import ConfigError
from fourfold_bench.harness import Benchmark

_SECONDS: Final = 300.0
_TIMED_OUT: Final = 124


def run_suite(benchmark: Benchmark[Any], suite: str, folder: Path, *, only: str) -> int:
    """Run the configurations whose name contains `only`; write one JSON file for each; return 1 if one failed.

    Raises:
        ConfigError: no name contains `only`.
    """
    chosen = {name: arguments for name, arguments in benchmark.suites[suite].items() if only in name}
    if not chosen:
        raise ConfigError(f"--only {only}: it must be part of one of these names: {', '.join(benchmark.suites[suite])}")
    folder.mkdir(parents=True, exist_ok=True)
    documents, failed = [], []
    for name, arguments in chosen.items():
        path = folder / f"{benchmark.name}-{name}-{time.strftime('%Y-%m-%d', time.gmtime())}.json"
        print(f"{name}: fourfold bench {benchmark.name} {arguments}", flush=True)
        began = time.monotonic()
        code = _run([benchmark.name, *arguments.split(), "--name", name, "--json", str(path)])
        print(f"{name}: {'ok' if not code else f'failed ({code})'}, {time.monotonic() - began:.0f} s", flush=True)
        if code:
            failed.append(name)
        else:
            documents.append(json.loads(path.read_text(encoding="utf-8")))
    if documents:
        print("\n".join(["", *benchmark.suite_table(documents)]))
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
    return 1 if failed else 0


def _run(arguments: Sequence[str]) -> int:
    """Run one configuration in a session of its own, whose processes all end with it; return its exit code."""
    command = [sys.executable, "-m", "fourfold", "bench", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        return process.wait(_SECONDS)
    except subprocess.TimeoutExpired:
        return _TIMED_OUT
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
