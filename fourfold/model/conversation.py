"""Turns conversations into token ids and the tokens of the loss: for training, reward models and display.

    messages --render--> pieces of text --encode--> token ids
                  prompt                            exactly those that an engine would get
                  answer, in the loss               encoded on its own: no token spans the border
                  end of the answer, in the loss    one of `Tokenizer.stop_token_ids`

Where an answer begins and ends is known by the marks of the template ({% generation %}), or else by prefixes: the
rendered prompt has to be a beginning of the rendered conversation. Templates that write earlier turns differently, such
as those that drop earlier reasoning, have no such prefixes. They need `turns = "each"`: one sample per answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from fourfold.arrays import BoolArray, Int32Array
from fourfold.errors import InvalidInput
from fourfold.model.tokenizer import Message, Tokenizer
from fourfold.text import clean

Span = tuple[int, int]  # begin and end (exclusive)

ENCODING_VERSION: Final = 1
"""Raise it when equal messages give other tokens than before: stores of tokens are made again."""
SWITCHES: Final = ("weight", "train", "loss")
"""Members of a message that take it out of the loss with the value 0: OpenAI's, axolotl's, and ours."""
_SHOWN: Final = 40  # characters of a difference


class TemplateMismatch(InvalidInput):
    """The chat template does not show where an answer begins or ends: a fault of the recipe, not of the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingRule:
    """Which tokens of a conversation are in the loss; the keys of the same names of a recipe's [data]."""

    loss_on: Literal["assistant", "completion", "last", "all"] = "assistant"
    """assistant: every answer. completion: answers that the row has as such. last: the last answer. all: all tokens."""
    turns: Literal["all", "each"] = "all"
    """all: one sample per conversation. each: one per answer, with the prompt of inference."""
    end: Literal["template", "token"] = "template"
    """template: the template ends each answer. token: a model's end token is added to a last answer without one."""
    trust_special_tokens: bool = False
    """Whether the texts of special tokens in messages become these tokens."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a rendered conversation that is encoded on its own."""

    text: str  # with the marks of `Tokenizer.escape`
    in_loss: bool = False
    ends_answer: bool = False  # the end token stands at its end, or right after it


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedAnswer:
    """A sample as text."""

    pieces: tuple[Piece, ...]
    plain: bool = False  # no chat: the tokenizer adds its special tokens to the first piece
    end: Literal["template", "token"] = "template"
    turn: int = -1  # number of the message with the last answer; -1: no chat


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedAnswer:
    """A sample as tokens; it ends with the last token of the loss."""

    token_ids: Int32Array  # [n]
    spans: tuple[Span, ...]  # tokens in the loss, one span per piece, ascending; empty: there are none
    turn: int = -1
    doubled_begin: bool = False  # whether the text had two begin tokens, and one was removed

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first one of the loss."""
        return self.spans[0][0] if self.spans else len(self.token_ids)

    def loss_mask(self) -> BoolArray:
        """Return which tokens are in the loss, [n]."""
        mask = np.zeros(len(self.token_ids), np.bool_)
        for begin, end in self.spans:
            mask[begin:end] = True
        return mask


def render_answers(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    tokenizer: Tokenizer,
    rule: EncodingRule,
    *,
    answers_from: int = 0,
) -> list[RenderedAnswer]:
    """Return the samples of a conversation as text.

    Args:
        messages: as `fourfold.model.chat.read_messages` returns them.
        tools: as `read_tools` returns them.
        tokenizer: with a chat template.
        rule: what is in the loss.
        answers_from: number of the first message that is no part of the prompt, for `loss_on = "completion"`.

    Returns:
        One sample, or one per answer with `turns = "each"`; none if no answer with content is in the loss.

    Raises:
        ConfigError: the model has no chat template.
        InvalidInput: the template cannot render the messages, or does not show where an answer is.
    """
    turns = _loss_turns(messages, rule, answers_from)
    if not turns:
        return []
    shown: list[Any] = [{key: value for key, value in m.items() if key not in SWITCHES} for m in messages]
    if not rule.trust_special_tokens:
        shown, tools = tokenizer.escape(shown), tokenizer.escape(tools)
    if rule.loss_on == "all":
        text = tokenizer.render_chat(shown, tools=tools, add_generation_prompt=False)
        check_shown(text, shown, tools)
        return [RenderedAnswer(pieces=(Piece(text, True, True),), end=rule.end, turn=turns[-1])]
    if rule.turns == "all":
        conversations = [(_Conversation(tokenizer, shown, tools), turns)]
    else:
        conversations = [(_Conversation(tokenizer, shown[: turn + 1], tools), [turn]) for turn in turns]
    return [
        RenderedAnswer(pieces=tuple(conversation.pieces(own)), end=rule.end, turn=own[-1])
        for conversation, own in conversations
    ]


def plain_answer(prompt: str, answer: str) -> RenderedAnswer:
    """Return a sample of text without a chat template; it ends with the model's end token. Prompt may be empty."""
    pieces = [Piece(prompt)] + ([Piece(answer, True, True)] if answer else [])
    return RenderedAnswer(pieces=tuple(pieces), plain=True, end="token")


