"""Splits the samples of a step into micro-batches for every rank, and joins the results of the ranks.

Each rank gets about the same number of tokens, packed under the token budget. Collectives run inside a forward pass
under ZeRO-3, so all ranks must run the same number of micro-batches: a rank with fewer gets dummies, two tokens whose
weight is 0. With sequence parallelism, "rank" is a group of ranks that share every micro-batch.

    compute_per_token    a number for each target token, from the policy or the critic
    compute_old_logprobs log-probabilities before the first update, from its micro-batches
    compute_as_updates   the same, with entropies if they are asked for
    add_gradient         log-probabilities; keeps the gradient of their weighted sum
    mini_batches         the samples of each optimizer step
    LossTokens           the loss tokens of every sample, made into micro-batches
    MicroBatches         those of one rank; only the one that runs is in memory
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from fourfold.algorithm import aggregation
from fourfold.arrays import EMPTY_FLOATS, Float32Array, Int32Array, Int64Array
from fourfold.config.schema import Config
from fourfold.nn.batching import TokenBatch, pack, split_by_tokens
from fourfold.sample.columns import Samples
from fourfold_trainer import batches
from fourfold_trainer.batches import PolicyBatch, ValueBatch, WeightedBatch
from fourfold_trainer.step.advantages import TokenTargets
from fourfold_trainer.step.batch import TrainBatch

T = TypeVar("T")

# A pass without gradients keeps the activations of one layer, and so takes more tokens in the same memory: not so
# where gradient checkpointing lets a pass with gradients keep no more.
_NO_GRADIENT_FACTOR: Final = 4

Compute: TypeAlias = Callable[[Sequence[Sequence[TokenBatch]]], list[list[Float32Array]]]
"""A method of the engine: returns a number, or a row of them, for each target token of each rank's batches."""
Positions: TypeAlias = Callable[[int], Int64Array]
"""Returns the target tokens of a sample, by its index."""
Counts: TypeAlias = Sequence[int] | Int64Array
ForwardBackward: TypeAlias = Callable[[Sequence[Sequence[WeightedBatch]]], list[list[Float32Array]]]
"""A method of the engine: returns a log-probability for each token of each rank's batches; keeps the gradient."""


def compute_per_token(
    compute: Compute, samples: Samples, positions: Positions, counts: Counts, config: Config, *, ranks: int = 0
) -> list[Float32Array]:
    """Return a float32 number, or a row of them, for each target token of each sample, in order.

    Args:
        compute: `compute_logprobs` or `compute_values` of the engine.
        positions: returns the target tokens of a sample, each in [1, n).
        counts: number of target tokens of each sample; may be 0.
        ranks: number of ranks that have the model; 0: the policy's.
    """
    asked = [[i] for i, count in enumerate(counts) if count]
    shares = _split(samples, asked, config, ranks=ranks or config.trainer.data_parallel_size, gradient=False)
    make = partial(pack_tokens, samples, positions)
    return _run(compute, fill(shares, make, batches.dummy_tokens()), shares, counts)


def add_gradient(
    compute: ForwardBackward, samples: Samples, weights: Sequence[Float32Array], config: Config
) -> list[Float32Array]:
    """Add the gradient of a weighted sum of log-probabilities to the pending gradient.

    Args:
        compute: `forward_backward` of the engine; not called when there is nothing to add.
        weights: float32 [n] of each sample, the first 0.

    Returns:
        For each sample the log-probabilities of its tokens whose weight is not 0, in order.
    """
    positions = [np.flatnonzero(w) for w in weights]
    weighted = [[i] for i, p in enumerate(positions) if len(p)]
    shares = _split(samples, weighted, config, ranks=config.trainer.data_parallel_size)

    def make(members: Sequence[int]) -> WeightedBatch:
        chosen = np.concatenate([weights[i][positions[i]] for i in members])
        return WeightedBatch(tokens=pack_tokens(samples, positions.__getitem__, members), weights=chosen)

    return _run(compute, fill(shares, make, batches.dummy_weighted_batch()), shares, [len(p) for p in positions])


def _run(
    compute: Callable[[Sequence[MicroBatches[T]]], list[list[Float32Array]]],
    micro_batches: Sequence[MicroBatches[T]],
    shares: Sequence[Sequence[Sequence[int]]],
    counts: Counts,
) -> list[Float32Array]:
    """Run a method of the engine unless no rank has a micro-batch; return its answers sample by sample, some empty."""
    rows: list[Float32Array] = [EMPTY_FLOATS] * len(counts)
    if not shares[0]:
        return rows
    for share, found in zip(shares, compute(micro_batches), strict=True):
        for members, numbers in zip(share, found, strict=True):
            ends = np.cumsum([counts[i] for i in members])  # none for a dummy
            for i, part in zip(members, np.split(numbers, ends[:-1]), strict=False):
                rows[i] = part
    return rows


