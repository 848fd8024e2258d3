"""Runs a weight update in two phases.

Before all digests agree, an error aborts it on every engine; after that, only on the engine that failed.

    epoch (once per membership)   MakeOffer(trainer, per group) -> OpenWeights(trainer and engines concurrently)
    version (every update)        SendWeights(trainer) and BeginWeights(engines) concurrently -> when all engines have
                                  paused: ReceiveWeights(engines) -> every digest equals the trainer's
    trainer                       ComputeLogprobs of the probe
    meanwhile, each engine        CommitWeights: it samples, and holds the tokens back -> ProbeLogprobs
    then, each engine             ReleaseWeights, if its probe agrees with the trainer's

After an abort an engine serves its old version again, or is dirty. The pause of an engine lasts from the end of
BeginWeights to the start of CommitWeights; the engine measures it. The trainer computes the probe after the transfer,
because it computes and sends on one thread: its 0.1 s then pass while the engines sample.

A late engine can get the weights from an engine that has them, while the trainer computes: `FeedWeights` of that engine
replaces MakeOffer, OpenWeights and SendWeights of the trainer.

The weights themselves never pass through this process: it hands over opaque offers and compares digests. Every call
carries a deadline that the worker enforces, too.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from fourfold import metrics as m
from fourfold.arrays import Float32Array
from fourfold.config.schema import Config
from fourfold.errors import DeadlinePassed, FourfoldError, Internal, StaleEpoch, Unavailable, WrongState
from fourfold.rollout.v1 import rollout_control_service_pb2 as control
from fourfold.trainer.v1 import trainer_weight_service_pb2 as weight
from fourfold.weights.digest import differing_tensors, digest_of, join_names
from fourfold.weights.manifest import Manifest

from ..routing.replica import INFO_SECONDS, ReplicaKey
from ..routing.trainer_session import TrainerSession
from . import status
from .backends import BackendGroup, group_by_backend, host_of
from .fan_out import DescribedEngine, UpdateFailed, blame_trainer, call_all, service_error
from .probe import LogprobProbe
from .status import WeightPlaneStatus
from .update_result import WeightUpdateResult

log = logging.getLogger("fourfold.coordinator")

T = TypeVar("T")

_ABORT_SECONDS: Final = 15.0
_PROBE_SECONDS: Final = 3 * INFO_SECONDS
_SUMS_SECONDS: Final = 10.0
_SUMS_POLL_SECONDS: Final = 0.1
# Backends whose receivers keep a copy, and values of weights.backend with which engines feed others (by gloo).
_KEPT: Final = frozenset({"shm", "gloo"})
_FED: Final = frozenset({"auto", "gloo"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """The digests of a version that was sent, which every receiver must have."""

    policy_version: int
    digest: bytes
    sums: bytes  # sums of every tensor; empty: `digest` covers only the manifest and the version


class PhaseTimer:
    """Times the parts of one update. Of concurrent calls, the slowest counts."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - began)

    def add(self, name: str, seconds: float) -> None:
        """Add a measurement; of several with one name the longest counts."""
        self._seconds[name] = max(self._seconds.get(name, 0.0), seconds)

    def lap(self, name: str) -> None:
        """Add the seconds since the start of the update."""
        self.add(name, time.monotonic() - self._began)

    def stop(self) -> dict[str, float]:
        """Return the seconds of the whole update and of each part, by metric."""
        return {m.PUBLISH_SECONDS: time.monotonic() - self._began, **self._seconds}


