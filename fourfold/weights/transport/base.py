"""Defines the interface of every transport: backends, sinks, the sender's protocol, the receiver's base class, offers.

A transport is one pair of classes. To add one, write a module with such a pair, and see "Extending" in ../README.md.

    trainer rank r                    coordinator                 engine worker i (receiver i)
    make_sender(backend, source)
    offer() ------------------------> opaque bytes -------------> make_receiver(backend)
                                                                  accept(offers)
    open(deadline)      <---- at the same time, they connect -->  open(deadline)
    send(version)       <---- at the same time, per version --->  receive(version, sink)
                                                                  check(): the data received did not change since
    abort() from any thread           either side                 abort() from any thread
    close()                                                       close()

Every wait has a deadline, and abort ends it. A pair that failed or was aborted cannot be used again: a new epoch makes
a new one. All methods but `abort` belong to one thread.
"""

from __future__ import annotations

import os
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar, cast

import torch

from fourfold.address import LOOPBACK
from fourfold.errors import InvalidInput, StaleEpoch, WrongState
from fourfold.weights.manifest import Manifest, Span
from fourfold.weights.source.base import WeightSource
from fourfold.weights.transport.waiting import Deadline

MAX_OFFER_BYTES: Final = 4096


class Backend(StrEnum):
    """The ways in which bytes move, the fastest first."""

    CUDA_IPC = "cuda_ipc"
    NCCL = "nccl"
    SHM = "shm"
    GLOO = "gloo"


def available_backends(device: torch.device) -> list[str]:
    """Return the backends that this process can use for weights on `device`, the fastest first."""
    on_gpu = device.type == "cuda" and has_cupy()
    has_memfd = hasattr(os, "memfd_create")
    usable = {
        Backend.CUDA_IPC: on_gpu and has_memfd,
        Backend.NCCL: on_gpu,
        Backend.SHM: has_memfd,
        Backend.GLOO: torch.distributed.is_available() and torch.distributed.is_gloo_available(),
    }
    return [backend.value for backend, yes in usable.items() if yes]


def parse_backend(name: str) -> Backend:
    """Return the backend called `name`, or raise InvalidInput."""
    try:
        return Backend(name)
    except ValueError:
        raise InvalidInput(f"weight backend {name!r}; known are {[b.value for b in Backend]}") from None


def has_cupy() -> bool:
    """Return whether CuPy is installed, without importing it."""
    return find_spec("cupy") is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferGroup:
    """The epoch, the layout and the number of receivers of a transfer, and where this member of it listens."""

    epoch: int
    manifest: Manifest
    receiver_count: int
    host: str = LOOPBACK
    """Host name or address by which the coordinator reaches this member's service; gloo listens there."""
    interface: str = ""
    """Network interface on which gloo listens instead; empty: that of `host`."""

    def __post_init__(self) -> None:
        if self.epoch < 0 or not 1 <= self.receiver_count <= 65_536:
            raise InvalidInput(
                f"epoch {self.epoch}, {self.receiver_count} receivers; the epoch must not be negative and there must "
                f"be 1 to 65536 receivers"
            )


class Sink(Protocol):
    """Takes the weights that arrive. A span may be cut into parts, which are spans themselves; each comes once."""

    def slot(self, span: Span) -> torch.Tensor | None:
        """Return where the elements of a span may be written directly: 1-D [span.count], contiguous.

        None: hand them to `take`. A caller that gets a slot writes to it before the transfer ends.
        """

    def take(self, span: Span, values: torch.Tensor) -> None:
        """Take the elements of a span, 1-D [span.count]; they stay until `flush`, or longer in a `stable` transport."""

    def flush(self) -> None:
        """Finish with everything taken so far, in the order of the device's current stream."""


class SendTransport(Protocol):
    """The end of one trainer rank."""

    through_host: bool
    """Whether `send` copies through main memory. It may then run in a pool's thread, beside sends to other groups."""

    def offer(self) -> bytes:
        """Return the rendezvous data for the receivers: secret, at most MAX_OFFER_BYTES."""

    def open(self, deadline: Deadline) -> None:
        """Connect to all receivers, where the backend needs connections."""

    def send(self, policy_version: int, deadline: Deadline) -> int:
        """Send this rank's shard and return its bytes, between the source's begin_round and end_round."""

    def abort(self) -> None:
        """End every wait, here and in the receivers. From any thread, any number of times."""

    def close(self) -> None:
        """Release memory, files and connections. Any number of times."""


