"""What the ranks are sent: a step's samples as the passes of a look-up or of one optimizer step.

look_up        a number for each asked token, from the policy or the critic
forward        all that is known of every token: log-probability, entropy, value
add_gradient   a look-up that keeps the gradient of the weighted sum
mini_batches   the samples of each optimizer step
LossTokens     what the loss sees of every sample, made into batches
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from fourfold.arrays import EMPTY_FLOATS, Float32Array, Sample
from fourfold.config import Config
from fourfold.errors import InvalidInput
from fourfold.nn.batching import TokenBatch
from fourfold_trainer.algorithm import aggregation
from fourfold_trainer.batches import PolicyBatch, ValueBatch, WeightedBatch
from fourfold_trainer.engine import Engine
from fourfold_trainer.step import packing
from fourfold_trainer.step.advantages import Batch, Credit, Int64Array

# A pass without gradients keeps the activations of one layer, and so takes more tokens in the same memory: not so
# where gradient checkpoints let a pass with gradients keep no more.
_LOOK_UP_FACTOR: Final = 4
_NAN: Final = np.full(1, np.nan, np.float32)


class Compute(Protocol):
    """Of the engine: a number, or a row of them, for each asked token of each rank's batches."""

    def __call__(self, shares: Sequence[Sequence[TokenBatch]]) -> list[list[Float32Array]]: ...


class ForwardBackward(Protocol):
    """Of the engine: a log-probability for each token of each rank's batches, whose gradient is kept."""

    def __call__(self, shares: Sequence[Sequence[WeightedBatch]]) -> list[list[Float32Array]]: ...


def look_up(
    compute: Compute, samples: Sequence[Sample], positions: Sequence[Int64Array], config: Config, *, ranks: int = 0
) -> list[Float32Array]:
    """Return a float32 number, or a row of them, for each asked token of each sample, in order.

    Args:
        compute: of the engine.
        samples: any number.
        positions: of each sample, tokens in [1, n); may be none.
        config: of the run.
        ranks: that have the model; 0: the policy's.
    """
    asked = [i for i, p in enumerate(positions) if len(p)]
    if not asked:
        return [EMPTY_FLOATS] * len(samples)
    shares = _split(samples, asked, config, ranks=ranks or config.trainer.data_parallel_size, gradient=False)

    def make(members: Sequence[int]) -> TokenBatch:
        return packing.pack_tokens([samples[i] for i in members], [positions[i] for i in members])

    return _collect(compute(packing.fill(shares, make, packing.dummy_tokens())), shares, positions)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forward:
    """What the models make of every token, float32 [n] per sample; the first is NaN. Empty: not asked for."""

    logprobs: list[Float32Array]
    entropies: list[Float32Array]
    values: list[Float32Array]


def forward(engine: Engine, samples: Sequence[Sample], config: Config, *, entropies: bool, values: bool) -> Forward:
    """Look every token up.

    Raises:
        InvalidInput: values are asked for, but there is no critic.
    """
    if values and not config.algorithm.needs_critic:
        raise InvalidInput(
            "values are asked for, but the recipe has no critic; leave include_values out, or train one: "
            "algorithm.advantage = `gae`"
        )
    every = [np.arange(1, len(s.token_ids), dtype=np.int64) for s in samples]
    compute = partial(engine.compute_logprobs, entropies=entropies)
    found = look_up(compute, samples, every, config)
    ranks = config.critic_data_parallel_size
    valued = look_up(engine.compute_values, samples, every, config, ranks=ranks) if values else []
    return Forward(
        logprobs=[_after_nan(row[:, 0] if entropies else row) for row in found],
        entropies=[_after_nan(row[:, 1]) for row in found] if entropies else [],
        values=[_after_nan(row) for row in valued],
    )


def add_gradient(
    compute: ForwardBackward, samples: Sequence[Sample], weights: Sequence[Float32Array], config: Config
) -> list[Float32Array]:
    """Add the gradient of a weighted sum of log-probabilities to what waits.

    Args:
        compute: of the engine; not called when there is nothing to add.
        samples: any number.
        weights: float32 [n] of each sample, the first 0.
        config: of the run.

    Returns:
        For each sample the log-probabilities of its tokens whose weight is not 0, in order.
    """
    positions = [np.flatnonzero(w) for w in weights]
    members = [i for i, p in enumerate(positions) if len(p)]
    if not members:
        return [EMPTY_FLOATS] * len(samples)
    shares = _split(samples, members, config, ranks=config.trainer.data_parallel_size)

    def make(members: Sequence[int]) -> WeightedBatch:
        return WeightedBatch(
            tokens=packing.pack_tokens([samples[i] for i in members], [positions[i] for i in members]),
            weights=np.concatenate([weights[i][positions[i]] for i in members]),
        )

    return _collect(compute(packing.fill(shares, make, packing.dummy_weighted_batch())), shares, positions)


def _collect(
    answers: Sequence[Sequence[Float32Array]],
    shares: Sequence[Sequence[Sequence[int]]],
    positions: Sequence[Int64Array],
) -> list[Float32Array]:
    """Return what the ranks answered for their passes sample by sample; nothing for those that were in none."""
    rows: list[Float32Array] = [EMPTY_FLOATS] * len(positions)
    for share, found in zip(shares, answers, strict=True):
        for members, numbers in zip(share, found, strict=True):
            ends = np.cumsum([len(positions[i]) for i in members])  # none for a dummy
            for i, part in zip(members, np.split(numbers, ends[:-1]), strict=False):
                rows[i] = part
    return rows


