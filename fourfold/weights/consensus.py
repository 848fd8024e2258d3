"""Lets either all workers of an engine join an epoch or none: each learns of a refusal before it changes anything.

A manifest may fit some workers and not others: the first worker detects a tensor that is too large, the last one a
tensor that is too small. Without a vote, the other workers would leave the last epoch and wait for senders.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from fourfold.errors import FourfoldError, Unavailable
from fourfold.weights.transport.waiting import Deadline
from fourfold.weights.worker_control import error_reply, reply_error

# Room for the longest message with every character escaped.
_VOTE_BYTES: Final = 1 << 14
_MESSAGE_CHARACTERS: Final = 1000
# A worker whose deadline has passed still votes, because the others wait for its vote.
_MIN_SECONDS: Final = 1.0


class GroupConsensus:
    """The vote of several workers, which share a gloo process group; this worker is `rank` of `count`."""

    def __init__(self, group: Any, rank: int, count: int) -> None:
        self._group, self._rank, self._count = group, rank, count

    def first_refusal(self, own: FourfoldError | None, deadline: Deadline) -> FourfoldError | None:
        """Return the error of the first worker that has one. Every worker calls this once for each epoch to join.

        `own` is this worker's error; None: the epoch fits. Raises Unavailable: a worker did not vote.
        """
        for rank, vote in enumerate(self._gather(_pack(own), deadline)):
            if (refusal := reply_error(json.loads(vote.numpy().tobytes().rstrip(b"\0")))) is not None:
                if rank == self._rank:
                    return own
                return type(refusal)(f"{refusal.message} (refused by worker {rank})", reason=refusal.reason)
        return None

    def in_all(self, own: Sequence[bool], deadline: Deadline) -> list[int]:
        """Return the indices that are true in every worker. Every worker calls this with a list of the same length.

        Raises Unavailable: a worker did not call it.
        """
        flags = self._gather(torch.tensor(own, dtype=torch.uint8), deadline)
        return [int(index) for index in torch.stack(flags).all(0).nonzero().flatten()]

    def _gather(self, own: torch.Tensor, deadline: Deadline) -> list[torch.Tensor]:
        """Return the tensor of every worker, by rank; all have the same size."""
        found = [torch.zeros_like(own) for _ in range(self._count)]
        options = AllgatherOptions()
        options.timeout = timedelta(seconds=max(deadline.remaining, _MIN_SECONDS))
        try:
            self._group.allgather([found], [own], options).wait()
        except RuntimeError as error:
            raise Unavailable(
                f"the {self._count} workers of the engine could not agree on an epoch, one of them is gone or stuck "
                f"({str(error)[:200]}); restart the engine"
            ) from None
        return found


def _pack(error: FourfoldError | None) -> torch.Tensor:
    vote = {} if error is None else error_reply(error)
    if error is not None:
        vote["message"] = error.message[:_MESSAGE_CHARACTERS]
    packed = torch.zeros(_VOTE_BYTES, dtype=torch.uint8)
    data = json.dumps(vote).encode()
    packed[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return packed
