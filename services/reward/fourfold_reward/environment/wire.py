"""Converts the values of environments to JSON and back, for the pipe between the service and a worker process.

A user's program runs in the worker and can write anything into the pipe. The service checks every field of what it
reads: types, sizes, finite numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, Final

from fourfold.text import is_metric_name
from fourfold_reward.environment.protocol import Action, Done, Message, Observation, RawText, Task, TokenIds, ToolCall

MAX_FRAME_BYTES: Final = 8 << 20
MAX_CHARACTERS: Final = 1 << 18
"""Characters of one observation."""
MAX_MESSAGES: Final = 256
MAX_METRICS: Final = 32
_MAX_TOKEN_IDS: Final = 1 << 20
_MAX_REWARD: Final = 3.4028234663852886e38  # the largest float32


def message_from(data: object) -> Message:
    """Check and convert one message; raise ValueError."""
    if not isinstance(data, Mapping):
        raise ValueError(f"a message is a {type(data).__name__}; it must be a Message")
    known = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning"}
    if unknown := sorted(set(map(str, data)) - known):
        raise ValueError(f"a message has the field {unknown[0]!r:.100}; known: {', '.join(sorted(known))}")
    texts = {key: data.get(key, "") or "" for key in known - {"tool_calls"}}
    for key, value in texts.items():
        if not isinstance(value, str):
            raise ValueError(f"{key} of a message is a {type(value).__name__}; it must be text")
    if not texts["role"]:
        raise ValueError('a message has no role; give "system", "user", "assistant" or "tool"')
    calls = tuple(
        ToolCall(str(c["id"]), str(c["name"]), str(c["arguments_json"])) for c in data.get("tool_calls") or ()
    )
    return Message(tool_calls=calls, **texts)


def observation_to(observation: Observation) -> dict[str, Any]:
    """Convert an observation; raise ValueError if it is malformed or too large."""
    match observation.content:
        case str(text):
            result: dict[str, Any] = {"messages": [asdict(Message("user", text))]}
        case RawText(text):
            result = {"raw": text}
        case TokenIds(ids):
            result = {"ids": [int(i) for i in ids]}
        case Sequence() as messages:
            rows = [asdict(m) if isinstance(m, Message) else m for m in messages]
            result = {"messages": [asdict(message_from(row)) for row in rows]}
        case other:
            raise ValueError(f"an observation holds a {type(other).__name__}; it must be text or messages")
    observation_from(result)  # its limits, with an error that names the user's line
    return result


def observation_from(data: Mapping[str, Any]) -> Observation:
    """Check and convert an observation of a worker; raise ValueError."""
    if "raw" in data:
        text = data["raw"]
        if not isinstance(text, str):
            raise ValueError(f"raw text is a {type(text).__name__}")
        _check_size(len(text))
        return Observation(RawText(text))
    if "ids" in data:
        ids = data["ids"]
        if not isinstance(ids, list) or not 0 < len(ids) <= _MAX_TOKEN_IDS:
            raise ValueError(f"token ids must be a list of 1 to {_MAX_TOKEN_IDS}")
        if not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
            raise ValueError("a token id is not an integer in [0, 2^31)")
        return Observation(TokenIds(tuple(ids)))
    rows = data.get("messages")
    if not isinstance(rows, list) or not 0 < len(rows) <= MAX_MESSAGES:
        count = len(rows) if isinstance(rows, list) else "no"
        raise ValueError(f"an observation has {count} messages; it must have 1 to {MAX_MESSAGES}")
    messages = tuple(map(message_from, rows))
    _check_size(
        sum(len(m.content) + len(m.reasoning) + sum(len(c.arguments_json) for c in m.tool_calls) for m in messages)
    )
    return Observation(messages)


def _check_size(characters: int) -> None:
    if characters > MAX_CHARACTERS:
        raise ValueError(f"an observation has {characters} characters; at most {MAX_CHARACTERS} are allowed")


def done_to(done: Done) -> dict[str, Any]:
    """Convert the end of an episode; raise ValueError if a number is not finite."""
    return {
        "reward": None if done.reward is None else _reward(done.reward, "the reward"),
        "turn_rewards": {str(int(k)): _reward(v, f"the reward of turn {k}") for k, v in done.turn_rewards.items()},
        "metrics": {str(k): number(v, f"metric {k!r:.100}") for k, v in done.metrics.items()},
        "truncated": bool(done.truncated),
    }


def done_from(data: Mapping[str, Any]) -> Done:
    """Check and convert the end of an episode of a worker; raise ValueError."""
    reward, turns, metrics = data.get("reward"), data.get("turn_rewards") or {}, data.get("metrics") or {}
    if not isinstance(turns, Mapping) or not isinstance(metrics, Mapping):
        raise ValueError("turn_rewards and metrics must be mappings")
    if len(metrics) > MAX_METRICS:
        raise ValueError(f"{len(metrics)} metrics; at most {MAX_METRICS} are allowed")
    for name in metrics:
        if not is_metric_name(str(name)):
            raise ValueError(f"metric name {name!r:.100}: it must be 1 to 64 letters, digits, spaces and ._:/@+-")
    if not all(str(turn).isdecimal() and len(str(turn)) < 10 for turn in turns):
        raise ValueError("turn_rewards: a key is not the index of a turn")
    return Done(
        None if reward is None else _reward(reward, "the reward"),
        {int(turn): _reward(value, f"the reward of turn {turn}") for turn, value in turns.items()},
        {str(name): number(value, f"metric {name!r}") for name, value in metrics.items()},
        data.get("truncated") is True,
    )


def number(value: object, what: str) -> float:
    """Return a finite number; raise ValueError. numpy and torch scalars have `__float__`."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise ValueError(f"{what} is {value!r:.100} ({type(value).__name__}); it must be a number")
    try:
        result = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # an array or tensor with more than one element
        raise ValueError(f"{what} is a {type(value).__name__} that is not one number") from None
    if not math.isfinite(result):
        raise ValueError(f"{what} is {result}; it must be finite")
    return result


def _reward(value: object, what: str) -> float:
    result = number(value, what)
    if abs(result) > _MAX_REWARD:
        raise ValueError(f"{what} is {result}; it must be finite in 32 bits")
    return result


def task_to(task: Task) -> dict[str, Any]:
    """Convert a task for the worker."""
    # `asdict` would copy the metadata, with a recursion that ends at a third of the depth that JSON may have.
    values = {field.name: getattr(task, field.name) for field in fields(task)}
    return {**values, "messages": [asdict(message) for message in task.messages]}


def task_from(data: Mapping[str, Any]) -> Task:
    """Convert a task of the service."""
    return Task(**{**data, "messages": tuple(map(message_from, data["messages"]))})


def action_to(action: Action) -> dict[str, Any]:
    """Convert a turn for the worker."""
    return asdict(action)


def action_from(data: Mapping[str, Any]) -> Action:
    """Convert a turn of the service."""
    return Action(**{**data, "message": message_from(data["message"]), "token_ids": tuple(data["token_ids"])})
