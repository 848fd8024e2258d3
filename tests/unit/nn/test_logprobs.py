"""Tests chunked log-probabilities and entropies against the plain computation: values and gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from fourfold.errors import ConfigError
from fourfold.nn import forward
from fourfold.nn.logprobs import token_energies, token_logprobs, top_logprobs

ROWS, HIDDEN, VOCABULARY = 11, 8, 37


def inputs(dtype: torch.dtype, bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype).requires_grad_()
    offset = torch.randn(VOCABULARY, generator=generator).to(dtype).requires_grad_() if bias else None
    targets = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    return hidden, weight, offset, targets, 0.5 + torch.rand(ROWS, generator=generator)


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperatures: Tensor, softcap: float
) -> tuple[Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    logs = torch.log_softmax(logits / temperatures[:, None], -1)
    return logs.gather(1, targets[:, None]).squeeze(1), -(logs.exp() * logs).sum(1)


@pytest.mark.parametrize("asked", ["logprobs", "entropies", "both"])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk_rows", [0, 1, 4, ROWS])
def test_values_and_gradients_equal_the_plain_computation(
    chunk_rows: int, bias: bool, softcap: float, asked: str
) -> None:
    upstream = torch.linspace(-1, 1, ROWS), torch.linspace(2, -1, ROWS)
    hidden, weight, offset, targets, temperatures = inputs(torch.float32, bias)
    leaves = [leaf for leaf in (hidden, weight, offset) if leaf is not None]

    def gradients(logprobs: Tensor, entropies: Tensor | None) -> tuple[Tensor, ...]:
        loss = torch.zeros(())
        if asked != "entropies":
            loss = loss + (logprobs * upstream[0]).sum()
        if asked != "logprobs":
            assert entropies is not None
            loss = loss + (entropies * upstream[1]).sum()
        return torch.autograd.grad(loss, leaves)

    wanted = plain(hidden, weight, offset, targets, temperatures, softcap)
    found = token_logprobs(
        hidden, weight, offset, targets, temperatures, softcap=softcap, chunk_rows=chunk_rows, entropy=True
    )
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(gradients(*found), gradients(*wanted), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(("softcap", "bias"), [(0.0, False), (3.0, True)])
@pytest.mark.parametrize("chunk_rows", [0, 1, 4])
def test_several_targets_of_a_row_have_the_values_and_gradients_of_the_plain_computation(
    chunk_rows: int, softcap: float, bias: bool, entropy: bool
) -> None:
    hidden, weight, offset, first, temperatures = inputs(torch.float64, bias)
    generator = torch.Generator().manual_seed(5)
    others = (first[:, None] + torch.tensor([3, 9, 20, 30])) % VOCABULARY
    others[::2, 2] = first[::2]  # in every second row, the first target is one of the others, too
    targets = torch.cat([first[:, None], others], 1)
    upstream = torch.randn(targets.shape, generator=generator, dtype=torch.float64)
    spread = torch.randn(ROWS, generator=generator, dtype=torch.float64)
    leaves = [leaf for leaf in (hidden, weight, offset) if leaf is not None]
    logits = torch.nn.functional.linear(hidden, weight, offset)
    logits = torch.tanh(logits / softcap) * softcap if softcap else logits
    logs = torch.log_softmax(logits / temperatures.double()[:, None], -1)
    wanted = logs.gather(1, targets)
    loss = (wanted * upstream).sum() - entropy * (spread[:, None] * logs.exp() * logs).sum()
    found, entropies = token_logprobs(
        hidden, weight, offset, targets, temperatures, softcap=softcap, chunk_rows=chunk_rows, entropy=entropy
    )
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)
    own = (found * upstream).sum() + (0 if entropies is None else (entropies * spread).sum())
    torch.testing.assert_close(
        torch.autograd.grad(own, leaves), torch.autograd.grad(loss, leaves), atol=1e-12, rtol=1e-10
    )
    several = token_logprobs(hidden, weight, offset, targets, temperatures, softcap=softcap)[0]
    alone = token_logprobs(hidden, weight, offset, first, temperatures, softcap=softcap)[0]
    torch.testing.assert_close(several[:, 0], alone, atol=0, rtol=0)


@pytest.mark.parametrize("chunk_rows", [0, 2])
def test_the_likeliest_tokens_are_those_of_the_sorted_distribution(chunk_rows: int) -> None:
    hidden, weight, offset, targets, temperatures = inputs(torch.float32, True)
    logs = torch.log_softmax(torch.nn.functional.linear(hidden, weight, offset) / temperatures[:, None], -1).detach()
    wanted, order = logs.sort(1, descending=True)
    logprobs, ids, top = top_logprobs(
        hidden, weight, offset, targets, temperatures, count=4, ids_below=37, chunk_rows=chunk_rows
    )
    assert torch.equal(ids, order[:, :4])
    torch.testing.assert_close(top, wanted[:, :4], atol=1e-5, rtol=0)
    torch.testing.assert_close(logprobs, logs.gather(1, targets[:, None]).squeeze(1), atol=1e-5, rtol=0)
    *_, everything = top_logprobs(hidden, weight, offset, targets, temperatures, count=VOCABULARY, ids_below=VOCABULARY)
    torch.testing.assert_close(everything.exp().sum(1), torch.ones(ROWS), atol=1e-5, rtol=0)
    _, low, some = top_logprobs(hidden, weight, offset, targets, temperatures, count=4, ids_below=5)
    assert int(low.max()) < 5
    torch.testing.assert_close(some, logs[:, :5].sort(1, descending=True)[0][:, :4], atol=1e-5, rtol=0)


@pytest.mark.parametrize("chunk_rows", [0, 2])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_an_energy_is_the_squared_norm_of_the_gradient_in_the_logits(softcap: float, chunk_rows: int) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(5, 3, generator=generator), torch.randn(7, 3, generator=generator)
    offset, targets = torch.randn(7, generator=generator), torch.tensor([0, 6, 3, 3, 1])
    temperatures = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.1])
    logits = (hidden @ weight.T + offset).double()
    logits = (softcap * torch.tanh(logits / softcap) if softcap else logits) / temperatures[:, None]
    logits.requires_grad_()
    wanted = torch.log_softmax(logits, 1).gather(1, targets[:, None]).squeeze(1)
    (slope,) = torch.autograd.grad(wanted.sum(), logits)
    found, energies = token_energies(
        hidden, weight, offset, targets, temperatures, softcap=softcap, chunk_rows=chunk_rows
    )
    torch.testing.assert_close(found, wanted.detach().float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(energies, slope.square().sum(1).float(), atol=1e-5, rtol=1e-4)
    plain, _ = token_logprobs(hidden, weight, offset, targets, temperatures, softcap=softcap, chunk_rows=chunk_rows)
    assert torch.equal(found, plain), "the old log-probabilities are those of the update, bit for bit"


def test_the_energy_of_a_certain_token_is_not_rounded_away() -> None:
    # Logits 10 and 0: pi = 1 - 4.5e-5, whose energy of 2 * (4.5e-5)^2 is below the rounding of 1 - 2 pi + sum(pi^2).
    hidden, weight = torch.ones(1, 1), torch.tensor([[10.0], [0.0]])
    _, energies = token_energies(hidden, weight, None, torch.tensor([0]), torch.ones(1))
    assert float(energies) == pytest.approx(2 / (1 + math.exp(10)) ** 2, rel=0.02)


def test_entropy_of_the_uniform_and_of_the_certain() -> None:
    hidden = torch.tensor([[0.0], [1.0]])
    weight = torch.tensor([[200.0], [0.0], [-200.0], [0.0]], requires_grad=True)
    _, entropies = token_logprobs(hidden, weight, None, torch.tensor([1, 1]), torch.ones(2), entropy=True)
    assert entropies is not None
    torch.testing.assert_close(entropies, torch.tensor([math.log(4), 0.0]))
    assert torch.isfinite(torch.autograd.grad(entropies.sum(), weight)[0]).all()


def test_bfloat16_gradients_do_not_depend_on_the_chunks() -> None:
    hidden, weight, _, targets, temperatures = inputs(torch.bfloat16, False)
    whole, chunked = (
        torch.autograd.grad(token_logprobs(hidden, weight, None, targets, temperatures, chunk_rows=n)[0].sum(), weight)[
            0
        ]
        for n in (0, 2)
    )
    assert whole.dtype == chunked.dtype == torch.bfloat16
    torch.testing.assert_close(whole, chunked, atol=0.05, rtol=0.02)


def test_only_what_needs_a_gradient_gets_one() -> None:
    hidden, weight, _, targets, temperatures = inputs(torch.float32, False)
    result, none = token_logprobs(hidden, weight.detach(), None, targets, temperatures, chunk_rows=3)
    assert none is None
    assert torch.autograd.grad(result.sum(), hidden)[0].any()
    with torch.no_grad():
        assert not token_logprobs(hidden, weight, None, targets, temperatures)[0].requires_grad


def test_no_rows_give_no_values_and_zero_gradients() -> None:
    hidden, weight, _, _, _ = inputs(torch.float32, False)
    none = torch.empty(0, dtype=torch.int64)
    result, entropies = token_logprobs(hidden[:0], weight, None, none, torch.empty(0), entropy=True)
    assert result.shape == (0,) and entropies is not None and entropies.shape == (0,)
    assert not torch.autograd.grad(result.sum() + entropies.sum(), weight)[0].any()


def build(name: str, config: Any) -> Any:
    """Return a random model of a class."""
    torch.manual_seed(0)
    return getattr(transformers, name)(config)


def test_an_architecture_with_other_logits_is_refused_by_name() -> None:
    config = transformers.GraniteConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        logits_scaling=8.0,
        initializer_range=0.5,
    )
    with pytest.raises(ConfigError, match="GraniteForCausalLM computes its logits in an unknown way"):
        forward.install(build("GraniteForCausalLM", config))


def test_a_model_without_an_output_embedding_is_refused_by_name() -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(ConfigError, match="LlamaModel has no plain output embedding"):
        forward.install(build("LlamaModel", config))


def test_dropout_is_switched_off() -> None:
    config = transformers.GPTNeoXConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        hidden_dropout=0.5,
        attention_dropout=0.5,
    )
    model = build("GPTNeoXForCausalLM", config).train()
    forward.disable_dropout(model)
    ids = torch.arange(8)[None]
    torch.testing.assert_close(model(input_ids=ids).logits, model(input_ids=ids).logits, atol=0, rtol=0)


@pytest.mark.parametrize("chunk_rows", [0, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_float32_logits_of_bfloat16_weights_are_not_rounded(bias: bool, chunk_rows: int) -> None:
    hidden, weight, offset, targets, temperatures = inputs(torch.bfloat16, bias)
    leaves = [leaf for leaf in (hidden, weight, offset) if leaf is not None]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wanted = plain(exact[0], exact[1], exact[2] if bias else None, targets, temperatures, 3.0)
    options: dict[str, Any] = {"softcap": 3.0, "chunk_rows": chunk_rows, "entropy": True}
    found = token_logprobs(hidden, weight, offset, targets, temperatures, float32_logits=True, **options)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0, check_dtype=False)
    rounded = token_logprobs(hidden, weight, offset, targets, temperatures, **options)[0]
    assert float((rounded - wanted[0]).detach().abs().max()) > 1e-3

    upstream = torch.linspace(-1, 1, ROWS)
    gradients = torch.autograd.grad((found[0] * upstream).sum(), leaves)
    assert {gradient.dtype for gradient in gradients} == {torch.bfloat16}
    for mine, theirs in zip(gradients, torch.autograd.grad((wanted[0] * upstream).sum(), exact), strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float32_logits_change_nothing_for_wide_weights(dtype: torch.dtype) -> None:
    hidden, weight, offset, targets, temperatures = inputs(dtype, True)
    arguments = hidden, weight, offset, targets, temperatures
    one, other = (token_logprobs(*arguments, float32_logits=asked)[0] for asked in (False, True))
    assert one.dtype == dtype and torch.equal(one, other)
