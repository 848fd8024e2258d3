"""CUDA IPC on one host: receivers read the trainer's GPU memory, on the same GPU or over NVLink.

The sender has a page (see `page`) that receivers map. Its body says where every part of the shard
lies: the handle of the CUDA allocation and the offset in it. Parts that can be sent from where they
are lie in the first window. Those that must be cast or computed first go through two staging
buffers, window by window.

    body      one row for each receiver: its pid, the windows that it has taken
              one row for each part: tensor, start, count, window, offset in the allocation, handle

    sender    fills a window, waits for the GPU, publishes its number (counted over the whole epoch)
    receiver  waits for the number, enqueues the copies, waits for the GPU, writes the number into its row

Nothing may change under a receiver: `send` returns when all of them have taken all windows, and
only then the optimizer may write again. So a receiver that is killed is noticed by its pid, and one
that hangs by the deadline.
"""

from __future__ import annotations

import os
import select
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from fourfold.errors import InvalidInput, Unavailable, WrongState
from fourfold.weights.manifest import Span
from fourfold.weights.source.base import WeightSource, torch_dtype
from fourfold.weights.transport import cuda
from fourfold.weights.transport.base import (
    Backend,
    Deadline,
    Sink,
    TransferGroup,
    aborted,
    unpack_offers,
    used_up,
    wait_until,
)
from fourfold.weights.transport.cuda import needs_gpu
from fourfold.weights.transport.progress_page import HEADER_BYTES, ReceiverPage, SenderPage, parse_offer
from fourfold.weights.transport.sink import Staging, windows

# pid, windows taken
_RECEIVER: Final = struct.Struct("<qq")
# tensor, start, count, window, offset, handle
_PART: Final = struct.Struct("<qqqqq64s")
# parts, windows, generation of the table
_COUNTS: Final = struct.Struct("<qqq")
_BUFFERS: Final = 2


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the shard as the receiver sees it."""

    span: Span
    window: int
    handle: bytes
    offset: int


class CudaIpcSender:
    """One trainer rank's end."""

    def __init__(self, group: TransferGroup, rank: int, source: WeightSource) -> None:
        """Lay the windows out; nothing is exported yet.

        Raises:
            WrongState: the weights are not on a GPU.
        """
        self._manifest, self._source = group.manifest, source
        spans = group.manifest.spans_of_rank(rank)
        self._in_place = [span for span in spans if source.is_view(span)]
        self._staged = windows(group.manifest, [span for span in spans if not source.is_view(span)])
        self._window_count = max(1, len(self._staged))
        self._receiver_count = group.receiver_count
        part_count = len(self._in_place) + sum(map(len, self._staged))
        self._table = _COUNTS.size + group.receiver_count * _RECEIVER.size
        self._page = SenderPage(Backend.CUDA_IPC, group, rank, self._table + part_count * _PART.size)
        self._device = source.read(spans[0]).device if spans else torch.device("cuda")
        needs_gpu(self._device, "the trainer's weights are", "shm")
        self._staging = [Staging(group.manifest, self._device) for _ in range(_BUFFERS)]
        self._slots: list[list[torch.Tensor]] = []  # of the staged windows
        self._addresses: list[int] = []
        self._generation = 0
        self._deaths: dict[int, tuple[int, select.poll]] = {}  # by receiver: its pidfd, and who looks at it

    def offer(self) -> bytes:
        """Return where the page is."""
        return self._page.offer()

    def open(self, deadline: Deadline) -> None:
        """Nobody to meet: receivers come by themselves."""

    def send(self, policy_version: int, deadline: Deadline) -> int:
        """Publish the shard, window by window, and wait until all receivers have taken it."""
        if self._page.memory is None:
            raise used_up()
        with torch.cuda.device(self._device):
            return self._send(policy_version, deadline)

    def _send(self, policy_version: int, deadline: Deadline) -> int:
        self._export()
        base = self._page.sequence
        for window in range(self._window_count):
            if self._staged:
                self._wait_taken(base + window + 1 - _BUFFERS, deadline)
                self._fill(window)
                torch.cuda.current_stream().synchronize()
            if self._page.is_aborted:
                raise aborted()
            self._page.publish(base + window + 1, policy_version)
        self._wait_taken(base + self._window_count, deadline)
        spans = [*self._in_place, *(part for parts in self._staged for part in parts)]
        return sum(span.count * self._manifest.tensors[span.tensor].item_bytes for span in spans)

    def abort(self) -> None:
        """Tell the receivers, and end a wait."""
        self._page.abort()

    def close(self) -> None:
        """Give page and buffers back."""
        self._page.close()
        self._slots, self._staging = [], []
        for pidfd, _ in self._deaths.values():
            os.close(pidfd)
        self._deaths = {}

    def _export(self) -> None:
        """Write the table of parts, unless all of them lie where they lay in the last round."""
        values = [self._source.read(span) for span in self._in_place]
        addresses = [part.data_ptr() for part in values]
        if self._generation and addresses == self._addresses:
            return
        rows = [(span, 0, part) for span, part in zip(self._in_place, values, strict=True)]
        self._slots = [self._stage(window) for window in range(len(self._staged))]
        for window, (parts, slots) in enumerate(zip(self._staged, self._slots, strict=True)):
            rows += [(part, window, slot) for part, slot in zip(parts, slots, strict=True)]
        memory = self._page.memory
        assert memory is not None, "open"
        for row, (span, window, part) in enumerate(rows):
            handle, offset = cuda.export(part)
            place = HEADER_BYTES + self._table + row * _PART.size
            _PART.pack_into(memory, place, span.tensor, span.start, span.count, window, offset, handle)
        self._addresses, self._generation = addresses, self._generation + 1
        _COUNTS.pack_into(memory, HEADER_BYTES, len(rows), self._window_count, self._generation)

    def _stage(self, window: int) -> list[torch.Tensor]:
        """Return where the parts of a window are staged."""
        staging = self._staging[window % _BUFFERS]
        staging.begin()
        return [staging.slot(part) for part in self._staged[window]]

    def _fill(self, window: int) -> None:
        for part, slot in zip(self._staged[window], self._slots[window], strict=True):
            slot.copy_(self._source.read(part))

    def _wait_taken(self, number: int, deadline: Deadline) -> None:
        """Wait until every receiver has taken window `number` of the epoch."""
        for receiver in range(self._receiver_count):
            self._wait_for(receiver, number, deadline)

    def _wait_for(self, receiver: int, number: int, deadline: Deadline) -> None:
        memory = self._page.memory
        place = HEADER_BYTES + _COUNTS.size + receiver * _RECEIVER.size

        def taken() -> bool:
            if self._page.is_aborted or memory is None:
                raise aborted()
            pid, count = _RECEIVER.unpack_from(memory, place)
            if count >= number:
                return True
            if pid and self._is_dead(receiver, pid):
                raise Unavailable(f"receiver {receiver}, process {pid}, ended before it had taken the weights")
            return False

        wait_until(taken, deadline, f"the answer of receiver {receiver}")

    def _is_dead(self, receiver: int, pid: int) -> bool:
        if receiver not in self._deaths:
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                return True
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            self._deaths[receiver] = (pidfd, poll)
        return bool(self._deaths[receiver][1].poll(0))