class SenderLink:
    """A receiver's connection to one trainer rank."""

    def join(self, deadline: Deadline) -> None:
        """Wait for the sender and the other receivers, where the backend needs them at the same time."""

    def close(self) -> None:
        """Release what belongs to this connection."""


_OfferT = TypeVar("_OfferT")
_LinkT = TypeVar("_LinkT", bound=SenderLink)


class ReceiveTransport(ABC, Generic[_OfferT, _LinkT]):
    """The end of one receiver, connected to all trainer ranks; its model is on `device`.

    This class runs the life cycle. A backend parses the offer of a rank, connects to a rank, and moves one version.
    """

    backend: ClassVar[Backend]
    stable: ClassVar[bool] = False  # whether the data handed to `Sink.take` stays until the next `receive` or `close`

    def __init__(self, group: TransferGroup, receiver_index: int, device: torch.device) -> None:
        self._group, self._index, self._device = group, receiver_index, device
        self._offers: list[_OfferT] = []
        self._links: list[_LinkT] = []
        self._is_open = False
        self._abort = threading.Event()

    def accept(self, offers: Sequence[bytes]) -> None:
        """Check and keep the offers of all ranks, in rank order; connect to none.

        Raises:
            InvalidInput, StaleEpoch: see `unpack_offers`.
            WrongState: this backend cannot reach the engine's model.
        """
        bodies = unpack_offers(self.backend, self._group, offers)
        self._offers = [self._parse(rank, body) for rank, body in enumerate(bodies)]

    def open(self, deadline: Deadline) -> None:
        """Connect to every rank that sends, in rank order: NCCL and gloo need one order everywhere.

        Raises Unavailable: a sender has ended, or is unreachable. Raises DeadlinePassed: a member did not come.
        """
        for rank, offer in enumerate(self._offers):
            link = self._connect(rank, offer)
            if link is not None:
                self._links.append(link)  # before join, so that close releases a link whose join failed
                link.join(deadline)
        self._is_open = True

    def receive(self, policy_version: int, sink: Sink, deadline: Deadline) -> None:
        """Wait for `policy_version` and hand every span of every rank to `sink`.

        The sink is touched only after the senders have announced this version. Raises WrongState: another version was
        announced, or this transport is closed. Raises Unavailable: a sender has ended. See also `Deadline.check`.
        """
        if not self._is_open:
            raise used_up()
        self._receive(policy_version, sink, deadline)

    def check(self) -> None:
        """Raise WrongState if the data that `receive` handed over has changed since."""

    def held_shards(self) -> Sequence[torch.Tensor]:
        """Return the shards of all ranks as they arrived last, uint8 [bytes] each; they stay until the next `receive`.

        Raises WrongState: this backend keeps no copy.
        """
        raise WrongState(f"{self.backend} keeps no copy of the weights that arrived; the trainer must send them")

    def abort(self) -> None:
        self._abort.set()

    def close(self) -> None:
        self.abort()
        self._is_open = False
        for link in self._links:
            link.close()
        self._links = []

    @abstractmethod
    def _parse(self, rank: int, body: bytes) -> _OfferT:
        """Check the body of a rank's offer and return its content, or raise InvalidInput."""

    @abstractmethod
    def _connect(self, rank: int, offer: _OfferT) -> _LinkT | None:
        """Return a link to a rank, or None for a rank that sends nothing."""

    @abstractmethod
    def _receive(self, policy_version: int, sink: Sink, deadline: Deadline) -> None:
        """Move one version, see `receive`."""


def check_header(rank: int, found: tuple[int, int], due: tuple[int, int]) -> None:
    """Raise WrongState unless a sender announces the (policy version, shard bytes) that are due."""
    if found != due:
        raise WrongState(
            f"trainer rank {rank} sends {found[1]} bytes of version {found[0]}; {due[1]} bytes of version {due[0]} "
            f"were due: abort the epoch"
        )


