"""Runs a real vLLM engine in a process of its own, driven over a pipe, for the weight-update tests.

The engine runs inside that process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`), which saves its
start-up and runs the same worker code. Engines are started one after the other.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import multiprocessing.connection
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from fourfold.weights.worker_control import unwrap

PROMPTS: Final = ([5, 9, 100, 31, 7], [400, 3, 77], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
_NEW_TOKENS: Final = 12
SIZES: Final[dict[str, Any]] = {"kv_cache_memory_bytes": 1 << 28, "gpu_memory_utilization": 0.01}
"""For engines on a GPU on which others come and go: they measure nothing when they start."""

Output = list[tuple[list[int], list[float]]]
"""For each prompt the sampled tokens and their log-probabilities."""


class Engine:
    """The test's end."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self.weights: Path | None = None
        """Folder whose weights the engine holds, as far as the tests say so."""
        self._proven = False
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_main, args=(other,), daemon=False)
        self._process.start()
        other.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def load(self, folder: Path, **arguments: Any) -> None:
        """Start an engine with the weights of a folder, replacing the one that runs; `arguments` are vLLM's."""
        self.weights = folder
        self._proven = False
        self._call("load", str(folder), arguments)

    def generate(self) -> Output:
        """Return greedy completions of PROMPTS, of the policy's adapter if the engine takes adapters."""
        result: Output = self._call("generate")
        return result

    def verb(self, name: str, *args: Any) -> Any:
        """Call a verb of `WeightWorker`; raise what it answered as an error."""
        return unwrap(self._call("verb", name, args))[0]

    def collective_rpc(self, method: str, *, args: tuple[Any, ...]) -> list[Any]:
        """Call a verb as vLLM's `LLM` does, for a `Publisher`."""
        replies: list[Any] = self._call("verb", method, args)
        return replies

    def prove(self) -> None:
        """Let the engine prove itself, as the rollout service does; once per engine, and before anything is sent."""
        if not self._proven:
            self.verb("weights_prove")
            self._proven = True

    def start_verb(self, name: str, *args: Any) -> None:
        """Begin a verb; `finish_verb` returns its answer."""
        self._pipe.send(("verb", (name, args)))

    def finish_verb(self) -> Any:
        """Wait for the verb begun last."""
        return unwrap(self._answer())[0]

    def packs_heads(self) -> bool:
        """Return true if vLLM computes logits from a packed copy of the weight: not on processors with AVX2 alone."""
        packs: bool = self._call("packs_heads")
        return packs

    def sabotage(self, what: str, on: bool) -> None:
        """Break a part of the worker on purpose: "repack", "experts" or "load"."""
        self._call("sabotage", what, on)

    def sleep(self, level: int) -> None:
        """Have vLLM give its memory up."""
        self._call("sleep", level)

    def wake(self, *tags: str) -> None:
        """Have vLLM take memory again."""
        self._call("wake", list(tags))

    def quantise_in_python(self) -> None:
        """Give vLLM on a CPU what it lacks there to quantise weights to fp8 as it loads them."""
        self._call("quantise_in_python")

    def stop(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(20)
        self._process.kill()

    def _call(self, method: str, *args: Any) -> Any:
        self._pipe.send((method, args))
        return self._answer()

    def _answer(self) -> Any:
        if not self._pipe.poll(self._patience):
            raise TimeoutError(f"the engine has not answered within {self._patience:.0f} s")
        kind, value = self._pipe.recv()
        if kind == "error":
            raise RuntimeError(value)
        return value


def _main(pipe: multiprocessing.connection.Connection) -> None:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
    )
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        serving = _Serving()
        while True:
            try:
                method, args = pipe.recv()
            except EOFError:
                break
            try:
                pipe.send(("ok", getattr(serving, method)(*args)))
            except Exception as error:  # the test raises it again
                pipe.send(("error", f"{type(error).__name__}: {error}"))
    os._exit(0)  # vLLM's own shutdown takes seconds


