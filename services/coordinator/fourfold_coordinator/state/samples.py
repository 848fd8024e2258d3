"""Defines trajectories, groups and batches; builds samples from completions; formats samples.jsonl.

Each trajectory of the steps done is a line of samples.jsonl:

    {"step": 3, "sample_id": "p0000031-0-4", "group_id": "p0000031-0", "prompt": "...", "completion": "12",
     "answer": "12", "prompt_tokens": 41, "completion_tokens": 3, "logprob_mean": -0.41,
     "version_spans": [[-1, 41], [2, 3]], "truncated": false, "score": 1.0, "scorer": "last_number@0.1.0",
     "terms": {"reward": [1.0, 1.0, "last_number@0.1.0"]}, "dropped": "", "source": "products"}

- `logprob_mean` is the mean log-probability of the sampled tokens, in nats, rounded to 6 decimals.
- A span is [policy version, tokens]; -1 stands for the prompt, and for what an agent observed.
- `terms` has score, weight and scorer of each term of the score, by the name of the table [[reward]]; without terms, an
  agent brought the score.
- A trajectory of an agent has its segments in one line: `completion_tokens`, `logprob_mean` and `version_spans` are of
  all segments, one after the other. `prompt` is what the model read first, without special tokens, if that
  is not the prompt of the task. `completion` is the text of the last segment after its first prompt, observations
  included.
- `source` is the name of the source of the prompt; empty if the recipe names none (`data_source` of its metadata).
- `dropped` is the reason of a trajectory that was not trained on. It has a score if it was scored before, as FILTERED,
  NOT_SELECTED and BASELINE always were. Samples that were dropped before they were sampled have no line.
- If every group of a step was filtered out, the last of them go to the trainer, which skips the step. Their `dropped`
  is empty; the step has the reason in `skipped_reason`.
- The lines of a step are appended while the trainer works on it. A run that was stopped may have lines of a step that
  was not trained; a recovery removes them, and those after its checkpoint.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final

import numpy as np
from pydantic import Field, TypeAdapter

from fourfold import metrics as m
from fourfold.arrays import Float32Array
from fourfold.config.schema import Config
from fourfold.config.sources import EvalSet
from fourfold.errors import PeerFault
from fourfold.rollout.client import Completion
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.sample import Sample
from fourfold.sample.record import TrajectoryRecord
from fourfold.sample.sampled import sample_columns

from ..data.prompts import Prompt
from .ledger import FILTERED, NOT_SELECTED
from .typed_json import Finite, Whole, parse

SAMPLES_FILE: Final = "samples.jsonl"
_FINISHED: Final = frozenset({rollout.FINISH_REASON_STOP, rollout.FINISH_REASON_LENGTH})
_UNFINISHED: Final = frozenset({rollout.FINISH_REASON_UNSPECIFIED, rollout.FINISH_REASON_ABORTED})
_KNOWN: Final = _FINISHED | _UNFINISHED
# Some readers of text files, such as str.splitlines, end a line at these characters, too: U+0085, U+2028, U+2029.
_LINE_SEPARATORS: Final = ((b"\xc2\x85", rb"\u0085"), (b"\xe2\x80\xa8", rb"\u2028"), (b"\xe2\x80\xa9", rb"\u2029"))
_JSON: Final = json.JSONEncoder(ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory(TrajectoryRecord):
    """A trajectory with the texts that users and scorers read. All its segments are trained on, or none."""

    prompt: Prompt
    completion: str  # without special tokens
    dropped: str = ""  # reason why it is not trained on; empty if it is
    first_prompt: str = ""  # of an agent, without special tokens; empty: the prompt of the task
    components: Mapping[str, float] = field(default_factory=dict)  # parts of the scores, as SCORER/NAME
    agent_rewards: Float32Array | None = None
    """Token rewards as the agent sent them, before those of scorers were added; None: none were added."""
    last_turn: str | None = None  # text of the last sampled turn, for scorers; None: the completion

    @property
    def prompt_text(self) -> str:
        """Return what the model read before its first sampled token."""
        return self.first_prompt or self.prompt.text

    @property
    def sample(self) -> Sample:
        """Return segment 0, which has the score and the ids of all."""
        return self.segments[0]

    @property
    def token_count(self) -> int:
        """Number of sampled tokens, over all segments."""
        return sum(int(np.count_nonzero(segment.action_mask)) for segment in self.segments)

    @property
    def truncated(self) -> bool:
        """Whether a limit ended a segment, as the trainer counts it."""
        return any(segment.truncated for segment in self.segments)

    @property
    def reward(self) -> float:
        """Score and rewards of single turns together, which samples of a group are compared by; it has a score."""
        assert self.sample.score is not None
        return self.sample.score + sum(float(s.token_rewards.sum(dtype=np.float64)) for s in self.segments)

    def map_segments(self, change: Callable[[Sample], Sample]) -> Trajectory:
        """Return a copy whose segments are changed."""
        return replace(self, segments=tuple(map(change, self.segments)))

    def with_values(self, **values: Any) -> Trajectory:
        """Return a copy with other values of some fields of `Sample`, the same for each segment."""
        return self.map_segments(lambda segment: replace(segment, **values))

    def with_reference(self, logprobs: Sequence[Float32Array]) -> Trajectory:
        """Return a copy with reference log-probabilities, float32 [n] for each segment, unless it is dropped."""
        if self.dropped:
            return self
        rows = iter(logprobs)
        return self.map_segments(lambda segment: replace(segment, reference_logprobs=next(rows)))

    def with_drop_reason(self, reason: str, *, abstained: bool = False) -> Trajectory:
        """Return a copy that is dropped; a trajectory that was dropped before keeps its first reason."""
        return self if self.dropped else replace(self, dropped=reason, abstained=abstained)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleGroup:
    """The trajectories of one prompt, in order of their index, dropped ones included."""

    position: int  # of the prompt in the endless order
    seed: int  # of the request
    revision: int = 0  # of the scorers that scored it (`rewards/scorers.py`)
    trajectories: tuple[Trajectory, ...]
    baseline: Trajectory | None = None  # the greedy completion of the prompt, dropped
    replaced: str = FILTERED  # drop reason of the samples if another group takes the place of this one

    @property
    def scored(self) -> list[Trajectory]:
        """Return the trajectories that were compared: those that are trained on, and those that were not selected."""
        return [t for t in self.trajectories if t.dropped in ("", NOT_SELECTED)]

    @property
    def rewards(self) -> list[float]:
        """Return `reward` of the trajectories that were compared."""
        return [t.reward for t in self.scored]

    @property
    def samples(self) -> list[Sample]:
        """Return the samples to train on: segment 0 of each trajectory."""
        return [t.sample for t in self.trajectories if not t.dropped]

    @property
    def segments(self) -> list[Sample]:
        """Return all segments to train on; those of one trajectory follow each other."""
        return [segment for t in self.trajectories if not t.dropped for segment in t.segments]

    def all_trajectories(self) -> list[Trajectory]:
        """Return the trajectories and the greedy completion."""
        return [*self.trajectories, self.baseline] if self.baseline else list(self.trajectories)


@dataclass(slots=True, kw_only=True)
class StepBatch:
    """The groups of one step, and what happened since the batch before it; times are those of `time.monotonic`."""

    groups: list[SampleGroup] = field(default_factory=list)
    rows: tuple[Sample, ...] = ()  # of data, in place of groups; the ledger knows their position, not each of them
    filtered: list[SampleGroup] = field(default_factory=list)  # scored, and not kept by filter or selection
    lost: list[Trajectory] = field(default_factory=list)  # sampled, of groups that were given up or are too old
    dropped: Counter[str] = field(default_factory=Counter)  # samples by reason
    prompts_drawn: int = 0
    groups_lost: int = 0
    groups_kept: int = 0  # by the filter, for this batch or for a later one
    groups_accepted: int = 0  # of `groups`, kept by the filter; 0 when it has filtered ones because none was kept
    measured: dict[str, float] = field(default_factory=dict)  # metrics of engines and of the queue
    began: float = field(default_factory=time.monotonic)  # start of the wait for the batch
    rolled: float = 0.0  # last completion of the batch
    scored: float = 0.0  # last score
    done: float = 0.0

    def sample_ids(self) -> list[str]:
        """Return the ids of the samples of groups, in the order of `experiences`, each once."""
        return [sample.sample_id for group in self.groups for sample in group.samples]

    def experiences(self, on_end: Callable[[], None] = lambda: None) -> Iterator[Sample]:
        """Yield the segments for the trainer, in a fixed order, then call `on_end`; its client encodes one by one."""
        yield from itertools.chain(self.rows, (segment for group in self.groups for segment in group.segments))
        on_end()

    def trajectories(self) -> list[Trajectory]:
        """Return all trajectories that were sampled, dropped ones included."""
        kept = [t for group in self.groups for t in group.all_trajectories()]
        filtered = [t.with_drop_reason(group.replaced) for group in self.filtered for t in group.all_trajectories()]
        return kept + filtered + self.lost

    def generated(self) -> list[SampleGroup]:
        """Return all groups that were scored, kept or filtered out, in order."""
        return sorted([*self.groups, *self.filtered], key=lambda group: group.position)

    def times(self) -> dict[str, float]:
        """Return the seconds for which the trainer waited for each part, without overlap."""
        if self.rows:
            return {m.TIME_ROWS: self.done - self.began}
        rolled = max(self.rolled, self.began)
        scored = max(self.scored, rolled)
        return {
            m.TIME_GENERATE: rolled - self.began,
            m.TIME_REWARD: scored - rolled,
            m.TIME_REFERENCE: max(self.done - scored, 0.0),
        }


def build_sample(
    prompt: Prompt, completion: Completion, *, sample_id: str, group_id: str, temperature: float
) -> Sample:
    """Return the sample of a prompt and its completion; all its arrays are [prompt tokens + completion tokens]."""
    return Sample(
        sample_id=sample_id,
        group_id=group_id,
        temperature=temperature,
        truncated=completion.finish_reason == rollout.FINISH_REASON_LENGTH,
        **sample_columns([(prompt.token_ids, completion)]),
    )


def check_completions(
    completions: Sequence[Completion], *, peer: str, vocabulary_size: int, newest_version: int
) -> None:
    """Raise PeerFault for completions, finished or not, that cannot be trained on: another replica samples them.

    The client has checked everything that needs no knowledge of the run. `newest_version` is the highest policy version
    that an engine may have received.
    """
    for completion in completions:
        if completion.finish_reason not in _KNOWN:
            raise PeerFault(peer, "BAD_SAMPLE", f"unknown finish_reason {completion.finish_reason}")
        if not len(completion.token_ids):
            if completion.finish_reason in _UNFINISHED:
                continue
            raise PeerFault(peer, "BAD_SAMPLE", "a sample without tokens")
        # A negative id is a large unsigned one. `reduce` takes half of the time of `max`, for short arrays.
        if int(np.maximum.reduce(completion.token_ids.view(np.uint32))) >= vocabulary_size:
            raise PeerFault(peer, "BAD_SAMPLE", f"sampled ids outside the vocabulary [0, {vocabulary_size})")
        # Not always the last one: a sample may continue on an engine with older weights.
        if (version := max(span.policy_version for span in completion.version_spans)) > newest_version:
            raise PeerFault(
                peer, "BAD_VERSION", f"tokens of policy_version {version}; {newest_version} is the newest that was sent"
            )


def sampling_params(
    config: Config, prompt: Prompt, seed: int, *, held_out: EvalSet | None = None
) -> rollout.SamplingParams:
    """Return the sampling parameters of one prompt, those of a held-out set or of training.

    The completion must fit into the context.
    """
    room, rule = config.model.max_context_tokens - len(prompt.token_ids), held_out or config.sampling
    return rollout.SamplingParams(
        temperature=rule.temperature,
        max_tokens=min(rule.max_new_tokens, room),
        stop_token_ids=config.sampling.stop_token_ids,
        seed=seed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLine:
    """A line of samples.jsonl; the module's docstring explains the keys."""

    step: Whole
    sample_id: str
    group_id: str
    prompt: str
    completion: str
    answer: str
    prompt_tokens: Whole
    completion_tokens: Whole
    logprob_mean: Finite | None
    version_spans: list[tuple[Whole, Annotated[int, Field(ge=0, le=2**31)]]]
    truncated: bool
    score: Finite | None
    scorer: str
    terms: dict[str, tuple[Finite | None, Finite, str]]
    dropped: str
    source: str = ""  # earlier releases had none


