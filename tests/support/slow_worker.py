"""A worker whose engine takes its time, so that what a test does in the middle of a sample comes in time.

A tiny model samples 500 tokens in a second; on a busy machine a test may not get a processor for that long.
"""

from __future__ import annotations

import time
from typing import Any

from fourfold_rollout.vllm.worker import RolloutWorker


class SlowWorker(RolloutWorker):
    """The service's own; a step takes so much longer from the time it is described, which is before the first."""

    step_seconds = 0.005

    def slow_down(self, seconds: float) -> None:
        """Take longer from now on, or less long."""
        self.step_seconds = seconds

    def weights_describe(self) -> Any:
        """Describe it, and slow it down."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        real = runner.execute_model

        def execute_model(*given: Any, **more: Any) -> Any:
            time.sleep(self.step_seconds)
            return real(*given, **more)

        runner.execute_model = execute_model
        return super().weights_describe()
