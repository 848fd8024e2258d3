"""From completions to samples, and samples.jsonl: every trajectory of the steps done on a line of its own.

    {"step": 3, "sample_id": "p0000031-0-4", "group_id": "p0000031-0", "prompt": "...", "completion": "12",
     "answer": "12", "prompt_tokens": 41, "token_ids": [...], "logprobs": [...], "version_spans": [[-1, 41], [2, 3]],
     "truncated": false, "score": 1.0, "scorer": "last_number@0.1.0", "dropped": ""}

`logprobs` are those of the sampled tokens alone, in nats, rounded to 6 decimals; a span is
(policy version, tokens), -1 for the prompt. A trajectory that was dropped has its reason in
`dropped`, and a score when it came that far: FILTERED and BASELINE always do.
The lines of a step are appended when the ledger says that the trainer has done it, never before: a
run that was stopped holds no sample of a step that was under way. After a restore the file holds
the steps up to the checkpoint. What was dropped before it was sampled has no line.
Where every group of a step was filtered out, the last of them go to the trainer, which skips the
step, and have no reason here: the step's `skipped_reason` is theirs.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fourfold import metrics as m
from fourfold.arrays import Float32Array, Sample, VersionSpan
from fourfold.config import Config
from fourfold.errors import PeerFault, Unavailable
from fourfold.rollout.client import Completion
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rpc.codec import encode
from fourfold.types.v1.experience_pb2 import Experience

from ..data.prompts import Prompt
from .ledger import FILTERED


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """A sample with what people and scorers read of it."""

    prompt: Prompt
    sample: Sample
    completion: str
    """What the policy wrote, special tokens removed."""
    dropped: str = ""
    """Why it is not trained on; empty when it is."""
    abstained: bool = False
    """Whether it was dropped because the scorer had nothing to say of it."""

    def with_score(self, score: float, scorer: str) -> Trajectory:
        """Return it with its score."""
        return replace(self, sample=replace(self.sample, score=score, scorer=scorer))

    def with_drop_reason(self, reason: str, *, abstained: bool = False) -> Trajectory:
        """Return a copy that is dropped; a trajectory that was dropped before keeps its first reason."""
        return self if self.dropped else replace(self, dropped=reason, abstained=abstained)

    def with_baseline(self, baseline_score: float) -> Trajectory:
        """Return it with the score of the greedy answer to its prompt."""
        return replace(self, sample=replace(self.sample, baseline_score=baseline_score))

    def without_loss(self) -> Trajectory:
        """Return it with no token to train on."""
        return replace(self, sample=replace(self.sample, loss_mask=np.zeros_like(self.sample.action_mask)))

    def with_reference_logprobs(self, logprobs: Float32Array) -> Trajectory:
        """Return it with its reference log-probabilities, [n]."""
        return replace(self, sample=replace(self.sample, reference_logprobs=logprobs))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleGroup:
    """The trajectories of one prompt, in order of their index, dropped ones included."""

    position: int
    """Of the prompt in the endless order."""
    seed: int
    """Of the request."""
    trajectories: tuple[Trajectory, ...]
    baseline: Trajectory | None = None
    """The greedy answer to the prompt, dropped."""

    @property
    def samples(self) -> list[Sample]:
        """Those to train on."""
        return [t.sample for t in self.trajectories if not t.dropped]

    def all_trajectories(self) -> list[Trajectory]:
        """Return all that was sampled for it."""
        return [*self.trajectories, self.baseline] if self.baseline else list(self.trajectories)


@dataclass(slots=True, kw_only=True)
class StepBatch:
    """The groups of one step, and when its parts were done, in seconds of `time.monotonic`."""

    groups: list[SampleGroup] = field(default_factory=list)
    filtered: list[SampleGroup] = field(default_factory=list)
    """Of which every sample has a score, and none teaches anything: not trained on."""
    lost: list[Trajectory] = field(default_factory=list)
    """Of groups that were given up after they were sampled."""
    prompts_drawn: int = 0
    groups_lost: int = 0
    groups_accepted: int = 0
    """Those that the filter let through; fewer than `groups` when it let none through."""
    engines: dict[str, float] = field(default_factory=dict)
    """What the engines said of themselves meanwhile, by the names of metrics."""
    began: float = field(default_factory=time.monotonic)
    rolled: float = 0.0
    scored: float = 0.0
    done: float = 0.0

    def sample_ids(self) -> list[str]:
        """Return the ids of `experiences`, in its order."""
        return [sample.sample_id for group in self.groups for sample in group.samples]

    def experiences(self) -> Iterator[Experience]:
        """Yield what goes to the trainer, in a fixed order; packed one by one, while the ones before travel."""
        return (encode(sample) for group in self.groups for sample in group.samples)

    def trajectories(self) -> list[Trajectory]:
        """Return everything that was sampled, dropped ones included."""
        kept = [t for group in self.groups for t in group.all_trajectories()]
        return (
            kept
            + [t.with_drop_reason(FILTERED) for group in self.filtered for t in group.all_trajectories()]
            + self.lost
        )

    def generated(self) -> list[SampleGroup]:
        """Return the groups as they were before the filter, in order."""
        return sorted([*self.groups, *self.filtered], key=lambda group: group.position)

    def times(self) -> dict[str, float]:
        """Return how long each part took that was not hidden behind the one before it."""
        return {
            m.TIME_GENERATE: self.rolled - self.began,
            m.TIME_REWARD: max(self.scored - self.rolled, 0.0),
            m.TIME_REFERENCE: max(self.done - max(self.scored, self.rolled), 0.0),
        }


def build_sample(
    prompt: Prompt, completion: Completion, *, sample_id: str, group_id: str, temperature: float
) -> Sample:
    """Join prompt and completion, token by token."""
    before, after = len(prompt.token_ids), len(completion.token_ids)
    action_mask = np.ones(before + after, np.bool_)
    action_mask[:before] = False
    behavior = np.empty(before + after, np.float32)
    behavior[:before] = np.nan
    behavior[before:] = completion.logprobs
    return Sample(
        sample_id=sample_id,
        group_id=group_id,
        token_ids=np.concatenate([prompt.token_ids, completion.token_ids]).astype(np.int32, copy=False),
        behavior_logprobs=behavior,
        action_mask=action_mask,
        loss_mask=action_mask,
        version_spans=(VersionSpan(policy_version=-1, token_count=before), *completion.version_spans),
        temperature=temperature,
        truncated=completion.finish_reason == rollout.FINISH_REASON_LENGTH,
    )


def check_completions(
    completions: Sequence[Completion], *, who: str, vocabulary_size: int, newest_version: int
) -> None:
    """Refuse what cannot be trained on, so that another replica is asked. The client has checked the rest.

    Args:
        completions: of one call.
        who: sampled them, for messages.
        vocabulary_size: of the model.
        newest_version: highest policy version that an engine may have seen.

    Raises:
        Unavailable: the engine gave a sample up.
        PeerFault: what it sent cannot be right.
    """
    for completion in completions:
        if completion.finish_reason == rollout.FINISH_REASON_ABORTED:
            raise Unavailable(f"{who}: the engine gave the request up", reason="ABORTED")
        if completion.finish_reason not in (rollout.FINISH_REASON_STOP, rollout.FINISH_REASON_LENGTH):
            raise PeerFault(who, "BAD_SAMPLE", f"unknown finish_reason {completion.finish_reason}")
        if not len(completion.token_ids):
            raise PeerFault(who, "BAD_SAMPLE", "a sample without tokens")
        if int(completion.token_ids.view(np.uint32).max()) >= vocabulary_size:  # a negative id is a large one
            raise PeerFault(who, "BAD_SAMPLE", f"sampled ids outside the vocabulary [0, {vocabulary_size})")
        if (version := completion.version_spans[-1].policy_version) > newest_version:  # they never go back
            raise PeerFault(
                who, "BAD_VERSION", f"tokens of policy_version {version}; {newest_version} is the newest that was sent"
            )


def sampling_params(config: Config, prompt: Prompt, seed: int) -> rollout.SamplingParams:
    """Return how one prompt is sampled."""
    room = config.model.max_context_tokens - len(prompt.token_ids)
    return rollout.SamplingParams(
        temperature=config.sampling.temperature,
        max_tokens=min(config.sampling.max_new_tokens, room),
        stop_token_ids=config.sampling.stop_token_ids,
        seed=seed,
    )


def digest(trajectories: Iterable[Trajectory]) -> str:
    """Return a SHA-256 (hex) of the sampled tokens, in order of the sample ids: equal runs have equal digests."""
    result = hashlib.sha256()
    for trajectory in sorted(trajectories, key=lambda t: t.sample.sample_id):
        ids = trajectory.sample.token_ids.astype("<i4").tobytes()
        result.update(len(ids).to_bytes(8, "little") + ids)
    return result.hexdigest()


def to_lines(step: int, trajectories: Iterable[Trajectory]) -> bytes:
    """Return the lines of one step. Takes long for a large batch: call it in a thread."""
    return "".join(json.dumps(_line(step, t), ensure_ascii=False) + "\n" for t in trajectories).encode()


def _line(step: int, trajectory: Trajectory) -> dict[str, Any]:
    sample = trajectory.sample
    logprobs = sample.behavior_logprobs[sample.action_mask].astype(np.float64)
    return {
        "step": step,
        "sample_id": sample.sample_id,
        "group_id": sample.group_id,
        "prompt": trajectory.prompt.text,
        "completion": trajectory.completion,
        "answer": trajectory.prompt.answer,
        "prompt_tokens": len(trajectory.prompt.token_ids),
        "token_ids": sample.token_ids.tolist(),
        "logprobs": logprobs.round(6).tolist(),
        "version_spans": [[s.policy_version, s.token_count] for s in sample.version_spans],
        "truncated": sample.truncated,
        "score": sample.score,
        "scorer": sample.scorer,
        "dropped": trajectory.dropped,
    }
