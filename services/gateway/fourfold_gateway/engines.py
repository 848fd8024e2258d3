"""Finds the engines of a gateway, watches them, and chooses one for each call.

    RunService.WatchRun, or a fixed list --> EnginePool --GetInfo, WatchLoad--> Engine
                                                |
    session's key --rendezvous hash--> engine with its prefix in the cache, or the next one if it has too much work

A usable engine has the tokenizer of the gateway and answered GetInfo lately. When a call fails, the engine gets no
calls for a while (`CircuitBreaker`). The same happens when a draining engine refuses a call. An engine that the
coordinator no longer lists loses its calls after `_ABSENT_SECONDS`, because a coordinator that restarts lists none.
While all engines are full, calls wait here, because an engine would refuse them and then get no calls for a while.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Final, Protocol, TypeVar

import grpc

from fourfold.coordinator.v1 import run_service_pb2 as run
from fourfold.errors import (
    AlreadyExists,
    DeadlinePassed,
    FourfoldError,
    Internal,
    NotFound,
    Overloaded,
    PermissionDenied,
    StaleEpoch,
    Unauthenticated,
    Unavailable,
    WrongState,
)
from fourfold.host.clock import SYSTEM_CLOCK, Clock
from fourfold.rollout.client import AsyncRolloutClient
from fourfold.rollout.load import EngineLoad, watch_load
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rpc.channel import open_channel
from fourfold.rpc.circuit_breaker import CircuitBreaker
from fourfold.security.access import ROLLOUT, Security
from fourfold.security.principal import Principal

_log = logging.getLogger("fourfold.gateway.engines")
T = TypeVar("T")

# Errors of an engine or of the connection to it: another engine may do the work. All other errors come from the
# request. NotFound, AlreadyExists and StaleEpoch are listed because an agent would read them as errors of its session.
ENGINE_ERRORS: Final = (
    Unavailable,
    Internal,
    Overloaded,
    DeadlinePassed,
    PermissionDenied,
    Unauthenticated,
    WrongState,
    NotFound,
    AlreadyExists,
    StaleEpoch,
)
_INSPECT_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = 0.5
_INFO_TIMEOUT_SECONDS: Final = 5.0
_ABSENT_SECONDS: Final = 10.0
# During a shorter update, calls wait in the engine.
_LONG_UPDATE_SECONDS: Final = 5.0
# Consistent hashing with bounded loads: the limit of an engine is `_LOAD_SHARE` times the mean load, and at least
# `_LEAST_LOAD` samples. Without that minimum, two sessions would be enough to exceed the limit.
_LOAD_SHARE: Final = 1.25
_LEAST_LOAD: Final = 8
_WAIT_STEP_SECONDS: Final = 0.1
_CALL_TRIES: Final = 3


class RunWatcher(Protocol):
    """The method of `AsyncCoordinatorClient` that is used here."""

    def watch_run(self) -> AsyncGenerator[run.RunStatus, None]: ...


class Engine:
    """One rollout service, as the gateway sees it."""

    def __init__(self, member_id: str, target: str, channel: grpc.aio.Channel, on_freed: Callable[[int], None]) -> None:
        self.member_id, self.target, self.channel = member_id, target, channel
        self._on_freed = on_freed  # called with the number of samples of a call that ended
        self.client = AsyncRolloutClient(channel, peer=f"{member_id} at {target}")
        self.load, self.breaker = EngineLoad(), CircuitBreaker()
        self.info: rollout.GetInfoResponse | None = None  # answer of a compatible engine; None: it gets no calls
        self.fault = "it did not answer yet"  # the reason why it gets no calls, for users
        self.in_flight = 0  # samples of this gateway in the engine
        self.absent_since: float | None = None  # time since which the coordinator does not list it; None: it is listed
        self.inspect = asyncio.Event()  # set to make the next inspection begin at once

    @property
    def policy_version(self) -> int:
        """Return the newest version that the engine has reported; 0 without a report."""
        reported = self.info.policy_version if self.info else 0
        return max(reported, self.load.report.policy_version)

    @property
    def samples(self) -> int:
        """Return the samples in the engine: those of this gateway, or all that it reports, if these are more."""
        return max(self.in_flight, self.load.report.running_sample_count)

    @contextmanager
    def call(self, samples: int) -> Iterator[None]:
        """Count a call in the load and in the breaker within the block."""
        self.in_flight += samples
        try:
            with self.breaker.in_flight():
                yield
        finally:
            self.in_flight -= samples
            self._on_freed(samples)

    def has_room(self, samples: int) -> bool:
        """Return whether the engine has room for the samples of a call, beside those that this gateway has there.

        A call always fits into an engine without samples: if it is too large, the engine's error says why.
        """
        capacity = self.info.max_concurrent_samples if self.info else 0
        return not samples or not capacity or not self.in_flight or self.in_flight + samples <= capacity

    def end_probe(self) -> None:
        """Admit further calls: the call that probes the engine has returned tokens, and may take minutes."""
        self.breaker.probing = False

    def healthy(self, now: float) -> bool:
        """Return whether a call would make progress soon, by the engine's load reports."""
        late = self.load.silent(now) or self.load.stalled(now)
        return not late and self.load.updating_for(now) <= _LONG_UPDATE_SECONDS and self.absent_since is None


