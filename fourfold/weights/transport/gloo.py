"""Sends weights over TCP with gloo, through main memory, between any hosts: along a chain of receivers.

    trainer rank 0 --> receiver 0 --> receiver 1 --> receiver 2 --> ...
    trainer rank 1 ------^

Each arrow is a gloo group of two, `ProcessGroupGloo` objects that do not touch torch's global group. Every trainer rank
sends its shard once, to receiver 0, whatever the number of receivers. A receiver passes each chunk on as soon as it has
arrived, so a chain of N takes the time of one transfer and that of N chunks more.

The members meet at the key-value stores of the ranks (`rendezvous.py`), which listen on the address by which the
coordinator knows each process. The store of rank 0 also holds the first failure: the neighbours of a dead process put
its index there, and the others end with the same error. Errors of healthy members carry PEER_LOST or PEER_SLOW, so that
the coordinator fences the failed one.

Gloo itself cannot be interrupted: a call that is aborted returns at once, and a thread keeps the group until the
operation has timed out.
"""

from __future__ import annotations

import contextlib
import ipaddress
import struct
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo

from fourfold.bounds import chunk_bytes
from fourfold.errors import PEER_LOST, PEER_SLOW, DeadlinePassed, FourfoldError, InvalidInput, Unavailable
from fourfold.weights.manifest import Manifest, Span
from fourfold.weights.source.base import WeightSource, torch_dtype
from fourfold.weights.transport.base import (
    Backend,
    ReceiveTransport,
    SenderLink,
    Sink,
    TransferGroup,
    check_header,
    pack_offer,
    used_up,
)
from fourfold.weights.transport.locality import listen_address
from fourfold.weights.transport.rendezvous import (
    FAULT,
    NONCE_BYTES,
    POLL_SECONDS,
    KeyValueStore,
    StoreClient,
    StoreGone,
    connect_pair,
)
from fourfold.weights.transport.staging import hand_to_sink
from fourfold.weights.transport.waiting import Deadline, aborted

# Receives that are posted before the first has arrived.
_AHEAD: Final = 4
# A receiver that has all data waits for its successor less than the remaining time, by this share and at most by these
# seconds. So it ends first and can report a slow successor to the other members.
_EARLIER_SHARE: Final = 0.1
_EARLIER_SECONDS: Final = 5.0
_CONNECT_SECONDS: Final = 10.0
# Longer than the wait in `_Pair.finish`: when gloo's own timeout closes the connection, this member looks dead.
_GLOO_EXTRA_SECONDS: Final = 5.0
_ABORTED: Final = b"aborted"
# port of the store, its secret; the rest is its IP address as text
_BODY: Final = struct.Struct(f"<H{NONCE_BYTES}s")
_TRAINER: Final = -1


class _Offer(NamedTuple):
    address: str
    port: int
    nonce: bytes


class _Membership:
    """A member's view of the chain: its index (-1: a trainer rank), the store of its rank, and the first failure."""

    def __init__(self, store: StoreClient, index: int, address: str, abort: threading.Event) -> None:
        self.store, self.index, self.address, self.abort = store, index, address, abort
        self._watching = False

    def watch(self) -> None:
        """Ask the store for the first failure. After this call, nothing else may be asked."""
        self.store.ask(FAULT)
        self._watching = True

    def check(self) -> None:
        """Raise the error of the first member that failed, if one did."""
        if self._watching and (told := self.store.poll(0.0)) is not None:
            raise self.fault(told)

    def report(self, kind: str, index: int) -> None:
        """Report that a member is "gone" or "slow", unless another failure was reported before."""
        self.store.put(FAULT, f"{kind} {index}".encode())

    def first_fault(self, seconds: float) -> FourfoldError | None:
        """Return the error of the member that was reported first; None if nothing is known within `seconds`."""
        if not self._watching:
            return None
        try:
            told = self.store.poll(seconds)
        except StoreGone as gone:
            return gone
        return None if told is None else self.fault(told)

    def fault(self, told: bytes) -> FourfoldError:
        kind, _, number = told.decode("ascii", "replace").partition(" ")
        if told == _ABORTED or not number.lstrip("-").isdecimal():
            return aborted()
        index = int(number)
        if index == self.index:
            text = "the other members of the chain lost the connection to this one, or waited for it in vain"
            return DeadlinePassed(text) if kind == "slow" else Unavailable(text)
        name = "the trainer" if index == _TRAINER else f"receiver {index}"
        if kind == "slow":
            return DeadlinePassed(f"{name} took too long in the chain of receivers", reason=PEER_SLOW)
        return Unavailable(f"{name} is gone from the chain of receivers", reason=PEER_LOST)


