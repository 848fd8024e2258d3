"""Defines the messages between the reward service and its workers, as frames, and scoring outcomes.

    service -> worker    {"load": verifier, "options": ...}              one reply
                         {"first": N, "sizes": ...}                      a batch, then its texts; one reply per sample
                         {"drop": N}                                     ends the batch that began with sample N
    worker -> service    {"n": N, "score": 1.0}                          outcome of sample N, or its other fields
                         {"n": N, "dropped": true}                       N and later samples are not scored

Samples are numbered through the life of a worker, from a random number on. A reply is written before the next sample
begins, so the service knows which sample runs. Texts follow the frame of a batch as they are: as JSON they would cost
twice the rest.

Reward functions run in the worker and can write any bytes into its pipe. The service therefore checks the number of
each reply, and every field of an outcome.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, BinaryIO, Final, NamedTuple

from fourfold.reward.function import Abstain, Score
from fourfold.text import MAX_COMPONENTS, MAX_ERROR, clean, is_metric_name
from fourfold.workers import frames
from fourfold_reward.job import Job
from fourfold_reward.scores import MAX_FLOAT32, components_of

MAX_REPLY_BYTES: Final = 4 << 20  # an outcome has a few KiB, but may have a reward for each of 128k tokens
MAX_TOKEN_REWARDS: Final = 1 << 17  # so that they fit the frame
NO_SCORE: Final = "NO_SCORE"  # abstain reason of a function that returned None
# Error reason -> name of its google.rpc.Code. Callers retry UNAVAILABLE and DEADLINE_EXCEEDED.
ERROR_CODES: Final[dict[str, str]] = {
    "TIMEOUT": "DEADLINE_EXCEEDED",
    "WORKER_DIED": "UNAVAILABLE",
    "RAISED": "UNKNOWN",
    "NOT_FINITE": "OUT_OF_RANGE",
    "NOT_A_NUMBER": "INVALID_ARGUMENT",
    "NOT_FOUND": "NOT_FOUND",
    "BAD_METADATA": "INVALID_ARGUMENT",
    "BAD_TOKEN_REWARDS": "INVALID_ARGUMENT",
    # Of reward models.
    "TOO_LONG": "INVALID_ARGUMENT",
    "BAD_TEXT": "INVALID_ARGUMENT",
    "OUT_OF_MEMORY": "RESOURCE_EXHAUSTED",
    # Of scorers that ask another program or server.
    "BAD_RESPONSE": "INTERNAL",
    "BAD_VERDICT": "INTERNAL",
    "UNREACHABLE": "UNAVAILABLE",
    "OVERLOADED": "UNAVAILABLE",
    "REFUSED": "UNAVAILABLE",
}

_RESULT_KEYS: Final = frozenset({"score", "components", "token_rewards", "turn_rewards"})


class SampleFields(NamedTuple):
    """The fields of one sample for a worker."""

    sample_id: str
    prompt: str
    completion: str
    answer: str
    metadata_json: str
    messages_json: str
    completion_ids: Sequence[int]


def pack_batch(first: int, jobs: Sequence[Job]) -> bytes:
    """Return the request to score `jobs`, which have the numbers from `first` on."""
    sizes, texts = [], []
    for job in jobs:
        parts = [
            # Unpaired surrogates, as in `frames.pack`.
            job.sample_id.encode(errors="replace"),
            job.prompt.encode(errors="replace"),
            job.completion.encode(errors="replace"),
            job.answer.encode(errors="replace"),
            job.metadata_json.encode(errors="replace"),
            job.messages_json.encode(errors="replace"),
            array("i", job.completion_ids).tobytes() if job.completion_ids else b"",
        ]
        sizes.append([len(part) for part in parts])
        texts += parts
    return frames.pack({"first": first, "sizes": sizes}) + b"".join(texts)


def read_batch(stream: BinaryIO, sizes: Sequence[Sequence[int]]) -> Iterator[SampleFields]:
    """Read the texts behind the frame of a batch at once, and return an iterator that decodes one sample at a time."""
    texts = stream.read(sum(map(sum, sizes)))

    def decode() -> Iterator[SampleFields]:
        at = 0
        for row in sizes:
            parts = []
            for size in row:
                parts.append(texts[at : at + size])
                at += size
            name, prompt, completion, answer, metadata, messages, ids = parts
            yield SampleFields(
                name.decode(),
                prompt.decode(),
                completion.decode(),
                answer.decode(),
                metadata.decode(),
                messages.decode(),
                list(array("i", ids)) if ids else (),
            )

    return decode()


def pack_outcome(number: int, outcome: Outcome) -> bytes:
    """Return the reply for one sample as a frame."""
    data = outcome.to_json()
    if len(data) > 1 or outcome.score is None:
        return frames.pack({"n": number, **data})
    body = b'{"n":%d,"score":%r}' % (number, outcome.score)  # nearly all outcomes; `json` takes three times as long
    return frames.HEADER.pack(len(body)) + body


@dataclass(slots=True, kw_only=True)  # a frozen one would take three times as long to make
class Outcome:
    """Result of scoring one sample; do not change it. Exactly one of score, abstain_reason and error_reason is set."""

    score: float | None = None
    abstain_reason: str = ""
    error_reason: str = ""  # a key of ERROR_CODES
    error_code: str = ""  # name of a google.rpc.Code
    message: str = ""  # of the error, at most MAX_ERROR characters
    components: Mapping[str, float] = field(default_factory=dict)
    token_rewards: Sequence[float] = ()  # of the sampled tokens, beside the score; empty: none
    turn_rewards: Sequence[float] = ()  # of the turns, beside the score; empty: none
    cost_usd: float = 0.0  # price of this outcome; 0: free, or not known

    @classmethod
    def error(cls, reason: str, message: str, *, code: str = "") -> Outcome:
        """Return an error. The message is cut to its limit; the default code is that of the reason."""
        message = clean(message, MAX_ERROR)
        return cls(error_reason=reason, error_code=code or ERROR_CODES[reason], message=message)

    def to_json(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        return {name: value for name in _FIELDS if (value := getattr(self, name)) or name == "score"}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outcome:
        """Check and convert the reply of a worker, which has the outcome's fields as JSON.

        Raises ValueError: a field is invalid, or the reply has neither score, abstention nor error.
        """
        if reason := str(data.get("error_reason", "")):
            code = str(data.get("error_code", ""))
            if reason not in ERROR_CODES or code not in ERROR_CODES.values():
                raise ValueError(f"unknown error reason {reason!r:.100} or code {code!r:.100}")
            return cls.error(reason, str(data.get("message", "")), code=code)
        if abstained := str(data.get("abstain_reason", "")):
            return cls(abstain_reason=Abstain(abstained).reason)
        if data.get("score") is None:
            raise ValueError("the outcome has neither a score, nor an abstention, nor an error")
        rewards = (data.get(name, ()) for name in ("token_rewards", "turn_rewards"))
        return _scored(data["score"], data.get("components", {}), *rewards)


_FIELDS: Final = tuple(each.name for each in fields(Outcome))


def outcome_of(result: object) -> Outcome:
    """Convert the return value of a reward function (see `Result` in fourfold/reward/function.py).

    The other numbers of a dictionary become components, as those of verl; its texts and other values are left out.

    Raises ValueError: too many components, or an invalid component name.
    """
    match result:
        case float():
            return _scored(result, {})
        case None:
            return Outcome(abstain_reason=NO_SCORE)
        case Abstain(reason):
            return Outcome(abstain_reason=reason)
        case Score():
            return _scored(result.score, result.components, result.token_rewards, result.turn_rewards)
        case Mapping():
            if "score" not in result:
                keys = ", ".join(map(repr, list(result)[:5]))
                raise ValueError(
                    f"a returned dictionary needs the key 'score', and it has {keys or 'none'}; return None to abstain"
                )
            if result["score"] is None:
                return Outcome(abstain_reason=NO_SCORE)
            components = result.get("components") or {}
            if isinstance(components, Mapping):
                others = {name: value for name, value in result.items() if name not in _RESULT_KEYS}
                components = {**components_of(others, MAX_COMPONENTS - len(components)), **components}
            return _scored(
                result["score"],
                components,
                result.get("token_rewards", ()),
                result.get("turn_rewards", ()),
            )
    return _scored(result, {})


def _scored(value: object, components: object, token_rewards: object = (), turn_rewards: object = ()) -> Outcome:
    score = _float32(value, "the score")
    if isinstance(score, Outcome):
        return score
    if not isinstance(components, Mapping) or len(components) > MAX_COMPONENTS:
        raise ValueError(f"components: {_show(components)}; at most {MAX_COMPONENTS} numbers by name")
    numbers: dict[str, float] = {}
    for name, raw in components.items():
        if not isinstance(name, str) or not is_metric_name(name):
            raise ValueError(f"component name {_show(name)}: it must be 1 to 64 letters, digits, spaces and ._:/@+-")
        number = _float32(raw, f"component {name!r}")
        if isinstance(number, Outcome):
            return number
        numbers[name] = number
    tokens, turns = _float32s(token_rewards, "token_rewards"), _float32s(turn_rewards, "turn_rewards")
    if isinstance(tokens, Outcome):
        return tokens
    if isinstance(turns, Outcome):
        return turns
    return Outcome(score=score, components=numbers, token_rewards=tokens, turn_rewards=turns)


def _float32s(values: object, what: str) -> tuple[float, ...] | Outcome:
    """Return a sequence, array or tensor of numbers that float32 can represent, or else an error."""
    if type(values) is tuple and not values:  # nearly always
        return ()
    if hasattr(values, "tolist"):  # much faster than one number of a tensor after the other
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str | bytes | bytearray):
        raise ValueError(f"{what}: {_show(values)}; it must be a sequence of numbers")
    if len(values) > MAX_TOKEN_REWARDS:
        raise ValueError(f"{what} has {len(values)} numbers; it may have {MAX_TOKEN_REWARDS}")
    numbers: list[float] = []
    for index, raw in enumerate(values):
        number = _float32(raw, f"{what}[{index}]")
        if isinstance(number, Outcome):
            return number
        numbers.append(number)
    return tuple(numbers)


def _float32(value: object, what: str) -> float | Outcome:
    """Return a number that float32 can represent (the wire format), or else an error about `what`."""
    if type(value) is float and abs(value) <= MAX_FLOAT32:  # nearly always
        return value
    try:
        # float("1") works, too, but a returned "1" is a mistake. numpy and torch scalars have `__float__`.
        if isinstance(value, str | bytes | bytearray) or not hasattr(value, "__float__"):
            raise TypeError
        number = float(value)
        struct.pack("<f", number)
    except OverflowError:  # an integer beyond float64, or a float beyond float32
        number = math.inf
    except (TypeError, ValueError, RuntimeError):  # also an array or tensor with more than one element
        return Outcome.error("NOT_A_NUMBER", f"{what} is {_show(value)}; it must be a number")
    if not math.isfinite(number):
        return Outcome.error("NOT_FINITE", f"{what} is {_show(value)}; it must be finite in 32 bits")
    return number


def _show(value: object) -> str:
    try:
        text = repr(value)[:200]
    except RecursionError:  # lists in lists, just below the limit of the JSON parser
        text = "a deeply nested value"
    except Exception as error:
        text = f"a value whose __repr__ raised {type(error).__name__}"
    return f"{text} ({type(value).__name__})"
