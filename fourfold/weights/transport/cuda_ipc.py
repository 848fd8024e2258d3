"""Sends weights through CUDA IPC on one host: receivers read the trainer's GPU memory, on the same GPU or over NVLink.

The sender has a progress page, which receivers map. The body of the page has the place of each part of the shard: the
handle of the CUDA allocation and the offset in it. Parts that can be sent from where they are form the first window.
Parts that must be cast or computed first go through two staging buffers, window by window.

    sender    fills a window, waits for the GPU, publishes its number (counted over the whole epoch)
    receiver  waits for the number, enqueues the copies, waits for the GPU, writes the number into its row

The memory must not change while a receiver reads it: `send` returns when all receivers have taken all windows, and only
then may the optimizer write again. The sender notices a killed receiver by its pid, and one that hangs by the deadline.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import Final

import torch

from fourfold.errors import InvalidInput, Unavailable, WrongState
from fourfold.weights.manifest import Span
from fourfold.weights.source.base import WeightSource, torch_dtype
from fourfold.weights.transport import cuda
from fourfold.weights.transport.base import Backend, ReceiveTransport, SenderLink, Sink, TransferGroup, used_up
from fourfold.weights.transport.cuda import needs_gpu
from fourfold.weights.transport.progress_page import (
    HEADER_BYTES,
    MappedPage,
    PageSender,
    ProgressPage,
    parse_page_offer,
)
from fourfold.weights.transport.staging import Staging, shard_bytes, windows
from fourfold.weights.transport.waiting import Deadline, ProcessWatch, aborted, wait_until

# Rows and counts of the body. pid, windows taken
_RECEIVER: Final = struct.Struct("<qq")
# tensor, start, count, window, offset, handle
_PART: Final = struct.Struct("<qqqqq64s")
# parts, windows, generation of the table
_COUNTS: Final = struct.Struct("<qqq")
_BUFFERS: Final = 2


class CudaIpcSender(PageSender):
    """The page of one trainer rank."""

    through_host = False

    def __init__(self, group: TransferGroup, rank: int, source: WeightSource) -> None:
        """Lay the windows out; nothing is exported yet. Raises WrongState: the weights are not on a GPU."""
        self._source, self._receiver_count = source, group.receiver_count
        spans = group.manifest.spans_of_rank(rank)
        self._byte_count = shard_bytes(group.manifest, spans)
        self._in_place = [span for span in spans if source.is_view(span)]
        self._staged = windows(group.manifest, [span for span in spans if not source.is_view(span)])
        self._window_count = max(1, len(self._staged))
        self._table = _COUNTS.size + group.receiver_count * _RECEIVER.size
        part_count = len(self._in_place) + sum(map(len, self._staged))
        self._device = source.read(spans[0]).device if spans else torch.device("cuda")
        needs_gpu(self._device, "the trainer's weights are", "shm")
        self._page = ProgressPage(Backend.CUDA_IPC, group, rank, self._table + part_count * _PART.size)
        self._staging = [Staging(group.manifest, self._device) for _ in range(_BUFFERS)]
        self._slots: list[list[torch.Tensor]] = []  # of the parts of each staged window
        self._addresses: list[int] = []  # of the parts in place, in the table's present generation
        self._generation = 0
        self._watches: dict[int, ProcessWatch] = {}  # by receiver

    def send(self, policy_version: int, deadline: Deadline) -> int:
        if self._page.memory is None:
            raise used_up()
        with torch.cuda.device(self._device):
            self._export()
            base = self._page.sequence
            for window in range(self._window_count):
                if self._staged:
                    self._wait_taken(base + window + 1 - _BUFFERS, deadline)  # now the buffer is free again
                    for part, slot in zip(self._staged[window], self._slots[window], strict=True):
                        slot.copy_(self._source.read(part))
                    torch.cuda.current_stream().synchronize()
                if self._page.is_aborted:
                    raise aborted()
                self._page.publish(base + window + 1, policy_version)
            self._wait_taken(base + self._window_count, deadline)
        return self._byte_count

    def close(self) -> None:
        self._page.close()
        self._slots, self._staging = [], []
        for watch in self._watches.values():
            watch.close()
        self._watches = {}

    def _export(self) -> None:
        """Write the table of parts, unless all parts in place have the addresses of the last round."""
        values = [self._source.read(span) for span in self._in_place]
        addresses = [part.data_ptr() for part in values]
        if self._generation and addresses == self._addresses:
            return
        rows = [(span, 0, part) for span, part in zip(self._in_place, values, strict=True)]
        self._slots = []
        for window, parts in enumerate(self._staged):
            staging = self._staging[window % _BUFFERS]
            staging.begin()
            self._slots.append([staging.slot(part) for part in parts])
            rows += [(part, window, slot) for part, slot in zip(parts, self._slots[window], strict=True)]
        memory = self._page.memory
        assert memory is not None, "open"
        for row, (span, window, part) in enumerate(rows):
            handle, offset = cuda.export(part)
            place = HEADER_BYTES + self._table + row * _PART.size
            _PART.pack_into(memory, place, span.tensor, span.start, span.count, window, offset, handle)
        self._addresses, self._generation = addresses, self._generation + 1
        _COUNTS.pack_into(memory, HEADER_BYTES, len(rows), self._window_count, self._generation)

    def _wait_taken(self, number: int, deadline: Deadline) -> None:
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
            if pid and self._has_ended(receiver, pid):
                raise Unavailable(f"receiver {receiver}, process {pid}, ended before it had taken the weights")
            return False

        wait_until(taken, deadline, f"the acknowledgement of receiver {receiver}")

    def _has_ended(self, receiver: int, pid: int) -> bool:
        if receiver not in self._watches:
            try:
                self._watches[receiver] = ProcessWatch(pid)
            except ProcessLookupError:
                return True
        return self._watches[receiver].ended


class _MappedShard(SenderLink):
    """The page and the exported memory of one rank, in a receiver."""

    def __init__(self, group: TransferGroup, rank: int, offer: bytes, index: int, device: torch.device) -> None:
        self._group, self._rank, self._device = group, rank, device
        self.page = MappedPage(group, rank, offer, writable=True)
        self._row = HEADER_BYTES + _COUNTS.size + index * _RECEIVER.size
        self._table = HEADER_BYTES + _COUNTS.size + group.receiver_count * _RECEIVER.size
        self.taken = 0  # windows of earlier rounds
        self._generation = 0
        self._addresses: dict[bytes, int] = {}  # of mapped allocations, by handle
        self.windows: list[list[tuple[Span, torch.Tensor]]] = []
        """The parts of each window of a round, as views of the sender's memory."""
        self.acknowledge(0)

    def read_table(self) -> None:
        """Map the allocations of a new table, and unmap those that it no longer names."""
        memory = self.page.memory
        count, window_count, generation = _COUNTS.unpack_from(memory, HEADER_BYTES)
        if generation == self._generation:
            return
        if not 0 <= count <= (len(memory) - self._table) // _PART.size or not 1 <= window_count <= max(1, count):
            raise WrongState(f"the page of trainer rank {self._rank} lists {count} parts; it has no room for them")
        parts = [self._part(row, window_count) for row in range(count)]
        handles = {handle for _, _, handle in parts}
        for gone in self._addresses.keys() - handles:
            cuda.close_handle(self._addresses.pop(gone))
        for new in handles - self._addresses.keys():
            self._addresses[new] = cuda.open_handle(new)
        self.windows = [[] for _ in range(window_count)]
        for span, window, handle in parts:
            spec = self._group.manifest.tensors[span.tensor]
            address = self._addresses[handle] + span.offset
            values = cuda.memory_at(address, span.count * spec.item_bytes, self._device)
            self.windows[window].append((span, values.view(torch_dtype(spec.dtype))))
        self._generation = generation

    def acknowledge(self, count: int) -> None:
        """Show the sender that the first `count` windows of this round were taken."""
        _RECEIVER.pack_into(self.page.memory, self._row, os.getpid(), self.taken + count)

    def close(self) -> None:
        self.windows = []
        for address in self._addresses.values():
            cuda.close_handle(address)
        self._addresses = {}
        self.page.close()

    def _part(self, row: int, window_count: int) -> tuple[Span, int, bytes]:
        """Return a part, its window and its handle. The part's `offset` is in its CUDA allocation, not in the shard."""
        tensor, start, count, window, offset, handle = _PART.unpack_from(
            self.page.memory, self._table + row * _PART.size
        )
        tensors = self._group.manifest.tensors
        inside = 0 <= tensor < len(tensors) and start >= 0 and count > 0 and start + count <= tensors[tensor].count
        if not inside or offset < 0 or not 0 <= window < window_count:
            raise WrongState(f"row {row} of the page of trainer rank {self._rank} is not a part of a tensor")
        return Span(tensor=tensor, start=start, count=count, rank=self._rank, offset=offset), window, handle