def mini_batches(bounds: Int64Array, config: Config, *, step: int) -> list[list[int]]:
    """Return the samples of each optimizer step. Every epoch splits all trajectories into mini-batches at random.

    With `group_bounds` of the batch in place of `bounds`, whole groups are dealt. A mini-batch that has all
    trajectories keeps their order. So each epoch has the micro-batches of the first, and packing adds no difference to
    their log-probabilities.

    `bounds` are those of `TrainBatch`: the segments of a trajectory are in one optimizer step, which gives the weight
    of one sample to them together.
    """
    if config.batch.mini_batches_per_step == 1:
        return [list(range(int(bounds[-1]))) for _ in range(config.batch.epochs_per_step)]
    parts = []
    for epoch in range(config.batch.epochs_per_step):
        order = np.random.default_rng([config.seed, step, epoch]).permutation(len(bounds) - 1)
        for part in np.array_split(order, config.batch.mini_batches_per_step):
            if len(part):
                parts.append([i for j in part for i in range(int(bounds[j]), int(bounds[j + 1]))])
    return parts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossTokens:
    """The tokens of the loss, sample by sample."""

    config: Config
    batch: TrainBatch
    targets: TokenTargets
    kl_in_loss: bool

    def weights(self, members: Sequence[int]) -> dict[int, float]:
        """Return the weight of each token's loss, by sample, when `members` make one optimizer step."""
        chosen = np.array(members, np.int64)
        count = len(self.batch.bounds) - 1
        lengths = np.zeros(count, np.int64)  # of trajectories; 0 for those of other optimizer steps
        masked = self.config.algorithm.shaping.count_masked
        counted = self.batch.free_lengths if masked else self.batch.loss_lengths
        np.add.at(lengths, self.batch.trajectory_of[chosen], counted[chosen])
        weights = aggregation.sample_weights(
            lengths, mode=self.config.algorithm.aggregation, constant_length=self.config.sampling.max_new_tokens
        )
        return dict(zip(members, weights[self.batch.trajectory_of[chosen]].tolist(), strict=True))

    def to_train(self, members: Sequence[int]) -> list[int]:
        """Return the members that have a gradient.

        The gradient of a trajectory without advantage is 0 if the loss says so and there is no KL or entropy term: its
        tokens count in the weights, but need no forward pass. All segments of another one are trained on: the ratio of
        a trajectory, and the metrics, are those of all of its tokens.
        """
        alive, algorithm = self.to_value(members), self.config.algorithm
        if self.kl_in_loss or algorithm.entropy_coef > 0 or algorithm.loss.trains_without_advantage:
            return alive
        trajectory_of = self.batch.trajectory_of
        useful = {int(trajectory_of[i]) for i in alive if self._chosen(self.targets.advantages, i).any()}
        return [i for i in alive if int(trajectory_of[i]) in useful]

    def to_value(self, members: Sequence[int]) -> list[int]:
        """Return the members that have loss tokens."""
        return [i for i in members if self.batch.loss_lengths[i]]

    def policy_micro_batches(
        self, members: Sequence[int], weights: dict[int, float]
    ) -> list[MicroBatches[PolicyBatch]]:
        """Return each rank's micro-batches of `members`, each of which has loss tokens."""
        with_old = self.targets.outputs.old_logprobs is not None
        dummy = batches.dummy_policy_batch(
            with_old=with_old,
            with_reference=self.kl_in_loss,
            with_behavior=self._with_behavior,
            teacher_tokens=self.config.algorithm.loss.teacher_tokens,
        )
        return fill(
            policy_shares(self.batch, self.config, members), lambda ids: self._policy_batch(ids, weights), dummy
        )

    def value_micro_batches(self, members: Sequence[int], weights: dict[int, float]) -> list[MicroBatches[ValueBatch]]:
        """Return each rank's micro-batches of `members` for the critic."""
        units = [[i] for i in members]
        shares = _split(self.batch.samples, units, self.config, ranks=self.config.critic_data_parallel_size)
        return fill(shares, lambda ids: self._value_batch(ids, weights), batches.dummy_value_batch())

    def _policy_batch(self, members: Sequence[int], weights: dict[int, float]) -> PolicyBatch:
        counts = self.batch.loss_lengths[list(members)]
        reference = [self._aligned("reference_logprobs", i) for i in members] if self.kl_in_loss else None
        tokens, teacher = pack_tokens(self.batch.samples, self.batch.loss_positions, members), EMPTY_FLOATS
        if self.config.algorithm.loss.teacher_tokens:
            ids, teacher = (self._teacher(name, members) for name in ("teacher_ids", "teacher_logprobs"))
            tokens = batches.with_targets(tokens, ids)
        return PolicyBatch(
            tokens=tokens,
            teacher_logprobs=teacher,
            trajectories=np.repeat(_numbered(self.batch.trajectory_of[list(members)]), counts),
            weights=np.repeat(np.array([weights[i] for i in members], np.float32), counts),
            advantages=self._join(self.targets.advantages, members),
            behavior_logprobs=np.concatenate([self._aligned("behavior_logprobs", i) for i in members])
            if self._with_behavior
            else EMPTY_FLOATS,
            old_logprobs=self._join(self.targets.outputs.old_logprobs, members),
            reference_logprobs=EMPTY_FLOATS if reference is None else np.concatenate(reference),
        )

    @property
    def _with_behavior(self) -> bool:
        return bool(self.batch.samples.present["behavior_logprobs"].any())

    def _value_batch(self, members: Sequence[int], weights: dict[int, float]) -> ValueBatch:
        counts = self.batch.loss_lengths[list(members)]
        return ValueBatch(
            tokens=pack_tokens(self.batch.samples, self.batch.loss_positions, members),
            weights=np.repeat(np.array([weights[i] for i in members], np.float32), counts),
            returns=self._join(self.targets.returns, members),
            old_values=self._join(self.targets.outputs.values, members),
        )

    def _teacher(self, name: str, members: Sequence[int]) -> NDArray[Any]:
        """Return a field of a teacher at the loss tokens of the members, [k, top_k]."""
        rows = self.batch.samples.values[name]
        return np.concatenate([rows[i][self.batch.loss_positions(i)] for i in members])

    def _aligned(self, name: str, index: int) -> Float32Array:
        """Return the token column `name` of a sample at its loss tokens."""
        values: Float32Array = self.batch.samples.array(name, index)[self.batch.loss_positions(index)]
        return values

    def _chosen(self, parts: Sequence[NDArray[Any]], index: int) -> NDArray[Any]:
        """Return the part of a sample's action tokens that are loss tokens."""
        return parts[index][self.batch.selected(index)]

    def _join(self, parts: Sequence[NDArray[Any]] | None, members: Sequence[int]) -> Float32Array:
        if parts is None:
            return EMPTY_FLOATS
        joined: Float32Array = np.concatenate([self._chosen(parts, i) for i in members]).astype(np.float32, copy=False)
        return joined