# A backend's module is imported when it is used: CuPy and gloo are not installed everywhere.
# Backend -> (number in offers, prefix of its two classes). The module has the backend's name.
_BACKENDS: Final = {
    Backend.CUDA_IPC: (4, "CudaIpc"),
    Backend.NCCL: (3, "Nccl"),
    Backend.SHM: (1, "Shm"),
    Backend.GLOO: (2, "Gloo"),
}


def make_sender(backend: str, group: TransferGroup, rank: int, source: WeightSource) -> SendTransport:
    """Return the sending end of `backend` for rank `rank`, which holds `source`. Raises Overloaded: no memory."""
    return cast(SendTransport, _load(backend, "Sender")(group, rank, source))


def make_receiver(
    backend: str, group: TransferGroup, receiver_index: int, device: torch.device
) -> ReceiveTransport[Any, Any]:
    """Return the receiving end of `backend` for receiver `receiver_index` of the group, whose model is on `device`."""
    if not 0 <= receiver_index < group.receiver_count:
        raise InvalidInput(f"receiver {receiver_index} of {group.receiver_count}; it must be inside the group")
    return cast(ReceiveTransport[Any, Any], _load(backend, "Receiver")(group, receiver_index, device))


def _load(backend: str, end: str) -> Callable[..., object]:
    parsed = parse_backend(backend)
    module = import_module(f"fourfold.weights.transport.{parsed}")
    return cast(Callable[..., object], getattr(module, _BACKENDS[parsed][1] + end))


# An offer is a fixed header, then the backend's own body.
# magic, backend number, rank, rank count, receiver count, epoch, manifest SHA-256
_HEADER: Final = struct.Struct("<4sIIIIq32s")
_MAGIC: Final = b"FFO1"


def pack_offer(backend: Backend, group: TransferGroup, rank: int, body: bytes) -> bytes:
    manifest = group.manifest
    header = _HEADER.pack(
        _MAGIC, _BACKENDS[backend][0], rank, manifest.rank_count, group.receiver_count, group.epoch, manifest.sha256
    )
    return header + body


def unpack_offers(backend: Backend, group: TransferGroup, offers: Sequence[bytes]) -> list[bytes]:
    """Check that offers are those of all ranks of this group, in rank order, and return their bodies.

    Raises InvalidInput: wrong number, length, order, backend or manifest. Raises StaleEpoch: offers of another epoch.
    """
    manifest = group.manifest
    if len(offers) != manifest.rank_count:
        raise InvalidInput(f"{len(offers)} offers; the manifest has {manifest.rank_count} ranks, one offer each")
    bodies = []
    for rank, offer in enumerate(offers):
        if not _HEADER.size <= len(offer) <= MAX_OFFER_BYTES:
            raise InvalidInput(
                f"offer {rank} has {len(offer)} bytes; it must have {_HEADER.size} to {MAX_OFFER_BYTES}: pass it "
                f"unchanged"
            )
        magic, number, its_rank, rank_count, receiver_count, epoch, sha256 = _HEADER.unpack_from(offer)
        if magic != _MAGIC or number != _BACKENDS[backend][0]:
            raise InvalidInput(f"offer {rank} is no {backend} offer of this release; pass MakeOffer's bytes unchanged")
        if (its_rank, rank_count, receiver_count) != (rank, manifest.rank_count, group.receiver_count):
            raise InvalidInput(
                f"offer {rank} is rank {its_rank} of {rank_count} for {receiver_count} receivers; expected rank {rank} "
                f"of {manifest.rank_count} for {group.receiver_count}: pass all offers in rank order"
            )
        if epoch != group.epoch:
            raise StaleEpoch(f"offer {rank} is of epoch {epoch}, this is epoch {group.epoch}; make new offers")
        if sha256 != manifest.sha256:
            raise InvalidInput(f"offer {rank} is for another manifest; every rank and engine must have the same one")
        bodies.append(offer[_HEADER.size :])
    return bodies


def used_up() -> WrongState:
    """Return the error of a call on a transport that failed or was closed."""
    return WrongState("this weight transfer failed or was closed before; open a new epoch")
