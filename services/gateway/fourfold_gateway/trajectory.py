"""Keeps the sampled tokens of one session as segments; never encodes them again from text.

    prompt begins with all tokens of a segment --> the rest of it is an observation; the turn extends the segment
    any other prompt                           --> the turn opens a segment; the whole prompt is its context

Only sampled tokens are in the action mask of a segment, so that a token is trained once. A token that a new segment
repeats from an earlier one belongs to the prompt of the new segment. Turns of one session may overlap. The first one
that finishes extends the segment that their prompts continue, and each of the others opens a segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.arrays import EMPTY_FLOATS, Int32Array
from fourfold.bounds import MAX_FLOAT32
from fourfold.errors import InvalidInput, WrongState
from fourfold.sample import Sample
from fourfold.sample.sampled import SampledTokens, sample_columns
from fourfold.sample.wire import encode
from fourfold.types.v1 import experience_pb2

CONTEXT_LENGTH: Final = "CONTEXT_LENGTH"
TOO_MANY_SEGMENTS: Final = "TOO_MANY_SEGMENTS"
TOO_LARGE: Final = "TRAJECTORY_TOO_LARGE"
# Most tokens of all segments: a token takes 9 bytes, and the run refuses trajectories above 8 MiB.
_MAX_TOKENS: Final = 900_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one trajectory."""

    max_segments: int
    """`agents.max_segments`."""
    max_context_tokens: int
    """Longest segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The distribution that tokens were drawn from. All tokens of a segment have the same one."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0  # 0: all


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """A finished turn, and the tokens that it adds to its segment."""

    number: int
    """Number in the order of `begin_turn`, with gaps for cancelled turns. `SessionTokens.turns` has this order."""
    segment_index: int
    prompt_token_count: int
    """Tokens of the segment before the completion."""
    observation: Int32Array  # [m]: the prompt, without the tokens that the segment had before
    completion: SampledTokens
    sampling: Sampling
    finish_reason: pb.FinishReason.ValueType
    request_id: str = ""
    request_sha256: bytes = b""
    """Digest of the request, which identifies a repeated request; may be empty."""
    sample_index: int = 0

    @property
    def end(self) -> int:
        """Number of tokens of the segment up to the end of the completion."""
        return self.prompt_token_count + self.completion.token_ids.size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PendingTurn:
    """A turn that is being sampled."""

    number: int
    prompt_ids: Int32Array  # [p], read-only
    sampling: Sampling


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """Consecutive turns, at least one, each of which continues the one before exactly."""

    turns: tuple[Turn, ...]
    token_ids: Int32Array  # [n], of all turns

    @property
    def sampling(self) -> Sampling:
        return self.turns[0].sampling

    def columns(self) -> dict[str, Any]:
        """Return the token columns and version spans of the segment as a `Sample`."""
        return sample_columns([(turn.observation, turn.completion) for turn in self.turns])


class SessionTokens:
    """The segments and turns of one session. Not thread-safe."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._segments: list[Segment] = []
        self._turns: dict[int, Turn] = {}  # by number
        # By pending turn: the segment that it probably extends; None: it probably opens one. The values are only for
        # the limit of segments.
        self._claims: dict[int, int | None] = {}
        self._next_number = 0

    @staticmethod
    def restore(limits: Limits, turns: Iterable[Turn]) -> SessionTokens:
        """Return the trajectory with these turns, given in the order in which they finished."""
        trajectory = SessionTokens(limits)
        for turn in turns:
            trajectory._add(turn)
        return trajectory

    @property
    def segments(self) -> Sequence[Segment]:
        return self._segments

    @property
    def turns(self) -> list[Turn]:
        """Return the finished turns in the order in which they began; `turn_index` of the contract counts these."""
        return [self._turns[number] for number in sorted(self._turns)]

    @property
    def turn_count(self) -> int:
        return len(self._turns)

    @property
    def token_count(self) -> int:
        return sum(segment.token_ids.size for segment in self._segments)

    def begin_turn(self, prompt_ids: Sequence[int] | Int32Array, sampling: Sampling) -> PendingTurn:
        """Begin a turn, and count the segment that it may open; end it with `finish_turn` or `cancel_turn`.

        Which segment it extends is decided in `finish_turn`.

        Args:
            prompt_ids: int [p], at least one, all in the vocabulary.
            sampling: the distribution of its tokens. Only a turn with the same distribution extends a segment.

        Raises:
            InvalidInput: the prompt is empty, or leaves no room in the context.
            WrongState: the turn could open one segment too many, or the trajectory would be too large for the run.
        """
        prompt = np.array(prompt_ids, np.int32)
        prompt.flags.writeable = False
        if not prompt.size:
            raise InvalidInput("the prompt has no tokens; send at least one")
        if prompt.size >= self._limits.max_context_tokens:
            raise InvalidInput(
                f"the prompt has {prompt.size} tokens, and the context {self._limits.max_context_tokens}: no token can "
                f"be sampled; shorten the history, or close the session as truncated",
                reason=CONTEXT_LENGTH,
            )
        claim = self._continued_segment(prompt, sampling)
        if claim is not None and claim in self._claims.values():
            claim = None  # the other turn may finish first
        if claim is None:
            self._check_segment_limit()
        self._check_token_count(prompt.size if claim is None else prompt.size - self._segments[claim].token_ids.size)
        pending = PendingTurn(number=self._next_number, prompt_ids=prompt, sampling=sampling)
        self._next_number += 1
        self._claims[pending.number] = claim
        return pending

    def cancel_turn(self, pending: PendingTurn) -> None:
        """Give up the place of a turn. Does nothing for a turn that has ended."""
        self._claims.pop(pending.number, None)

    def finish_turn(
        self,
        pending: PendingTurn,
        completion: SampledTokens,
        *,
        finish_reason: pb.FinishReason.ValueType,
        request_id: str = "",
        request_sha256: bytes = b"",
        sample_index: int = 0,
    ) -> Turn:
        """Add the sampled tokens of a turn.

        Raises:
            ValueError: the completion has no tokens or too many, its arrays differ in length, or the turn has ended.
        """
        self._check_completion(pending, completion)
        index = self._continued_segment(pending.prompt_ids, pending.sampling)
        begin = 0 if index is None else self._segments[index].token_ids.size
        turn = Turn(
            number=pending.number,
            segment_index=len(self._segments) if index is None else index,
            prompt_token_count=pending.prompt_ids.size,
            observation=pending.prompt_ids[begin:].copy(),  # without the prompt, which the segment has already
            completion=completion,
            sampling=pending.sampling,
            finish_reason=finish_reason,
            request_id=request_id,
            request_sha256=request_sha256,
            sample_index=sample_index,
        )
        del self._claims[pending.number]
        for number, claim in self._claims.items():
            if claim is not None and claim == index:
                self._claims[number] = None  # the prompt of the other turn lacks the tokens of this one
        self._add(turn)
        return turn

    def snapshot(self) -> Callable[[], None]:
        """Return a function that removes the turns that finish after this call; turns in flight stay."""
        segments, turns = list(self._segments), dict(self._turns)

        def go_back() -> None:
            self._segments, self._turns = segments, turns

        return go_back

    def to_experiences(
        self,
        trajectory_id: str,
        group_id: str,
        *,
        turn_rewards: Mapping[int, float] | None = None,
        truncated: bool = False,
    ) -> list[experience_pb2.Experience]:
        """Return one experience for each segment, without scores; the same turns give the same messages.

        Segments are in the order of their last turns, so that the last turn of the trajectory ends the last segment.

        Args:
            trajectory_id: id of the task, and of segment 0; segment k > 0 is f"{trajectory_id}-seg{k}".
            group_id: of the task.
            turn_rewards: by the index of the turn in `turns`; finite.
            truncated: a budget ended the trajectory. A last turn that ended by max_tokens or the context makes it
                truncated, too.

        Raises:
            WrongState: no turn has finished.
            InvalidInput: a reward is not finite, or its turn does not exist.
        """
        turns = self.turns
        if not turns:
            raise WrongState(
                "the session has no finished turn, so that there is nothing to train on; sample a turn in it (with its "
                "session_key, or at /sessions/ID/v1), or close it with an abandon_reason"
            )
        rewards = _rewards_by_number(turn_rewards or {}, turns)
        truncated = truncated or turns[-1].finish_reason == pb.FINISH_REASON_LENGTH
        experiences = []
        for index, segment in enumerate(self._segments[place] for place in self._final_order()):
            message = encode(
                _to_sample(segment, segment_id(trajectory_id, index), group_id, rewards, truncated=truncated)
            )
            message.trajectory_id = trajectory_id
            message.segment_index, message.segment_count = index, len(self._segments)
            experiences.append(message)
        return experiences

    def final_index(self, turn: Turn) -> int:
        """Return the index of a turn's segment among the experiences of `to_experiences`."""
        return self._final_order().index(turn.segment_index)

    def _final_order(self) -> list[int]:
        """Return the indices of the segments in the order of their last turns."""
        last = [max(turn.number for turn in segment.turns) for segment in self._segments]
        return sorted(range(len(last)), key=last.__getitem__)

    def _continued_segment(self, prompt: Int32Array, sampling: Sampling) -> int | None:
        """Return the index of the longest segment that is a prefix of the prompt; None: there is none."""
        best, longest = None, 0
        for index, segment in enumerate(self._segments):
            size = segment.token_ids.size
            if (
                longest < size <= prompt.size
                and segment.sampling == sampling
                and prompt[size - 1] == segment.token_ids[-1]
                and np.array_equal(prompt[:size], segment.token_ids)
            ):
                best, longest = index, size
        return best

    def _check_segment_limit(self) -> None:
        """Raise WrongState if the segments and those that pending turns may open have reached the limit."""
        most = self._limits.max_segments
        opening = sum(claim is None for claim in self._claims.values())
        if len(self._segments) + opening >= most:
            raise WrongState(
                f"the session has {len(self._segments)} segments, its turns in flight may open {opening} more, and "
                f"this prompt continues none of them: at most {most} (agents.max_segments); send a history that begins "
                f"with that of an earlier turn unchanged, or close the session",
                reason=TOO_MANY_SEGMENTS,
            )

    def _check_token_count(self, more: int) -> None:
        if self.token_count + more > _MAX_TOKENS:
            raise WrongState(
                f"the segments of the session have {self.token_count} tokens, this prompt adds {more}, and a "
                f"trajectory has at most {_MAX_TOKENS}; close the session",
                reason=TOO_LARGE,
            )

    def _check_completion(self, pending: PendingTurn, completion: SampledTokens) -> None:
        count = completion.token_ids.size
        if pending.number not in self._claims:
            raise ValueError(f"turn {pending.number} has ended already")
        if not 0 < count <= self._limits.max_context_tokens - pending.prompt_ids.size:
            raise ValueError(
                f"{count} sampled tokens after a prompt of {pending.prompt_ids.size}; at least 1 token, at most "
                f"{self._limits.max_context_tokens} tokens in all"
            )
        spans = sum(span.token_count for span in completion.version_spans)
        if not (completion.logprobs.size == count == spans and completion.constrained.size in (0, count)):
            raise ValueError(
                f"{count} tokens with {completion.logprobs.size} log-probabilities, {spans} tokens in version spans "
                f"and {completion.constrained.size} marks of constrained tokens; the counts must be equal"
            )

    def _add(self, turn: Turn) -> None:
        turns, parts = [turn], [turn.observation, turn.completion.token_ids]
        if turn.segment_index < len(self._segments):
            segment = self._segments[turn.segment_index]
            turns, parts = [*segment.turns, turn], [segment.token_ids, *parts]
        token_ids = np.concatenate(parts, dtype=np.int32)
        if turn.segment_index > len(self._segments) or token_ids.size != turn.end:
            raise ValueError(f"turn {turn.number} does not continue segment {turn.segment_index} at its end")
        self._segments[turn.segment_index : turn.segment_index + 1] = [Segment(turns=tuple(turns), token_ids=token_ids)]
        self._turns[turn.number] = turn
        self._next_number = max(self._next_number, turn.number + 1)


