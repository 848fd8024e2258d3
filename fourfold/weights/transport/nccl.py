"""Sends weights between GPUs with NCCL, on one host or several: each trainer rank broadcasts to all receivers.

Each rank that sends anything makes one communicator, in which it is rank 0 and receiver i is rank 1 + i. Receivers join
them in rank order. A shard travels in windows (`staging.windows`), whose broadcasts are launched together. Both ends
must launch the same groups, so the windows follow from the manifest alone. A broadcast reads the trainer's parameter
and writes the engine's where both allow it; otherwise it goes through one buffer of a window's size.

NCCL can be neither interrupted nor given a deadline. Therefore
  - a thread makes the connection, and is left behind when the deadline passes;
  - receivers await a header with the version before they touch the model;
  - a wait polls the clock, the abort and the sender's process, and aborts the communicator. A group that failed cannot
    be repaired: the next epoch makes a new one.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final, NamedTuple

import torch

from fourfold.errors import InvalidInput, Unavailable, WrongState
from fourfold.weights.manifest import Span
from fourfold.weights.source.base import WeightSource
from fourfold.weights.transport import cuda
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
from fourfold.weights.transport.cuda import needs_gpu
from fourfold.weights.transport.locality import host_id
from fourfold.weights.transport.staging import Staging, shard_bytes, windows
from fourfold.weights.transport.waiting import Deadline, ProcessWatch, aborted, wait_until

# NCCL's version, pid, host, unique id
_BODY: Final = struct.Struct(f"<iQ32s{cuda.UNIQUE_ID_BYTES}s")
_NO_ID: Final = bytes(cuda.UNIQUE_ID_BYTES)
_WARM_UP_BYTES: Final = 4096


class _Member(SenderLink):
    """One end, rank `rank`, of the communicator of the trainer rank `sender_rank` and all receivers."""

    def __init__(
        self,
        group: TransferGroup,
        sender_rank: int,
        unique_id: bytes,
        rank: int,
        device: torch.device,
        abort: threading.Event,
    ) -> None:
        spans = group.manifest.spans_of_rank(sender_rank)
        self.windows = windows(group.manifest, spans)
        self.byte_count = shard_bytes(group.manifest, spans)
        self.staging = Staging(group.manifest, device)
        """Buffer for parts that cannot go in place; used in the order of `stream`."""
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        """The stream of everything that this member enqueues."""
        self.sender: ProcessWatch | None = None  # the sender's process, in a receiver on the same host
        self.sender_rank, self._name = sender_rank, f"the NCCL group of trainer rank {sender_rank}"
        self._size, self._unique_id, self._rank, self._device = 1 + group.receiver_count, unique_id, rank, device
        self._communicator: cuda.Communicator | None = None
        self._lock = threading.Lock()  # guards _communicator
        self._header = torch.zeros(2, dtype=torch.int64, device=device)
        self._abort = abort

    def join(self, deadline: Deadline) -> None:
        """Meet the other members, and make the connections that NCCL otherwise makes in the first broadcast."""

        def connect() -> cuda.Communicator:
            communicator = cuda.make_communicator(self._size, self._unique_id, self._rank)
            self._communicator = communicator  # from here on, aborting it ends the blocking calls below
            if not self._abort.is_set():  # otherwise `join` has given up, and nothing would end the broadcast
                warm_up = torch.zeros(_WARM_UP_BYTES, dtype=torch.uint8, device=self._device)
                cuda.broadcast(communicator, warm_up, self.stream.cuda_stream)
                self.stream.synchronize()
            return communicator

        what = f"the meeting of all {self._size} members of {self._name}"
        with ExitStack() as on_error, torch.cuda.device(self._device):  # NCCL uses the thread's current device
            on_error.callback(self._disconnect)
            cuda.watched(connect, self._abortable(deadline), what, undo=lambda _: self._disconnect())
            on_error.pop_all()

    def exchange_header(self, policy_version: int, deadline: Deadline) -> tuple[int, int]:
        """Broadcast (version, bytes) from the sender; return the sender's."""
        with torch.cuda.stream(self.stream):
            self._header.copy_(torch.tensor([policy_version, self.byte_count]))
            self.broadcast([self._header])
            self.wait(deadline, f"version {policy_version} in {self._name}")
            version, size = self._header.tolist()
        return int(version), int(size)

    def broadcast(self, parts: Sequence[torch.Tensor]) -> None:
        communicator = self._communicator
        if communicator is None:
            raise used_up()
        with torch.cuda.device(self._device), cuda.nccl_group():
            for values in parts:
                cuda.broadcast(communicator, values, self.stream.cuda_stream)

    def wait(self, deadline: Deadline, what: str) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)

        def done() -> bool:
            if self.sender is not None and self.sender.ended:
                raise Unavailable(f"trainer rank {self.sender_rank}, process {self.sender.pid}, ended in the transfer")
            return bool(event.query())  # type: ignore[no-untyped-call]

        with ExitStack() as on_error:
            on_error.callback(self._disconnect)
            wait_until(done, self._abortable(deadline), what)
            if self._communicator is None:
                raise used_up()
            cuda.check(self._communicator, self._name)
            on_error.pop_all()

    def close(self) -> None:
        self._disconnect()
        if self.sender is not None:
            self.sender.close()
            self.sender = None

    def _disconnect(self) -> None:
        """Abort all enqueued work; takes up to a second. Call it in the thread that enqueues, or after its end."""
        with self._lock:  # a thread that `join` has left behind may disconnect too, and NCCL must not abort twice
            communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.abort()

    def _abortable(self, deadline: Deadline) -> Deadline:
        """Return the same deadline, ended also by an abort of this transport."""
        return Deadline(max(deadline.remaining, 1e-3), stopped=lambda: self._abort.is_set() or deadline.is_stopped)


