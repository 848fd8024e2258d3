"""A real vLLM CPU engine takes new weights: afterwards it is what a fresh engine with them would be.

Engines prove that themselves when they start (`apply.proof`). Here the proof is compared with the truth, for loaders of
all kinds.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
import transformers

from fourfold.errors import (
    ARCHITECTURE_NOT_VERIFIED,
    MODEL_MISMATCH,
    DeadlinePassed,
    FourfoldError,
    Internal,
    StaleEpoch,
    WrongState,
)
from fourfold.weights.sender import WeightSender
from fourfold.weights.source.dense import DenseSource
from tests.support.tiny_models import write_awq_model
from tests.support.weight_engine import Engine, running_engine
from tests.support.weight_trainer import TIMEOUT, Trainer, check_updates, next_version

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(240)]

FAMILIES: Final = (
    "qwen2",  # tied, biases, and a vocabulary that the engine pads
    "qwen2_untied",  # a vocabulary with more rows than the tokenizer has tokens
    "qwen3",  # norms of q and k
    "gemma",  # tied
    "gemma2",  # tied, the embedding itself is the head
    "gemma3",  # tied, norms of q and k
    "mistral",
    "phi3",  # q, k, v are one tensor of the checkpoint, gate and up another
    "mixtral",  # experts under other names than in the model
    "olmoe",
    "qwen2_moe",  # a shared expert and its gate; the engine pads its experts
    "qwen3_moe",
    "gpt2",  # stored transposed
    "cohere",  # tied, layers in parallel
    "gpt_neox",  # transformers' own class, which vLLM wraps
    "llama",  # last: the tests below go on with its engine
)
# Families in which the test also breaks repacked or expert weights on purpose: the comparison must then fail.
TIED: Final = {"qwen2", "gemma", "gemma3"}
EXPERTS: Final = {"mixtral", "olmoe", "qwen3_moe"}  # where the engine pads them, it would fail instead
ROWS: Final = {"qwen2": 487, "qwen2_untied": 600}
TinyModel = Callable[..., Path]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One engine process for all tests; importing vLLM is most of their time."""
    with running_engine() as running:
        yield running


@pytest.mark.parametrize("family", FAMILIES)
def test_an_updated_engine_equals_a_fresh_one(
    family: str, engine: Engine, tiny_model: TinyModel, tmp_path: Path
) -> None:
    one, two = tiny_model(family, 1), tiny_model(family, 2)
    if family in ROWS:
        one, two = (_with_rows(f, tmp_path / f.name, ROWS[family]) for f in (one, two))
    engine.load(two)
    fresh_two = engine.generate()
    engine.load(one)
    fresh_one = engine.generate()
    assert [tokens for tokens, _ in fresh_one] != [tokens for tokens, _ in fresh_two]

    # Shared memory, from two ranks that hold half of every tensor.
    trainer = Trainer(two, ranks=2)
    report = trainer.open(engine)
    assert (report["direct"], report["reload"]) == (0, len(trainer.senders[0].manifest().tensors))
    assert "packs the weights" in report["reason"]
    assert engine.generate() == fresh_one  # opening changes nothing
    trainer.update(engine)
    assert engine.generate() == fresh_two
    trainer.become(one)
    trainer.update(engine)
    assert engine.generate() == fresh_one
    assert trainer.close(engine) == "clean"

    # Gloo, from one rank. The comparison can fail: what is not packed anew goes stale, or is read wrongly.
    trainer = Trainer(two)
    trainer.open(engine, "gloo")
    for families, part in ((TIED, "repack"), (EXPERTS, "experts")):
        if family in families:
            engine.sabotage(part, True)
            trainer.update(engine)
            if part != "repack" or engine.packs_heads():
                assert engine.generate() != fresh_two
            engine.sabotage(part, False)
    trainer.update(engine)
    assert engine.generate() == fresh_two
    trainer.become(one)
    trainer.update(engine)
    assert engine.generate() == fresh_one
    assert trainer.close(engine) == "clean"


def _with_rows(folder: Path, target: Path, rows: int) -> Path:
    """Copy a model with another number of rows in its embedding; vLLM pads them to a multiple of 64."""
    shutil.copytree(folder, target)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(rows, mean_resizing=False)
    model.save_pretrained(target)
    return target


@pytest.fixture
def llama(engine: Engine, tiny_model: TinyModel) -> Any:
    """A llama engine with the weights of seed 1, and what it says."""
    if engine.weights != tiny_model("llama", 1):
        engine.load(tiny_model("llama", 1))
    return engine.generate()


