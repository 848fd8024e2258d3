"""Tests LoRA adapters in real architectures against models with W + scale * B A as a plain weight, in float64."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

from fourfold.config import LoraConfig
from fourfold.errors import ConfigError, WrongState
from fourfold.install import install_command
from fourfold.nn import forward
from fourfold.nn.batching import TokenBatch
from fourfold.weights.manifest import AdapterSpec
from fourfold.weights.source.dense import DenseSource
from fourfold.weights.source.fused_params import named_weights
from fourfold.weights.source.lora import AdapterSource
from fourfold_trainer.zero.deepspeed_config import deepspeed_config
from fourfold_trainer.zero.lora import RECORD_FILE, LoraAdapters, base_fingerprint, check_record
from tests.support.architectures import build
from tests.support.plain_lora import fingerprint_of, put_in
from tests.support.tiny_models import write_tiny_model
from tests.support.trainer_driver import Case, config_of
from tests.unit.nn.test_packed_models import CPU, batch, plain, scalar

NAMES = ["llama", "qwen2", "gemma2", "phi3", "gpt_neox", "qwen2_moe", "mixtral"]
needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="PEFT is optional")


def adapted(name: str, **changes: Any) -> tuple[Any, LoraAdapters]:
    """Return a model in float64 that gives log-probabilities, with adapters that are not 0."""
    model = build(name, torch.float64)
    forward.install(model)
    adapters = LoraAdapters(LoraConfig(**{"rank": 3, "alpha": 6.0, **changes}), model, source=Path("base"), seed=5)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapters.parameters:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise / parameter.shape[1] ** 0.5)
    return model, adapters


def logprobs(model: Any, packed: TokenBatch) -> Tensor:
    result: Tensor = model(**forward.batch_arguments(packed, CPU))[0]
    return result


@needs_peft
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_are_those_of_the_sum(name: str) -> None:
    model, adapters = adapted(name)
    packed, reference = batch(), build(name, torch.float64)
    layers = {
        weight.removesuffix(".weight"): (one.a.detach(), one.b.detach()) for weight, one in adapters.by_weight.items()
    }
    truth = put_in(reference, layers, scale=2.0)
    found, (wanted, _) = logprobs(model, packed), plain(reference, packed)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2e-5)  # heads compute in float32
    torch.autograd.backward([scalar(found.double()), scalar(wanted)])
    for weight, one in adapters.by_weight.items():
        for mine, theirs in zip((one.a, one.b), truth[weight.removesuffix(".weight")], strict=True):
            assert theirs.grad is not None and theirs.grad.norm() > 0
            assert float((mine.grad - theirs.grad).norm()) < 1e-4 * float(theirs.grad.norm())
    trained = {id(p) for p in adapters.parameters}
    assert all((p.grad is not None) == (id(p) in trained) for p in model.parameters())


@needs_peft
def test_a_model_computes_the_same_until_it_is_trained() -> None:
    model = build("llama", torch.float64)
    forward.install(model)
    before, state = logprobs(model, batch()), torch.get_rng_state()
    adapters = LoraAdapters(LoraConfig(rank=3), model, source=Path("base"), seed=5)
    torch.testing.assert_close(logprobs(model, batch()), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(one.a.std() > 0.05 and not one.b.any() for one in adapters.by_weight.values())
    same, other = (
        LoraAdapters(LoraConfig(rank=3), build("llama", torch.float64), source=Path("base"), seed=seed)
        for seed in (5, 6)
    )
    for name, one in adapters.by_weight.items():
        assert torch.equal(one.a, same.by_weight[name].a) and not torch.equal(one.a, other.by_weight[name].a)


@needs_peft
@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_weights_are_sent_under_the_names_that_they_had(name: str) -> None:
    plain = DenseSource(build(name, torch.float32))
    wanted = [spec.name for spec in plain.manifest().tensors]
    model = build(name, torch.float32)
    adapters = LoraAdapters(LoraConfig(rank=3), model, source=Path("base"), seed=5)
    assert [spec.name for spec in DenseSource(model, rename=adapters.rename).manifest().tensors] == wanted
    assert set(adapters.by_weight) < {owner for owner, _ in plain.slices}
    assert all(not p.requires_grad for _, p in named_weights(model, adapters.rename))


@needs_peft
@pytest.mark.parametrize("name", ["llama_tied", "qwen2_untied", "gemma2", "phi3", "gpt_neox", "mixtral", "qwen2_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fingerprint_of_the_base_is_that_of_its_files(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, name, dtype="float32")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    forward.install(model)
    adapters = LoraAdapters(LoraConfig(rank=3), model, source=folder, seed=5)
    assert adapters.spec == AdapterSpec(rank=3, scale=32 / 3, base=fingerprint_of(folder))
    other = write_tiny_model(tmp_path / "other", name, seed=1, dtype="float32")
    assert adapters.spec.base != fingerprint_of(other)


@needs_peft
def test_partitions_have_the_fingerprint_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks take turns: each adds its elements to those of the ranks before."""
    wanted, sums, found = base_fingerprint(build("mixtral", torch.float32)), [0], []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda joined: sums.append(joined.add_(sums[-1]).clone()))
    for rank in range(3):
        model = build("mixtral", torch.float32)
        for parameter in model.parameters():
            size = -(-parameter.numel() // 3)
            padded = torch.nn.functional.pad(parameter.detach().flatten(), (0, 3 * size - parameter.numel()))
            parameter.ds_shape, parameter.ds_zero_partition_rank = parameter.shape, rank
            parameter.ds_tensor, parameter.data = padded[rank * size :][:size], torch.empty(0)
        found.append(base_fingerprint(model))
    assert found[2] == wanted and wanted not in found[:2]


@needs_peft
def test_adapters_alone_are_sent_as_peft_stores_them(tmp_path: Path) -> None:
    _, adapters = adapted("llama")
    for one in adapters.parameters:
        one.data = one.data.float()
    source = AdapterSource(adapters.peft_parameters, adapters.spec, rank_count=2)
    manifest, stored = source.manifest(), tmp_path / "adapter"
    adapters.write(stored)
    wanted = safetensors.torch.load_file(stored / "adapter_model.safetensors")
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    assert [spec.name for spec in manifest.tensors[:2]] == [f"{first}A.weight", f"{first}B.weight"]
    assert sorted(spec.name for spec in manifest.tensors) == sorted(wanted) and not manifest.spans_of_rank(1)
    source.begin_round()
    for spec, span in zip(manifest.tensors, manifest.spans, strict=True):
        assert torch.equal(source.read(span).view(spec.shape), wanted[spec.name])
    source.end_round()
    adapters.parameters[0].data = torch.empty(0)
    with pytest.raises(WrongState, match=r"q_proj.lora_A.weight is torch.float32 \(0,\) on this rank"):
        source.begin_round()


@needs_peft
def test_a_checkpoint_of_an_older_version_fits_if_its_layers_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, adapters = adapted("llama")
    adapters.write_record(tmp_path)
    check_record(tmp_path, adapters)
    record = json.loads((tmp_path / RECORD_FILE).read_text())
    (tmp_path / RECORD_FILE).write_text(json.dumps({**record, "base_fingerprint": "0" * 64}))
    with pytest.raises(
        WrongState, match="was written on top of the base weights 000000000000, the trainer runs on top"
    ):
        check_record(tmp_path, adapters)
    del record["base_fingerprint"]
    (tmp_path / RECORD_FILE).write_text(json.dumps({**record, "base": "0" * 64}))
    check_record(tmp_path, adapters)
    assert f"Base weights of an older checkpoint not compared. checkpoint={tmp_path}" in caplog.text


@needs_peft
def test_adapters_stay_whole_and_nothing_else_does() -> None:
    config = config_of(Case(name="x", model="x", stage=3))
    model = build("llama", torch.float32)
    forward.install(model)
    threshold = "stage3_param_persistence_threshold"
    assert threshold not in deepspeed_config(config, model, max_grad_norm=1.0)["zero_optimization"]  # as a critic
    LoraAdapters(LoraConfig(rank=4096), model, source=Path("base"), seed=5)
    assert deepspeed_config(config, model, max_grad_norm=1.0)["zero_optimization"][threshold] == 4096 * 48


@needs_peft
def test_adapters_have_the_dtype_of_the_model() -> None:
    model = build("llama", torch.bfloat16)
    adapters = LoraAdapters(LoraConfig(rank=3), model, source=Path("base"), seed=5)
    assert {p.dtype for p in adapters.parameters} == {torch.bfloat16}


@needs_peft
def test_named_layers_alone_get_an_adapter() -> None:
    _, adapters = adapted("llama", target_modules=("q_proj", "1.mlp.down_proj"))
    assert sorted(adapters.by_weight) == [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
    ]


@needs_peft
@pytest.mark.parametrize(
    ("name", "targets", "message"),
    [
        ("llama", ("q_porj",), "the model has no linear layer 'q_porj'; did you mean 'q_proj'?"),
        ("llama", ("lm_head",), "the model has no linear layer 'lm_head'. Its linear layers are down_proj, gate_proj"),
        ("llama", ("embed_tokens",), "the model has no linear layer 'embed_tokens'"),
        ("gpt2", ("all-linear",), "trainer.lora.target_modules: the model has no linear layer; set trainer.lora.rank"),
    ],
)
def test_a_layer_that_cannot_have_an_adapter_is_refused_first(
    name: str, targets: tuple[str, ...], message: str
) -> None:
    model = build(name, torch.float32)
    forward.install(model)
    before = [(n, p.requires_grad) for n, p in model.named_parameters()]
    with pytest.raises(ConfigError) as caught:
        LoraAdapters(LoraConfig(rank=3, target_modules=targets), model, source=Path("base"), seed=5)
    assert message in caught.value.message
    assert [(n, p.requires_grad) for n, p in model.named_parameters()] == before


def test_without_peft_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    model, command = build("llama", torch.float32), install_command("fourfold-trainer[lora]")
    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(ConfigError) as caught:
        LoraAdapters(LoraConfig(rank=3), model, source=Path("base"), seed=5)
    assert caught.value.message == (
        "trainer.lora.rank = 3 needs PEFT, which cannot be imported (No module named 'peft'); "
        f"{command}, or set it to 0"
    )
