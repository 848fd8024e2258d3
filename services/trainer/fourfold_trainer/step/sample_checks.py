"""Refuses the samples of a training step that cannot be trained on, before anything changes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fourfold.algorithm.advantages.base import group_members
from fourfold.algorithm.selection import pairs_of
from fourfold.arrays import BoolArray
from fourfold.config.algorithm import AlgorithmConfig
from fourfold.config.schema import Config
from fourfold.errors import InvalidInput
from fourfold.sample import Sample, check_unique
from fourfold.sample.columns import Samples


def check_samples(samples: Sequence[Sample], config: Config, *, policy_version: int) -> None:
    """Refuse a batch that cannot be trained on.

    Fewer samples than ranks are no error: a batch may shrink on its way (lost groups, a filter), and ranks without
    samples run dummies. A recipe that asks for so few is refused when it is read.

    Raises:
        InvalidInput: names the sample, the value and the rule.
    """
    algorithm = config.algorithm
    if not samples:
        raise InvalidInput("the batch has no experiences; send at least one")
    columns = Samples.of(samples)
    values, present = columns.values, columns.present  # read by column: no GPU works while 128 samples are made
    check_unique(values["sample_id"])
    budget = config.batch.tokens_per_micro_batch
    alike = ["group_id", "segment_count", "score", "baseline_score", "shadow_score"]
    alike += ["terms"] if algorithm.advantage.compares_terms else []
    _check_segments(columns, alike, most_tokens=budget if algorithm.needs_whole_trajectories else None)
    loss = algorithm.loss
    check_pairs(columns, config)
    if loss.reads == "steps":
        _check_steps(columns)
    if loss.measures_distance and None not in values["score"]:
        raise InvalidInput(
            f"each of the {len(samples)} samples has a score; algorithm.loss.kind = `{loss.kind}` measures its "
            f"distance on samples without one: send the answer of another prompt with each prompt"
        )
    for index, sample_id in enumerate(values["sample_id"]):
        name = f"sample {sample_id}"
        if values["score"][index] is None and not loss.measures_distance:
            raise InvalidInput(f"{name} has no score; score it first, or leave it out of the batch")
        top_p, top_k = values["top_p"][index], values["top_k"][index]
        if top_p < 1 or top_k:
            raise InvalidInput(
                f"{name} was sampled with top_p = {top_p:g}, top_k = {top_k}; the engine's log-probabilities are then "
                f"renormalised and cannot be trained on: sample with temperature alone"
            )
        if algorithm.needs_reference and not present["reference_logprobs"][index]:
            reader = f"loss.kind = `{loss.kind}`" if loss.needs_reference else f"kl.coef = {algorithm.kl.coef:g}"
            reader = f"advantage.kind = `{algorithm.advantage.kind}`" if algorithm.distills else reader
            raise InvalidInput(f"{name} has no reference_logprobs; algorithm.{reader} needs them")
        ids = values["teacher_ids"][index]
        has = ids.shape[-1] if len(ids) else 0
        if (wanted := loss.teacher_tokens) and has != wanted:
            raise InvalidInput(
                f"{name} has {has} of a teacher's tokens in teacher_ids at each position; algorithm.loss.top_k = "
                f"{wanted} of loss.kind = `{loss.kind}` needs as many: ask the teacher for them"
            )
        if algorithm.advantage.needs_greedy_sample and values["baseline_score"][index] is None:
            kind = algorithm.advantage.kind
            raise InvalidInput(f"{name} has no baseline_score; algorithm.advantage.kind = `{kind}` needs it")
        _check_behavior(columns, index, algorithm)
        newest = max((span.policy_version for span in values["version_spans"][index]), default=-1)
        if newest > policy_version:
            raise InvalidInput(
                f"{name} was sampled by policy version {newest}; the trainer is at {policy_version} and has not "
                f"published that one: restore the right checkpoint, or raise the policy version"
            )


def check_pairs(samples: Samples, config: Config) -> None:
    """Refuse a group that is not two trajectories of different scores, or does not fit in one micro-batch.

    Any samples are accepted if the loss does not read pairs. With `selection.kind = "all-pairs"` a group has at least
    one pair. A group without loss tokens is not trained on.

    Raises:
        InvalidInput: names the group, the value and the rule.
    """
    most_tokens = config.batch.tokens_per_micro_batch
    selection, loss = config.algorithm.selection, config.algorithm.loss
    many = next((i for i, count in enumerate(samples.values["segment_count"]) if count > 1), None)
    if loss.trains == "scores" and many is not None:
        part = samples[many]
        raise InvalidInput(
            f"sample {part.sample_id} is one of {part.segment_count} segments of trajectory {part.trajectory}, and "
            f"algorithm.loss.kind = `{loss.kind}` scores whole texts: send each answer as one sample"
        )
    if loss.reads != "pairs":
        return
    trajectories, lengths = samples.trajectories, samples.lengths
    for members in group_members(samples.values["group_id"]):
        if not any(_in_loss(samples, i).any() for i in members):
            continue
        scores = {trajectories[i]: samples.values["score"][i] for i in members}
        group = f"group {samples.values['group_id'][members[0]]}"
        if len(scores) != 2 and selection.kind != "all-pairs":
            raise InvalidInput(f"{group} has {len(scores)} samples; a pair has 2: send one pair per group")
        known = [score for score in scores.values() if score is not None]
        if len(known) == len(scores) and not pairs_of(known, selection.min_margin):
            margin = f" by {selection.min_margin:g}" if selection.min_margin else ""
            raise InvalidInput(
                f"{group}: its samples have the scores {', '.join(map(str, scores.values()))}; the preferred one of a "
                f"pair has the greater score{margin}: leave the group out"
            )
        tokens = int(lengths[members].sum())
        if tokens > most_tokens:
            raise InvalidInput(
                f"{group} has {tokens} tokens, more than a micro-batch of {most_tokens}, in which a pair stays "
                f"together: raise batch.tokens_per_micro_batch, or leave the pair out"
            )


def _in_loss(samples: Samples, index: int) -> BoolArray:
    mask: BoolArray = samples.array("loss_mask", index) & samples.array("action_mask", index)
    return mask


def _check_steps(samples: Samples) -> None:
    """Refuse samples without a label in [0, 1] at the end of each step, which are their loss tokens."""
    for index, known in enumerate(samples.present["token_rewards"]):
        labels = samples.array("token_rewards", index)[_in_loss(samples, index)] if known else None
        if labels is None or ((labels < 0) | (labels > 1)).any():
            raise InvalidInput(
                f"sample {samples.values['sample_id'][index]} has the labels "
                f"{'none' if labels is None else labels.tolist()} in token_rewards; that of a step is from 0 to 1, at "
                f"its last token: correct them"
            )


def _check_segments(samples: Samples, alike: Sequence[str], *, most_tokens: int | None) -> None:
    """Refuse a trajectory of which a segment is missing or doubled, that is too long, or whose segments disagree.

    They must have the same values of the fields `alike`.
    """
    for members in group_members(samples.trajectories):
        if len(members) == 1 and samples.values["segment_count"][members[0]] == 1:
            continue
        first, *others = segments = [samples[i] for i in members]
        for other in others:
            for name in alike:
                if (one := getattr(first, name)) != (found := getattr(other, name)):
                    raise InvalidInput(
                        f"sample {other.sample_id} has {name} = {found!r}, and sample {first.sample_id} of the same "
                        f"trajectory {first.trajectory} has {one!r}; all segments of a trajectory must have the same"
                    )
        holders: dict[int, Sample] = {}
        for segment in segments:
            if (twin := holders.setdefault(segment.segment_index, segment)) is not segment:
                raise InvalidInput(
                    f"sample {segment.sample_id} is segment {segment.segment_index} of trajectory "
                    f"{segment.trajectory}, as is sample {twin.sample_id}; send each segment once"
                )
        if missing := [i for i in range(min(first.segment_count, len(holders) + 1)) if i not in holders]:
            raise InvalidInput(
                f"sample {first.sample_id}: its trajectory {first.trajectory} has {first.segment_count} segments, and "
                f"segment {missing[0]} is missing; send all of them in one batch, or leave the trajectory out"
            )
        tokens = sum(len(segment.token_ids) for segment in segments)
        if most_tokens is not None and tokens > most_tokens:
            raise InvalidInput(
                f"sample {first.sample_id}: the {len(segments)} segments of trajectory {first.trajectory} have "
                f"{tokens} tokens, more than a micro-batch; algorithm.loss or algorithm.correction has one ratio for "
                f"the whole trajectory: raise batch.tokens_per_micro_batch above {most_tokens}, or use a loss and a "
                f"correction of single tokens, such as `ppo` and `tis`"
            )


def _check_behavior(samples: Samples, index: int, algorithm: AlgorithmConfig) -> None:
    """Refuse a sample without the engine's log-probabilities that something reads, or with a token of probability 0.

    Corrections reject such a token, but without one it would be trained on.
    """
    kind, name = algorithm.loss.kind, f"sample {samples.values['sample_id'][index]}"
    if not samples.present["behavior_logprobs"][index]:
        if algorithm.correction.kind != "none" or algorithm.loss.corrects_lag:
            raise InvalidInput(
                f"{name} has no behavior_logprobs; algorithm.correction.kind = "
                f"`{algorithm.correction.kind}`, loss.kind = `{kind}` read them: for tokens that no engine sampled, "
                f"set correction.kind = `none` and a loss such as `nll`"
            )
        return
    if algorithm.correction.kind != "none" or algorithm.loss.corrects_lag:
        return
    (impossible,) = np.nonzero(
        np.isneginf(samples.array("behavior_logprobs", index)) & samples.array("loss_mask", index)
    )
    if len(impossible):
        raise InvalidInput(
            f"{name}: behavior_logprobs[{impossible[0]}] is -inf: a token that was sampled has a "
            f"probability above 0; leave it out of loss_mask, or set algorithm.correction.kind = `tis`, which rejects "
            f"such tokens"
        )
