"""One rank: carries out rank 0's commands on its models and its weight sender.

Every command is a `RankMessage`, and so is its answer, on rank 0 (a plain call) and on the others
(over the link) alike. Errors of `fourfold.errors` travel back as an answer; anything else ends
the process, because its peers wait in a collective that it will never reach.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from fourfold import errors
from fourfold.config import Config
from fourfold.errors import FourfoldError, Internal
from fourfold.nn.batching import TokenBatch
from fourfold.weights.sender import WeightSender
from fourfold.weights.transport.base import available_backends
from fourfold_trainer.batches import PolicyBatch, ValueBatch, WeightedBatch, from_arrays
from fourfold_trainer.checkpoint.shards import Shard
from fourfold_trainer.engine import Critic, Policy, Trained, UpdateSettings, UpdateSums
from fourfold_trainer.flops import Machine
from fourfold_trainer.ranks.rank_channel import RankMessage, from_bytes
from fourfold_trainer.step.accumulation import accumulate_gradient, apply_gradient, discard_gradient
from fourfold_trainer.step.optimizer_step import update_critic, update_policy

ANSWER: Final = "answer"
ERROR: Final = "error"


class RankWorker:
    """Commands of one rank. All methods but `abort_weights` belong to one thread."""

    def __init__(
        self, config: Config, policy: Policy | None, critic: Critic | None, *, rank: int, rank_count: int
    ) -> None:
        """Take over what this rank holds: a policy, a critic, or both."""
        self._config, self._rank, self._rank_count = config, rank, rank_count
        self._models: dict[str, Trained] = {}
        """By the name of their files."""
        if policy is not None:
            self._models["policy"] = self._policy = policy
            self._source = policy.weight_source()
            self._sender = WeightSender(self._source, rank=rank, rank_count=rank_count)
        if critic is not None:
            self._models["critic"] = self._critic = critic
        self._shards: dict[str, Shard] = {}
        """Read, and not yet restored."""
        self._commands: dict[str, Callable[[RankMessage], RankMessage]] = {
            "update_policy": self._update_policy,
            "update_critic": self._update_critic,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "discard_gradient": self._discard_gradient,
            "compute_logprobs": self._compute_logprobs,
            "compute_values": self._compute_values,
            "critic_size": self._critic_size,
            "release_memory": self._release_memory,
            "save": self._save,
            "read": self._read,
            "restore": self._restore,
            "forget": self._forget,
            "export": self._export,
            "weights_place": self._weights_place,
            "make_offer": self._make_offer,
            "open_weights": self._open_weights,
            "send_weights": self._send_weights,
        }

    @property
    def sender(self) -> WeightSender:
        """This rank's weight sender."""
        return self._sender

    @property
    def machine(self) -> Machine:
        """What this rank runs on; all ranks are alike."""
        gpu = torch.cuda.get_device_name(self._rank) if self._config.trainer.device == "cuda" else ""
        critic = self._models.get("critic")
        return Machine(policy=self._policy.size, critic=None if critic is None else critic.size, gpu=gpu)

    @property
    def policy(self) -> Policy:
        """This rank's model."""
        return self._policy

    def handle(self, command: RankMessage) -> RankMessage:
        """Carry out one command and return its answer, or the error it met."""
        try:
            return self._commands[command.name](command)
        except FourfoldError as error:
            fields = {"class": type(error).__name__, "message": error.message, "reason": error.reason}
            return RankMessage(name=ERROR, fields={**fields, "retry_after": error.retry_after})

    def abort_weights(self, epoch: int) -> None:
        """End the transfer of `epoch`. From any thread."""
        self._sender.abort(epoch)

    def close(self) -> None:
        """Leave the process group."""
        if "policy" in self._models:
            self._sender.close()
        next(iter(self._models.values())).close()

    def _update_policy(self, command: RankMessage) -> RankMessage:
        batches, settings = from_arrays(PolicyBatch, command.arrays), UpdateSettings(**command.fields)
        algorithm = self._config.algorithm
        return _sums_answer(update_policy(self._policy, batches, settings, algorithm, rank_count=self._rank_count))

    def _critic_size(self, command: RankMessage) -> RankMessage:
        return RankMessage(name=ANSWER, fields=asdict(self._critic.size))

    def _update_critic(self, command: RankMessage) -> RankMessage:
        batches, settings = from_arrays(ValueBatch, command.arrays), UpdateSettings(**command.fields)
        config = self._config.critic
        return _sums_answer(update_critic(self._critic, batches, settings, config, rank_count=self._rank_count))

    def _forward_backward(self, command: RankMessage) -> RankMessage:
        batches = from_arrays(WeightedBatch, command.arrays)
        return RankMessage(name=ANSWER, arrays=accumulate_gradient(self._policy, batches, rank_count=self._rank_count))

    def _optim_step(self, command: RankMessage) -> RankMessage:
        return RankMessage(name=ANSWER, fields={"grad_norm": apply_gradient(self._policy, **command.fields)})

    def _discard_gradient(self, command: RankMessage) -> RankMessage:
        discard_gradient(self._policy)
        return RankMessage(name=ANSWER)

    def _compute_logprobs(self, command: RankMessage) -> RankMessage:
        rows = []
        with torch.no_grad():
            for batch in from_arrays(TokenBatch, command.arrays):
                logprobs, entropies = self._policy.logprobs(batch, **command.fields)
                found = logprobs if entropies is None else torch.stack([logprobs, entropies], 1)
                rows.append(found.cpu().numpy())
        return RankMessage(name=ANSWER, arrays=rows)

    def _compute_values(self, command: RankMessage) -> RankMessage:
        with torch.no_grad():
            rows = [self._critic.values(b).cpu().numpy() for b in from_arrays(TokenBatch, command.arrays)]
        return RankMessage(name=ANSWER, arrays=rows)

    def _release_memory(self, _command: RankMessage) -> RankMessage:
        torch.cuda.empty_cache()  # does nothing on CPU
        return RankMessage(name=ANSWER)

    def _save(self, command: RankMessage) -> RankMessage:
        folder = Path(command.fields["folder"])
        for name, model in self._models.items():
            model.save(folder, name)
        return RankMessage(name=ANSWER)

    def _read(self, command: RankMessage) -> RankMessage:
        folder = Path(command.fields["folder"])
        self._shards.clear()
        self._shards |= {name: model.read(folder, name) for name, model in self._models.items()}
        return RankMessage(name=ANSWER)

    def _restore(self, _command: RankMessage) -> RankMessage:
        # The policy comes last: where ranks hold both, random numbers go on as its file says.
        for name in reversed(self._models):
            self._models[name].restore(self._shards.pop(name))
        return RankMessage(name=ANSWER)

    def _forget(self, _command: RankMessage) -> RankMessage:
        self._shards.clear()
        return RankMessage(name=ANSWER)

    def _export(self, command: RankMessage) -> RankMessage:
        self._policy.export(Path(command.fields["folder"]), ema=command.fields["ema"])
        return RankMessage(name=ANSWER)

    def _weights_place(self, _command: RankMessage) -> RankMessage:
        """Answer the backends that reach what this rank sends, and its GPU; offloaded weights are in main memory."""
        spans, device = self._sender.manifest().spans_of_rank(self._rank), torch.device(self._config.trainer.device)
        fields = {"backends": available_backends(self._source.read(spans[0]).device if spans else device)}
        if device.type != "cuda":
            return RankMessage(name=ANSWER, fields=fields)
        properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        return RankMessage(name=ANSWER, fields=fields, arrays=[from_bytes(bytes(properties.uuid.bytes))])

    def _make_offer(self, command: RankMessage) -> RankMessage:
        return RankMessage(name=ANSWER, arrays=[from_bytes(self._sender.make_offer(**command.fields))])

    def _open_weights(self, command: RankMessage) -> RankMessage:
        self._sender.open(**command.fields)
        return RankMessage(name=ANSWER)

    def _send_weights(self, command: RankMessage) -> RankMessage:
        sent = self._sender.send(**command.fields)
        return RankMessage(name=ANSWER, arrays=[from_bytes(sent.partial_sums)], fields={"sent_bytes": sent.sent_bytes})


def read_sums(answer: RankMessage) -> UpdateSums:
    """Return the sums that an update answered."""
    return UpdateSums(**answer.fields, mismatches=np.asarray(answer.arrays[0]))


def read_error(answer: RankMessage) -> FourfoldError | None:
    """Return the error that an answer carries, as the class that was raised, or None."""
    if answer.name != ERROR:
        return None
    kind = getattr(errors, answer.fields["class"], Internal)
    error: FourfoldError = kind(
        answer.fields["message"], reason=answer.fields["reason"], retry_after=answer.fields["retry_after"]
    )
    return error


def _sums_answer(sums: UpdateSums) -> RankMessage:
    fields = asdict(sums)
    return RankMessage(name=ANSWER, arrays=[fields.pop("mismatches")], fields=fields)
