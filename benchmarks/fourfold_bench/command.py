"""Finds the benchmark of `fourfold bench WHAT`, and runs it with the harness."""

from __future__ import annotations

import argparse
import importlib
from typing import Any, Final

from fourfold_bench import harness

NAMES: Final = ("weights", "rollout", "step", "long-tail", "gateway", "reward", "sft")
"""Each is the `BENCHMARK` of a package `NAME/benchmark.py`, with `_` for `-`."""


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
    module = importlib.import_module(f"fourfold_bench.{name.replace('-', '_')}.benchmark")
    benchmark: harness.Benchmark[Any] = module.BENCHMARK
    return benchmark