class CudaIpcReceiver:
    """One receiver's end."""

    stable = False

    def __init__(self, group: TransferGroup, receiver_index: int, device: torch.device) -> None:
        """Make the receiver; its model is on `device`."""
        self._group, self._index, self._device = group, receiver_index, device
        self._offers: list[bytes] = []
        self._ranks: list[_Rank] = []
        self._abort = threading.Event()

    def accept(self, offers: Sequence[bytes]) -> None:
        """Check every rank's offer.

        Raises:
            InvalidInput: an offer of a wrong length or content.
            WrongState: the model is not on a GPU.
        """
        needs_gpu(self._device, "the engine's model is", "shm")
        self._offers = unpack_offers(Backend.CUDA_IPC, self._group, offers)
        for rank, body in enumerate(self._offers):
            if parse_offer(Backend.CUDA_IPC, rank, body) < _COUNTS.size + self._group.receiver_count * _RECEIVER.size:
                raise InvalidInput(f"cuda_ipc offer {rank} is of a page that is too small; make new offers")

    def open(self, deadline: Deadline) -> None:
        """Map every rank's page, and say who this is.

        Raises:
            Unavailable: a sender is gone, or lives where its memory cannot be mapped.
        """
        for rank, offer in enumerate(self._offers):
            self._ranks.append(_Rank(self._group, rank, offer, self._index, self._device))

    def receive(self, policy_version: int, sink: Sink, deadline: Deadline) -> None:
        """Take every window of every rank as soon as it is there."""
        if not self._ranks:
            raise used_up()
        with torch.cuda.device(self._device):
            self._receive(policy_version, sink, deadline)

    def _receive(self, policy_version: int, sink: Sink, deadline: Deadline) -> None:
        what = f"the arrival of version {policy_version}"
        for rank in self._ranks:
            rank.wait(0, policy_version, self._abort, deadline, what)
            rank.read_table()
        for window in range(max(rank.window_count for rank in self._ranks)):
            taking = [rank for rank in self._ranks if window < rank.window_count]
            for rank in taking:
                rank.wait(window, policy_version, self._abort, deadline, what)
                for span, values in rank.parts(window):
                    sink.take(span, values)
            sink.flush()
            cuda.finish_stream(self._device, deadline, f"copying version {policy_version}")
            for rank in taking:
                rank.acknowledge(window)
        for rank in self._ranks:
            rank.finish()

    def check(self) -> None:
        """Nobody but the sender writes there, and it waits for the acknowledgement."""

    def abort(self) -> None:
        """End a wait."""
        self._abort.set()

    def close(self) -> None:
        """Unmap pages and memory."""
        self.abort()
        for rank in self._ranks:
            rank.close()
        self._ranks = []


