"""Converts the messages of a session to prompt ids, and never encodes again what the policy sampled.

    messages of a request = [messages up to an earlier reply of this session] + [new messages]
    prompt ids            = [ids of the segment up to that reply]            + [end of its turn, if it was not sampled]
                                                                             + [rendering of the new messages]

The rendering of the new messages is the text that the chat template writes after the earlier ones. Some templates write
earlier messages differently when others follow: they drop the reasoning of earlier turns, or move the tools. For these,
and for a history that the agent edited, all messages are encoded again and the turn opens a segment.

Texts of special tokens in messages are encoded as ordinary text (`Tokenizer.escape`), so that the content of a message
cannot end it and forge another one.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import numpy as np

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.arrays import Int32Array
from fourfold.errors import InvalidInput
from fourfold.model.chat import argument_value, template_message, template_tool
from fourfold.model.tokenizer import Tokenizer
from fourfold_gateway.encoding import PromptLimits
from fourfold_gateway.trajectory import SessionTokens, Turn

_ANSWER: Final = "4F6rAnswer"  # placeholder for a reply in a rendering, to find the text after it
_BASE: Final = struct.Struct("<ii")  # segment whose messages a stored turn repeats, and their number; (-1, 0): none
_NO_BASE: Final = -1
_MAX_VARIABLE: Final = 200  # most characters of an agent's variable for the chat template


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Entry:
    """A message of a conversation."""

    message: pb.Message
    key: tuple[object, ...]  # equal for equal messages; excludes the reasoning
    reasoning: str
    rendered: Mapping[str, Any]  # the escaped message for the chat template


@dataclass(frozen=True, slots=True)
class _Reply:
    """The place of a reply in a thread and in its segment."""

    entry_count: int  # messages up to the reply, which is included
    token_count: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Thread:
    """The messages whose tokens are in a segment. The last one is a reply."""

    entries: tuple[_Entry, ...]
    replies: tuple[_Reply, ...]  # replies whose sampled tokens are in the segment, in order
    tools: tuple[bytes, ...]  # each an encoded Tool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChatPrompt:
    """The prompt of one turn; give it back to `Conversation.record`."""

    token_ids: Int32Array  # [p]
    thread: _Thread
    """The messages of the request; `replies` lists those whose sampled tokens are in the ids."""
    base: int
    """Segment whose thread begins with the same entries; -1: none. For `record` only: `SessionTokens` finds the segment
    by ids."""
    base_count: int
    """Number of these entries."""


class ChatTemplate:
    """The chat template of a model, for messages of the contract. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, limits: PromptLimits) -> None:
        self.tokenizer, self._limits = tokenizer, limits
        self._ending: str | None = None  # the text after a reply; None: not known yet

    def encode(self, chat: pb.Chat) -> tuple[str, list[int]]:
        """Return the rendered messages as text and as token ids, up to the beginning of the assistant's answer.

        Raises:
            ConfigError: the model has no chat template.
            InvalidInput: there is no message, the text is too large, or the template refuses the messages or the tools.
        """
        _check_messages(chat)
        text = self.render([self.entry(message) for message in chat.messages], self.tools(chat.tools))
        return self.tokenizer.unescape(text), self.encode_text(text)

    def entry(self, message: pb.Message) -> _Entry:
        escape = self.tokenizer.escape
        calls = [
            (escape(call.name), escape(call.id), self._arguments(call.arguments_json)) for call in message.tool_calls
        ]
        rendered = template_message(
            escape(message.role),
            escape(message.content),
            name=escape(message.name),
            tool_call_id=escape(message.tool_call_id),
            reasoning=escape(message.reasoning),
            calls=[(name, call_id, arguments) for name, call_id, (arguments, _) in calls],
        )
        is_reply = message.role == "assistant"
        return _Entry(
            message=message,
            key=(
                message.role,
                # Clients strip the text of a reply.
                message.content.strip() if is_reply else message.content,
                message.name,
                message.tool_call_id,
                tuple((name, canonical) for name, _, (_, canonical) in calls),
            ),
            reasoning=message.reasoning.strip(),
            rendered=rendered,
        )

    def tools(self, tools: Iterable[pb.Tool]) -> list[dict[str, Any]]:
        """Return tools as templates read them; raise InvalidInput when the parameters of one are not an object."""
        escape, rendered = self.tokenizer.escape, []
        for tool in tools:
            parameters, _ = self._arguments(tool.parameters_json)
            if not isinstance(parameters, dict):
                raise InvalidInput(f"tool {tool.name!r}: parameters_json must be a JSON object, a JSON Schema")
            rendered.append(template_tool(escape(tool.name), escape(tool.description), parameters))
        return rendered

    def _arguments(self, text: str) -> tuple[Any, str]:
        """Return the escaped `argument_value` of a text, and a text that is equal for equal values."""
        value = argument_value(text)
        try:
            return self.tokenizer.escape(value), text if value == text else json.dumps(value, sort_keys=True)
        except RecursionError:
            return self.tokenizer.escape(text), text

    def render(
        self, entries: Sequence[_Entry], tools: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """Return the escaped text."""
        return self.tokenizer.render_chat(
            [entry.rendered for entry in entries], tools=tools, add_generation_prompt=add_generation_prompt
        )

    def rest(
        self,
        earlier: Sequence[_Entry],
        new: Sequence[_Entry],
        tools: Sequence[Mapping[str, Any]],
        sampled: Iterable[_Entry],
    ) -> str | None:
        """Return the escaped text after the last reply of a conversation: the end of its turn, and the new messages.

        Args:
            earlier: up to and with the reply.
            new: the messages after it; may be empty.
            tools: from `tools`.
            sampled: the replies that the segment has as sampled, in order.

        Returns:
            None if the template changes the earlier messages when the new ones follow, or leaves out a part of a
            sampled reply.
        """
        before, ending = self.render(earlier, tools, add_generation_prompt=False), self._end_of_reply()
        text = self.render([*earlier, *new], tools)
        if ending is None or not before.endswith(ending) or not text.startswith(before):
            return None
        position = 0
        for entry in sampled:
            for part in (entry.rendered.get("reasoning_content", ""), entry.rendered["content"]):
                position = before.find(part.strip(), position)
                if position < 0:
                    return None
        return text[len(before) - len(ending) :]

    def encode_rest(self, text: str, last_id: int) -> list[int]:
        """Return the ids of `rest` after a completion whose last token is `last_id`."""
        stop, stripped = self.tokenizer.added_text(last_id), text.lstrip()
        if stop and stripped.startswith(stop):
            # The policy sampled the end of its turn itself. The token is encoded together with the text after it,
            # because it decides how that text is split, as in a whole prompt.
            ids = self.encode_text(stripped)
            if ids[:1] == [last_id]:
                return ids[1:]
        return self.encode_text(text)

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a rendered text; raise InvalidInput when it is too large for the context."""
        self._limits.check_text(text)
        return self.tokenizer.encode(text)

    def is_neutral(self, variables: Mapping[str, Any]) -> bool:
        """Return whether variables change neither the text of a conversation with reasoning nor that of the next turn.

        Only switches and short texts are tried, because they are rendered on the event loop.
        """
        texts = [value for value in variables.values() if not isinstance(value, bool | int | float | None)]
        if not all(isinstance(text, str) and len(text) <= _MAX_VARIABLE for text in texts):
            return False
        reply = pb.Message(role="assistant", content="y", reasoning="z")
        question = pb.Message(role="user", content="x")
        messages = [self.entry(message).rendered for message in (question, reply, question)]
        tools = self.tools([pb.Tool(name="t", parameters_json="{}")])

        def render(values: Mapping[str, Any]) -> Iterator[str]:
            for offered, chat in product(([], tools), (messages[:1], messages)):
                try:
                    yield self.tokenizer.render_chat(chat, tools=offered, variables=values)
                except InvalidInput as error:  # not every template takes tools
                    yield error.message

        return list(render(variables)) == list(render({}))

    def _end_of_reply(self) -> str | None:
        """Return what the template writes after the content of the last reply; None if that cannot be found."""
        if self._ending is None:
            chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _ANSWER}]
            try:
                text = self.tokenizer.render_chat(chat, add_generation_prompt=False)
            except InvalidInput:  # a template may need fields that these messages lack
                return None
            self._ending = text.rpartition(_ANSWER)[2]
        return self._ending


class Conversation:
    """The messages of one session. `make_prompt` may run in any thread, the other methods on the event loop."""

    def __init__(self, template: ChatTemplate, trajectory: SessionTokens) -> None:
        self._template, self._trajectory = template, trajectory
        self._threads: dict[int, _Thread] = {}  # by segment; only segments of finished turns with messages have one
        self._replies: dict[int, pb.Message] = {}  # by number of the turn

    @staticmethod
    def restore(
        template: ChatTemplate, trajectory: SessionTokens, turns: Iterable[tuple[Turn, bytes, bytes]]
    ) -> Conversation:
        """Return the conversation of a restored trajectory.

        Args:
            template: of the model.
            trajectory: with these turns.
            turns: each with the bytes that `record` returned, in the order in which the turns finished.
        """
        conversation = Conversation(template, trajectory)
        for turn, chat, reply in turns:
            if chat:
                conversation._restore_turn(turn, chat, reply)
        return conversation

    def reply_of(self, turn: Turn) -> pb.Message | None:
        """Return the assistant's message of a turn; None for a prompt that was not a conversation."""
        return self._replies.get(turn.number)

    def make_prompt(self, chat: pb.Chat) -> ChatPrompt:
        """Return the prompt for the messages of a request. Takes about 0.3 ms, and 2 ms for each KB of new text.

        Raises:
            ConfigError: the model has no chat template.
            InvalidInput: there is no message, the text is too large, or the template refuses the messages or the tools.
        """
        _check_messages(chat)
        entries = self._entries(chat.messages)
        tools = tuple(tool.SerializeToString(deterministic=True) for tool in chat.tools)
        rendered_tools = self._template.tools(chat.tools)
        found = self._find(entries, tools)
        if found is not None:
            index, thread, reply = found
            count = reply.entry_count
            replies = tuple(r for r in thread.replies if r.entry_count <= count)
            # Use the recorded message: the client may have left out the reasoning.
            earlier, new = thread.entries[:count], entries[count:]
            sampled = [earlier[r.entry_count - 1] for r in replies]
            rest = self._template.rest(earlier, new, rendered_tools, sampled)
            if rest is not None:
                head = self._trajectory.segments[index].token_ids[: reply.token_count]
                tail = self._template.encode_rest(rest, int(head[-1]))
                return ChatPrompt(
                    token_ids=np.concatenate((head, np.array(tail, np.int32))),
                    thread=_Thread(entries=earlier + new, replies=replies, tools=tools),
                    base=index,
                    base_count=count,
                )
        ids = self._template.encode_text(self._template.render(entries, rendered_tools))
        return ChatPrompt(
            token_ids=np.array(ids, np.int32),
            thread=_Thread(entries=entries, replies=(), tools=tools),
            base=_NO_BASE,
            base_count=0,
        )

    def record(self, prompt: ChatPrompt, turn: Turn, reply: pb.Message) -> tuple[bytes, bytes]:
        """Remember the messages of a finished turn.

        Args:
            prompt: from `make_prompt`; several turns may have the same one.
            turn: from `SessionTokens.finish_turn`, with the ids of the prompt.
            reply: the assistant's message as the agent gets it.

        Returns:
            The bytes for the store: the messages that the session did not have before, and the reply.
        """
        base, count = prompt.base, prompt.base_count
        thread = self._threads.get(base)
        if thread is None or thread.entries[:count] != prompt.thread.entries[:count]:
            # Since `make_prompt`, a turn whose other messages have equal ids replaced the thread, or the turn that
            # began the thread could not be stored.
            base, count = _NO_BASE, 0
        chat = pb.Chat(
            messages=[entry.message for entry in prompt.thread.entries[count:]],
            tools=[pb.Tool.FromString(tool) for tool in prompt.thread.tools] if base == _NO_BASE else [],
        )
        self._add(prompt.thread, turn, reply)
        return _BASE.pack(base, count) + chat.SerializeToString(), reply.SerializeToString()

    def snapshot(self) -> Callable[[], None]:
        """Return a function that forgets all turns that are recorded after this call."""
        threads, replies = dict(self._threads), dict(self._replies)

        def go_back() -> None:
            self._threads, self._replies = threads, replies

        return go_back

    def _entries(self, messages: Sequence[pb.Message]) -> tuple[_Entry, ...]:
        """Return the entries of a request; reuse those of messages that the session has."""
        threads, found = list(self._threads.values()), list[_Entry]()
        for index, message in enumerate(messages):
            known = (t.entries[index] for t in threads if index < len(t.entries))
            same = next((entry for entry in known if entry.message == message), None)
            found.append(same or self._template.entry(message))
        return tuple(found)

    def _find(self, entries: Sequence[_Entry], tools: tuple[bytes, ...]) -> tuple[int, _Thread, _Reply] | None:
        """Return the reply after the most equal messages; of several, one at the end of its segment."""
        best: tuple[int, _Thread, _Reply] | None = None
        highest = (0, False)
        for index, thread in list(self._threads.items()):
            if thread.tools != tools:
                continue
            equal = _count_equal(thread.entries, entries)
            reply = next((r for r in reversed(thread.replies) if r.entry_count <= equal), None)
            if reply is None:
                continue
            rank = (reply.entry_count, reply.token_count == self._trajectory.segments[index].token_ids.size)
            if rank > highest:
                best, highest = (index, thread, reply), rank
        return best

    def _add(self, thread: _Thread, turn: Turn, reply: pb.Message) -> None:
        entries = (*thread.entries, self._template.entry(reply))
        replies = (*thread.replies, _Reply(len(entries), turn.end))
        self._threads[turn.segment_index] = _Thread(entries=entries, replies=replies, tools=thread.tools)
        self._replies[turn.number] = reply

    def _restore_turn(self, turn: Turn, data: bytes, reply: bytes) -> None:
        base, count = _BASE.unpack_from(data)
        chat = pb.Chat.FromString(data[_BASE.size :])
        entries = tuple(map(self._template.entry, chat.messages))
        if base == _NO_BASE:
            tools = tuple(tool.SerializeToString(deterministic=True) for tool in chat.tools)
            thread = _Thread(entries=entries, replies=(), tools=tools)
        else:
            earlier = self._threads[base]
            replies = tuple(r for r in earlier.replies if r.entry_count <= count)
            thread = _Thread(entries=earlier.entries[:count] + entries, replies=replies, tools=earlier.tools)
        self._add(thread, turn, pb.Message.FromString(reply))


def _check_messages(chat: pb.Chat) -> None:
    """Raise InvalidInput when a conversation is empty."""
    if not chat.messages:
        raise InvalidInput("the conversation has no messages; send at least one")


def _count_equal(known: Sequence[_Entry], sent: Sequence[_Entry]) -> int:
    """Return the number of messages that two conversations have in common at their beginning."""
    count = 0
    for ours, theirs in zip(known, sent, strict=False):
        if ours is not theirs and (ours.key != theirs.key or theirs.reasoning not in ("", ours.reasoning)):
            break
        count += 1
    return count
