"""One rank: carries out rank 0's commands on its model and its weight sender.

Every command is a `Message`, and so is its answer, on rank 0 (a plain call) and on the others
(over the link) alike. Errors of `fourfold.errors` travel back as an answer; anything else ends
the process, because its peers wait in a collective that it will never reach.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import numpy as np
import torch

from fourfold import errors
from fourfold.errors import FourfoldError, Internal
from fourfold.weights.sender import WeightSender
from fourfold_trainer import step
from fourfold_trainer.batching import (
    MICRO_BATCH_ARRAYS,
    TOKEN_ARRAYS,
    MicroBatch,
    tokens_from_arrays,
)
from fourfold_trainer.engine import Policy, UpdateSettings, UpdateSums
from fourfold_trainer.link import Array, Message, from_bytes

ANSWER: Final = "answer"
ERROR: Final = "error"


class RankWorker:
    """Commands of one rank. All methods but `abort_weights` belong to one thread."""

    def __init__(self, policy: Policy, *, rank: int, rank_count: int) -> None:
        self._policy = policy
        self._sender = WeightSender(policy.weight_source(), rank=rank, rank_count=rank_count)
        self._commands: dict[str, Callable[[Message], Message]] = {
            "update": self._update,
            "compute_logprobs": self._compute_logprobs,
            "save": self._save,
            "load": self._load,
            "export": self._export,
            "make_offer": self._make_offer,
            "open_weights": self._open_weights,
            "send_weights": self._send_weights,
        }

    @property
    def sender(self) -> WeightSender:
        """This rank's weight sender."""
        return self._sender

    @property
    def policy(self) -> Policy:
        """This rank's model."""
        return self._policy

    def handle(self, command: Message) -> Message:
        """Carry out one command and return its answer, or the error it met."""
        try:
            return self._commands[command.name](command)
        except FourfoldError as error:
            fields = {"class": type(error).__name__, "message": error.message, "reason": error.reason}
            return Message(name=ERROR, fields={**fields, "retry_after": error.retry_after})

    def abort_weights(self, epoch: int) -> None:
        """End the transfer of `epoch`. From any thread."""
        self._sender.abort(epoch)

    def close(self) -> None:
        """Leave the process group."""
        self._sender.close()
        self._policy.close()

    def _update(self, command: Message) -> Message:
        batches = [MicroBatch.from_arrays(part) for part in _parts(command.arrays, MICRO_BATCH_ARRAYS)]
        sums = step.train(self._policy, batches, UpdateSettings(**command.fields))
        fields = asdict(sums)
        return Message(name=ANSWER, arrays=[fields.pop("mismatches")], fields=fields)

    def _compute_logprobs(self, command: Message) -> Message:
        batches = [tokens_from_arrays(part) for part in _parts(command.arrays, TOKEN_ARRAYS)]
        with torch.no_grad():
            rows = [self._policy.logprobs(batch).cpu().numpy() for batch in batches]
        return Message(name=ANSWER, arrays=rows)

    def _save(self, command: Message) -> Message:
        self._policy.save(Path(command.fields["folder"]))
        return Message(name=ANSWER)

    def _load(self, command: Message) -> Message:
        self._policy.load(Path(command.fields["folder"]))
        return Message(name=ANSWER)

    def _export(self, command: Message) -> Message:
        self._policy.export(Path(command.fields["folder"]))
        return Message(name=ANSWER)

    def _make_offer(self, command: Message) -> Message:
        return Message(name=ANSWER, arrays=[from_bytes(self._sender.make_offer(**command.fields))])

    def _open_weights(self, command: Message) -> Message:
        self._sender.open(**command.fields)
        return Message(name=ANSWER)

    def _send_weights(self, command: Message) -> Message:
        sent = self._sender.send(**command.fields)
        return Message(name=ANSWER, arrays=[from_bytes(sent.partial_sums)], fields={"sent_bytes": sent.sent_bytes})


def read_sums(answer: Message) -> UpdateSums:
    """Return the sums that an update answered."""
    return UpdateSums(**answer.fields, mismatches=np.asarray(answer.arrays[0]))


def read_error(answer: Message) -> FourfoldError | None:
    """Return the error that an answer carries, as the class that was raised, or None."""
    if answer.name != ERROR:
        return None
    kind = getattr(errors, answer.fields["class"], Internal)
    error: FourfoldError = kind(
        answer.fields["message"], reason=answer.fields["reason"], retry_after=answer.fields["retry_after"]
    )
    return error


def _parts(arrays: Sequence[Array], size: int) -> list[Sequence[Array]]:
    return [arrays[i : i + size] for i in range(0, len(arrays), size)]
