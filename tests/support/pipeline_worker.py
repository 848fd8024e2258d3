"""A worker of an engine with several stages, with what vLLM leaves out on a CPU."""

from __future__ import annotations

from typing import Any

from fourfold_rollout.vllm.worker_extension import RolloutWorker


class PipelineWorker(RolloutWorker):
    """The service's worker."""

    def weights_describe(self) -> Any:
        """Describe the worker; before, allocate the input of a later stage.

        vLLM allocates it in a warm-up, which it skips on a CPU without compilation.
        """
        from vllm.distributed.parallel_state import get_pp_group

        runner: Any = self.model_runner  # type: ignore[attr-defined]
        if not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
        return super().weights_describe()