class _Rank:
    """One sender, as a receiver sees it."""

    def __init__(self, group: TransferGroup, rank: int, offer: bytes, index: int, device: torch.device) -> None:
        self._group, self._rank, self._device = group, rank, device
        self._page = ReceiverPage(group, rank, offer, writable=True)
        self._row = HEADER_BYTES + _COUNTS.size + index * _RECEIVER.size
        self._table = HEADER_BYTES + _COUNTS.size + group.receiver_count * _RECEIVER.size
        self._done = 0  # windows of earlier rounds
        self._generation = 0
        self._addresses: dict[bytes, int] = {}
        self._windows: list[list[tuple[Span, torch.Tensor]]] = []
        _RECEIVER.pack_into(self._page.memory, self._row, os.getpid(), 0)

    @property
    def window_count(self) -> int:
        """Windows of a round."""
        return len(self._windows)

    def wait(self, window: int, policy_version: int, stop: threading.Event, deadline: Deadline, what: str) -> None:
        """Wait until a window of this round is published."""
        self._page.wait(self._done + window + 1, stop, deadline, what)
        if self._page.version != policy_version:
            raise WrongState(
                f"trainer rank {self._rank} sends version {self._page.version}; version {policy_version} was due"
            )

    def read_table(self) -> None:
        """Map what is not mapped yet, when the sender has written a new table."""
        memory = self._page.memory
        count, window_count, generation = _COUNTS.unpack_from(memory, HEADER_BYTES)
        if generation == self._generation:
            return
        if not 0 <= count <= (len(memory) - self._table) // _PART.size or not 1 <= window_count <= max(1, count):
            raise WrongState(f"the page of trainer rank {self._rank} names {count} parts; it has no room for them")
        parts = [self._part(row) for row in range(count)]
        handles = {part.handle for part in parts}
        for gone in self._addresses.keys() - handles:
            cuda.close_handle(self._addresses.pop(gone))
        for new in handles - self._addresses.keys():
            self._addresses[new] = cuda.open_handle(new)
        self._windows = [[] for _ in range(window_count)]
        for part in parts:
            spec = self._group.manifest.tensors[part.span.tensor]
            address = self._addresses[part.handle] + part.offset
            values = cuda.memory_at(address, part.span.count * spec.item_bytes, self._device)
            self._windows[part.window].append((part.span, values.view(torch_dtype(spec.dtype))))
        self._generation = generation

    def parts(self, window: int) -> list[tuple[Span, torch.Tensor]]:
        """Return spans and their elements."""
        return self._windows[window]

    def acknowledge(self, window: int) -> None:
        """Tell the sender that a window of this round was taken."""
        _RECEIVER.pack_into(self._page.memory, self._row, os.getpid(), self._done + window + 1)

    def finish(self) -> None:
        """End the round."""
        self._done += self.window_count

    def close(self) -> None:
        """Unmap."""
        self._windows = []
        for address in self._addresses.values():
            cuda.close_handle(address)
        self._addresses = {}
        self._page.close()

    def _part(self, row: int) -> _Part:
        """Read one row of the table, and check that it is a part of this rank's shard."""
        tensor, start, count, window, offset, handle = _PART.unpack_from(
            self._page.memory, self._table + row * _PART.size
        )
        span = Span(tensor=tensor, start=start, count=count, rank=self._rank, offset=offset)
        tensors = self._group.manifest.tensors
        inside = 0 <= tensor < len(tensors) and start >= 0 and count > 0 and start + count <= tensors[tensor].count
        if not inside or offset < 0 or window < 0:
            raise WrongState(f"row {row} of the page of trainer rank {self._rank} names no part of a tensor")
        return _Part(span, window, handle, offset)
