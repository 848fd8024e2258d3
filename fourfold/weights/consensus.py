"""The workers of one engine join an epoch all or none: none changes anything before each knows whether one refuses.

What does not fit shows in some workers alone: a tensor that is too large in the first, one that is too small in the
last. Without this, those that saw nothing would leave the epoch before and wait for senders.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from fourfold.errors import FourfoldError, Unavailable
from fourfold.weights.transport.base import Deadline
from fourfold.weights.worker_control import error_reply, reply_error

# Room for the longest message with every character escaped.
_BYTES: Final = 1 << 14
_MOST_CHARACTERS: Final = 1000
# Also a worker that comes late has an answer, which the others wait for.
_LEAST_SECONDS: Final = 1.0


class Workers(Protocol):
    """All workers of an engine, as one of them sees them."""

    def first_refusal(self, own: FourfoldError | None, deadline: Deadline) -> FourfoldError | None:
        """Return the error of the first worker that has one; every worker calls this, once for each epoch to join.

        Args:
            own: this worker's; None: the epoch fits.
            deadline: of the call.

        Raises:
            Unavailable: a worker did not answer.
        """


class OneWorker:
    """An engine of one worker."""

    def first_refusal(self, own: FourfoldError | None, deadline: Deadline) -> FourfoldError | None:
        """Return its own."""
        return own


class GroupOfWorkers:
    """Several, which have a process group of gloo."""

    def __init__(self, group: Any, rank: int, count: int) -> None:
        """Use a group; `rank` of `count` is this worker's in it."""
        self._group, self._rank, self._count = group, rank, count

    def first_refusal(self, own: FourfoldError | None, deadline: Deadline) -> FourfoldError | None:
        """Exchange the answers."""
        answers = [torch.zeros(_BYTES, dtype=torch.uint8) for _ in range(self._count)]
        options = AllgatherOptions()
        options.timeout = timedelta(seconds=max(deadline.remaining, _LEAST_SECONDS))
        try:
            self._group.allgather([answers], [_pack(own)], options).wait()
        except RuntimeError as error:
            raise Unavailable(
                f"the {self._count} workers of the engine could not agree on an epoch, one of them is gone or stuck "
                f"({str(error)[:200]}); start the engine anew"
            ) from None
        for rank, answer in enumerate(answers):
            if (refusal := _unpack(answer)) is not None:
                if rank == self._rank:
                    return own
                return type(refusal)(f"{refusal.message} (so says worker {rank})", reason=refusal.reason)
        return None


def _pack(error: FourfoldError | None) -> torch.Tensor:
    answer = {} if error is None else error_reply(error)
    if error is not None:
        answer["message"] = error.message[:_MOST_CHARACTERS]
    packed = torch.zeros(_BYTES, dtype=torch.uint8)
    data = json.dumps(answer).encode()
    packed[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return packed


def _unpack(packed: torch.Tensor) -> FourfoldError | None:
    return reply_error(json.loads(packed.numpy().tobytes().rstrip(b"\0")))
