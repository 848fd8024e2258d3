"""Carries out rank 0's commands on the models and the weight sender of one rank.

A command is a `RankMessage`, and so is its answer, both on rank 0 (a plain call) and on the other ranks (over the
channel). An error of `fourfold.errors` is returned as an answer. Any other error ends the process, because its peers
wait in a collective that this rank will never reach.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from fourfold import errors, metrics
from fourfold.algorithm.losses.units import SampleLoss
from fourfold.config import Config
from fourfold.errors import FourfoldError, Internal
from fourfold.nn.batching import TokenBatch
from fourfold.nn.gpu_errors import explain_out_of_memory
from fourfold.plan.placement import memory_advice
from fourfold.weights.sender import WeightSender
from fourfold.weights.transport.base import available_backends
from fourfold_trainer.batches import (
    Array,
    Batches,
    PolicyBatch,
    ReceivedBatches,
    UnitBatch,
    UpdateBatch,
    ValueBatch,
    WeightedBatch,
)
from fourfold_trainer.checkpoint import machines
from fourfold_trainer.checkpoint.shards import Shard
from fourfold_trainer.checkpoint.store import STATE_FILE, remove_partial, writing
from fourfold_trainer.engine import UpdateSettings, UpdateSums
from fourfold_trainer.ranks.placement import ADDRESS_VARIABLE
from fourfold_trainer.ranks.rank_channel import RankMessage, from_bytes
from fourfold_trainer.step.accumulation import accumulate_gradient, apply_gradient, discard_gradient
from fourfold_trainer.step.optimizer_step import compute_gradient, update_critic, update_policy
from fourfold_trainer.trained_model import Critic, Policy, TrainedModel
from fourfold_trainer.work import Machine

ANSWER: Final = "answer"
ERROR: Final = "error"


class RankWorker:
    """The models of one rank and their commands. One thread calls all methods but `abort_weights`."""

    def __init__(
        self,
        config: Config,
        policy: Policy | None,
        critic: Critic | None,
        *,
        rank: int,
        rank_count: int,
        run_dir: Path = Path(),
        file_group: Any = None,
    ) -> None:
        """Take over this rank's policy, critic, or both.

        `run_dir` is the folder of the run on this machine; the folders in commands may be relative to it. `file_group`
        is a gloo group of all ranks, which files are copied over; None: all ranks are on one machine.
        """
        self._run_dir, self._file_group = run_dir, file_group
        self._config, self._rank, self._rank_count = config, rank, rank_count
        self._models: dict[str, TrainedModel] = {}  # by the name of their checkpoint files
        if policy is not None:
            self._models["policy"] = self.policy = policy
            self._source = policy.weight_source()
            self.sender = WeightSender(self._source, rank=rank, rank_count=rank_count)
        if critic is not None:
            self._models["critic"] = self._critic = critic
        self._shards: dict[str, Shard] = {}  # read from a checkpoint, but not restored yet
        self._commands: dict[str, Callable[[RankMessage], RankMessage | None]] = {
            "update_policy": self._update_policy,
            "update_critic": self._update_critic,
            "keep_gradient": self._keep_gradient,
            "compare_gradient": self._compare_gradient,
            "forward_backward": self._forward_backward,
            "optim_step": lambda command: _answer(grad_norm=apply_gradient(self.policy, **command.fields)),
            "discard_gradient": lambda _: discard_gradient(self.policy),
            "compute_logprobs": self._compute_logprobs,
            "compute_values": self._compute_values,
            "critic_size": lambda _: _answer(**asdict(self._critic.size)),
            "release_memory": lambda _: torch.cuda.empty_cache(),  # does nothing on CPU
            "save": self._save,
            "list_files": self._list_files,
            "copy_files": self._copy_files,
            "commit": self._commit,
            "keep_only": self._keep_only,
            "read": self._read,
            "restore": self._restore,
            "forget": lambda _: self._shards.clear(),
            "export": lambda command: self.policy.export(Path(command.fields["folder"]), ema=command.fields["ema"]),
            "export_critic": lambda command: self._critic.export(Path(command.fields["folder"])),
            "describe_sender": self._describe_sender,
            "make_offer": self._make_offer,
            "open_weights": lambda command: self.sender.open(**command.fields),
            "send_weights": self._send_weights,
        }

    @property
    def machine(self) -> Machine:
        """Return the device of this rank, which all ranks share, and the sizes of the models."""
        gpu = torch.cuda.get_device_name(self._rank) if self._config.trainer.device == "cuda" else ""
        critic = self._models.get("critic")
        return Machine(policy=self.policy.size, critic=None if critic is None else critic.size, gpu=gpu)

    def handle(self, command: RankMessage) -> RankMessage:
        """Carry out one command; return its answer, or its error if that is meant for callers."""
        try:
            return self._commands[command.name](command) or _answer()
        except FourfoldError as error:
            fields = {"class": type(error).__name__, "message": error.message, "reason": error.reason}
            return RankMessage(name=ERROR, fields={**fields, "retry_after": error.retry_after})

    def abort_weights(self, epoch: int) -> None:
        """End the transfer of `epoch`. Any thread may call this."""
        self.sender.abort(epoch)

    def close(self) -> None:
        if "policy" in self._models:
            self.sender.close()
        next(iter(self._models.values())).close()  # one process group serves all models

    def _update_policy(self, command: RankMessage) -> RankMessage:
        batches, settings = self._update_batches(command), UpdateSettings(**command.fields)
        algorithm = self._config.algorithm
        sums = update_policy(self.policy, batches, settings, algorithm, rank_count=self._rank_count)
        if self._config.trainer.device == "cuda":
            sums.highest[metrics.GPU_PEAK] = torch.cuda.max_memory_allocated() / (1 << 30)
            sums.highest[metrics.GPU_RESERVED] = torch.cuda.max_memory_reserved() / (1 << 30)
            torch.cuda.reset_peak_memory_stats()
        return _sums_answer(sums)

    def _update_critic(self, command: RankMessage) -> RankMessage:
        batches, settings = ReceivedBatches(ValueBatch, command.batches), UpdateSettings(**command.fields)
        config = self._config.critic
        return _sums_answer(update_critic(self._critic, batches, settings, config, rank_count=self._rank_count))

    def _keep_gradient(self, command: RankMessage) -> RankMessage:
        self._compute_gradient(command)
        return _answer(byte_count=self.policy.keep_gradient())

    def _compare_gradient(self, command: RankMessage) -> RankMessage:
        self._compute_gradient(command)
        return _answer(products=self.policy.compare_gradient())

    def _compute_gradient(self, command: RankMessage) -> None:
        # The peak of the GPU's memory is not reset: the step's first update reports that of the comparison, too.
        batches, settings = self._update_batches(command), UpdateSettings(**command.fields)
        compute_gradient(self.policy, batches, settings, self._config.algorithm, rank_count=self._rank_count)

    def _update_batches(self, command: RankMessage) -> Batches[UpdateBatch]:
        of_units = isinstance(self._config.algorithm.loss, SampleLoss)
        return ReceivedBatches[UpdateBatch](UnitBatch if of_units else PolicyBatch, command.batches)

    def _forward_backward(self, command: RankMessage) -> RankMessage:
        batches = ReceivedBatches(WeightedBatch, command.batches)
        return _answer(*accumulate_gradient(self.policy, batches, rank_count=self._rank_count))

    @torch.no_grad()
    def _compute_logprobs(self, command: RankMessage) -> RankMessage:
        rows = []
        for batch in ReceivedBatches(TokenBatch, command.batches):
            logprobs, more = self.policy.logprobs(batch, **command.fields)
            found = logprobs if more is None else torch.stack([logprobs, more], 1)
            rows.append(found.cpu().numpy())
        return _answer(*rows)

    @torch.no_grad()
    def _compute_values(self, command: RankMessage) -> RankMessage:
        return _answer(*(self._critic.values(b).cpu().numpy() for b in ReceivedBatches(TokenBatch, command.batches)))

    def _save(self, command: RankMessage) -> None:
        folder = self._run_dir / command.fields["folder"]
        with writing(folder):  # another machine has made it on its own disk
            folder.mkdir(parents=True, exist_ok=True)
        for name, model in self._models.items():
            model.save(folder, name)

    def _list_files(self, command: RankMessage) -> RankMessage:
        """Return the files in a folder on this machine, and the texts of the records of checkpoints there."""
        folder = self._run_dir / command.fields["folder"]
        if command.fields.get("tidy"):
            remove_partial(folder)
        records = {path.parent.name: path.read_text("utf-8") for path in folder.glob(f"step-*/{STATE_FILE}")}
        return _answer(files=machines.list_files(folder), records=records)

    def _copy_files(self, command: RankMessage) -> None:
        copies = [machines.FileCopy(*values) for values in command.fields["copies"]]
        machines.copy_files(self._run_dir / command.fields["folder"], copies, rank=self._rank, group=self._file_group)

    def _commit(self, command: RankMessage) -> None:
        if self._rank in command.fields["ranks"]:
            partial, target = (self._run_dir / command.fields[name] for name in ("partial", "target"))
            machines.commit(partial, target, command.fields["record"])

    def _keep_only(self, command: RankMessage) -> None:
        if self._rank in command.fields["ranks"]:
            machines.keep_only(self._run_dir / command.fields["folder"], command.fields["names"])

    def _read(self, command: RankMessage) -> None:
        folder = self._run_dir / command.fields["folder"]
        self._shards.clear()
        self._shards |= {name: model.read(folder, name) for name, model in self._models.items()}

    def _restore(self, _command: RankMessage) -> None:
        # The policy last: each model restores the random state of this process, and the policy's must remain.
        for name in reversed(self._models):
            self._models[name].restore(self._shards.pop(name))

    def _describe_sender(self, _command: RankMessage) -> RankMessage:
        """Return the transports that reach this rank's weights, and the UUID of its GPU."""
        spans, device = self.sender.manifest().spans_of_rank(self._rank), torch.device(self._config.trainer.device)
        # Offloaded weights are in main memory, although the rank has a GPU.
        backends = available_backends(self._source.read(spans[0]).device if spans else device)
        if device.type != "cuda":
            return _answer(backends=backends)
        properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        return _answer(from_bytes(bytes(properties.uuid.bytes)), backends=backends)

    def _make_offer(self, command: RankMessage) -> RankMessage:
        own = os.environ.get(ADDRESS_VARIABLE)  # on another machine than rank 0
        fields = command.fields | ({"host": own} if own else {})
        return _answer(from_bytes(self.sender.make_offer(**fields)))

    def _send_weights(self, command: RankMessage) -> RankMessage:
        sent = self.sender.send(**command.fields)
        return _answer(from_bytes(sent.partial_sums), sent_bytes=sent.sent_bytes)