def scored_chat(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]], tokenizer: Tokenizer, *, trusted: bool = False
) -> RenderedAnswer:
    """Return the text of a conversation that a reward model scores, for its training as for its use.

    It is all that the chat template writes, in one piece, as `apply_chat_template` of transformers gives it: white
    space after the end token belongs to it. `trusted`: texts of special tokens in messages become these tokens.

    Raises:
        ConfigError: the model has no chat template.
        InvalidInput: the template cannot render the messages.
    """
    shown: Any = [{key: value for key, value in m.items() if key not in SWITCHES} for m in messages]
    if not trusted:
        shown, tools = tokenizer.escape(shown), tokenizer.escape(tools)
    return RenderedAnswer(pieces=(Piece(tokenizer.render_chat(shown, tools=tools, add_generation_prompt=False)),))


def scored_plain(prompt: str, answer: str, tokenizer: Tokenizer) -> RenderedAnswer:
    """Return the text without a chat template that a reward model scores; an answer cannot make special tokens."""
    return RenderedAnswer(pieces=(Piece(prompt + tokenizer.escape(answer)),), plain=True)


def encode_each(answers: Sequence[RenderedAnswer], tokenizer: Tokenizer) -> Iterator[EncodedAnswer | InvalidInput]:
    """Encode samples in one batch, on all cores.

    Yields:
        Each sample as tokens; or InvalidInput, if an answer does not end with an end token of the model, which would
        train it never to stop.
    """
    first = {plain: [a.pieces[0].text for a in answers if a.plain == plain] for plain in (False, True)}
    encoded = {plain: iter(tokenizer.encode_batch(texts, add_special=plain)) for plain, texts in first.items()}
    rest = iter(tokenizer.encode_batch([piece.text for a in answers for piece in a.pieces[1:]]))
    for answer in answers:
        parts = [next(encoded[answer.plain]), *(next(rest) for _ in answer.pieces[1:])]
        try:
            yield _assemble(answer, parts, tokenizer)
        except InvalidInput as error:
            yield error


