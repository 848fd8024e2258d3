"""One weight update: every engine serves the new version, or does not serve at all.

    epoch (once per membership)   MakeOffer(trainer, group by group) -> OpenWeights(trainer and engines at once)
    version (every update)        the trainer's own look at the probe, while nothing is paused
                                  Send(trainer) and Begin(engines) at once -> all have begun: Receive(engines)
                                  -> the same digest from all
    each engine on its own        Commit, tokens held back -> probe -> Release

An error before the digests agree is an Abort for all: an engine serves its old version again, or is dirty. After
that every engine has the weights, and one that fails is given up alone. An engine's pause is from the end of Begin to
the beginning of Commit; it measures that itself.

The bytes never come here: offers are opaque and handed over, digests are compared. Every call carries a deadline that
its worker keeps, too.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from fourfold import metrics as m
from fourfold.arrays import Float32Array
from fourfold.config import Config
from fourfold.errors import FourfoldError, Internal, StaleEpoch, Unavailable, WrongState
from fourfold.rollout.v1 import rollout_control_service_pb2 as control
from fourfold.trainer.v1 import trainer_weight_service_pb2 as weight
from fourfold.weights.digest import differing_tensors, join_names

from ..routing.replica import Replica
from ..routing.router import INFO_SECONDS
from ..routing.trainer_session import TrainerSession
from . import status
from .backends import BackendGroup, group_by_backend
from .fan_out import DescribedEngine, UpdateFailed, call_all, call_trainer
from .probe import LogprobProbe, ReplicaKey
from .status import WeightPlaneStatus

log = logging.getLogger("fourfold.coordinator")

T = TypeVar("T")

_ABORT_SECONDS: Final = 15.0
_SUMS_SECONDS: Final = 10.0
_PAUSE: Final = {
    "keep": control.PAUSE_MODE_KEEP,
    "wait": control.PAUSE_MODE_WAIT,
    "abort": control.PAUSE_MODE_ABORT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdateResult:
    """What a weight update came to."""

    seconds: dict[str, float] = field(default_factory=dict)
    """By metric name: of the whole update and its parts; empty when nothing was sent."""
    probe_diffs: tuple[tuple[float, float], ...] = ()
    """Mean and largest |trainer - engine| on the probe, in nats, of every engine."""


class PhaseTimer:
    """Of one update; runs from the start."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the block as the metric `name`; of several blocks with one name the longest counts."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.longest(name, time.monotonic() - began)

    def stop(self) -> dict[str, float]:
        """Return seconds by metric: of the parts, and of the whole update."""
        return {m.PUBLISH_SECONDS: time.monotonic() - self._began, **self._seconds}

    def longest(self, name: str, seconds: float) -> None:
        """Note seconds that somebody else has measured."""
        self._seconds[name] = max(self._seconds.get(name, 0.0), seconds)


