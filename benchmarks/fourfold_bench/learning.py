"""Trains a tiny generated model with every preset, and shows the reward step by step.

The trainer is the real one, with one rank; a plain PyTorch loop samples. The task is to prefer half of the vocabulary:
the result shows that each algorithm learns, not how good it is. It needs the repository's tests.

    python -m fourfold_bench.learning [--save] [PRESET ...]
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fourfold.config import PRESETS
from fourfold_bench.harness import Benchmark, BenchmarkRun, BenchmarkSettings, option, run_script
from tests.support.learning_driver import NEW_TOKENS, PROMPTS, STEPS
from tests.support.tiny_models import write_tiny_model
from tests.support.trainer_driver import REPOSITORY, trainer_environment


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningSettings(BenchmarkSettings):
    """The presets, and the sizes of the test driver."""

    presets: tuple[str, ...] = option("default: all", flag="presets", metavar="PRESET")
    steps: int = STEPS
    prompts: int = len(PROMPTS)
    new_tokens: int = NEW_TOKENS

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        return given | {"presets": given.get("presets") or tuple(PRESETS)}


class LearningBenchmark(Benchmark[LearningSettings]):
    """Rewards of every preset."""

    name = "learning"
    summary = "the reward of a tiny model under every preset"
    settings = LearningSettings
    libraries = ("torch", "transformers", "deepspeed", "numpy")

    def measure(self, settings: LearningSettings, run: BenchmarkRun) -> dict[str, Any]:
        model = write_tiny_model(run.folder / "model", "llama", dtype="float32")
        argv = [sys.executable, "-m", "tests.support.learning_driver", str(model), str(run.folder), *settings.presets]
        subprocess.run(argv, env=trainer_environment(), cwd=REPOSITORY, check=True, stderr=subprocess.DEVNULL)
        curves = {preset: json.loads((run.folder / f"{preset}.json").read_text()) for preset in settings.presets}
        return {
            preset: {
                "rewards": [round(reward, 3) for reward in curve["rewards"]],
                "seconds": round(curve["seconds"], 1),
            }
            for preset, curve in curves.items()
        }

    def table(self, document: Mapping[str, Any]) -> list[str]:
        return [
            f"{preset:30} {curve['rewards'][0]:.2f} -> {curve['rewards'][-1]:.2f}  {curve['seconds']:5.1f} s"
            for preset, curve in document["results"].items()
        ]


if __name__ == "__main__":
    sys.exit(run_script(LearningBenchmark()))
