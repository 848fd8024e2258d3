"""Tests merged LoRA weights: any span of W + scale * B A, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fourfold.weights.manifest import Span, partition_count
from fourfold.weights.source import lora as module
from fourfold.weights.source.dense import DenseSource
from fourfold.weights.source.lora import Adapter, MergedSource, merged


def made(rows: int, width: int, rank: int) -> tuple[torch.Tensor, Adapter, torch.Tensor]:
    """Return W, its adapter, and W + scale * B A in float64."""
    generator = torch.Generator().manual_seed(rows * 10_007 + width * 101 + rank)
    w, a, b = (torch.randn(s, generator=generator) for s in ((rows, width), (rank, width), (rows, rank)))
    return w, Adapter(a=a, b=b, scale=1.5), w.double() + 1.5 * (b.double() @ a.double())


@given(
    rows=st.integers(1, 9),
    width=st.integers(1, 9),
    rank=st.integers(1, 4),
    ranks=st.integers(1, 5),
    chunk=st.integers(1, 100),
)
def test_the_partitions_of_any_number_of_ranks_are_the_sum(
    rows: int, width: int, rank: int, ranks: int, chunk: int
) -> None:
    w, adapter, wanted = made(rows, width, rank)
    kept = w.clone()
    size = partition_count(w.numel(), ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK_ELEMENTS", chunk)
        parts = [merged(w.view(-1)[s : s + size], adapter, start=s) for s in range(0, w.numel(), size)]
    torch.testing.assert_close(torch.cat(parts).view(rows, width).double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(w, kept)


def test_a_bfloat16_weight_is_rounded_once() -> None:
    # Steps are 2^-7 from 1 on. A change above half of one must count, one below must not.
    w = torch.ones(1, 2).bfloat16()
    adapter = Adapter(a=torch.tensor([[0.00390625 * 1.003, 0.0039]]), b=torch.ones(1, 1), scale=1.0)
    assert merged(w.view(-1), adapter).tolist() == [1.0078125, 1.0]
    assert merged(w.view(-1), adapter, dtype=torch.float32)[1] == torch.tensor(1.0039)


class Counting(DenseSource):
    """Counts what is read."""

    reads = 0

    def read(self, span: Span) -> torch.Tensor:
        self.reads += 1
        return super().read(span)


def test_a_source_adds_adapters_where_there_are_any() -> None:
    w, adapter, wanted = made(3, 4, 2)
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight.copy_(w)
    gathered: list[int] = []
    base = Counting(model)
    source = MergedSource(base, {"weight": adapter}, gather=lambda: gathered.append(1))
    assert gathered == [1]  # all ranks make theirs at the same time
    source.begin_round()
    weight, bias = source.manifest().spans
    found = source.read(weight)
    torch.testing.assert_close(found.view(3, 4).double(), wanted, rtol=1e-6, atol=1e-6)
    assert source.read(weight) is found and base.reads == 1  # a transport that takes it in parts
    assert source.read(bias).data_ptr() == model.bias.data_ptr()
    source.end_round()
    with torch.no_grad():
        adapter.b.zero_()
    source.begin_round()
    assert torch.equal(source.read(weight).view(3, 4), w) and torch.equal(model.weight, w)
    source.end_round()
    assert source.manifest() is base.manifest()


def test_what_is_sent_has_the_manifests_type() -> None:
    model = nn.Linear(4, 3, bias=False)
    source = MergedSource(DenseSource(model, dtype=torch.bfloat16), {"weight": made(3, 4, 2)[1]})
    source.begin_round()
    assert source.read(source.manifest().spans[0]).dtype == torch.bfloat16


def test_a_parameter_is_sent_under_the_name_that_it_is_given() -> None:
    model = nn.ModuleDict({"q": nn.ModuleDict({"base_layer": nn.Linear(2, 2, bias=False), "a": nn.Linear(2, 2)})})
    source = DenseSource(model, rename=lambda n: "" if ".a." in n else n.replace(".base_layer", ""))
    assert [spec.name for spec in source.manifest().tensors] == ["q.weight"]
