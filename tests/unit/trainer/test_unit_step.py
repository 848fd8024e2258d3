"""A step of a loss of whole answers on a toy policy: every split has the loss and the gradient of the whole step."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor

from fourfold import metrics as m
from fourfold.algorithm.losses import SampleInputs, SampleLoss
from fourfold.algorithm.state import AlgorithmState
from fourfold.arrays import EMPTY_FLOATS, Float32Array
from fourfold.config import Config
from fourfold.config.algorithm import AlgorithmConfig
from fourfold.errors import InvalidInput
from fourfold.sample import Sample
from fourfold.sample.columns import Samples
from fourfold.sample.mismatched import mismatched
from fourfold_trainer.batches import UnitBatch, dummy_unit_batch, from_arrays, to_arrays
from fourfold_trainer.service import metrics
from fourfold_trainer.step.batch import TrainBatch
from fourfold_trainer.step.forward import forward_all
from fourfold_trainer.step.loss_units import tail_factors
from fourfold_trainer.step.micro_batches import mini_batches
from fourfold_trainer.step.reference import compute_reference
from fourfold_trainer.step.sample_checks import check_samples
from fourfold_trainer.step.step_result import StepResult
from fourfold_trainer.step.train_step import train_step
from fourfold_trainer.step.unit_losses import compute_unit_losses
from fourfold_trainer.step.unit_objective import sample_sums
from tests.fakes.toy_engine import ToyEngine
from tests.fakes.trainer_engine import sample
from tests.support.recipes import make_recipe

LOSSES: Final[dict[str, dict[str, Any]]] = {
    "dpo": {"loss": {"kind": "dpo", "beta": 0.3}},
    "ipo": {"loss": {"kind": "dpo", "form": "ipo"}},
    "ld": {"loss": {"kind": "dpo", "ld_alpha": 0.25}, "sft_coef": 0.5},
    "simpo": {"loss": {"kind": "simpo"}, "sft_coef": 0.2},
    "orpo": {"loss": {"kind": "orpo"}, "sft_coef": 1.0},
    "kto": {"loss": {"kind": "kto", "undesirable_weight": 0.5}},
    "scores": {"loss": {"kind": "bradley-terry", "margin": True, "center_coef": 0.1}},
    "steps": {"loss": {"kind": "step-labels"}},
    "all-pairs": {
        "loss": {"kind": "dpo", "beta": 0.3},
        "sft_coef": 0.5,
        "selection": {"kind": "all-pairs", "min_margin": 0.5},
    },
}
every_loss = pytest.mark.parametrize("name", LOSSES)


def recipe(name: str, *, ranks: int = 1, budget: int = 1000, **batch: int) -> Config:
    algorithm = {**LOSSES[name], "filter": {"keep": "varied"}}
    config = make_recipe(
        batch={"group_size": 2, **batch},
        trainer={"ranks": ranks, "learning_rate": 0.5},
        algorithm=LOSSES["dpo"] | {"filter": {"keep": "varied"}} if name in ("scores", "steps") else algorithm,
    )
    # A recipe of engines trains no reward model, and its micro-batches hold two samples of its longest context. The
    # step does not read where its samples come from, and has smaller ones here.
    small = config.batch.model_copy(update={"tokens_per_micro_batch": budget})
    return config.model_copy(update={"batch": small, "algorithm": AlgorithmConfig.model_validate(algorithm)})


def answer(number: int, group: str, score: float | None, completion: int) -> Sample:
    return sample(f"{group}{number}", group=group, score=score, completion=completion, reference=True, seed=number)


def pairs(*, segments: bool = True) -> list[Sample]:
    """Five pairs of uneven answers: in one the second is better, one may have two segments, one has an empty answer."""
    found: list[Sample] = []
    for index, (chosen, rejected) in enumerate([(2, 9), (12, 1), (4, 4), (1, 7), (6, 0)]):
        pair = [answer(0, "abcde"[index], 1.0, chosen), answer(1, "abcde"[index], 0.0, rejected)]
        found += reversed(pair) if index == 1 else pair
    if not segments:
        return found
    one = replace(found[4], trajectory_id="c", segment_count=2)
    other = replace(answer(7, "c", 1.0, 3), trajectory_id="c", segment_index=1, segment_count=2)
    return [one, *found[:4], other, *found[5:]]


def groups() -> list[Sample]:
    """Groups of three, two and four answers: in the first, two scores are closer than the margin."""
    scores = {"a": [1.0, 0.0, 0.75], "b": [0.0, 2.0], "c": [1.0, 3.0, 2.0, 0.0]}
    return [answer(i, group, score, 1 + i) for group, found in scores.items() for i, score in enumerate(found)]


def labelled() -> list[Sample]:
    """Labelled answers, and for each the answer of another prompt, without a label."""
    found = [answer(0, "abcde"[i], float(i % 2), length) for i, length in enumerate([3, 8, 1, 5, 2])]
    others = [answer(1, one.group_id, None, len(one.token_ids)) for one in mismatched(found, max_tokens=20)]
    known = zip(mismatched(found, max_tokens=20), others, strict=True)
    return [*found, *(replace(one, reference_logprobs=o.reference_logprobs[: len(one.token_ids)]) for one, o in known)]


def steps() -> list[Sample]:
    """Answers of one to nine steps with soft labels, and one without a step."""
    found = []
    for index, (length, every) in enumerate([(9, 1), (12, 5), (4, 2), (7, 3), (20, 4), (3, 9)]):
        one = answer(0, "abcdef"[index], 1.0, length)
        ends = one.loss_mask & (np.cumsum(one.loss_mask) % every == 0)
        labels = np.random.default_rng(index).random(len(ends), np.float32) * ends
        found.append(replace(one, loss_mask=ends, token_rewards=labels.astype(np.float32)))
    return found


def samples(name: str) -> list[Sample]:
    if name == "scores":
        return pairs(segments=False)
    return {"kto": labelled, "all-pairs": groups, "steps": steps}.get(name, pairs)()


def run(found: Sequence[Sample], config: Config) -> tuple[ToyEngine, StepResult]:
    engine = ToyEngine(config)
    check_samples(found, config, policy_version=0)
    return engine, train_step(engine, found, config, step=1, state=AlgorithmState())  # type: ignore[arg-type]


def truth(name: str, found: Sequence[Sample], config: Config, table: Tensor) -> tuple[float, Tensor]:
    """Return the loss and the gradient of the whole step: trajectory by trajectory, pair by pair, without batches."""
    table = table.detach().clone().requires_grad_()
    rows = torch.log_softmax(table, 0)
    by_trajectory: dict[str, list[Sample]] = {}
    for one in sorted(found, key=lambda s: s.segment_index):
        by_trajectory.setdefault(one.trajectory, []).append(one)
    groups: dict[str, list[tuple[float | None, Tensor, Tensor]]] = {}
    for segments in by_trajectory.values():
        # The toy scores a sample by the log-probability of its last token.
        masked = [(s, slice(-1, None) if name == "scores" else s.loss_mask) for s in segments]
        p = torch.cat([rows[torch.from_numpy(s.token_ids[mask]).long()] for s, mask in masked])
        f = torch.cat([torch.from_numpy(s.reference_logprobs[mask]).double() for s, mask in masked])
        groups.setdefault(segments[0].group_id, []).append((segments[0].score, p, f))
    units = [[(s, p, f) for s, p, f in group if s is not None] for group in groups.values()]
    if name == "all-pairs":
        every = [[*pair] for unit in units for pair in itertools.combinations(unit, 2)]
        units = [[one, two] for one, two in every if abs(one[0] - two[0]) >= 0.5]
    units = [unit for unit in units if all(len(p) for _, p, _ in unit)]
    if name == "steps":  # each step is a unit, by the last token of its own and its label
        flat = [(s, at) for s in found for at in np.flatnonzero(s.loss_mask)]
        labels = [float(s.token_rewards[at]) for s, at in flat]
        ps = [rows[int(s.token_ids[at])][None] for s, at in flat]
        units = [[(t, p, torch.zeros(1))] for t, p in zip(labels, ps, strict=True)]
    distances = [float((p.detach().float().double() - f).sum()) for g in groups.values() for s, p, f in g if s is None]
    loss: Any = config.algorithm.loss
    assert isinstance(loss, SampleLoss)
    total = torch.zeros((), dtype=torch.float64)
    for unit in units:
        least = min(len(p) for _, p, _ in unit)
        factors = [torch.where(torch.arange(len(p)) < least, 1.0, loss.tail_weight).double() for _, p, _ in unit]
        inputs = SampleInputs(
            sums=torch.stack([(w * p).sum() for w, (_, p, _) in zip(factors, unit, strict=True)]),
            counts=torch.tensor([len(p) for _, p, _ in unit]),
            labels=torch.tensor([s for s, _, _ in unit]),
            reference_sums=torch.stack([(w * f).sum() for w, (_, _, f) in zip(factors, unit, strict=True)]),
            distance=float(np.mean(distances)) if distances else 0.0,
        )
        total = total + loss.compute(inputs).loss.sum() / len(units)
    value = float(total.detach())
    if config.algorithm.sft_coef:
        preferred = torch.cat([max(unit, key=lambda part: part[0] or 0.0)[1] for unit in units])
        total = total - config.algorithm.sft_coef * preferred.mean()
    (gradient,) = torch.autograd.grad(total, table)
    return value, gradient


@every_loss
def test_every_split_has_the_loss_and_the_gradient_of_the_whole_step(name: str) -> None:
    found = samples(name)
    counts = set()
    for ranks, budget in itertools.product([1, 2, 3, 8], [23, 40, 64, 1000]):
        config = recipe(name, ranks=ranks, budget=budget)
        value, gradient = truth(name, found, config, ToyEngine(config).policy)
        engine, result = run(found, config)
        counts.add(result.micro_batch_count)
        assert result.policy.loss == pytest.approx(value, rel=1e-12)
        torch.testing.assert_close(engine.gradients[0], gradient, rtol=1e-12, atol=1e-14)
        assert not result.skipped_reason and result.policy_updates == 1
    assert len(counts) > 3


@every_loss
def test_a_repeated_step_has_the_same_bits(name: str) -> None:
    one, two = (run(samples(name), recipe(name, budget=40))[0].gradients[0] for _ in range(2))
    assert torch.equal(one, two)


def test_the_two_answers_of_a_pair_are_in_one_micro_batch() -> None:
    engine, _ = run(pairs(), recipe("dpo", ranks=2, budget=23))
    found: Any = [batch for share in engine.policy_shares[0] for batch in share if not batch.is_dummy]
    assert sum(len(batch.unit_weights) for batch in found) == 4
    for batch in found:
        assert len(batch.labels) == 2 * len(batch.unit_weights)
        assert set(batch.unit_weights) == {0.25}
        assert sorted(batch.labels[:2]) == [0.0, 1.0]
        assert batch.counts.sum() == len(batch.reference_logprobs) == len(batch.tokens.targets)


def test_mini_batches_have_whole_groups() -> None:
    config = recipe("dpo", mini_batches_per_step=2)
    batch = TrainBatch.of(pairs(), config.algorithm)
    groups = batch.samples.values["group_id"]
    parts = mini_batches(batch.group_bounds, config, step=1)
    assert len(parts) == 2 and sorted(itertools.chain(*parts)) == list(range(11))
    assert not {groups[i] for i in parts[0]} & {groups[i] for i in parts[1]}
    _, result = run(pairs(), config)
    assert result.policy_updates == 2


def test_a_sum_does_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1000, generator=generator)
    counts = torch.tensor([300, 0, 1, 699])
    found = sample_sums(values, counts)
    assert found.dtype == torch.float64
    for one, part in zip(found, torch.split(values, counts.tolist()), strict=True):
        assert one == sample_sums(part, torch.tensor([len(part)]))[0]
        assert float(one) == pytest.approx(float(part.double().sum()), rel=1e-12)


def test_tokens_beyond_the_shorter_answer_weigh_less() -> None:
    assert tail_factors(np.array([2, 3, 1, 1]), 0.5).tolist() == [1, 1, 1, 1, 0.5, 1, 1]
    assert len(tail_factors(np.array([2, 3]), 1.0)) == 0


def test_ktos_distance_is_one_number_of_the_step_that_its_labels_do_not_change() -> None:
    config = recipe("kto", ranks=2, budget=23)
    _, result = run(labelled(), config)
    rows = torch.log_softmax(ToyEngine(config).policy.detach(), 0)
    sums = [
        float(
            (
                rows[torch.from_numpy(s.token_ids[s.loss_mask]).long()]
                - torch.from_numpy(s.reference_logprobs[s.loss_mask])
            ).sum()
        )
        for s in labelled()
        if s.score is None
    ]
    found = metrics.summarise(result, config)
    assert found[m.KTO_DISTANCE] == pytest.approx(max(0.0, float(np.mean(sums))), rel=1e-5)
    assert found[m.TRAINED_SAMPLES] == 5


def reference(found: Sequence[Sample], config: Config) -> list[Float32Array]:
    return compute_reference(ToyEngine(config), found, config, step=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "ranks"), [("dpo", 1), ("dpo", 2), ("kto", 1), ("kto", 2)])
def test_the_first_update_finds_the_policy_equal_to_the_prepared_reference(name: str, ranks: int) -> None:
    config = recipe(name, ranks=ranks, budget=40)
    found = samples(name)
    rows = reference(found, config)
    for one, row in zip(found, rows, strict=True):
        assert np.isnan(row[0]) and not row[1:][~one.loss_mask[1:]].any()
    prepared = [replace(one, reference_logprobs=row) for one, row in zip(found, rows, strict=True)]
    result = run(prepared, config)[1]
    values = metrics.summarise(result, config)
    zeros = [m.KTO_DISTANCE] if name == "kto" else [m.PAIR_MARGIN, m.PAIR_CHOSEN_REWARD, m.PAIR_REJECTED_REWARD]
    # The toy policy updates in float64, and answers in float32.
    assert [values[name] for name in zeros] == pytest.approx([0.0] * len(zeros), abs=1e-6)


@pytest.mark.parametrize("name", ["dpo", "ld", "simpo", "kto"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_losses_of_units_are_those_that_a_step_takes_the_mean_of(name: str, ranks: int) -> None:
    config = recipe(name, ranks=ranks, budget=40)
    found = [one for one in samples(name) if name == "kto" or one.group_id != "e"]
    engine: Any = ToyEngine(config)
    units = compute_unit_losses(engine, found, config, step=1)
    values = metrics.summarise(run(found, config)[1], config)
    margin = values[m.KTO_MARGIN if name == "kto" else m.PAIR_MARGIN]
    assert (np.mean(units.losses), np.mean(units.margins)) == pytest.approx((values[m.POLICY_LOSS], margin), rel=1e-5)
    if name != "kto":  # in mini-batches, the units are in the order of the samples, too
        parts = recipe(name, ranks=ranks, budget=40, mini_batches_per_step=2)
        assert compute_unit_losses(engine, found, parts, step=4).losses == pytest.approx(units.losses, rel=1e-6)
        with pytest.raises(InvalidInput, match="e has no token in the loss"):
            compute_unit_losses(engine, samples(name), config, step=1)


@pytest.mark.parametrize("step", [1, 2, 201])
def test_the_noise_of_a_pair_is_what_other_samples_change_of_it(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = ToyEngine(config := recipe("dpo", budget=1000))
    exact = engine.compute_logprobs
    # Rounding of a product with more rows, made large: each token of a micro-batch of n tokens is n / 100 nats off.
    monkeypatch.setattr(
        engine, "compute_logprobs", lambda shares, **k: [[r + len(r) / 100 for r in s] for s in exact(shares, **k)]
    )
    result = train_step(engine, pairs(), config, step=step, state=AlgorithmState())
    found = metrics.summarise(result, config).get(m.PAIR_NOISE)
    sizes = [[int(s.loss_mask.sum()) for s in pairs() if s.group_id == group] for group in "abcd"]
    total = sum(map(sum, sizes))
    expected = [pytest.approx(max(pair) * (total - sum(pair)) / 100, rel=1e-4) for pair in sizes]
    assert (found is None) if step == 2 else any(found == one for one in expected)


def test_losses_of_units_are_refused_for_a_loss_of_tokens_or_scores() -> None:
    for name in ("scores", "all-pairs"):
        with pytest.raises(InvalidInput, match=r"losses_of_step = 2, and algorithm.loss.kind = .* leave it out"):
            compute_unit_losses(ToyEngine(recipe("dpo")), samples(name), recipe(name), step=2)  # type: ignore[arg-type]


def test_a_reference_that_no_loss_reads_is_refused() -> None:
    config = recipe("simpo")
    with pytest.raises(InvalidInput, match=r"reference_of_step = 1, and algorithm.loss.kind = `simpo` compares no ans"):
        reference(pairs(), config)
    config = recipe("dpo")
    with pytest.raises(InvalidInput, match="a pair has 2"):
        reference(pairs()[:2], config)


def test_ktos_distance_of_a_policy_that_is_its_reference_is_0_to_the_bit() -> None:
    config = recipe("kto", ranks=2, budget=23)
    exact = torch.log_softmax(ToyEngine(config).policy.detach(), 0).float().numpy()
    _, result = run([replace(s, reference_logprobs=exact[s.token_ids]) for s in labelled()], config)
    assert result.policy.sums[m.KTO_DISTANCE] == 0.0


def test_the_metrics_are_means_over_pairs() -> None:
    config = recipe("ld", ranks=2, budget=40)
    _, result = run(pairs(), config)
    found = metrics.summarise(result, config)
    rows = torch.log_softmax(ToyEngine(config).policy.detach(), 0)

    def logprob(ids: str) -> float:
        chosen = [s for s in pairs() if s.trajectory == ids]
        return sum(float(rows[torch.from_numpy(s.token_ids[s.loss_mask]).long()].sum()) for s in chosen)

    chosen, rejected = [logprob(i) for i in ("a0", "b0", "c", "d0")], [logprob(i) for i in ("a1", "b1", "c1", "d1")]
    assert found[m.PAIR_CHOSEN_LOGPROB] == pytest.approx(np.mean(chosen))
    assert found[m.PAIR_REJECTED_LOGPROB] == pytest.approx(np.mean(rejected))
    assert found[m.PAIR_LENGTH_DIFFERENCE] == pytest.approx((2 + 12 + 7 + 1 - 9 - 1 - 4 - 7) / 4)
    assert found[m.PAIR_NLL] == pytest.approx(-sum(chosen) / 22)
    assert found[m.PAIR_MARGIN] == pytest.approx(found[m.PAIR_CHOSEN_REWARD] - found[m.PAIR_REJECTED_REWARD])
    assert found[m.TRAINED_TOKENS] == 22 + 21
    assert set(found) <= m.METRICS.keys() and not {m.ENTROPY, m.SCORE_MEAN, m.APPROX_KL} & found.keys()


def test_the_metrics_of_a_reward_model_are_those_of_its_scores() -> None:
    config = recipe("scores", ranks=2, budget=40)
    _, result = run(samples("scores"), config)
    found = metrics.summarise(result, config)
    table = torch.log_softmax(ToyEngine(config).policy.detach(), 0)
    scores = {s.sample_id: float(table[int(s.token_ids[-1])]) for s in samples("scores")}
    chosen, rejected = [scores[f"{group}0"] for group in "abcde"], [scores[f"{group}1"] for group in "abcde"]
    assert found[m.SCORE_MEAN] == pytest.approx(np.mean([*scores.values()]))
    assert found[m.SCORE_STD] == pytest.approx(np.std([*scores.values()]))
    assert found[m.SCORE_ACCURACY] == pytest.approx(np.mean([a > b for a, b in zip(chosen, rejected, strict=True)]))
    assert found[m.PAIR_MARGIN] == pytest.approx(np.mean(chosen) - np.mean(rejected))
    assert set(found) <= m.METRICS.keys() and not {m.PAIR_ACCURACY, m.PAIR_CHOSEN_LOGPROB} & found.keys()


def test_a_reward_model_answers_with_one_score_per_sample_and_with_nothing_else() -> None:
    config = recipe("scores", ranks=2, budget=16)
    engine: Any = ToyEngine(config)
    found = forward_all(engine, Samples.of(pairs()), config, entropies=False, values=True)
    table = torch.log_softmax(engine.policy.detach(), 0).float()
    assert [row.tolist() for row in found.values] == [[float(table[int(s.token_ids[-1])])] for s in pairs()]
    assert not found.logprobs
    for more in ({"entropies": False, "values": False}, {"entropies": True, "values": True}):
        with pytest.raises(InvalidInput, match="the recipe trains a reward model; set include_values alone"):
            forward_all(engine, Samples.of(pairs()), config, **more)


def test_a_step_without_a_whole_pair_is_skipped() -> None:
    engine, result = run(pairs()[-2:], recipe("dpo"))
    assert result.skipped_reason == "NO_ACTION_TOKENS" and not engine.gradients


def test_a_unit_batch_survives_the_rank_channel() -> None:
    batch = dummy_unit_batch(pairs=True, with_reference=True, with_factors=True)
    again = from_arrays(UnitBatch, to_arrays(batch))
    assert again.is_dummy and again.counts.tolist() == [1, 0] and again.factors.tolist() == [0.0]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("dpo", lambda s: s[:1], "group a has 1 samples; a pair has 2"),
        ("dpo", lambda s: [replace(s[0], score=0.0), s[1]], "group a: its samples have the scores 0.0, 0.0; the prefe"),
        ("dpo", lambda s: [*s, answer(2, "a", 2.0, 3)], "group a has 3 samples; a pair has 2"),
        ("all-pairs", lambda s: [replace(s[0], score=0.25), s[1]], "has the greater score by 0.5: leave the group out"),
        ("dpo", lambda s: [replace(x, reference_logprobs=EMPTY_FLOATS) for x in s], "loss.kind = `dpo` needs them"),
        ("kto", lambda s: [replace(x, score=1.0) for x in s], "each of the 2 samples has a score"),
        ("dpo", lambda s: [replace(s[0], score=None), s[1]], "has no score"),
        ("scores", lambda s: pairs()[:3] + pairs()[5:6], "sample c0 is one of 2 segments of trajectory c"),
    ],
)
def test_samples_that_are_no_units_are_refused(name: str, change: Any, message: str) -> None:
    found = [answer(0, "a", 1.0, 3), answer(1, "a", None if name == "kto" else 0.0, 2)]
    check_samples(found, recipe(name), policy_version=0)
    with pytest.raises(InvalidInput, match=re.escape(message)):
        check_samples(change(found), recipe(name), policy_version=0)


def test_a_group_without_a_token_in_the_loss_may_have_any_scores() -> None:
    muted = [replace(answer(i, "a", 0.0, 3), loss_mask=np.zeros(6, np.bool_)) for i in range(3)]
    assert run(muted, recipe("dpo"))[1].skipped_reason == "NO_ACTION_TOKENS"
    assert len(run([*muted, answer(0, "b", 1.0, 3), answer(1, "b", 0.0, 2)], recipe("dpo"))[0].gradients) == 1


def test_an_answer_of_several_pairs_has_one_pass() -> None:
    engine, _ = run(groups(), recipe("all-pairs", budget=1000))
    (batch,) = (batch for share in engine.policy_shares[0] for batch in share)
    assert isinstance(batch, UnitBatch)
    assert len(batch.counts) == 9 and len(batch.unit_weights) == 2 + 1 + 6, "a0 and a2 differ by less than 0.5"
    labels = batch.labels[batch.pairs].reshape(-1, 2).tolist()
    assert sorted(labels) == [[0.75, 0], [1, 0], [1, 0], [2, 0], [2, 0], [2, 1], [3, 0], [3, 1], [3, 2]]


def test_a_pair_that_is_longer_than_a_micro_batch_is_refused() -> None:
    found = [answer(0, "a", 1.0, 10), answer(1, "a", 0.0, 10)]
    with pytest.raises(InvalidInput, match="group a has 26 tokens, more than a micro-batch of 25"):
        check_samples(found, recipe("dpo", budget=25), policy_version=0)


# Tokens that no engine sampled


def rows() -> list[Sample]:
    found = [sample(f"r{i}", group=str(i), score=1.0 + i, completion=2 + i) for i in range(3)]
    return [replace(s, behavior_logprobs=EMPTY_FLOATS, version_spans=()) for s in found]


@pytest.mark.parametrize("ranks", [1, 4])
def test_nll_trains_on_tokens_that_no_engine_sampled(ranks: int) -> None:
    algorithm = {"loss": {"kind": "nll"}, "advantage": {"kind": "constant"}}
    config = make_recipe(batch={"tokens_per_micro_batch": 16}, trainer={"ranks": ranks}, algorithm=algorithm)
    engine, result = run(rows(), config)
    table = ToyEngine(config).policy.detach().clone().requires_grad_()
    p = torch.log_softmax(table, 0)
    parts = [(1.0 + i) * p[torch.from_numpy(s.token_ids[s.loss_mask]).long()].sum() for i, s in enumerate(rows())]
    (gradient,) = torch.autograd.grad(-sum(parts) / 9, table)  # type: ignore[arg-type]
    torch.testing.assert_close(engine.gradients[0], gradient, rtol=1e-6, atol=1e-8)
    found = metrics.summarise(result, config)
    tokens = torch.cat([p[torch.from_numpy(s.token_ids[s.loss_mask]).long()] for s in rows()])
    assert found[m.NLL] == pytest.approx(-float(tokens.detach().mean()))
    assert not [key for key in found if key.startswith("mismatch/") and key != m.MISMATCH_COVERED]


def test_a_loss_that_reads_the_engine_refuses_tokens_that_none_sampled() -> None:
    config = make_recipe(algorithm={"loss": {"kind": "nll"}, "correction": {"kind": "tis"}})
    with pytest.raises(InvalidInput, match="sample r0 has no behavior_logprobs"):
        check_samples(rows(), config, policy_version=0)


def test_a_step_without_a_label_is_refused() -> None:
    one, *others = steps()
    config = recipe("steps")
    for wrong, shown in ((EMPTY_FLOATS, "none"), (one.token_rewards + one.loss_mask, r"\[1\.\d+, .*\]")):
        sample = replace(one, token_rewards=wrong)
        with pytest.raises(InvalidInput, match=rf"sample a0 has the labels {shown} in token_rewards; that of a step"):
            check_samples([sample, *others], config, policy_version=0)
