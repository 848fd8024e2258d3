"""Runs the trainer's side of a weight update, one `WeightSender` per trainer rank.

Epochs only grow. A transfer that failed or was aborted closes its epoch, and the next one needs `make_offer` with a
higher epoch. All methods but `abort` belong to one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from fourfold.address import LOOPBACK
from fourfold.errors import TRANSFER_ABORTED, FourfoldError, InvalidInput, StaleEpoch, WrongState
from fourfold.weights.manifest import Manifest
from fourfold.weights.source.base import WeightSource, synchronize, torch_dtype
from fourfold.weights.tensor_sums import partial_sums, warm_up
from fourfold.weights.transport.base import SendTransport, TransferGroup, make_sender
from fourfold.weights.transport.waiting import Deadline, aborted


@dataclass(frozen=True, slots=True, kw_only=True)
class SendResult:
    partial_sums: bytes  # sums of this rank's shard, for `digest.add_sums`; empty if they were skipped
    sent_bytes: int


class WeightSender:
    """Sends the weights of one rank."""

    def __init__(self, source: WeightSource, *, rank: int, rank_count: int) -> None:
        self._source = source
        self._manifest = source.manifest()
        if self._manifest.rank_count != rank_count or not 0 <= rank < rank_count:
            raise InvalidInput(
                f"rank {rank} of {rank_count} with weights laid out for {self._manifest.rank_count} ranks; "
                f"they must agree"
            )
        self._rank = rank
        self._spans = self._manifest.spans_of_rank(rank)
        self._lock = threading.Lock()  # guards _epoch, _transports and _in_use, which `abort` reads in another thread
        self._epoch = -1
        self._transports: list[SendTransport] = []
        self._in_use = False
        self._opened = False

    def manifest(self) -> Manifest:
        return self._manifest

    def make_offer(
        self,
        epoch: int,
        backend: str,
        receiver_count: int,
        *,
        group: int = 0,
        host: str = LOOPBACK,
        interface: str = "",
        timeout: float,
    ) -> bytes:
        """Start an epoch, closing the open one, or add a group of receivers to it; return this rank's offer.

        Args:
            epoch: above every earlier one; for a further group, the epoch started last.
            backend: one of `transport.base.Backend`.
            receiver_count: workers of all engines of the group together.
            group: 0, then 1, 2, ...
            host: where the receivers reach this rank; see `listen_address`.
            interface: on which it listens instead.
            timeout: in seconds, as in all methods.

        Raises:
            StaleEpoch: the epoch or the group is not the next one.
            WrongState: the backend cannot send from where the weights are.
        """
        Deadline(timeout)  # only checks the value: nothing here waits
        members = TransferGroup(
            epoch=epoch, manifest=self._manifest, receiver_count=receiver_count, host=host, interface=interface
        )
        with self._lock:
            if group:
                self._check_next_group(epoch, group)
            elif epoch <= self._epoch:
                raise StaleEpoch(f"epoch {epoch} is not above the last one, {self._epoch}; use a higher one")
        transport = make_sender(backend, members, self._rank, self._source)
        if not group:
            self.close()
        with ExitStack() as on_error, self._lock:
            on_error.callback(transport.close)
            if group:
                self._check_next_group(epoch, group)  # check again: the epoch may have been aborted meanwhile
            else:
                self._transports, self._epoch, self._opened = [], epoch, False
            self._transports.append(transport)
            on_error.pop_all()
        return transport.offer()

    def open(self, epoch: int, *, timeout: float) -> None:
        """Connect to the receivers of all groups. Idempotent. Raises DeadlinePassed: a receiver did not connect."""
        deadline = Deadline(timeout)
        with self._using(epoch) as transports:
            if not self._opened:
                if self._spans:
                    warm_up(self._source.read(self._spans[0]).device)
                for transport in transports:
                    transport.open(deadline)
                self._opened = True

    def send(self, epoch: int, policy_version: int, *, skip_sums: bool = False, timeout: float) -> SendResult:
        """Send the present weights as `policy_version` to all receivers. When this returns, the weights may change.

        Raises:
            WrongState: not opened, or the weights are not where the manifest places them.
            DeadlinePassed, Unavailable: a receiver is too slow or gone; the epoch is closed.
        """
        deadline = Deadline(timeout)
        with self._using(epoch) as transports:
            if not self._opened:
                raise WrongState(f"epoch {epoch} was not opened; call open after make_offer")
            self._source.begin_round()
            try:
                sent_bytes = self._send(transports, policy_version, deadline)
                # After the transfer, so that the receivers load while this rank computes its sums.
                sums = b"" if skip_sums else self._partial_sums()
            finally:
                self._source.end_round()
        return SendResult(partial_sums=sums, sent_bytes=sent_bytes)

    def abort(self, epoch: int) -> None:
        """Abort `epoch` and close it, from any thread; does nothing if it is closed already."""
        with self._lock:
            if not self._transports:
                return
            if epoch != self._epoch:
                raise StaleEpoch(f"epoch {epoch} is not open; epoch {self._epoch} is")
            transports, self._transports = self._transports, []
            in_use = self._in_use
        for transport in transports:
            transport.abort()
            if not in_use:
                transport.close()

    def close(self) -> None:
        self.abort(self._epoch)

    def _send(self, transports: Sequence[SendTransport], policy_version: int, deadline: Deadline) -> int:
        """Send to all groups side by side: engines of a fast group would otherwise wait for those of a slow one."""
        # `here` send in this thread: those from GPU memory, else the first. `others` send in threads of a pool.
        here = [transport for transport in transports if not transport.through_host] or transports[:1]
        others = [transport for transport in transports if transport not in here]
        if others and self._spans:
            synchronize(self._source.read(self._spans[0]).device)  # threads do not share the stream of this one
        if not others:
            return sum(transport.send(policy_version, deadline) for transport in here)

        def run(transport: SendTransport) -> int:
            with ExitStack() as on_error:
                for each in transports:
                    on_error.callback(each.abort)
                sent = transport.send(policy_version, deadline)
                on_error.pop_all()
            return sent

        with ThreadPoolExecutor(len(others), thread_name_prefix="weights-send") as pool:
            running = [pool.submit(run, transport) for transport in others]
            results: list[int | FourfoldError] = []
            calls: list[Callable[[], int]] = [
                *(partial(run, transport) for transport in here),
                *(number.result for number in running),
            ]
            for call in calls:
                try:
                    results.append(call())
                except FourfoldError as error:
                    results.append(error)
        errors = [result for result in results if isinstance(result, FourfoldError)]
        if errors:
            raise next((error for error in errors if error.reason != TRANSFER_ABORTED), errors[0])
        return sum(result for result in results if isinstance(result, int))

    def _partial_sums(self) -> bytes:
        dtypes = [torch_dtype(spec.dtype) for spec in self._manifest.tensors]
        parts = ((span, self._source.read(span).to(dtypes[span.tensor])) for span in self._spans)
        return partial_sums(self._manifest, parts)

    def _check_next_group(self, epoch: int, group: int) -> None:
        if epoch != self._epoch or self._opened or group != len(self._transports):
            raise StaleEpoch(
                f"group {group} of epoch {epoch} is not the next one: epoch {self._epoch} has {len(self._transports)} "
                f"groups{' and is open' if self._opened else ''}; start a new epoch"
            )

    @contextmanager
    def _using(self, epoch: int) -> Iterator[list[SendTransport]]:
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
                    self._transports = []
            if not done or was_aborted:
                for transport in transports:
                    transport.abort()
                    transport.close()
        if was_aborted:
            raise aborted()
