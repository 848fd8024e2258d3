"""The trainer's side of a weight update, one object per trainer rank.

    make_offer(epoch)  group 0: closes what was open, makes a transport; groups 1, 2, ..: one more each
    open(epoch)        meets the receivers of all groups
    send(epoch, v)     begin_round -> transport of every group, one after the other -> sums -> end_round
    abort(epoch)       from any thread: ends what is under way, closes the epoch

Epochs only grow. A transfer that failed or was aborted closes its epoch: the next one needs
make_offer with a higher epoch. All methods but `abort` belong to one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fourfold.errors import InvalidInput, StaleEpoch, WrongState
from fourfold.weights.digest import combine_digest, partial_sums
from fourfold.weights.manifest import Manifest, Span
from fourfold.weights.source import WeightSource, as_sent
from fourfold.weights.transport import Deadline, Group, SendTransport, aborted, make_sender, torch_dtype

__all__ = ["SendResult", "WeightSender", "combine_digest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendResult:
    """What one rank sent."""

    partial_sums: bytes
    """This rank's share of the digest, empty when sums were left out; `combine_digest` takes those of all ranks."""
    sent_bytes: int


class WeightSender:
    """Sends one rank's weights."""

    def __init__(self, source: WeightSource, *, rank: int, rank_count: int) -> None:
        """Make the sender of trainer rank `rank`.

        Raises:
            InvalidInput: the source was made for another number of ranks.
        """
        self._source = source
        self._manifest = source.manifest()
        if self._manifest.rank_count != rank_count or not 0 <= rank < rank_count:
            raise InvalidInput(
                f"rank {rank} of {rank_count} with weights laid out for {self._manifest.rank_count} ranks; "
                f"they must agree"
            )
        self._rank = rank
        self._spans = self._manifest.spans_of_rank(rank)
        self._lock = threading.Lock()  # guards the next three against abort
        self._epoch = -1
        self._transports: tuple[SendTransport, ...] = ()  # by group
        self._in_use = False
        self._opened = False

    def manifest(self) -> Manifest:
        """Return what will be sent."""
        return self._manifest

    def make_offer(self, epoch: int, backend: str, receiver_count: int, *, group: int = 0, timeout: float) -> bytes:
        """Return this rank's offer for one group of receivers.

        Args:
            epoch: group 0: above every earlier one; what was open is closed. Other groups: the open one.
            backend: how the group gets the weights.
            receiver_count: workers of all its engines together.
            group: 0 starts the epoch; 1, 2, ... add to it, in this order, before `open`.
            timeout: seconds.

        Raises:
            StaleEpoch: the epoch is not above the last one, or not the open one, or this is not its next group.
            InvalidInput: unknown backend, bad numbers.
        """
        Deadline(timeout)
        terms = Group(epoch=epoch, manifest=self._manifest, receiver_count=receiver_count)
        with self._lock:
            if group == 0 and epoch <= self._epoch:
                raise StaleEpoch(f"epoch {epoch} is not above the last one, {self._epoch}; use a higher one")
            if group and (epoch != self._epoch or group != len(self._transports) or self._opened):
                raise StaleEpoch(
                    f"group {group} cannot be added to epoch {epoch}: epoch {self._epoch} has {len(self._transports)} "
                    f"groups; start a new epoch"
                )
        transport = make_sender(backend, terms, self._rank)
        if group == 0:
            self.close()
        with self._lock:
            if group == 0:
                self._transports, self._epoch, self._opened = (transport,), epoch, False
            elif self._transports:
                self._transports = (*self._transports, transport)
            else:
                transport.close()
                raise aborted()
        return transport.offer()

    def open(self, epoch: int, *, timeout: float) -> None:
        """Meet all receivers of the epoch. Again: does nothing.

        Raises:
            StaleEpoch: not the open epoch, or aborted meanwhile.
            DeadlinePassed: a receiver did not come; the epoch is closed.
        """
        deadline = Deadline(timeout)
        with self._using(epoch) as transports:
            if not self._opened:
                for transport in transports:
                    transport.open(deadline)
                self._opened = True

    def send(self, epoch: int, policy_version: int, *, skip_sums: bool = False, timeout: float) -> SendResult:
        """Send the present weights as `policy_version` to all receivers; `skip_sums` leaves the sums out.

        Raises:
            StaleEpoch: not the open epoch, or aborted meanwhile.
            WrongState: not opened, or the weights are not where the manifest says.
            DeadlinePassed, Unavailable: a receiver is too slow or gone; the epoch is closed.
        """
        deadline = Deadline(timeout)
        with self._using(epoch) as transports:
            if not self._opened:
                raise WrongState(f"epoch {epoch} was not opened; call open after make_offer")
            self._source.begin_round()
            try:
                sent_bytes = sum(t.send(self._source, policy_version, deadline) for t in transports)
                # The receivers are already loading while this rank sums up.
                parts = ((span, self._read(span)) for span in self._spans)
                sums = b"" if skip_sums else partial_sums(self._manifest, parts)
            finally:
                self._source.end_round()
        return SendResult(partial_sums=sums, sent_bytes=sent_bytes)

    def abort(self, epoch: int) -> None:
        """End what is under way in `epoch` and close it. From any thread; does nothing when it is closed already.

        Raises:
            StaleEpoch: another epoch is open.
        """
        with self._lock:
            if not self._transports:
                return
            if epoch != self._epoch:
                raise StaleEpoch(f"epoch {epoch} is not open; epoch {self._epoch} is")
            transports, self._transports = self._transports, ()
            in_use = self._in_use
        for transport in transports:
            transport.abort()
        for transport in () if in_use else transports:
            transport.close()

    def close(self) -> None:
        """Abort whatever is open."""
        self.abort(self._epoch)

    def _read(self, span: Span) -> torch.Tensor:
        return as_sent(self._source.read(span), torch_dtype(self._manifest.tensors[span.tensor].dtype))

    @contextmanager
    def _using(self, epoch: int) -> Iterator[tuple[SendTransport, ...]]:
        """Yield the transports of `epoch`; an error inside closes the epoch, an abort meanwhile is raised."""
        with self._lock:
            if epoch != self._epoch or not self._transports:
                state = "open" if self._transports else "closed"
                raise StaleEpoch(f"epoch {epoch} is not open; the last one is {self._epoch}, {state}: make a new offer")
            transports, self._in_use = self._transports, True
        done = False
        try:
            yield transports
            done = True
        finally:
            with self._lock:
                self._in_use = False
                was_aborted = self._transports is not transports
                if not done:
                    self._transports = ()
            if not done or was_aborted:
                for transport in transports:
                    transport.abort()
                for transport in transports:
                    transport.close()
        if was_aborted:
            raise aborted()
