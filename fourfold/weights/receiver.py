"""One engine worker's side of a weight update, whatever the engine: epochs, transfer, digest, state.

    open     an applier bakes the manifest, all workers of the engine agree, then the transport meets the senders
    receive  transport -> sums in passing -> applier -> nothing changed underneath?
    commit   the received weights are the served ones
    abort    close the epoch and tell whether the weights are whole and the served version's

Samples may be in the engine meanwhile, but an engine that waits for its workers continues none
before they have met the senders. Until those are there nothing of the model is touched: what
fails before leaves it clean. An epoch ends with the first error; weights stay dirty until a later receive succeeds.
One thread calls everything; a `AbortFlag` ends its waits from outside.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from fourfold.errors import FourfoldError, Internal, StaleEpoch, WrongState
from fourfold.weights.apply.reload import Applier, ApplyReport, CannotApply, ModelState
from fourfold.weights.consensus import OneWorker, Workers
from fourfold.weights.digest import digest_of, unsummed_digest
from fourfold.weights.manifest import Manifest
from fourfold.weights.tensor_sums import TensorSums, warm_up
from fourfold.weights.transport.base import Deadline, ReceiveTransport, TransferGroup, make_receiver
from fourfold.weights.transport.sink import SummingSink
from fourfold.weights.worker_control import AbortFlag


@dataclass(slots=True)
class _Session:
    """The open epoch."""

    epoch: int
    manifest: Manifest
    transport: ReceiveTransport
    applier: Applier
    stop: AbortFlag | None = None
    received_version: int = -1
    sums: bytes = b""
    seconds: dict[str, float] = field(default_factory=dict)


class WeightReceiver:
    """Receives and applies weights."""

    def __init__(self, appliers: Sequence[Applier], device: torch.device, workers: Workers | None = None) -> None:
        """Serve a model that holds whole weights now.

        Args:
            appliers: the best first; each epoch uses the first that can take its manifest.
            device: of the model.
            workers: all of the engine; None: it has one.
        """
        self._appliers, self._device = tuple(appliers), device
        self._workers: Workers = workers or OneWorker()
        self._session: _Session | None = None
        self._last_epoch = -1
        self._uncommitted = False
        self._dirty = False

    def open(
        self,
        epoch: int,
        backend: str,
        manifest: bytes,
        offers: Sequence[bytes],
        receiver_count: int,
        receiver_index: int,
        timeout: float,
        stop_path: str = "",
    ) -> ApplyReport:
        """Join an epoch, replacing the open one. When it does not fit one of the workers, nothing changes in any.

        Raises:
            StaleEpoch: the epoch is not above the last one, or was given up already.
            InvalidInput: bad manifest, offers or numbers.
            WrongState: the manifest does not fit the model, or the model cannot be updated.
            DeadlinePassed, Unavailable: the senders cannot be met; the epoch is closed.
        """
        stop = AbortFlag.attach(Path(stop_path)) if stop_path else None
        deadline = _deadline(timeout, stop, epoch)
        own: FourfoldError | None = Internal("the epoch could not be checked; the engine's log has the traceback")
        try:
            session, report = self._prepare(epoch, backend, manifest, offers, receiver_count, receiver_index)
            own = None
        except FourfoldError as error:
            own = error
        finally:  # whatever happened here: the others wait for an answer
            refusal = self._workers.first_refusal(own, deadline)
        if refusal is not None:
            if own is None and self._session is not None:  # its applier expects the other manifest now
                self._session.applier.bake(self._session.manifest)
            raise refusal
        self._close()
        self._last_epoch, self._session = epoch, session
        session.stop = stop
        opened = False
        try:
            warm_up(self._device)
            session.transport.open(deadline)
            opened = True
        finally:
            if not opened:
                self._close()
        return report

    def receive(self, epoch: int, policy_version: int, timeout: float, skip_sums: bool = False) -> bytes:
        """Receive `policy_version` and put it into the model; return its digest (32 bytes).

        The model must not run meanwhile. After an error it can run again; `abort` tells with what.

        Args:
            epoch: the open one.
            policy_version: that is due.
            timeout: seconds.
            skip_sums: the sender leaves the sums out, too; the digest says nothing of the tensors then.

        Raises:
            StaleEpoch: not the open epoch, or it was given up.
            WrongState: another version arrived, or the sender overwrote what was being read.
            DeadlinePassed, Unavailable: nothing arrived.
        """
        session = self._current(epoch)
        deadline = _deadline(timeout, session.stop, epoch)
        self._dirty |= self._uncommitted  # what is held now was never served
        self._uncommitted = False
        clock = _Clock(session.seconds)
        done = False
        try:
            applier = session.applier
            applier.begin(stable=session.transport.stable)
            sink = None if skip_sums else SummingSink(applier, TensorSums(session.manifest))
            clock.lap("begin")
            session.transport.receive(policy_version, sink or applier, deadline)
            clock.lap("transfer")
            applier.finish()
            self._dirty = True  # until it is certain that the memory was not rewritten meanwhile
            clock.lap("apply")
            session.sums = sink.finish() if sink else b""
            clock.lap("sums")
            session.transport.check()
            self._dirty, self._uncommitted = False, True
            session.received_version = policy_version
            done = True
        finally:
            if not done:
                self._dirty |= session.applier.abort() == "dirty"
                self._close()
        if skip_sums:
            return unsummed_digest(session.manifest, policy_version)
        return digest_of(session.manifest, session.sums)

    def timings(self, epoch: int) -> dict[str, float]:
        """Return the seconds that parts of the last `receive` took: begin, transfer, apply, sums."""
        return dict(self._current(epoch).seconds)

    def sums(self, epoch: int) -> bytes:
        """Return the sums of every tensor that was received last, empty when they were left out."""
        return self._current(epoch).sums

    def commit(self, epoch: int, policy_version: int) -> None:
        """Note that the received version is served. Again: does nothing.

        Raises:
            StaleEpoch: not the open epoch.
            WrongState: that version was not received.
        """
        session = self._current(epoch)
        if session.received_version != policy_version:
            raise WrongState(
                f"version {policy_version} cannot be committed: the last one received is {session.received_version}"
            )
        self._uncommitted = False

    def abort(self, epoch: int) -> ModelState:
        """Close the epoch; return "clean" when the model holds the served version's weights. Idempotent.

        Weights that were received but not committed are whole, but not those that are served: "dirty".

        Raises:
            StaleEpoch: another epoch is open.
        """
        if self._session is not None:
            self._current(epoch)
            self._dirty |= self._session.applier.abort() == "dirty"
        self._dirty |= self._uncommitted
        self._uncommitted = False
        self._close()
        return "dirty" if self._dirty else "clean"

    def _prepare(
        self, epoch: int, backend: str, manifest: bytes, offers: Sequence[bytes], receiver_count: int, index: int
    ) -> tuple[_Session, ApplyReport]:
        """Check everything and make what the epoch needs; nothing changes."""
        if epoch <= self._last_epoch:
            raise StaleEpoch(f"epoch {epoch} is not above the last one, {self._last_epoch}; use a higher one")
        parsed = Manifest.from_bytes(manifest)
        group = TransferGroup(epoch=epoch, manifest=parsed, receiver_count=receiver_count)
        transport = make_receiver(backend, group, index, self._device)
        transport.accept(offers)
        applier, report = self._bake(parsed)
        return _Session(epoch, parsed, transport, applier), report

    def _bake(self, manifest: Manifest) -> tuple[Applier, ApplyReport]:
        """Return the best applier for a manifest, and how it will apply it."""
        reasons: list[str] = []
        for applier in self._appliers:
            try:
                report = applier.bake(manifest)
            except CannotApply as reason:
                reasons.append(str(reason))
            else:
                return applier, replace(report, reload_reason="; ".join(reasons))
        raise WrongState(f"the weights cannot be applied: {'; '.join(reasons)}")

    def _current(self, epoch: int) -> _Session:
        if self._session is None or self._session.epoch != epoch:
            state = "open" if self._session is not None else "closed"
            raise StaleEpoch(f"epoch {epoch} is not open; the last one is {self._last_epoch}, {state}")
        return self._session

    def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.transport.abort()
            session.transport.close()


def _deadline(timeout: float, stop: AbortFlag | None, epoch: int) -> Deadline:
    return Deadline(timeout, stopped=None if stop is None else lambda: stop.is_aborted(epoch))


class _Clock:
    """Writes down how long each part takes."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """End a part."""
        now = time.perf_counter()
        self._seconds[part], self._last = now - self._last, now
