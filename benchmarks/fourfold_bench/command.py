"""Finds the benchmark of `fourfold bench WHAT`, and runs it with the harness."""

from __future__ import annotations

import argparse
import importlib
from typing import Any, Final

from fourfold_bench import harness

_OF_ROWS: Final = ("sft", "dpo", "reward-training")
NAMES: Final = ("weights", "rollout", "step", "long-tail", "gateway", "reward", *_OF_ROWS)
"""Each is the `BENCHMARK` of a package `NAME/benchmark.py`, with `_` for `-`, or is in `rows/benchmark.py`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a subcommand with its options for each benchmark."""
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name in NAMES:
        benchmark = find(name)
        text = benchmark.summary
        harness.add_arguments(benchmark, what.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}."))


def main(args: argparse.Namespace) -> int:
    """Run one benchmark; return the exit code."""
    return harness.run(find(args.what), args)


def find(name: str) -> harness.Benchmark[Any]:
    package = "rows" if name in _OF_ROWS else name.replace("-", "_")
    module = importlib.import_module(f"fourfold_bench.{package}.benchmark")
    benchmark: harness.Benchmark[Any] = module.BENCHMARKS[name] if name in _OF_ROWS else module.BENCHMARK
    return benchmark
