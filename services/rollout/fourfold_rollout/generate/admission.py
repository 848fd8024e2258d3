"""Checks Generate requests and limits the samples and tokens in flight.

`parse` turns a request into a checked `GenerateCall`; `Admission` keeps the limits over all
calls in flight. Tokens count at their worst case, prompt plus max_tokens: most samples stop
earlier, so that twice what the KV cache holds may be promised, and the engine's queue never
holds more than that.

Agents together get a part of the samples and of the tokens; the coordinator may use everything that is free. So the
rest is always there for it, whatever agents do. Each principal has request ids of its own.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from fourfold.config.table import MIN_TEMPERATURE
from fourfold.errors import AlreadyExists, InvalidInput, Overloaded, PermissionDenied
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.rpc.codec import check_id
from fourfold.rpc.limits import Quotas
from fourfold.security.principal import Principal
from fourfold_rollout.engine import SampleRequest, SampleSink

MAX_SAMPLES_PER_CALL: Final = 256
_MAX_STOP_TOKENS: Final = 64
_MAX_SEED: Final = 2**53
_MAX_FLUSH_SECONDS: Final = 10.0
# Below this interval each token is sent at once: polling so often would cost more.
_PULL_SECONDS: Final = 0.01
_TOKENS_PROMISED_PER_CACHED: Final = 2
_RETRY_SECONDS: Final = 0.5
_SUPERSEDE_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateLimits:
    """What bounds every call."""

    max_context_tokens: int
    vocabulary_size: int
    max_concurrent_samples: int
    kv_cache_tokens: int
    """0: not known, no limit on tokens."""
    stop_token_ids: tuple[int, ...]
    """The model's own."""
    agent_samples: int | None = None
    """Of `max_concurrent_samples`, what agents together may use; None: all."""
    agent_token_share: float = 1.0
    """Share of the tokens that agents together may be promised."""

    def max_samples(self, caller: Principal) -> int:
        """Return the samples in flight that the callers of this one's kind may have together."""
        if self.agent_samples is None or not caller.is_agent:
            return self.max_concurrent_samples
        return self.agent_samples

    def max_tokens(self, caller: Principal) -> float:
        """Return the tokens in flight that the callers of this one's kind may have together."""
        share = self.agent_token_share if caller.is_agent else 1.0
        return self.kv_cache_tokens * _TOKENS_PROMISED_PER_CACHED * share or math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """A checked GenerateRequest with every default filled in."""

    caller: Principal
    request_id: str
    """Unique among the calls of its caller that are in flight."""
    prompt_token_ids: list[int]
    sample_count: int
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int
    min_policy_version: int
    flush_seconds: float | None
    """None: a sample is sent once, when it is finished."""

    @property
    def at_once(self) -> bool:
        """Whether tokens are sent as they come."""
        return self.flush_seconds is not None and self.flush_seconds < _PULL_SECONDS

    @property
    def pull_seconds(self) -> float | None:
        """How often its samples are asked for what they have; None: never."""
        return None if self.at_once else self.flush_seconds

    @property
    def token_count(self) -> int:
        """Tokens of all samples at their longest."""
        return self.sample_count * (len(self.prompt_token_ids) + self.max_tokens)

    def samples(self, cache_salt: str, sink: SampleSink) -> list[SampleRequest]:
        """Return the engine's requests, in index order."""
        return [
            SampleRequest(
                # Two callers may use the same request id; neither a role nor a name has a slash.
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
            )
            for index in range(self.sample_count)
        ]