def first_difference(one: str, other: str) -> str:
    """Return where two texts begin to differ, for messages."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    before = clean(repr(Tokenizer.unescape(one[max(same - _SHOWN, 0) : same])), 2 * _SHOWN)
    parts = [clean(repr(Tokenizer.unescape(text[same : same + _SHOWN])), 2 * _SHOWN) for text in (one, other)]
    return f"after {before} one has {parts[0]}, the other {parts[1]}"


def is_said(message: Message) -> bool:
    """Return whether a message has a text, reasoning or a tool call."""
    return any(message.get(key) for key in ("content", "reasoning_content", "tool_calls"))


def _loss_turns(messages: Sequence[Message], rule: EncodingRule, answers_from: int) -> list[int]:
    """Return the numbers of the answers in the loss."""
    first = answers_from if rule.loss_on == "completion" else 0
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= first]
    if rule.loss_on == "last":
        turns = turns[-1:]
    turns = [i for i in turns if _is_trained(messages[i], i) and is_said(messages[i])]
    if 0 in turns and rule.loss_on != "all":
        raise InvalidInput(
            "message 0 is the assistant's, and an answer needs a message before it; add one, or give this message "
            '"weight": 0'
        )
    return turns


def _is_trained(message: Message, number: int) -> bool:
    """Return whether no switch of a message is 0."""
    for switch in SWITCHES:
        if (value := message.get(switch, 1)) not in (0, 1):  # also of false, true, 0.0 and 1.0
            raise InvalidInput(
                f"message {number} has {switch} = {clean(repr(value), 80)}; it is 0 or 1 (a weight of a whole row is "
                f"data.weight_field)"
            )
        if not value:
            return False
    return True


def check_shown(text: str, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> None:
    """Refuse a conversation whose tools or tool calls the template left out: many templates know no tools.

    Args:
        text: the rendered conversation.
        messages: those that were rendered, as `read_messages` returns them.
        tools: as `read_tools` returns them.

    Raises:
        InvalidInput: names the first tool, or message and call, whose name is not in the text.
    """
    fix = "set data.chat_template to a template with tools"
    for name in (tool["function"]["name"] for tool in tools):
        if name not in text:
            raise InvalidInput(
                f"the chat template leaves out the tool {clean(repr(name), 80)}; {fix}, or train without "
                f'tools: data.tools_field = ""'
            )
    for number, message in enumerate(messages):
        for call in message.get("tool_calls") or ():
            if (name := call["function"]["name"]) not in text:
                raise InvalidInput(
                    f"message {number}: the chat template leaves out its call of {clean(repr(name), 80)}; {fix}"
                )


class _Conversation:
    """Finds the answers in one rendered conversation."""

    def __init__(self, tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> None:
        self._tokenizer, self._messages, self._tools = tokenizer, messages, tools
        self._text, self._marks = tokenizer.render_marked(messages, tools=tools)
        check_shown(self._text, messages, tools)

    def pieces(self, turns: Sequence[int]) -> Iterator[Piece]:
        """Yield the text in pieces, up to the message after the last of `turns`, which are in the loss."""
        last = 0
        for begin, end, ends_answer in self._marked(turns) if self._marks else self._by_prefix(turns):
            if begin > last or not last:
                yield Piece(self._text[last:begin])
            yield Piece(self._text[begin:end], True, ends_answer)
            last = end
        yield Piece(self._text[last:])  # may begin with the end token

    def _by_prefix(self, turns: Sequence[int]) -> Iterator[tuple[int, int, bool]]:
        """Yield begin, end, and whether the answer ends there."""
        for turn in turns:
            prompt, whole = self._prompt(turn), self._rendered(turn + 1)
            self._check_prompt(turn, prompt, whole)
            if not self._text.startswith(whole):
                raise TemplateMismatch(
                    f"message {turn}: the chat template writes this answer differently once other messages follow: "
                    f"{first_difference(whole, self._text)}. An answer is in the loss as it is at inference: set "
                    f'data.turns = "each", which makes one sample of each answer'
                )
            yield len(prompt), len(whole), True

    def _marked(self, turns: Sequence[int]) -> Iterator[tuple[int, int, bool]]:
        """Yield as `_by_prefix` what the template marks."""
        for turn, own in zip(turns, self._marks_of(turns), strict=True):
            prompt = self._prompt(turn)
            begin = own[0][0] if own else 0
            if turn == len(self._messages) - 1 and len(turns) == 1:
                self._check_prompt(turn, prompt, self._text)
                begin = max(begin, len(prompt))
            else:
                begin = self._after_generation_prompt(turn, prompt, begin)
            spans = [(max(begin, start), end) for start, end in own if end > begin]
            if not spans:
                raise TemplateMismatch(
                    f"message {turn}: the chat template has {{% generation %}}, but not around this answer; put the "
                    f"mark around every answer, or take all of them out of the template (data.chat_template)"
                )
            for number, (start, end) in enumerate(spans, 1):
                yield start, end, number == len(spans)

    def _marks_of(self, turns: Sequence[int]) -> list[list[Span]]:
        """Return the marked spans of some answers."""
        answers = [i for i, message in enumerate(self._messages) if message["role"] == "assistant"]
        if len(self._marks) == len(answers):
            own = dict(zip(answers, self._marks, strict=True))
            return [[own[turn]] for turn in turns]
        counts = {n: self._count_marks(n) for turn in turns for n in (turn, turn + 1)}
        return [self._marks[counts[turn] : counts[turn + 1]] for turn in turns]

    def _count_marks(self, count: int) -> int:
        whole = count == len(self._messages)
        return len(
            self._marks if whole else self._tokenizer.render_marked(self._messages[:count], tools=self._tools)[1]
        )

    def _after_generation_prompt(self, turn: int, prompt: str, begin: int) -> int:
        """Return where a marked answer begins: some templates mark the generation prompt, too."""
        before = self._rendered(turn)
        opening = prompt[len(before) :] if prompt.startswith(before) else ""
        for start in range(max(begin - len(opening), 0), begin + 1):
            if self._text.startswith(opening, start):
                return start + len(opening)
        return begin

    def _prompt(self, turn: int) -> str:
        return self._tokenizer.render_chat(self._messages[:turn], tools=self._tools)

    def _rendered(self, count: int) -> str:
        if count == len(self._messages):
            return self._text
        return self._tokenizer.render_chat(self._messages[:count], tools=self._tools, add_generation_prompt=False)

    def _check_prompt(self, turn: int, prompt: str, whole: str) -> None:
        if not whole.startswith(prompt):
            raise TemplateMismatch(
                f"message {turn}: the prompt of inference is not the beginning of the prompt with its answer: "
                f"{first_difference(prompt, whole)}. The answer would follow another prompt than at inference: use "
                f"another template (data.chat_template), or prompts and answers as they are (data.chat = false)"
            )


def _assemble(answer: RenderedAnswer, parts: list[list[int]], tokenizer: Tokenizer) -> EncodedAnswer:
    """Join the tokens of the pieces of a sample, and end its answers."""
    begin = tokenizer.begin_token_id
    doubled = begin is not None and parts[0][:2] == [begin, begin]
    if doubled:
        del parts[0][0]
    ids, spans = list[int](), list[Span]()
    last = max((i for i, piece in enumerate(answer.pieces) if piece.in_loss), default=-1)
    length = 0
    for number, piece in enumerate(answer.pieces):
        start = len(ids)
        ids += parts[number]
        if not piece.in_loss:
            continue
        if piece.ends_answer:
            after = parts[number + 1][:1] if number + 1 < len(parts) else []
            length = start + _answer_length(parts[number], after, tokenizer)
            if length == start:
                if number < last or answer.end == "template":
                    raise _unended(ids, answer, number == last, tokenizer)
                ids = _with_end(ids, start, tokenizer)
                length = len(ids)
            elif length > len(ids):  # the end token is the first one of the next piece
                parts[number + 1] = parts[number + 1][1:]
                ids += after
        else:
            length = len(ids)
        # The first token of a text has no probability: nothing stands before it.
        if (span := (max(start, 1), length))[0] < span[1]:
            spans.append(span)
    cut = length if spans else len(ids)
    return EncodedAnswer(
        token_ids=np.asarray(ids[:cut], np.int32), spans=tuple(spans), turn=answer.turn, doubled_begin=doubled
    )


def _answer_length(ids: Sequence[int], after: Sequence[int], tokenizer: Tokenizer) -> int:
    """Return the tokens of an answer with its end token, at which an engine stops; 0 if it does not end.

    Args:
        ids: tokens of the rendered answer. Templates write white space, and some a second end token, after the end.
        after: the token that follows, if any. Some templates end an answer with the mark of the next role.
        tokenizer: names the end tokens.
    """
    stops = tokenizer.stop_token_ids
    found = 0
    for length in range(len(ids), 0, -1):
        if ids[length - 1] in stops:
            found = length
        elif not _is_blank(ids[length - 1], tokenizer):
            break
    return found or (len(ids) + 1 if after and after[0] in stops else 0)


def _is_blank(token_id: int, tokenizer: Tokenizer) -> bool:
    return tokenizer.added_text(token_id) is None and not tokenizer.decode([token_id]).strip()


def _with_end(ids: list[int], start: int, tokenizer: Tokenizer) -> list[int]:
    """Return tokens with the model's end token, in place of white space after a token of the template."""
    if (end := tokenizer.end_token_id) is None:
        raise InvalidInput(
            "the model names no end token, so that no answer could end; set eos_token_id in its generation_config.json"
        )
    kept = len(ids)
    while kept > start + 1 and _is_blank(ids[kept - 1], tokenizer):
        kept -= 1
    return [*(ids[:kept] if tokenizer.added_text(ids[kept - 1]) is not None else ids), end]


