"""All ranks as one engine: those of the policy, rank 0 of which is this process, and those of the critic.

    critic.ranks = 0    one group: every rank has a part of both models, which take turns
    critic.ranks > 0    two groups: the critic's ranks are other processes, on GPUs of their own, and work beside the
                        policy's (`beside`)

processes.py says what a group is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from fourfold.arrays import Float32Array
from fourfold.config import Config
from fourfold.errors import FourfoldError
from fourfold.nn.batching import TokenBatch
from fourfold.weights.digest import add_sums, digest_of, unsummed_digest
from fourfold.weights.manifest import Manifest
from fourfold_trainer.batches import MicroBatch, PolicyBatch, ValueBatch, WeightedBatch, to_arrays
from fourfold_trainer.engine import Sent, UpdateSettings, UpdateSums
from fourfold_trainer.flops import Machine, ModelSize
from fourfold_trainer.ranks.rank_channel import Array, RankMessage
from fourfold_trainer.ranks.rank_processes import RankProcesses, place_ranks, raise_first_error
from fourfold_trainer.ranks.worker import RankWorker, read_error, read_sums

# What an answer may take longer than the deadline that the command carries.
_ANSWER_GRACE_SECONDS: Final = 5.0
_ABORT: Final = "abort"

T = TypeVar("T")


class DistributedEngine:
    """Implements `TrainerEngine`. One thread, which lives as long as the process, makes it and calls it."""

    def __init__(
        self,
        config: Config,
        model_folder: Path,
        *,
        run_dir: Path,
        member_id: str,
        on_death: Callable[[str], None],
    ) -> None:
        """Start all ranks and load the models.

        Args:
            config: of the run.
            model_folder: a Hugging Face causal LM.
            run_dir: logs of the ranks that are no part of this process go into its `logs`.
            member_id: of the trainer; names the ranks' logs.
            on_death: called from another thread, with an explanation, when a rank has died.

        Raises:
            FourfoldError: a rank cannot start.
        """
        groups: list[RankProcesses] = []
        try:
            for critic in [False, True] if config.critic_apart else [False]:
                name = f"{member_id}-critic" if critic else member_id
                ranks = place_ranks(config, critic=critic)
                group = RankProcesses(
                    config, model_folder, ranks, here=not critic, run_dir=run_dir, name=name, on_death=on_death
                )
                groups.append(group)
            groups[0].load()
            for group in groups:
                group.wait_loaded()
        except BaseException:
            for group in groups:
                group.close()
            raise
        self._groups = groups
        self._policy, self._critic = groups[0], groups[-1]
        # The critic's own ranks are all elsewhere: who asks them needs nothing but their links.
        self._second = ThreadPoolExecutor(1, "critic") if config.critic_apart else None
        self._manifest, self._machine = self._worker.sender.manifest(), self._worker.machine
        answers = self._policy.call("weights_place")
        self._device_uuids = tuple(_bytes(answer) for answer in answers if answer.arrays)
        every = [answer.fields["backends"] for answer in answers]
        self._backends = tuple(name for name in every[0] if all(name in names for names in every))
        if config.critic_apart:  # no part of it is here
            size = ModelSize(**self._critic.call("critic_size")[0].fields)
            self._machine = replace(self._machine, critic=size)

    @property
    def _worker(self) -> RankWorker:
        assert self._policy.worker is not None, "rank 0 of the policy is here"
        return self._policy.worker

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids."""
        return self._worker.policy.vocabulary_size

    @property
    def machine(self) -> Machine:
        """What the ranks run on, and the sizes of the models."""
        return self._machine

    @property
    def change_count(self) -> int:
        """Number of commands so far that have begun to change what the ranks hold."""
        return sum(group.change_count for group in self._groups)

    def update_policy(self, shares: Sequence[Sequence[PolicyBatch]], settings: UpdateSettings) -> UpdateSums:
        """Make one optimizer step: each rank its share."""
        return _update(self._policy, "update_policy", shares, settings)

    def update_critic(self, shares: Sequence[Sequence[ValueBatch]], settings: UpdateSettings) -> UpdateSums:
        """The same for the critic."""
        return _update(self._critic, "update_critic", shares, settings)

    def forward_backward(self, shares: Sequence[Sequence[WeightedBatch]]) -> list[list[Float32Array]]:
        """Add to the gradient that waits; return the log-probabilities of each rank's batches."""
        return [list(answer.arrays) for answer in self._policy.deal("forward_backward", _arrays(shares))]

    def optim_step(self, *, learning_rate: float, max_grad_norm: float) -> float:
        """Use up the gradient that waits; return its norm."""
        fields = {"learning_rate": learning_rate, "max_grad_norm": max_grad_norm}
        return float(self._policy.call("optim_step", fields=fields)[0].fields["grad_norm"])

    def discard_gradient(self) -> None:
        """Forget the gradient that waits."""
        self._policy.call("discard_gradient")

    def compute_logprobs(
        self, shares: Sequence[Sequence[TokenBatch]], *, entropies: bool = False
    ) -> list[list[Float32Array]]:
        """Return the log-probabilities of each rank's batches, and entropies beside them."""
        answers = self._policy.deal("compute_logprobs", _arrays(shares), fields={"entropy": entropies})
        return [list(answer.arrays) for answer in answers]

    def compute_values(self, shares: Sequence[Sequence[TokenBatch]]) -> list[list[Float32Array]]:
        """Return the critic's values of each rank's batches."""
        return [list(answer.arrays) for answer in self._critic.deal("compute_values", _arrays(shares))]

    def release_memory(self) -> None:
        """Give GPU memory that is kept for the next pass back."""
        for group in self._groups:
            group.call("release_memory")

    def save(self, folder: Path) -> None:
        """Write every rank's state into `folder`."""
        for group in self._groups:
            group.call("save", fields={"folder": str(folder.absolute())})

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        # All files are read before the first model changes, on every rank of every group.
        try:
            for group in self._groups:
                group.call("read", fields={"folder": str(folder.absolute())})
        except FourfoldError:
            with suppress(FourfoldError):
                self._policy.call("forget")  # what it has read while the critic's could not
            raise
        for group in self._groups:
            group.call("restore")

    def export(self, folder: Path, *, ema: bool = False) -> None:
        """Write a Hugging Face model into `folder`."""
        self._policy.call("export", fields={"folder": str(folder.absolute()), "ema": ema})

    def manifest(self) -> Manifest:
        """Return the layout of the weights."""
        return self._manifest

    @property
    def device_uuids(self) -> tuple[bytes, ...]:
        """CUDA UUIDs of the policy's ranks, 16 bytes each, in rank order; none on CPU."""
        return self._device_uuids

    @property
    def backends(self) -> tuple[str, ...]:
        """How weights can be sent from where they are, on every rank; best first."""
        return self._backends

    def make_offers(
        self, epoch: int, backend: str, receiver_count: int, *, group: int = 0, timeout: float
    ) -> list[bytes]:
        """Start an epoch (group 0), or add the next group of receivers to it; one offer per rank."""
        fields = {"epoch": epoch, "backend": backend, "receiver_count": receiver_count, "group": group}
        return [_bytes(a) for a in self._transfer("make_offer", {**fields, "timeout": timeout})]

    def open_weights(self, epoch: int, *, timeout: float) -> None:
        """Meet the receivers."""
        self._transfer("open_weights", {"epoch": epoch, "timeout": timeout})

    def send_weights(self, epoch: int, policy_version: int, *, skip_sums: bool = False, timeout: float) -> Sent:
        """Send the present weights, and sum them up unless told not to."""
        fields = {"epoch": epoch, "policy_version": policy_version, "skip_sums": skip_sums, "timeout": timeout}
        answers = self._transfer("send_weights", fields)
        sent_bytes = sum(a.fields["sent_bytes"] for a in answers)
        if skip_sums:
            return Sent(weights_digest=unsummed_digest(self._manifest, policy_version), sent_bytes=sent_bytes)
        sums = add_sums(self._manifest, [_bytes(a) for a in answers])
        return Sent(weights_digest=digest_of(self._manifest, sums), sent_bytes=sent_bytes, sums=sums)

    def abort_weights(self, epoch: int) -> None:
        """End what is under way and close the epoch. From any thread."""
        self._worker.abort_weights(epoch)
        for link in self._policy.links:
            link.send(RankMessage(name=_ABORT, fields={"epoch": epoch}))

    def in_parallel(self, critic: Callable[[], None], policy: Callable[[], T]) -> T:
        """Make calls for the critic and calls for the policy: at the same time where they have ranks of their own."""
        if self._second is None:
            critic()
            return policy()
        running = self._second.submit(critic)
        try:
            return policy()
        finally:
            # Also after an error: no command may be under way when this returns. Each has its deadline (`ask`).
            running.result()

    def leave(self) -> None:
        """Leave the process groups in good order, before `close`."""
        for group in self._groups:
            group.leave()

    def close(self) -> None:
        """End all ranks. From any thread."""
        for group in self._groups:
            group.close()
        if self._second is not None:
            self._second.shutdown(wait=False)

    def _transfer(self, name: str, fields: dict[str, Any]) -> list[RankMessage]:
        """Run one phase of a weight transfer; when some ranks fail, none keeps the epoch open."""
        answers: list[RankMessage] = []
        try:
            answers = self._policy.ask(name, fields=fields, timeout=fields["timeout"] + _ANSWER_GRACE_SECONDS)
            return raise_first_error(answers)
        except FourfoldError:
            # Where all have failed each has settled it on its own: a stale call must not close the open epoch.
            if self._policy.links and any(read_error(answer) is None for answer in answers or [RankMessage(name=name)]):
                with suppress(FourfoldError):
                    self.abort_weights(fields["epoch"])
            raise


def _update(
    group: RankProcesses, name: str, shares: Sequence[Sequence[MicroBatch]], settings: UpdateSettings
) -> UpdateSums:
    answers = group.deal(name, _arrays(shares), fields=asdict(settings))
    sums = read_sums(answers[0])
    for answer in answers[1:]:
        sums.add_rank(read_sums(answer))
    return sums


def _arrays(shares: Sequence[Sequence[MicroBatch]]) -> list[list[Array]]:
    """Return each share's batches as the arrays of one message."""
    return [[array for batch in share for array in to_arrays(batch)] for share in shares]


def _bytes(answer: RankMessage) -> bytes:
    return np.asarray(answer.arrays[0]).tobytes()
