"""Tests the direct applier: traced regions, the places of spans, and models that must be reloaded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.errors import WrongState
from fourfold.weights.apply.base import CannotApply
from fourfold.weights.apply.direct import DirectApplier, clip
from fourfold.weights.apply.loader_trace import CopyRecorder, LoaderTrace, NamedTensors, Region, as_rectangle
from fourfold.weights.manifest import Manifest, Span, TensorSpec, aligned, partition_spans


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_pieces_of_any_cut_are_the_whole_rectangle_once(data: st.DataObject) -> None:
    height, width = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 7))
    rows, columns = data.draw(st.integers(1, height)), data.draw(st.integers(1, width))
    top, left = data.draw(st.integers(0, height - rows)), data.draw(st.integers(0, width - columns))
    region = Region(
        tensor="t",
        parameter="p",
        rows=rows,
        columns=columns,
        source=top * width + left,
        source_stride=width,
        target=3,
        target_stride=columns + 2,
    )
    tensor = torch.arange(height * width)
    target = torch.full((3 + rows * (columns + 2),), -1)
    start = 0
    while start < height * width:
        stop = data.draw(st.integers(start + 1, height * width))
        for piece in clip(region, start, stop):
            assert start <= piece.source < stop
            place = target.as_strided((piece.rows, piece.columns), (piece.target_stride, 1), piece.target)
            assert (place == -1).all()
            place.copy_(tensor.as_strided((piece.rows, piece.columns), (piece.source_stride, 1), piece.source))
        start = stop
    expected = torch.full_like(target, -1)
    inside = tensor.view(height, width)[top : top + rows, left : left + columns]
    expected.as_strided((rows, columns), (columns + 2, 1), 3).copy_(inside)
    assert target.equal(expected)


def test_rectangles_are_recognised() -> None:
    wide = torch.empty(6, 8, device="meta")
    assert as_rectangle(wide, torch.empty(6, 8, device="meta")) == (1, 48, 48, 48)
    assert as_rectangle(wide[:, 2:5], torch.empty(6, 3, device="meta")) == (6, 3, 8, 3)
    assert as_rectangle(wide[2:4], torch.empty(9, 8, device="meta")[1:3]) == (1, 16, 16, 16)
    assert as_rectangle(wide[:, 3], torch.empty(6, device="meta")) == (6, 1, 8, 1)
    assert as_rectangle(wide.t(), torch.empty(8, 6, device="meta")) is None
    assert as_rectangle(wide, torch.empty(6, 8, device="meta", dtype=torch.bfloat16)) is None
    assert as_rectangle(wide.view(6, 2, 4)[:, :, :3], torch.empty(6, 2, 3, device="meta")) == (12, 3, 4, 3)


def test_the_first_copy_that_is_no_rectangle_is_named() -> None:
    sources = {name: torch.empty(4, 2, device="meta") for name in ("a", "b", "c")}
    target = torch.empty(3, 2, 4, device="meta")
    with CopyRecorder(sources.items(), [("p", target)]) as recorder:
        target[0].view(4, 2).copy_(sources["a"])
        target[1].copy_(sources["b"].t())
        target[2].copy_(sources["c"].t())
    assert [region.tensor for region in recorder.copies] == ["a"]
    assert recorder.irregular.startswith("b goes into p by a copy of torch.float32 (2, 4), strides (1, 2)")
    assert recorder.written["p"] == 24, "it is written, even if not in place"


class SlicedModel:
    """The second of two tensor-parallel workers: fused query and key, half an output, half a padded embedding."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        shapes = {"qk": (4, 6), "out": (4, 3), "embed": (4, 4), "norm": (4,)}
        self.parameters = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        self.hindrance = ""
        self.casts = False

    def trace(self, tensors: NamedTensors) -> LoaderTrace:
        sources = dict(tensors)
        like = {name: torch.empty_like(tensor, device="meta") for name, tensor in self.parameters.items()}
        recorder = CopyRecorder(sources.items(), like.items())
        with recorder:
            like["qk"][:2].copy_(sources["q"][2:])
            like["qk"][2:].copy_(sources["k"][2:])
            like["out"].copy_(sources["o"][:, 3:])
            like["embed"][:3].copy_(sources["embed"][4:])
            like["embed"][3:].fill_(0)
            like["norm"].copy_(sources["norm"].t() if self.casts and sources["norm"].dim() > 1 else sources["norm"])
        missing = {n: (recorder.written[n], t.numel()) for n, t in like.items() if recorder.written[n] != t.numel()}
        unused = tuple(n for n in sources if not recorder.read[n])
        irregular = recorder.irregular or ("norm is stored otherwise" if self.casts else "")
        return LoaderTrace(unused=unused, missing=missing, regions=tuple(recorder.copies), irregular=irregular)

    def parameter(self, name: str) -> torch.Tensor:
        return self.parameters[name]

    def obstacle(self) -> str:
        return self.hindrance


