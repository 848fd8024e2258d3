"""Shared memory on one host: every trainer rank has one arena, every receiver maps it read-only.

The arena is the body of a page (see `page`). Its sequence number is 0 while it is empty, odd while
it is being written, then even. The sender overwrites it in the next `send`, which comes only after
all receivers of the last one have answered; the sequence number shows when that rule was broken.
"""

from __future__ import annotations

import mmap
import threading
import warnings
from collections.abc import Sequence

import torch

from fourfold.errors import InvalidInput, WrongState
from fourfold.weights.source.base import WeightSource, torch_dtype
from fourfold.weights.transport.base import (
    Backend,
    Deadline,
    Shards,
    Sink,
    TransferGroup,
    aborted,
    unpack_offers,
    used_up,
)
from fourfold.weights.transport.progress_page import HEADER_BYTES, ReceiverPage, SenderPage, parse_offer


class ShmSender:
    """One trainer rank's arena."""

    def __init__(self, group: TransferGroup, rank: int, source: WeightSource) -> None:
        """Allocate the arena.

        Raises:
            Overloaded: not enough memory.
        """
        self._manifest, self._source = group.manifest, source
        self._spans = group.manifest.spans_of_rank(rank)
        shard_bytes = group.manifest.shard_bytes[rank]
        self._page = SenderPage(Backend.SHM, group, rank, shard_bytes)
        assert self._page.memory is not None, "just made"
        self._arena = _as_tensor(self._page.memory, shard_bytes)

    def offer(self) -> bytes:
        """Return where the arena is."""
        return self._page.offer()

    def open(self, deadline: Deadline) -> None:
        """Nobody to meet: receivers come by themselves."""

    def send(self, policy_version: int, deadline: Deadline) -> int:
        """Copy the shard into the arena, cast where needed, and publish it."""
        if self._page.memory is None:
            raise used_up()
        writing = self._page.sequence + 1
        self._page.publish(writing, policy_version)
        sent = 0
        for span in self._spans:
            if self._page.is_aborted:
                raise aborted()
            deadline.check(f"copying version {policy_version} into shared memory")
            spec = self._manifest.tensors[span.tensor]
            target = self._arena[span.offset : span.offset + span.count * spec.item_bytes]
            target.view(torch_dtype(spec.dtype)).copy_(self._source.read(span))
            sent += target.numel()
        self._page.publish(writing + 1, policy_version)
        return sent

    def abort(self) -> None:
        """Tell the receivers, and stop a copy that runs."""
        self._page.abort()

    def close(self) -> None:
        """Give the memory back."""
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._page.close()


class ShmReceiver:
    """Maps the arenas of all ranks."""

    stable = True

    def __init__(self, group: TransferGroup, receiver_index: int, device: torch.device) -> None:
        """Make the receiver; its index and device do not matter here."""
        self._group = group
        self._offers: list[bytes] = []
        self._pages: list[ReceiverPage] = []
        self._shards: list[torch.Tensor] = []
        self._taken: list[int] = []
        self._abort = threading.Event()

    def accept(self, offers: Sequence[bytes]) -> None:
        """Check every rank's offer.

        Raises:
            InvalidInput: an offer of a wrong length or content.
        """
        self._offers = unpack_offers(Backend.SHM, self._group, offers)
        for rank, body in enumerate(self._offers):
            if parse_offer(Backend.SHM, rank, body) != self._group.manifest.shard_bytes[rank]:
                raise InvalidInput(f"shm offer {rank} is of another size than its shard; make new offers")

    def open(self, deadline: Deadline) -> None:
        """Map every rank's arena.

        Raises:
            Unavailable: a sender is gone, or lives where its memory cannot be mapped.
        """
        for rank, offer in enumerate(self._offers):
            page = ReceiverPage(self._group, rank, offer)
            self._pages.append(page)
            self._shards.append(_as_tensor(page.memory, self._group.manifest.shard_bytes[rank]))
            self._taken.append(0)

    def receive(self, policy_version: int, sink: Sink, deadline: Deadline) -> None:
        """Wait until every rank has published `policy_version`. The bytes stay where they are."""
        if not self._pages:
            raise used_up()
        for rank, page in enumerate(self._pages):
            self._taken[rank] = self._wait(rank, page, policy_version, deadline)
        Shards(self._group.manifest, self._shards).hand_to(sink)

    def check(self) -> None:
        """Raise WrongState when a sender has written again since `receive`."""
        for rank, (page, taken) in enumerate(zip(self._pages, self._taken, strict=True)):
            if page.sequence != taken:
                raise WrongState(
                    f"trainer rank {rank} overwrote the weights while they were being loaded; a send must come "
                    f"after all receivers have answered the last one"
                )

    def abort(self) -> None:
        """End a wait."""
        self._abort.set()

    def close(self) -> None:
        """Unmap; views that are still held keep their memory."""
        self.abort()
        for page in self._pages:
            page.close()
        self._pages, self._shards = [], []

    def _wait(self, rank: int, page: ReceiverPage, policy_version: int, deadline: Deadline) -> int:
        """Wait for the next version to be complete; return its sequence number."""
        complete = self._taken[rank] // 2 * 2 + 2
        sequence = page.wait(complete, self._abort, deadline, f"the arrival of version {policy_version}")
        while sequence % 2:  # being written again: the caller broke the rule
            sequence = page.wait(sequence + 1, self._abort, deadline, f"the arrival of version {policy_version}")
        if page.version != policy_version:
            raise WrongState(f"trainer rank {rank} sent version {page.version}; version {policy_version} was due")
        return sequence


def _as_tensor(memory: mmap.mmap, shard_bytes: int) -> torch.Tensor:
    """Return the shard as uint8 [shard_bytes]; the tensor keeps the mapping alive."""
    if not shard_bytes:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        # torch warns that a read-only mapping must not be written; nobody writes to it.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8, offset=HEADER_BYTES, count=shard_bytes)