_LINE: Final = TypeAdapter(SampleLine)


def to_lines(step: int, trajectories: Iterable[Trajectory]) -> bytearray:
    """Return the lines of samples.jsonl for one step. Slow for a large batch: call it in a thread."""
    lines = bytearray()
    for trajectory in trajectories:
        # The encoder of `json` takes 10 times as long for a long text as `_quoted`. It escapes the quotes in texts, so
        # that no text has the mark.
        before, mark, after = _line(step, trajectory).encode().partition(b', "completion": "')
        lines += b"%b%b%b%b\n" % (before, mark[:-1], _quoted(trajectory.completion), after[1:])
    for separator, escape in _LINE_SEPARATORS:
        lines = lines.replace(separator, escape)
    return lines


def parse_line(line: bytes) -> SampleLine:
    """Return a line of samples.jsonl; raise ValueError for a text that is none."""
    return parse(_LINE, line)


def _quoted(text: str) -> bytes:
    """Return a text as JSON."""
    data = text.encode()
    if np.count_nonzero(np.frombuffer(data, np.uint8) < 0x20) > data.count(b"\n"):  # other control characters
        return json.dumps(text, ensure_ascii=False).encode()
    return b'"%b"' % data.replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n")


def prompt_length(sample: Sample) -> int:
    """Return the number of tokens before the first sampled one, of which there is at least one."""
    return int(sample.action_mask.argmax())


