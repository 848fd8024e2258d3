"""How shards travel: what every transport offers, the backends, offers, deadlines.

A transport is one pair of classes. Adding one means a file with such a pair, a member of
`Backend` and a line in each of the two tables below.

    trainer rank r                    coordinator                 engine worker i (receiver i)
    make_sender(backend, source)
    offer() ------------------------> opaque bytes -------------> make_receiver(backend)
                                                                  accept(offers)
    open(deadline)      <---- both at once, they meet ---->       open(deadline)
    send(version)       <---- both at once, per version -->       receive(version, sink)
                                                                  check(): nothing changed underneath
    abort() from any thread           either side                 abort() from any thread
    close()                                                       close()

Every wait has a deadline, and abort ends it. After an error or abort a pair is used up: a new
epoch makes a new one. One thread calls everything but `abort`.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from importlib.util import find_spec
from typing import Final, Protocol, cast

import torch

from fourfold.errors import DeadlinePassed, InvalidInput, StaleEpoch, WrongState
from fourfold.weights.manifest import Manifest, Span
from fourfold.weights.source.base import WeightSource

MAX_OFFER_BYTES: Final = 4096
# Between two looks. An update stands still meanwhile.
_FIRST_SLEEP: Final = 2e-5
_LONGEST_SLEEP: Final = 5e-4


class Backend(StrEnum):
    """How the bytes move, the fastest first."""

    CUDA_IPC = "cuda_ipc"
    NCCL = "nccl"
    SHM = "shm"
    GLOO = "gloo"


def available_backends(device: torch.device) -> list[str]:
    """Return the backends that this process can use for weights on `device`, best first."""
    on_gpu = device.type == "cuda" and has_cupy()
    here = hasattr(os, "memfd_create")
    usable = {
        Backend.CUDA_IPC: on_gpu and here,
        Backend.NCCL: on_gpu,
        Backend.SHM: here,
        Backend.GLOO: torch.distributed.is_available() and torch.distributed.is_gloo_available(),
    }
    return [backend.value for backend, yes in usable.items() if yes]


def has_cupy() -> bool:
    """Whether CuPy is installed; it is not imported."""
    return find_spec("cupy") is not None


class Deadline:
    """A point in time that waits must not pass, and a way to end them earlier."""

    def __init__(self, seconds: float, *, stopped: Callable[[], bool] | None = None) -> None:
        """Make a deadline `seconds` from now.

        Args:
            seconds: that are left.
            stopped: tells whether somebody outside gave up what is waited for; cheap.

        Raises:
            InvalidInput: not a positive number.
        """
        if not 0 < seconds < 1e9:
            raise InvalidInput(f"timeout is {seconds} s; it must be a positive number of seconds")
        self._seconds = seconds
        self._stopped = stopped
        self._end = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def is_stopped(self) -> bool:
        """Whether it was given up from outside."""
        return self._stopped is not None and self._stopped()

    def check(self, what: str) -> float:
        """Return the seconds left.

        Raises:
            DeadlinePassed: none is left; the message says that `what` did not happen.
            StaleEpoch: it was given up from outside.
        """
        if self.is_stopped:
            raise aborted()
        left = self.remaining
        if left <= 0:
            raise DeadlinePassed(f"{what} did not happen within {self._seconds:.1f} s; abort, and try a new epoch")
        return left


def wait_until(done: Callable[[], bool], deadline: Deadline, what: str) -> None:
    """Sleep shortly, again and again, until `done`: what is waited for lies in memory, and nothing wakes this thread.

    Raises:
        DeadlinePassed, StaleEpoch: see `Deadline.check`.
    """
    sleep = _FIRST_SLEEP
    while not done():
        deadline.check(what)
        time.sleep(sleep)
        sleep = min(2 * sleep, _LONGEST_SLEEP)


class Shards:
    """What arrived: the shard of every rank, as bytes in memory."""

    def __init__(self, manifest: Manifest, shards: Sequence[torch.Tensor]) -> None:
        """Wrap shards.

        Args:
            manifest: says what lies where.
            shards: uint8 [manifest.shard_bytes[r]] of each rank r; must outlive this object's tensors.
        """
        self._manifest = manifest
        self._shards = tuple(shards)
        self._spans = manifest.spans_by_tensor()

    def read(self, span: Span) -> torch.Tensor:
        """Return the elements of one span, a 1-D view."""
        spec = self._manifest.tensors[span.tensor]
        data = self._shards[span.rank][span.offset : span.offset + span.count * spec.item_bytes]
        return data.view(torch_dtype(spec.dtype))

    def tensor(self, index: int) -> torch.Tensor:
        """Return tensor `index` in its shape: a view when it lies in one span, else a copy of its spans."""
        parts = [self.read(span) for span in self._spans[index]]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole.view(self._manifest.tensors[index].shape)

    def hand_to(self, sink: Sink) -> None:
        """Give every span to a sink."""
        for span in self._manifest.spans:
            sink.take(span, self.read(span))
        sink.flush()


class Sink(Protocol):
    """Takes what arrives. A span may come in parts, which are spans themselves; together they are all spans, once."""

    def slot(self, span: Span) -> torch.Tensor | None:
        """Return where the elements of a span may be written at once, 1-D [span.count] and contiguous.

        None: they must be handed to `take`. Who asks for a slot writes to it before it returns.
        """

    def take(self, span: Span, values: torch.Tensor) -> None:
        """Take the elements of a span, 1-D [span.count]; they stay until `flush`, or longer in a `stable` transport."""

    def flush(self) -> None:
        """Be done with all that was taken, in the order of the device's present stream."""