def compute_old_logprobs(
    compute: Compute, batch: TrainBatch, config: Config, updates: Sequence[Sequence[int]]
) -> list[Float32Array]:
    """Return the log-probability of each sample's action tokens, as the first update on the sample will compute it.

    The arguments are those of `compute_as_updates`.

    Returns:
        float32 [n_i]; NaN for tokens that a grammar forced, and for a sample that is in none of `updates`.
    """
    return of_action_tokens(batch, compute_as_updates(compute, batch, config, updates))


def of_action_tokens(batch: TrainBatch, rows: Sequence[Float32Array]) -> list[Float32Array]:
    """Return float32 [n_i] for each sample from the numbers of its tokens that no grammar forced; NaN elsewhere."""
    found = [np.full(int(length), np.nan, np.float32) for length in batch.lengths]
    for index, row in enumerate(rows):
        if len(row):
            found[index][batch.free(index)] = row
    return found


def compute_as_updates(
    compute: Compute, batch: TrainBatch, config: Config, updates: Sequence[Sequence[int]], *, limit: int | None = None
) -> list[Float32Array]:
    """Return a float32 number, or a row of them, for each of a sample's tokens that no grammar forced.

    A product of matrices rounds a row differently in a micro-batch of another shape. In bfloat16 this difference is
    larger than the clip range of GSPO, so the micro-batches are those of the updates.

    Args:
        compute: `compute_logprobs` of the engine.
        updates: samples of each optimizer step, of the first epoch for old log-probabilities, that are trained on. The
            other samples get no number.
        limit: micro-batches of each rank and update that are computed; None: all.
    """
    shares: list[list[list[int]]] = [[] for _ in range(config.trainer.data_parallel_size)]
    for members in filter(None, updates):
        for share, part in zip(shares, policy_shares(batch, config, members), strict=True):
            share += part[:limit]

    def positions(index: int) -> Int64Array:
        return batch.positions(index)[batch.free(index)]

    make = partial(pack_tokens, batch.samples, positions)
    return _run(compute, fill(shares, make, batches.dummy_tokens()), shares, batch.free_lengths)


