"""Finds the benchmark of `fourfold bench WHAT`, and runs it with the harness."""

from __future__ import annotations

import argparse
import importlib
from typing import Any, Final

from fourfold_bench import harness

_BENCHMARKS: Final = ("weights", "rollout", "step")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a subcommand with its options for each benchmark."""
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name in _BENCHMARKS:
        benchmark = _find(name)
        text = benchmark.summary
        harness.add_arguments(benchmark, what.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}."))


def main(args: argparse.Namespace) -> int:
    """Run one benchmark; return the exit code."""
    return harness.run(_find(args.what), args)


def _find(name: str) -> harness.Benchmark[Any]:
    benchmark: harness.Benchmark[Any] = importlib.import_module(f"fourfold_bench.{name}.benchmark").BENCHMARK
    return benchmark