def mini_batches(sample_count: int, config: Config, *, step: int) -> list[list[int]]:
    """Return the samples of each optimizer step: every epoch deals all of them anew, at random."""
    if config.batch.updates_per_step == 1:
        return [list(range(sample_count))]
    parts = []
    for epoch in range(config.batch.epochs_per_step):
        order = np.random.default_rng([config.seed, step, epoch]).permutation(sample_count)
        parts += [p.tolist() for p in np.array_split(order, config.batch.mini_batches_per_step) if len(p)]
    return parts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossTokens:
    """The tokens that the loss sees, sample by sample."""

    config: Config
    samples: Sequence[Sample]
    positions: list[Int64Array]
    advantages: list[NDArray[Any]]
    old: list[NDArray[Any]] | None
    reference: list[NDArray[Any]] | None
    """Where the loss has a KL term."""
    returns: list[NDArray[Any]] | None
    values: list[NDArray[Any]] | None

    @classmethod
    def of(cls, batch: Batch, credit: Credit, config: Config, *, kl_in_loss: bool) -> LossTokens:
        """Choose them from the action tokens."""
        masks = batch.unpack(batch.selected)

        def chosen(packed: NDArray[Any]) -> list[NDArray[Any]]:
            return [part[mask] for part, mask in zip(batch.unpack(packed), masks, strict=True)]

        return cls(
            config=config,
            samples=batch.samples,
            positions=[p[mask] for p, mask in zip(batch.positions, masks, strict=True)],
            advantages=chosen(credit.advantages),
            old=None if credit.old_logprobs is None else chosen(credit.old_logprobs),
            reference=chosen(batch.gather("reference_logprobs")) if kl_in_loss else None,
            returns=None if credit.returns is None else chosen(credit.returns),
            values=None if credit.values is None else chosen(credit.values),
        )

    def weights(self, members: Sequence[int]) -> dict[int, float]:
        """Return the weight of each token's loss, by sample, when `members` make one optimizer step."""
        weights = aggregation.sample_weights(
            np.array([len(self.positions[i]) for i in members], np.int64),
            mode=self.config.algorithm.aggregation,
            constant_length=self.config.sampling.max_new_tokens,
        )
        return dict(zip(members, weights.tolist(), strict=True))

    def to_train(self, members: Sequence[int]) -> list[int]:
        """Return those that have a gradient.

        Without a term for all tokens, that of a sample without advantage is 0: its tokens count
        in the weights, but need no pass.
        """
        every = self.reference is not None or self.config.algorithm.entropy_coef > 0
        return [i for i in members if len(self.positions[i]) and (every or self.advantages[i].any())]

    def policy_passes(self, members: Sequence[int], weights: dict[int, float]) -> list[list[PolicyBatch]]:
        """Return each rank's passes over `members`; each has loss tokens."""
        dummy = packing.dummy_policy_batch(with_old=self.old is not None, with_reference=self.reference is not None)
        shares = _split(self.samples, members, self.config, ranks=self.config.trainer.data_parallel_size)
        return packing.fill(shares, lambda ids: self._policy_batch(ids, weights), dummy)

    def value_passes(self, members: Sequence[int], weights: dict[int, float]) -> list[list[ValueBatch]]:
        """The same for the critic."""
        shares = _split(self.samples, members, self.config, ranks=self.config.critic_data_parallel_size)
        return packing.fill(shares, lambda ids: self._value_batch(ids, weights), packing.dummy_value_batch())

    def _policy_batch(self, members: Sequence[int], weights: dict[int, float]) -> PolicyBatch:
        samples, positions = [self.samples[i] for i in members], [self.positions[i] for i in members]
        return PolicyBatch(
            tokens=packing.pack_tokens(samples, positions),
            segments=np.repeat(np.arange(len(members), dtype=np.int32), [len(p) for p in positions]),
            weights=_repeat([weights[i] for i in members], positions),
            advantages=_join(self.advantages, members),
            behavior_logprobs=np.concatenate([s.behavior_logprobs[p] for s, p in zip(samples, positions, strict=True)]),
            old_logprobs=_join(self.old, members),
            reference_logprobs=_join(self.reference, members),
        )

    def _value_batch(self, members: Sequence[int], weights: dict[int, float]) -> ValueBatch:
        samples, positions = [self.samples[i] for i in members], [self.positions[i] for i in members]
        return ValueBatch(
            tokens=packing.pack_tokens(samples, positions),
            weights=_repeat([weights[i] for i in members], positions),
            returns=_join(self.returns, members),
            old_values=_join(self.values, members),
        )


def _split(
    samples: Sequence[Sample], members: Sequence[int], config: Config, *, ranks: int, gradient: bool = True
) -> list[list[list[int]]]:
    """Return for each rank, or group that shares a row, its passes over `members`: lists of them; none: a dummy."""
    factor = 1 if gradient or config.trainer.gradient_checkpointing else _LOOK_UP_FACTOR
    shares = packing.split(
        [len(samples[i].token_ids) for i in members],
        rank_count=ranks,
        max_tokens=config.batch.tokens_per_micro_batch * factor,
    )
    return [[[members[i] for i in ids] for ids in share] for share in shares]


def _after_nan(row: Float32Array) -> Float32Array:
    return np.concatenate([_NAN, row])


def _join(parts: Sequence[NDArray[Any]] | None, members: Sequence[int]) -> Float32Array:
    if parts is None:
        return EMPTY_FLOATS
    joined: Float32Array = np.concatenate([parts[i] for i in members]).astype(np.float32, copy=False)
    return joined


def _repeat(values: Sequence[float], positions: Sequence[Int64Array]) -> Float32Array:
    return np.repeat(np.asarray(values, np.float32), [len(p) for p in positions])
