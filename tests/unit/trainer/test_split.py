"""A step split in any way has the gradients of the whole, parameter by parameter, to float64's precision.

The models are small ones of transformers, packed; the step is the real one, its update run for one rank after the
other, and the gradients added up as ranks do. The truth is one padded batch in the same model as transformers have
it. With real ranks, in float32: tests/integration/test_trainer_split.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fourfold.algorithm.state import AlgorithmState
from fourfold.arrays import Float32Array
from fourfold.config import Config
from fourfold.nn import forward
from fourfold.nn.batching import TokenBatch
from fourfold.sample import Sample
from fourfold_trainer.batches import UpdateBatch, ValueBatch
from fourfold_trainer.engine import UpdateSettings, UpdateSums
from fourfold_trainer.step.optimizer_step import update_critic, update_policy
from fourfold_trainer.step.train_step import train_step
from tests.fakes.trainer_engine import sample
from tests.support.architectures import VOCABULARY, build, know_float64_alone
from tests.support.plain_gradients import (
    Gradients,
    check_gradients,
    group_advantages,
    holed,
    pair_gradients,
    policy_gradients,
    value_gradients,
)
from tests.support.recipes import make_recipe

T = TypeVar("T")
TOLERANCE: Final = 1e-12
CPU: Final = torch.device("cpu")
LONGEST: Final = 24
ALGORITHMS: Final[dict[str, dict[str, Any]]] = {
    "policy": {"kl": {"coef": 0.1}, "entropy_coef": 0.01},
    "critic": {"preset": "ppo", "kl": {"coef": 0.0}},
    "pairs": {"loss": {"kind": "dpo", "beta": 0.3}, "sft_coef": 0.5, "filter": {"keep": "varied"}},
}


@pytest.fixture(scope="module", autouse=True)
def float64_alone() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        know_float64_alone(patch)
        yield


class Rank:
    """Implements `Policy` and `Critic` of one rank; all ranks add to the gradient of one model."""

    def __init__(self, model: Any, rank_count: int) -> None:
        self._model, self._count = model, rank_count
        self.routers = None

    def logprobs(self, batch: TokenBatch, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        found: tuple[Tensor, Tensor | None] = self._model(**forward.batch_arguments(batch, CPU), entropy=entropy)
        return found

    def values(self, batch: TokenBatch) -> Tensor:
        found: Tensor = self._model(**forward.value_arguments(batch, CPU))
        return found

    def backward(self, loss: Tensor, *, last: bool) -> None:
        torch.autograd.backward(loss / self._count)

    def optimizer_step(self, learning_rate: float, *, max_grad_norm: float | None = None) -> float:
        return 1.0


class Ranks:
    """Implements what a step needs of `Engine`, without an optimizer."""

    def __init__(self, config: Config, policy: Any, critic: Any) -> None:
        self.config, self.policy, self.critic = config, policy, critic

    def update_policy(self, shares: Sequence[Sequence[UpdateBatch]], settings: UpdateSettings) -> UpdateSums:
        assert len(shares) == self.config.trainer.ranks
        self.policy.zero_grad()
        rank: Any = Rank(self.policy, len(shares))
        for share in shares:
            update_policy(rank, share, settings, self.config.algorithm, rank_count=len(shares))
        return UpdateSums(grad_norm=1.0)

    def update_critic(self, shares: Sequence[Sequence[ValueBatch]], settings: UpdateSettings) -> UpdateSums:
        self.critic.zero_grad()
        rank: Any = Rank(self.critic, len(shares))
        for share in shares:
            update_critic(rank, share, settings, self.config.critic, rank_count=len(shares))
        return UpdateSums(grad_norm=1.0)

    def in_parallel(self, critic: Callable[[], None], policy: Callable[[], T]) -> T:
        critic()
        return policy()

    @torch.no_grad()
    def compute_values(self, shares: Sequence[Sequence[TokenBatch]]) -> list[list[Float32Array]]:
        rank = Rank(self.critic, 1)
        return [[rank.values(b).numpy().astype(np.float32) for b in share] for share in shares]


@functools.cache
def models(name: str) -> tuple[Any, Any, Any, Any]:
    """Return policy and critic, packed, and the same as transformers have them."""
    plain, head = build(name, torch.float64), build(name, torch.float64)
    for model in (plain, head):
        model.set_attn_implementation("eager")  # what defines an architecture: others leave parts of some out
    policy, critic = build(name, torch.float64), build(name, torch.float64)
    forward.install(policy)
    weight = torch.randn(1, head.config.hidden_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    forward.install_values(critic, weight)
    head.score = torch.nn.Linear(weight.shape[1], 1, bias=False, dtype=torch.float64)
    head.score.load_state_dict({"weight": weight})
    return policy, critic, plain, head


def recipe(algorithm: str, ranks: int, budget: int) -> Config:
    return make_recipe(
        model={"max_context_tokens": LONGEST}, trainer={"ranks": ranks}, algorithm=ALGORITHMS[algorithm],
        batch={"tokens_per_micro_batch": budget, "group_size": 2 if algorithm == "pairs" else 3},
    )  # fmt: skip


@st.composite
def batches(draw: st.DrawFn) -> list[Sample]:
    """Uneven samples with holes in their masks, in groups of any size, one of them at least with a token to learn."""
    samples = []
    for number in range(draw(st.integers(1, 7))):
        prompt = draw(st.integers(3, 8))  # queries of a token that sees itself alone have no gradient
        samples.append(
            sample(
                str(number),
                group=draw(st.sampled_from("abc")),
                score=float(draw(st.integers(-2, 3))),
                prompt=prompt,
                completion=draw(st.integers(1, LONGEST - prompt)),
                temperature=draw(st.sampled_from([0.5, 1.0, 1.5])),
                reference=True,
                vocabulary=VOCABULARY,
            )
        )
    samples = holed(samples)
    assume(any(s.loss_mask.any() for s in samples))
    return samples


def gradients(model: Any, samples: Sequence[Sample]) -> Gradients:
    """Return them without the rounding of the tokens' weight, which travels as float32."""
    count = sum(int(s.loss_mask.sum()) for s in samples)
    weight = float(np.float32(1 / count)) * count
    return {name: p.grad / weight for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", ["qwen2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "gemma2"))])
