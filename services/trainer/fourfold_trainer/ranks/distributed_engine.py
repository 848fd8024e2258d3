"""Implements `ServedEngine` on all ranks: rank 0 of the policy is this process, the others are its children.

critic.ranks = 0    one group of ranks: each has a part of both models, which take turns
critic.ranks > 0    two groups: the critic's ranks have GPUs of their own and work beside the policy's
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from fourfold.address import LOOPBACK
from fourfold.arrays import Float32Array
from fourfold.config import Config
from fourfold.errors import FourfoldError
from fourfold.nn.batching import TokenBatch
from fourfold.weights.digest import add_sums, digest_of, unsummed_digest
from fourfold.weights.manifest import Manifest
from fourfold_trainer.batches import MicroBatch, UpdateBatch, ValueBatch, WeightedBatch
from fourfold_trainer.checkpoint.machines import FileCopy, copies_to_keep, copies_to_read, newest_complete
from fourfold_trainer.checkpoint.store import STATE_FILE
from fourfold_trainer.engine import SentWeights, UpdateSettings, UpdateSums
from fourfold_trainer.ranks.placement import place_ranks
from fourfold_trainer.ranks.rank_channel import RankMessage
from fourfold_trainer.ranks.rank_processes import OtherMachines, RankProcesses, raise_first_error
from fourfold_trainer.ranks.rank_worker import RankWorker, read_error, read_sums
from fourfold_trainer.work import ModelSize

# An answer may arrive this much later than the deadline in its command.
_ANSWER_GRACE_SECONDS: Final = 5.0

T = TypeVar("T")


class DistributedEngine:
    """All ranks as one engine. `ServedEngine` and `TrainerEngine` document the methods.

    One thread creates and uses it, and must live as long as the process: rank 0's models belong to that thread.
    """

    def __init__(
        self,
        config: Config,
        model_folder: Path,
        *,
        run_dir: Path,
        member_id: str,
        on_death: Callable[[str], None],
        others: OtherMachines | None = None,
    ) -> None:
        """Start all ranks and load the models.

        Args:
            model_folder: a Hugging Face causal LM.
            run_dir: the children write their logs into its folder `logs`.
            member_id: of the trainer; a part of the logs' names.
            on_death: called from another thread with the reason when a rank has died.
            others: of the ranks on other machines; None: all ranks are on this one.

        Raises:
            FourfoldError: a rank cannot start.
        """
        self._run_dir = run_dir
        self._machines = [] if others is None else others.machines  # ranks of each, if there are several
        self._groups: list[RankProcesses] = []
        with ExitStack() as on_error:
            for critic in [False, True] if config.critic_apart else [False]:
                group = RankProcesses(
                    config,
                    model_folder,
                    place_ranks(config, critic=critic, machines=self._machines),
                    has_local_rank=not critic,
                    run_dir=run_dir,
                    name=f"{member_id}-critic" if critic else member_id,
                    on_death=on_death,
                    others=others,
                )
                on_error.callback(group.close)
                self._groups.append(group)
            self._groups[0].load_local_rank()
            for group in self._groups:
                group.wait_loaded()
            on_error.pop_all()
        self._policy, self._critic = self._groups[0], self._groups[-1]
        # Only if all ranks of the critic are children. Its calls then use nothing but their channels, while rank 0's
        # models must stay in this thread.
        self._critic_executor = ThreadPoolExecutor(1, "critic") if config.critic_apart else None
        self.vocabulary_size = self._worker.policy.vocabulary_size
        self._manifest, self.machine = self._worker.sender.manifest(), self._worker.machine
        if config.critic_apart:
            size = ModelSize(**self._critic.call("critic_size")[0].fields)
            self.machine = replace(self.machine, critic=size)
        answers = self._policy.call("describe_sender")
        self.device_uuids = tuple(_to_bytes(answer) for answer in answers if answer.arrays)
        # Memory of several machines cannot be mapped by one process.
        mapped = () if others is None else ("shm", "cuda_ipc")
        first, *rest = (answer.fields["backends"] for answer in answers)
        self.backends = tuple(name for name in first if name not in mapped and all(name in names for names in rest))

    @property
    def _worker(self) -> RankWorker:
        assert self._policy.worker is not None, "rank 0 of the policy is in this process"
        return self._policy.worker

    @property
    def change_count(self) -> int:
        return sum(group.change_count for group in self._groups)

    def update_policy(self, shares: Sequence[Sequence[UpdateBatch]], settings: UpdateSettings) -> UpdateSums:
        return _update(self._policy, "update_policy", shares, settings)

    def update_critic(self, shares: Sequence[Sequence[ValueBatch]], settings: UpdateSettings) -> UpdateSums:
        return _update(self._critic, "update_critic", shares, settings)

    def keep_gradient(self, shares: Sequence[Sequence[UpdateBatch]], settings: UpdateSettings) -> int:
        answers = self._policy.call_on_shares("keep_gradient", shares, fields=asdict(settings))
        return max(int(answer.fields["byte_count"]) for answer in answers)

    def compare_gradient(self, shares: Sequence[Sequence[UpdateBatch]], settings: UpdateSettings) -> list[float]:
        answers = self._policy.call_on_shares("compare_gradient", shares, fields=asdict(settings))
        return list(answers[0].fields["products"])

    def forward_backward(self, shares: Sequence[Sequence[WeightedBatch]]) -> list[list[Float32Array]]:
        return _compute(self._policy, "forward_backward", shares)

    def optim_step(self, *, learning_rate: float, max_grad_norm: float) -> float:
        fields = {"learning_rate": learning_rate, "max_grad_norm": max_grad_norm}
        return float(self._policy.call("optim_step", fields=fields)[0].fields["grad_norm"])

    def discard_gradient(self) -> None:
        self._policy.call("discard_gradient")

    def compute_logprobs(
        self, shares: Sequence[Sequence[TokenBatch]], *, entropies: bool = False, energies: bool = False
    ) -> list[list[Float32Array]]:
        return _compute(self._policy, "compute_logprobs", shares, fields={"entropy": entropies, "energy": energies})

    def compute_values(self, shares: Sequence[Sequence[TokenBatch]]) -> list[list[Float32Array]]:
        return _compute(self._critic, "compute_values", shares)

    def release_memory(self) -> None:
        for group in self._groups:
            group.call("release_memory")

    def save(self, folder: Path) -> None:
        for group in self._groups:
            group.call("save", fields={"folder": self._on_each_machine(folder)})
        if self._machines:
            seen, _ = self._list_files(folder)
            self._copy_files(folder, copies_to_keep(seen, self._machines))

    def commit(self, partial: Path, target: Path) -> None:
        if self._machines:
            record = (partial / STATE_FILE).read_text(encoding="utf-8")
            names = {"partial": self._on_each_machine(partial), "target": self._on_each_machine(target)}
            self._policy.call("commit", fields={**names, "record": record, "ranks": self._other_first_ranks})

    def keep_checkpoints(self, folder: Path, names: Sequence[str]) -> None:
        if self._machines:
            fields = {"folder": self._on_each_machine(folder), "names": list(names), "ranks": self._other_first_ranks}
            self._policy.call("keep_only", fields=fields)

    def collect_checkpoints(self, folder: Path) -> None:
        if not self._machines:
            return
        seen, records = self._list_files(folder, tidy=True)
        if (newest := newest_complete(seen, records)) is None:
            return
        for index in newest.stale:
            kept, seen[index] = [name for name in records[index] if name != newest.name], {}
            fields = {"folder": self._on_each_machine(folder), "names": kept, "ranks": [self._machines[index].start]}
            self._policy.call("keep_only", fields=fields)
        self._copy_files(folder, copies_to_read(seen, self._machines, newest.files))

    def load(self, folder: Path) -> None:
        # Every rank of every group reads its files before the first model changes.
        try:
            for group in self._groups:
                group.call("read", fields={"folder": self._on_each_machine(folder)})
        except FourfoldError:
            with suppress(FourfoldError):
                self._policy.call("forget")  # the shards that the policy read before the critic failed
            raise
        for group in self._groups:
            group.call("restore")

    def export(self, folder: Path, *, ema: bool = False) -> None:
        self._policy.call("export", fields={"folder": str(folder.absolute()), "ema": ema})

    def export_critic(self, folder: Path) -> None:
        self._critic.call("export_critic", fields={"folder": str(folder.absolute())})

    def manifest(self) -> Manifest:
        return self._manifest

    def make_offers(
        self,
        epoch: int,
        backend: str,
        receiver_count: int,
        *,
        group: int = 0,
        host: str = LOOPBACK,
        interface: str = "",
        timeout: float,
    ) -> list[bytes]:
        fields = {"backend": backend, "receiver_count": receiver_count, "group": group}
        fields |= {"host": host, "interface": interface}
        return [_to_bytes(answer) for answer in self._transfer("make_offer", epoch, timeout, fields)]

    def open_weights(self, epoch: int, *, timeout: float) -> None:
        self._transfer("open_weights", epoch, timeout, {})

    def send_weights(self, epoch: int, policy_version: int, *, skip_sums: bool = False, timeout: float) -> SentWeights:
        fields = {"policy_version": policy_version, "skip_sums": skip_sums}
        answers = self._transfer("send_weights", epoch, timeout, fields)
        sent_bytes = sum(answer.fields["sent_bytes"] for answer in answers)
        if skip_sums:
            return SentWeights(weights_digest=unsummed_digest(self._manifest, policy_version), sent_bytes=sent_bytes)
        sums = add_sums(self._manifest, [_to_bytes(answer) for answer in answers])
        return SentWeights(weights_digest=digest_of(self._manifest, sums), sent_bytes=sent_bytes, sums=sums)

    def abort_weights(self, epoch: int) -> None:
        self._worker.abort_weights(epoch)
        for channel in self._policy.channels:
            channel.send(RankMessage(name="abort", fields={"epoch": epoch}))

    def in_parallel(self, critic: Callable[[], None], policy: Callable[[], T]) -> T:
        if self._critic_executor is None:
            critic()
            return policy()
        running = self._critic_executor.submit(critic)
        try:
            return policy()
        finally:
            # Also after an error: no command may be under way when this returns. Every command has a deadline.
            running.result()

    def leave(self) -> None:
        for group in self._groups:
            group.leave()

    def close(self) -> None:
        for group in self._groups:
            group.close()
        if self._critic_executor is not None:
            self._critic_executor.shutdown(wait=False)

    def _on_each_machine(self, folder: Path) -> str:
        """Return a folder of the run relative to the run's folder, which has another path on another machine."""
        folder = folder.absolute()
        return str(folder.relative_to(self._run_dir) if folder.is_relative_to(self._run_dir) else folder)

    @property
    def _other_first_ranks(self) -> list[int]:
        """Return the first rank of each machine but this one."""
        return [ranks.start for ranks in self._machines[1:]]

    def _list_files(self, folder: Path, *, tidy: bool = False) -> tuple[list[dict[str, int]], list[dict[str, str]]]:
        """Return the files in a folder, and the records of checkpoints there, on each machine."""
        answers = self._policy.call("list_files", fields={"folder": self._on_each_machine(folder), "tidy": tidy})
        firsts = [answers[ranks.start].fields for ranks in self._machines]
        return [first["files"] for first in firsts], [first["records"] for first in firsts]

    def _copy_files(self, folder: Path, copies: Sequence[FileCopy]) -> None:
        if copies:
            fields = {"folder": self._on_each_machine(folder), "copies": [astuple(copy) for copy in copies]}
            self._policy.call("copy_files", fields=fields)

    def _transfer(self, name: str, epoch: int, timeout: float, fields: dict[str, Any]) -> list[RankMessage]:
        """Run one phase of a weight transfer. If some ranks fail, abort the epoch on the others."""
        answers: list[RankMessage] = []
        fields = {"epoch": epoch, **fields, "timeout": timeout}
        try:
            answers = self._policy.request(name, fields=fields, timeout=timeout + _ANSWER_GRACE_SECONDS)
            return raise_first_error(answers)
        except FourfoldError:
            # If every rank has failed, each has cleaned up on its own. An abort could then hit an epoch that is open:
            # the failed call may be an old one, refused as stale.
            one_succeeded = not answers or any(read_error(answer) is None for answer in answers)
            if self._policy.channels and one_succeeded:
                with suppress(FourfoldError):
                    self.abort_weights(epoch)
            raise


def _update(
    group: RankProcesses, name: str, shares: Sequence[Sequence[MicroBatch]], settings: UpdateSettings
) -> UpdateSums:
    """Run one optimizer step on all ranks; return the sums over ranks."""
    sums, *others = map(read_sums, group.call_on_shares(name, shares, fields=asdict(settings)))
    for other in others:
        sums.add(other)
    return sums


def _compute(
    group: RankProcesses, name: str, shares: Sequence[Sequence[MicroBatch]], fields: dict[str, Any] | None = None
) -> list[list[Float32Array]]:
    """Run a command that answers one array for each batch; return the arrays of each share."""
    return [list(answer.arrays) for answer in group.call_on_shares(name, shares, fields=fields)]


def _to_bytes(answer: RankMessage) -> bytes:
    return np.asarray(answer.arrays[0]).tobytes()
