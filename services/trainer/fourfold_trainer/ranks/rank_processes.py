"""Starts the ranks of one process group, sends each command to all of them, watches them, and ends them.

    engine thread            rank 1                         rank 2 ...
    -------------            ------                         ------
    send command  ---------> reader thread -> queue
    run it here              main thread runs it            (collectives join all ranks)
      send batches  -------> reader thread -> queue         (when rank 0 reads its own ones)
    receive answers <------- send answer

Rank 0 of the policy is in this process. All ranks of a critic with GPUs of its own are children, because a process can
be in only one process group of DeepSpeed. Children connect to a Unix socket in a private folder, which also holds the
rendezvous file of the process group. Nothing here listens on a network; gloo and NCCL are bound to loopback.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, TypeAlias

from fourfold.config import Config
from fourfold.errors import ConfigError, DeadlinePassed, FourfoldError, Unavailable
from fourfold.host.process import Command, Supervisor
from fourfold.host.scratch import Scratch
from fourfold.model import folder
from fourfold_trainer.batches import Array, MicroBatch, to_arrays
from fourfold_trainer.engine import EngineFailedError
from fourfold_trainer.ranks.rank_channel import BATCH, RankChannel, RankMessage
from fourfold_trainer.ranks.worker import RankWorker, read_error

Shares: TypeAlias = Sequence[Sequence[MicroBatch]]
"""The micro-batches of each rank."""

_WATCH_SECONDS: Final = 0.2
# A rank has its next micro-batch when it ends one.
_BATCHES_AHEAD: Final = 1
# A peer that died is often the cause of an error on this rank. Wait this long for the watcher to report its death.
_BLAME_SECONDS: Final = 2.0
# Commands that change weights, optimizers or gradients.
_CHANGING: Final = frozenset(
    {"update_policy", "update_critic", "forward_backward", "optim_step", "discard_gradient", "restore"}
)
# A rank has nothing to finish: it exits when its channel ends.
_STOP_SECONDS: Final = 0.2
# Errors that the death of a peer can cause: of the channel, and of collectives (torch raises RuntimeError).
_PEER_ERRORS: Final = (FourfoldError, RuntimeError, OSError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlacement:
    """The GPU and the models of a rank."""

    rank: int  # within its group
    rank_count: int
    holds: Literal["both", "policy", "critic"]
    gpu: int  # among those of the service; ignored on CPUs


def place_ranks(config: Config, *, critic: bool) -> list[RankPlacement]:
    """Return the ranks of the policy's group, or of the group of a critic with ranks of its own."""
    first = config.trainer.ranks if critic else 0
    count = config.critic.ranks if critic else config.trainer.ranks
    has_both = config.algorithm.needs_critic and not config.critic_apart
    holds: Literal["both", "policy", "critic"] = "critic" if critic else "both" if has_both else "policy"
    return [RankPlacement(rank=rank, rank_count=count, holds=holds, gpu=first + rank) for rank in range(count)]