class CudaIpcReceiver(ReceiveTransport[bytes, _MappedShard]):
    """Copies from the memory of all ranks; accepts offers only for a model on a GPU."""

    backend = Backend.CUDA_IPC

    def accept(self, offers: Sequence[bytes]) -> None:
        needs_gpu(self._device, "the engine's model is", "shm")
        super().accept(offers)

    def _parse(self, rank: int, body: bytes) -> bytes:
        rows = _COUNTS.size + self._group.receiver_count * _RECEIVER.size
        if parse_page_offer(Backend.CUDA_IPC, rank, body) < rows:
            raise InvalidInput(f"cuda_ipc offer {rank} has a page that is too small; make new offers")
        return body

    def _connect(self, rank: int, offer: bytes) -> _MappedShard:
        return _MappedShard(self._group, rank, offer, self._index, self._device)

    def _receive(self, policy_version: int, sink: Sink, deadline: Deadline) -> None:
        """Take every window of every rank as soon as it is published."""

        def wait(shard: _MappedShard, window: int) -> None:
            what = f"the arrival of version {policy_version}"
            shard.page.wait(shard.taken + window + 1, self._abort, deadline, what)
            shard.page.check_version(policy_version)

        with torch.cuda.device(self._device):
            for shard in self._links:
                wait(shard, 0)
                shard.read_table()
            for window in range(max(len(shard.windows) for shard in self._links)):
                taking = [shard for shard in self._links if window < len(shard.windows)]
                for shard in taking:
                    wait(shard, window)
                    for span, values in shard.windows[window]:
                        sink.take(span, values)
                sink.flush()
                cuda.finish_stream(self._device, deadline, f"copying version {policy_version}")
                for shard in taking:
                    shard.acknowledge(window + 1)
        for shard in self._links:
            shard.taken += len(shard.windows)
