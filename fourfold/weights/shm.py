"""Shared memory on one host: every trainer rank has one arena, every receiver maps it read-only.

The arena is an anonymous file (memfd): nothing appears in /dev/shm and nothing is left after
kill -9. A receiver opens it as /proc/<pid>/fd/<n>, which the kernel allows to the same user in
the same PID namespace. Its first page is the header:

    magic, nonce, epoch, rank, shard bytes, manifest     written once; they tell a recycled pid
    sequence                                             0 empty, odd while being written, then even
    policy version, aborted

The sender overwrites the arena in the next `send`, which comes only after all receivers of the
last one have answered; the sequence number shows when that rule was broken. Whoever waits
sleeps on the other process's pidfd, a millisecond at first: a death is seen at once.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import select
import struct
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from fourfold.errors import InvalidInput, Overloaded, Unavailable, WrongState
from fourfold.weights.source import WeightSource
from fourfold.weights.transport import (
    Backend,
    Deadline,
    Group,
    Shards,
    Sink,
    aborted,
    pack_offer,
    torch_dtype,
    unpack_offers,
    used_up,
)

_HEADER_BYTES: Final = 4096
# magic, nonce, epoch, rank, shard bytes, manifest SHA-256
_FIXED: Final = struct.Struct("<8s16sqqq32s")
_MAGIC: Final = b"FFARENA1"
# Words of 8 bytes, so that each is written at once.
_SEQUENCE, _VERSION, _ABORTED = (_FIXED.size // 8 + i for i in range(3))
# pid, file descriptor, shard bytes, nonce
_BODY: Final = struct.Struct("<QIQ16s")
_FIRST_SLEEP_MS: Final = 1
_LONGEST_SLEEP_MS: Final = 10


class ShmSender:
    """One trainer rank's arena."""

    def __init__(self, group: Group, rank: int) -> None:
        """Allocate the arena.

        Raises:
            Overloaded: not enough memory.
        """
        self._group, self._rank = group, rank
        self._spans = group.manifest.spans_of_rank(rank)
        self._shard_bytes = group.manifest.shard_bytes[rank]
        self._nonce = secrets.token_bytes(16)
        self._fd = _make_arena(f"fourfold-weights-{rank}", _HEADER_BYTES + self._shard_bytes)
        self._map: mmap.mmap | None = mmap.mmap(
            self._fd, _HEADER_BYTES + self._shard_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE
        )
        _FIXED.pack_into(self._map, 0, _MAGIC, self._nonce, group.epoch, rank, self._shard_bytes, group.manifest.sha256)
        self._words = memoryview(self._map)[:_HEADER_BYTES].cast("q")
        self._arena = _as_tensor(self._map, self._shard_bytes)
        self._abort = threading.Event()
        self._lock = threading.Lock()  # abort and close may meet

    def offer(self) -> bytes:
        """Return pid, descriptor, size and nonce."""
        body = _BODY.pack(os.getpid(), self._fd, self._shard_bytes, self._nonce)
        return pack_offer(Backend.SHM, self._group, self._rank, body)

    def open(self, deadline: Deadline) -> None:
        """Nobody to meet: receivers come by themselves."""

    def send(self, source: WeightSource, policy_version: int, deadline: Deadline) -> int:
        """Copy the shard into the arena, cast where needed, and publish it."""
        if self._map is None:
            raise used_up()
        words = self._words
        words[_SEQUENCE] += 1
        for span in self._spans:
            if self._abort.is_set():
                raise aborted()
            deadline.check(f"copying version {policy_version} into shared memory")
            spec = self._group.manifest.tensors[span.tensor]
            target = self._arena[span.offset : span.offset + span.count * spec.item_bytes]
            target.view(torch_dtype(spec.dtype)).copy_(source.read(span))
        words[_VERSION] = policy_version
        words[_SEQUENCE] += 1
        return sum(span.count * self._group.manifest.tensors[span.tensor].item_bytes for span in self._spans)

    def abort(self) -> None:
        """Tell the receivers, and stop a copy that runs."""
        self._abort.set()
        with self._lock:
            if self._map is not None:
                self._words[_ABORTED] = 1

    def close(self) -> None:
        """Give the memory back; the kernel frees it when the last receiver has let go, too."""
        self.abort()
        with self._lock:
            if self._map is None:
                return
            self._map = None
            self._words.release()
            self._arena = torch.empty(0, dtype=torch.uint8)
            os.close(self._fd)


@dataclass(slots=True)
class _Arena:
    """One rank's arena, mapped into the receiver."""

    pid: int
    pidfd: int
    memory: mmap.mmap
    words: memoryview
    shard: torch.Tensor
    sequence: int = 0


