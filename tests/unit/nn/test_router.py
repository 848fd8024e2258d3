"""Tests that the load-balancing loss equals that of transformers, layer by layer, and evens the experts out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from fourfold.errors import ConfigError
from fourfold.nn import forward, router
from tests.support.architectures import VOCABULARY, build

LENGTHS = (5, 3, 7)
WEIGHT = 0.3
EXPERTS, CHOSEN = 4, 2


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))


def arguments(ids: torch.Tensor) -> dict[str, Any]:
    rows = torch.arange(len(ids) - 1)
    return {
        "token_ids": ids,
        "lengths": torch.tensor(LENGTHS),
        "rows": rows,
        "targets": ids[1:],
        "temperatures": torch.ones(len(rows)),
    }


def theirs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return transformers' loss of each layer, the mean of them; samples padded, padding masked out."""
    rows = list(torch.split(ids, list(LENGTHS)))
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    logits = model(input_ids=padded, attention_mask=mask, use_cache=False, output_router_logits=True).router_logits
    losses = [load_balancing_loss_func((layer,), EXPERTS, CHOSEN, mask) for layer in logits]
    return torch.stack([torch.as_tensor(loss) for loss in losses]).mean()


def prepared(name: str, *, checkpointing: bool = False) -> tuple[Any, router.Routers]:
    """Return a model as the trainer has it."""
    model = build(name, torch.float64)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        model.enable_input_require_grads()
    model.train()
    forward.install(model)
    found = router.install(model, coef=WEIGHT)
    assert found is not None
    return model, found


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_a_pass_has_the_loss_of_transformers_and_its_gradient(name: str, checkpointing: bool) -> None:
    ids = tokens()
    plain = build(name, torch.float64)
    wanted = theirs(plain, ids)
    (WEIGHT * wanted).backward()  # type: ignore[no-untyped-call]
    model, routers = prepared(name, checkpointing=checkpointing)
    routers.weight = WEIGHT
    logprobs, _ = model(**arguments(ids))
    found = routers.routed()
    assert float(found.loss) == pytest.approx(float(wanted.detach()), rel=1e-6)
    assert found.counts.shape == (2, EXPERTS) and found.counts.sum(1).tolist() == [sum(LENGTHS) * CHOSEN] * 2
    (0.0 * logprobs.sum()).backward()
    mine = gradients(model)
    for key, gradient in gradients(plain).items():
        torch.testing.assert_close(mine[key], gradient, atol=1e-7, rtol=1e-5)
    assert max(float(g.abs().max()) for k, g in mine.items() if "gate.weight" in k) > 1e-3
    assert float(routers.routed().loss) == float(found.loss), "a layer that runs again does not count again"


def test_it_is_added_to_the_gradient_of_the_pass_and_gone_with_weight_zero() -> None:
    ids = tokens()
    found = {}
    for weight, scale in ((0.0, 1.0), (WEIGHT, 0.0), (WEIGHT, 1.0)):
        model, routers = prepared("mixtral")
        routers.weight = weight
        logprobs, _ = model(**arguments(ids))
        (scale * logprobs.sum()).backward()
        found[weight, scale] = gradients(model)
    for key, both in found[WEIGHT, 1.0].items():
        torch.testing.assert_close(both, found[0.0, 1.0][key] + found[WEIGHT, 0.0][key], atol=1e-5, rtol=1e-4)


def test_look_ups_leave_no_trace() -> None:
    model, routers = prepared("mixtral")
    routers.weight = WEIGHT
    model(**arguments(tokens()))
    before = routers.routed()
    model.eval()
    with torch.no_grad():
        model(**arguments(tokens().flip(0)))
    assert torch.equal(routers.routed().counts, before.counts)


@pytest.mark.parametrize("seed", range(5))
def test_the_loss_is_k_when_experts_are_used_alike_and_more_when_not(seed: int) -> None:
    even = torch.zeros(8, EXPERTS)
    experts = torch.tensor([[0, 1], [2, 3]] * 4)
    _, loss, counts = router.balance_loss(even, experts)
    assert float(loss) == pytest.approx(CHOSEN) and counts.tolist() == [4.0] * EXPERTS
    logits = torch.randn(50, EXPERTS, generator=torch.Generator().manual_seed(seed)) + torch.tensor([2.0, 0, 0, 0])
    part, loss, counts = router.balance_loss(logits, logits.topk(CHOSEN).indices)
    assert float(loss) == pytest.approx(float(load_balancing_loss_func((logits,), EXPERTS, CHOSEN)))
    assert float(loss) == float(part) > CHOSEN and counts[0] > 40


class Sums:
    """The exchange of one rank of two, when it is known what the other one adds."""

    size = 2

    def __init__(self, rank: int, other: torch.Tensor) -> None:
        self.rank, self.other = rank, other

    def add(self, numbers: torch.Tensor) -> None:
        numbers += self.other


def test_two_ranks_that_share_a_row_have_the_loss_and_the_gradient_of_the_whole_row() -> None:
    logits = torch.randn(7, EXPERTS, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    experts = logits.detach().topk(CHOSEN).indices
    whole, wanted, counts = router.balance_loss(logits, experts)
    (gradient,) = torch.autograd.grad(whole, logits)
    slices = list(torch.split(torch.cat([logits, torch.full((1, EXPERTS), 9.0)]), 4))  # the last token is padding
    routed = list(torch.split(torch.cat([experts, torch.zeros(1, CHOSEN, dtype=torch.int64)]), 4))
    alone = [
        torch.stack([torch.bincount(e.flatten(), minlength=EXPERTS), torch.softmax(z, -1).sum(0)]).detach()
        for e, z in ((experts[:4], logits[:4]), (experts[4:], logits[4:]))
    ]
    parts = []
    for rank in (0, 1):
        exchange: Any = Sums(rank, alone[1 - rank])
        part, loss, found = router.balance_loss(slices[rank], routed[rank], exchange, token_count=7)
        assert float(loss) == pytest.approx(float(wanted)) and torch.equal(found, counts)
        parts.append(part)
    (found,) = torch.autograd.grad(parts[0] + parts[1], logits)
    torch.testing.assert_close(found, gradient)


def test_a_dense_model_and_one_balanced_in_another_way_have_no_known_routers() -> None:
    dense = build("llama", torch.float32)
    assert router.install(dense) is None
    with pytest.raises(
        ConfigError, match=r"router_aux_loss_coef = 0.001, but LlamaForCausalLM has no router .* remove"
    ):
        router.install(dense, coef=1e-3)
    config = transformers.DeepseekV3Config(
        vocab_size=11, hidden_size=8, intermediate_size=8, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=0, q_lora_rank=4, kv_lora_rank=4, qk_rope_head_dim=4, qk_nope_head_dim=4,
        v_head_dim=4,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    assert router.install(model) is None
