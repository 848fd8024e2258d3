"""Computes the metrics of a batch that do not need the trainer: rewards, groups, lengths and policy lag."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final

import numpy as np

from fourfold import metrics as m
from fourfold.sample import Sample

from ..state.samples import SampleGroup, StepBatch, Trajectory

AGENT_METRICS: Final = "agents/metrics/"  # prefix of metrics that agents send with their trajectories
SCORER_METRICS: Final = "scorers/"  # prefix of metrics of the terms of the score
SOURCE_METRICS: Final = "data/"  # prefix of metrics of the sources of prompts
_MAX_COMPONENTS: Final = 256  # most components of all scorers together
_MAX_AGENT_METRICS: Final = 64  # most metrics, because agents choose the names and could fill the files


def compute_batch_metrics(batch: StepBatch, *, policy_version: int, scored: bool = True) -> dict[str, float]:
    """Return the metrics over all generated groups of a batch (at least one), before filter and selection.

    Without `scored`, leave out those of the scores, which are 0.
    """
    groups = batch.generated()
    scores = [np.array([t.sample.score for t in group.scored], np.float64) for group in groups]
    trajectories = [t for group in groups for t in group.scored]
    every = np.concatenate(scores)
    highest, lowest = every.max(), every.min()
    lengths = np.array([t.token_count for t in trajectories])
    spans = [_lag_span(t) for t in trajectories]
    lags = np.array([policy_version - min(s.oldest_version for s in t.segments) for t in trajectories])
    result = {
        m.FILTER_ACCEPT_RATE: batch.groups_accepted / len(groups),
        m.PROMPTS_CONSUMED: float(batch.prompts_drawn),
        m.RESPONSE_LENGTH: float(lengths.mean()),
        m.RESPONSE_LENGTH_P95: float(np.percentile(lengths, 95)),
        m.RESPONSE_LENGTH_MAX: float(lengths.max()),
        m.TOTAL_LENGTH: float(np.mean([sum(len(s.token_ids) for s in t.segments) for t in trajectories])),
        m.TURNS: float(np.mean([sum(map(_turns, t.segments)) for t in trajectories])),
        m.NO_ACTION_RATE: float((lengths == 0).mean()),
        m.TRUNCATION_RATE: float(np.mean([t.truncated for t in trajectories])),
        m.POLICY_LAG_MEAN: float(lags.mean()),
        m.POLICY_LAG_MAX: float(lags.max()),
        m.LAG_SPAN: float(max(spans)),
        **_token_lags([s for group in batch.groups for s in group.segments], policy_version),
    }
    if scored:
        result |= {m.REWARD_MEAN: float(every.mean()), m.REWARD_STD: float(every.std())}
        result |= {m.REWARD_MIN: float(lowest), m.REWARD_MAX: float(highest)}
    if scored and len(every) > len(groups):  # the scores of a group of one sample cannot differ
        rewards = [group.rewards for group in groups]
        result |= {
            m.USEFUL_GROUPS: float(np.mean([max(r) > min(r) for r in rewards])),
            m.GROUPS_ALL_MAX: float(np.mean([s.min() == highest for s in scores])),
            m.GROUPS_ALL_MIN: float(np.mean([s.max() == lowest for s in scores])),
            m.GROUPS_STD: float(np.mean([s.std() for s in scores])),
        }
    return (
        result | _source_metrics(groups) | _scorer_metrics(trajectories) | _agent_metrics(trajectories) | batch.measured
    )


def count_scorers(batch: StepBatch) -> dict[str, dict[str, int]]:
    """Return the scored samples of a batch by name of the table [[reward]] and by name@version."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for group in batch.generated():
        for trajectory in group.trajectories:
            for term in trajectory.sample.terms:
                counts[term.name][term.scorer] += 1
    return {name: dict(found) for name, found in counts.items()}


def _source_metrics(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Return the mean score of each named source of prompts, and its share of the groups."""
    by_source: defaultdict[str, list[SampleGroup]] = defaultdict(list)
    for group in groups:
        if source := group.trajectories[0].prompt.source:
            by_source[source].append(group)
    result = dict[str, float]()
    for source, found in by_source.items():
        scores = [t.sample.score for group in found for t in group.scored if t.sample.score is not None]
        result[f"{SOURCE_METRICS}{source}/share"] = len(found) / len(groups)
        if scores:
            result[f"{SOURCE_METRICS}{source}/reward"] = float(np.mean(scores))
    return result


def _scorer_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return mean and spread of each term of the score, before its weight, and the means of its components."""
    scores: defaultdict[str, list[float]] = defaultdict(list)
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for term in trajectory.sample.terms:
            scores[term.name].append(term.score)
        for name, value in trajectory.components.items():
            parts[name].append(value)
    result = dict[str, float]()
    for name, values in scores.items():
        prefix = f"{SCORER_METRICS}{name}"
        result |= {f"{prefix}/mean": float(np.mean(values)), f"{prefix}/std": float(np.std(values))}
        result[f"{prefix}/samples"] = float(len(values))
    frequent = sorted(parts, key=lambda name: (-len(parts[name]), name))[:_MAX_COMPONENTS]
    # The first part of a component's name is its scorer.
    return result | {f"{SCORER_METRICS}{_component(name)}": float(np.mean(parts[name])) for name in frequent}


def _component(name: str) -> str:
    scorer, _, part = name.partition("/")
    return f"{scorer}/part/{part}"


def _agent_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean of each agent metric over the trajectories that have it, for the most frequent names."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            values[name].append(value)
    frequent = sorted(values, key=lambda name: (-len(values[name]), name))[:_MAX_AGENT_METRICS]
    return {f"{AGENT_METRICS}{name}": float(np.mean(values[name])) for name in frequent}


def _token_lags(samples: Sequence[Sample], policy_version: int) -> dict[str, float]:
    """Return mean, 95th percentile and largest lag of the sampled tokens."""
    counts = Counter[int]()
    for sample in samples:
        for span in sample.version_spans:
            if span.policy_version >= 0:
                counts[policy_version - span.policy_version] += span.token_count
    if not counts:
        return {}
    lags = sorted(counts)
    ends = np.cumsum([counts[lag] for lag in lags])
    return {
        m.TOKEN_LAG_MEAN: sum(lag * count for lag, count in counts.items()) / float(ends[-1]),
        m.TOKEN_LAG_P95: float(lags[int(np.searchsorted(ends, 0.95 * ends[-1]))]),
        m.TOKEN_LAG_MAX: float(lags[-1]),
    }


def _turns(sample: Sample) -> int:
    """Return the number of contiguous spans of sampled tokens."""
    mask = sample.action_mask
    return int(np.count_nonzero(mask[1:] > mask[:-1])) + int(mask[0])


def _lag_span(trajectory: Trajectory) -> int:
    versions = [v.policy_version for s in trajectory.segments for v in s.version_spans if v.policy_version >= 0]
    return max(versions) - min(versions) if versions else 0