class _Serving:
    def __init__(self) -> None:
        self._llm: Any = None

    def load(self, folder: str, arguments: dict[str, Any]) -> None:
        import vllm

        if self._llm is not None:
            from vllm.distributed import cleanup_dist_env_and_memory

            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            cleanup_dist_env_and_memory()
            gc.collect()
        _register_classes()
        settings: dict[str, Any] = {
            "worker_extension_cls": "fourfold.weights.apply.vllm_worker.WeightWorker",
            "enforce_eager": True,
            "max_model_len": 64,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "dtype": "bfloat16",
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": False,
            "seed": 0,
        }
        self._llm = vllm.LLM(model=folder, **settings | arguments)

    def generate(self) -> Output:
        import vllm

        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=_NEW_TOKENS, logprobs=0, ignore_eos=True)
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
        adapter = None
        if self._llm.llm_engine.vllm_config.lora_config is not None:
            from vllm.lora.request import LoRARequest

            adapter = LoRARequest("policy", 1, "memory")
        result = []
        for answer in self._llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapter):
            tokens = list(answer.outputs[0].token_ids)
            logprobs = [entry[token].logprob for token, entry in zip(tokens, answer.outputs[0].logprobs, strict=True)]
            result.append((tokens, logprobs))
        return result

    def verb(self, name: str, args: tuple[Any, ...]) -> Any:
        return self._llm.collective_rpc(name, args=args)

    def sleep(self, level: int) -> None:
        self._llm.sleep(level)

    def wake(self, tags: list[str]) -> None:
        self._llm.wake_up(tags)

    def quantise_in_python(self) -> None:
        import vllm._custom_ops

        _patch(vllm._custom_ops, "scaled_fp8_quant", _scaled_fp8_quant, True)

    def packs_heads(self) -> bool:
        packs: list[bool] = self._llm.apply_model(_packs_heads)
        return any(packs)

    def sabotage(self, what: str, on: bool) -> None:
        from fourfold.weights.apply import vllm_worker

        if what == "repack":
            _patch(vllm_worker, "_repack", lambda layers: None, on)
        elif what == "experts":
            _patch(vllm_worker, "_remove_expert_kernels", lambda model: [], on)
        else:
            _patch(vllm_worker.VllmModel, "load", _failing_load, on)


def _packs_heads(model: Any) -> bool:
    """Give the output head weights of zero: a head that computes from a packed copy ignores them."""
    import torch
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    heads: list[Any] = [
        m for m in model.modules() if isinstance(m, VocabParallelEmbedding) and hasattr(m, "cpu_linear")
    ]
    return any(
        bool(head.cpu_linear(torch.ones_like(head.weight[:1]), torch.zeros_like(head.weight), None).any())
        for head in heads
    )


def _register_classes() -> None:
    """Tell vLLM the classes of the models; it would start a process for each to look at it, ten seconds apiece."""
    from vllm import ModelRegistry

    if not _registered:
        for name, (module, class_name) in _CLASSES.items():
            path = module if "." in module else f"vllm.model_executor.models.{module}"
            _registered[name] = getattr(importlib.import_module(path), class_name)
            ModelRegistry.register_model(name, _registered[name])


_CLASSES: Final = {
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "AquilaForCausalLM": ("llama", "LlamaForCausalLM"),
    "MistralForCausalLM": ("mistral", "MistralForCausalLM"),
    "Phi3ForCausalLM": ("phi3", "Phi3ForCausalLM"),
    "Qwen2ForCausalLM": ("qwen2", "Qwen2ForCausalLM"),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3ForCausalLM"),
    "GemmaForCausalLM": ("gemma", "GemmaForCausalLM"),
    "Gemma2ForCausalLM": ("gemma2", "Gemma2ForCausalLM"),
    "Gemma3ForCausalLM": ("gemma3", "Gemma3ForCausalLM"),
    "Qwen2MoeForCausalLM": ("qwen2_moe", "Qwen2MoeForCausalLM"),
    "Qwen3MoeForCausalLM": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "MixtralForCausalLM": ("mixtral", "MixtralForCausalLM"),
    "OlmoeForCausalLM": ("olmoe", "OlmoeForCausalLM"),
    "GraniteForCausalLM": ("granite", "GraniteForCausalLM"),
    "StableLmForCausalLM": ("stablelm", "StablelmForCausalLM"),
    "GPT2LMHeadModel": ("gpt2", "GPT2LMHeadModel"),
    "CohereForCausalLM": ("commandr", "CohereForCausalLM"),
    "DroppingForCausalLM": ("tests.support.mutant_models", "DroppingForCausalLM"),
    "KeepingForCausalLM": ("tests.support.mutant_models", "KeepingForCausalLM"),
}
"""Name of an architecture -> module and class of its implementation."""
_registered: dict[str, Any] = {}
_originals: dict[str, Any] = {}


def _patch(owner: Any, name: str, replacement: Any, on: bool) -> None:
    _originals.setdefault(name, getattr(owner, name))
    setattr(owner, name, replacement if on else _originals[name])


def _scaled_fp8_quant(values: Any, scale: Any = None, **_: Any) -> tuple[Any, Any]:
    """Return a tensor as float8_e4m3fn, and the scale that was given or that makes its largest value 448."""
    import torch

    if scale is None:
        scale = (values.float().abs().amax() / 448.0).reshape(1)
    return (values.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def _failing_load(model: Any, tensors: Any) -> None:
    """Load a few tensors, then fail."""

    def some() -> Iterator[Any]:
        for count, tensor in enumerate(tensors):
            if count == 6:
                raise RuntimeError("sabotaged")
            yield tensor

    _originals["load"](model, some())


@contextmanager
def running_engine(patience: float = 90.0) -> Iterator[Engine]:
    """A started process without an engine yet; `patience` is how long an answer may take, in seconds."""
    engine = Engine(patience)
    try:
        yield engine
    finally:
        engine.stop()
