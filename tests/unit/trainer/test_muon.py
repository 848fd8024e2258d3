"""Tests Muon on one rank, without DeepSpeed, against a float64 version written from the papers."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from fourfold.nn import forward
from fourfold_trainer.optim import master_weights, muon
from tests.support import plain_muon
from tests.support.architectures import build
from tests.support.trainer_driver import LEARNING_RATE

SHAPES = {"square": (6, 6), "tall": (12, 5), "wide": (4, 9), "row": (1, 7)}


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [*SHAPES.values(), (64, 48)])
def test_newton_schulz_does_to_a_matrix_what_the_polynomial_does_to_its_singular_values(
    shape: tuple[int, int],
) -> None:
    matrix = 1e-6 * random(shape, 1)  # its size does not matter
    wanted = plain_muon.orthogonal(matrix)
    torch.testing.assert_close(muon.orthogonalized(matrix), wanted, atol=1e-9, rtol=1e-9)
    rough = muon.orthogonalized(matrix.bfloat16()).double()
    assert float((rough - wanted).norm() / wanted.norm()) < 0.05


def attached(weights: Mapping[str, Tensor]) -> muon.Muon:
    """Return Muon on whole masters, as at stage 0; it trains the weights that are in SHAPES."""
    matrices = [w for name, w in weights.items() if name in SHAPES]
    groups = [
        {"params": matrices, "weight_decay": plain_muon.DECAY, "muon": True},
        {"params": [w for name, w in weights.items() if name not in SHAPES], "weight_decay": 0.0, "muon": False},
    ]
    optimizer = muon.Muon(groups, SHAPES, momentum=plain_muon.MOMENTUM, betas=(0.9, 0.999), eps=1e-8)
    slices = [
        master_weights.MasterSlice(name=name, first=0, count=w.numel(), master=index, offset=0)
        for index, (name, w) in enumerate(weights.items())
    ]
    sizes = {name: w.numel() for name, w in weights.items()}
    layout = master_weights.MasterWeights(tensors=list(weights.values()), slices=slices, sizes=sizes, shared=True)
    optimizer.attach(layout, device=torch.device("cpu"), dtype=torch.float32)
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE
    return optimizer


@pytest.mark.parametrize("updates", [1, 2, 3])
def test_updates_are_those_of_the_papers(updates: int) -> None:
    began = {name: random(shape, i).float() for i, (name, shape) in enumerate({**SHAPES, "bias": (5,)}.items())}
    weights = {name: torch.nn.Parameter(w.clone()) for name, w in began.items()}
    optimizer = attached(weights)
    adam = torch.optim.AdamW([torch.nn.Parameter(began["bias"].clone())], lr=LEARNING_RATE, weight_decay=0.0)
    gradients: dict[str, list[Tensor]] = {name: [] for name in began}
    for number in range(updates):
        for i, (name, weight) in enumerate(weights.items()):
            weight.grad = 0.1 * random(tuple(weight.shape), 10 * number + i + 7).float()
            gradients[name].append(weight.grad.clone())
        adam.param_groups[0]["params"][0].grad = gradients["bias"][-1]
        optimizer.step()
        adam.step()
    for name in SHAPES:
        wanted = plain_muon.updated(began[name], gradients[name], rate=LEARNING_RATE)
        torch.testing.assert_close(weights[name].detach().double(), wanted, atol=3e-7, rtol=1e-6)
        assert set(optimizer.state[weights[name]]) == {muon.MOMENTUM}
    torch.testing.assert_close(weights["bias"].detach(), adam.param_groups[0]["params"][0].detach())


def test_an_update_is_as_large_as_one_of_adamw() -> None:
    """The root mean square is 0.2 of the learning rate, as for AdamW in the paper, for any size of the gradient."""
    weights = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    optimizer = attached(weights | {"bias": torch.nn.Parameter(torch.zeros(5))})
    for weight in weights.values():
        weight.grad = 1e3 * random(tuple(weight.shape), 3).float()
    optimizer.step()
    for weight in weights.values():
        assert 0.12 < float(weight.detach().square().mean().sqrt()) / LEARNING_RATE < 0.26


def names(architecture: str) -> set[str]:
    model = build(architecture, torch.float32)
    forward.install(model)
    return {name.split(".", 3)[-1] for name in muon.matrices(model)}


@pytest.mark.parametrize(
    ("architecture", "wanted"),
    [
        (
            "llama",
            {f"self_attn.{n}_proj.weight" for n in "qkvo"} | {f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")},
        ),
        ("gpt2", {"attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"}),
        ("qwen3_moe", {f"self_attn.{n}_proj.weight" for n in "qkvo"}),
    ],
)
def test_the_layers_matrices_are_muons(architecture: str, wanted: set[str]) -> None:
    assert names(architecture) == wanted


def test_heads_frozen_weights_and_tied_embeddings_are_not() -> None:
    model = build("llama", torch.float32)
    forward.install_values(model)
    frozen = "model.layers.0.self_attn.q_proj.weight"
    model.get_parameter(frozen).requires_grad_(False)
    found = set(muon.matrices(model))
    assert frozen not in found and "score.weight" not in found and "model.embed_tokens.weight" not in found
    assert len(found) == 13
    embedding = torch.nn.Embedding(5, 3)
    tied = torch.nn.Linear(3, 5, bias=False)
    tied.weight = embedding.weight
    assert set(muon.matrices(torch.nn.Sequential(embedding, torch.nn.Linear(3, 3), tied))) == {"1.weight"}
