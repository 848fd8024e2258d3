"""One rank of a group that shares rows on GPUs: `python -m tests.gpu.sequence_rank RANK COUNT FOLDER [DEVICE]`.

Each rank first does a row alone and then as one of the group; FOLDER/<rank>.json says how far the two are apart.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor

from fourfold.config import Config
from fourfold.nn import attention, forward

# 933 tokens, so that the row is padded; the first sample is in two slices.
LENGTHS: Final = (700, 1, 30, 129, 64, 9)
WINDOW: Final = 50


def config_of(count: int, device: str) -> Config:
    """Return a recipe whose ranks all share every row."""
    return Config.model_validate(
        {
            "name": "sequence",
            "steps": 1,
            "model": {"source": "none"},
            "data": {"train": {"path": "train.jsonl"}},
            "batch": {"prompts_per_step": 4, "group_size": 4},
            "sampling": {"max_new_tokens": 8},
            "trainer": {
                "ranks": count,
                "sequence_parallel_size": count,
                "device": device,
                "step_timeout_seconds": 100,
            },
        }
    )


def make_model(device: torch.device) -> Any:
    """Return an installed model with fewer key heads, a window and gradient checkpoints; the same on every rank."""
    config = transformers.Qwen2Config(
        hidden_size=256,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=512,
        vocab_size=1000,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    )
    torch.manual_seed(0)
    make: Any = transformers.Qwen2ForCausalLM
    model = make(config).to(torch.bfloat16)
    with torch.no_grad():  # so wide that a token which sees what it must not changes its log-probability
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5)
    model.to(device)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    forward.install(model)
    return model.train()


def one_pass(model: Any, device: torch.device) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return log-probabilities without and with gradients, and the gradients of all weights."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 1000, (sum(LENGTHS),), generator=generator).to(device)
    rows = torch.arange(sum(LENGTHS) - 1)
    arguments: dict[str, Any] = {"token_ids": ids, "lengths": torch.tensor(LENGTHS), "rows": rows, "targets": ids[1:]}
    arguments["temperatures"] = torch.ones(len(rows), device=device)
    with torch.no_grad():
        looked_up, _ = model(**arguments)
    logprobs, _ = model(**arguments, entropy=True)
    model.zero_grad()
    torch.autograd.backward(logprobs.mean())
    return looked_up, logprobs.detach(), [w.grad.float() for w in model.parameters()]


def main(rank: int, count: int, folder: Path, device_name: str = "cuda") -> None:
    """Compare."""
    from fourfold_trainer.ranks import placement

    config = config_of(count, device_name)
    place = placement.place_ranks(config, critic=False)[rank]
    os.environ.update(placement.rank_environment(config, place))
    from fourfold_trainer.zero import process_groups, rendezvous_store

    process_groups.join(
        config, rank=rank, rank_count=count, gpu=place.gpu, store_address=rendezvous_store.file_rendezvous(folder)
    )
    device = process_groups.device_of(config, rank)
    exchange = process_groups.make_exchange(config, rank=rank)
    assert exchange is not None
    model = make_model(device)
    kernels: list[tuple[int, ...]] = []
    varlen = attention._varlen
    attention._varlen = lambda q, k, v, **more: (kernels.append((*q.shape[1:], k.shape[2])), varlen(q, k, v, **more))[1]  # type: ignore[func-returns-value]
    alone = one_pass(model, device)
    kernels.clear()
    forward.share_rows(model, exchange)
    shared = one_pass(model, device)
    for gradient in shared[2]:
        exchange.add(gradient)
    # Some gradients are nothing but rounding, such as that of keys' biases, which softmax does not see.
    smallest = max(float(y.norm()) for y in alone[2]) / 10
    errors = [float((x - y).norm() / y.norm().clamp(min=smallest)) for x, y in zip(shared[2], alone[2], strict=True)]
    seen = {
        "logprobs": float((shared[1] - alone[1]).abs().mean()),
        "looked up": float((shared[0] - alone[0]).abs().mean()),
        "largest gradient": max(errors),
        "kernels": kernels,
    }
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    process_groups.leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