class NcclSender:
    """Rank 0 of the communicator of one trainer rank."""

    through_host = False

    def __init__(self, group: TransferGroup, rank: int, source: WeightSource) -> None:
        """Make the rendezvous id. Raises WrongState: CuPy is not installed, or the weights are not on a GPU."""
        self._group, self._rank, self._source = group, rank, source
        self._abort = threading.Event()
        self._member: _Member | None = None
        self._unique_id = _NO_ID
        if spans := group.manifest.spans_of_rank(rank):
            self._device = source.read(spans[0]).device
            needs_gpu(self._device, "the trainer's weights are", "gloo")
            self._unique_id = cuda.nccl_unique_id()
            self._member = _Member(group, rank, self._unique_id, 0, self._device, self._abort)
            self._in_place = [[source.is_view(part) for part in parts] for parts in self._member.windows]

    def offer(self) -> bytes:
        body = _BODY.pack(cuda.nccl_version(), os.getpid(), host_id().encode(), self._unique_id)
        return pack_offer(Backend.NCCL, self._group, self._rank, body)

    def open(self, deadline: Deadline) -> None:
        if self._member is not None:
            self._member.join(deadline)

    def send(self, policy_version: int, deadline: Deadline) -> int:
        if (member := self._member) is None:
            return 0
        member.stream.wait_stream(torch.cuda.current_stream(self._device))  # the optimizer's step
        member.exchange_header(policy_version, deadline)
        with torch.cuda.stream(member.stream):
            for parts, in_place in zip(member.windows, self._in_place, strict=True):
                member.broadcast(self._values(parts, in_place, member.staging))
            member.wait(deadline, f"sending version {policy_version}")
        return member.byte_count

    def abort(self) -> None:
        """End every wait; the thread that waits then aborts the communicator."""
        self._abort.set()

    def close(self) -> None:
        self._abort.set()
        if self._member is not None:
            self._member.close()

    def _values(self, parts: Sequence[Span], in_place: Sequence[bool], staging: Staging) -> list[torch.Tensor]:
        """Return what is broadcast for each part: a view of the parameter, or a staged copy."""
        staging.begin()
        result: list[torch.Tensor] = []
        for part, is_view in zip(parts, in_place, strict=True):
            values = self._source.read(part)
            result.append(values if is_view else staging.slot(part).copy_(values))
        return result


class _Offer(NamedTuple):
    pid: int
    host: str
    unique_id: bytes


class NcclReceiver(ReceiveTransport[_Offer, _Member]):
    """Rank 1 + its index in the communicator of every trainer rank that sends. Needs a model on a GPU."""

    backend = Backend.NCCL

    def accept(self, offers: Sequence[bytes]) -> None:
        needs_gpu(self._device, "the engine's model is", "gloo")
        super().accept(offers)

    def _parse(self, rank: int, body: bytes) -> _Offer:
        if len(body) != _BODY.size:
            raise InvalidInput(f"nccl offer {rank} has a body of {len(body)} bytes; it must have {_BODY.size}")
        theirs, pid, host, unique_id = _BODY.unpack(body)
        if theirs != (ours := cuda.nccl_version()):
            raise WrongState(
                f"trainer rank {rank} has NCCL {theirs}, this engine {ours}; all members of a group need the same "
                f"libnccl: install one version of nvidia-nccl in both environments"
            )
        return _Offer(pid, host.rstrip(b"\0").decode(), unique_id)

    def _connect(self, rank: int, offer: _Offer) -> _Member | None:
        if not self._group.manifest.spans_of_rank(rank):
            return None  # this rank sends nothing
        member = _Member(self._group, rank, offer.unique_id, 1 + self._index, self._device, self._abort)
        if offer.host and offer.host == host_id():
            try:
                member.sender = ProcessWatch(offer.pid)
            except OSError:
                raise Unavailable(f"trainer rank {rank}, process {offer.pid}, has ended; make new offers") from None
        return member

    def _receive(self, policy_version: int, sink: Sink, deadline: Deadline) -> None:
        """Await the header of every rank, then enqueue all broadcasts into the sink's slots or the staging buffers."""
        for member in self._links:
            header = member.exchange_header(policy_version, deadline)
            check_header(member.sender_rank, header, (policy_version, member.byte_count))
        for member in self._links:
            with torch.cuda.stream(member.stream):
                for parts in member.windows:
                    _receive_window(parts, member, sink)
        for member in self._links:
            member.wait(deadline, f"the arrival of version {policy_version}")
        if self._abort.is_set():
            raise aborted()


def _receive_window(parts: Sequence[Span], member: _Member, sink: Sink) -> None:
    """Enqueue one window. The next one overwrites its staged parts, after the sink's copies in stream order."""
    targets: list[torch.Tensor] = []
    staged: list[tuple[Span, torch.Tensor]] = []
    member.staging.begin()
    for part in parts:
        if (slot := sink.slot(part)) is None:
            slot = member.staging.slot(part)
            staged.append((part, slot))
        targets.append(slot)
    member.broadcast(targets)
    for part, slot in staged:
        sink.take(part, slot)
    sink.flush()