class _Pair(SenderLink):
    """One end of a connection of the chain. `upper`: this end sends."""

    def __init__(self, member: _Membership, store: StoreClient, name: str, *, upper: bool, neighbour: int) -> None:
        """Prepare the connection `name` to the member with the index `neighbour`, whom `store` knows, too."""
        self._member, self._store, self._name = member, store, name
        self._upper, self._neighbour = upper, neighbour
        self._who = store.owner if neighbour == _TRAINER else f"receiver {neighbour}"
        self._group: ProcessGroupGloo | None = None
        self._last: _Operation | None = None

    def join(self, deadline: Deadline) -> None:
        """Wait for the other end and connect. Raises Unavailable: it has ended, or cannot be reached."""
        member, rank, what = self._member, 0 if self._upper else 1, f"the meeting with {self._who}"
        try:
            self._group = connect_pair(self._store, self._name, rank, member.address, member.abort, deadline, what)
        except RuntimeError as error:
            # Both ends fail. Blame the lower one, because the others form a chain without it.
            raise Unavailable(
                f"cannot connect from {member.address} to {self._who} ({str(error)[:200]}); machines must reach each "
                f"other on the network of this address: see weights.interface",
                reason=PEER_LOST if self._upper else "",
            ) from None

    def start(self, data: torch.Tensor, deadline: Deadline) -> _Operation:
        """Begin to send `data`, or to receive into it: uint8, contiguous, on the CPU. Operations run in order."""
        if self._group is None:
            raise used_up()
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        left = deadline.check(f"a transfer with {self._who}")
        options.timeout = timedelta(seconds=left + _GLOO_EXTRA_SECONDS)
        try:
            self._last = _Operation(self._group.broadcast([data], options))  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise self._lost(error) from None
        return self._last

    def finish(self, operation: _Operation, deadline: Deadline) -> None:
        """Wait for the end of an operation. Raises the error of the member that failed first."""
        what = f"{'sending to' if self._upper else 'receiving from'} {self._who}"
        while not operation.done.wait(POLL_SECONDS):
            if self._member.abort.is_set() or deadline.is_stopped:
                raise aborted()
            self._member.check()
            if deadline.remaining <= 0 and self._upper:
                self._member.report("slow", self._neighbour)
            if deadline.remaining <= 0:
                raise self._member.first_fault(POLL_SECONDS) or DeadlinePassed(
                    f"{what} took too long; a member is slow or stuck, abort the epoch", reason=PEER_SLOW
                )
        try:
            operation.work.wait()
        except RuntimeError as error:
            raise self._lost(error) from None

    def close(self) -> None:
        """Close the connection; with an operation under way a thread keeps it, because dropping it would block."""
        group, self._group = self._group, None
        if group is not None and self._last is not None and not self._last.done.is_set():
            arguments = (self._last.work, group)
            threading.Thread(target=_wait_for_end, args=arguments, name="gloo-abandoned", daemon=True).start()

    def _lost(self, error: RuntimeError) -> FourfoldError:
        if self._member.abort.is_set():
            return aborted()
        self._member.report("gone", self._neighbour)
        return self._member.first_fault(1.0) or Unavailable(
            f"{self._who} is gone ({str(error)[:200]}); abort the epoch", reason=PEER_LOST
        )


class _Operation:
    def __init__(self, work: Any) -> None:
        self.work, self.done = work, threading.Event()
        work.get_future().add_done_callback(lambda _: self.done.set())