def test_abort_and_deadline_leave_the_old_version_serving(llama: Any, engine: Engine, tiny_model: TinyModel) -> None:
    for backend in ("shm", "gloo"):
        trainer = Trainer(tiny_model("llama", 2))
        trainer.open(engine, backend)
        engine.start_verb("weights_receive", trainer.epoch, next_version(), 20.0)
        trainer.senders[0].abort(trainer.epoch)
        with pytest.raises(StaleEpoch, match="aborted"):
            engine.finish_verb()
        assert engine.verb("weights_abort", trainer.epoch) == "clean"
        assert engine.generate() == llama

        trainer.open(engine, backend)
        with pytest.raises(DeadlinePassed):
            engine.verb("weights_receive", trainer.epoch, next_version(), 0.2)
        assert trainer.close(engine) == "clean"
        assert engine.generate() == llama


def test_an_update_that_fails_half_way_is_dirty_and_the_next_one_heals(
    llama: Any, engine: Engine, tiny_model: TinyModel
) -> None:
    trainer = Trainer(tiny_model("llama", 2))
    trainer.open(engine)
    engine.sabotage("load", True)
    version = next_version()
    engine.start_verb("weights_receive", trainer.epoch, version, TIMEOUT)
    trainer.senders[0].send(trainer.epoch, version, timeout=TIMEOUT)
    with pytest.raises(Internal):
        engine.finish_verb()
    engine.sabotage("load", False)
    assert trainer.close(engine) == "dirty"
    engine.generate()  # the engine is alive, though nobody should serve from it
    trainer.become(tiny_model("llama", 1))
    trainer.open(engine)
    trainer.update(engine)
    assert engine.generate() == llama
    assert trainer.close(engine) == "clean"


def test_what_does_not_fit_is_refused_before_anything_changes(
    llama: Any, engine: Engine, tiny_model: TinyModel
) -> None:
    def refused(trainer: Trainer, says: str) -> None:
        with pytest.raises(FourfoldError, match=says) as caught:
            trainer.open(engine)
        assert caught.value.code == "FAILED_PRECONDITION"
        assert caught.value.reason == MODEL_MISMATCH
        assert engine.generate() == llama

    wider = Trainer(tiny_model("llama", 1))
    wider.model.model.norm.weight = torch.nn.Parameter(torch.zeros(65, dtype=torch.bfloat16))
    wider.senders = [WeightSender(DenseSource(wider.model), rank=0, rank_count=1)]
    refused(wider, r"refuses model\.norm\.weight \(65,\)")
    for rows in (576, 480):  # a trainer that pads its embedding, or that cuts it to the tokenizer's size
        other = Trainer(tiny_model("llama", 1))
        other.model.resize_token_embeddings(rows, mean_resizing=False)
        other.senders = [WeightSender(DenseSource(other.model), rank=0, rank_count=1)]
        refused(other, rf"refuses model\.embed_tokens\.weight \({rows}, 64\)")
    larger = Trainer(tiny_model("llama", 1))
    for linear in (larger.model.model.layers[0].mlp.gate_proj, larger.model.model.layers[0].mlp.up_proj):
        linear.weight = torch.nn.Parameter(torch.zeros(256, 64, dtype=torch.bfloat16))
    larger.senders = [WeightSender(DenseSource(larger.model), rank=0, rank_count=1)]
    refused(larger, r"leave out parts of model\.layers\.0\.mlp\.gate_proj\.weight \(takes 8192 of 16384 elements\)")
    refused(Trainer(tiny_model("qwen2", 1)), r"no place|refuses|does not send")
    refused(Trainer(tiny_model("llama_tied", 1)), r"does not send all of lm_head\.weight")

    trainer = Trainer(tiny_model("llama", 1))
    trainer.open(engine)
    trainer.update(engine)
    assert engine.generate() == llama
    trainer.close(engine)


def test_float32_weights_are_cast_by_the_engine_like_by_a_fresh_one(
    llama: Any, engine: Engine, tiny_model: TinyModel
) -> None:
    full = tiny_model("llama", 4, "float32")
    updated = []
    for dtype in (None, torch.bfloat16):
        trainer = Trainer(full, dtype=dtype)
        trainer.open(engine)
        trainer.update(engine)
        updated.append(engine.generate())
        trainer.close(engine)
    engine.load(full)  # as bfloat16
    assert updated == [engine.generate()] * 2


