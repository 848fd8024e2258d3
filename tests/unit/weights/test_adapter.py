"""Tests the applier of LoRA adapters with a model in memory: what it refuses, and that an abort is clean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fourfold.errors import MODEL_MISMATCH, WrongState
from fourfold.weights.apply.adapter import AdapterApplier, folder_samples
from fourfold.weights.manifest import AdapterSpec, Manifest, Span, TensorSpec

LAYER = "model.layers.0.mlp.up_proj"
EXPERT = "model.layers.0.mlp.experts.1.w1"
BASE = "0" * 64


class Model:
    """Implements `AdapterModel`: a layer [6, 4] that takes adapters, and some that do not."""

    max_rank, base = 2, BASE

    def __init__(self) -> None:
        self.shapes = {f"{name}.weight": (6, 4) for name in (LAYER, LAYER.replace("up", "down"), EXPERT)}
        self.served: dict[int, Mapping[str, Tensor]] = {}
        self.breaks = ""

    def takes(self, layer: str) -> bool:
        return layer == LAYER

    def prepare(self, number: int, adapter: AdapterSpec, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        def replace() -> None:
            if self.breaks == "replace":
                raise RuntimeError(self.breaks)
            self.served[number] = tensors

        if self.breaks == "prepare":
            raise RuntimeError(self.breaks)
        return replace


def manifest_of(layer: str = LAYER, width: int = 4, factors: str = "AB", kind: str = "lora", **spec: Any) -> Manifest:
    """Return a manifest in which each tensor has two spans."""
    adapter = AdapterSpec(**{"rank": 2, "scale": 2.0, "base": BASE, **spec})
    shapes = {"A": (adapter.rank, width), "B": (6, adapter.rank)}
    tensors, spans = [], []
    for index, factor in enumerate(factors):
        name = f"base_model.model.{layer}.{kind}_{factor}.weight"
        tensors.append(TensorSpec(name=name, dtype="float32", shape=shapes[factor]))
        for part, (start, count) in enumerate(((0, 1), (1, tensors[-1].count - 1))):
            spans.append(Span(tensor=index, start=start, count=count, rank=0, offset=(2 * index + part) * 128))
    return Manifest(tensors=tuple(tensors), spans=tuple(spans), shard_bytes=(512,), adapter=adapter)


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        (manifest_of(rank=3), "have rank 3, and this engine was started for at most 2"),
        (manifest_of("model.layers.9.mlp.up_proj"), "adapter of model.layers.9.mlp.up_proj, .* no such layer"),
        (manifest_of(LAYER.replace("up", "down")), "down_proj, and this engine was started without room for it"),
        (manifest_of(EXPERT), f"adapter of {EXPERT}; engines take none of embeddings"),
        (manifest_of(kind="lora_embedding"), "up_proj.lora_embedding_A.weight.*: not a name base_model"),
        (manifest_of(width=5), r"A \[2, 5\], B \[6, 2\] as the adapter .* needs A \[2, 4\], B \[6, 2\]"),
        (manifest_of(factors="A"), r"sends A \[2, 4\] as the adapter"),
        (manifest_of(base="1" * 64), r"other weights \(fingerprint 111111111111\) than those of this engine \(0000"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(manifest: Manifest, says: str) -> None:
    applier = AdapterApplier(Model())
    with pytest.raises(WrongState, match=says) as caught:
        applier.bake(manifest)
    assert caught.value.reason == MODEL_MISMATCH
    with pytest.raises(WrongState, match="no manifest was baked"):
        applier.begin(stable=True)


@pytest.mark.parametrize("breaks", ["", "did not arrive", "prepare", "replace"])
def test_an_abort_is_clean_until_vllm_itself_fails(breaks: str) -> None:
    model, manifest, memory = Model(), manifest_of(), torch.empty(16)
    applier = AdapterApplier(model, number=3)
    applier.bake(manifest)

    def update(value: float) -> None:
        applier.begin(stable=False)
        for span in manifest.spans[1 if model.breaks == "did not arrive" else 0 :]:
            assert applier.slot(span) is None
            applier.take(span, memory[: span.count].fill_(value))  # the transport uses its memory again
        applier.finish()

    update(1.0)
    model.breaks = breaks
    with pytest.raises((RuntimeError, WrongState), match=breaks) if breaks else nullcontext():
        update(2.0)
    assert applier.abort() == ("dirty" if breaks == "replace" else "clean")
    assert [tensor.shape for tensor in model.served[3].values()] == [(2, 4), (6, 2)]
    assert all((tensor == (1 if breaks else 2)).all() for tensor in model.served[3].values())


def test_a_folder_gives_what_a_trainer_sends(tmp_path: Path) -> None:
    head, table, weight = torch.ones(3, 2), torch.ones(4), torch.arange(3000.0).reshape(3, 1000)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file(
        {"model.embed_tokens.weight": weight, name: table, "lm_head.weight": head}, tmp_path / "model.safetensors"
    )
    samples = folder_samples(tmp_path, tied=True)
    assert list(samples) == ["model.embed_tokens.weight"]
    shape, elements = samples["model.embed_tokens.weight"]
    assert shape == (3, 1000)
    assert elements.tolist() == list(range(0, 3000, 2))
    assert sorted(folder_samples(tmp_path, tied=False)) == ["lm_head.weight", "model.embed_tokens.weight"]
    save_file({"qweight": torch.ones(3, 2, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(WrongState, match="qweight is stored as I32; adapters need weights of F32, BF16"):
        folder_samples(tmp_path, tied=False)
