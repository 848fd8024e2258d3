"""A worker of an engine with several stages, with what vLLM leaves out on a CPU."""

from __future__ import annotations

from typing import Any

from fourfold.weights.apply.vllm_worker import WeightWorker


class PipelineWorker(WeightWorker):
    """Mixed into vLLM's worker."""

    def make_stage_buffers(self) -> Any:
        """Allocate the input of a later stage: vLLM does it in a warm-up, which it skips without compilation on CPU."""
        from vllm.distributed.parallel_state import get_pp_group

        runner: Any = self.model_runner  # type: ignore[attr-defined]
        if not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
