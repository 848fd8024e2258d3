"""Wraps the calls of CuPy and the CUDA driver that the GPU transports need. Importing it needs neither a GPU nor CuPy.

CuPy gives CUDA's own 64-byte memory handles and NCCL's communicators with abort and asynchronous errors, so nothing is
pickled and no private function of PyTorch is called.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from typing import Any, Final, Protocol, TypeVar

import torch

from fourfold.errors import FourfoldError, Internal, Unavailable, WrongState
from fourfold.install import install_command
from fourfold.weights.transport.base import has_cupy
from fourfold.weights.transport.waiting import Deadline, wait_until

_T = TypeVar("_T")

HANDLE_BYTES: Final = 64
UNIQUE_ID_BYTES: Final = 128


class Communicator(Protocol):
    """The methods of cupy.cuda.nccl.NcclCommunicator in use here."""

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        """Enqueue a broadcast on a CUDA stream."""

    def check_async_error(self) -> None:
        """Raise the pending asynchronous error, if any."""

    def abort(self) -> None:
        """End the enqueued operations and free the communicator."""


def needs_gpu(device: torch.device, what: str, instead: str) -> None:
    """Raise WrongState when weights are not on a GPU; `instead` is a backend that needs none."""
    if device.type != "cuda":
        raise WrongState(f'{what} on {device}; this backend needs a GPU: set weights.backend = "{instead}"')


def finish_stream(device: torch.device, deadline: Deadline, what: str) -> None:
    """Wait, with a deadline, for the work enqueued on the current stream of `device`."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    wait_until(event.query, deadline, what)


def watched(call: Callable[[], _T], deadline: Deadline, what: str, *, undo: Callable[[_T], None]) -> _T:
    """Run a call that cannot be interrupted in a thread of its own, and wait for it with a deadline.

    When the deadline passes, the thread is left behind. If the call returns later, its result goes to `undo`.
    """
    results: list[_T] = []
    errors: list[Exception] = []
    abandoned = threading.Event()
    device = torch.cuda.current_device() if torch.cuda.is_available() else -1

    def run() -> None:
        try:
            if device >= 0:
                torch.cuda.set_device(device)
            result = call()
        except (FourfoldError, RuntimeError) as error:  # the errors of CuPy and torch are RuntimeErrors
            errors.append(error)
            return
        results.append(result)
        if abandoned.is_set():
            undo_result()

    def undo_result() -> None:
        with suppress(IndexError):  # no result yet, or the other thread undoes it, because NCCL must not abort twice
            undo(results.pop())

    thread = threading.Thread(target=run, name="weights-watched", daemon=True)
    thread.start()
    with ExitStack() as on_error:
        on_error.callback(undo_result)
        on_error.callback(abandoned.set)  # set first, so that the thread undoes a later result
        wait_until(lambda: not thread.is_alive(), deadline, what)
        on_error.pop_all()
    if errors:
        raise errors[0]
    if not results:
        raise Internal(f"{what} ended without a result; the log has the traceback")
    return results[0]


# ---- NCCL


def nccl_version() -> int:
    """Return the version of NCCL, such as 22809 for 2.28.9."""
    return int(_cupy().cuda.nccl.get_version())


def nccl_unique_id() -> bytes:
    """Return a new rendezvous id (128 bytes, secret). This process must become rank 0."""
    unique_id = bytes(_cupy().cuda.nccl.get_unique_id())
    assert len(unique_id) == UNIQUE_ID_BYTES
    return unique_id


def make_communicator(size: int, unique_id: bytes, rank: int) -> Communicator:
    """Connect to the other ranks with `unique_id`. Blocks without a limit. Raises Unavailable: NCCL failed."""
    nccl = _cupy().cuda.nccl
    try:
        communicator: Communicator = nccl.NcclCommunicator(size, unique_id, rank)
    except nccl.NcclError as error:
        raise Unavailable(
            f"NCCL could not connect rank {rank} of {size}: {error}. NCCL refuses two ranks on one GPU (use cuda_ipc); "
            f"NCCL_DEBUG=WARN logs the reason"
        ) from None
    return communicator


@contextmanager
def nccl_group() -> Iterator[None]:
    """Launch the calls of the block as one kernel."""
    nccl = _cupy().cuda.nccl
    nccl.groupStart()
    try:
        yield
    finally:
        nccl.groupEnd()


def check(communicator: Communicator, name: str) -> None:
    """Raise Unavailable if the communicator has a pending asynchronous error, such as a broken connection."""
    try:
        communicator.check_async_error()
    except RuntimeError as error:
        raise Unavailable(f"{name} failed ({error}); a member is gone: abort the epoch") from None


def broadcast(communicator: Communicator, values: torch.Tensor, stream: int) -> None:
    """Enqueue the broadcast of a contiguous tensor's bytes from rank 0."""
    pointer, count = values.data_ptr(), values.numel() * values.element_size()
    communicator.broadcast(pointer, pointer, count, _cupy().cuda.nccl.NCCL_CHAR, 0, stream)


# ---- CUDA IPC


def export(values: torch.Tensor) -> tuple[bytes, int]:
    """Return the handle (64 bytes, secret) of the allocation that holds a tensor, and the tensor's offset in bytes.

    Raises WrongState: the memory cannot be exported.
    """
    base = _allocation(values.data_ptr())
    runtime = _cupy().cuda.runtime
    try:
        handle = bytes(runtime.ipcGetMemHandle(base))
    except runtime.CUDARuntimeError as error:
        raise WrongState(
            f"the weights' memory cannot be shared between processes ({error}); PyTorch's expandable_segments "
            f'prevents it: unset that in PYTORCH_CUDA_ALLOC_CONF, or set weights.backend = "nccl"'
        ) from None
    assert len(handle) == HANDLE_BYTES
    return handle, values.data_ptr() - base


def open_handle(handle: bytes) -> int:
    """Map an exported allocation of this GPU, or of one with peer access, and return its address.

    Raises Unavailable: the owner has ended, or the GPUs have no peer access.
    """
    runtime = _cupy().cuda.runtime
    try:
        return int(runtime.ipcOpenMemHandle(handle))
    except runtime.CUDARuntimeError as error:
        raise Unavailable(
            f"the trainer's GPU memory cannot be mapped ({error}): it is another host's or container's, or the GPUs "
            f'have no peer access; set weights.backend = "nccl"'
        ) from None


def close_handle(address: int) -> None:
    with suppress(_cupy().cuda.runtime.CUDARuntimeError):  # the owner may have ended
        _cupy().cuda.runtime.ipcCloseMemHandle(address)


def memory_at(address: int, byte_count: int, device: torch.device) -> torch.Tensor:
    """Return mapped memory as uint8 [byte_count] on `device`, valid until `close_handle`."""
    return torch.as_tensor(_Memory(address, byte_count), device=device)


class _Memory:
    """Describes device memory to PyTorch by the CUDA array interface."""

    def __init__(self, address: int, byte_count: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (byte_count,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


def _allocation(pointer: int) -> int:
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    code = _driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer))
    if code:
        raise WrongState(f"the driver knows no allocation at the weights' address (CUDA error {code})")
    return int(base.value)


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _cupy() -> Any:
    if not has_cupy():
        raise WrongState(f"this backend needs CuPy: {install_command('cupy-cuda13x')}, or use another weights.backend")
    import cupy.cuda.nccl

    return cupy
