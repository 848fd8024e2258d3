"""Tests that fused parameters are sent as the tensors that `save_pretrained` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.core_model_loading import Concatenate, Interleave, Transpose, WeightConverter

from fourfold.errors import WrongState
from fourfold.weights.manifest import Manifest, Span, TensorSpec, aligned, partition_count, partition_spans
from fourfold.weights.source.base import WeightSource, torch_dtype
from fourfold.weights.source.dense import DenseSource
from fourfold.weights.source.lora import Adapter, MergedSource
from tests.support.architectures import build
from tests.support.shards import assemble, spans_by_tensor

EXPERTS = ["mixtral", "qwen2_moe", "qwen3_moe"]


def arrived(source: WeightSource) -> dict[str, torch.Tensor]:
    """Return what an engine gets from a source that holds everything, by name."""
    manifest = source.manifest()
    shard = torch.full((manifest.shard_bytes[0],), 0xAB, dtype=torch.uint8)
    source.begin_round()
    for span in manifest.spans:
        dtype = torch_dtype(manifest.tensors[span.tensor].dtype)
        size = span.count * dtype.itemsize
        shard[span.offset : span.offset + size].view(dtype).copy_(source.read(span))
    source.end_round()
    tensors = assemble(manifest, [shard])
    return {spec.name: tensor for spec, tensor in zip(manifest.tensors, tensors, strict=True)}


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "phi3", *EXPERTS])
def test_an_engine_gets_what_save_pretrained_writes(name: str, loaded: bool, tmp_path: Path) -> None:
    model = build(name, torch.bfloat16)
    model.save_pretrained(tmp_path)
    if loaded:  # what a checkpoint is like is then known from reading it
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    written = safetensors.torch.load_file(tmp_path / "model.safetensors")
    source = DenseSource(model)
    found = arrived(source)
    assert found.keys() == written.keys()
    for key, tensor in written.items():
        assert torch.equal(found[key], tensor) and found[key].shape == tensor.shape, key
    assert all(source.is_view(span) for span in source.manifest().spans)
    pieces = [piece.name for piece in dict(source.slices).values()]
    assert (len(pieces) < len(written)) == (name in EXPERTS)  # fewer parameters than tensors


def convert(model: Any, targets: str | list[str], sources: str | list[str], operation: Any) -> None:
    """Let transformers believe that the checkpoint had other tensors."""
    model._weight_conversions = [WeightConverter(sources, targets, operations=[operation])]


@pytest.mark.parametrize(
    ("sources", "targets", "operation"),
    [
        ("self_attn.stored.weight", "self_attn.q_proj.weight", Transpose(0, 1)),
        ("self_attn.stored.weight", "self_attn.q_proj.weight", Interleave(0)),
        ("mlp.stored.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], Concatenate(0).reverse_op),
    ],
)
def test_a_tensor_that_only_a_copy_could_give_is_refused(sources: Any, targets: Any, operation: Any) -> None:
    model = build("llama", torch.bfloat16, hidden_size=48, head_dim=8)  # q_proj is not square
    convert(model, targets, sources, operation)
    with pytest.raises(WrongState, match=r"LlamaForCausalLM cannot be sent: .*(stored|slice|cannot be located)"):
        DenseSource(model)


def test_what_is_no_view_is_said() -> None:
    model = nn.Module()
    model.a, model.b = nn.Parameter(torch.zeros(3, 4).bfloat16()), nn.Parameter(torch.zeros(4, 3).bfloat16().t())
    assert not model.b.is_contiguous()
    source = DenseSource(model)
    assert [source.is_view(span) for span in source.manifest().spans] == [True, False]
    cast = DenseSource(model, dtype=torch.float32)
    assert not any(cast.is_view(span) for span in cast.manifest().spans)


def test_a_parameter_that_was_moved_is_refused() -> None:
    model = nn.Linear(2, 2)
    source = DenseSource(model)
    source.begin_round()
    kept = model.weight.data
    model.weight.data = kept.clone()
    with pytest.raises(WrongState, match=r"parameter weight is now .* make a new source"):
        source.begin_round()
    model.weight.data = kept
    source.begin_round()


def test_persistent_buffers_are_refused_by_name_and_tied_weights_sent_once() -> None:
    model = build("llama", torch.bfloat16, tie_word_embeddings=True)
    names = [spec.name for spec in DenseSource(model).manifest().tensors]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    model.model.norm.register_buffer("bias_of_router", torch.zeros(2))
    with pytest.raises(WrongState, match=r"persistent buffer model\.norm\.bias_of_router"):
        DenseSource(model)


def adapter(height: int, width: int) -> Adapter:
    return Adapter(a=torch.ones(1, width), b=torch.ones(height, 1), scale=1.0)


def test_a_mixture_of_experts_with_adapters_in_its_attention() -> None:
    model = build("qwen3_moe", torch.float32)
    plain = DenseSource(model)
    key = "model.layers.0.self_attn.q_proj.weight"
    before = {name: tensor.clone() for name, tensor in arrived(plain).items()}
    source = MergedSource(plain, {key: adapter(*before[key].shape)})
    after = arrived(source)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {key}
    torch.testing.assert_close(after[key], before[key] + 1.0)
    specs = source.manifest().tensors
    assert [specs[s.tensor].name for s in source.manifest().spans if not source.is_view(s)] == [key]


def test_an_adapter_of_a_matrix_that_is_stored_in_two_parts() -> None:
    model = build("llama", torch.float32)
    stored = ["mlp.upper.weight", "mlp.lower.weight"]
    convert(model, "mlp.up_proj.weight", stored, Concatenate(0))
    plain = DenseSource(model)
    up = model.model.layers[0].mlp.up_proj.weight
    a, b = torch.randn(2, up.shape[1]), torch.randn(up.shape[0], 2)
    owner = "model.layers.0.mlp.up_proj.weight"
    found = arrived(MergedSource(plain, {owner: Adapter(a=a, b=b, scale=0.5)}))
    both = torch.cat([found[f"model.layers.0.{name}"] for name in stored])
    torch.testing.assert_close(both, up.detach() + 0.5 * (b @ a))


def test_an_adapter_of_experts_is_refused_by_name() -> None:
    model = build("qwen3_moe", torch.float32)
    experts = "model.layers.0.mlp.experts.down_proj"
    height, width = model.get_parameter(experts).shape[1:]
    with pytest.raises(WrongState, match=r"the adapter of model\.layers\.0\.mlp\.experts\.down_proj .*target_modules"):
        MergedSource(DenseSource(model), {experts: adapter(height, width)})
    with pytest.raises(WrongState, match=r"the adapter of nobody .* of it nothing is sent"):
        MergedSource(DenseSource(model), {"nobody": adapter(height, width)})


@st.composite
def partitioned(draw: st.DrawFn) -> tuple[int, list[list[TensorSpec]]]:
    """Ranks, and parameters as the tensors that each is."""
    shapes = st.lists(st.lists(st.integers(1, 6), max_size=3), min_size=1, max_size=5)
    parameters = draw(st.lists(shapes, min_size=1, max_size=4))
    dtype = draw(st.sampled_from(["bfloat16", "float32"]))
    specs = [
        [TensorSpec(name=f"{i}.{j}", dtype=dtype, shape=tuple(shape)) for j, shape in enumerate(pieces)]
        for i, pieces in enumerate(parameters)
    ]
    return draw(st.integers(1, 8)), specs


@given(partitioned(), st.integers(0, 2**31))
def test_partitions_that_cut_across_tensors_are_put_together_again(
    drawn: tuple[int, list[list[TensorSpec]]], seed: int
) -> None:
    """Every rank writes its partition of each parameter, padding and all; the spans say what is what in it."""
    ranks, parameters = drawn
    generator = torch.Generator().manual_seed(seed)
    flats: list[torch.Tensor] = []
    spans: list[Span] = []
    shards: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    tensors: list[TensorSpec] = []
    offset = 0
    for specs in parameters:
        item = specs[0].item_bytes
        count = sum(spec.count for spec in specs)
        flat = torch.randn(count, generator=generator).to(torch_dtype(specs[0].dtype))
        size = partition_count(count, ranks)
        padded = torch.cat([flat, torch.full((size * ranks - count,), 7.0).to(flat.dtype)])
        spans += partition_spans(len(tensors), specs, ranks, offset)
        tensors += specs
        flats.append(flat)
        end = aligned(offset + size * item)
        for rank, shard in enumerate(shards):
            mine = padded[rank * size : (rank + 1) * size].view(torch.uint8)
            shard += [mine, torch.zeros(end - offset - size * item, dtype=torch.uint8)]
        offset = end
    manifest = Manifest(tensors=tuple(tensors), spans=tuple(spans), shard_bytes=(offset,) * ranks)
    for spec, parts in zip(tensors, spans_by_tensor(manifest), strict=True):
        assert [i for s in parts for i in range(s.start, s.start + s.count)] == list(range(spec.count))
    whole = assemble(manifest, [torch.cat(shard) for shard in shards])
    index = 0
    for flat, specs in zip(flats, parameters, strict=True):
        together = torch.cat([tensor.reshape(-1) for tensor in whole[index : index + len(specs)]])
        assert torch.equal(together, flat)
        index += len(specs)
