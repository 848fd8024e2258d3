"""What a decoder layer keeps for the backward pass, by formula and by autograd."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fourfold.model.folder import folder_shape
from fourfold.plan.memory import layer_bytes_per_token
from tests.support.tiny_models import write_tiny_model

_TOKENS = 256


def kept_bytes(layers: torch.nn.Module) -> int:
    """Return the bytes that autograd keeps for a pass over the tokens, without the weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in layers.parameters()}
    kept = dict[int, torch.UntypedStorage]()  # storages, so that no two have the same address

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layers(input_ids=torch.zeros(1, _TOKENS, dtype=torch.long), use_cache=False)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_a_layer_keeps_what_autograd_keeps(tmp_path: Path, dtype: torch.dtype, width: int) -> None:
    folder = write_tiny_model(tmp_path / "model", "llama")
    layers = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).train().model
    shape = folder_shape(folder)
    whole = kept_bytes(layers)
    layers.layers = layers.layers[:1]
    each = (whole - kept_bytes(layers)) / (shape.layers - 1) / _TOKENS
    assert each == pytest.approx(layer_bytes_per_token(shape, width), rel=0.1)


def test_fused_kernels_keep_less(tmp_path: Path) -> None:
    shape = replace(folder_shape(write_tiny_model(tmp_path / "model", "llama")), hidden=1536, heads=12, kv_heads=2)
    shape = replace(shape, head_dim=128, intermediate=8960)  # Qwen2.5 1.5B
    assert layer_bytes_per_token(shape, 2, liger=True) == 73_216
    assert layer_bytes_per_token(shape, 2) == 73_216 + 2 * 8960 + 8 * 1536
