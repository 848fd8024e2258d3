"""Checks Generate requests and limits the samples and tokens in flight.

`parse` turns a request into a checked `GenerateCall`; `Admission` enforces the limits on all calls in flight. All
agents together may use a part of the samples and tokens; the coordinator may use everything that is free.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from fourfold.bounds import MAX_SAMPLES_PER_CALL, MAX_SCORED_TOKENS
from fourfold.config.table import MIN_TEMPERATURE
from fourfold.errors import AlreadyExists, InvalidInput, Overloaded, PermissionDenied
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.rpc.codec import check_id
from fourfold.rpc.limits import Quotas
from fourfold.security.principal import Principal
from fourfold_rollout.engine import GrammarConstraint, SampleRequest, SampleSink

_MAX_STOP_TOKENS: Final = 64
_MAX_SEED: Final = 2**53
_MAX_FLUSH_SECONDS: Final = 10.0
# Below this interval, send each token at once: flushing so often would cost more.
_SHORTEST_FLUSH_SECONDS: Final = 0.01
# With this interval or a longer one, a call starts like a call without flushes, so that its tokens are the same.
_LONG_FLUSH_SECONDS: Final = 1.0
# A sample counts with its largest length, prompt plus max_tokens. Most stop earlier, so the limit is twice the cache.
_TOKENS_PROMISED_PER_CACHED: Final = 2
_MAX_GRAMMAR_BYTES: Final = 64 << 10
_RETRY_SECONDS: Final = 0.5
_SUPERSEDE_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateLimits:
    """The limits of one service on calls and on all samples in flight."""

    max_context_tokens: int
    vocabulary_size: int
    max_concurrent_samples: int
    kv_cache_tokens: int  # 0: not known, so tokens are not limited
    stop_token_ids: tuple[int, ...]  # the model's own
    agent_samples: int | None = None  # the part of `max_concurrent_samples` for all agents together; None: all
    agent_token_share: float = 1.0  # the part of the tokens for all agents together

    def max_samples(self, caller: Principal) -> int:
        """Return the limit on samples in flight of the caller's kind: all agents, or all other callers."""
        if self.agent_samples is None or not caller.is_agent:
            return self.max_concurrent_samples
        return self.agent_samples

    def max_tokens(self, caller: Principal) -> float:
        """Return the limit on tokens in flight of the caller's kind; see `max_samples`."""
        share = self.agent_token_share if caller.is_agent else 1.0
        return self.kv_cache_tokens * _TOKENS_PROMISED_PER_CACHED * share or math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """A checked GenerateRequest with every default filled in."""

    caller: Principal
    request_id: str  # unique among the calls of its caller that are in flight
    prompt_token_ids: list[int]
    sample_count: int
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int
    min_policy_version: int
    flush_seconds: float | None  # None: a sample is sent once, when it is finished
    grammar: GrammarConstraint | None = None

    @property
    def grammar_prefix(self) -> list[int]:
        """The tokens of the prompt that the grammar has accepted already."""
        count = self.grammar.prefix_count if self.grammar is not None else 0
        return self.prompt_token_ids[len(self.prompt_token_ids) - count :]

    @property
    def at_once(self) -> bool:
        """Return true if tokens are sent as they come."""
        return self.flush_seconds is not None and self.flush_seconds < _SHORTEST_FLUSH_SECONDS

    @property
    def interactive(self) -> bool:
        """Return true if a reader waits for the first token."""
        return self.flush_seconds is not None and self.flush_seconds < _LONG_FLUSH_SECONDS

    @property
    def token_count(self) -> int:
        """The tokens of all samples at their greatest length, prompts included."""
        return self.sample_count * (len(self.prompt_token_ids) + self.max_tokens)

    def samples(self, cache_salt: str, sink: SampleSink) -> list[SampleRequest]:
        return [
            SampleRequest(
                # Two callers may use the same request id. Neither a role nor a name contains a slash.
                key=f"{self.caller}/{self.request_id}-{index}",
                prompt_token_ids=self.prompt_token_ids,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                max_tokens=self.max_tokens,
                stop_token_ids=self.stop_token_ids,
                seed=self.seed + index,
                cache_salt=cache_salt,
                streaming=self.at_once,
                sink=sink,
                index=index,
                grammar=self.grammar,
            )
            for index in range(self.sample_count)
        ]


