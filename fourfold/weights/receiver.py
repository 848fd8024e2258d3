"""One engine worker's side of a weight update, whatever the engine: epochs, transfer, digest, state.

    open     the applier bakes the manifest (serving goes on), then the transport meets the senders
    receive  wait for all shards -> sums -> applier begin, load, finish -> nothing changed underneath?
    commit   the received weights are the served ones
    abort    close the epoch and tell whether the weights are whole and the served version's

Until all shards have arrived nothing of the model is touched: what fails before leaves it
clean. An epoch ends with the first error; weights stay dirty until a later receive succeeds.
One thread calls everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fourfold.errors import StaleEpoch, WrongState
from fourfold.weights.applier import Applier, ApplyReport, ModelState
from fourfold.weights.digest import digest_of, partial_sums
from fourfold.weights.manifest import Manifest
from fourfold.weights.transport import Deadline, Group, ReceiveTransport, make_receiver


@dataclass(slots=True)
class _Session:
    """The open epoch."""

    epoch: int
    manifest: Manifest
    transport: ReceiveTransport
    stopped: Callable[[], bool] | None = None
    received_version: int = -1
    sums: bytes = b""


class WeightReceiver:
    """Receives and applies weights."""

    def __init__(self, applier: Applier) -> None:
        """Serve a model that holds whole weights now."""
        self._applier = applier
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
        *,
        stopped: Callable[[], bool] | None = None,
    ) -> ApplyReport:
        """Join an epoch, replacing the open one. When the manifest or the offers do not fit, nothing changes.

        Raises:
            StaleEpoch: the epoch is not above the last one.
            InvalidInput: bad manifest, offers or numbers.
            WrongState: the manifest does not fit the model, or the model cannot be updated.
            DeadlinePassed, Unavailable: the senders cannot be met; the epoch is closed.
        """
        deadline = Deadline(timeout, stopped=stopped)
        if epoch <= self._last_epoch:
            raise StaleEpoch(f"epoch {epoch} is not above the last one, {self._last_epoch}; use a higher one")
        parsed = Manifest.from_bytes(manifest)
        group = Group(epoch=epoch, manifest=parsed, receiver_count=receiver_count)
        transport = make_receiver(backend, group, receiver_index)
        transport.accept(offers)
        report = self._applier.bake(parsed)
        self._close()
        self._last_epoch = epoch
        self._session = _Session(epoch, parsed, transport, stopped)
        opened = False
        try:
            transport.open(deadline)
            opened = True
        finally:
            if not opened:
                self._close()
        return report

    def receive(self, epoch: int, policy_version: int, timeout: float) -> bytes:
        """Receive `policy_version` and put it into the model; return its digest (32 bytes).

        The model must not run meanwhile. After an error it can run again; `abort` tells with what.

        Raises:
            StaleEpoch: not the open epoch, or the sender aborted.
            WrongState: another version arrived, or the sender overwrote what was being read.
            DeadlinePassed, Unavailable: nothing arrived.
        """
        session = self._current(epoch)
        deadline = Deadline(timeout, stopped=session.stopped)
        self._dirty |= self._uncommitted  # what is held now was never served
        self._uncommitted = False
        done = False
        try:
            shards = session.transport.receive(policy_version, self._applier.sink(), deadline)
            session.sums = partial_sums(session.manifest, ((s, shards.read(s)) for s in session.manifest.spans))
            self._applier.begin()
            self._applier.load(shards)
            self._applier.finish()
            self._dirty = True  # until it is certain that the memory was not rewritten meanwhile
            session.transport.check()
            self._dirty, self._uncommitted = False, True
            session.received_version = policy_version
            done = True
        finally:
            if not done:
                self._dirty |= self._applier.abort() == "dirty"
                self._close()
        return digest_of(session.manifest, session.sums)

    def sums(self, epoch: int) -> bytes:
        """Return the per-tensor sums of what was received last: which tensor is it when digests differ?"""
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
        self._dirty |= self._applier.abort() == "dirty" or self._uncommitted
        self._uncommitted = False
        self._close()
        return "dirty" if self._dirty else "clean"

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
