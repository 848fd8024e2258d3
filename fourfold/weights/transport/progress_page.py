"""A sender's page: memory that receivers on its host map, and in which both sides say how far they are.

The memory is an anonymous file (memfd): nothing appears in /dev/shm and nothing is left after kill
-9. A receiver opens it as /proc/<pid>/fd/<n>, which the kernel allows to the same user in the same
PID namespace. It begins with the header:

    magic, nonce, epoch, rank, body bytes, manifest      written once; they tell a recycled pid
    sequence                                             how much was published; its meaning is the transport's
    policy version, aborted

then comes the body. Whoever waits sleeps on the other process's pidfd, shortly at first: a death is
seen at once.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import select
import struct
import threading
from pathlib import Path
from typing import Final

from fourfold.errors import InvalidInput, Overloaded, Unavailable
from fourfold.weights.transport.base import Backend, Deadline, TransferGroup, aborted, pack_offer, wait_until

HEADER_BYTES: Final = 4096
# magic, nonce, epoch, rank, body bytes, manifest SHA-256
_FIXED: Final = struct.Struct("<8s16sqqq32s")
_MAGIC: Final = b"FFPAGE02"
# Words of 8 bytes, so that each is written at once.
_SEQUENCE, _VERSION, _ABORTED = (_FIXED.size // 8 + i for i in range(3))
# pid, file descriptor, body bytes, nonce
_OFFER: Final = struct.Struct("<QIQ16s")


class SenderPage:
    """The page, in the process of the trainer rank that made it."""

    def __init__(self, backend: Backend, group: TransferGroup, rank: int, body_bytes: int) -> None:
        """Allocate it.

        Raises:
            Overloaded: not enough memory.
        """
        self._backend, self._group, self._rank = backend, group, rank
        self._body_bytes = body_bytes
        self._nonce = secrets.token_bytes(16)
        size = HEADER_BYTES + body_bytes
        self._fd = _allocate(f"fourfold-weights-{rank}", size)
        self.memory: mmap.mmap | None = mmap.mmap(self._fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        """Header and body; None when closed."""
        manifest = group.manifest.sha256
        _FIXED.pack_into(self.memory, 0, _MAGIC, self._nonce, group.epoch, rank, body_bytes, manifest)
        self._words = memoryview(self.memory)[:HEADER_BYTES].cast("q")
        self._abort = threading.Event()
        self._lock = threading.Lock()  # abort and close may meet

    @property
    def is_aborted(self) -> bool:
        """Whether somebody in this process gave the epoch up."""
        return self._abort.is_set()

    @property
    def sequence(self) -> int:
        """What was published last."""
        return self._words[_SEQUENCE]

    def offer(self) -> bytes:
        """Return the offer for the receivers."""
        body = _OFFER.pack(os.getpid(), self._fd, self._body_bytes, self._nonce)
        return pack_offer(self._backend, self._group, self._rank, body)

    def publish(self, sequence: int, policy_version: int) -> None:
        """Tell the receivers."""
        self._words[_VERSION] = policy_version
        self._words[_SEQUENCE] = sequence

    def abort(self) -> None:
        """Tell the receivers that nothing more comes. From any thread."""
        self._abort.set()
        with self._lock:
            if self.memory is not None:
                self._words[_ABORTED] = 1

    def close(self) -> None:
        """Give the memory back; the kernel frees it when the last receiver has let go, too. No view may be left."""
        self.abort()
        with self._lock:
            if self.memory is None:
                return
            self.memory = None
            self._words.release()
            os.close(self._fd)


class ReceiverPage:
    """The page of one trainer rank, mapped into a receiver."""

    def __init__(self, group: TransferGroup, rank: int, offer: bytes, *, writable: bool = False) -> None:
        """Map it.

        Args:
            group: of the epoch.
            rank: of the sender.
            offer: checked by `parse_offer`.
            writable: map the body for writing.

        Raises:
            Unavailable: the sender is gone, or lives where its memory cannot be mapped.
        """
        self._pid, self._fd, body_bytes, nonce = _OFFER.unpack(offer)
        self._rank, self._taken = rank, 0
        size = HEADER_BYTES + body_bytes
        self._pidfd = -1
        try:
            self._pidfd = os.pidfd_open(self._pid)  # first: then the nonce proves that it is the right process
            self.memory = self._map(size, writable)
        except OSError as error:
            if self._pidfd >= 0:
                os.close(self._pidfd)
            raise Unavailable(
                f"cannot map the memory of trainer rank {rank}, process {self._pid} ({error}): it has ended, or runs "
                f'on another machine, as another user or in another container; set weights.backend = "gloo"'
            ) from None
        expected = (_MAGIC, nonce, group.epoch, rank, body_bytes, group.manifest.sha256)
        if _FIXED.unpack_from(self.memory) != expected:
            os.close(self._pidfd)
            raise Unavailable(f"process {self._pid} is not trainer rank {rank} any more; make new offers")
        self._words = memoryview(self.memory)[:HEADER_BYTES].cast("q")
        self._death = select.poll()
        self._death.register(self._pidfd, select.POLLIN)

    @property
    def sequence(self) -> int:
        """What the sender published last."""
        return self._words[_SEQUENCE]

    @property
    def version(self) -> int:
        """Policy version of what it published last."""
        return self._words[_VERSION]

    @property
    def is_aborted(self) -> bool:
        """Whether the sender gave the epoch up."""
        return bool(self._words[_ABORTED])

    def wait(self, sequence: int, stop: threading.Event, deadline: Deadline, what: str) -> int:
        """Sleep until the sender has published `sequence` or more; return what it has.

        Raises:
            StaleEpoch: it was given up, here or there.
            Unavailable: the sender has ended.
            DeadlinePassed: it took too long.
        """

        def is_there() -> bool:
            if stop.is_set() or self.is_aborted:
                raise aborted()
            if self.sequence >= sequence:
                return True
            if self._death.poll(0):
                raise Unavailable(f"trainer rank {self._rank}, process {self._pid}, ended before {what}")
            return False

        wait_until(is_there, deadline, f"{what} from trainer rank {self._rank}")
        return self.sequence

    def close(self) -> None:
        """Unmap; views that are still held keep their memory."""
        os.close(self._pidfd)
        self._words.release()

    def _map(self, size: int, writable: bool) -> mmap.mmap:
        with Path(f"/proc/{self._pid}/fd/{self._fd}").open("r+b" if writable else "rb") as file:
            actual = os.fstat(file.fileno()).st_size
            if actual != size or not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise OSError(f"that file has {actual} bytes, expected {size} that cannot shrink")
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            return mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED, prot=protection)


def parse_offer(backend: Backend, rank: int, body: bytes) -> int:
    """Check the form of an offer's body; return the bytes of the page's body.

    Raises:
        InvalidInput: wrong length.
    """
    if len(body) != _OFFER.size:
        raise InvalidInput(f"{backend} offer {rank} has a body of {len(body)} bytes; it must have {_OFFER.size}")
    return int(_OFFER.unpack(body)[2])


def _allocate(name: str, size: int) -> int:
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
