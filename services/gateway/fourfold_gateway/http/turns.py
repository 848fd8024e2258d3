"""Runs one turn for an HTTP request, and collects what its samples produced."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.errors import PeerFault
from fourfold_gateway.api import AgentApi, Caller

TURN_SECONDS: Final = 600.0
"""Deadline of a turn; the SDKs of OpenAI and Anthropic give up after this time too."""
_FLUSH_NANOSECONDS: Final = 20_000_000  # longest delay of tokens in a stream
_PART: Final = "\ufffd"  # stands for an incomplete character in the text of a token


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOptions:
    """Options of an HTTP request that are not part of the request to the gateway."""

    request: pb.GenerateRequest
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    single_call: bool = False
    """Return the first tool call of a message only."""
    token_ids: bool = False
    """Return token ids, log-probabilities and policy versions in the field `fourfold`."""


@dataclass(slots=True)
class Answer:
    """The received part of one sample of a turn."""

    index: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Policy version and number of tokens of consecutive spans."""
    texts: list[str] = field(default_factory=list)
    finish: int = pb.FINISH_REASON_UNSPECIFIED
    message: pb.Message | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def content(self) -> str:
        """Content of the assistant's message; all text where there is none."""
        return self.text if self.message is None else self.message.content

    def add(self, chunk: pb.TurnChunk) -> None:
        """Append a chunk."""
        ids = np.frombuffer(chunk.token_ids, "<i4").tolist()
        self.ids += ids
        self.logprobs += np.frombuffer(chunk.logprobs, "<f4").tolist()
        if ids:
            if self.versions and self.versions[-1][0] == chunk.policy_version:
                self.versions[-1] = (chunk.policy_version, self.versions[-1][1] + len(ids))
            else:
                self.versions.append((chunk.policy_version, len(ids)))
        if chunk.text:
            self.texts.append(chunk.text)
        if chunk.finish_reason:
            self.finish = chunk.finish_reason
            if chunk.HasField("message"):
                self.message = chunk.message

    def drop_calls(self) -> None:
        """Drop all tool calls of the message but the first."""
        if self.message is not None and len(self.message.tool_calls) > 1:
            whole, self.message = self.message, pb.Message()  # the gateway keeps the whole message
            self.message.CopyFrom(whole)
            del self.message.tool_calls[1:]

    def extension(self) -> dict[str, Any]:
        """Return the value of the field `fourfold`."""
        return {
            "token_ids": self.ids,
            "logprobs": [finite(value) for value in self.logprobs],
            "policy_versions": [{"policy_version": version, "token_count": count} for version, count in self.versions],
        }


class HttpTurn:
    """A turn while it runs. Closing the iterator of `chunks` aborts it."""

    def __init__(self, api: AgentApi, caller: Caller, options: TurnOptions, model: str) -> None:
        self.api, self.caller, self.options, self.model = api, caller, options, model
        request = options.request
        self.samples = [Answer(i) for i in range(request.sample_count)]
        self.prompt_tokens = len(request.token_ids.ids)
        self.created = int(time.time())
        self.id = secrets.token_hex(12)
        if options.stream:
            request.flush_interval.nanos = _FLUSH_NANOSECONDS

    async def chunks(self) -> AsyncGenerator[tuple[Answer, pb.TurnChunk], None]:
        """Yield each chunk and its sample, after the chunk was added to the sample.

        Raises:
            PeerFault: the turn ended before all its samples did.
            FourfoldError: the error of the gateway.
        """
        stream = self.api.generate(self.caller, self.options.request, timeout=TURN_SECONDS)
        try:
            async for chunk in stream:
                sample = self.samples[chunk.sample_index]
                sample.add(chunk)
                if self.options.single_call:
                    sample.drop_calls()
                self.prompt_tokens = chunk.prompt_token_count or self.prompt_tokens
                yield sample, chunk
        finally:
            if aclose := getattr(stream, "aclose", None):
                await aclose()
        if unfinished := [sample.index for sample in self.samples if not sample.finish]:
            raise PeerFault("gateway", "UNFINISHED_TURN", f"the turn ended without the end of samples {unfinished[:8]}")

    async def finish(self) -> None:
        """Run the turn to its end."""
        chunks = self.chunks()
        async for _ in chunks:
            pass

    @property
    def completion_tokens(self) -> int:
        return sum(len(sample.ids) for sample in self.samples)

    def usage(self) -> dict[str, int]:
        """Return the counts of tokens, as OpenAI's chat and completions name them."""
        completion = self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
        }


class TokenTexts:
    """Cache of the texts of single tokens, for lists of log-probabilities."""

    def __init__(self, api: AgentApi) -> None:
        self._api = api
        # At most one for each id of the vocabulary.
        self._texts: dict[int, str] = {}
        self._json: dict[int, str] = {}

    async def of(self, caller: Caller, ids: list[int]) -> list[str]:
        """Return the text of each token; empty for a special token."""
        for token in set(ids).difference(self._texts):
            self._texts[token] = (await self._api.detokenize(caller, pb.DetokenizeRequest(token_ids=[token]))).text
        return [self._texts[token] for token in ids]

    async def json_of(self, caller: Caller, ids: list[int]) -> list[str]:
        """Return the fields "token" and "bytes" of each token, as JSON without the braces of an object."""
        missing = list(set(ids).difference(self._json))
        for token, text in zip(missing, await self.of(caller, missing), strict=True):
            # The text of a token lacks the bytes of an incomplete character.
            fields = {"token": text, "bytes": list(self._api.token_bytes(token) if _PART in text else text.encode())}
            self._json[token] = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))[1:-1]
        return [self._json[token] for token in ids]


def finite(value: float) -> float:
    """Return a log-probability that JSON can hold: -9999 for minus infinity, as OpenAI does."""
    return max(value, -9999.0)


def parse_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a tool call as an object; {"_raw": text} when the model wrote none."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) and _encodes(value) else {"_raw": text}


def _encodes(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return False
    return True
