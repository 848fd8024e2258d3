"""Fakes CUDA and NCCL for tests without a GPU: replaces `fourfold.weights.transport.cuda` between threads of a process.

Exported memory is memory of this process. A broadcast of rank 0 returns at once, like a kernel launch; the other ranks
copy when the broadcast with the same number is there. `Fabric.hang` makes every wait endless until an abort.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fourfold.errors import Unavailable
from fourfold.weights.transport import cuda, cuda_ipc, nccl


class Fabric:
    """The communicators and exported memory of a test."""

    def __init__(self) -> None:
        self.hang = False
        self.aborted = 0
        self.groups: dict[int, list[list[int]]] = defaultdict(list)
        """Sizes of the broadcasts that each rank launched together."""
        self.joined: dict[bytes, set[int]] = defaultdict(set)
        """Ranks that have joined, by unique id."""
        self.exported: dict[bytes, int] = {}
        self.opened: list[int] = []
        self._lock = threading.Condition()
        self._sent: dict[tuple[bytes, int], bytes] = {}
        self._ids = 0

    def unique_id(self) -> bytes:
        """Return a new id."""
        self._ids += 1
        return self._ids.to_bytes(cuda.UNIQUE_ID_BYTES, "little")

    def join(self, size: int, unique_id: bytes, rank: int) -> Communicator:
        """Wait for all members, as NCCL does, but at most 20 s."""
        with self._lock:
            self.joined[unique_id].add(rank)
            self._lock.notify_all()
            if not self._lock.wait_for(lambda: len(self.joined[unique_id]) == size, timeout=20):
                raise Unavailable("the fake NCCL waited for 20 s")
        return Communicator(self, unique_id, rank)

    def put(self, key: tuple[bytes, int], data: bytes) -> None:
        """Make the data of a broadcast available."""
        with self._lock:
            self._sent[key] = data
            self._lock.notify_all()

    def get(self, key: tuple[bytes, int], is_aborted: Callable[[], bool]) -> bytes | None:
        """Wait for the data of a broadcast; return None after an abort."""
        while not is_aborted():
            with self._lock:
                if key in self._sent and not self.hang:
                    return self._sent[key]
                self._lock.wait(0.005)
        return None

    def export(self, values: torch.Tensor) -> tuple[bytes, int]:
        """Export the storage of a tensor."""
        base = values.untyped_storage().data_ptr()
        handle = base.to_bytes(cuda.HANDLE_BYTES, "little")
        self.exported[handle] = base
        return handle, values.data_ptr() - base

    def open(self, handle: bytes) -> int:
        """Return the address of exported memory."""
        if handle not in self.exported:
            raise Unavailable("no such handle")
        self.opened.append(self.exported[handle])
        return self.exported[handle]


class Communicator:
    """One end of a group."""

    def __init__(self, fabric: Fabric, unique_id: bytes, rank: int) -> None:
        self._fabric, self._id, self._rank = fabric, unique_id, rank
        self._count = 0
        self._pending: list[threading.Thread] = []
        self._gone = False

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        """Enqueue a broadcast: done in order, in the background."""
        key, self._count = (self._id, self._count), self._count + 1
        _current_group(self._fabric, self._rank).append(count)
        if self._rank == root:
            self._fabric.put(key, ctypes.string_at(sendbuff, count))
            if not self._fabric.hang:
                return
        before = self._pending[-1] if self._pending else None

        def copy() -> None:
            if before is not None:
                before.join()
            data = self._fabric.get(key, lambda: self._gone)
            if data is not None and self._rank != root:
                assert len(data) == count
                ctypes.memmove(recvbuff, data, count)

        thread = threading.Thread(target=copy, daemon=True)
        thread.start()
        self._pending.append(thread)
        _RUNNING.append(thread)
        if not getattr(_GROUP, "header", False) and not self._fabric.hang:
            thread.join(2)  # the code that reads the memory next is not a kernel, so no stream makes it wait

    def check_async_error(self) -> None:
        """Report no error."""

    def abort(self) -> None:
        """End all broadcasts of this end."""
        self._gone = True
        self._fabric.aborted += 1


_RUNNING: list[threading.Thread] = []
_GROUP = threading.local()


def _current_group(fabric: Fabric, rank: int) -> list[int]:
    group: list[int] | None = getattr(_GROUP, "sizes", None)
    if group is None:
        group = []
    if not group:
        fabric.groups[rank].append(group)
    return group


@contextmanager
def _group() -> Iterator[None]:
    _GROUP.sizes = []
    try:
        yield
    finally:
        _GROUP.sizes = None


class _Event:
    """Completes when all broadcasts in progress at `record` have completed."""

    def __init__(self, *_: Any) -> None:
        self._waiting: list[threading.Thread] = []

    def record(self, _stream: Any = None) -> None:
        self._waiting = [thread for thread in _RUNNING if thread.is_alive()]

    def query(self) -> bool:
        return not any(thread.is_alive() for thread in self._waiting)


class _Stream:
    cuda_stream = 0

    def __init__(self, *_: Any) -> None: ...

    def wait_stream(self, _other: Any) -> None: ...

    def synchronize(self) -> None:
        event = _Event()
        event.record()
        while not event.query():
            time.sleep(0.001)


@contextmanager
def _nothing(*_: Any) -> Iterator[None]:
    yield


def install(monkeypatch: pytest.MonkeyPatch) -> Fabric:
    """Put the fakes in place; tensors stay on the CPU."""
    fabric = Fabric()
    exchange = nccl._Member.exchange_header

    def exchange_header(*args: Any) -> tuple[int, int]:
        _GROUP.header = True  # the code under test awaits this one with a deadline
        try:
            return exchange(*args)
        finally:
            _GROUP.header = False

    monkeypatch.setattr(nccl._Member, "exchange_header", exchange_header)
    monkeypatch.setattr(cuda, "nccl_version", lambda: 22809)
    monkeypatch.setattr(cuda, "nccl_unique_id", fabric.unique_id)
    monkeypatch.setattr(cuda, "make_communicator", fabric.join)
    monkeypatch.setattr(cuda, "nccl_group", _group)
    monkeypatch.setattr(
        cuda,
        "broadcast",
        lambda c, v, s: c.broadcast(v.data_ptr(), v.data_ptr(), v.numel() * v.element_size(), 0, 0, s),
    )
    monkeypatch.setattr(cuda, "finish_stream", lambda *_: None)
    monkeypatch.setattr(cuda, "export", fabric.export)
    monkeypatch.setattr(cuda, "open_handle", fabric.open)
    monkeypatch.setattr(cuda, "close_handle", fabric.opened.remove)
    monkeypatch.setattr(cuda, "memory_at", _memory_at)
    for module in (nccl, cuda_ipc):
        monkeypatch.setattr(module, "needs_gpu", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "stream", _nothing)
    monkeypatch.setattr(torch.cuda, "device", _nothing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: _Stream())
    return fabric


def _memory_at(address: int, byte_count: int, _device: Any) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * byte_count).from_address(address), dtype=torch.uint8)