class GlooSender:
    """One trainer rank: the head of the chain."""

    through_host = True

    def __init__(self, group: TransferGroup, rank: int, source: WeightSource) -> None:
        """Open the store. Raises WrongState: this machine has no address that the receivers reach."""
        self._group, self._rank, self._source = group, rank, source
        self._spans = sorted(group.manifest.spans_of_rank(rank), key=lambda span: span.offset)
        self._address = listen_address(group.host, group.interface)
        self._store = KeyValueStore(self._address)
        self._abort = threading.Event()
        self._member: _Membership | None = None
        self._pair: _Pair | None = None

    def offer(self) -> bytes:
        body = _BODY.pack(self._store.port, self._store.nonce) + self._address.encode()
        return pack_offer(Backend.GLOO, self._group, self._rank, body)

    def open(self, deadline: Deadline) -> None:
        client = StoreClient(self._address, self._store.port, self._store.nonce, "this rank's store", deadline)
        self._member = _Membership(client, _TRAINER, self._address, self._abort)
        self._pair = _Pair(self._member, client, "link-0", upper=True, neighbour=0)
        self._pair.join(deadline)
        self._member.watch()

    def send(self, policy_version: int, deadline: Deadline) -> int:
        if (pair := self._pair) is None:
            raise used_up()
        deadline = _earlier(deadline)
        shard_bytes = self._group.manifest.shard_bytes[self._rank]
        header = torch.tensor([policy_version, shard_bytes], dtype=torch.int64).view(torch.uint8)
        pair.finish(pair.start(header, deadline), deadline)
        size = min(chunk_bytes(shard_bytes), shard_bytes)
        # While gloo sends one buffer, the next is filled.
        buffers = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
        sending: deque[_Operation] = deque()
        for number, (start, end) in enumerate(_chunks(shard_bytes)):
            if len(sending) == len(buffers):
                pair.finish(sending.popleft(), deadline)
            buffer = buffers[number % len(buffers)]
            _fill(buffer, start, end, self._spans, self._group.manifest, self._source)
            sending.append(pair.start(buffer[: end - start], deadline))
        for operation in sending:
            pair.finish(operation, deadline)
        return shard_bytes

    def abort(self) -> None:
        """End the waits of this sender and, through its store, those of the receivers."""
        self._abort.set()
        self._store.close(FAULT, _ABORTED)

    def close(self) -> None:
        self.abort()
        if self._pair is not None:
            self._pair.close()
        if self._member is not None:
            self._member.store.close()


