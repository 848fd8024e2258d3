"""Bounds the cost of prompts: refuses those that cannot fit the context, and encodes few of the others at a time.

    prompt --> size --> quota of the caller --> slot --> render --> size --> encode

A context of n tokens takes a rendered text of 16 n bytes and n / 4 messages, tools and tool calls, at least 64 KiB and
64 of them. Ordinary text has 3 to 5 bytes for each token, and the begin, role, content and end of a message have 4
tokens. Before they are rendered, messages may have four times these bytes: many templates leave out the reasoning of
earlier replies. Encoding takes 1 s of CPU time and 200 MiB for each MiB of text.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.errors import InvalidInput, Overloaded
from fourfold.host.cancellation import completed
from fourfold.rpc.limits import Quotas
from fourfold.security.principal import Principal
from fourfold_gateway.trajectory import CONTEXT_LENGTH

T = TypeVar("T")

_MAX_BYTES_PER_TOKEN: Final = 16
_MIN_TEXT_BYTES: Final = 1 << 16
_TOKENS_PER_MESSAGE: Final = 4
_MIN_MESSAGES: Final = 64
_UNRENDERED_FACTOR: Final = 4
_ESCAPE_FACTOR: Final = 3  # JSON may write a character of 2 bytes of UTF-8 in 6 bytes, as \u00e9
_CHARGED_BYTES_PER_TOKEN: Final = 4  # of ordinary text for each token
_INLINE_BYTES: Final = 1 << 12  # encoded on the event loop, in less than 5 ms; a thread would usually take longer
_LARGE_BYTES: Final = 1 << 17  # larger prompts share a slot of their own, so that they delay no others
_MAX_WAITING_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """The largest prompts of a model."""

    max_context_tokens: int

    @property
    def text_bytes(self) -> int:
        """Bytes of a rendered text."""
        return max(_MAX_BYTES_PER_TOKEN * self.max_context_tokens, _MIN_TEXT_BYTES)

    @property
    def body_bytes(self) -> int:
        """Bytes of a request in JSON."""
        return _ESCAPE_FACTOR * _UNRENDERED_FACTOR * self.text_bytes

    def check(self, prompt: pb.Chat | str) -> int:
        """Return the bytes of a prompt before it is rendered; raise InvalidInput when it is too large."""
        if isinstance(prompt, str):
            return self.check_text(prompt)
        size, most = prompt.ByteSize(), _UNRENDERED_FACTOR * self.text_bytes
        if size > most:
            raise self._error(f"the messages and tools have {size} bytes, and at most {most} are encoded")
        count = len(prompt.messages) + len(prompt.tools)
        most = max(self.max_context_tokens // _TOKENS_PER_MESSAGE, _MIN_MESSAGES)
        if count <= most:
            count += sum(len(message.tool_calls) for message in prompt.messages)
        if count > most:
            raise self._error(f"the prompt has {count} messages, tools and tool calls, and at most {most} are encoded")
        return size

    def check_text(self, text: str) -> int:
        """Return the bytes of a text; raise InvalidInput when it has too many."""
        size = len(text.encode(errors="surrogatepass"))
        if size > self.text_bytes:
            raise self._error(f"the text of the prompt has {size} bytes, and at most {self.text_bytes} are encoded")
        return size

    def _error(self, what: str) -> InvalidInput:
        return InvalidInput(
            f"{what} for a context of {self.max_context_tokens} tokens; shorten it", reason=CONTEXT_LENGTH
        )


class PromptEncoder:
    """Renders and encodes the prompts of a gateway. Use it from one event loop."""

    def __init__(self, limits: PromptLimits, quotas: Quotas) -> None:
        self.limits, self._quotas = limits, quotas
        self._slots, self._large = asyncio.Semaphore(2), asyncio.Semaphore(1)
        self._waiting_bytes = 0

    async def run(self, principal: Principal, prompt: pb.Chat | str, work: Callable[..., T], **options: bool) -> T:
        """Return `work(prompt, **options)`, which renders and encodes it, from a thread unless the prompt is small.

        Raises:
            InvalidInput: the prompt is too large for the context.
            Overloaded: the caller has too many tokens in flight, or too many prompts wait.
        """
        size = self.limits.check(prompt)
        # The size is only an estimate, so it never asks for more than the whole quota; `Generator.generate` charges the
        # exact number.
        most = min(self._quotas.usage(principal)[0].tokens_in_flight, self.limits.max_context_tokens)
        with self._quotas.tokens(principal, int(min(size // _CHARGED_BYTES_PER_TOKEN, most))):
            if size <= _INLINE_BYTES:
                return work(prompt, **options)
            if self._waiting_bytes + size > _MAX_WAITING_BYTES:
                raise Overloaded("too many prompts wait to be encoded; send fewer at a time", retry_after=1.0)
            self._waiting_bytes += size
            try:
                large = size > _LARGE_BYTES
                async with self._large if large else self._slots:
                    return await completed(asyncio.to_thread(_encode, partial(work, prompt, **options), trim=large))
            finally:
                self._waiting_bytes -= size


def _encode(work: Callable[[], T], *, trim: bool) -> T:
    try:
        return work()
    finally:
        if trim and (release := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
            release(0)  # return freed memory to the kernel: glibc kept 250 MiB after 2 MB of text