def last_turn(sample: Sample) -> slice:
    """Return the place of the last span of sampled tokens."""
    mask = sample.action_mask
    end = len(mask) - int(np.argmax(mask[::-1]))
    observed = np.flatnonzero(~mask[:end])
    return slice(int(observed[-1]) + 1 if len(observed) else 0, end)


def _line(step: int, trajectory: Trajectory) -> str:
    """Return the line of a trajectory with an empty completion."""
    sample = trajectory.sample
    parts = [segment.behavior_logprobs[segment.action_mask] for segment in trajectory.segments]
    logprobs = parts[0] if len(parts) == 1 else np.concatenate(parts)
    values = {
        "step": step,
        "sample_id": sample.sample_id,
        "group_id": sample.group_id,
        "prompt": trajectory.prompt_text,
        "completion": "",
        "answer": trajectory.prompt.answer,
        "prompt_tokens": prompt_length(sample),
        "completion_tokens": len(logprobs),
        "logprob_mean": round(float(np.add.reduce(logprobs, dtype=np.float64) / len(logprobs)), 6),
        "version_spans": [
            [s.policy_version, s.token_count] for part in trajectory.segments for s in part.version_spans
        ],
        "truncated": trajectory.truncated,
        "score": sample.score,
        "scorer": sample.scorer,
        "terms": {t.name: [t.score, t.weight, t.scorer] for t in sample.terms},
        "dropped": trajectory.dropped,
        "source": trajectory.prompt.source,
    }
    return _JSON.encode(values)
