"""The sums of weights on a GPU are those of the definition, which the CPU follows. Skipped without a GPU."""

from __future__ import annotations

import pytest
import torch

from fourfold.weights.manifest import Manifest, Span, TensorSpec
from fourfold.weights.tensor_sums import partial_sums

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# A block is 2,048 words and a part is dealt to 128 programs: less than a block, some, more than one round of all.
_COUNTS = (1, 7, 2048, 2049, 300_001, 128 * 2048 * 3 + 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "unaligned"])
def test_a_gpu_sums_as_a_cpu_does(dtype: torch.dtype, shift: int) -> None:
    name = str(dtype).removeprefix("torch.")
    specs = tuple(TensorSpec(name=f"t{n}", dtype=name, shape=(n,)) for n in _COUNTS)
    spans: list[Span] = []
    for index, spec in enumerate(specs):  # each tensor in two parts, so that starts matter
        cut = spec.count // 2
        if cut:
            spans.append(Span(tensor=index, start=0, count=cut, rank=0, offset=0))
        spans.append(Span(tensor=index, start=cut, count=spec.count - cut, rank=0, offset=0))
    item, offset = specs[0].item_bytes, 0
    placed = []
    for span in spans:
        placed.append(Span(tensor=span.tensor, start=span.start, count=span.count, rank=0, offset=offset))
        offset += span.count * item
    manifest = Manifest(tensors=specs, spans=tuple(placed), shard_bytes=(offset,))
    words = torch.randint(-(1 << 15), 1 << 15, (max(_COUNTS) + 1,), dtype=torch.int16)
    words[:4000] = -1  # the largest words, in a row
    values = words.view(dtype) if item == 2 else words[: len(words) // 2 * 2].view(dtype)
    parts = [(span, values[shift : shift + min(span.count, len(values) - shift)]) for span in placed]
    parts = [(span, part) for span, part in parts if len(part) == span.count]
    on_gpu = [(span, values.cuda()[shift : shift + span.count]) for span, _ in parts]
    assert partial_sums(manifest, on_gpu) == partial_sums(manifest, parts)
