"""Brings a PyTorch model's weights into a running vLLM, in place, with fourfold.weights alone: no service, no gRPC.

    python examples/weights_alone.py MODEL_FOLDER [--backend cuda_ipc]

This process trains (here: it changes every weight a little), vLLM's own process samples. What the engine then says
must be what an engine says that loads the changed weights from a folder.

It needs `fourfold[torch]` and vLLM; no GPU. On GPUs the engine takes what the trainer leaves: see `memory`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile

import torch
import transformers
import vllm

from fourfold.weights.local import Publisher
from fourfold.weights.sender import WeightSender
from fourfold.weights.source.dense import DenseSource

PROMPTS = ([5, 9, 100, 31, 7], [400, 3, 77])


def start_engine(folder: str, memory: float) -> vllm.LLM:
    """Start vLLM with the worker that takes weights."""
    return vllm.LLM(
        model=folder,
        worker_extension_cls="fourfold.weights.apply.vllm_worker.WeightWorker",
        dtype="bfloat16",
        max_model_len=256,
        gpu_memory_utilization=memory,
        enforce_eager=True,
        seed=0,
    )


def sample(llm: vllm.LLM) -> list[list[int]]:
    """Return greedy completions of PROMPTS. What the engine has cached of them is of older weights: it is dropped."""
    llm.reset_prefix_cache()
    greedy = vllm.SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    prompts = [vllm.TokensPrompt(prompt_token_ids=list(prompt)) for prompt in PROMPTS]
    return [list(answer.outputs[0].token_ids) for answer in llm.generate(prompts, greedy, use_tqdm=False)]


def train(model: torch.nn.Module) -> None:
    """Stand for a training step that moves every weight."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * parameter.std() * torch.randn_like(parameter))


def say(line: str) -> None:
    """Print a result."""
    sys.stdout.write(line + "\n")


def main() -> None:
    """Sample, train, publish, sample; and the same from a fresh engine."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="a Hugging Face model folder")
    parser.add_argument("--backend", default="shm", help="shm or gloo; on GPUs cuda_ipc, or nccl with one GPU each")
    parser.add_argument("--device", default="cpu", help="of the trainer's model")
    parser.add_argument("--memory", type=float, default=0.4, help="part of a GPU's memory that vLLM may take")
    options = parser.parse_args()

    llm = start_engine(options.folder, options.memory)
    before = sample(llm)

    model = transformers.AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.bfloat16)
    model.to(options.device)
    sender = WeightSender(DenseSource(model), rank=0, rank_count=1)
    with Publisher([sender], [llm], backend=options.backend) as publisher:
        train(model)
        published = publisher.publish(1)
        after = sample(llm)
    say(f"version 1: {published.sent_bytes / 1e6:.1f} MB, digest {published.digest.hex()[:16]}")
    say(f"tokens changed: {after != before}")

    del llm  # ends its process
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(options.folder).save_pretrained(folder)
        fresh = sample(start_engine(folder, options.memory))
    say(f"equal to a fresh engine: {after == fresh}")


if __name__ == "__main__":
    main()
