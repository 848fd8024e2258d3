"""NCCL between GPUs of one host or of several: every trainer rank broadcasts its shard to all receivers.

Each rank that has anything to send makes one communicator, in which it is rank 0 and receiver i is
rank 1 + i; receivers join them in rank order. A shard travels in windows (see `sink.windows`): the
calls of one are launched together. Sender and receivers must launch the same groups, so the windows
follow from the manifest alone. A broadcast reads the trainer's parameter and writes the engine's,
without a copy between, wherever both allow it; otherwise it goes through one buffer of a window's
size.

NCCL can neither be interrupted nor told a deadline. So the connection is made in a thread that may
be left behind; a header, with the version, is awaited before anything of the model is touched; and
whoever waits looks at the clock, at the flag that ends transfers, and at the sender's process, and
aborts the communicator. A group that failed cannot be mended: the next epoch makes a new one.
"""

from __future__ import annotations

import os
import select
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch

from fourfold.errors import InvalidInput, Unavailable, WrongState
from fourfold.weights.manifest import Manifest, Span
from fourfold.weights.source.base import WeightSource
from fourfold.weights.transport import cuda
from fourfold.weights.transport.base import (
    Backend,
    Deadline,
    Sink,
    TransferGroup,
    aborted,
    pack_offer,
    unpack_offers,
    used_up,
    wait_until,
)
from fourfold.weights.transport.cuda import needs_gpu
from fourfold.weights.transport.locality import host_id
from fourfold.weights.transport.sink import Staging, windows

# NCCL's version, pid, host, unique id
_BODY: Final = struct.Struct(f"<iQ32s{cuda.UNIQUE_ID_BYTES}s")
_NO_ID: Final = bytes(cuda.UNIQUE_ID_BYTES)
_WARM_UP_BYTES: Final = 4096


class _Member:
    """One end of one communicator."""

    def __init__(self, name: str, manifest: Manifest, device: torch.device, stop: threading.Event) -> None:
        self.staging = Staging(manifest, device)
        """For what does not go in place; its order is that of `stream`."""
        self._name, self._device, self._stop = name, device, stop
        self._communicator: cuda.Communicator | None = None
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._header = torch.zeros(2, dtype=torch.int64, device=device)

    @property
    def stream(self) -> torch.cuda.Stream:
        """Where everything of this member is enqueued."""
        return self._stream

    def join(self, size: int, unique_id: bytes, rank: int, deadline: Deadline) -> None:
        """Meet the others, and make the connections that a first broadcast makes."""

        def connect() -> cuda.Communicator:
            communicator = cuda.make_communicator(size, unique_id, rank)
            warm_up = torch.zeros(_WARM_UP_BYTES, dtype=torch.uint8, device=self._device)
            self._communicator = communicator  # from here on an abort ends what blocks
            cuda.broadcast(communicator, warm_up, self._stream.cuda_stream)
            self._stream.synchronize()
            return communicator

        what = f"the meeting of all {size} members of {self._name}"
        with self._aborting(), torch.cuda.device(self._device):  # NCCL takes the thread's
            cuda.watched(connect, self._stopping(deadline), what, undo=lambda communicator: communicator.abort())

    def exchange_header(
        self, policy_version: int, byte_count: int, deadline: Deadline, alive: _Alive | None = None
    ) -> tuple[int, int]:
        """Broadcast version and size, or receive them; return those of the sender, which is `alive`."""
        with torch.cuda.stream(self._stream):
            self._header.copy_(torch.tensor([policy_version, byte_count]))
            self.broadcast([self._header])
            self.wait(deadline, f"version {policy_version} in {self._name}", alive)
            version, size = self._header.tolist()
        return int(version), int(size)

    def broadcast(self, parts: Sequence[torch.Tensor]) -> None:
        """Enqueue the broadcast of some tensors, launched together."""
        communicator = self._communicator
        if communicator is None:
            raise used_up()
        with torch.cuda.device(self._device), cuda.nccl_group():
            for values in parts:
                cuda.broadcast(communicator, values, self._stream.cuda_stream)

    def wait(self, deadline: Deadline, what: str, alive: _Alive | None = None) -> None:
        """Wait for all that was enqueued; when that fails, end it."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)

        def done() -> bool:
            if alive is not None:
                alive.check()
            return bool(event.query())  # type: ignore[no-untyped-call]

        with self._aborting():
            wait_until(done, self._stopping(deadline), what)
            if self._communicator is None:
                raise used_up()
            cuda.check(self._communicator, self._name)

    @contextmanager
    def _aborting(self) -> Iterator[None]:
        """End what is enqueued when the block fails."""
        succeeded = False
        try:
            yield
            succeeded = True
        finally:
            if not succeeded:
                self.abort()

    def abort(self) -> None:
        """End what is enqueued; takes up to a second. In the thread that enqueues, or after it."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.abort()

    def close(self) -> None:
        """Disconnect."""
        self.abort()

    def _stopping(self, deadline: Deadline) -> Deadline:
        """Return the same deadline, ended by this member's stop as well."""
        return Deadline(max(deadline.remaining, 1e-3), stopped=lambda: self._stop.is_set() or deadline.is_stopped)


