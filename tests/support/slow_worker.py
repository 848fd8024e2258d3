"""A worker with slow engine steps, so that a test can act in the middle of a sample.

A tiny model samples 500 tokens in a second; on a busy machine a test may not get a processor for that long.
"""

from __future__ import annotations

import time
from typing import Any

from fourfold_rollout.vllm.worker_extension import RolloutWorker


class SlowWorker(RolloutWorker):
    """The service's worker. Each step takes `step_seconds` longer from `weights_describe` on, before the first step."""

    step_seconds = 0.005

    def slow_down(self, seconds: float) -> None:
        """Change the delay of each step."""
        self.step_seconds = seconds

    def weights_describe(self) -> Any:
        """Describe the worker, and delay its steps from now on."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        real = runner.execute_model

        def execute_model(*given: Any, **more: Any) -> Any:
            time.sleep(self.step_seconds)
            return real(*given, **more)

        runner.execute_model = execute_model
        return super().weights_describe()