class ShmReceiver:
    """Maps the arenas of all ranks."""

    def __init__(self, group: Group, receiver_index: int) -> None:
        """Make the receiver; its index does not matter here."""
        self._group = group
        self._places: list[tuple[int, int, bytes]] = []  # pid, descriptor, nonce
        self._arenas: list[_Arena] = []
        self._abort = threading.Event()
        self._closed = False

    def accept(self, offers: Sequence[bytes]) -> None:
        """Check every rank's offer.

        Raises:
            InvalidInput: an offer of a wrong length or content.
        """
        for rank, body in enumerate(unpack_offers(Backend.SHM, self._group, offers)):
            if len(body) != _BODY.size:
                raise InvalidInput(f"shm offer {rank} has a body of {len(body)} bytes; it must have {_BODY.size}")
            pid, descriptor, shard_bytes, nonce = _BODY.unpack(body)
            if shard_bytes != self._group.manifest.shard_bytes[rank]:
                raise InvalidInput(f"shm offer {rank} is of {shard_bytes} bytes; the manifest says otherwise")
            self._places.append((pid, descriptor, nonce))

    def open(self, deadline: Deadline) -> None:
        """Map every rank's arena.

        Raises:
            Unavailable: a sender is gone, or lives where its memory cannot be mapped.
        """
        for rank, (pid, descriptor, nonce) in enumerate(self._places):
            self._arenas.append(self._map(rank, pid, descriptor, nonce))

    def receive(self, policy_version: int, sink: Sink | None, deadline: Deadline) -> Shards:
        """Wait until every rank has published `policy_version`. The bytes stay where they are: `sink` is not used."""
        if self._closed or not self._arenas:
            raise used_up()
        for rank, arena in enumerate(self._arenas):
            self._wait(rank, arena, policy_version, deadline)
        return Shards(self._group.manifest, [arena.shard for arena in self._arenas])

    def check(self) -> None:
        """Raise WrongState when a sender has written again since `receive`."""
        for rank, arena in enumerate(self._arenas):
            if arena.words[_SEQUENCE] != arena.sequence:
                raise WrongState(
                    f"trainer rank {rank} overwrote the weights while they were being loaded; a send must come "
                    f"after all receivers have answered the last one"
                )

    def abort(self) -> None:
        """End a wait."""
        self._abort.set()

    def close(self) -> None:
        """Unmap; views that are still held keep their memory."""
        self._closed = True
        self.abort()
        for arena in self._arenas:
            os.close(arena.pidfd)
            arena.words.release()
        self._arenas = []

    def _map(self, rank: int, pid: int, descriptor: int, nonce: bytes) -> _Arena:
        size = _HEADER_BYTES + self._group.manifest.shard_bytes[rank]
        pidfd = -1
        try:
            pidfd = os.pidfd_open(pid)  # first: then the nonce proves that it is the right process
            with Path(f"/proc/{pid}/fd/{descriptor}").open("rb") as file:
                actual = os.fstat(file.fileno()).st_size
                if actual != size or not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                    raise OSError(f"that file has {actual} bytes, expected {size} that cannot shrink")
                memory = mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except OSError as error:
            if pidfd >= 0:
                os.close(pidfd)
            raise Unavailable(
                f"cannot map the memory of trainer rank {rank}, process {pid} ({error}); it is gone, or it runs as "
                f"another user or in another PID namespace: use the gloo backend there"
            ) from None
        fixed = _FIXED.unpack_from(memory)
        group = self._group
        if fixed != (_MAGIC, nonce, group.epoch, rank, size - _HEADER_BYTES, group.manifest.sha256):
            os.close(pidfd)
            raise Unavailable(f"process {pid} is not trainer rank {rank} any more; make new offers")
        words = memoryview(memory)[:_HEADER_BYTES].cast("q")
        return _Arena(pid, pidfd, memory, words, _as_tensor(memory, size - _HEADER_BYTES))

    def _wait(self, rank: int, arena: _Arena, policy_version: int, deadline: Deadline) -> None:
        """Sleep until a version newer than the last one taken is complete, and take it."""
        death = select.poll()
        death.register(arena.pidfd, select.POLLIN)
        sleep_ms = _FIRST_SLEEP_MS
        while True:
            sequence = arena.words[_SEQUENCE]
            version = arena.words[_VERSION]
            if self._abort.is_set() or arena.words[_ABORTED]:
                raise aborted()
            if sequence > arena.sequence and sequence % 2 == 0 and sequence == arena.words[_SEQUENCE]:
                if version != policy_version:
                    raise WrongState(f"trainer rank {rank} sent version {version}; version {policy_version} was due")
                arena.sequence = sequence
                return
            if death.poll(min(sleep_ms, 1 + int(1000 * deadline.remaining))):
                raise Unavailable(f"trainer rank {rank}, process {arena.pid}, ended before it sent {policy_version}")
            deadline.check(f"the arrival of version {policy_version} from trainer rank {rank}")
            sleep_ms = min(2 * sleep_ms, _LONGEST_SLEEP_MS)


def _make_arena(name: str, size: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Really allocate: running out of memory is an error here, and would be a SIGBUS in a copy.
        os.posix_fallocate(fd, 0, size)
        # A receiver that maps it can rely on its size.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(fd)
        raise Overloaded(
            f"no room for {size} bytes of shared memory for the weights ({error.strerror}); free some, or use gloo"
        ) from None
    return fd


def _as_tensor(memory: mmap.mmap, shard_bytes: int) -> torch.Tensor:
    """Return the shard as uint8 [shard_bytes]; the tensor keeps the mapping alive."""
    if not shard_bytes:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        # torch warns that a read-only mapping must not be written; nobody writes to it.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8, offset=_HEADER_BYTES, count=shard_bytes)