def test_an_engine_that_is_not_proven_takes_no_weights(engine: Engine, tiny_model: TinyModel) -> None:
    engine.load(tiny_model("llama", 1))
    with pytest.raises(WrongState, match="not proven at its start") as caught:
        engine.verb("weights_open", 1, "shm", b"", [], 1, 0, TIMEOUT)
    assert caught.value.reason == ARCHITECTURE_NOT_VERIFIED
    assert engine.verb("weights_abort", 1) == "clean"


@pytest.mark.parametrize(
    ("architecture", "stale"), [("DroppingForCausalLM", "model.norm.weight"), ("KeepingForCausalLM", "scale")]
)
def test_a_loader_that_leaves_something_stale_is_refused_and_named(
    architecture: str, stale: str, engine: Engine, tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = tmp_path / architecture
    shutil.copytree(tiny_model("llama", 1), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    engine.load(folder)
    engine.generate()
    _check_stale(engine, stale)
    with pytest.raises(WrongState, match=f"leaves {stale} stale") as caught:
        Trainer(tiny_model("llama", 1)).open(engine)
    assert caught.value.reason == ARCHITECTURE_NOT_VERIFIED
    assert engine.verb("weights_abort", 1) == "dirty"


@pytest.mark.parametrize(
    ("family", "part", "stale"),
    [
        ("qwen2", "repack", "lm_head.cpu_linear"),
        ("mixtral", "experts", "model.layers.0.block_sparse_moe.experts.routed_experts.w13_weight"),
    ],
)
def test_a_worker_that_does_not_pack_weights_anew_is_refused(
    family: str, part: str, stale: str, engine: Engine, tiny_model: TinyModel
) -> None:
    engine.load(tiny_model(family, 1))
    if part == "repack" and not engine.packs_heads():
        pytest.skip("this processor's head has no packed copy")
    engine.sabotage(part, True)
    try:
        _check_stale(engine, stale)
    finally:
        engine.sabotage(part, False)


@pytest.mark.parametrize(
    ("name", "device", "changes", "verified"),
    [
        ("LlamaForCausalLM", "cuda", {}, True),
        ("LlamaForCausalLM", "cpu", {}, False),
        ("Qwen3MoeForCausalLM", "cuda", {}, True),
        ("GPT2LMHeadModel", "cuda", {}, False),
        ("LlamaForCausalLM", "cuda", {"quantization": "fp8_per_tensor"}, True),
        ("Qwen3MoeForCausalLM", "cuda", {"quantization": "fp8_per_tensor"}, False),
        ("LlamaForCausalLM", "cuda", {"quantization": "awq"}, False),
        ("LlamaForCausalLM", "cuda", {"model_impl": "transformers"}, False),
    ],
)
def test_only_what_gpu_tests_cover_needs_no_proof(
    name: str, device: str, changes: dict[str, str], verified: bool
) -> None:
    from fourfold.weights.apply.vllm_worker import is_verified

    model = SimpleNamespace(**{"quantization": None, "model_impl": "auto", **changes})
    model.hf_config = SimpleNamespace(architectures=[name])
    assert is_verified(SimpleNamespace(model_config=model), device) is verified


def test_a_quantised_checkpoint_is_refused_before_it_is_overwritten(
    engine: Engine, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """It samples nothing here: vLLM's AWQ kernel for CPUs is not in every build."""
    engine.load(write_awq_model(tmp_path / "awq", tiny_model("qwen3", 1)))
    reply = engine.verb("weights_prove")
    assert reply["intact"]
    assert "qweight as int32" in reply["refusal"]


def _check_stale(engine: Engine, name: str) -> None:
    reply = engine.verb("weights_prove")
    assert not reply["intact"]
    assert name in reply["refusal"]


def test_an_engine_that_quantises_to_fp8_takes_new_weights(engine: Engine, tiny_model: TinyModel) -> None:
    engine.quantise_in_python()  # all else is vLLM's own; tests/gpu/test_fp8_update.py has the real one
    # A model without biases: vLLM's product for fp8 weights on AMX takes none in bfloat16.
    fp8: dict[str, Any] = {"quantization": "fp8_per_tensor"}
    check_updates(engine, tiny_model("qwen3", 1), tiny_model("qwen3", 2), **fp8)
    quantised = engine.generate()
    engine.load(tiny_model("qwen3", 1))
    assert engine.generate() != quantised