@settings(max_examples=20)
@given(samples=batches(), ranks=st.integers(1, 3), budget=st.integers(LONGEST, 120))
def test_a_split_step_has_the_gradients_of_one_padded_batch(
    name: str, samples: list[Sample], ranks: int, budget: int
) -> None:
    policy, critic, plain, head = models(name)
    for algorithm in ("policy", "critic"):
        config = recipe(algorithm, ranks, budget)
        engine: Any = Ranks(config, policy, critic)
        train_step(engine, samples, config, step=1, state=AlgorithmState())
        if algorithm == "policy":
            advantages = torch.from_numpy(group_advantages(samples)).double()[:, None]
            wanted = policy_gradients(plain, samples, advantages, kl_coef=0.1, entropy_coef=0.01)
            check_gradients(gradients(policy, samples), wanted, TOLERANCE)
        else:
            wanted, _ = value_gradients(head, samples)
            check_gradients(gradients(critic, samples), wanted, TOLERANCE)


@settings(max_examples=20)
@given(data=st.data(), count=st.integers(1, 5), ranks=st.integers(1, 3), budget=st.integers(2 * LONGEST, 120))
def test_pairs_split_in_any_way_have_the_gradients_of_one_padded_batch(
    data: st.DataObject, count: int, ranks: int, budget: int
) -> None:
    policy, critic, plain, _ = models("qwen2")
    samples = [
        sample(
            f"{number}{score}", group=str(number), score=score, prompt=5, reference=True, vocabulary=VOCABULARY,
            completion=data.draw(st.integers(1, LONGEST - 5)),
        )
        for number in range(count) for score in (1.0, 0.0)
    ]  # fmt: skip
    engine: Any = Ranks(recipe("pairs", ranks, budget), policy, critic)
    shuffled = data.draw(st.permutations(samples))
    train_step(engine, shuffled, engine.config, step=2, state=AlgorithmState())
    found = {name: p.grad for name, p in policy.named_parameters()}
    check_gradients(found, pair_gradients(plain, samples, beta=0.3, sft_coef=0.5), TOLERANCE)