def explain_failure(error: BaseException, config: Config) -> str:
    """Return an error in one line; for lack of memory, with the known users of the memory and the keys that help."""
    if isinstance(error, torch.OutOfMemoryError):
        return f"{explain_out_of_memory(error)}; {memory_advice(config)}"
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    return f"{text}; {memory_advice(config)}" if isinstance(error, MemoryError) else text


def read_sums(answer: RankMessage) -> UpdateSums:
    """Return the sums in the answer of an update."""
    return UpdateSums(**answer.fields, mismatches=np.asarray(answer.arrays[0]))


def read_error(answer: RankMessage) -> FourfoldError | None:
    """Return the error in an answer, as an instance of the class that was raised; None if it is no error."""
    if answer.name != ERROR:
        return None
    kind = getattr(errors, answer.fields["class"], Internal)
    error: FourfoldError = kind(
        answer.fields["message"], reason=answer.fields["reason"], retry_after=answer.fields["retry_after"]
    )
    return error


def _sums_answer(sums: UpdateSums) -> RankMessage:
    fields = asdict(sums)
    return _answer(fields.pop("mismatches"), **fields)


def _answer(*arrays: Array, **fields: Any) -> RankMessage:
    return RankMessage(name=ANSWER, arrays=arrays, fields=fields)
