"""The reward of a tiny generated model under every preset, step by step.

The trainer is the real one, with one rank; samples are drawn by a plain PyTorch loop. It shows
that each algorithm learns, not how good it is: the task is to prefer half of the vocabulary.

    python -m fourfold_bench.learning [--save] [PRESET ...]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from fourfold.config import PRESETS
from fourfold_bench import record
from tests.support.learning_driver import NEW_TOKENS, PROMPTS, STEPS
from tests.support.tiny_models import write_tiny_model
from tests.support.trainer_driver import REPOSITORY, trainer_environment

LIBRARIES: Final = ("torch", "transformers", "deepspeed", "numpy")


def main() -> int:
    """Train every preset, print what it gained, and write it down where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("presets", nargs="*", default=list(PRESETS))
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    options = parser.parse_args()
    curves: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        model = write_tiny_model(out / "model", "llama", dtype="float32")
        argv = [sys.executable, "-m", "tests.support.learning_driver", str(model), str(out), *options.presets]
        subprocess.run(argv, env=trainer_environment(), cwd=REPOSITORY, check=True, stderr=subprocess.DEVNULL)
        for preset in options.presets:
            curve = json.loads((out / f"{preset}.json").read_text())
            curves[preset] = {
                "rewards": [round(reward, 3) for reward in curve["rewards"]],
                "seconds": round(curve["seconds"], 1),
            }
            print(f"{preset:30} {curve['rewards'][0]:.2f} -> {curve['rewards'][-1]:.2f}  {curve['seconds']:5.1f} s")
    if options.save:
        parameters = {"steps": STEPS, "prompts": len(PROMPTS), "new_tokens": NEW_TOKENS}
        print(record.write("learning", parameters=parameters, results=curves, libraries=LIBRARIES))
    return 0


if __name__ == "__main__":
    sys.exit(main())
