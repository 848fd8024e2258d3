"""Updates the weights of a running vLLM from a PyTorch model, in place, without any service or gRPC.

    python examples/weights_alone.py MODEL_FOLDER [--backend cuda_ipc]

This process trains (in this example it only changes every weight a little), and vLLM's own process samples. After the
update the engine must sample the same tokens as a fresh engine that loads the changed weights from a folder.

It needs `fourfold[torch]` and vLLM, and no GPU. On a GPU shared with the trainer, --memory limits vLLM's share.
"""

from __future__ import annotations

import argparse
import sys
import tempfile

import torch
import transformers
import vllm

from fourfold import DenseSource, Publisher, WeightSender

PROMPTS = ([5, 9, 100, 31, 7], [400, 3, 77])


def start_engine(folder: str, memory: float) -> vllm.LLM:
    """Start vLLM with the worker extension that receives weights."""
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
    """Return greedy completions of PROMPTS. The prefix cache is dropped: older weights computed it."""
    llm.reset_prefix_cache()
    greedy = vllm.SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    prompts = [vllm.TokensPrompt(prompt_token_ids=list(prompt)) for prompt in PROMPTS]
    return [list(answer.outputs[0].token_ids) for answer in llm.generate(prompts, greedy, use_tqdm=False)]


def train(model: torch.nn.Module) -> None:
    """Change every weight, in place of a real training step."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * parameter.std() * torch.randn_like(parameter))


def show(line: str) -> None:
    """Print one line of the result."""
    sys.stdout.write(line + "\n")


def main() -> None:
    """Sample, train, publish and sample again; compare with a fresh engine."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="a Hugging Face model folder")
    parser.add_argument("--backend", default="shm", help="shm or gloo; on GPUs cuda_ipc, or nccl with one GPU each")
    parser.add_argument("--device", default="cpu", help="device of the trainer's model")
    parser.add_argument("--memory", type=float, default=0.4, help="fraction of a GPU's memory that vLLM may use")
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
    show(f"version 1: {published.sent_bytes / 1e6:.1f} MB, digest {published.digest.hex()[:16]}")
    show(f"tokens changed: {after != before}")

    del llm  # ends its process
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(options.folder).save_pretrained(folder)
        fresh = sample(start_engine(folder, options.memory))
    show(f"equal to a fresh engine: {after == fresh}")


if __name__ == "__main__":
    main()
