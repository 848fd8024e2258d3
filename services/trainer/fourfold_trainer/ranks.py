"""All ranks as one engine: rank 0 in this process, the others as its children.

    engine thread            rank 1                         rank 2 ...
    -------------            ------                         ------
    send command  ---------> reader thread -> queue
    run it here              main thread runs it            (collectives join all ranks)
    receive answers <------- send answer

Children are started by the supervisor of `fourfold.process`, each with a log of its own, and
connect to a Unix socket in a private folder, which also holds the rendezvous file of the
process group: nothing here listens on a network, and gloo and NCCL are bound to loopback.
A child whose link ends, ends; it is killed when this process dies. When a child dies, the
watcher says so at once and the service ends: its peers wait in a collective.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from fourfold import models
from fourfold.config import Config
from fourfold.errors import DeadlinePassed, FourfoldError, Unavailable
from fourfold.nn.batching import TokenBatch
from fourfold.process import Command, Supervisor
from fourfold.scratch import Scratch
from fourfold.weights.manifest import Manifest
from fourfold.weights.sender import combine_digest
from fourfold.wire import Float32Array
from fourfold_trainer.batching import Batch, PolicyBatch, ValueBatch, WeightedBatch, to_arrays
from fourfold_trainer.engine import Sent, UpdateSettings, UpdateSums
from fourfold_trainer.flops import Machine
from fourfold_trainer.link import Array, Link, Message
from fourfold_trainer.worker import RankWorker, read_error, read_sums

_WATCH_SECONDS: Final = 0.2
# After an error on this rank the reason is often a peer that died: its death is looked for this long.
_BLAME_SECONDS: Final = 2.0
# What an answer may take longer than the deadline that the command carries.
_ANSWER_GRACE_SECONDS: Final = 5.0
# A rank has nothing to finish: it ends when its link does.
_STOP_SECONDS: Final = 0.2
_ABORT: Final = "abort"


class RankGroup:
    """The `Engine`. One thread, which lives as long as the process, makes it and calls it."""

    def __init__(
        self,
        config: Config,
        model_folder: Path,
        *,
        run_dir: Path,
        member_id: str,
        on_death: Callable[[str], None],
    ) -> None:
        """Start all ranks and load the model on each.

        Args:
            config: of the run.
            model_folder: a Hugging Face causal LM.
            run_dir: logs of ranks 1.. go into its `logs`.
            member_id: of the trainer; names the ranks' logs.
            on_death: called once, from another thread, with an explanation, when a rank has died.

        Raises:
            FourfoldError: a rank cannot start.
        """
        count = config.trainer.ranks
        self._count, self._on_death = count, on_death
        self._group_size = config.trainer.sequence_parallel_size
        self._timeout = config.trainer.step_timeout_seconds
        self._scratch = Scratch("ranks")
        self._folder = self._scratch.path
        self._supervisor = Supervisor(run_dir / "logs")
        self._links: list[Link] = []
        self._closing = threading.Event()
        self._death = ""
        self._sequence = 0
        os.environ.update(environment(config, rank=0))
        try:
            if count > 1:
                self._start_children(config, model_folder, member_id)
            self._worker = make_worker(
                config, model_folder, rank=0, rank_count=count, rendezvous=self._folder / "rendezvous"
            )
            self._collect(0, self._timeout)
        except BaseException as error:
            self._closing.set()
            self._raise_death(error)
            self.close()
            raise
        self._manifest, self._machine = self._worker.sender.manifest(), self._worker.machine

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids."""
        return self._worker.policy.vocabulary_size

    @property
    def machine(self) -> Machine:
        """What the ranks run on, and the sizes of the models."""
        return self._machine

    def update_policy(self, shares: Sequence[Sequence[PolicyBatch]], settings: UpdateSettings) -> UpdateSums:
        """Make one optimizer step: each rank its share."""
        return self._update("update_policy", shares, settings)

    def update_critic(self, shares: Sequence[Sequence[ValueBatch]], settings: UpdateSettings) -> UpdateSums:
        """The same for the critic."""
        return self._update("update_critic", shares, settings)

    def forward_backward(self, shares: Sequence[Sequence[WeightedBatch]]) -> list[list[Float32Array]]:
        """Add to the gradient that waits; return the log-probabilities of each rank's batches."""
        return [list(answer.arrays) for answer in self._deal("forward_backward", shares)]

    def optim_step(self, *, learning_rate: float, max_grad_norm: float) -> float:
        """Use up the gradient that waits; return its norm."""
        fields = {"learning_rate": learning_rate, "max_grad_norm": max_grad_norm}
        return float(self._call("optim_step", fields=fields)[0].fields["grad_norm"])

    def discard_gradient(self) -> None:
        """Forget the gradient that waits."""
        self._call("discard_gradient")

    def compute_logprobs(
        self, shares: Sequence[Sequence[TokenBatch]], *, entropies: bool = False
    ) -> list[list[Float32Array]]:
        """Return the log-probabilities of each rank's batches, and entropies beside them."""
        answers = self._deal("compute_logprobs", shares, fields={"entropy": entropies})
        return [list(answer.arrays) for answer in answers]

    def compute_values(self, shares: Sequence[Sequence[TokenBatch]]) -> list[list[Float32Array]]:
        """Return the critic's values of each rank's batches."""
        return [list(answer.arrays) for answer in self._deal("compute_values", shares)]

    def save(self, folder: Path) -> None:
        """Write every rank's state into `folder`."""
        self._call("save", fields={"folder": str(folder.absolute())})

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        self._call("load", fields={"folder": str(folder.absolute())})

    def export(self, folder: Path, *, ema: bool = False) -> None:
        """Write a Hugging Face model into `folder`."""
        self._call("export", fields={"folder": str(folder.absolute()), "ema": ema})

    def manifest(self) -> Manifest:
        """Return the layout of the weights."""
        return self._manifest

    def make_offers(self, epoch: int, backend: str, receiver_count: int, *, timeout: float) -> list[bytes]:
        """Start an epoch; one offer per rank."""
        fields = {"epoch": epoch, "backend": backend, "receiver_count": receiver_count, "timeout": timeout}
        return [_bytes(a) for a in self._transfer("make_offer", fields)]

    def open_weights(self, epoch: int, *, timeout: float) -> None:
        """Meet the receivers."""
        self._transfer("open_weights", {"epoch": epoch, "timeout": timeout})

    def send_weights(self, epoch: int, policy_version: int, *, timeout: float) -> Sent:
        """Send the present weights."""
        answers = self._transfer("send_weights", {"epoch": epoch, "policy_version": policy_version, "timeout": timeout})
        return Sent(
            weights_digest=combine_digest(self._manifest, [_bytes(a) for a in answers]),
            sent_bytes=sum(a.fields["sent_bytes"] for a in answers),
        )

    def abort_weights(self, epoch: int) -> None:
        """End what is under way and close the epoch. From any thread."""
        self._worker.abort_weights(epoch)
        for link in self._links:
            link.send(Message(name=_ABORT, fields={"epoch": epoch}))

    def close(self) -> None:
        """End all ranks. From any thread."""
        self._closing.set()
        for link in self._links:
            link.close()
        self._supervisor.stop(_STOP_SECONDS)
        self._scratch.remove()

    def leave(self) -> None:
        """Leave the process group in good order, before `close`."""
        if self._death:
            raise Unavailable(self._death)
        self._closing.set()
        for link in self._links:
            link.send(Message(name="close"))
        self._worker.close()

    def _update(self, name: str, shares: Sequence[Sequence[Batch]], settings: UpdateSettings) -> UpdateSums:
        answers = self._deal(name, shares, fields=asdict(settings))
        sums = read_sums(answers[0])
        for answer in answers[1:]:
            sums.add_rank(read_sums(answer))
        return sums

    def _start_children(self, config: Config, model_folder: Path, member_id: str) -> None:
        path = self._folder / "link"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(self._count)
            children = {}
            for rank in range(1, self._count):
                command = Command(
                    name=f"{member_id}-rank-{rank}",
                    argv=(sys.executable, "-m", "fourfold_trainer.rank", str(path)),
                    # The child must find this package the way this process did.
                    env={**environment(config, rank=rank), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                )
                children[rank] = self._supervisor.start(command)
            threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()
            by_pid = self._accept(listener, {child.pid: rank for rank, child in children.items()})
        self._links = [by_pid[children[rank].pid] for rank in range(1, self._count)]
        for rank, link in enumerate(self._links, 1):
            link.send(
                Message(
                    name="start",
                    fields={
                        "config": config.model_dump(mode="json"),
                        "model_folder": str(model_folder),
                        "rank": rank,
                        "rank_count": self._count,
                        "rendezvous": str(self._folder / "rendezvous"),
                    },
                )
            )

    def _accept(self, listener: socket.socket, ranks: dict[int, int]) -> dict[int, Link]:
        """Return the links of our children, by pid; nobody else is let in."""
        links: dict[int, Link] = {}
        end = time.monotonic() + self._timeout
        listener.settimeout(_WATCH_SECONDS)
        while len(links) < len(ranks):
            if self._death:
                raise Unavailable(self._death)
            if time.monotonic() > end:
                raise DeadlinePassed(f"ranks {sorted(ranks.values())} did not start within {self._timeout:.0f} s")
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            pid = int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)
            if pid in ranks:
                links[pid] = Link(connection)
            else:
                connection.close()
        return links

    def _watch(self) -> None:
        """Wait for the first death of a child and report it."""
        while not self._closing.wait(_WATCH_SECONDS):
            if deaths := self._supervisor.deaths():
                self._death = deaths[0].explain()
                if not self._closing.is_set():
                    self._on_death(self._death)
                return

    def _transfer(self, name: str, fields: dict[str, Any]) -> list[Message]:
        """Run one phase of a weight transfer; when some ranks fail, none keeps the epoch open."""
        answers: list[Message] = []
        try:
            answers = self._ask(name, fields=fields, timeout=fields["timeout"] + _ANSWER_GRACE_SECONDS)
            return _checked(answers)
        except FourfoldError:
            # Where all have failed each has settled it on its own: a stale call must not close the open epoch.
            if self._links and any(read_error(answer) is None for answer in answers or [Message(name=name)]):
                with suppress(FourfoldError):
                    self.abort_weights(fields["epoch"])
            raise

    def _deal(
        self, name: str, shares: Sequence[Sequence[Batch]], *, fields: dict[str, Any] | None = None
    ) -> list[Message]:
        """Run a command on batches; return one answer per share: ranks that share a row answer the same."""
        arrays = [part for part in _arrays(shares) for _ in range(self._group_size)]
        return self._call(name, fields=fields, arrays=arrays)[:: self._group_size]

    def _call(
        self, name: str, *, fields: dict[str, Any] | None = None, arrays: Sequence[Sequence[Array]] = ()
    ) -> list[Message]:
        """Run a command on all ranks; return the answers in rank order, or raise the first error among them."""
        return _checked(self._ask(name, fields=fields or {}, arrays=arrays, timeout=self._timeout))

    def _ask(
        self, name: str, *, fields: dict[str, Any], arrays: Sequence[Sequence[Array]] = (), timeout: float
    ) -> list[Message]:
        """Run a command on all ranks; return the answers, errors among them, in rank order.

        Args:
            name: of the command.
            fields: the same for all ranks.
            arrays: for each rank; empty: none for anybody.
            timeout: of the other ranks' answers, counted from the end of rank 0's part.

        Raises:
            Unavailable: a rank died.
            DeadlinePassed: a rank has not answered.
        """
        self._sequence += 1
        commands = [
            Message(name=name, fields=fields, arrays=part, sequence=self._sequence)
            for part in (arrays or [()] * self._count)
        ]
        try:
            for link, command in zip(self._links, commands[1:], strict=True):
                link.send(command)
            own = self._worker.handle(commands[0])
            return [own, *self._collect(self._sequence, timeout)]
        except BaseException as error:
            self._raise_death(error)
            raise

    def _collect(self, sequence: int, timeout: float) -> list[Message]:
        """Return every other rank's answer to a command; those to earlier ones came too late and are dropped."""
        end = time.monotonic() + timeout
        answers = []
        for link in self._links:
            while (answer := link.receive(timeout=max(end - time.monotonic(), 0.0))).sequence != sequence:
                pass
            answers.append(answer)
        return answers

    def _raise_death(self, error: BaseException) -> None:
        """Raise the death of a peer instead of `error`, when there was one."""
        end = time.monotonic() + _BLAME_SECONDS
        while self._links and not self._death and time.monotonic() < end:
            time.sleep(_WATCH_SECONDS / 4)  # the watcher notes it
        if self._death:
            raise Unavailable(self._death) from error