class SendTransport(Protocol):
    """One trainer rank's end."""

    def offer(self) -> bytes:
        """Return the rendezvous data for the receivers, at most MAX_OFFER_BYTES, secret."""

    def open(self, deadline: Deadline) -> None:
        """Meet all receivers, where the backend needs that."""

    def send(self, policy_version: int, deadline: Deadline) -> int:
        """Send this rank's shard; return its bytes. The source is between begin_round and end_round.

        When it returns, the source may change again.
        """

    def abort(self) -> None:
        """End every wait, here and at the receivers, as soon as possible. From any thread, any number of times."""

    def close(self) -> None:
        """Let go of memory, files and connections. Any number of times."""


class ReceiveTransport(Protocol):
    """One receiver's end, towards all trainer ranks."""

    stable: bool
    """Whether what `take` gets stays until the next `receive` or `close`."""

    def accept(self, offers: Sequence[bytes]) -> None:
        """Check the offers, in rank order, and keep them; nothing is met or mapped yet."""

    def open(self, deadline: Deadline) -> None:
        """Meet the senders whose offers were accepted."""

    def receive(self, policy_version: int, sink: Sink, deadline: Deadline) -> None:
        """Wait for `policy_version` and hand every span of every rank to `sink`.

        The sink is touched only when senders of this version are there.
        """

    def check(self) -> None:
        """Raise WrongState when what `receive` handed over was changed since."""

    def abort(self) -> None:
        """End every wait here as soon as possible. From any thread, any number of times."""

    def close(self) -> None:
        """Let go of memory, files and connections. Any number of times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferGroup:
    """Who takes part in a transfer."""

    epoch: int
    manifest: Manifest
    receiver_count: int

    def __post_init__(self) -> None:
        if self.epoch < 0 or not 1 <= self.receiver_count <= 65_536:
            raise InvalidInput(
                f"epoch {self.epoch}, {self.receiver_count} receivers; the epoch must not be negative and there must "
                f"be 1 to 65536 receivers"
            )


_SENDERS: Final = {
    Backend.CUDA_IPC: ("fourfold.weights.transport.cuda_ipc", "CudaIpcSender"),
    Backend.NCCL: ("fourfold.weights.transport.nccl", "NcclSender"),
    Backend.SHM: ("fourfold.weights.transport.shm", "ShmSender"),
    Backend.GLOO: ("fourfold.weights.transport.gloo", "GlooSender"),
}
_RECEIVERS: Final = {
    Backend.CUDA_IPC: ("fourfold.weights.transport.cuda_ipc", "CudaIpcReceiver"),
    Backend.NCCL: ("fourfold.weights.transport.nccl", "NcclReceiver"),
    Backend.SHM: ("fourfold.weights.transport.shm", "ShmReceiver"),
    Backend.GLOO: ("fourfold.weights.transport.gloo", "GlooReceiver"),
}


def make_sender(backend: str, group: TransferGroup, rank: int, source: WeightSource) -> SendTransport:
    """Return the sending end of `backend` for trainer rank `rank`, which holds `source`.

    Raises:
        InvalidInput: unknown backend.
        WrongState: the backend cannot send from where the weights are.
        Overloaded: not enough memory.
    """
    make = _load(_SENDERS[parse_backend(backend)])
    return cast(SendTransport, make(group, rank, source))


def make_receiver(backend: str, group: TransferGroup, receiver_index: int, device: torch.device) -> ReceiveTransport:
    """Return the receiving end of `backend` for receiver `receiver_index` of the group, whose model is on `device`.

    Raises:
        InvalidInput: unknown backend, or an index outside the group.
    """
    if not 0 <= receiver_index < group.receiver_count:
        raise InvalidInput(f"receiver {receiver_index} of {group.receiver_count}; it must be inside the group")
    make = _load(_RECEIVERS[parse_backend(backend)])
    return cast(ReceiveTransport, make(group, receiver_index, device))


def parse_backend(name: str) -> Backend:
    """Return the backend called `name`, or raise InvalidInput."""
    try:
        return Backend(name)
    except ValueError:
        raise InvalidInput(f"weight backend {name!r}; known are {[b.value for b in Backend]}") from None


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch type of a manifest's dtype."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise InvalidInput(f"dtype {name!r} is no torch type")
    return dtype


def _load(place: tuple[str, str]) -> Callable[..., object]:
    return cast(Callable[..., object], getattr(import_module(place[0]), place[1]))


# Offers: one fixed head, then the backend's own body.
# magic, backend number, rank, rank count, receiver count, epoch, manifest SHA-256
_HEAD: Final = struct.Struct("<4sIIIIq32s")
_MAGIC: Final = b"FFO1"
_NUMBERS: Final = {Backend.SHM: 1, Backend.GLOO: 2, Backend.NCCL: 3, Backend.CUDA_IPC: 4}


def pack_offer(backend: Backend, group: TransferGroup, rank: int, body: bytes) -> bytes:
    """Return an offer of trainer rank `rank`."""
    manifest = group.manifest
    head = _HEAD.pack(
        _MAGIC, _NUMBERS[backend], rank, manifest.rank_count, group.receiver_count, group.epoch, manifest.sha256
    )
    return head + body


def unpack_offers(backend: Backend, group: TransferGroup, offers: Sequence[bytes]) -> list[bytes]:
    """Return the bodies of all ranks' offers, after checking that they belong to this group.

    Raises:
        InvalidInput: wrong number, length, order, backend or manifest.
        StaleEpoch: offers of another epoch.
    """
    manifest = group.manifest
    if len(offers) != manifest.rank_count:
        raise InvalidInput(f"{len(offers)} offers; the manifest has {manifest.rank_count} ranks, one offer each")
    bodies = []
    for rank, offer in enumerate(offers):
        if not _HEAD.size <= len(offer) <= MAX_OFFER_BYTES:
            raise InvalidInput(
                f"offer {rank} has {len(offer)} bytes; allowed are {_HEAD.size} to {MAX_OFFER_BYTES}: pass it unchanged"
            )
        magic, number, its_rank, rank_count, receiver_count, epoch, sha256 = _HEAD.unpack_from(offer)
        if magic != _MAGIC or number != _NUMBERS[backend]:
            raise InvalidInput(f"offer {rank} is no {backend} offer of this release; pass MakeOffer's bytes unchanged")
        if (its_rank, rank_count, receiver_count) != (rank, manifest.rank_count, group.receiver_count):
            raise InvalidInput(
                f"offer {rank} is rank {its_rank} of {rank_count} for {receiver_count} receivers; expected rank {rank} "
                f"of {manifest.rank_count} for {group.receiver_count}: pass all offers in rank order"
            )
        if epoch != group.epoch:
            raise StaleEpoch(f"offer {rank} is of epoch {epoch}, the session of {group.epoch}; make new offers")
        if sha256 != manifest.sha256:
            raise InvalidInput(f"offer {rank} is for another manifest; every rank and engine must have the same one")
        bodies.append(offer[_HEAD.size :])
    return bodies


def aborted() -> StaleEpoch:
    """Return the error of a transfer that was aborted."""
    return StaleEpoch("the weight transfer was aborted; its epoch is closed, open a new one", reason="TRANSFER_ABORTED")


def used_up() -> WrongState:
    """Return the error of a call on a transport that failed or was closed."""
    return WrongState("this weight transfer failed or was closed before; open a new epoch")
