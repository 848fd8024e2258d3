"""Sends weights through shared memory on one host: each rank fills an arena, which every receiver maps read-only.

The arena is the body of a progress page. The page's sequence number is 0 while the arena is empty, odd while it is
being written, and even when it is complete. The sender overwrites the arena in the next `send`, which may start only
after all receivers have replied to the last one; `check` detects, by the sequence number, that it started too early.
"""

from __future__ import annotations

import mmap
import warnings

import torch

from fourfold.errors import InvalidInput, WrongState
from fourfold.weights.source.base import WeightSource
from fourfold.weights.transport.base import Backend, ReceiveTransport, SenderLink, Sink, TransferGroup, used_up
from fourfold.weights.transport.progress_page import (
    HEADER_BYTES,
    MappedPage,
    PageSender,
    ProgressPage,
    parse_page_offer,
)
from fourfold.weights.transport.staging import hand_to_sink, shard_bytes, span_view
from fourfold.weights.transport.waiting import Deadline, aborted


class ShmSender(PageSender):
    """The arena of one trainer rank."""

    through_host = True

    def __init__(self, group: TransferGroup, rank: int, source: WeightSource) -> None:
        """Allocate the arena. Raises Overloaded: not enough memory."""
        self._manifest, self._source = group.manifest, source
        self._spans = group.manifest.spans_of_rank(rank)
        size = group.manifest.shard_bytes[rank]
        self._page = ProgressPage(Backend.SHM, group, rank, size)
        assert self._page.memory is not None, "just made"
        self._arena = _as_tensor(self._page.memory, size)

    def send(self, policy_version: int, deadline: Deadline) -> int:
        if self._page.memory is None:
            raise used_up()
        writing = self._page.sequence + 1
        self._page.publish(writing, policy_version)
        for span in self._spans:
            if self._page.is_aborted:
                raise aborted()
            deadline.check(f"copying version {policy_version} into shared memory")
            span_view(self._manifest, self._arena, span).copy_(self._source.read(span))
        self._page.publish(writing + 1, policy_version)
        return shard_bytes(self._manifest, self._spans)

    def close(self) -> None:
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._page.close()


class _MappedArena(SenderLink):
    def __init__(self, group: TransferGroup, rank: int, offer: bytes) -> None:
        self.page = MappedPage(group, rank, offer)
        self.shard = _as_tensor(self.page.memory, group.manifest.shard_bytes[rank])
        self.taken = 0  # sequence number, always even, of the version that `receive` handed over last

    def close(self) -> None:
        self.page.close()


class ShmReceiver(ReceiveTransport[bytes, _MappedArena]):
    """Maps the arenas of all ranks."""

    backend = Backend.SHM
    stable = True

    def _parse(self, rank: int, body: bytes) -> bytes:
        if parse_page_offer(Backend.SHM, rank, body) != self._group.manifest.shard_bytes[rank]:
            raise InvalidInput(f"shm offer {rank} is of another size than its shard; make new offers")
        return body

    def _connect(self, rank: int, offer: bytes) -> _MappedArena:
        return _MappedArena(self._group, rank, offer)

    def _receive(self, policy_version: int, sink: Sink, deadline: Deadline) -> None:
        what = f"the arrival of version {policy_version}"
        for arena in self._links:
            sequence = arena.page.wait(arena.taken + 2, self._abort, deadline, what)
            while sequence % 2:  # the sender started to overwrite the arena before this receiver replied
                sequence = arena.page.wait(sequence + 1, self._abort, deadline, what)
            arena.page.check_version(policy_version)
            arena.taken = sequence
        hand_to_sink(self._group.manifest, [arena.shard for arena in self._links], sink)

    def held_shards(self) -> list[torch.Tensor]:
        """Raises WrongState: the trainer has begun to send the next version."""
        self.check()
        return [arena.shard for arena in self._links]

    def check(self) -> None:
        for rank, arena in enumerate(self._links):
            if arena.page.sequence != arena.taken:
                raise WrongState(
                    f"trainer rank {rank} overwrote the weights while they were being loaded; a send must come "
                    f"after all receivers have replied to the last one"
                )


def _as_tensor(memory: mmap.mmap, size: int) -> torch.Tensor:
    """Return the shard as uint8 [size]; the tensor keeps the mapping alive."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        # torch warns of writes to a read-only mapping; receivers only read.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8, offset=HEADER_BYTES, count=size)