def _checked(answers: list[Message]) -> list[Message]:
    for answer in answers:
        if (failure := read_error(answer)) is not None:
            raise failure
    return answers


def make_worker(config: Config, model_folder: Path, *, rank: int, rank_count: int, rendezvous: Path) -> RankWorker:
    """Load this process's rank. `environment` must be set by now."""
    # Imported here, because DeepSpeed reads the environment when it is imported.
    import torch

    from fourfold_trainer.zero.critic import DeepSpeedCritic
    from fourfold_trainer.zero.group import join
    from fourfold_trainer.zero.policy import DeepSpeedPolicy
    from fourfold_trainer.zero.ulysses import make_exchange

    if config.trainer.device == "cpu" or config.trainer.offload != "none":  # then the update is on the CPU
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "0")) or max(1, cores // rank_count))
    join(config, rank=rank, rank_count=rank_count, rendezvous=rendezvous)
    exchange = make_exchange(config, rank=rank)
    policy = DeepSpeedPolicy(config, model_folder, rank=rank, rank_count=rank_count, exchange=exchange)
    critic = None
    if config.algorithm.needs_critic:
        source = models.resolve(config.critic.source) if config.critic.source else model_folder
        critic = DeepSpeedCritic(config, source, rank=rank, exchange=exchange)
    return RankWorker(config, policy, critic, rank=rank, rank_count=rank_count)


def environment(config: Config, *, rank: int) -> dict[str, str]:
    """Return the variables of a rank's process: DeepSpeed's device, and loopback for all collectives."""
    return {
        "DS_ACCELERATOR": config.trainer.device,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(config.trainer.ranks),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _arrays(shares: Sequence[Sequence[Batch]]) -> list[list[Array]]:
    """Return each share's batches as the arrays of one message."""
    return [[array for batch in share for array in to_arrays(batch)] for share in shares]


def _bytes(answer: Message) -> bytes:
    return np.asarray(answer.arrays[0]).tobytes()