class WeightUpdater:
    """Runs updates, and keeps the epoch open between those of the same members."""

    def __init__(self, config: Config, session: TrainerSession, probe: LogprobProbe, status: WeightPlaneStatus) -> None:
        self._config = config
        self._session = session
        self._probe = probe
        self._status = status
        # Epochs grow over coordinators, too: trainer and engines may have seen those of an earlier one. In
        # milliseconds, because one that was killed a moment ago has made fewer than it lived.
        self._epoch = int(time.time() * 1000)
        self._members: tuple[object, ...] | None = None  # of the open epoch
        self._rounds = 0  # done in it
        self._layout: tuple[str, weight.GetManifestResponse] | None = None  # of the trainer's incarnation
        self._manifest = b""
        self._clock = PhaseTimer()
        self._skipped = False
        self.filled: dict[ReplicaKey, int] = {}
        """Version of ours that an engine holds, by engine: verified, and perhaps served."""

    async def run(self, engines: Sequence[DescribedEngine], version: int) -> WeightUpdateResult:
        """Bring `engines` to `version`, which the trainer holds.

        Raises:
            UpdateFailed: names the engines to blame; they do not serve. Of the others all serve the version, when it
                had arrived everywhere, or none.
            TrainerRestarted: the weights are lost.
        """
        self._clock = clock = PhaseTimer()
        arrived = False
        try:
            with clock.part(m.JOIN_SECONDS):
                await self._join(engines)
            self._begin(status.LOOK_UP, engines, busy=[self._session.name])
            with clock.part(m.LOOKUP_SECONDS):
                await self._ask_trainer(version, timeout=self._config.weights.timeout_seconds)
            end = time.monotonic() + self._config.weights.timeout_seconds
            await self._move(engines, version, end)
            arrived = True
        finally:
            if not arrived:
                await self._abort(engines)
        self._begin(status.COMMIT, engines, busy=[engine.name for engine in engines])
        results = await asyncio.gather(*(self._finish(engine, version, end) for engine in engines))
        self._status.end()
        failures = {e.key: r for e, r in zip(engines, results, strict=True) if isinstance(r, FourfoldError)}
        if failures:
            self._members = None
            raise UpdateFailed(failures)
        return self._done(version, [r for r in results if not isinstance(r, FourfoldError)])

    def _done(self, version: int, probe_diffs: list[tuple[float, float]]) -> WeightUpdateResult:
        seconds = self._clock.stop()
        self._status.last_seconds, self._status.last_pause_seconds = (
            seconds[m.PUBLISH_SECONDS],
            seconds[m.PAUSE_SECONDS],
        )
        parts = ", ".join(f"{name.split('/')[1].removesuffix('_seconds')} {s:.3f}" for name, s in seconds.items())
        log.info("weights of version %d are in %d engines; seconds: %s", version, len(probe_diffs), parts)
        return WeightUpdateResult(seconds=seconds, probe_diffs=tuple(probe_diffs))

    async def look(
        self, engines: Sequence[DescribedEngine], version: int, *, timeout: float
    ) -> dict[ReplicaKey, tuple[float, float, Float32Array]]:
        """Compare the probe of engines that serve `version`: mean and largest difference, and the engine's values.

        Raises:
            UpdateFailed: names the engines whose probe differs or is stale.
        """
        await self._ask_trainer(version, timeout=timeout)
        values = await call_all(
            {e.key: e.replica.call(e.replica.control.probe(self._probe.token_ids, timeout=timeout)) for e in engines}
        )
        results: dict[ReplicaKey, tuple[float, float, Float32Array]] = {}
        bad: dict[ReplicaKey, FourfoldError] = {}
        for key, logprobs in values.items():
            try:
                results[key] = (*self._probe.compare(key, version, logprobs), logprobs)
            except WrongState as error:
                bad[key] = error
        if bad:
            raise UpdateFailed(bad)
        return results

    async def _ask_trainer(self, version: int, *, timeout: float) -> None:
        """Have the trainer compute the probe at `version`, once. Its engine thread is the one that sends, too."""
        if not self._probe.knows(version):
            rows = await self._session.call(
                "probe", lambda r: r.trainer.compute_logprobs([self._probe.sample()], timeout=timeout)
            )
            self._probe.trainer(version, rows[0])

    # -- epoch ----------------------------------------------------------------------------------------------------

    async def _join(self, engines: Sequence[DescribedEngine]) -> None:
        """Open an epoch with these engines, unless it is open."""
        layout = await self._ask_layout()
        groups = group_by_backend(self._config.weights.backend, layout, engines)
        shape = tuple((group.backend, tuple(e.key for e in group.engines)) for group in groups)
        members = (self._session.incarnation, layout.manifest_sha256, shape)
        if members == self._members:
            return
        self._members, self._manifest = None, layout.manifest
        self._epoch += 1
        self._rounds, self._status.epoch = 0, self._epoch
        self._begin(status.JOIN, engines)
        calls: dict[ReplicaKey, Coroutine[Any, Any, object]] = {}
        for index, group in enumerate(groups):
            offers = await self._offers(group, index)
            for engine in group.engines:
                self._status.backend(engine.name, group.backend)
                calls[engine.key] = self._call(engine, self._open(engine, group, offers))
        timeout = self._config.weights.timeout_seconds
        opening = self._ask(lambda r: r.weights.open(epoch=self._epoch, timeout=timeout))
        await call_all(calls, trainer=opening)
        self._members = members
        names = "; ".join(f"{g.backend}: {', '.join(e.name for e in g.engines)}" for g in groups)
        log.info("weights travel to %s", names, extra={"epoch": self._epoch})

    async def _ask_layout(self) -> weight.GetManifestResponse:
        """Return what this process of the trainer sends, and from where; none of it ever changes."""
        if self._layout is None or self._layout[0] != self._session.incarnation:
            layout = await self._session.call("GetManifest", lambda r: r.weights.get_manifest(timeout=INFO_SECONDS))
            if hashlib.sha256(layout.manifest).digest() != layout.manifest_sha256:
                raise UpdateFailed({}, Internal("the trainer's manifest does not have the digest that it names"))
            self._layout = self._session.incarnation, layout
        return self._layout[1]

    async def _offers(self, group: BackendGroup, index: int) -> list[bytes]:
        return await call_trainer(
            self._session.try_once(
                lambda r: r.weights.make_offer(
                    epoch=self._epoch,
                    backend=group.backend,
                    receiver_count=group.receiver_count,
                    group=index,
                    timeout=self._config.weights.timeout_seconds,
                )
            )
        )

    def _open(
        self, engine: DescribedEngine, group: BackendGroup, offers: Sequence[bytes]
    ) -> Coroutine[Any, Any, object]:
        return engine.replica.control.open(
            epoch=self._epoch,
            backend=group.backend,
            manifest=self._manifest,
            offers=offers,
            receiver_count=group.receiver_count,
            first_receiver_index=group.first_receiver(engine),
            timeout=self._config.weights.timeout_seconds,
        )

    # -- transfer -------------------------------------------------------------------------------------------------

    async def _move(self, engines: Sequence[DescribedEngine], version: int, end: float) -> None:
        """Send to all, and compare what arrived with what was sent. The trainer waits for its receivers."""
        epoch, weights = self._epoch, self._config.weights
        skip = self._rounds >= weights.verify_first and version % weights.verify_every != 0
        self._skipped = skip
        sent: list[weight.SendWeightsResponse] = []
        all_begun = asyncio.Barrier(len(engines))

        async def send() -> None:
            with self._clock.part(m.SEND_SECONDS):
                response = await self._session.try_once(
                    lambda r: r.weights.send(epoch=epoch, policy_version=version, skip_sums=skip, timeout=_left(end))
                )
            sent.append(response)
            self._status.answered(self._session.name)

        async def take(engine: DescribedEngine) -> bytes:
            await self._call(engine, self._pause(engine, version, end))
            if await all_begun.wait() == 0:
                names = [other.name for other in engines]
                self._begin(status.TRANSFER, engines, busy=names if sent else [*names, self._session.name])
            receive = engine.replica.control.receive
            with self._clock.part(m.TRANSFER_SECONDS):
                return await self._call(
                    engine, receive(epoch=epoch, policy_version=version, skip_sums=skip, timeout=_left(end))
                )

        self._begin(status.PAUSE, engines)
        digests = await call_all({engine.key: take(engine) for engine in engines}, trainer=send())
        wrong = [engine for engine in engines if digests[engine.key] != sent[0].weights_digest]
        if wrong:
            raise UpdateFailed({e.key: await self._mismatch(e, digests[e.key], sent[0], version) for e in wrong})
        self._rounds += 1

    def _pause(self, engine: DescribedEngine, version: int, end: float) -> Coroutine[Any, Any, None]:
        mode = _PAUSE[self._config.weights.pause]
        return engine.replica.control.begin(
            epoch=self._epoch, policy_version=version, pause_mode=mode, timeout=_left(end)
        )

    async def _mismatch(
        self, engine: DescribedEngine, digest: bytes, sent: weight.SendWeightsResponse, version: int
    ) -> FourfoldError:
        """Return the error of an engine that received something else; it names the tensors where sums were taken."""
        which = "sums were not taken in this round"
        if sent.sums:
            try:
                sums = await engine.replica.call(engine.replica.control.sums(epoch=self._epoch, timeout=_SUMS_SECONDS))
                tensors = differing_tensors(self._manifest, sent.sums, sums)
                names = join_names(tensors) or "no tensor"
                which = f"{names} differ" if len(tensors) > 1 else f"{names} differs"
            except FourfoldError as error:
                which = f"it does not say which tensors: {error.message}"
        return WrongState(
            f"{engine.name}: the weights of version {version} arrived with digest {digest.hex()[:16]}, the trainer "
            f"sent {sent.weights_digest.hex()[:16]}: {which}; nothing of them is served",
            reason="DIGEST_MISMATCH",
        )

    # -- commit ---------------------------------------------------------------------------------------------------

    async def _finish(self, engine: DescribedEngine, version: int, end: float) -> tuple[float, float] | FourfoldError:
        """Have one engine serve the version once its probe agrees; return mean and largest difference, or its error.

        One that does not answer may serve either version, or hold tokens back: it is aborted, and filled again.
        """
        epoch, asked = self._epoch, engine.replica.control
        served = False
        try:
            with self._clock.part(m.COMMIT_SECONDS):
                commit = asked.commit(epoch=epoch, policy_version=version, hold=True, timeout=_left(end))
                self._clock.longest(m.PAUSE_SECONDS, await self._call(engine, commit, last=False))
            if engine.about.sleeping:  # its weights have memory already; now it may sample
                with self._clock.part(m.TIME_WAKE):
                    await self._call(engine, asked.wake("kv_cache", timeout=_left(end)), last=False)
            with self._clock.part(m.PROBE_SECONDS):
                logprobs = await self._call(engine, asked.probe(self._probe.token_ids, timeout=_left(end)), last=False)
            mean, largest = self._compare(engine.key, version, logprobs)
            self.filled[engine.key] = version
            await self._call(engine, asked.release(epoch=epoch, policy_version=version, timeout=_left(end)))
            engine.replica.version = version
            self._probe.accept(engine.key, version, logprobs)
            served = True
            return mean, largest
        except FourfoldError as error:
            return error
        finally:
            if not served:
                await self._abort_engine(engine)

    def _compare(self, key: ReplicaKey, version: int, logprobs: Float32Array) -> tuple[float, float]:
        try:
            return self._probe.compare(key, version, logprobs)
        except WrongState as error:
            arrived = "every tensor had arrived as it was sent"
            if self._skipped:
                arrived = "tensors were not summed in this round, and are in this engine's next"
            raise WrongState(f"{error.message} ({arrived})", reason=error.reason) from None

    # -- abort ----------------------------------------------------------------------------------------------------

    async def _abort(self, engines: Sequence[DescribedEngine]) -> None:
        """Give the update up everywhere; an engine that may hold mixed weights is vouched for no longer."""
        self._members = None
        # The trainer is asked again, by a call that waits for one that died and is being started anew.
        self._layout = None
        self._begin(status.ABORT, engines)
        trainer = self._session.try_once(lambda r: r.weights.abort(epoch=self._epoch, timeout=_ABORT_SECONDS))
        sender, *others = await asyncio.gather(
            trainer, *(self._abort_engine(engine) for engine in engines), return_exceptions=True
        )
        self._status.end()
        if isinstance(sender, FourfoldError) and not isinstance(sender, StaleEpoch | Unavailable):
            log.warning("the trainer could not abort the update: %s", sender)
        for error in others:
            if error is not None:
                raise error

    async def _abort_engine(self, engine: DescribedEngine) -> None:
        """Give the update up at one engine. Its state is not known when it does not answer."""
        state = control.WEIGHT_STATE_UNSPECIFIED
        if not engine.replica.gone:  # nobody would answer
            try:
                abort = engine.replica.control.abort(epoch=self._epoch, timeout=_ABORT_SECONDS)
                state = await engine.replica.call(abort)
            except StaleEpoch:
                return  # it never joined this epoch: nothing was touched
            except FourfoldError as error:
                log.warning("%s could not abort the update: %s", engine.name, error)
        if state != control.WEIGHT_STATE_CLEAN:
            engine.replica.version = -1
            log.info("%s holds parts of a version; it serves again when it is filled", engine.name)

    # -- calls ----------------------------------------------------------------------------------------------------

    def _begin(self, phase: str, engines: Sequence[DescribedEngine], *, busy: Sequence[str] | None = None) -> None:
        """Begin a phase; all have something to do in it, unless `busy` names who has."""
        names, trainer = [engine.name for engine in engines], self._session.name
        self._status.begin(phase, trainer=trainer, engines=names, busy=[*names, trainer] if busy is None else busy)

    async def _call(self, engine: DescribedEngine, call: Coroutine[Any, Any, T], *, last: bool = True) -> T:
        """Make a call to an engine, while it is a member; the `last` one of a phase ends its part.

        Raises:
            Unavailable: it is none any more.
        """
        result = await engine.replica.call(call)
        if last:
            self._status.answered(engine.name)
        return result

    async def _ask(self, work: Callable[[Replica], Awaitable[None]]) -> None:
        """Make a call to the trainer that ends its part of a phase."""
        await self._session.try_once(work)
        self._status.answered(self._session.name)


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.05)