def unit_of(batch: TrainBatch, config: Config) -> Int64Array:
    """Return the unit of each sample, [S]: its trajectory, or its group where the loss reads pairs."""
    if config.algorithm.loss.reads != "pairs":
        return batch.trajectory_of
    return np.repeat(np.arange(len(batch.group_bounds) - 1), np.diff(batch.group_bounds))


def policy_shares(batch: TrainBatch, config: Config, members: Sequence[int]) -> list[list[list[int]]]:
    """Return for each rank the micro-batches of an update on `members`, as `_split` does.

    The members of a unit stay in one micro-batch if they fit in one. Otherwise, they are split, unless a token's loss
    depends on the whole unit.
    """
    numbers, lengths, budget = unit_of(batch, config), batch.samples.lengths, config.batch.tokens_per_micro_batch
    units: dict[int, list[int]] = {}
    for i in members:
        units.setdefault(int(numbers[i]), []).append(i)
    result = []
    for unit in units.values():
        whole = lengths[unit].sum() <= budget or config.algorithm.needs_whole_trajectories
        result += [unit] if whole else [[i] for i in unit]
    return _split(batch.samples, result, config, ranks=config.trainer.data_parallel_size)


class MicroBatches(Sequence[T]):
    """The micro-batches of one rank, each made when it is read: together they take four times the memory of a step."""

    def __init__(self, members: Sequence[Sequence[int]], make: Callable[[Sequence[int]], T], dummy: T) -> None:
        """`members` are the samples of each micro-batch, as `_split` returns them for one rank."""
        self.members, self._make, self._dummy = members, make, dummy

    def __len__(self) -> int:
        return len(self.members)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> MicroBatches[T]: ...
    def __getitem__(self, index: int | slice) -> T | MicroBatches[T]:
        if isinstance(index, slice):
            return MicroBatches(self.members[index], self._make, self._dummy)
        members = self.members[index]
        return self._make(members) if members else self._dummy


def _split(
    samples: Samples,
    units: Sequence[Sequence[int]],
    config: Config,
    *,
    ranks: int,
    gradient: bool = True,
) -> list[list[list[int]]]:
    """Return for each rank its micro-batches, as many for every rank; an empty list is a dummy.

    The samples of a unit stay together.

    Raises:
        InvalidInput: a unit is longer than a micro-batch.
    """
    factor = 1 if gradient or config.trainer.gradient_checkpointing else _NO_GRADIENT_FACTOR
    sizes = samples.lengths.tolist()
    lengths, shares = [sum(sizes[i] for i in unit) for unit in units], []
    for share in deal(lengths, ranks):
        parts = split_by_tokens([lengths[i] for i in share], max_tokens=config.batch.tokens_per_micro_batch * factor)
        shares.append([[i for index in part for i in units[share[index]]] for part in parts])
    count = max(map(len, shares))
    return [[*share, *[list[int]()] * (count - len(share))] for share in shares]


def deal(lengths: Sequence[int], rank_count: int) -> list[list[int]]:
    """Return the samples of each rank: the longest first, each to the rank that has the fewest tokens."""
    shares: list[list[int]] = [[] for _ in range(rank_count)]
    tokens = [0] * rank_count
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = tokens.index(min(tokens))
        shares[rank].append(index)
        tokens[rank] += lengths[index]
    return shares


def fill(
    shares: Sequence[Sequence[Sequence[int]]], make: Callable[[Sequence[int]], T], dummy: T
) -> list[MicroBatches[T]]:
    """Return the shares of `_split` as micro-batches."""
    return [MicroBatches(share, make, dummy) for share in shares]


def pack_tokens(samples: Samples, positions: Positions, members: Sequence[int]) -> TokenBatch:
    """Return one micro-batch of `members` that asks for the tokens at their positions, each in [1, n)."""
    temperatures = samples.values["temperature"]
    ids = [samples.array("token_ids", i) for i in members]
    return pack(ids, [positions(i) for i in members], [temperatures[i] for i in members])


def _numbered(ids: Int64Array) -> Int32Array:
    """Return 0 for the first id and those equal to it, 1 for the next, and so on."""
    numbers: dict[int, int] = {}
    return np.array([numbers.setdefault(i, len(numbers)) for i in ids.tolist()], np.int32)
