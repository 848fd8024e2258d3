"""Runs GGUF files in llama.cpp, through the package xllamacpp, and compares it with the model folder.

    python -m tests.support.llama_cpp    writes benchmarks/results/gguf-llama-cpp-DATE.json

xllamacpp is llama.cpp with its server, built into one library: `pip install xllamacpp`. It is not among the
dependencies of this project.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from fourfold.model import folder as model_folder
from fourfold.model.tokenizer import Tokenizer
from fourfold_bench import record
from fourfold_tools.gguf import write_gguf
from tests.support.pre_tokenizers import TEXTS, set_pre_tokenizer
from tests.support.tiny_models import write_tiny_model

BUILTIN: Final = "builtin:smollm2-135m-instruct"
QUESTION: Final = [{"role": "user", "content": "What is 7 * 8?"}]
_CONTEXT: Final = 512
_SECONDS: Final = 60.0
_EXPORT_SECONDS: Final = 300.0


class LlamaCpp:
    """A server of llama.cpp in this process."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def tokenize(self, text: str, *, add_special: bool = False) -> list[int]:
        tokens: list[int] = self._post("tokenize", content=text, add_special=add_special, parse_special=True)["tokens"]
        return tokens

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        return str(self._post("apply-template", messages=list(messages))["prompt"])

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the most likely tokens after a prompt, one after the other."""
        request = {"prompt": list(prompt), "n_predict": count, "temperature": 0, "cache_prompt": False}
        tokens: list[int] = self._post("completion", **request, return_tokens=True)["tokens"]
        return tokens

    def _post(self, path: str, **values: Any) -> dict[str, Any]:
        address = f"{self._server.listening_address}/{path}"
        request = urllib.request.Request(address, json.dumps(values).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=_SECONDS) as response:
            answer: dict[str, Any] = json.load(response)
        return answer


@contextmanager
def llama_cpp(path: Path) -> Iterator[LlamaCpp]:
    """Load a GGUF file within the block."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads = _CONTEXT, 1, 1
    # By default cache and attention are float16. That changes tokens of a random model where two are almost as likely.
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.warmup, params.hostnames = False, ["127.0.0.1"]
    server = xllamacpp.Server(params)
    try:
        yield LlamaCpp(server)
    finally:
        del server


def our_greedy(folder: Path, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Return the most likely tokens after each prompt, of transformers in float32, up to a stop token."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
        found.append([int(i) for i in out[0, len(prompt) :]])
    return found


def compare(folder: Path, path: Path, *, dtype: str, count: int) -> dict[str, Any]:
    """Export a model folder, and return what llama.cpp and we make of it.

    Returns:
        `export_seconds` and `bytes` of the file; `token_ids` and `greedy`: pairs of ours and llama.cpp's; `chat`: the
        pair of rendered chats.
    """
    began = time.monotonic()
    write_gguf.write(folder, path, dtype=dtype)
    seconds = time.monotonic() - began
    tokenizer = Tokenizer.load(folder)
    token_ids = [tokenizer.encode(text) for text in TEXTS]
    chat = tokenizer.render_chat(QUESTION)
    prompts = [tokenizer.encode(chat), *token_ids]
    greedy = our_greedy(folder, prompts, count)
    with llama_cpp(path) as other:
        return {
            "export_seconds": round(seconds, 2),
            "bytes": path.stat().st_size,
            "token_ids": [(ours, other.tokenize(text)) for ours, text in zip(token_ids, TEXTS, strict=True)],
            "chat": (chat, other.render_chat(QUESTION)),
            "greedy": [(ours, other.greedy(p, len(ours))) for ours, p in zip(greedy, prompts, strict=True)],
        }


def _export_process(path: Path) -> dict[str, Any]:
    """Return what a process takes that exports the built-in model."""
    # Not ru_maxrss: that of a child begins with the memory of its parent.
    program = (
        "import sys; from fourfold.cli.main import main; main(sys.argv[1:]); "
        "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    words = ["export", BUILTIN, "--gguf", str(path), "--force"]
    child = subprocess.run(
        [sys.executable, "-c", program, *words], check=True, timeout=_EXPORT_SECONDS, capture_output=True, text=True
    )
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "bytes": path.stat().st_size,
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_memory_bytes": int(child.stdout.split()[-2]) * 1024,
    }


def _summary(found: dict[str, Any]) -> dict[str, Any]:
    """Return the comparison as counts, with the pairs that differ."""
    summary = {"export_seconds": found["export_seconds"], "bytes": found["bytes"]}
    summary["same_chat"] = found["chat"][0] == found["chat"][1]
    for name in ("token_ids", "greedy"):
        different = [pair for pair in found[name] if pair[0] != pair[1]]
        summary[name] = {
            "texts": len(found[name]),
            "tokens": sum(len(ours) for ours, _ in found[name]),
            "different_texts": len(different),
            "different": different,
        }
    return summary


def main() -> None:
    """Compare the built-in model and tiny models of each architecture, and write the result."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for family, name in (("llama", "llama-bpe"), ("llama_tied", "gpt-2"), ("qwen2", "qwen2"), ("qwen3", "qwen2")):
            tiny = set_pre_tokenizer(write_tiny_model(root / family, family), root / f"{family}-model", name)
            results[f"tiny {family}, {name}"] = _summary(compare(tiny, root / "x.gguf", dtype="f32", count=32))
        for dtype in ("f32", "bf16"):
            found = compare(model_folder.resolve(BUILTIN), root / "x.gguf", dtype=dtype, count=16)
            results[f"{BUILTIN}, {dtype}"] = _summary(found)
        results["export_process"] = _export_process(root / "x.gguf")
    document = record.document(
        "gguf-llama-cpp",
        command="python -m tests.support.llama_cpp",
        parameters={"prompts": len(TEXTS) + 1, "greedy_tokens": {"tiny": 32, "built-in": 16}},
        results=results,
        libraries=("xllamacpp", "gguf", "tokenizers", "transformers", "torch"),
    )
    sys.stdout.write(f"{record.write(record.results_folder(), document)}\n")


if __name__ == "__main__":
    main()