_SHAPES = {"q": (4, 6), "k": (4, 6), "o": (4, 6), "embed": (7, 4), "norm": (4,)}


def _manifest(ranks: int) -> Manifest:
    specs = [TensorSpec(name=name, dtype="bfloat16", shape=shape) for name, shape in _SHAPES.items()]
    spans: list[Span] = []
    offset = 0
    for index, spec in enumerate(specs):
        spans += partition_spans(index, [spec], ranks, offset)
        offset = aligned(offset + 2 * -(-spec.count // ranks))
    return Manifest(tensors=tuple(specs), spans=tuple(spans), shard_bytes=(offset,) * ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_a_worker_takes_its_slices_of_any_partition(ranks: int) -> None:
    model, manifest = SlicedModel(), _manifest(ranks)
    applier = DirectApplier(model)
    assert applier.bake(manifest).direct_tensor_count == 5
    tensors = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in _SHAPES.items()}
    flat = [tensor.flatten() for tensor in tensors.values()]
    for _ in range(2):
        applier.begin(stable=False)
        slots = 0
        for span in manifest.spans:
            values = flat[span.tensor][span.start : span.start + span.count]
            if (slot := applier.slot(span)) is not None:
                slot.copy_(values)  # as NCCL does
                slots += 1
            else:
                applier.take(span, values.clone())
        applier.flush()
        applier.finish()
        assert applier.abort() == "clean"
    assert slots >= 1  # the norm is one run
    assert model.parameters["qk"].equal(torch.cat([tensors["q"][2:], tensors["k"][2:]]))
    assert model.parameters["out"].equal(tensors["o"][:, 3:])
    assert model.parameters["embed"].equal(torch.cat([tensors["embed"][4:], torch.zeros(1, 4).to(torch.bfloat16)]))
    assert model.parameters["norm"].equal(tensors["norm"])


def test_what_cannot_be_written_in_place_is_left_to_another_applier() -> None:
    model, manifest = SlicedModel(), _manifest(1)
    model.hindrance = "it is quantised"
    with pytest.raises(CannotApply, match="quantised"):
        DirectApplier(model).bake(manifest)
    model.hindrance, model.casts = "", True
    with pytest.raises(CannotApply, match="norm"):
        DirectApplier(model).bake(manifest)


def test_the_first_element_makes_it_dirty_and_the_end_clean() -> None:
    model, manifest = SlicedModel(), _manifest(1)
    applier = DirectApplier(model)
    with pytest.raises(WrongState, match="no manifest"):
        applier.begin(stable=True)
    applier.bake(manifest)
    applier.begin(stable=True)
    assert applier.abort() == "clean"
    applier.begin(stable=True)
    applier.take(manifest.spans[0], torch.zeros(manifest.spans[0].count, dtype=torch.bfloat16))
    assert applier.abort() == "dirty"