class WeightUpdater:
    """Runs updates, and keeps the epoch open between updates of the same members."""

    def __init__(self, config: Config, session: TrainerSession, probe: LogprobProbe, status: WeightPlaneStatus) -> None:
        self._weights, self._session, self._probe, self._status = config.weights, session, probe, status
        self.pause_mode = config.pause_mode
        # Epochs must be larger than those of an earlier coordinator. A coordinator makes far fewer than one epoch per
        # millisecond, so the time of day in milliseconds is always larger.
        self._epoch = int(time.time() * 1000)
        self._members: tuple[object, ...] | None = None  # of the open epoch; None: no epoch is open
        self._rounds = 0  # complete transfers of the open epoch
        self._layout: tuple[str, weight.GetManifestResponse] | None = None  # manifest with the trainer's incarnation
        self._manifest = b""
        self._timer = PhaseTimer()
        self._skip_sums = False
        self._groups: list[BackendGroup] = []  # of the open epoch
        self._sent: _Sent | None = None  # last version that the trainer sent
        self._holders: dict[ReplicaKey, tuple[int, int]] = {}
        """Version and epoch of the engines that keep a copy of the weights and can feed others."""
        self.verified: dict[ReplicaKey, int] = {}
        """Version of this run that each engine holds with an agreeing probe; it may not serve it yet."""

    def can_feed(self, key: ReplicaKey, version: int) -> bool:
        """Return whether an engine can send `version` to others without any call to the trainer."""
        known = self._sent is not None and self._sent.policy_version == version
        held = self._holders.get(key, (-1, 0))[0] == version
        return known and held and self._probe.has_trainer_logprobs(version) and self._weights.backend in _FED

    async def run(
        self,
        engines: Sequence[DescribedEngine],
        version: int,
        *,
        on_sampling: Callable[[DescribedEngine], None],
        feeder: DescribedEngine | None = None,
    ) -> WeightUpdateResult:
        """Bring `engines` to `version`, which the trainer or a feeding engine holds (see `can_feed`).

        `on_sampling` is called for each engine that samples with the new weights. The engine takes requests from then
        on, and delivers their tokens when its probe has agreed; otherwise these requests fail.

        Raises:
            UpdateFailed: lists the engines to blame; they do not serve. If the version had arrived everywhere, all
                other engines serve it; otherwise none does.
            TrainerRestarted: the trainer lost the weights.
            FourfoldError: the trainer did not compute the probe; none of the engines serves.
        """
        self._timer = timer = PhaseTimer()
        arrived = False
        try:
            with timer.measure(m.JOIN_SECONDS):
                await (self._open_epoch(engines) if feeder is None else self._open_feed(engines, feeder, version))
            end = time.monotonic() + self._weights.timeout_seconds
            await self._transfer(engines, version, end, feeder)
            arrived = True
        finally:
            if not arrived:
                await self._abort(engines, trainer=feeder is None)
        self._begin_phase(status.COMMIT, engines)
        lookup = asyncio.create_task(self._look_up(version, end))
        try:
            results = await asyncio.gather(*(self._commit(e, version, end, lookup, on_sampling) for e in engines))
        finally:
            lookup.cancel()  # the lookup still runs only if every engine failed before its probe was compared
            await asyncio.gather(lookup, return_exceptions=True)
            self._status.end_update()
        failures = {e.key: r for e, r in zip(engines, results, strict=True) if isinstance(r, FourfoldError)}
        if failures:
            self._members = None
            raise service_error(lookup) or UpdateFailed(failures)
        return self._finish(version, [r for r in results if not isinstance(r, FourfoldError)])

    def _finish(self, version: int, probe_diffs: list[tuple[float, float]]) -> WeightUpdateResult:
        seconds = self._timer.stop()
        self._status.last_seconds = seconds[m.PUBLISH_SECONDS]
        self._status.last_pause_seconds = seconds[m.PAUSE_SECONDS]
        parts = " ".join(f"{name.split('/')[1]}={value:.3f}" for name, value in seconds.items())
        log.info("weights published version=%d engines=%d %s", version, len(probe_diffs), parts)
        return WeightUpdateResult(seconds=seconds, probe_diffs=tuple(probe_diffs))

    async def accept_current(self, engines: Sequence[DescribedEngine], version: int) -> WeightUpdateResult:
        """Let engines that already hold `version` serve it after a probe; raise UpdateFailed with those that differ."""
        if not engines:
            return WeightUpdateResult()
        await self._probe_trainer(version, timeout=_PROBE_SECONDS)
        probe = self._probe

        async def check(engine: DescribedEngine) -> tuple[tuple[float, float], Float32Array]:
            calls = engine.replica.engine_control
            logprobs = await engine.replica.call(calls.probe(probe.token_ids, timeout=_PROBE_SECONDS))
            return probe.compare(engine.key, version, logprobs), logprobs

        checked = await call_all({engine.key: check(engine) for engine in engines})
        for engine in engines:
            engine.replica.version = version
            probe.set_engine_logprobs(engine.key, version, checked[engine.key][1])
        return WeightUpdateResult(probe_diffs=tuple(diffs for diffs, _ in checked.values()))

    async def _look_up(self, version: int, end: float) -> None:
        """Get the trainer's values of the probe while the engines commit."""
        with self._timer.measure(m.LOOKUP_SECONDS):
            await self._probe_trainer(version, timeout=_seconds_until(end))
        self._status.mark_done(self._session.name)

    async def _probe_trainer(self, version: int, *, timeout: float) -> None:
        """Get the trainer's log-probabilities of the probe at `version`, once per version."""
        if not self._probe.has_trainer_logprobs(version):
            rows = await self._session.call(
                "probe", lambda r: r.trainer.compute_logprobs([self._probe.sample()], timeout=timeout)
            )
            self._probe.set_trainer_logprobs(version, rows[0])

    # -- epoch ----------------------------------------------------------------------------------------------------

    async def _open_epoch(self, engines: Sequence[DescribedEngine]) -> None:
        """Open an epoch with these engines, unless the open one has the same members and groups."""
        layout = await self._get_layout()
        with blame_trainer():
            host, interface = host_of(self._session.trainer()), self._weights.interface
        groups = group_by_backend(self._weights.backend, layout, engines, host=host, interface=interface)
        shape = tuple((group.backend, tuple(e.key for e in group.engines)) for group in groups)
        members = (self._session.incarnation, layout.manifest_sha256, shape)
        if members == self._members:
            return
        self._next_epoch(groups, layout.manifest)
        self._begin_phase(status.JOIN, engines)
        # All offers come first: a coroutine that is made before a failed call would never be awaited.
        with blame_trainer():
            offers = [await self._make_offers(group, index, host) for index, group in enumerate(groups)]
        timeout = self._weights.timeout_seconds

        async def open_trainer() -> None:
            await self._session.try_once(lambda r: r.trainer_weights.open(epoch=self._epoch, timeout=timeout))
            self._status.mark_done(self._session.name)

        await call_all(self._open_calls(offers), trainer=open_trainer())
        self._members = members
        names = " ".join(f"{g.backend}={','.join(e.name for e in g.engines)}" for g in groups)
        log.info("weight epoch opened epoch=%d %s", self._epoch, names, extra={"epoch": self._epoch})

    async def _open_feed(self, engines: Sequence[DescribedEngine], feeder: DescribedEngine, version: int) -> None:
        """Open an epoch in which `feeder` takes the trainer's place, by gloo."""
        about, host, interface = feeder.about, host_of(feeder.replica), self._weights.interface
        source = weight.GetManifestResponse(host_id=about.host_id, backends=about.backends)
        groups = group_by_backend("gloo", source, engines, host=host, interface=interface)
        self._next_epoch(groups, self._manifest)
        self._begin_phase(status.JOIN, engines, busy=[engine.name for engine in engines])
        feed = feeder.replica.engine_control.feed(
            epoch=self._epoch,
            policy_version=version,
            receiver_count=groups[0].receiver_count,
            host=host,
            interface=interface,
            timeout=self._weights.timeout_seconds,
        )
        with blame_trainer():
            offers = await feeder.replica.call(feed)
        await call_all(self._open_calls([offers]))

    def _next_epoch(self, groups: list[BackendGroup], manifest: bytes) -> None:
        self._members, self._groups, self._manifest = None, groups, manifest
        for group in groups:
            for engine in group.engines:
                self._holders.pop(engine.key, None)
        self._epoch += 1
        self._rounds, self._status.epoch = 0, self._epoch

    def _open_calls(self, offers: Sequence[Sequence[bytes]]) -> dict[ReplicaKey, Coroutine[Any, Any, object]]:
        """Return the call by which each engine joins the epoch; `offers`: for each group."""
        calls: dict[ReplicaKey, Coroutine[Any, Any, object]] = {}
        for group, offer in zip(self._groups, offers, strict=True):
            for engine in group.engines:
                self._status.set_backend(engine.name, group.backend)
                open_engine = engine.replica.engine_control.open(
                    epoch=self._epoch,
                    backend=group.backend,
                    manifest=self._manifest,
                    offers=offer,
                    receiver_count=group.receiver_count,
                    first_receiver_index=group.first_receiver(engine),
                    host=host_of(engine.replica),
                    interface=self._weights.interface,
                    timeout=self._weights.timeout_seconds,
                )
                calls[engine.key] = self._call_engine(engine, open_engine)
        return calls

    async def _get_layout(self) -> weight.GetManifestResponse:
        """Return the trainer's manifest, host and GPUs, which are constant for one trainer process."""
        if self._layout is None or self._layout[0] != self._session.incarnation:
            layout = await self._session.call(
                "GetManifest", lambda r: r.trainer_weights.get_manifest(timeout=INFO_SECONDS)
            )
            if hashlib.sha256(layout.manifest).digest() != layout.manifest_sha256:
                raise UpdateFailed({}, Internal("the trainer's manifest does not match its own digest"))
            self._layout = self._session.incarnation, layout
        return self._layout[1]

    async def _make_offers(self, group: BackendGroup, index: int, host: str) -> list[bytes]:
        return await self._session.try_once(
            lambda r: r.trainer_weights.make_offer(
                epoch=self._epoch,
                backend=group.backend,
                receiver_count=group.receiver_count,
                group=index,
                host=host,
                interface=self._weights.interface,
                timeout=self._weights.timeout_seconds,
            )
        )

    # -- transfer -------------------------------------------------------------------------------------------------

    async def _transfer(
        self, engines: Sequence[DescribedEngine], version: int, end: float, feeder: DescribedEngine | None
    ) -> None:
        """Pause all engines, send the weights, and compare each engine's digest with the trainer's."""
        epoch = self._epoch
        settled = self._rounds >= self._weights.verify_first and version % self._weights.verify_every != 0
        self._skip_sums = skip = settled and feeder is None
        sent: list[_Sent] = []
        mode = control.PauseMode.Value(f"PAUSE_MODE_{self.pause_mode.upper()}")
        all_paused = asyncio.Barrier(len(engines))

        async def send() -> None:
            with self._timer.measure(m.SEND_SECONDS):
                response = await self._session.try_once(
                    lambda r: r.trainer_weights.send(
                        epoch=epoch, policy_version=version, skip_sums=skip, timeout=_seconds_until(end)
                    )
                )
            sent.append(_Sent(policy_version=version, digest=response.weights_digest, sums=response.sums))
            self._status.mark_done(self._session.name)

        async def pause_and_receive(engine: DescribedEngine) -> bytes:
            calls = engine.replica.engine_control
            begin = calls.begin(epoch=epoch, policy_version=version, pause_mode=mode, timeout=_seconds_until(end))
            await self._call_engine(engine, begin)
            if await all_paused.wait() == 0:  # the last task to decrement gets 0
                busy = [other.name for other in engines]
                trainer_sends = feeder is None and not sent
                self._begin_phase(status.TRANSFER, engines, busy=[*busy, self._session.name] if trainer_sends else busy)
            with self._timer.measure(m.TRANSFER_SECONDS):
                receive = calls.receive(
                    epoch=epoch, policy_version=version, skip_sums=skip, timeout=_seconds_until(end)
                )
                return await self._call_engine(engine, receive)

        self._begin_phase(status.PAUSE, engines)
        # The trainer's send waits for its receivers, so the first byte follows the last pause at once.
        calls = {engine.key: pause_and_receive(engine) for engine in engines}
        digests = await call_all(calls, trainer=send() if feeder is None else None)
        self._sent = source = sent[0] if feeder is None else await self._fed(feeder, version)
        if wrong := self._wrong_engines(digests, source.digest):
            raise UpdateFailed({e.key: await self._digest_error(e, digests[e.key], source) for e in wrong})
        self._rounds += 1
        held = (group.engines for group in self._groups if group.backend in _KEPT)
        self._holders.update({engine.key: (version, epoch) for group in held for engine in group})

    def _wrong_engines(self, digests: Mapping[ReplicaKey, bytes], digest: bytes) -> list[DescribedEngine]:
        """Return the engines that caused digests to differ from the one that was sent.

        In a chain it is the first one with a difference, because the engines after it got their weights from it.
        """
        wrong: list[DescribedEngine] = []
        for group in self._groups:
            found = [engine for engine in group.engines if digests[engine.key] != digest]
            wrong += found[:1] if group.backend == "gloo" else found
        return wrong

    async def _fed(self, feeder: DescribedEngine, version: int) -> _Sent:
        """Return the digests of the weights that `feeder` sent: the trainer's, or, without sums, those of the feeder.

        Raises UpdateFailed: the feeder does not report its sums.
        """
        assert self._sent is not None, "can_feed"
        if self._sent.sums:
            return self._sent
        epoch, sums = self._holders[feeder.key][1], b""
        end = time.monotonic() + _SUMS_SECONDS
        try:
            while not sums and time.monotonic() < end:  # the feeder computes the sums after it has sent all tensors
                sums = await feeder.replica.call(feeder.replica.engine_control.sums(epoch=epoch, timeout=_SUMS_SECONDS))
                await asyncio.sleep(0 if sums else _SUMS_POLL_SECONDS)
        except FourfoldError as error:
            raise UpdateFailed({}, error) from error
        if not sums:
            raise UpdateFailed({}, DeadlinePassed(f"{feeder.name} did not compute its sums in {_SUMS_SECONDS:.0f} s"))
        return _Sent(policy_version=version, digest=digest_of(Manifest.from_bytes(self._manifest), sums), sums=sums)

    async def _digest_error(self, engine: DescribedEngine, digest: bytes, sent: _Sent) -> FourfoldError:
        """Return the error of an engine whose digest differs; it lists the tensors when sums were computed."""
        which = "sums were not computed in this update"
        if sent.sums:
            try:
                sums = await engine.replica.call(
                    engine.replica.engine_control.sums(epoch=self._epoch, timeout=_SUMS_SECONDS)
                )
                tensors = differing_tensors(self._manifest, sent.sums, sums)
                names = join_names(tensors) or "no tensor"
                which = f"{names} differ" if len(tensors) > 1 else f"{names} differs"
            except FourfoldError as error:
                which = f"the engine did not return its sums: {error.message}"
        return WrongState(
            f"{engine.name}: the weights of version {sent.policy_version} arrived with digest {digest.hex()[:16]}, "
            f"the trainer sent {sent.digest.hex()[:16]}: {which}; the engine does not serve them",
            reason="DIGEST_MISMATCH",
        )

    # -- commit ---------------------------------------------------------------------------------------------------

    async def _commit(
        self,
        engine: DescribedEngine,
        version: int,
        end: float,
        lookup: asyncio.Task[None],
        on_sampling: Callable[[DescribedEngine], None],
    ) -> tuple[float, float] | FourfoldError:
        """Make one engine serve the version once its probe agrees; return mean and largest difference, or its error.

        `lookup` gets the trainer's values of the probe; its error is returned, too.
        """
        epoch, calls = self._epoch, engine.replica.engine_control
        served = False
        try:
            with self._timer.measure(m.COMMIT_SECONDS):
                commit = calls.commit(epoch=epoch, policy_version=version, hold=True, timeout=_seconds_until(end))
                self._timer.add(m.PAUSE_SECONDS, await engine.replica.call(commit))
            if engine.about.sleeping:  # sampling needs more than the memory of the weights
                with self._timer.measure(m.TIME_WAKE):
                    await engine.replica.call(calls.wake("kv_cache", timeout=_seconds_until(end)))
            self._timer.lap(m.SAMPLING_SECONDS)
            engine.replica.version = version
            on_sampling(engine)
            with self._timer.measure(m.PROBE_SECONDS):
                logprobs = await engine.replica.call(calls.probe(self._probe.token_ids, timeout=_seconds_until(end)))
            await asyncio.shield(lookup)
            mean, largest = self._compare_probe(engine.key, version, logprobs)
            self.verified[engine.key] = version
            release = calls.release(epoch=epoch, policy_version=version, timeout=_seconds_until(end))
            await self._call_engine(engine, release)
            self._probe.set_engine_logprobs(engine.key, version, logprobs)
            served = True
            return mean, largest
        except FourfoldError as error:
            return error
        finally:
            if not served:  # the engine may serve either version, or hold tokens back
                engine.replica.version = -1
                await self._abort_engine(engine)

    def _compare_probe(self, key: ReplicaKey, version: int, logprobs: Float32Array) -> tuple[float, float]:
        try:
            return self._probe.compare(key, version, logprobs)
        except WrongState as error:
            arrived = "every tensor arrived as the trainer sent it"
            if self._skip_sums:
                arrived = "tensor sums were not computed in this update; this engine's next update computes them"
            raise WrongState(f"{error.message} ({arrived})", reason=error.reason) from None

    # -- abort ----------------------------------------------------------------------------------------------------

    async def _abort(self, engines: Sequence[DescribedEngine], *, trainer: bool) -> None:
        """Abort the update on all engines and, if it takes part, on the trainer, and close the epoch."""
        self._members = None
        if trainer:
            self._layout = None  # the next GetManifest is retried until a dead trainer has restarted
        self._begin_phase(status.ABORT, engines)

        async def abort_trainer() -> None:
            if trainer:
                await self._session.try_once(
                    lambda r: r.trainer_weights.abort(epoch=self._epoch, timeout=_ABORT_SECONDS)
                )

        trainer_result, *engine_results = await asyncio.gather(
            abort_trainer(), *(self._abort_engine(engine) for engine in engines), return_exceptions=True
        )
        self._status.end_update()
        if isinstance(trainer_result, FourfoldError) and not isinstance(trainer_result, StaleEpoch | Unavailable):
            log.warning("trainer did not abort the update error=%s", trainer_result)
        for error in engine_results:
            if error is not None:
                raise error

    async def _abort_engine(self, engine: DescribedEngine) -> None:
        """Abort the update on one engine. Unless it reports clean weights, it serves nothing before its next update."""
        state = control.WEIGHT_STATE_UNSPECIFIED
        if not engine.replica.gone:
            try:
                abort = engine.replica.engine_control.abort(epoch=self._epoch, timeout=_ABORT_SECONDS)
                state = await engine.replica.call(abort)
            except StaleEpoch:
                return  # the engine never joined this epoch, so its weights are untouched
            except FourfoldError as error:
                log.warning("engine did not abort the update engine=%s error=%s", engine.name, error)
        if state != control.WEIGHT_STATE_CLEAN:
            engine.replica.version = -1
            log.info("engine may hold mixed weights; it serves again after its next update engine=%s", engine.name)

    # -- calls ----------------------------------------------------------------------------------------------------

    def _begin_phase(
        self, phase: str, engines: Sequence[DescribedEngine], *, busy: Sequence[str] | None = None
    ) -> None:
        """Show the start of a phase in which `busy` have work to do; default: the trainer and all engines."""
        self._status.begin_phase(phase, trainer=self._session.name, engines=[e.name for e in engines], busy=busy)

    async def _call_engine(self, engine: DescribedEngine, call: Coroutine[Any, Any, T]) -> T:
        """Make the call that ends an engine's work in the phase; raise Unavailable if its lease ends meanwhile."""
        result = await engine.replica.call(call)
        self._status.mark_done(engine.name)
        return result


def _seconds_until(end: float) -> float:
    """Return the time left until `end`, at least 0.05 s: a call with an expired deadline would not be sent."""
    return max(end - time.monotonic(), 0.05)
