"""Defines the interface of environments, which users implement, and its values.

    class Guess:
        def reset(self, task: Task) -> Observation:
            self.secret = int(task.answer)
            return Observation("Guess my number. It is between 1 and 10.")

        def step(self, action: Action) -> Observation | Done:
            if str(self.secret) in action.text:
                return Done(1.0)
            return Observation("No. Guess again.")

The service makes one object for each episode, so that an object may keep its state in attributes. `reset` and `step`
may be `async def`; otherwise each call runs in a thread. The service calls the model with the conversation so far,
keeps the token ids of each turn, and hands the episode in with the reward.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function by the model."""

    id: str
    name: str
    arguments_json: str
    """As the model wrote it; usually a JSON object."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str
    """"system", "user", "assistant" or "tool"."""
    content: str = ""
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """Of a message with the role "tool": the call that it answers."""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class RawText:
    """Text that follows the tokens so far, without the chat template.

    An episode is either a conversation or raw text: all its observations have the same kind.
    """

    text: str


@dataclass(frozen=True, slots=True)
class TokenIds:
    """The whole prompt of the next turn as token ids; for programs that keep the tokens themselves."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One attempt at one problem of the run."""

    task_id: str
    group_id: str
    """Attempts at the same problem share it. Their rewards are compared with each other."""
    sample_index: int = 0
    """Index of the attempt in [0, group_size)."""
    group_size: int = 1
    messages: tuple[Message, ...] = ()
    """The problem as a conversation; empty if the data has plain text."""
    text: str = ""
    """The problem as plain text; empty if it has messages."""
    answer: str = ""
    """Reference answer; empty: there is none. An answer that is no text in the data is written as JSON."""
    answer_value: Any = None
    """Reference answer as the data has it: a text, number, bool, list or dictionary; None: there is none."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the problem in the data."""
    evaluation: bool = False
    """The attempt is scored and not trained on."""
    seed: int = 0
    """Seed for an environment with randomness, in [0, 2^53). Attempts of one group have different seeds."""

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The problem as messages; plain text becomes one message of the user."""
        return self.messages or (Message("user", self.text),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One turn of the model."""

    text: str
    """The text of the model, without special tokens, reasoning and tool calls."""
    message: Message
    """The same as a message, with reasoning and tool calls."""
    turn: int = 0
    """Number of turns before this one."""
    truncated: bool = False
    """The turn ended at its limit of tokens."""
    token_ids: tuple[int, ...] = ()
    """The sampled tokens. Empty unless the last observation was `TokenIds`."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The next input of the model."""

    content: str | Sequence[Message] | RawText | TokenIds
    """A text is one message of the user; the first one follows the system prompt of the task. Messages and raw text are
    added to those before."""


@dataclass(frozen=True, slots=True)
class Done:
    """The end of an episode."""

    reward: float | None
    """Reward of the episode, finite. None: the run's reward service scores the last answer (agents.reward =
    "service")."""
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    """Rewards of single turns besides `reward`, by the index of the turn."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers to report with the training step, at most 32."""
    truncated: bool = False
    """A limit ended the episode, not the task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """OpenAI-compatible HTTP address of one session."""

    base_url: str
    """For example "http://127.0.0.1:8000/sessions/ID/v1"."""
    api_key: str = field(repr=False)
    model: str


class Environment(Protocol):
    """An environment; a class whose constructor takes the recipe's `environment.options` as keyword arguments.

    Two methods are optional:

    - `truncate() -> Done | None` is called instead of `step` when a limit ends the episode (turns, context length,
      time). Return the reward so far. Without the method, or with None, the episode is not trained on.
    - `close() -> None` is called once at the end of every episode whose process still runs.
    """

    def reset(self, task: Task) -> Observation | Awaitable[Observation]:
        """Begin an episode and return the first prompt."""

    def step(self, action: Action) -> Observation | Done | Awaitable[Observation | Done]:
        """Take the model's turn; return the next observation, or the end of the episode."""


class Agent(Protocol):
    """A program that calls the model itself, over HTTP; it has `run` instead of `reset` and `step`.

    `truncate` and `close` are optional, as for `Environment`. It needs `environment.network = true`.
    """

    def run(self, task: Task, endpoint: Endpoint) -> Done | Awaitable[Done]:
        """Attempt the task and return the end of the episode."""
