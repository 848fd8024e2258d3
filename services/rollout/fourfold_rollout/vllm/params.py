"""What vLLM is asked for."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from fourfold_rollout.engine import SampleRequest
from fourfold_rollout.vllm.logprob_table import SLOT, LogprobRow


def sampling_params(request: SampleRequest, row: LogprobRow | None) -> SamplingParams:
    """Return what vLLM is asked for; it gives log-probabilities itself when there is no row for them."""
    options: dict[str, Any] = {"logprobs": 0, "flat_logprobs": True}
    if row is not None:
        options = {"extra_args": {SLOT: row.slot}}
    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        max_tokens=request.max_tokens,
        stop_token_ids=list(request.stop_token_ids),
        seed=request.seed,
        detokenize=False,
        ignore_eos=True,  # the stop tokens above are all of them
        output_kind=RequestOutputKind.DELTA if request.streaming else RequestOutputKind.FINAL_ONLY,
        **options,
    )


def probe_params() -> SamplingParams:
    """Return what vLLM is asked for where only the log-probabilities of the prompt matter."""
    return SamplingParams(
        max_tokens=1,
        seed=0,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