def parse(request: pb.GenerateRequest, limits: GenerateLimits, caller: Principal) -> GenerateCall:
    """Check a request and fill in its defaults.

    Raises:
        InvalidInput: value, rule, fix.
        PermissionDenied: agents may not sample here.
    """
    most_samples = limits.max_samples(caller)
    if not most_samples:
        raise PermissionDenied(
            f"agents may not sample here: all {limits.max_concurrent_samples} samples are reserved for the run; raise "
            f"rollout.max_concurrent_samples, or lower rollout.agents.coordinator_share"
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
    )
    if caller.is_agent and limits.agent_token_share < 1 and call.token_count > limits.max_tokens(caller):
        raise InvalidInput(
            f"the call asks for {call.token_count} tokens (sample_count times prompt plus max_tokens) and agents may "
            f"have {limits.max_tokens(caller):.0f} in flight together; lower sample_count or max_tokens"
        )
    return call


@dataclass(frozen=True, slots=True)
class _Place:
    """One call in flight."""

    owner: asyncio.Task[Any] | None
    left: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _InFlight:
    """What the calls of some callers use."""

    samples: int = 0
    tokens: int = 0

    def add(self, call: GenerateCall, sign: int) -> None:
        self.samples += sign * call.sample_count
        self.tokens += sign * call.token_count


class Admission:
    """Counts what is in flight. Belongs to one event loop."""

    def __init__(self, limits: GenerateLimits, quotas: Quotas) -> None:
        """Start with nothing in flight.

        Args:
            limits: of the service.
            quotas: of each caller; the server counts calls with the same object.
        """
        self._limits = limits
        self._quotas = quotas
        self._live: dict[tuple[Principal, str], _Place] = {}
        self._agents = _InFlight()
        self._others = _InFlight()
        self._empty = asyncio.Event()
        self._empty.set()

    async def wait_empty(self, timeout: float) -> bool:
        """Wait until no call is in flight; False when some still are after `timeout` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._empty.wait()
        return self._empty.is_set()

    @asynccontextmanager
    async def enter(self, call: GenerateCall, *, is_retry: bool) -> AsyncIterator[None]:
        """Hold a call's place while its samples are in flight.

        Args:
            call: the call.
            is_retry: gRPC says that its client has tried before: the caller's old call with this id is dead even
                where this side has not noticed yet, and makes room.

        Raises:
            AlreadyExists: the request id is live.
            Overloaded: no room now.
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
            place = self._live[key] = _Place(asyncio.current_task())
            self._empty.clear()
            kind.add(call, 1)
            try:
                yield
            finally:
                kind.add(call, -1)
                del self._live[key]
                place.left.set()
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
        # The only call always fits, the engine serves it bit by bit; but not where it would take what is reserved.
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
        place = self._live.get(key)
        if place is None:
            return
        if place.owner is not None and not place.owner.cancelling():  # else it waits already until its samples end
            place.owner.cancel()
        with suppress(TimeoutError):  # still live then, and `enter` says so
            async with asyncio.timeout(_SUPERSEDE_SECONDS):
                await place.left.wait()


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
    array = np.asarray(ids, np.int32)  # a prompt may have 100,000 tokens, and the event loop must not stand still
    bad = array[(array < 0) | (array >= limits.vocabulary_size)]
    if bad.size:
        raise InvalidInput(
            f"{what} holds {bad[0]}, which is outside the vocabulary [0, {limits.vocabulary_size}); encode with the "
            f"tokenizer of this model (GetInfo gives its hash)"
        )


def _temperature(params: pb.SamplingParams) -> float:
    value = params.temperature if params.HasField("temperature") else 1.0
    if value == np.float32(MIN_TEMPERATURE):
        return MIN_TEMPERATURE  # on the wire it is a little less
    if not (value == 0 or MIN_TEMPERATURE <= value <= 2):
        raise InvalidInput(
            f"sampling_params.temperature is {value:g}; it must be in [{MIN_TEMPERATURE}, 2], or 0 for greedy: what is "
            f"between, the engine would take for {MIN_TEMPERATURE}"
        )
    return value


def _top_p(params: pb.SamplingParams) -> float:
    value = params.top_p if params.HasField("top_p") else 1.0
    if not 0 < value <= 1:
        raise InvalidInput(f"sampling_params.top_p is {value}; it must be in (0, 1], 1 for all tokens")
    return value


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