class EnginePool:
    """The engines that a gateway knows. Use it from one event loop."""

    def __init__(
        self, *, tokenizer_sha256: bytes, vocabulary_size: int, security: Security | None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._tokenizer_sha256, self.vocabulary_size = tokenizer_sha256, vocabulary_size
        self._security, self.clock = security, clock
        self._engines: dict[str, Engine] = {}
        self._watches: dict[str, list[asyncio.Task[None]]] = {}
        self._waiting: deque[asyncio.Future[None]] = deque()  # calls that wait for room
        self._closing: set[asyncio.Task[None]] = set()
        self.failures = 0  # calls that failed for a reason of their engine
        self.continuations = 0  # samples that were continued on another engine, or on the same one later

    @property
    def engines(self) -> list[Engine]:
        return list(self._engines.values())

    @property
    def usable(self) -> list[Engine]:
        """Return the compatible engines, including those whose circuit breaker is open."""
        return [engine for engine in self._engines.values() if engine.info is not None]

    @property
    def policy_version(self) -> int:
        """Return the newest version that any engine serves; version 0 is the model folder."""
        return max((engine.policy_version for engine in self.usable), default=0)

    def max_context_tokens(self) -> int:
        """Return the smallest context length of the usable engines; 0 if there is none."""
        return min((engine.info.max_context_tokens for engine in self.usable if engine.info), default=0)

    def set_members(self, targets: Mapping[str, str], *, grace: bool = False) -> None:
        """Use the engines with these targets by member id; with `grace`, drop missing ones only after some time."""
        now = self.clock.monotonic()
        for member_id, engine in list(self._engines.items()):
            if targets.get(member_id, engine.target) != engine.target or (member_id not in targets and not grace):
                self._drop(engine)
            elif member_id in targets:
                engine.absent_since = None
            elif engine.absent_since is None:
                engine.absent_since = now
        for member_id, target in targets.items():
            if member_id not in self._engines:
                self._add(member_id, target)

    async def follow(self, coordinator: RunWatcher) -> None:
        """Keep the engines equal to the rollout members of a run, until cancelled."""
        failed = False
        while True:
            try:
                async with aclosing(coordinator.watch_run()) as statuses:
                    async for status in statuses:
                        failed = False
                        members = [m for m in status.members if m.role == "rollout"]
                        self.set_members({m.member_id: m.target for m in members}, grace=True)
            except FourfoldError as error:
                if not failed:  # log only the first of a series
                    _log.warning("the list of engines cannot be read; the known ones stay in use: %s", error)
                failed = True
            await self.clock.sleep(1.0)

    async def close(self) -> None:
        """Close all connections; calls in flight raise Unavailable."""
        for engine in self.engines:
            self._drop(engine)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def choose(
        self, key: str, *, samples: int = 1, without: Collection[Engine] = (), min_version: int = 0
    ) -> Engine | None:
        """Return the engine for a call; None: no engine may get a call now.

        Args:
            key: calls with equal keys go to the same engine until its load exceeds the limit.
            samples: of the call; engines without room for them get none.
            without: engines to leave out, because they failed.
            min_version: engines that serve it are preferred. The other reports may be out of date.
        """
        now = self.clock.monotonic()
        found = [e for e in self.usable if e not in without and e.breaker.admits(now) and e.has_room(samples)]
        found = [e for e in found if e.healthy(now)] or found
        found = [e for e in found if e.policy_version >= min_version] or found
        if not found:
            return None
        mean = (sum(e.samples for e in found) + samples) / len(found)
        limit = max(_LEAST_LOAD, math.ceil(_LOAD_SHARE * mean))
        for engine in sorted(found, key=lambda e: _weight(key, e.member_id), reverse=True):
            capacity = engine.info.max_concurrent_samples if engine.info else 0
            if engine.samples + samples <= min(limit, capacity or limit):
                return engine
        return min(found, key=lambda e: e.samples)

    async def wait(
        self, key: str, *, seconds: float, samples: int = 1, without: Collection[Engine] = (), min_version: int = 0
    ) -> Engine:
        """Return the engine for a call; wait for one if none may get it now.

        Engines in `without` are used when no other is left.

        Raises:
            Unavailable: no engine came within `seconds`.
            Overloaded: no engine had room within `seconds`.
        """
        end = self.clock.monotonic() + seconds
        while True:
            for tried in (without, ()):
                engine = self.choose(key, samples=samples, without=tried, min_version=min_version)
                if engine is not None:
                    return engine
            if self.clock.monotonic() >= end:
                if self.usable and not any(e.has_room(samples) for e in self.usable):
                    raise Overloaded(self._how_full(), reason="TOO_MANY_SAMPLES", retry_after=1.0)
                raise Unavailable(self._why_none(), reason="NO_ENGINE", retry_after=1.0)
            await self._room_or_step()

    async def _room_or_step(self) -> None:
        """Wait until a call of this gateway has ended and may have made room; at most `_WAIT_STEP_SECONDS`."""
        freed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(freed)
        step = asyncio.ensure_future(self.clock.sleep(_WAIT_STEP_SECONDS))
        try:
            await asyncio.wait({freed, step}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            step.cancel()
            if not freed.done():
                self._waiting.remove(freed)

    def _wake(self, samples: int) -> None:
        """Let one waiting call try again for each sample that ended, the oldest first."""
        for _ in range(min(samples, len(self._waiting))):
            self._waiting.popleft().set_result(None)

    async def call(self, key: str, work: Callable[[AsyncRolloutClient], Awaitable[T]], *, timeout: float) -> T:
        """Return the result of a unary call that any engine can answer; try others when one fails.

        Raises:
            FourfoldError: the error of the last try, or an error of the request itself.
        """
        tried: list[Engine] = []
        end = self.clock.monotonic() + timeout
        while True:
            engine = await self.wait(key, seconds=min(timeout, 5.0), samples=0, without=tried)
            try:
                with engine.call(0):
                    result = await work(engine.client)
            except ENGINE_ERRORS as error:
                self.record_failure(engine, error)
                tried.append(engine)
                if len(tried) >= _CALL_TRIES or self.clock.monotonic() >= end or isinstance(error, WrongState):
                    raise caller_error(error) from error
                continue
            engine.breaker.record_success()
            return result

    def record_failure(self, engine: Engine, error: FourfoldError) -> None:
        """Record a failed call: open the engine's circuit breaker and inspect the engine again."""
        if isinstance(error, WrongState):
            return  # not a failure; for example, the policy is too old
        self.failures += 1
        engine.breaker.record_failure(error, self.clock.monotonic())
        engine.breaker.first = None  # the traceback would keep the turn in memory until a call succeeds
        if not isinstance(error, Overloaded):
            engine.inspect.set()

    # -- members ------------------------------------------------------------------------------------------------------

    def _add(self, member_id: str, target: str) -> None:
        server = Principal("rollout", member_id) if member_id != target else ROLLOUT
        try:
            channel = open_channel(target, self._security, server=server)
        except FourfoldError as error:  # the coordinator reported an invalid target
            _log.error("engine cannot be used: member=%s error=%s", member_id, error)
            return
        engine = self._engines[member_id] = Engine(member_id, target, channel, self._wake)
        self._watches[member_id] = [
            asyncio.create_task(self._inspect(engine)),
            asyncio.create_task(watch_load(engine.client, engine.load, self.clock)),
        ]
        _log.info("engine found: member=%s target=%s", member_id, target)

    def _drop(self, engine: Engine) -> None:
        del self._engines[engine.member_id]
        engine.info, engine.fault = None, "it has left"
        for task in self._watches.pop(engine.member_id):
            task.cancel()
        # Calls in flight raise Unavailable and continue on other engines.
        closing = asyncio.create_task(engine.channel.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        _log.info("engine dropped: member=%s target=%s", engine.member_id, engine.target)

    async def _inspect(self, engine: Engine) -> None:
        """Call GetInfo regularly and after failures; remove an engine that the coordinator has not listed for long."""
        while True:
            now = self.clock.monotonic()
            if engine.absent_since is not None and now - engine.absent_since > _ABSENT_SECONDS:
                return self._drop(engine)
            engine.inspect.clear()
            try:
                info = await engine.client.get_info(timeout=_INFO_TIMEOUT_SECONDS)
                self._take_info(engine, info)
            except FourfoldError as error:
                engine.info, engine.fault = None, str(error)
            wait = _RETRY_SECONDS if engine.info is None else _INSPECT_SECONDS
            try:
                async with asyncio.timeout(wait):
                    await engine.inspect.wait()
                await self.clock.sleep(_RETRY_SECONDS)  # failures at the same time cause one inspection
            except TimeoutError:
                continue

    def _take_info(self, engine: Engine, info: rollout.GetInfoResponse) -> None:
        fault = ""
        if info.tokenizer_sha256 != self._tokenizer_sha256:
            fault = "its tokenizer differs from that of the recipe's model; start both with one model.source"
        elif info.vocabulary_size < 1 or info.max_context_tokens < 2:
            fault = (
                f"it reports vocabulary_size {info.vocabulary_size} and max_context_tokens {info.max_context_tokens}; "
                f"they must be at least 1 and 2"
            )
        if fault and fault != engine.fault:
            _log.error("engine cannot be used: member=%s reason=%s", engine.member_id, fault)
        engine.info, engine.fault = (None, fault) if fault else (info, "")

    def _how_full(self) -> str:
        held = ", ".join(
            f"{e.in_flight} of {e.info.max_concurrent_samples} samples in {e.member_id}"
            for e in self.usable[:3]
            if e.info
        )
        return f"all engines are full ({held}); try again later, or raise rollout.max_concurrent_samples"

    def _why_none(self) -> str:
        if not self._engines:
            return "no engine is known; start a rollout service of this run, and try again"
        faults = [f"{e.client.peer}: {e.fault or 'its calls failed, it rests'}" for e in self.engines[:3]]
        return f"no engine serves now ({'; '.join(faults)}); try again later"


def caller_error(error: FourfoldError) -> FourfoldError:
    """Return an engine's error as one for an agent, without details of identities or responses inside the run."""
    if isinstance(error, Overloaded | WrongState | DeadlinePassed):
        if isinstance(error, Overloaded) and error.retry_after is None:  # the engine broke the contract
            error.retry_after = 1.0
        return error
    return Unavailable(
        f"no engine finished the call; the last error was {error.reason}; try again later",
        reason="ENGINE_FAILED",
        retry_after=error.retry_after or 1.0,
    )


def _weight(key: str, member_id: str) -> bytes:
    return hashlib.blake2b(f"{key}/{member_id}".encode(), digest_size=8).digest()
