"""Zero3Source on real DeepSpeed ranks: the shards put together are DeepSpeed's own gathered parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fourfold.weights.digest import add_sums
from fourfold.weights.manifest import Manifest
from fourfold.weights.tensor_sums import partial_sums
from fourfold.weights.transport.staging import span_view
from tests.support.shards import assemble, spans_by_tensor
from tests.support.weight_ranks import Case, Outcome, run_ranks

pytestmark = pytest.mark.integration


def _check(outcomes: tuple[Outcome, ...]) -> Manifest:
    """All ranks agree on the manifest, and their shards hold the gathered parameters, bit by bit."""
    manifest = Manifest.from_bytes(outcomes[0].manifest)
    assert {outcome.manifest for outcome in outcomes} == {manifest.to_bytes()}
    shards = [torch.frombuffer(bytearray(o.shard), dtype=torch.uint8) for o in outcomes]
    for spec, tensor in zip(manifest.tensors, assemble(manifest, shards), strict=True):
        assert tensor.float().flatten().tolist() == outcomes[0].gathered[spec.name], spec.name
    whole = partial_sums(manifest, ((span, span_view(manifest, shards[span.rank], span)) for span in manifest.spans))
    assert add_sums(manifest, [outcome.sums for outcome in outcomes]) == whole
    assert all(outcome.statuses_kept for outcome in outcomes)
    return manifest


@pytest.mark.timeout(240)
@pytest.mark.slow
@pytest.mark.parametrize("rank_count", [1, 2])
def test_shards_are_the_gathered_parameters_after_optimizer_steps(
    rank_count: int, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    models = (("qwen2", 3), ("llama", 3, "float32"), ("qwen3_moe", 3))
    tied, untied, mixture = (str(tiny_model(*model)) for model in models)
    cases = [
        Case(name="persistent parameters, tied", folder=tied),
        Case(name="nothing persistent", folder=tied, persistence_threshold=0),
        Case(name="float32", folder=untied, dtype="float32"),
        Case(name="float32, sent as bfloat16", folder=untied, dtype="float32", sent_dtype="bfloat16"),
        Case(name="frozen embedding", folder=untied, freeze="embed_tokens"),
        Case(name="offloaded and reloaded", folder=tied, offload=True),
        Case(name="in main memory, frozen embedding", folder=untied, freeze="embed_tokens", in_main_memory=True),
        Case(name="in main memory, float32", folder=untied, dtype="float32", in_main_memory=True),
        Case(name="experts", folder=mixture),
    ]
    if rank_count == 1:
        cases = [*cases[:-1:3], cases[-1]]
    outcomes = dict(zip((case.name for case in cases), run_ranks(rank_count, cases, tmp_path), strict=True))
    for name, outcome in outcomes.items():
        manifest = _check(outcome)
        assert manifest.rank_count == rank_count
        names = {spec.name for spec in manifest.tensors}
        assert ("lm_head.weight" in names) == any(word in name for word in ("float32", "frozen", "experts"))
        dtype = "float32" if name.endswith("float32") else "bfloat16"
        assert {spec.dtype for spec in manifest.tensors} == {dtype}
        cast = name.endswith("as bfloat16")
        assert {view for outcome in outcomes[name] for view in outcome.views} == {not cast}
    experts_of = {
        spec.name.removeprefix("model.layers.1.mlp.experts."): [span.rank for span in spans]
        for spec, spans in zip(manifest.tensors, spans_by_tensor(manifest), strict=True)
    }
    places = [experts_of[f"{expert}.{name}_proj.weight"] for name in ("gate", "up", "down") for expert in range(3)]
    if rank_count == 2:  # two parameters, each cut in the middle: of three experts, the second one's down_proj
        assert places == [[0], [0], [1], [0], [1], [1], [0], [0, 1], [1]]
        while_offloaded, afterwards = outcomes["offloaded and reloaded"][0].refused
        assert "call engine.reload_states() first" in while_offloaded
        assert afterwards == "nothing"
