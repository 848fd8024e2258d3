"""Shares a sender's progress, and optionally data, with receivers on its host through a memory page.

The page is an anonymous file (memfd): nothing appears in /dev/shm, and nothing is left over after a SIGKILL. A receiver
opens it as /proc/<pid>/fd/<n>, which the kernel allows to the same user in the same PID namespace. A header is followed
by a body, which belongs to the transport:

    magic, nonce, epoch, rank, body bytes, manifest      written once; they expose a recycled pid
    sequence                                             progress; its meaning belongs to the transport
    policy version, aborted

A receiver polls the page and the sender's pidfd, so that it notices the sender's death at once.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
import threading
from pathlib import Path
from typing import Final

from fourfold.errors import InvalidInput, Overloaded, Unavailable, WrongState
from fourfold.weights.transport.base import Backend, TransferGroup, pack_offer
from fourfold.weights.transport.waiting import Deadline, ProcessWatch, aborted, wait_until

HEADER_BYTES: Final = 4096
# magic, nonce, epoch, rank, body bytes, manifest SHA-256
_FIXED: Final = struct.Struct("<8s16sqqq32s")
_MAGIC: Final = b"FFPAGE02"
# Indices of aligned 8-byte words: the processor writes such a word at once, so no reader sees half of one.
_SEQUENCE, _VERSION, _ABORTED = (_FIXED.size // 8 + i for i in range(3))
# pid, file descriptor, body bytes, nonce
_OFFER: Final = struct.Struct("<QIQ16s")


class ProgressPage:
    """The page in the process of the trainer rank that made it."""

    def __init__(self, backend: Backend, group: TransferGroup, rank: int, body_bytes: int) -> None:
        """Allocate the page. Raises Overloaded: not enough memory."""
        nonce = secrets.token_bytes(16)
        self._fd, memory = _allocate(f"fourfold-weights-{rank}", HEADER_BYTES + body_bytes)
        self.memory: mmap.mmap | None = memory  # header and body; None after `close`
        self.offer = pack_offer(backend, group, rank, _OFFER.pack(os.getpid(), self._fd, body_bytes, nonce))
        _FIXED.pack_into(memory, 0, _MAGIC, nonce, group.epoch, rank, body_bytes, group.manifest.sha256)
        self._words = memoryview(memory)[:HEADER_BYTES].cast("q")
        self._abort = threading.Event()
        self._lock = threading.Lock()  # abort may run in another thread while this one closes

    @property
    def is_aborted(self) -> bool:
        return self._abort.is_set()

    @property
    def sequence(self) -> int:
        return self._words[_SEQUENCE]

    def publish(self, sequence: int, policy_version: int) -> None:
        """Show the receivers that `sequence` of `policy_version` is complete."""
        self._words[_VERSION] = policy_version  # before the sequence, after which receivers read it
        self._words[_SEQUENCE] = sequence

    def abort(self) -> None:
        self._abort.set()
        with self._lock:
            if self.memory is not None:
                self._words[_ABORTED] = 1

    def close(self) -> None:
        """Release the memory; the kernel frees it when the last receiver has unmapped it too. No view may be left."""
        self.abort()
        with self._lock:
            if self.memory is None:
                return
            self.memory = None
            self._words.release()
            os.close(self._fd)


class PageSender:
    """The part of a sending transport that a page provides: receivers connect on their own, by mapping it."""

    _page: ProgressPage

    def offer(self) -> bytes:
        return self._page.offer

    def open(self, deadline: Deadline) -> None:
        """Do nothing: the sender needs no connection."""

    def abort(self) -> None:
        self._page.abort()


class MappedPage:
    """The page of the trainer rank `rank`, mapped into a receiver. `offer`: a body checked by `parse_page_offer`."""

    def __init__(self, group: TransferGroup, rank: int, offer: bytes, *, writable: bool = False) -> None:
        """Map the page. Raises Unavailable: the sender has ended, or its memory cannot be mapped from here."""
        pid, fd, body_bytes, nonce = _OFFER.unpack(offer)
        self._rank = rank
        watch: ProcessWatch | None = None
        try:
            watch = ProcessWatch(pid)  # before the mapping: then the nonce proves that this is the right process
            self.memory = _map(Path(f"/proc/{pid}/fd/{fd}"), HEADER_BYTES + body_bytes, writable)
        except OSError as error:
            if watch is not None:
                watch.close()
            raise Unavailable(
                f"cannot map the memory of trainer rank {rank}, process {pid} ({error}): it has ended, or runs "
                f'on another machine, as another user or in another container; set weights.backend = "gloo"'
            ) from None
        self._sender = watch
        expected = (_MAGIC, nonce, group.epoch, rank, body_bytes, group.manifest.sha256)
        if _FIXED.unpack_from(self.memory) != expected:
            watch.close()
            raise Unavailable(f"process {pid} is not trainer rank {rank} any more; make new offers")
        self._words = memoryview(self.memory)[:HEADER_BYTES].cast("q")

    @property
    def sequence(self) -> int:
        return self._words[_SEQUENCE]

    def wait(self, sequence: int, abort: threading.Event, deadline: Deadline, what: str) -> int:
        """Wait until the sender has published `sequence` or more; return the last number that it has published.

        Raises StaleEpoch: the epoch was aborted, here or by the sender. Raises Unavailable: the sender has ended.
        """

        def is_published() -> bool:
            if abort.is_set() or self._words[_ABORTED]:
                raise aborted()
            if self.sequence >= sequence:
                return True
            if self._sender.ended:
                raise Unavailable(f"trainer rank {self._rank}, process {self._sender.pid}, ended before {what}")
            return False

        wait_until(is_published, deadline, f"{what} from trainer rank {self._rank}")
        return self.sequence

    def check_version(self, policy_version: int) -> None:
        """Raise WrongState if the sender has published another version than the one that is due."""
        if (published := self._words[_VERSION]) != policy_version:
            raise WrongState(
                f"trainer rank {self._rank} sent version {published}; version {policy_version} was due: abort the epoch"
            )

    def close(self) -> None:
        """Release the page; views that still exist keep its memory mapped."""
        self._sender.close()
        self._words.release()


def parse_page_offer(backend: Backend, rank: int, body: bytes) -> int:
    """Check the form of the body of a page's offer, and return the size of the page's body in bytes."""
    if len(body) != _OFFER.size:
        raise InvalidInput(f"{backend} offer {rank} has a body of {len(body)} bytes; it must have {_OFFER.size}")
    return int(_OFFER.unpack(body)[2])


def _allocate(name: str, size: int) -> tuple[int, mmap.mmap]:
    """Return the descriptor of an anonymous file of `size` bytes, and its memory."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Reserve the memory now. Without this, running out of memory would be a SIGBUS in the middle of a copy.
        os.posix_fallocate(fd, 0, size)
        # A receiver that maps the file may rely on its size: a shrunk file would be a SIGBUS there.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return fd, mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError as error:
        os.close(fd)
        raise Overloaded(
            f"no room for {size} bytes of shared memory for the weights ({error.strerror}); free some, or use gloo"
        ) from None


def _map(path: Path, size: int, writable: bool) -> mmap.mmap:
    with path.open("r+b" if writable else "rb") as file:
        actual = os.fstat(file.fileno()).st_size
        if actual != size or not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise OSError(f"that file has {actual} bytes, expected {size} that cannot shrink")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED, prot=protection)
