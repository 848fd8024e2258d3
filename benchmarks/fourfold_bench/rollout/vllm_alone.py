"""Measures vLLM alone in a process of its own: `LLM.generate`, with and without log-probabilities.

    python -m fourfold_bench.rollout.vllm_alone SETTINGS MODEL OUT

The engine has vLLM's defaults for a batch, except what the work needs: as many sequences at once as there are samples,
the length of a sample, and the same share of the GPU as the service.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

from fourfold.host.process_tree import die_with_parent
from fourfold_bench.gpus import visible
from fourfold_bench.rollout.benchmark import GREEDY_TOKENS, RolloutSettings
from fourfold_bench.vllm_process import CPU_BLOCK_TOKENS, meet_in, prepare

_ROUNDS_OF_ONE_WAY: Final = 1000


def measure(settings: RolloutSettings, model: Path, scratch: Path) -> dict[str, Any]:
    """Start vLLM, generate all rounds in every way, and one prompt greedily; return JSON values.

    "ready_at" is `time.perf_counter`, which all processes of the machine share.
    """
    from vllm import LLM

    options: dict[str, Any] = {"gpu_memory_utilization": settings.engine_memory}
    if not settings.on_gpu:
        options = {"block_size": CPU_BLOCK_TOKENS}
    if settings.eager:
        options["enforce_eager"] = True
    meet_in(scratch)
    llm = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=settings.context,
        max_num_seqs=settings.samples,
        generation_config="vllm",
        use_tqdm_on_load=False,
        **options,
    )
    result: dict[str, Any] = {"ready_at": time.perf_counter(), "seconds": {}}
    for way, name in enumerate(settings.alone):
        numbers = range(way * _ROUNDS_OF_ONE_WAY, way * _ROUNDS_OF_ONE_WAY + settings.warm_up + settings.rounds)
        seconds = [_round(llm, settings, number, way=name) for number in numbers]
        result["seconds"][name] = seconds[settings.warm_up :]
    return result | {"greedy": _greedy(llm, settings)}


def _round(llm: Any, settings: RolloutSettings, number: int, *, way: str) -> float:
    """Generate one round; return its seconds."""
    from vllm import SamplingParams

    shared: dict[str, Any] = {} if way == "plain" else {"logprobs": 0, "flat_logprobs": True}
    shared |= {"n": settings.group_size, "max_tokens": settings.new_tokens, "ignore_eos": True, "detokenize": False}
    params = [
        SamplingParams(temperature=settings.temperature, seed=number + index if way == "seeds" else None, **shared)
        for index in range(settings.prompts)
    ]
    prompts: Any = [{"prompt_token_ids": settings.prompt(number, index)} for index in range(settings.prompts)]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    counts = {len(completion.token_ids) for output in outputs for completion in output.outputs}
    if counts != {settings.new_tokens}:
        raise RuntimeError(f"vLLM sampled {sorted(counts)} tokens; it must sample {settings.new_tokens}")
    return seconds


def _greedy(llm: Any, settings: RolloutSettings) -> dict[str, list[float]]:
    """Return the greedy continuation of one prompt, and its log-probabilities."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=GREEDY_TOKENS, logprobs=0, ignore_eos=True, detokenize=False)
    prompt: Any = [{"prompt_token_ids": settings.prompt(-1, 0)}]
    completion = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    ids = list(completion.token_ids)
    logprobs = [position[token].logprob for position, token in zip(completion.logprobs, ids, strict=True)]
    if not all(map(math.isfinite, logprobs)):
        raise RuntimeError("vLLM returned log-probabilities that are not finite")
    return {"token_ids": ids, "logprobs": logprobs}


if __name__ == "__main__":
    die_with_parent()
    given, out = RolloutSettings.read(Path(sys.argv[1])), Path(sys.argv[3])
    os.environ.update(visible(given.device))
    if not given.on_gpu:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(given.kv_cache_gib)
    prepare(on_gpus=given.on_gpu)
    out.write_text(json.dumps(measure(given, Path(sys.argv[2]), out.parent)), encoding="utf-8")
    sys.stdout.flush()
    # vLLM's processes end with this one. Its shutdown at the interpreter's exit takes seconds.
    os._exit(0)
