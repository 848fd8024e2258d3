"""Runs an engine worker's side of a weight update, for any engine: epochs, transfer, digest, state.

The model is untouched until the senders have announced the version, so a failure before that leaves it clean. An epoch
ends with its first error. A dirty model stays dirty until a later receive succeeds.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fourfold.address import LOOPBACK
from fourfold.errors import CONSEQUENCES, FourfoldError, Internal, StaleEpoch, WrongState
from fourfold.weights.apply.base import Applier, ApplyReport, CannotApply, ModelState
from fourfold.weights.apply.loader_trace import no_place
from fourfold.weights.consensus import GroupConsensus
from fourfold.weights.digest import digest_of, unsummed_digest
from fourfold.weights.manifest import Manifest, Span
from fourfold.weights.tensor_sums import TensorSums, partial_sums, warm_up
from fourfold.weights.transport.base import Backend, ReceiveTransport, Sink, TransferGroup, make_receiver, make_sender
from fourfold.weights.transport.staging import span_view
from fourfold.weights.transport.waiting import Deadline
from fourfold.weights.worker_control import AbortFlag

_log = logging.getLogger(__name__)
_JOIN_SECONDS = 10.0


class HeldShards:
    """Implements `WeightSource` with the shards of all ranks as they arrived: uint8 [bytes] each."""

    def __init__(self, manifest: Manifest, shards: Sequence[torch.Tensor]) -> None:
        self._manifest, self._shards = manifest, shards

    def manifest(self) -> Manifest:
        return self._manifest

    def begin_round(self) -> None:
        pass

    def read(self, span: Span) -> torch.Tensor:
        return span_view(self._manifest, self._shards[span.rank], span)

    def is_view(self, span: Span) -> bool:
        return True

    def end_round(self) -> None:
        pass


class WeightFeed:
    """One transfer to late receivers, by gloo: one sender for each rank of the manifest."""

    def __init__(self, group: TransferGroup, shards: Sequence[torch.Tensor], version: int, timeout: float) -> None:
        """Make the offers and start the thread. Raises WrongState: see `listen_address`."""
        self._source = HeldShards(group.manifest, shards)
        self._manifest = group.manifest
        ranks = range(group.manifest.rank_count)
        self._senders = [make_sender(Backend.GLOO, group, rank, self._source) for rank in ranks]
        self.offers = [sender.offer() for sender in self._senders]
        self.sums = b""
        """Sums of the weights sent; empty until everything was sent."""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(version, timeout), name="weights-feed", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the transfer. Any number of times."""
        self._ending.set()
        for sender in self._senders:
            sender.abort()
        self._thread.join(_JOIN_SECONDS)

    def _run(self, version: int, timeout: float) -> None:
        deadline = Deadline(timeout)
        try:
            for sender in self._senders:
                sender.open(deadline)
            for sender in self._senders:
                sender.send(version, deadline)
            self.sums = partial_sums(self._manifest, ((span, self._source.read(span)) for span in self._manifest.spans))
            _log.info("Weights sent to late engines. version=%d", version)
            # The last bytes may be on their way still, and senders that close tell receivers of an abort.
            self._ending.wait(deadline.remaining)
        except FourfoldError as error:  # the late engines report errors, and the coordinator chooses another sender
            level = logging.INFO if error.reason in CONSEQUENCES else logging.WARNING
            _log.log(level, "Late engines could not be fed. version=%d error=%s", version, error)
        finally:
            for sender in self._senders:
                sender.close()


@dataclass(slots=True)
class _Epoch:
    number: int
    manifest: Manifest
    transport: ReceiveTransport[Any, Any]
    applier: Applier
    abort_flag: AbortFlag | None = None
    received_version: int = -1
    sums: bytes = b""


