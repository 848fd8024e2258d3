"""`fourfold bench WHAT`: finds the benchmark."""

from __future__ import annotations

import argparse
import importlib
from typing import Any, Final

_BENCHMARKS: Final = {
    "weights": ("fourfold_bench.weights.command", "the update of a running engine's weights"),
    "rollout": ("fourfold_bench.rollout.command", "a rollout service against vLLM's own LLM.generate"),
    "step": ("fourfold_bench.step.command", "training steps through `fourfold run`, phase by phase"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmarks, each with its arguments."""
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name, (module, text) in _BENCHMARKS.items():
        command = what.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        _module(module).add_arguments(command)


def main(args: argparse.Namespace) -> int:
    """Run the benchmark."""
    code: int = _module(_BENCHMARKS[args.what][0]).main(args)
    return code


def _module(name: str) -> Any:
    return importlib.import_module(name)