class GlooReceiver(ReceiveTransport[_Offer, _Pair]):
    """A link of the chain."""

    backend = Backend.GLOO
    stable = True
    _address = ""
    _member: _Membership | None = None
    _downstream: _Pair | None = None

    def __init__(self, group: TransferGroup, receiver_index: int, device: torch.device) -> None:
        super().__init__(group, receiver_index, device)
        self._shards: list[torch.Tensor] = []
        self._stores: list[StoreClient] = []

    def accept(self, offers: Sequence[bytes]) -> None:
        """Also raises WrongState: this machine has no address that the neighbours reach."""
        super().accept(offers)
        self._address = listen_address(self._group.host, self._group.interface)

    def _parse(self, rank: int, body: bytes) -> _Offer:
        try:
            port, nonce = _BODY.unpack_from(body)
            address = str(ipaddress.ip_address(body[_BODY.size :].decode("ascii")))
        except (struct.error, ValueError):
            raise InvalidInput(
                f"gloo offer {rank} has a body of {len(body)} bytes without an IP address; pass MakeOffer's bytes "
                f"unchanged"
            ) from None
        return _Offer(address, port, nonce)

    def open(self, deadline: Deadline) -> None:
        """Connect to both neighbours, and allocate memory for all shards: chunks cut across tensors.

        Receivers with an odd index connect to their successor first, so that the chain is connected in two rounds.
        """
        self._shards = [torch.empty(size, dtype=torch.uint8) for size in self._group.manifest.shard_bytes]
        store = self._visit(0, self._offers[0], deadline)
        self._member = _Membership(store, self._index, self._address, self._abort)
        successor = self._index + 1
        if successor < self._group.receiver_count:
            self._downstream = _Pair(self._member, store, f"link-{successor}", upper=True, neighbour=successor)
        if self._downstream is not None and self._index % 2:
            self._downstream.join(deadline)
        super().open(deadline)
        if self._downstream is not None and not self._index % 2:
            self._downstream.join(deadline)
        self._member.watch()

    def held_shards(self) -> list[torch.Tensor]:
        return self._shards

    def close(self) -> None:
        super().close()
        if self._downstream is not None:
            self._downstream.close()
        for store in self._stores:
            store.close()
        self._shards, self._stores, self._downstream = [], [], None

    def _connect(self, rank: int, offer: _Offer) -> _Pair | None:
        """Return the connection to a rank, which the first receiver alone has, or for rank 0 to the predecessor."""
        assert self._member is not None, "opened"
        if rank and self._index:
            return None
        # Without a deadline of its own: the rank has just sent this offer, so its store answers or refuses at once.
        store = self._visit(rank, offer, Deadline(_CONNECT_SECONDS)) if rank else self._stores[0]
        return _Pair(self._member, store, f"link-{self._index}", upper=False, neighbour=self._index - 1)

    def _visit(self, rank: int, offer: _Offer, deadline: Deadline) -> StoreClient:
        self._stores.append(StoreClient(*offer, f"trainer rank {rank}", deadline))
        return self._stores[-1]

    def _receive(self, policy_version: int, sink: Sink, deadline: Deadline) -> None:
        if self._member is None:
            raise used_up()
        try:
            self._relay(policy_version, deadline)
        except FourfoldError:
            self._member.report("gone", self._index)  # so that the neighbours do not wait for it
            raise
        hand_to_sink(self._group.manifest, self._shards, sink)

    def _relay(self, policy_version: int, deadline: Deadline) -> None:
        """Receive all shards, and pass on each chunk that has arrived."""
        sending: list[_Operation] = []
        for rank, shard in enumerate(self._shards):
            upstream = self._links[0 if self._index else rank]
            header = torch.zeros(2, dtype=torch.int64)
            parts = [header.view(torch.uint8), *(shard[start:end] for start, end in _chunks(shard.numel()))]
            arriving: deque[tuple[torch.Tensor, _Operation]] = deque()
            for number in range(len(parts) + _AHEAD):
                if number < len(parts):
                    arriving.append((parts[number], upstream.start(parts[number], deadline)))
                if number >= _AHEAD:
                    part, operation = arriving.popleft()
                    upstream.finish(operation, deadline)
                    if self._downstream is not None:
                        sending.append(self._downstream.start(part, deadline))
                if number == _AHEAD:
                    version, shard_bytes = header.tolist()
                    check_header(rank, (version, shard_bytes), (policy_version, shard.numel()))
        patience = _earlier(deadline)
        for operation in sending:
            assert self._downstream is not None, "it sends"
            self._downstream.finish(operation, patience)


def _earlier(deadline: Deadline) -> Deadline:
    """Return a deadline a little before `deadline`."""
    left = deadline.remaining
    earlier = left - min(_EARLIER_SHARE * left, _EARLIER_SECONDS)
    return Deadline(max(earlier, 1e-3), stopped=lambda: deadline.is_stopped)


def _wait_for_end(work: Any, group: ProcessGroupGloo) -> None:
    """Hold `group` until its last operation has ended, at the latest at the operation's own timeout."""
    with contextlib.suppress(RuntimeError):
        work.wait()
    del group


def _chunks(shard_bytes: int) -> Iterator[tuple[int, int]]:
    size = chunk_bytes(shard_bytes)
    for start in range(0, shard_bytes, size):
        yield start, min(start + size, shard_bytes)


def _fill(
    bucket: torch.Tensor, start: int, end: int, spans: Sequence[Span], manifest: Manifest, source: WeightSource
) -> None:
    """Copy bytes [start, end) of the shard, cast where needed, to the beginning of `bucket`."""
    for span in spans:
        item = manifest.tensors[span.tensor].item_bytes
        first, last = max(start, span.offset), min(end, span.offset + span.count * item)
        if first < last:
            values = source.read(span)[(first - span.offset) // item : (last - span.offset) // item]
            target = bucket[first - start : last - start]
            target.view(torch_dtype(manifest.tensors[span.tensor].dtype)).copy_(values)
