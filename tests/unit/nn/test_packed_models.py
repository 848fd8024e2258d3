"""Tests that packed samples get the results of the unchanged architecture for each sample alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

from fourfold.errors import ConfigError
from fourfold.nn import attention, forward
from fourfold.nn.batching import TokenBatch, pack
from tests.support.architectures import ARCHITECTURES, VOCABULARY, build, know_float64_alone

LENGTHS = (7, 2, 12, 3, 12)
TEMPERATURES = (1.0, 0.5, 1.25, 2.0, 0.75)  # exact in float32
CPU = torch.device("cpu")


@pytest.fixture
def float64_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    know_float64_alone(monkeypatch)


def batch() -> TokenBatch:
    """Return samples whose tokens are asked with gaps, the first and the last of a sample among them."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, VOCABULARY, n).astype(np.int32) for n in LENGTHS]
    positions = [np.array([p for p in range(1, n) if p % 4 != 2 or p == n - 1]) for n in LENGTHS]
    return pack(ids, positions, TEMPERATURES)


def alone(model: Any, packed: TokenBatch) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """Yield what the untouched model gives for each sample, its token ids [1, n] and the rows asked of it."""
    model.set_attn_implementation("eager")
    start = 0
    for length in LENGTHS:
        ids = torch.from_numpy(packed.token_ids[start : start + length]).long()[None]
        rows = [int(row) - start for row in packed.rows if start <= row < start + length]
        yield model(input_ids=ids, output_hidden_states=True, use_cache=False), ids, torch.tensor(rows)
        start += length


