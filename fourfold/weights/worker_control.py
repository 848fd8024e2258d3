"""Lets a service control the workers of its engine during an update: replies that carry errors, and the abort flag.

vLLM's `collective_rpc` turns an exception into text and, with several workers, leaves the replies of the others in
their queues. The methods of `vllm_worker.WeightWorker` therefore never raise: a reply is the result, or a dict with the
key "error". `unwrap` raises the error again in the service. This module needs no torch.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

from fourfold.errors import (
    ARCHITECTURE_NOT_VERIFIED,
    DeadlinePassed,
    FourfoldError,
    Internal,
    InvalidInput,
    StaleEpoch,
    Unavailable,
    WrongState,
)

_ERROR: Final = "error"
_CLASSES: Final[dict[str, type[FourfoldError]]] = {
    cls.code: cls for cls in (InvalidInput, StaleEpoch, WrongState, Unavailable, DeadlinePassed, Internal)
}
_FLAG_BYTES: Final = 8
_NO_EPOCH: Final = -1


def error_reply(error: FourfoldError) -> dict[str, str]:
    return {_ERROR: error.code, "message": error.message, "reason": error.reason}


def reply_error(reply: Any) -> FourfoldError | None:
    """Return the error that a reply carries, or None for a result."""
    if not isinstance(reply, dict) or _ERROR not in reply:
        return None
    return _CLASSES.get(reply[_ERROR], Internal)(reply["message"], reason=reply["reason"])


def unwrap(replies: Sequence[Any]) -> list[Any]:
    """Return the results of all workers of one engine, in worker order; raise the first error, in its class."""
    for index, reply in enumerate(replies):
        if (error := reply_error(reply)) is not None:
            where = f"engine worker {index}: " if len(replies) > 1 else ""
            raise type(error)(where + error.message, reason=error.reason)
    return list(replies)


def unwrap_same(replies: Sequence[Any]) -> Any:
    """Return the common result of all workers of an engine; raise the error of one, or Internal if results differ."""
    results = unwrap(replies)
    if not results or any(result != results[0] for result in results[1:]):
        raise Internal(f"the {len(results)} workers of one engine replied with different results: abort the update")
    return results[0]


def not_proven(refusal: str) -> WrongState:
    """Return the error of an engine whose updates are not proven; see `apply.proof`."""
    return WrongState(
        f"weight updates of this engine are refused: {refusal}; train another architecture, or serve the model in "
        f"another format",
        reason=ARCHITECTURE_NOT_VERIFIED,
    )


class AbortFlag:
    """The highest aborted epoch, in a file that the service and its engine's workers map; it only grows.

    A worker that receives weights serves no other call, so an abort reaches it through shared memory.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._word = memoryview(memory).cast("q")

    @classmethod
    def create(cls, path: Path) -> Self:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, _NO_EPOCH.to_bytes(_FLAG_BYTES, "little", signed=True))
            return cls(mmap.mmap(descriptor, _FLAG_BYTES))
        finally:
            os.close(descriptor)

    @classmethod
    def attach(cls, path: Path) -> Self:
        """Map a file that `create` made. Raises Unavailable: the file is gone, so the service has ended."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise Unavailable(f"cannot open the abort flag {path} ({error.strerror}); has the service ended?") from None
        try:
            return cls(mmap.mmap(descriptor, _FLAG_BYTES))
        finally:
            os.close(descriptor)

    def abort(self, epoch: int) -> None:
        """End the transfers of `epoch` and of all earlier epochs, in every process that waits in one."""
        self._word[0] = max(self._word[0], epoch)

    def is_aborted(self, epoch: int) -> bool:
        return epoch <= self._word[0]