class WeightReceiver:
    """Receives weights and applies them to one worker's model. One thread calls it; an `AbortFlag` ends its waits."""

    def __init__(
        self, appliers: Sequence[Applier], device: torch.device, consensus: GroupConsensus | None = None
    ) -> None:
        """Serve a model on `device` that holds whole weights now.

        Each epoch uses the first of `appliers` that can take its manifest. `consensus`: None if there is one worker.
        """
        self._appliers, self._device = tuple(appliers), device
        self._consensus = consensus
        self._open_epoch: _Epoch | None = None
        self._feed: WeightFeed | None = None
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
        abort_path: str = "",
        host: str = LOOPBACK,
        interface: str = "",
    ) -> ApplyReport:
        """Join an epoch, replacing the open one. If any worker refuses it, nothing changes in any worker.

        Args:
            epoch: above every earlier one.
            backend: one of `transport.base.available_backends`.
            manifest: canonical bytes.
            offers: of all trainer ranks, in rank order.
            receiver_count: receivers of all engines.
            receiver_index: of this worker among them.
            timeout: in seconds, as in all methods.
            abort_path: file of the `AbortFlag` that ends waits of this epoch; empty: none.
            host: where the other members reach this worker; see `listen_address`.
            interface: on which it listens instead.

        Raises:
            StaleEpoch: the epoch is not above the last one, or was aborted already.
            InvalidInput: bad manifest, offers or numbers.
            WrongState: the manifest does not fit the model, or the model cannot be updated.
            DeadlinePassed, Unavailable: the senders cannot be met; the epoch is closed.
        """
        flag = AbortFlag.attach(Path(abort_path)) if abort_path else None
        deadline = _deadline(timeout, flag, epoch)
        own: FourfoldError | None = Internal("the epoch could not be checked; the engine's log has the traceback")
        try:
            group = self._group(epoch, manifest, receiver_count, host, interface)
            opening, report = self._prepare(group, backend, offers, receiver_index)
            own = None
        except FourfoldError as error:
            own = error
        finally:  # also after unexpected errors, because the other workers wait for this vote
            refusal = own if self._consensus is None else self._consensus.first_refusal(own, deadline)
        if refusal is None:
            refusal = self._unplaced(group.manifest, report, deadline)
        if refusal is not None:
            if own is None and self._open_epoch is not None:  # _prepare baked the new manifest into the applier
                self._open_epoch.applier.bake(self._open_epoch.manifest)
            raise refusal
        self._close()
        self._last_epoch, self._open_epoch = epoch, opening
        opening.abort_flag = flag
        with ExitStack() as on_error:
            on_error.callback(self._close)
            warm_up(self._device)
            opening.transport.open(deadline)
            on_error.pop_all()
        return report

    def receive(self, epoch: int, policy_version: int, timeout: float, skip_sums: bool = False) -> bytes:
        """Receive `policy_version` into the model and return its digest (32 bytes).

        The model must not run meanwhile. After an error it can run again; `abort` returns what it holds. If both
        sides have `skip_sums`, no sums are computed, and the digest does not depend on the weights.

        Raises:
            StaleEpoch: not the open epoch, or it was aborted.
            WrongState: another version arrived, or the sender overwrote the data while it was being read.
            DeadlinePassed, Unavailable: nothing arrived.
        """
        current = self._current(epoch)
        self._end_feed()  # the feed reads memory that is overwritten now
        deadline = _deadline(timeout, current.abort_flag, epoch)
        self._dirty |= self._uncommitted  # the weights held now were received but never served
        self._uncommitted = False
        applier = current.applier
        with ExitStack() as on_error:
            on_error.callback(self.abort, epoch)
            applier.begin(stable=current.transport.stable)
            sink = None if skip_sums else _SummingSink(applier, TensorSums(current.manifest))
            current.transport.receive(policy_version, sink or applier, deadline)
            applier.finish()
            self._dirty = True  # until `check` below shows that the data did not change meanwhile
            current.sums = sink.finish() if sink else b""
            current.transport.check()
            self._dirty, self._uncommitted = False, True
            current.received_version = policy_version
            on_error.pop_all()
        if skip_sums:
            return unsummed_digest(current.manifest, policy_version)
        return digest_of(current.manifest, current.sums)

    def sums(self, epoch: int) -> bytes:
        """Return the sums of the version received last; empty if it was received without sums and never fed."""
        sums = self._current(epoch).sums
        return sums if sums or self._feed is None else self._feed.sums

    def feed(
        self, epoch: int, policy_version: int, receiver_count: int, host: str, interface: str, timeout: float
    ) -> list[bytes]:
        """Begin to send the served version to late receivers by gloo, in a thread; return the offers for them.

        The thread ends after `timeout` seconds, with the next `feed`, `receive` or `open`, and with `abort`. Args and
        errors are those of `WeightSender.make_offer`.

        Raises:
            WrongState: the version is not the served one, or its transport keeps no copy of it.
        """
        current = self._open_epoch
        if current is None or self._dirty or self._uncommitted or current.received_version != policy_version:
            raise WrongState(f"this engine does not hold version {policy_version} as it arrived; another must send it")
        shards = current.transport.held_shards()
        group = TransferGroup(
            epoch=epoch, manifest=current.manifest, receiver_count=receiver_count, host=host, interface=interface
        )
        self._end_feed()
        self._feed = WeightFeed(group, shards, policy_version, timeout)
        return self._feed.offers

    def commit(self, epoch: int, policy_version: int) -> None:
        """Record that the received version is served. Idempotent. Raises WrongState: it was not received."""
        received = self._current(epoch).received_version
        if received != policy_version:
            raise WrongState(f"version {policy_version} cannot be committed: the last one received is {received}")
        self._uncommitted = False

    def abort(self, epoch: int) -> ModelState:
        """Close the epoch; return "clean" if the model holds exactly the served version. Idempotent.

        A version that was received but not committed is whole, yet not the one served: "dirty".
        """
        if self._open_epoch is not None:
            current = self._current(epoch)
            self._dirty |= current.applier.abort() == "dirty"
        self._dirty |= self._uncommitted
        self._uncommitted = False
        self._close()
        return "dirty" if self._dirty else "clean"

    def _group(self, epoch: int, manifest: bytes, receiver_count: int, host: str, interface: str) -> TransferGroup:
        if epoch <= self._last_epoch:
            raise StaleEpoch(f"epoch {epoch} is not above the last one, {self._last_epoch}; use a higher one")
        parsed = Manifest.from_bytes(manifest)
        return TransferGroup(
            epoch=epoch, manifest=parsed, receiver_count=receiver_count, host=host, interface=interface
        )

    def _prepare(
        self, group: TransferGroup, backend: str, offers: Sequence[bytes], index: int
    ) -> tuple[_Epoch, ApplyReport]:
        """Check everything and make the parts of the epoch; do not change the open one."""
        transport = make_receiver(backend, group, index, self._device)
        transport.accept(offers)
        applier, report = self._bake(group.manifest)
        return _Epoch(group.epoch, group.manifest, transport, applier), report

    def _unplaced(self, manifest: Manifest, report: ApplyReport, deadline: Deadline) -> WrongState | None:
        """Return the error for tensors that no stage of a pipeline takes; None if there are none."""
        if self._consensus is None:
            return None
        elsewhere = frozenset(report.elsewhere)
        lost = self._consensus.in_all([spec.name in elsewhere for spec in manifest.tensors], deadline)
        return no_place([manifest.tensors[index].name for index in lost]) if lost else None

    def _bake(self, manifest: Manifest) -> tuple[Applier, ApplyReport]:
        """Return the best applier for a manifest, and its report."""
        reasons: list[str] = []
        for applier in self._appliers:
            try:
                report = applier.bake(manifest)
            except CannotApply as reason:
                reasons.append(str(reason))
            else:
                return applier, replace(report, reload_reason="; ".join(reasons))
        raise WrongState(f"the weights cannot be applied: {'; '.join(reasons)}")

    def _current(self, epoch: int) -> _Epoch:
        if self._open_epoch is None or self._open_epoch.number != epoch:
            state = "open" if self._open_epoch is not None else "closed"
            raise StaleEpoch(f"epoch {epoch} is not open; the last one is {self._last_epoch}, {state}")
        return self._open_epoch

    def _close(self) -> None:
        self._end_feed()
        closing, self._open_epoch = self._open_epoch, None
        if closing is not None:
            closing.transport.abort()
            closing.transport.close()

    def _end_feed(self) -> None:
        feed, self._feed = self._feed, None
        if feed is not None:
            feed.close()


class _SummingSink:
    """Computes the sums of all elements on their way into a sink."""

    def __init__(self, sink: Sink, sums: TensorSums) -> None:
        self._sink, self._sums = sink, sums
        self._in_place: list[tuple[Span, torch.Tensor]] = []

    def slot(self, span: Span) -> torch.Tensor | None:
        """Return the sink's slot, whose elements `finish` adds when they have arrived."""
        if (slot := self._sink.slot(span)) is not None:
            self._in_place.append((span, slot))
        return slot

    def take(self, span: Span, values: torch.Tensor) -> None:
        """Add the elements and pass them on. Elements for a slot are added in the slot, which checks the copy too."""
        if self.slot(span) is None:
            self._sums.add([(span, values)])
        self._sink.take(span, values)

    def flush(self) -> None:
        self._sink.flush()

    def finish(self) -> bytes:
        self._sums.add(self._in_place)
        return self._sums.to_bytes()


def _deadline(timeout: float, flag: AbortFlag | None, epoch: int) -> Deadline:
    return Deadline(timeout, stopped=None if flag is None else lambda: flag.is_aborted(epoch))