def _unended(ids: Sequence[int], answer: RenderedAnswer, is_last: bool, tokenizer: Tokenizer) -> TemplateMismatch:
    names = ", ".join(repr(tokenizer.added_text(i) or tokenizer.decode([i])) for i in tokenizer.stop_token_ids)
    tail = clean(repr(tokenizer.decode(ids[-8:], skip_special=False)), 2 * _SHOWN)
    fix = 'data.end = "token" adds it' if is_last else 'data.turns = "each" with data.end = "token" adds it'
    return TemplateMismatch(
        f"the chat template ends {'the last' if is_last else 'an'} answer with {tail}, which is none of the model's "
        f"end tokens ({names or 'it has none'}), so that the model would learn never to stop; {fix}"
    )


def scored_steps(
    prompt: str | Sequence[Message],
    tools: Sequence[dict[str, Any]],
    steps: Sequence[str],
    separator: str,
    tokenizer: Tokenizer,
    *,
    trusted: bool = False,
) -> RenderedAnswer:
    """Return the text whose steps a process reward model scores, one span each, for its training as for its use.

    Each step has the separator after it, also the last one, and the score is read after the separator. No end token
    follows. `trusted`: texts of special tokens in messages and steps become these tokens.

    Raises:
        ConfigError: `prompt` is a list of messages, and the model has no chat template.
        InvalidInput: the template cannot render the messages.
    """
    plain = isinstance(prompt, str)
    if not trusted:
        prompt, tools, steps = (prompt if plain else tokenizer.escape(prompt)), *map(tokenizer.escape, (tools, steps))
    start = prompt if isinstance(prompt, str) else tokenizer.render_chat(prompt, tools=tools)
    return RenderedAnswer(pieces=(Piece(start), *(Piece(step + separator, True) for step in steps)), plain=plain)
