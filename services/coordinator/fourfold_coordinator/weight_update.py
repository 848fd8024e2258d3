"""One weight update, as a transaction: every engine serves the new version, or none does.

    epoch (once per membership)   MakeOffer(trainer) -> OpenWeights(trainer and engines at once)
    version (every update)        Begin(engines) -> Send(trainer) and Receive(engines) at once
                                  -> the same digest from all -> probe -> Commit(engines)
    any error                     Abort(all): an engine serves its old version again, or is dirty

The bytes never come here: offers are opaque and handed over, digests are compared. Every call
carries a deadline that its worker keeps, too.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from fourfold.config import Config
from fourfold.errors import NO_BACKEND, FourfoldError, Internal, StaleEpoch, WrongState
from fourfold.rollout.v1 import rollout_control_service_pb2 as control
from fourfold.trainer.v1 import trainer_weight_service_pb2 as weight
from fourfold.wire import Float32Array

from .probe import Key, Probe
from .replica import Replica
from .routing import LOOK_SECONDS
from .trainer_session import TrainerRestarted, TrainerSession

log = logging.getLogger("fourfold.coordinator")

T = TypeVar("T")

_ABORT_SECONDS: Final = 15.0
# After the first failure of a phase the others get this long to fail, too: it tells who is to blame.
_BLAME_SECONDS: Final = 1.0
_PAUSE: Final = {"wait": control.PAUSE_MODE_WAIT, "abort": control.PAUSE_MODE_ABORT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A replica and what it says of itself."""

    replica: Replica
    about: control.DescribeEngineResponse

    @property
    def key(self) -> Key:
        """Name and incarnation."""
        return self.replica.key


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What a weight update came to."""

    seconds: float = 0.0
    pause_seconds: float = 0.0
    probe_diffs: tuple[tuple[float, float], ...] = ()
    """Mean and largest |trainer - engine| on the probe, in nats, of every engine."""


class UpdateFailed(Exception):
    """An update was given up.

    `engines` failed, by name and incarnation; `trainer` is its error, when it failed. Engines that are in neither
    are well.
    """

    def __init__(self, engines: Mapping[Key, FourfoldError], trainer: FourfoldError | None = None) -> None:
        super().__init__("; ".join(str(error) for error in (*engines.values(), trainer) if error is not None))
        self.engines = dict(engines)
        self.trainer = trainer


class WeightUpdater:
    """Runs updates, and keeps the epoch open between those of the same members."""

    def __init__(self, config: Config, session: TrainerSession, probe: Probe) -> None:
        self._config = config
        self._session = session
        self._probe = probe
        # Epochs grow over coordinators, too: an engine may have seen those of an earlier one.
        self._epoch = int(time.time())
        self._members: tuple[object, ...] | None = None  # of the open epoch
        self.filled: dict[Key, int] = {}
        """Version of ours that an engine holds, by engine: verified, and perhaps committed."""

    async def run(self, engines: Sequence[Engine], version: int) -> Update:
        """Bring `engines` to `version`, which the trainer holds.

        Raises:
            UpdateFailed: names the engines to blame; the update was aborted at all.
            TrainerRestarted: the weights are lost.
        """
        began = time.monotonic()
        committing = False
        try:
            await self._join(engines)
            paused = time.monotonic()
            end = paused + self._config.weights.timeout_seconds
            await self._begin(engines, version, end)
            await self._transfer(engines, version, end)
            probes = await self.look(engines, version, timeout=_left(end))
            self.filled |= {engine.key: version for engine in engines}
            committing = True
        finally:
            if not committing:
                await self._abort(engines)
        await self._commit(engines, version, probes, end)
        done = time.monotonic()
        return Update(
            seconds=done - began,
            pause_seconds=done - paused,
            probe_diffs=tuple((mean, largest) for mean, largest, _ in probes.values()),
        )

    async def look(
        self, engines: Sequence[Engine], version: int, *, timeout: float
    ) -> dict[Key, tuple[float, float, Float32Array]]:
        """Compare the probe of engines that hold `version`: mean and largest difference, and the engine's values.

        Raises:
            UpdateFailed: names the engines whose probe differs or is stale.
        """
        if not self._probe.knows(version):
            rows = await self._session.call(
                "probe", lambda r: r.trainer.compute_logprobs([self._probe.sample()], timeout=timeout)
            )
            self._probe.trainer(version, rows[0])
        values = await at_once(
            {e.key: e.replica.control.probe(self._probe.token_ids, timeout=timeout) for e in engines}
        )
        results: dict[Key, tuple[float, float, Float32Array]] = {}
        bad: dict[Key, FourfoldError] = {}
        for key, logprobs in values.items():
            try:
                results[key] = (*self._probe.compare(key, version, logprobs), logprobs)
            except WrongState as error:
                bad[key] = error
        if bad:
            raise UpdateFailed(bad)
        return results

    async def _join(self, engines: Sequence[Engine]) -> None:
        """Open an epoch with these engines, unless it is open."""
        timeout = self._config.weights.timeout_seconds
        layout = await self._session.call("GetManifest", lambda r: r.weights.get_manifest(timeout=LOOK_SECONDS))
        manifest, sha256 = layout.manifest, layout.manifest_sha256
        if hashlib.sha256(manifest).digest() != sha256:
            raise UpdateFailed({}, Internal("the trainer's manifest does not have the digest that it names"))
        backend = choose_backend(self._config.weights.backend, layout, engines)
        members = (self._session.incarnation, sha256, backend, tuple(engine.key for engine in engines))
        if members == self._members:
            return
        self._members = None
        self._epoch += 1
        epoch, total = self._epoch, sum(engine.about.worker_count for engine in engines)
        offers = await at_once_trainer(
            self._session.once(
                lambda r: r.weights.make_offer(epoch=epoch, backend=backend, receiver_count=total, timeout=timeout)
            )
        )
        calls: dict[Key, Coroutine[Any, Any, object]] = {}
        first = 0
        for engine in engines:
            calls[engine.key] = engine.replica.control.open(
                epoch=epoch,
                backend=backend,
                manifest=manifest,
                offers=offers,
                receiver_count=total,
                first_receiver_index=first,
                timeout=timeout,
            )
            first += engine.about.worker_count
        await at_once(calls, trainer=self._session.once(lambda r: r.weights.open(epoch=epoch, timeout=timeout)))
        self._members = members

    async def _begin(self, engines: Sequence[Engine], version: int, end: float) -> None:
        await at_once(
            {
                engine.key: engine.replica.control.begin(
                    epoch=self._epoch,
                    policy_version=version,
                    pause_mode=_PAUSE[self._config.weights.pause],
                    timeout=_left(end),
                )
                for engine in engines
            }
        )

    async def _transfer(self, engines: Sequence[Engine], version: int, end: float) -> None:
        """Move the bytes, and compare what arrived with what was sent."""
        epoch = self._epoch
        sent: list[bytes] = []

        async def send(replica: Replica) -> None:
            response = await replica.weights.send(epoch=epoch, policy_version=version, timeout=_left(end))
            sent.append(response.weights_digest)

        digests = await at_once(
            {
                e.key: e.replica.control.receive(epoch=epoch, policy_version=version, timeout=_left(end))
                for e in engines
            },
            trainer=self._session.once(send),
        )
        wrong = {
            key: WrongState(
                f"{key[0]}: the weights of version {version} arrived with digest {digest.hex()[:16]}, the trainer "
                f"sent {sent[0].hex()[:16]}; nothing of them is served",
                reason="DIGEST_MISMATCH",
            )
            for key, digest in digests.items()
            if digest != sent[0]
        }
        if wrong:
            raise UpdateFailed(wrong)

    async def _commit(
        self,
        engines: Sequence[Engine],
        version: int,
        probes: Mapping[Key, tuple[float, float, Float32Array]],
        end: float,
    ) -> None:
        """Have the engines serve the version. One that does not answer may serve either: it is filled again."""
        calls = [
            e.replica.control.commit(epoch=self._epoch, policy_version=version, timeout=_left(end)) for e in engines
        ]
        failures: dict[Key, FourfoldError] = {}
        for engine, error in zip(engines, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(error, FourfoldError):
                failures[engine.key] = error
                engine.replica.version = -1
            elif isinstance(error, BaseException):
                raise error
            else:
                engine.replica.version = version
                self._probe.accept(engine.key, version, probes[engine.key][2])
        if failures:
            self._members = None
            raise UpdateFailed(failures)

    async def _abort(self, engines: Sequence[Engine]) -> None:
        """Give the update up everywhere; an engine that may hold mixed weights is vouched for no longer."""
        self._members = None
        calls = [engine.replica.control.abort(epoch=self._epoch, timeout=_ABORT_SECONDS) for engine in engines]
        trainer = self._session.once(lambda r: r.weights.abort(epoch=self._epoch, timeout=_ABORT_SECONDS))
        *states, sender = await asyncio.gather(*calls, trainer, return_exceptions=True)
        if isinstance(sender, FourfoldError) and not isinstance(sender, StaleEpoch):
            log.warning("the trainer could not abort the update: %s", sender)
        for engine, state in zip(engines, states, strict=True):
            if isinstance(state, StaleEpoch):
                continue  # it never joined this epoch: nothing was touched
            if state != control.WEIGHT_STATE_CLEAN:
                engine.replica.version = -1
                log.warning("%s may hold mixed weights; it is filled again", engine.replica.member.member_id)


def choose_backend(wanted: str, trainer: weight.GetManifestResponse, engines: Sequence[Engine]) -> str:
    """Return how the bytes travel: as configured; `auto` is shared memory on one host, and else gloo.

    Raises:
        UpdateFailed: names the engines that do not have it.
    """
    backend = wanted
    if wanted == "auto":
        one_host = bool(trainer.host_id) and all(engine.about.host_id == trainer.host_id for engine in engines)
        every = [trainer.backends, *(engine.about.backends for engine in engines)]
        backend = "shm" if one_host and all("shm" in backends for backends in every) else "gloo"
    if backend not in trainer.backends:
        raise UpdateFailed(
            {}, WrongState(f"the trainer cannot send weights by {backend!r}, only by {', '.join(trainer.backends)}")
        )
    lacking = {
        engine.key: WrongState(
            f"{engine.replica.member.peer} cannot receive weights by {backend!r}, only by "
            f"{', '.join(engine.about.backends)}; set weights.backend",
            reason=NO_BACKEND,
        )
        for engine in engines
        if backend not in engine.about.backends
    }
    if lacking:
        raise UpdateFailed(lacking)
    return backend


async def at_once(
    calls: Mapping[Key, Coroutine[Any, Any, T]], *, trainer: Coroutine[Any, Any, object] | None = None
) -> dict[Key, T]:
    """Make one call to every engine, and one to the trainer, at the same time; return the engines' answers.

    Raises:
        UpdateFailed: with every call that failed within a second of the first failure; the others were cancelled.
        TrainerRestarted: the trainer is another process.
    """
    tasks = {key: asyncio.ensure_future(call) for key, call in calls.items()}
    sender: asyncio.Future[object] | None = None if trainer is None else asyncio.ensure_future(trainer)
    everything: list[asyncio.Future[Any]] = [*tasks.values(), *([sender] if sender else [])]
    try:
        _, pending = await asyncio.wait(everything, return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            await asyncio.wait(pending, timeout=_BLAME_SECONDS)
    finally:
        for task in everything:
            task.cancel()
        await asyncio.gather(*everything, return_exceptions=True)
    failures = {key: error for key, task in tasks.items() if (error := _error(task)) is not None}
    own = None if sender is None else _error(sender)
    if isinstance(own, TrainerRestarted):
        raise own
    if failures or own is not None:
        raise UpdateFailed(failures, own)
    return {key: task.result() for key, task in tasks.items()}


async def at_once_trainer(call: Awaitable[T]) -> T:
    """Make a call to the trainer alone, failing as `at_once` does."""
    try:
        return await call
    except TrainerRestarted:
        raise
    except FourfoldError as error:
        raise UpdateFailed({}, error) from error


def _error(task: asyncio.Future[Any]) -> FourfoldError | None:
    """Return why a task failed; None when it did not or was cancelled. An error that is no one's raises."""
    error = None if task.cancelled() else task.exception()
    if error is None or isinstance(error, FourfoldError):
        return error
    raise error


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.05)