def parse(request: pb.GenerateRequest, limits: GenerateLimits, caller: Principal) -> GenerateCall:
    """Check a request and fill in its defaults.

    Raises InvalidInput: a field is out of its range. Raises PermissionDenied: agents may not sample here.
    """
    most_samples = limits.max_samples(caller)
    if not most_samples:
        raise PermissionDenied(
            f"agents may not sample here: all {limits.max_concurrent_samples} samples are reserved for the run; raise "
            f"rollout.max_concurrent_samples"
        )
    request_id = check_id(request.request_id, "request_id")
    prompt = _prompt(request, limits)
    params = request.sampling_params
    count = request.sample_count if request.HasField("sample_count") else 1
    _check_range("sample_count", count, 1, min(MAX_SAMPLES_PER_CALL, most_samples))
    max_tokens = limits.max_context_tokens - len(prompt)
    if params.HasField("max_tokens"):
        _check_range("sampling_params.max_tokens", params.max_tokens, 1, None)
        max_tokens = min(max_tokens, params.max_tokens)
    if params.HasField("top_k"):
        _check_range("sampling_params.top_k", params.top_k, 1, None)
    if params.HasField("seed"):
        _check_range("sampling_params.seed", params.seed, 0, _MAX_SEED - 1)
    _check_range("min_policy_version", request.min_policy_version, 0, None)
    call = GenerateCall(
        caller=caller,
        request_id=request_id,
        prompt_token_ids=prompt,
        sample_count=count,
        temperature=_temperature(params),
        top_p=_top_p(params),
        top_k=min(params.top_k, limits.vocabulary_size),
        max_tokens=max_tokens,
        stop_token_ids=_stop_token_ids(params, limits),
        seed=params.seed if params.HasField("seed") else secrets.randbelow(_MAX_SEED),
        min_policy_version=request.min_policy_version,
        flush_seconds=_flush_seconds(request),
        grammar=_grammar(request, len(prompt)),
    )
    if caller.is_agent and limits.agent_token_share < 1 and call.token_count > limits.max_tokens(caller):
        raise InvalidInput(
            f"the call asks for {call.token_count} tokens (sample_count times prompt plus max_tokens) and agents may "
            f"have {limits.max_tokens(caller):.0f} in flight together; lower sample_count or max_tokens"
        )
    return call


def parse_score(request: pb.ScoreTokensRequest, limits: GenerateLimits, caller: Principal) -> GenerateCall:
    """Check a request for log-probabilities; it counts as a sample of one token. Errors as of `parse`."""
    ids, most = request.token_ids, min(MAX_SCORED_TOKENS, limits.max_context_tokens - 1)
    if not 2 <= len(ids) <= most:
        raise InvalidInput(f"token_ids has {len(ids)} tokens; it must have 2 to {most}, fewer than the context")
    counted = pb.GenerateRequest(request_id=f"score-{uuid.uuid4().hex}", prompt_token_ids=ids)
    counted.sampling_params.max_tokens = 1
    return parse(counted, limits, caller)


@dataclass(frozen=True, slots=True)
class _LiveCall:
    owner: asyncio.Task[Any] | None
    left: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _InFlight:
    """The samples and tokens in flight of one kind of caller."""

    samples: int = 0
    tokens: int = 0

    def add(self, call: GenerateCall, sign: int) -> None:
        self.samples += sign * call.sample_count
        self.tokens += sign * call.token_count


