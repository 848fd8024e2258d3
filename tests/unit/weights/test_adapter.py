"""Tests the applier of LoRA adapters with a model in memory: what it refuses, and that an abort is clean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fourfold.errors import MODEL_MISMATCH, WrongState
from fourfold.weights.apply.adapter import AdapterApplier, folder_samples
from fourfold.weights.manifest import AdapterSpec, Manifest, Span, TensorSpec, aligned

LAYER = "model.layers.0.mlp.up_proj"
BASE = "0" * 64


class Model:
    """Implements `AdapterModel`: a layer [6, 4] that takes adapters, and some that do not."""

    max_rank = 2
    base = BASE
    shapes = {
        f"{name}.weight": (6, 4)
        for name in (LAYER, "model.layers.0.mlp.down_proj", "model.layers.0.mlp.experts.1.w1", "lm_head")
    } | {"model.layers.0.norm.weight": (4,)}

    def __init__(self) -> None:
        self.served: dict[int, Mapping[str, Tensor]] = {}
        self.breaks: str = ""

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


def manifest_of(shapes: Mapping[str, tuple[int, ...]], adapter: AdapterSpec | None) -> Manifest:
    tensors = [TensorSpec(name=name, dtype="float32", shape=shape) for name, shape in shapes.items()]
    spans, offset = [], 0
    for index, spec in enumerate(tensors):
        for start, count in ((0, 1), (1, spec.count - 1)):  # in parts
            spans.append(Span(tensor=index, start=start, count=count, rank=0, offset=offset))
            offset = aligned(offset + count * 4)
    return Manifest(tensors=tuple(tensors), spans=tuple(spans), shard_bytes=(offset,), adapter=adapter)


def adapter_of(
    layer: str = LAYER,
    a: tuple[int, ...] = (2, 4),
    b: tuple[int, ...] = (6, 2),
    name: str = "base_model.model.{}.lora_{}.weight",
    **spec: Any,
) -> Manifest:
    wanted = AdapterSpec(**{"rank": 2, "scale": 2.0, "base": BASE, **spec})
    return manifest_of({name.format(layer, "A"): a, name.format(layer, "B"): b}, wanted)


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        (manifest_of({"model.norm.weight": (4,)}, None), "sends whole weights"),
        (adapter_of(rank=3, a=(3, 4), b=(6, 3)), "have rank 3, and this engine was started for at most 2"),
        (adapter_of("model.layers.9.mlp.up_proj"), "layers.9.mlp.up_proj, and the engine's model has no such layer"),
        (adapter_of("model.layers.0.norm"), "model.layers.0.norm, and the engine's model has no such layer"),
        (adapter_of("model.layers.0.mlp.down_proj"), "down_proj, and this engine was started without room"),
        (adapter_of("model.layers.0.mlp.experts.1.w1"), "experts.1.w1; engines take none of embeddings"),
        (adapter_of("lm_head"), "adapter of lm_head; engines take none of embeddings, output embeddings"),
        (adapter_of("x", name="base_model.model.{}.lora_embedding_{}"), "lora_embedding_A.*not a name base_model"),
        (adapter_of(a=(2, 5)), r"A \[2, 5\], B \[6, 2\] as the adapter .* needs A \[2, 4\], B \[6, 2\]"),
        (adapter_of(b=(6, 3)), r"sends A \[2, 4\], B \[6, 3\]"),
        (manifest_of({f"base_model.model.{LAYER}.lora_A.weight": (2, 4)}, adapter_of().adapter), r"A \[2, 4\] as"),
        (adapter_of(base="1" * 64), r"other weights \(fingerprint 111111111111\) than those of this engine \(0000"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(manifest: Manifest, says: str) -> None:
    applier = AdapterApplier(Model())
    with pytest.raises(WrongState, match=says) as caught:
        applier.bake(manifest)
    assert caught.value.reason == MODEL_MISMATCH
    with pytest.raises(WrongState, match="no manifest was baked"):
        applier.begin(stable=True)


@pytest.mark.parametrize("breaks", ["", "take", "prepare", "replace"])
def test_an_abort_is_clean_until_vllm_itself_fails(breaks: str) -> None:
    model = Model()
    applier = AdapterApplier(model, number=3)
    manifest = adapter_of()
    assert applier.bake(manifest).direct_tensor_count == 2
    memory = torch.empty(16)
    for value in (1.0, 2.0):
        model.breaks = breaks if value == 2 else ""
        applier.begin(stable=False)
        for count, span in enumerate(manifest.spans):
            assert applier.slot(span) is None
            if count < 3 or model.breaks != "take":
                applier.take(span, memory[: span.count].fill_(value))  # the transport uses its memory again
        memory.fill_(9.0)
        if model.breaks:
            with pytest.raises((RuntimeError, WrongState), match="did not arrive" if breaks == "take" else breaks):
                applier.finish()
        else:
            applier.finish()
    assert applier.abort() == ("dirty" if breaks == "replace" else "clean")
    served = model.served[3]
    assert [list(tensor.shape) for _, tensor in sorted(served.items())] == [[2, 4], [6, 2]]
    assert {float(value) for tensor in served.values() for value in tensor.flatten()} == {1.0 if breaks else 2.0}


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
