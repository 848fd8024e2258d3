"""The normal form of a row: one side, or the two of a pair, each a conversation, a text, token ids or steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal

from fourfold.config.rows import STEP_SEPARATOR

Reads = Literal["answers", "pairs", "labels", "steps"]
"""What a loss reads: answers, pairs of them, labelled answers, labelled steps."""


class Form(StrEnum):
    """The forms of rows that are recognised; the values of the key data.form."""

    TOKENS = "tokens"
    STEPS = "steps"
    STEPS_IN_TEXT = "steps-in-text"
    PAIRS = "pairs"
    PAIRS_IN_TRANSCRIPTS = "pairs-in-transcripts"
    PAIRS_SHAREGPT = "pairs-sharegpt"
    LABELLED = "labelled"
    MESSAGES = "messages"
    GLAIVE = "glaive"
    COMPLETION = "completion"
    ALPACA = "alpaca"
    TEXT = "text"


READS: dict[Form, Reads] = {
    Form.TOKENS: "answers",
    Form.STEPS: "steps",
    Form.STEPS_IN_TEXT: "steps",
    Form.PAIRS: "pairs",
    Form.PAIRS_IN_TRANSCRIPTS: "pairs",
    Form.PAIRS_SHAREGPT: "pairs",
    Form.LABELLED: "labels",
    Form.MESSAGES: "answers",
    Form.GLAIVE: "answers",
    Form.COMPLETION: "answers",
    Form.ALPACA: "answers",
    Form.TEXT: "answers",
}


CONVERSATIONS: Final = frozenset({Form.MESSAGES, Form.GLAIVE, Form.PAIRS_IN_TRANSCRIPTS, Form.PAIRS_SHAREGPT})
"""Forms that need a chat template; the others may be plain texts."""


def default_loss_on(form: Form) -> Literal["assistant", "completion"]:
    """Return data.loss_on of a form whose recipe does not set it: all answers of messages, or that of a prompt."""
    return "assistant" if form in (Form.MESSAGES, Form.GLAIVE) else "completion"


class Reason(StrEnum):
    """Why a row is no sample."""

    BAD_ROW = "BAD_ROW"
    NO_LOSS_TOKENS = "NO_LOSS_TOKENS"
    EQUAL_PAIR = "EQUAL_PAIR"
    EMPTY_SIDE = "EMPTY_SIDE"
    TOO_LONG = "TOO_LONG"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation; messages and tools as `fourfold.model.chat` returns them."""

    messages: Sequence[dict[str, Any]]
    answers_from: int = 0  # number of the first message that is no part of the prompt
    tools: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """A text without a chat template; the prompt may be empty."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Token ids of another program."""

    token_ids: Sequence[int]
    in_loss: Sequence[bool]  # of the same length


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """An answer in steps with a label each."""

    prompt: Chat | str
    steps: Sequence[str]
    labels: Sequence[float]  # each from 0 to 1
    separator: str  # after each step


Side = Chat | Plain | Tokens | Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class NormalRow:
    """One row of any form."""

    sides: tuple[Side, ...]  # one; or the chosen and the rejected answer
    value: float | None = None  # weight of an answer, margin of a pair, label of a labelled answer (1 or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFields:
    """Columns with other names than the usual ones, and how texts are read: keys of [data] and of its sources."""

    template: str = ""
    """Text that makes the prompt from columns, in place of `prompt_field`; of rows of the form `completion`."""
    prompt_field: str = ""
    answer_field: str = ""
    chosen_field: str = "chosen"
    rejected_field: str = "rejected"
    messages_field: str = ""
    label_field: str = "label"
    tools_field: str = "tools"
    margin_field: str = "margin"
    weight_field: str = ""
    step_marker: str = ""
    """Text that ends a step in a row of the form steps-in-text."""
    step_separator: str = STEP_SEPARATOR
    """Text after each step of a row of the form steps."""
    chat: bool = True
    """Whether a text prompt is a user's message for the chat template."""
    system_prompt: str = ""
    several_turns: bool = False
    """Whether the answers of a pair may have several messages: `data.loss_on = "assistant"`."""