def plain(model: Any, packed: TokenBatch) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies [k]."""
    logprobs, entropies = [], []
    for (output, ids, rows), temperature in zip(alone(model, packed), TEMPERATURES, strict=True):
        logs = torch.log_softmax(output.logits[0, rows] / temperature, -1)
        logprobs.append(logs.gather(1, ids[0, rows + 1, None]).squeeze(1))
        entropies.append(-(logs.exp() * logs).sum(1))
    return torch.cat(logprobs), torch.cat(entropies)


def scalar(*outputs: Tensor) -> Tensor:
    """Return a sum in which every element has another weight."""
    weights = torch.linspace(-1, 2, len(outputs[0]), dtype=outputs[0].dtype)
    return torch.stack([(i + 1) * (weights * output).sum() for i, output in enumerate(outputs)]).sum()


def check_gradients(found: Any, wanted: Any, tolerance: float) -> None:
    """Compare the gradient of every parameter, relative to its length."""
    theirs = dict(wanted.named_parameters())
    for name, parameter in found.named_parameters():
        other = theirs[name].grad
        if other is None:
            assert parameter.grad is None or not parameter.grad.any(), name
        else:
            assert float((parameter.grad - other).norm()) <= tolerance * float(other.norm()), name


def compare(name: str, dtype: torch.dtype, tolerance: float, *, checkpointing: bool = False) -> None:
    model, original, packed = build(name, dtype), build(name, dtype), batch()
    forward.install(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        model.enable_input_require_grads()
        model.train()
        forward.disable_dropout(model)
    logprobs, entropies = model(**forward.batch_arguments(packed, CPU), entropy=True)
    wanted = plain(original, packed)
    assert logprobs.dtype == entropies.dtype == dtype
    torch.testing.assert_close((logprobs, entropies), wanted, atol=tolerance, rtol=tolerance)
    torch.autograd.backward(scalar(logprobs, entropies))
    torch.autograd.backward(scalar(*wanted))
    check_gradients(model, original, tolerance)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2_moe", "gpt2"])
def test_packed_equals_one_by_one(name: str) -> None:
    compare(name, torch.float32, 1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.usefixtures("float64_alone")
def test_packed_equals_one_by_one_to_float64(name: str) -> None:
    compare(name, torch.float64, 1e-12)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2_moe"])
@pytest.mark.usefixtures("float64_alone")
def test_reentrant_gradient_checkpoints_see_the_segments(name: str) -> None:
    compare(name, torch.float64, 1e-12, checkpointing=True)


def test_the_configuration_that_is_saved_names_no_attention(tmp_path: Path) -> None:
    model = build("llama", torch.float32)
    forward.install(model)
    model.config.save_pretrained(tmp_path)
    assert attention.NAME not in (tmp_path / "config.json").read_text()


# ---- values --------------------------------------------------------------------------


def critic(name: str, dtype: torch.dtype) -> Any:
    model = build(name, dtype)
    hidden = model.config.get_text_config().hidden_size
    forward.install_values(model, torch.linspace(-1, 1, hidden, dtype=torch.float64)[None])
    return model


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.usefixtures("float64_alone")
def test_values_are_the_head_of_the_state_before_the_token(name: str) -> None:
    model, original, packed = critic(name, torch.float64), build(name, torch.float64), batch()
    values = model(**forward.value_arguments(packed, CPU))
    states = [output.hidden_states[-1][0, rows] for output, _, rows in alone(original, packed)]
    wanted = torch.cat(states) @ torch.linspace(-1, 1, states[0].shape[1], dtype=torch.float64)
    torch.testing.assert_close(values, wanted, atol=1e-12, rtol=1e-12)
    torch.autograd.backward(scalar(values))
    torch.autograd.backward(scalar(wanted))
    assert model.score.weight.grad.any()
    torch.testing.assert_close(
        model.get_input_embeddings().weight.grad, original.get_input_embeddings().weight.grad, atol=1e-11, rtol=1e-11
    )


def test_values_are_float32_and_zero_at_first() -> None:
    model = build("llama", torch.bfloat16)
    forward.install_values(model)
    values = model(**forward.value_arguments(batch(), CPU))
    assert values.dtype == torch.float32 and not values.any()
    assert model.score.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [False, True])
def test_a_critic_has_the_names_of_a_sequence_classifier(tied: bool) -> None:
    config = build("llama", torch.float32).config
    config.tie_word_embeddings = tied
    config.num_labels = 1
    model: Any = transformers.LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    classifier: Any = transformers.LlamaForSequenceClassification(config)  # type: ignore[no-untyped-call]
    forward.install_values(model)
    assert set(model.state_dict()) == set(classifier.state_dict())


def test_a_value_head_is_read_from_a_reward_model(tmp_path: Path) -> None:
    config = build("llama", torch.float32).config
    config.num_labels = 1
    model: Any = transformers.LlamaForSequenceClassification(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(tmp_path / "reward")
    weight = forward.read_value_head(tmp_path / "reward")
    assert weight is not None
    torch.testing.assert_close(weight, model.score.weight.detach())
    policy: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "reward")
    forward.install_values(policy, weight)
    torch.testing.assert_close(policy.score.weight, model.score.weight)
    safetensors.torch.save_file({"other": weight}, tmp_path / "model.safetensors")
    assert forward.read_value_head(tmp_path) is None


def test_a_value_head_of_another_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has shape \(2, 32\), but LlamaForCausalLM needs \(1, 32\)"):
        forward.install_values(build("llama", torch.float32), torch.zeros(2, 32))


# ---- what install refuses ------------------------------------------------------------


def leak(*args: Any, **kwargs: Any) -> Any:
    """Attend as if all samples were one."""
    total = kwargs["segments"].token_count
    return attention.attend(*args, **{**kwargs, "segments": attention.Segments(torch.tensor([total]), CPU)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("install", [forward.install, forward.install_values])
def test_a_leak_between_samples_is_refused(monkeypatch: pytest.MonkeyPatch, install: Any, dtype: torch.dtype) -> None:
    monkeypatch.setattr(attention, "register", lambda: transformers.AttentionInterface.register(attention.NAME, leak))
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM computes its .* in an unknown way"):
        install(build("llama", dtype))


@pytest.mark.parametrize("install", [forward.install, forward.install_values])
def test_positions_that_go_on_are_refused(monkeypatch: pytest.MonkeyPatch, install: Any) -> None:
    monkeypatch.setattr(attention.Segments, "positions", property(lambda self: torch.arange(self.token_count)))
    with pytest.raises(ConfigError, match=r"GPT2LMHeadModel computes its .* in an unknown way"):
        install(build("gpt2", torch.float32))


def test_an_attention_that_cannot_be_replaced_is_refused() -> None:
    config = transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=2)
    model = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with pytest.raises(ConfigError, match="BloomForCausalLM has an attention that cannot be replaced"):
        forward.install(model)


def test_a_recurrent_layer_is_refused() -> None:
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, state_size=4)
    model = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with pytest.raises(ConfigError, match="MambaForCausalLM computes its logits in an unknown way"):
        forward.install(model)