class _Alive:
    """Whether a process of this host still runs; processes of other hosts are taken to."""

    def __init__(self, what: str, pid: int, host: str) -> None:
        self._what, self._pid, self._pidfd = what, pid, -1
        if host != host_id():
            return
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError:
            raise Unavailable(f"{what}, process {pid}, has ended; make new offers") from None
        self._poll = select.poll()
        self._poll.register(self._pidfd, select.POLLIN)

    def check(self) -> None:
        """Raise Unavailable when it has ended."""
        if self._pidfd >= 0 and self._poll.poll(0):
            raise Unavailable(f"{self._what}, process {self._pid}, ended in the transfer")

    def close(self) -> None:
        """Stop looking."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class NcclSender:
    """One trainer rank: rank 0 of its communicator."""

    def __init__(self, group: TransferGroup, rank: int, source: WeightSource) -> None:
        """Make the rendezvous id.

        Raises:
            WrongState: no CuPy, or the weights are not on a GPU.
        """
        self._group, self._rank, self._source = group, rank, source
        spans = group.manifest.spans_of_rank(rank)
        self._windows = windows(group.manifest, spans)
        self._in_place = [[source.is_view(part) for part in parts] for parts in self._windows]
        self._stop = threading.Event()
        self._member: _Member | None = None
        self._unique_id = _NO_ID
        self._closed = False
        if spans:
            self._device = source.read(spans[0]).device
            needs_gpu(self._device, "the trainer's weights are", "gloo")
            self._unique_id = cuda.nccl_unique_id()

    def offer(self) -> bytes:
        """Return the rendezvous id, and who this is."""
        body = _BODY.pack(cuda.nccl_version(), os.getpid(), host_id().encode(), self._unique_id)
        return pack_offer(Backend.NCCL, self._group, self._rank, body)

    def open(self, deadline: Deadline) -> None:
        """Meet all receivers."""
        if self._windows:
            name = f"the NCCL group of trainer rank {self._rank}"
            self._member = _Member(name, self._group.manifest, self._device, self._stop)
            self._member.join(1 + self._group.receiver_count, self._unique_id, 0, deadline)

    def send(self, policy_version: int, deadline: Deadline) -> int:
        """Broadcast version and size, then the shard, window by window."""
        if self._closed:
            raise used_up()
        if self._member is None:
            return 0
        member, byte_count = self._member, sum(map(self._bytes, self._windows))
        member.stream.wait_stream(torch.cuda.current_stream(self._device))
        member.exchange_header(policy_version, byte_count, deadline)
        with torch.cuda.stream(member.stream):
            for parts, in_place in zip(self._windows, self._in_place, strict=True):
                member.broadcast(self._values(parts, in_place, member.staging))
            member.wait(deadline, f"sending version {policy_version}")
        return byte_count

    def abort(self) -> None:
        """End what is under way; whoever waits in there does it."""
        self._stop.set()

    def close(self) -> None:
        """Disconnect."""
        self._closed = True
        self._stop.set()
        if self._member is not None:
            self._member.close()

    def _values(self, parts: Sequence[Span], in_place: Sequence[bool], staging: Staging) -> list[torch.Tensor]:
        """Return what is sent of each part: the parameter itself, or a copy."""
        staging.begin()
        result: list[torch.Tensor] = []
        for part, as_it_is in zip(parts, in_place, strict=True):
            values = self._source.read(part)
            result.append(values if as_it_is else staging.slot(part).copy_(values))
        return result

    def _bytes(self, parts: Sequence[Span]) -> int:
        return sum(part.count * self._group.manifest.tensors[part.tensor].item_bytes for part in parts)


class NcclReceiver:
    """One receiver: rank 1 + its index in the communicator of every trainer rank that sends."""

    stable = False

    def __init__(self, group: TransferGroup, receiver_index: int, device: torch.device) -> None:
        """Make the receiver; its model is on `device`."""
        self._group, self._index, self._device = group, receiver_index, device
        self._stop = threading.Event()
        self._bodies: list[tuple[int, str, bytes]] = []  # pid, host, unique id
        self._members: list[tuple[int, _Member, _Alive]] = []
        self._windows: dict[int, list[list[Span]]] = {}

    def accept(self, offers: Sequence[bytes]) -> None:
        """Check every rank's offer.

        Raises:
            InvalidInput: an offer of a wrong length or content.
            WrongState: another NCCL, or the model is not on a GPU.
        """
        needs_gpu(self._device, "the engine's model is", "gloo")
        ours = cuda.nccl_version()
        for rank, body in enumerate(unpack_offers(Backend.NCCL, self._group, offers)):
            if len(body) != _BODY.size:
                raise InvalidInput(f"nccl offer {rank} has a body of {len(body)} bytes; it must have {_BODY.size}")
            theirs, pid, host, unique_id = _BODY.unpack(body)
            if theirs != ours:
                raise WrongState(
                    f"trainer rank {rank} has NCCL {theirs}, this engine {ours}; all members of a group need the same "
                    f"libnccl: install one version of nvidia-nccl in both environments"
                )
            self._bodies.append((pid, host.decode(), unique_id))

    def open(self, deadline: Deadline) -> None:
        """Join the communicator of every trainer rank, in rank order."""
        for rank, (pid, host, unique_id) in enumerate(self._bodies):
            spans = self._group.manifest.spans_of_rank(rank)
            if not spans:
                continue
            name = f"the NCCL group of trainer rank {rank}"
            alive = _Alive(f"trainer rank {rank}", pid, host)
            member = _Member(name, self._group.manifest, self._device, self._stop)
            self._windows[rank] = windows(self._group.manifest, spans)
            self._members.append((rank, member, alive))
            member.join(1 + self._group.receiver_count, unique_id, 1 + self._index, deadline)

    def receive(self, policy_version: int, sink: Sink, deadline: Deadline) -> None:
        """Await every rank's header, then enqueue all broadcasts, into the sink's slots or through the buffer."""
        if not self._members:
            raise used_up()
        for rank, member, alive in self._members:
            self._check_header(rank, member, alive, policy_version, deadline)
        for rank, member, _ in self._members:
            with torch.cuda.stream(member.stream):
                for parts in self._windows[rank]:
                    self._receive_window(parts, member, sink)
        for _, member, alive in self._members:
            member.wait(deadline, f"the arrival of version {policy_version}", alive)
        if self._stop.is_set():
            raise aborted()

    def check(self) -> None:
        """Nobody but `receive` writes here."""

    def abort(self) -> None:
        """End a wait."""
        self._stop.set()

    def close(self) -> None:
        """Disconnect and drop the buffer."""
        self.abort()
        for _, member, alive in self._members:
            member.close()
            alive.close()
        self._members = []

    def _check_header(self, rank: int, member: _Member, alive: _Alive, policy_version: int, deadline: Deadline) -> None:
        shard = sum(
            s.count * self._group.manifest.tensors[s.tensor].item_bytes
            for s in self._group.manifest.spans_of_rank(rank)
        )
        header = member.exchange_header(policy_version, shard, deadline, alive)
        if header != (policy_version, shard):
            raise WrongState(
                f"trainer rank {rank} sends {header[1]} bytes of version {header[0]}; {shard} bytes of version "
                f"{policy_version} were due: abort the epoch"
            )

    def _receive_window(self, parts: Sequence[Span], member: _Member, sink: Sink) -> None:
        """Enqueue one window. Staged parts are overwritten in the next one: the stream keeps the order."""
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
