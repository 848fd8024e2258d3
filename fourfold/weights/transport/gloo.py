"""Sends weights over loopback TCP with gloo, for engines that cannot map the trainer's memory. NCCL's twin on CPUs.

Every trainer rank makes one process group with all receivers, in which it is rank 0, and broadcasts its shard in
buckets. The groups are `ProcessGroupGloo` objects of their own; torch's global group is not touched.

The members meet in a folder that only this user can enter, with a `FileStore`; a TCPStore would listen on every
interface. So both ends must share a host. A marker file in the folder exists while the sender keeps the epoch open: the
sender's abort removes it. Gloo itself cannot be interrupted: an aborted call returns at once, and a thread keeps the
group until the operation has timed out.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed import BroadcastOptions, FileStore, ProcessGroupGloo  # type: ignore[attr-defined]

from fourfold.errors import DeadlinePassed, InvalidInput, Unavailable
from fourfold.host.scratch import Scratch
from fourfold.weights.manifest import Manifest, Span
from fourfold.weights.source.base import WeightSource, torch_dtype
from fourfold.weights.transport.base import (
    Backend,
    ReceiveTransport,
    SenderLink,
    Sink,
    TransferGroup,
    check_header,
    pack_offer,
    used_up,
)
from fourfold.weights.transport.staging import hand_to_sink
from fourfold.weights.transport.waiting import Deadline, aborted

_BUCKET_BYTES: Final = 16 << 20
_POLL_SECONDS: Final = 0.02
_NONCE_BYTES: Final = 16
_STORE_FILE: Final = "store"


class _Member(SenderLink):
    """One end, rank `rank` of `size`, of the group of the trainer rank `sender_rank` and all receivers."""

    def __init__(self, marker: Path, sender_rank: int, rank: int, size: int, abort: threading.Event) -> None:
        self._marker, self._rank, self._size, self._abort = marker, rank, size, abort
        self._name = f"the gloo group of trainer rank {sender_rank}"
        self._group: ProcessGroupGloo | None = None

    def join(self, deadline: Deadline) -> None:
        """Wait for all members, then connect each with each.

        Raises Unavailable: the folder does not exist: the sender is on another host, or has closed.
        """
        if not self._marker.is_file():
            if self._abort.is_set():
                raise aborted()
            raise Unavailable(
                f"the folder of {self._name} is not on this machine or not open any more; gloo needs "
                f"trainer and engine on one host: make new offers"
            )
        folder = self._marker.parent
        # Files show which ranks have joined: a FileStore call would block forever after the sender removes the folder.
        with contextlib.suppress(FileNotFoundError):
            (folder / f"here-{self._rank}").touch()
        while not all((folder / f"here-{rank}").exists() for rank in range(self._size)):
            if self._abort.wait(_POLL_SECONDS) or not self._marker.exists():
                raise aborted()
            deadline.check(f"the meeting of all {self._size} members of {self._name}")
        left = timedelta(seconds=deadline.check(f"connecting {self._name}"))
        store = FileStore(str(folder / _STORE_FILE), self._size)
        store.set_timeout(left)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._threads = 1
        options._timeout = left
        try:
            self._group = ProcessGroupGloo(store, self._rank, self._size, options)
        except RuntimeError as error:
            raise self._failure(error, deadline, "connecting") from None

    def broadcast(self, data: torch.Tensor, deadline: Deadline) -> None:
        """Send `data` (rank 0) or receive into it: uint8, contiguous, on the CPU."""
        if self._group is None:
            raise used_up()
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=deadline.check(f"a transfer of {self._name}"))
        done = threading.Event()
        try:
            work = self._group.broadcast([data], options)  # type: ignore[attr-defined]
            work.get_future().add_done_callback(lambda _: done.set())
            while not done.wait(_POLL_SECONDS):
                if self._is_aborted() or deadline.is_stopped:
                    self._abandon(work)
                    raise aborted()
            work.wait()
        except RuntimeError as error:
            raise self._failure(error, deadline, "a transfer") from None

    def close(self) -> None:
        self._group = None

    def _is_aborted(self) -> bool:
        return self._abort.is_set() or not self._marker.exists()

    def _abandon(self, work: Any) -> None:
        """Leave the group to a thread until its operation has timed out: dropping it earlier would block here."""
        group, self._group = self._group, None
        threading.Thread(target=_wait_for_end, args=(work, group), name="gloo-abandoned", daemon=True).start()

    def _failure(self, error: RuntimeError, deadline: Deadline, what: str) -> Exception:
        if self._is_aborted():
            return aborted()
        if deadline.remaining <= 0 or "imed out" in str(error):
            return DeadlinePassed(f"{self._name}: {what} took too long; a member is slow or stuck, abort the epoch")
        return Unavailable(f"{self._name}: {what} failed, a member is gone ({str(error)[:200]}); abort the epoch")


class GlooSender:
    """Rank 0 of the group of one trainer rank."""

    def __init__(self, group: TransferGroup, rank: int, source: WeightSource) -> None:
        self._group, self._rank, self._source = group, rank, source
        self._spans = sorted(group.manifest.spans_of_rank(rank), key=lambda span: span.offset)
        self._scratch = Scratch("gloo")
        self._nonce = secrets.token_hex(_NONCE_BYTES)
        self._marker = self._scratch.path / self._nonce
        self._marker.touch()
        self._abort = threading.Event()
        self._member = _Member(self._marker, rank, 0, 1 + group.receiver_count, self._abort)

    def offer(self) -> bytes:
        return pack_offer(Backend.GLOO, self._group, self._rank, (self._nonce + str(self._scratch.path)).encode())

    def open(self, deadline: Deadline) -> None:
        self._member.join(deadline)

    def send(self, policy_version: int, deadline: Deadline) -> int:
        shard_bytes = self._group.manifest.shard_bytes[self._rank]
        header = torch.tensor([policy_version, shard_bytes], dtype=torch.int64)
        self._member.broadcast(header.view(torch.uint8), deadline)
        bucket = torch.zeros(min(_BUCKET_BYTES, shard_bytes), dtype=torch.uint8)
        for start, end in _buckets(shard_bytes):
            _fill(bucket, start, end, self._spans, self._group.manifest, self._source)
            self._member.broadcast(bucket[: end - start], deadline)
        return shard_bytes

    def abort(self) -> None:
        """End the waits of this sender and, by removing the marker, those of the receivers."""
        self._abort.set()
        self._marker.unlink(missing_ok=True)

    def close(self) -> None:
        self.abort()
        self._member.close()
        self._scratch.remove()


class GlooReceiver(ReceiveTransport[Path, _Member]):
    """Rank 1 + its index in the group of every trainer rank."""

    backend = Backend.GLOO
    stable = True
    _shards: Sequence[torch.Tensor] = ()

    def _parse(self, rank: int, body: bytes) -> Path:
        nonce_length = 2 * _NONCE_BYTES
        if len(body) <= nonce_length:
            raise InvalidInput(
                f"gloo offer {rank} has a body of {len(body)} bytes; it must have more than {nonce_length}"
            )
        try:
            text = body.decode()
        except UnicodeDecodeError:
            text = ""  # refused below
        folder, nonce = Path(text[nonce_length:]), text[:nonce_length]
        if not nonce.isalnum() or "\0" in text or not folder.is_absolute():
            raise InvalidInput(f"gloo offer {rank} holds no absolute path; pass MakeOffer's bytes unchanged")
        return folder / nonce

    def _connect(self, rank: int, offer: Path) -> _Member:
        return _Member(offer, rank, 1 + self._index, 1 + self._group.receiver_count, self._abort)

    def open(self, deadline: Deadline) -> None:
        """Join all groups, and allocate memory for all shards: buckets cut across tensors."""
        super().open(deadline)
        self._shards = [torch.empty(size, dtype=torch.uint8) for size in self._group.manifest.shard_bytes]

    def close(self) -> None:
        super().close()
        self._shards = ()

    def _receive(self, policy_version: int, sink: Sink, deadline: Deadline) -> None:
        for rank, (member, shard) in enumerate(zip(self._links, self._shards, strict=True)):
            header = torch.zeros(2, dtype=torch.int64)
            member.broadcast(header.view(torch.uint8), deadline)
            version, shard_bytes = header.tolist()
            check_header(rank, (version, shard_bytes), (policy_version, shard.numel()))
            for start, end in _buckets(shard.numel()):
                member.broadcast(shard[start:end], deadline)
        hand_to_sink(self._group.manifest, self._shards, sink)


def _wait_for_end(work: Any, group: ProcessGroupGloo) -> None:
    """Hold `group` until its last operation has ended, at the latest at the operation's own timeout."""
    with contextlib.suppress(RuntimeError):
        work.wait()
    del group


def _buckets(shard_bytes: int) -> Iterator[tuple[int, int]]:
    for start in range(0, shard_bytes, _BUCKET_BYTES):
        yield start, min(start + _BUCKET_BYTES, shard_bytes)


def _fill(
    bucket: torch.Tensor, start: int, end: int, spans: Sequence[Span], manifest: Manifest, source: WeightSource
) -> None:
    """Copy bytes [start, end) of the shard, cast where needed, to the beginning of `bucket`."""
    for span in spans:
        item = manifest.tensors[span.tensor].item_bytes
        first, last = max(start, span.offset), min(end, span.offset + span.count * item)
        if first < last:
            values = source.read(span)[(first - span.offset) // item : (last - span.offset) // item]
            target = bucket[first - start : last - start]
            target.view(torch_dtype(manifest.tensors[span.tensor].dtype)).copy_(values)