class RankProcesses:
    """All ranks of one group. One thread at a time uses it; always the same one if rank 0 is in this process."""

    # Arguments of a child's interpreter; the path of the socket comes last.
    _program: ClassVar[tuple[str, ...]] = (
        "-m",
        "fourfold_trainer.ranks.main",
    )

    def __init__(
        self,
        config: Config,
        model_folder: Path,
        places: Sequence[RankPlacement],
        *,
        has_local_rank: bool,
        run_dir: Path,
        name: str,
        on_death: Callable[[str], None],
    ) -> None:
        """Start the children. Call `load_local_rank` next if there is one, then `wait_loaded`.

        Args:
            model_folder: of the policy, a Hugging Face causal LM.
            has_local_rank: rank 0 is in this process.
            run_dir: the children write their logs into its folder `logs`.
            name: of the group; a part of the logs' names.
            on_death: called once, from another thread, with the reason, when a rank has died.
        """
        self._config, self._model_folder = config, model_folder
        self._places, self._children = places, places[1:] if has_local_rank else places
        self._timeout, self._on_death = config.trainer.step_timeout_seconds, on_death
        self._scratch = Scratch("ranks")
        self._rendezvous = self._scratch.path / "rendezvous"
        self._supervisor = Supervisor(run_dir / "logs")
        self.worker: RankWorker | None = None  # rank 0, if it is in this process
        self.channels: list[RankChannel] = []  # to the children
        self.change_count = 0  # number of commands that have begun to change models
        self._closing = threading.Event()
        self._loaded = threading.Event()
        self._death = ""
        self._sequence = 0
        with self._starting():
            if self._children:
                self._start_children(name)

    def load_local_rank(self) -> None:
        """Load the models of rank 0 in this process, while the children load theirs."""
        os.environ.update(rank_environment(self._config, self._places[0]))
        with self._starting():
            self.worker = make_worker(self._config, self._model_folder, self._places[0], rendezvous=self._rendezvous)

    def wait_loaded(self) -> None:
        """Wait until the children have loaded their models. Raises FourfoldError if a rank cannot start."""
        with self._starting():
            self._collect(0, self._timeout)
        self._loaded.set()

    def call(self, name: str, *, fields: dict[str, Any] | None = None, shares: Shares = ()) -> list[RankMessage]:
        """Run a command on all ranks; return the answers in rank order, or raise the first error among them.

        Raises:
            EngineFailedError: a rank died, its channel broke, or it did not answer in trainer.step_timeout_seconds.
        """
        try:
            answers = self.request(name, fields=fields or {}, shares=shares, timeout=self._timeout)
        except DeadlinePassed as error:
            raise EngineFailedError(f"the ranks failed at {name}: {error.message}") from error
        return raise_first_error(answers)

    def call_on_shares(self, name: str, shares: Shares, *, fields: dict[str, Any] | None = None) -> list[RankMessage]:
        """Run a command on batches; return one answer per share.

        Ranks that share rows (sequence parallelism) receive the same share and return the same answer.
        """
        size = self._config.trainer.sequence_parallel_size
        return self.call(name, fields=fields, shares=[share for share in shares for _ in range(size)])[::size]

    def request(self, name: str, *, fields: dict[str, Any], shares: Shares = (), timeout: float) -> list[RankMessage]:
        """Run a command on all ranks; return the answers in rank order, errors among them.

        Args:
            fields: the same for all ranks.
            shares: micro-batches of each rank, as many for each; empty for a command without them.
            timeout: seconds for the children's answers, from the end of rank 0's part if it is in this process.

        Raises:
            EngineFailedError: a rank died, or its channel broke.
            DeadlinePassed: a rank did not answer.
        """
        self._sequence += 1
        self.change_count += name in _CHANGING
        count = len(shares[0]) if shares else 0
        command = RankMessage(name=name, fields=fields, sequence=self._sequence, batch_count=count)
        batches = SharedBatches(self.channels, shares, sequence=self._sequence)
        try:
            # Send first: the collectives of rank 0's part wait for the children.
            for channel in self.channels:
                channel.send(command)
            own = [] if self.worker is None else [self.worker.handle(replace(command, batches=batches))]
            batches.send_rest()
            return own + self._collect(self._sequence, timeout)
        except _PEER_ERRORS as error:
            if death := self._death_after():
                raise EngineFailedError(death) from error
            if isinstance(error, Unavailable):  # the channel stopped inside a message, and cannot be used again
                raise EngineFailedError(f"the ranks failed at {name}: {error.message}") from error
            raise

    def leave(self) -> None:
        """Leave the process group in good order, before `close`."""
        if self._death:
            raise Unavailable(self._death)
        self._closing.set()
        for channel in self.channels:
            channel.send(RankMessage(name="close"))
        if self.worker is not None:
            self.worker.close()

    def close(self) -> None:
        """End all ranks. Any thread may call this."""
        self._closing.set()
        for channel in self.channels:
            channel.close()
        self._supervisor.stop(_STOP_SECONDS)
        self._scratch.remove()

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """End all ranks if the block fails. Report the death of a child as the cause, if there was one."""
        with ExitStack() as on_error:
            on_error.callback(self.close)
            try:
                yield
            except ConfigError:  # every rank fails with the same error and exits, which is not the cause
                raise
            except _PEER_ERRORS as error:
                if death := self._death_after():
                    raise Unavailable(death) from error
                raise
            on_error.pop_all()

    def _start_children(self, name: str) -> None:
        path = self._scratch.path / "channel"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(len(self._children))
            started = []
            for place in self._children:
                command = Command(
                    name=f"{name}-rank-{place.rank}",
                    argv=(sys.executable, *self._program, str(path)),
                    # The child must find this package in the way in which this process did.
                    env={
                        **rank_environment(self._config, place),
                        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
                    },
                )
                started.append(self._supervisor.start(command))
            threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()
            by_pid = self._accept(listener, {child.pid for child in started})
        self.channels = [by_pid[child.pid] for child in started]
        start = {
            "config": self._config.model_dump(mode="json"),
            "model_folder": str(self._model_folder),
            "rendezvous": str(self._rendezvous),
        }
        for place, channel in zip(self._children, self.channels, strict=True):
            channel.send(RankMessage(name="start", fields={**start, "place": asdict(place)}))

    def _accept(self, listener: socket.socket, pids: set[int]) -> dict[int, RankChannel]:
        """Return the channels of our children, by pid; refuse the connection of any other process."""
        channels: dict[int, RankChannel] = {}
        end = time.monotonic() + self._timeout
        listener.settimeout(_WATCH_SECONDS)
        while len(channels) < len(pids):
            if self._death:
                raise Unavailable(self._death)
            if time.monotonic() > end:
                ranks = [place.rank for place in self._children]
                raise DeadlinePassed(f"ranks {ranks} did not start within {self._timeout:.0f} s")
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            pid = int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)
            if pid in pids:
                channels[pid] = RankChannel(connection)
            else:
                connection.close()
        return channels

    def _watch(self) -> None:
        """Report the first death of a child, because the other ranks would wait for it in a collective."""
        while not self._closing.wait(_WATCH_SECONDS):
            if deaths := self._supervisor.deaths():
                # A rank prints no READY line; it is ready when all ranks have loaded their models.
                self._death = replace(deaths[0], was_ready=self._loaded.is_set()).explain()
                if not self._closing.is_set():
                    self._on_death(self._death)
                return

    def _collect(self, sequence: int, timeout: float) -> list[RankMessage]:
        """Return every child's answer to a command; drop answers to earlier commands, whose deadline has passed."""
        end = time.monotonic() + timeout
        answers = []
        for channel in self.channels:
            while (answer := channel.receive(timeout=max(end - time.monotonic(), 0.0))).sequence != sequence:
                pass
            answers.append(answer)
        return answers

    def _death_after(self) -> str:
        """Wait a moment for the watcher to report a death that may have led to an error; return the reason, or ""."""
        end = time.monotonic() + _BLAME_SECONDS
        while self.channels and not self._death and time.monotonic() < end:
            time.sleep(_WATCH_SECONDS / 4)
        return self._death