class Admission:
    """Admits calls within the limits on samples and tokens in flight. Belongs to one event loop.

    `quotas` are the limits of each caller; the server counts calls with the same object.
    """

    def __init__(self, limits: GenerateLimits, quotas: Quotas) -> None:
        self._limits = limits
        self._quotas = quotas
        self._live: dict[tuple[Principal, str], _LiveCall] = {}
        self._agents = _InFlight()
        self._others = _InFlight()
        self._empty = asyncio.Event()
        self._empty.set()

    async def wait_empty(self, timeout: float) -> bool:
        """Wait until no call is in flight; return False if some still are after `timeout` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._empty.wait()
        return self._empty.is_set()

    @asynccontextmanager
    async def enter(self, call: GenerateCall, *, is_retry: bool) -> AsyncIterator[None]:
        """Count a call as in flight.

        `is_retry`: gRPC's metadata mark the call as a retry. The caller's earlier call with this id is dead, even if
        the server has not noticed it yet, and is cancelled.

        Raises:
            AlreadyExists: a call with this request id is in flight.
            Overloaded: the call does not fit into the limits now.
        """
        key = (call.caller, call.request_id)
        if is_retry:
            await self._supersede(key)
        if key in self._live:
            raise AlreadyExists(
                f"request_id {call.request_id!r} is in flight; give every call an id of its own, or wait for the first"
            )
        kind = self._agents if call.caller.is_agent else self._others
        self._check_room(call, kind)
        with self._quotas.tokens(call.caller, call.token_count):
            live = self._live[key] = _LiveCall(asyncio.current_task())
            self._empty.clear()
            kind.add(call, 1)
            try:
                yield
            finally:
                kind.add(call, -1)
                del self._live[key]
                live.left.set()
                if not self._live:
                    self._empty.set()

    def _check_room(self, call: GenerateCall, kind: _InFlight) -> None:
        limits, total = self._limits, self._agents.samples + self._others.samples
        most = limits.max_samples(call.caller)
        for used, limit in ((kind.samples, most), (total, limits.max_concurrent_samples)):
            if used + call.sample_count > limit:
                raise Overloaded(
                    f"{used} samples are in flight and {call.sample_count} more would pass the limit of "
                    f"{limit}{_whose(limit < limits.max_concurrent_samples)} (rollout.max_concurrent_samples); try "
                    f"again, or another replica",
                    reason="TOO_MANY_SAMPLES",
                    retry_after=_RETRY_SECONDS,
                )
        everything = limits.kv_cache_tokens * _TOKENS_PROMISED_PER_CACHED or math.inf
        own = limits.max_tokens(call.caller)
        # A single call always fits, because the engine preempts its samples. But it may not use the reserved part.
        if not kind.samples and own == everything and (not total or kind is self._others):
            return
        for used, tokens in ((kind.tokens, own), (self._agents.tokens + self._others.tokens, everything)):
            if used + call.token_count > tokens:
                raise Overloaded(
                    f"{used} tokens are promised to calls in flight and {call.token_count} more would pass the "
                    f"limit of {tokens:.0f}{_whose(tokens < everything)}; try again, lower max_tokens, or give the "
                    f"engine a larger KV cache",
                    reason="TOO_MANY_TOKENS",
                    retry_after=_RETRY_SECONDS,
                )

    async def _supersede(self, key: tuple[Principal, str]) -> None:
        live = self._live.get(key)
        if live is None:
            return
        if live.owner is not None and not live.owner.cancelling():  # otherwise it already waits until its samples end
            live.owner.cancel()
        with suppress(TimeoutError):  # the call is still live then, and `enter` raises AlreadyExists
            async with asyncio.timeout(_SUPERSEDE_SECONDS):
                await live.left.wait()


def _whose(of_agents: bool) -> str:
    return " for agents" if of_agents else ""


def _prompt(request: pb.GenerateRequest, limits: GenerateLimits) -> list[int]:
    ids = request.prompt_token_ids
    if not ids:
        raise InvalidInput("prompt_token_ids is empty; send at least one token, such as the model's bos token")
    if len(ids) >= limits.max_context_tokens:
        raise InvalidInput(
            f"prompt_token_ids has {len(ids)} tokens; it must be shorter than the context of "
            f"{limits.max_context_tokens} tokens: shorten the prompt or raise model.max_context_tokens"
        )
    _check_ids("prompt_token_ids", ids, limits)
    return list(ids)


def _stop_token_ids(params: pb.SamplingParams, limits: GenerateLimits) -> tuple[int, ...]:
    ids = params.stop_token_ids
    if len(ids) > _MAX_STOP_TOKENS:
        raise InvalidInput(f"sampling_params.stop_token_ids has {len(ids)} ids; at most {_MAX_STOP_TOKENS} are allowed")
    _check_ids("sampling_params.stop_token_ids", ids, limits)
    return tuple(dict.fromkeys((*limits.stop_token_ids, *ids)))


def _check_ids(what: str, ids: Sequence[int], limits: GenerateLimits) -> None:
    array = np.asarray(ids, np.int32)  # NumPy: a loop over a prompt of 100,000 tokens would block the event loop
    bad = array[(array < 0) | (array >= limits.vocabulary_size)]
    if bad.size:
        raise InvalidInput(
            f"{what} holds {bad[0]}, which is outside the vocabulary [0, {limits.vocabulary_size}); encode with the "
            f"tokenizer of this model (GetInfo gives its hash)"
        )


def _temperature(params: pb.SamplingParams) -> float:
    value = params.temperature if params.HasField("temperature") else 1.0
    if value == np.float32(MIN_TEMPERATURE):
        return MIN_TEMPERATURE  # the float32 on the wire is slightly smaller
    if not (value == 0 or MIN_TEMPERATURE <= value <= 2):
        raise InvalidInput(
            f"sampling_params.temperature is {value:g}; it must be in [{MIN_TEMPERATURE}, 2], or 0 for greedy: the "
            f"engine would raise a value between them to {MIN_TEMPERATURE}"
        )
    return value


def _top_p(params: pb.SamplingParams) -> float:
    value = params.top_p if params.HasField("top_p") else 1.0
    if not 0 < value <= 1:
        raise InvalidInput(f"sampling_params.top_p is {value}; it must be in (0, 1], 1 for all tokens")
    return value


def _grammar(request: pb.GenerateRequest, prompt_count: int) -> GrammarConstraint | None:
    grammar, prefix_count = request.sampling_params.grammar, request.grammar_prefix_count
    if not request.sampling_params.HasField("grammar"):
        if prefix_count:
            raise InvalidInput(f"grammar_prefix_count is {prefix_count} and there is no grammar; set both, or none")
        return None
    kind = grammar.WhichOneof("kind")
    if kind is None:
        raise InvalidInput("sampling_params.grammar is empty; set one of its fields, or leave it out")
    text = str(getattr(grammar, kind))
    size = len(text.encode())
    if not 0 < size <= _MAX_GRAMMAR_BYTES:
        raise InvalidInput(f"sampling_params.grammar has {size} bytes; it must have 1 to {_MAX_GRAMMAR_BYTES}")
    if "\0" in text:
        raise InvalidInput("sampling_params.grammar contains a NUL character; remove it")
    if not 0 <= prefix_count < prompt_count:
        raise InvalidInput(
            f"grammar_prefix_count is {prefix_count}; it must be in [0, {prompt_count - 1}], fewer than the prompt has"
        )
    return GrammarConstraint(kind=kind, text=text, prefix_count=prefix_count)


def _flush_seconds(request: pb.GenerateRequest) -> float | None:
    if not request.HasField("flush_interval"):
        return None
    seconds = request.flush_interval.ToNanoseconds() / 1e9
    if not 0 <= seconds <= _MAX_FLUSH_SECONDS:
        raise InvalidInput(f"flush_interval is {seconds} s; it must be in [0, {_MAX_FLUSH_SECONDS:g}] s, or unset")
    return seconds


def _check_range(what: str, value: int, low: int, high: int | None) -> None:
    if value < low or (high is not None and value > high):
        rule = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise InvalidInput(f"{what} is {value}; it must be {rule}")
