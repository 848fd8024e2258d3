"""The proof of updates: a model passes if an update replaces all that it computes with, and is named otherwise."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fourfold.errors import WrongState
from fourfold.weights.apply.base import ApplyReport, CannotApply
from fourfold.weights.apply.loader_trace import CopyRecorder, LoaderTrace, NamedTensors
from fourfold.weights.apply.proof import folder_manifest, kept_tensors, overwrite, prove, tensor_sums
from fourfold.weights.apply.reload import ReloadApplier
from fourfold.weights.manifest import Manifest

FOLDER = {
    "embed": torch.arange(1.0, 25).reshape(6, 4),
    "norm": torch.tensor([0.1, 0.2, 0.3, 0.4]),
    "head": torch.arange(30.0, 54).reshape(6, 4),
    "unused": torch.ones(2),
}


class Model:
    """A `ProvableModel` and a `ReloadableModel` in bfloat16, with faults to be switched on."""

    def __init__(self, *, tied: bool = False, float_type: torch.dtype = torch.float32) -> None:
        self.folder = {name: tensor.to(float_type) for name, tensor in FOLDER.items()}
        names = ("embed", "norm", *(() if tied else ("head",)))
        self.parameters = {name: self.folder[name].to(torch.bfloat16, copy=True) for name in names}
        self.is_tied = tied
        if tied:
            self.parameters["head"] = self.parameters["embed"]
        self.scaled = self.parameters["norm"] * 2  # computed from a weight
        self.constant = torch.tensor([7])
        self.packed: Callable[[], None] | None = lambda: None
        self.faults: set[str] = set()
        self.graphs = False
        self.fed: list[str] = []

    def checkpoint(self) -> NamedTensors:
        yield from self.folder.items()

    def sent_dtype(self) -> str:
        return "bfloat16"

    def tied(self) -> list[list[str]]:
        return [["embed", "head"]] if self.is_tied else []

    def state(self) -> dict[str, torch.Tensor]:
        return {**self.parameters, "scaled": self.scaled, "constant": self.constant}

    def weight_state(self) -> set[str]:
        return {*self.parameters, "scaled"}

    def addresses_matter(self) -> bool:
        return self.graphs

    def remove_packed(self) -> Callable[[], Sequence[str]]:
        self.packed = None
        return lambda: ["head.packed"] if self.packed is None else []

    def trace(self, tensors: NamedTensors) -> LoaderTrace:
        sources, destinations = list(tensors), list(self.parameters.items())
        with CopyRecorder(sources, [(name, torch.empty_like(tensor)) for name, tensor in destinations]) as recorder:
            watched = dict(recorder._alive[1])
            for name, tensor in sources:
                if name in watched:
                    watched[name].copy_(tensor)
        missing = {n: (recorder.written[n], t.numel()) for n, t in destinations if recorder.written[n] != t.numel()}
        if self.is_tied and "embed" not in missing:
            missing.pop("head", None)
        unused = tuple(name for name, _ in sources if not recorder.read[name])
        return LoaderTrace(unused=unused, missing=missing, regions=tuple(recorder.copies))

    def begin_load(self) -> None:
        self.fed = []

    def load(self, tensors: NamedTensors) -> None:
        for name, tensor in tensors:
            self.fed.append(name)
            if name not in self.faults:
                self.parameters[name].copy_(tensor)

    def finish_load(self) -> None:
        if "scaled" not in self.faults:
            self.scaled.copy_(self.parameters["norm"] * 2)
        if "moved" in self.faults:
            self.parameters["norm"] = self.parameters["norm"].clone()
        if "constant" in self.faults:
            self.constant.zero_()
        if "packed" not in self.faults:
            self.packed = lambda: None

    def cancel_load(self) -> None:
        raise AssertionError("nothing fails while it loads")


class InPlace(ReloadApplier):
    """Another way to update, with another fault: it computes nothing anew."""

    def __init__(self, model: Model, *, obstacle: str = "") -> None:
        super().__init__(model)
        self._toy, self._obstacle, self._held = model, obstacle, set[str]()

    def bake(self, manifest: Manifest) -> ApplyReport:
        if self._obstacle:
            raise CannotApply(self._obstacle)
        return super().bake(manifest)

    def finish(self) -> None:
        self._held, self._toy.faults = self._toy.faults, {"scaled"}
        super().finish()
        self._toy.faults = self._held


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("float_type", [torch.float32, torch.bfloat16])
def test_a_model_whose_update_replaces_everything_is_proven_and_unchanged(tied: bool, float_type: torch.dtype) -> None:
    model = Model(tied=tied, float_type=float_type)
    before = {name: tensor.clone() for name, tensor in model.state().items()}
    applier = ReloadApplier(model)
    proof = prove(model, [applier])
    assert (proof.refusal, proof.intact, proof.appliers) == ("", True, (applier,))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state().items())
    assert model.fed == ["embed", "norm"] + ["head"] * (not tied), "what a trainer would send"


@pytest.mark.parametrize("fault", ["norm", "scaled", "constant", "packed", "moved"])
def test_what_goes_stale_is_named(fault: str) -> None:
    model = Model()
    model.graphs = True
    model.faults = {fault}
    proof = prove(model, [ReloadApplier(model)])
    name = {"packed": "head.packed", "moved": "norm", "norm": "norm, scaled"}.get(fault, fault)
    assert proof.refusal == f"an update leaves {name} stale"
    assert not proof.intact
    assert not proof.appliers


def test_only_the_proven_ways_to_update_are_used() -> None:
    model = Model()
    before = tensor_sums(model.scaled)
    good, bad = ReloadApplier(model), InPlace(model)
    manifest = folder_manifest(model)
    for appliers in ([bad, good], [good, bad]):
        proof = prove(model, appliers)
        assert proof.refusal == ""
        assert proof.intact
        assert tensor_sums(model.scaled) == before, "the last one failed, so the first has restored the weights"
        proven = appliers.index(good)
        assert proof.appliers[proven] is good
        with pytest.raises(CannotApply, match="an update leaves scaled stale"):
            proof.appliers[1 - proven].bake(manifest)


def test_a_way_that_does_not_suit_this_model_gives_its_reason_to_every_manifest() -> None:
    model = Model()
    proof = prove(model, [InPlace(model, obstacle="it is packed"), ReloadApplier(model)])
    with pytest.raises(CannotApply, match="it is packed"):
        proof.appliers[0].bake(folder_manifest(model))
    proof = prove(model, [InPlace(model, obstacle="it is packed")])
    assert proof.refusal == "no way to apply weights: it is packed"
    assert proof.intact


def test_a_quantised_folder_is_refused_before_anything_changes() -> None:
    model = Model()
    model.folder["head"] = torch.ones(6, 4, dtype=torch.int32)
    proof = prove(model, [ReloadApplier(model)])
    assert "stores head as int32" in proof.refusal
    assert proof.intact
    del model.folder["head"]
    proof = prove(model, [ReloadApplier(model)])
    assert "does not send all of head" in proof.refusal
    assert proof.intact


def test_a_folder_that_cannot_be_read_is_refused() -> None:
    class Foreign(Model):
        def checkpoint(self) -> Iterator[tuple[str, torch.Tensor]]:
            raise WrongState("no folder")

    proof = prove(Foreign(), [])
    assert (proof.refusal, proof.intact) == ("no folder", True)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8, torch.int64, torch.uint8]
)
def test_overwriting_changes_all_but_zeros_and_the_sums_see_it(dtype: torch.dtype) -> None:
    values = torch.tensor([[1, 0, 2], [3, 0, 4]]).to(dtype)
    sums = tensor_sums(values)
    assert tensor_sums(values.clone()) == sums
    assert tensor_sums(values.flip(0)) != sums
    for tensor in (values, values.t()):
        changed = tensor.clone(memory_format=torch.preserve_format)
        overwrite(changed)
        assert ((changed.float() == tensor.float()) == (tensor.float() == 0)).all()
        assert tensor_sums(changed) != tensor_sums(tensor)
    scalar = torch.tensor(3).to(dtype)
    overwrite(scalar)
    assert scalar.float().item() != 3


_DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]


def _layouts() -> Iterator[torch.Tensor]:
    """Yield numbers in many layouts: none, one and several elements, transposed, expanded, with gaps and offsets."""
    row = torch.arange(1, 13, dtype=torch.float32)
    yield from (row[:0], row[:0].expand(3, 0), row[0], row[:1], row[3], row[3].expand(1), row[3].expand(1, 1))
    yield from (row[:3].t(), row[1:4], row[1:5], row[::3], row[:1].expand(4), row[:3].expand(2, 3))
    yield from (
        row.view(3, 4).t(),
        row.view(2, 3, 2).permute(2, 0, 1),
        row.view(3, 4)[:, 1:3],
        row.as_strided((5, 4), (2, 1)),
    )
    yield row.view(1, 3, 2, 2).to(memory_format=torch.channels_last)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_sums_and_overwriting_take_every_layout(dtype: torch.dtype) -> None:
    for numbers in _layouts():
        memory = torch.zeros(max(numbers.untyped_storage().nbytes() // 4, 1)).copy_(
            torch.empty(0).set_(numbers.untyped_storage())
        )
        values = memory.to(dtype).as_strided(numbers.shape, numbers.stride(), numbers.storage_offset())
        packed = torch.empty(numbers.shape, dtype=dtype).copy_(values)
        assert packed.numel() < 2 or packed.is_contiguous()
        sums = tensor_sums(packed)
        assert tensor_sums(values) == sums
        others = packed.flatten().roll(1).reshape(packed.shape)
        assert (tensor_sums(others) == sums) == (dtype == torch.bool or len(set(numbers.flatten().tolist())) < 2)
        overwrite(values)
        assert (tensor_sums(values) != sums) == bool(numbers.numel())


def test_sums_of_contiguous_tensors_stay_as_they_are() -> None:
    assert tensor_sums(torch.tensor([1, 2, 3], dtype=torch.uint8))[-2:] == (6, 14)
    assert tensor_sums(torch.tensor([1, 2, 3, 4], dtype=torch.int8))[-2:] == (0x201 + 0x403, 0x201 + 2 * 0x403)
    assert tensor_sums(torch.tensor([[1, 1 << 16]], dtype=torch.int32))[-2:] == (2, 5)
    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert tensor_sums(conjugate) == tensor_sums(conjugate.resolve_conj())


def test_tensors_are_found_wherever_a_layer_keeps_them() -> None:
    class Native:
        def __init__(self) -> None:
            self.address = torch.ones(1)

        def __del__(self) -> None:
            pass

    packed = torch.ones(2)
    model: Any = torch.nn.Sequential(torch.nn.Linear(2, 2))
    layer = model[0]
    layer.register_buffer("cache", torch.ones(3))
    layer.method = SimpleNamespace(kernel=SimpleNamespace(scales=[torch.ones(1), torch.ones(1)]), model=model)
    layer.method.itself = layer.method
    layer.gemm = lambda values: values @ packed
    layer.native = Native()
    layer.library = SimpleNamespace(distributed=torch.distributed)  # its reduce_op warns at every look
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = kept_tensors(model)
    assert not caught and sorted(found) == [
        "0.cache",
        "0.gemm.packed",
        "0.method.kernel.scales[0]",
        "0.method.kernel.scales[1]",
    ]