class SharedBatches:
    """Rank 0's micro-batches, as arrays. The other ranks get theirs when rank 0 reads its own, one ahead of it.

    All at once would take four times the memory of the samples, in rank 0 and again in the other ranks.
    """

    def __init__(self, channels: Sequence[RankChannel], shares: Shares, *, sequence: int) -> None:
        """`shares` are those of all ranks, those of `channels` last; `sequence` is the number of the command."""
        self._own, self._sequence = (shares[0] if shares else ()), sequence
        self._others = list(zip(channels, shares[-len(channels) :], strict=True)) if channels and shares else []
        self._sent = 0  # batches of each channel
        self._error: Unavailable | None = None

    def __len__(self) -> int:
        return len(self._own)

    def __iter__(self) -> Iterator[list[Array]]:
        for index in range(len(self)):
            self._send_up_to(index + _BATCHES_AHEAD)
            yield to_arrays(self._own[index])

    def send_rest(self) -> None:
        """Send what rank 0 did not read, because of an error. Raises Unavailable if a channel broke before."""
        if self._error is not None:  # its stream may have stopped in the middle of a message
            raise self._error
        self._send_up_to(len(self) - 1)

    def _send_up_to(self, last: int) -> None:
        try:
            for index in range(self._sent, min(last + 1, len(self))):
                for channel, share in self._others:
                    channel.send(RankMessage(name=BATCH, arrays=to_arrays(share[index]), sequence=self._sequence))
                self._sent = index + 1
        except Unavailable as error:
            self._error = error
            raise


def raise_first_error(answers: list[RankMessage]) -> list[RankMessage]:
    """Return the answers, or raise the first error among them."""
    for answer in answers:
        if (failure := read_error(answer)) is not None:
            raise failure
    return answers


def make_worker(config: Config, model_folder: Path, place: RankPlacement, *, rendezvous: Path) -> RankWorker:
    """Join the process group and load this process's models. `rank_environment` must be set before."""
    # Imported here, because DeepSpeed reads the environment at import.
    import torch

    from fourfold_trainer.zero.models import DeepSpeedCritic, DeepSpeedPolicy
    from fourfold_trainer.zero.process_groups import join, make_exchange

    if config.trainer.device == "cpu" or config.trainer.offload != "none":  # the optimizer then runs on the CPU
        cores = len(os.sched_getaffinity(0))
        share = max(1, cores // config.trainer_processes)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "0")) or share)
    rank, rank_count = place.rank, place.rank_count
    join(config, rank=rank, rank_count=rank_count, gpu=place.gpu, rendezvous=rendezvous)
    exchange = make_exchange(config, rank=rank)
    torch.manual_seed(config.seed * rank_count + rank)
    policy = critic = None
    if place.holds != "critic":
        policy = DeepSpeedPolicy(config, model_folder, rank=rank, rank_count=rank_count, exchange=exchange)
    if place.holds != "policy":
        source = folder.resolve(config.critic.source) if config.critic.source else model_folder
        critic = DeepSpeedCritic(config, source, rank=rank, gpu=place.gpu, exchange=exchange)
    return RankWorker(config, policy, critic, rank=rank, rank_count=rank_count)


def rank_environment(config: Config, place: RankPlacement) -> dict[str, str]:
    """Return the environment variables of a rank: DeepSpeed's device, and loopback for all collectives."""
    return {
        "DS_ACCELERATOR": config.trainer.device,
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.gpu),
        "WORLD_SIZE": str(place.rank_count),
        "GLOO_SOCKET_IFNAME": "lo",
        # A user who sends weights to engines on other machines sets the network for it.
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
        "TOKENIZERS_PARALLELISM": "false",
    }