def segment_id(trajectory_id: str, index: int) -> str:
    """Return the sample id of a segment."""
    return f"{trajectory_id}-seg{index}" if index else trajectory_id


def _rewards_by_number(rewards: Mapping[int, float], turns: Sequence[Turn]) -> dict[int, float]:
    for index, reward in rewards.items():
        if not 0 <= index < len(turns):
            raise InvalidInput(f"turn_rewards has turn {index}; the session has the turns 0 to {len(turns) - 1}")
        if not abs(reward) <= MAX_FLOAT32:  # also for NaN
            raise InvalidInput(f"the reward of turn {index} is {reward}; it must be a finite float32")
    return {turns[index].number: reward for index, reward in rewards.items()}


def _to_sample(
    segment: Segment, sample_id: str, group_id: str, rewards: Mapping[int, float], *, truncated: bool
) -> Sample:
    token_rewards = EMPTY_FLOATS
    if rewards:
        token_rewards = np.zeros(segment.token_ids.size, np.float32)
        for turn in segment.turns:
            token_rewards[turn.end - 1] = rewards.get(turn.number, 0.0)
    return Sample(
        sample_id=sample_id,
        group_id=group_id,
        temperature=segment.sampling.temperature,
        top_p=segment.sampling.top_p,
        top_k=segment.sampling.top_k,
        truncated=truncated,
        token_rewards=token_rewards,
        **segment.columns(),
    )
