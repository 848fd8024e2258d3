"""The workers of the engines that `logprob_driver` starts: one counts preemptions, one refuses the table."""

from __future__ import annotations

from typing import Any

from fourfold_rollout.vllm.worker_extension import RolloutWorker
from tests.support.slow_worker import SlowWorker


class CountingWorker(SlowWorker):
    """A slow worker that counts preemptions from the first call of `count_preemptions` on."""

    _preemptions: list[str] | None = None

    def runner_name(self) -> str:
        """Return the module of its model runner."""
        return _runner_name(self)

    def count_preemptions(self) -> int:
        """Return how many there were."""
        if self._preemptions is None:
            seen = self._preemptions = []
            runner: Any = self.model_runner  # type: ignore[attr-defined]
            real = runner.execute_model

            def execute_model(scheduler_output: Any, *rest: Any, **more: Any) -> Any:
                seen.extend(scheduler_output.preempted_req_ids or ())
                return real(scheduler_output, *rest, **more)

            runner.execute_model = execute_model
        return len(self._preemptions)


class UnableWorker(RolloutWorker):
    """A worker that cannot open the table, so that log-probabilities come from vLLM."""

    def logprobs_open(self, path: str, slots: int, width: int, patch_seeds: bool) -> str:
        return "it is a test"

    def runner_name(self) -> str:
        """Return the module of its model runner."""
        return _runner_name(self)


def _runner_name(worker: Any) -> str:
    return str(type(worker.model_runner).__module__)
