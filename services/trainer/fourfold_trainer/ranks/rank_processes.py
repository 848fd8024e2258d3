"""The ranks of one process group: started, called all at once, watched, ended.

    engine thread            rank 1                         rank 2 ...
    -------------            ------                         ------
    send command  ---------> reader thread -> queue
    run it here              main thread runs it            (collectives join all ranks)
    receive answers <------- send answer

Rank 0 is in this process, or a child as the others are: a process can be in one group of DeepSpeed's alone, so that
of a critic with ranks of its own has all of them as children.

Children are started by the supervisor of `fourfold.host.process`, each with a log of its own, and
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from fourfold.config import Config
from fourfold.errors import ConfigError, DeadlinePassed, Unavailable
from fourfold.host.process import Command, Supervisor
from fourfold.host.scratch import Scratch
from fourfold.model import folder
from fourfold_trainer.engine import EngineFailedError
from fourfold_trainer.ranks.rank_channel import Array, RankChannel, RankMessage
from fourfold_trainer.ranks.worker import RankWorker, read_error

_WATCH_SECONDS: Final = 0.2
# After an error on this rank the reason is often a peer that died: its death is looked for this long.
_BLAME_SECONDS: Final = 2.0
# Commands that change weights, optimizers or gradients.
_CHANGING: Final = frozenset(
    {"update_policy", "update_critic", "forward_backward", "optim_step", "discard_gradient", "restore"}
)
# A rank has nothing to finish: it ends when its link does.
_STOP_SECONDS: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlacement:
    """Where a rank is and what it holds."""

    rank: int
    """Within its group."""
    rank_count: int
    holds: Literal["both", "policy", "critic"]
    gpu: int
    """Among those of the service, on GPUs."""


def place_ranks(config: Config, *, critic: bool) -> list[RankPlacement]:
    """Return the ranks of the policy's group, or of the critic's where it has ranks of its own."""
    first = config.trainer.ranks if critic else 0
    count = config.critic.ranks if critic else config.trainer.ranks
    holds: Literal["both", "policy", "critic"] = "policy"
    if critic:
        holds = "critic"
    elif config.algorithm.needs_critic and not config.critic_apart:
        holds = "both"
    return [RankPlacement(rank=rank, rank_count=count, holds=holds, gpu=first + rank) for rank in range(count)]


class RankProcesses:
    """All ranks of a group. One thread at a time calls it; where rank 0 is here, always the same one."""

    def __init__(
        self,
        config: Config,
        model_folder: Path,
        all_places: Sequence[RankPlacement],
        *,
        here: bool,
        run_dir: Path,
        name: str,
        on_death: Callable[[str], None],
    ) -> None:
        """Start the ranks that are children; `load` follows, and then `wait_loaded`.

        Args:
            config: of the run.
            model_folder: of the policy, a Hugging Face causal LM.
            all_places: of the ranks, in order.
            here: whether rank 0 is in this process.
            run_dir: logs of the children go into its `logs`.
            name: of the group; names the children's logs.
            on_death: called once, from another thread, with an explanation, when a rank has died.
        """
        self._config, self._model_folder = config, model_folder
        self._places, self._children = all_places, all_places[1:] if here else all_places
        self._timeout, self._on_death = config.trainer.step_timeout_seconds, on_death
        self._scratch = Scratch("ranks")
        self._supervisor = Supervisor(run_dir / "logs")
        self.worker: RankWorker | None = None
        """Rank 0, where it is here."""
        self.links: list[RankChannel] = []
        """To the children."""
        self.change_count = 0
        """Number of commands that have begun to change what the ranks hold."""
        self._closing = threading.Event()
        self._loaded = threading.Event()
        self._death = ""
        self._sequence = 0
        with self._starting():
            if self._children:
                self._start_children(name)

    def load(self) -> None:
        """Load rank 0 in this process; the others are loading by themselves."""
        os.environ.update(rank_environment(self._config, self._places[0]))
        rendezvous = self._scratch.path / "rendezvous"
        with self._starting():
            self.worker = make_worker(self._config, self._model_folder, self._places[0], rendezvous=rendezvous)

    def wait_loaded(self) -> None:
        """Wait for the children's models.

        Raises:
            FourfoldError: a rank cannot start.
        """
        with self._starting():
            self._collect(0, self._timeout)
        self._loaded.set()

    def call(
        self, name: str, *, fields: dict[str, Any] | None = None, arrays: Sequence[Sequence[Array]] = ()
    ) -> list[RankMessage]:
        """Run a command on all ranks; return the answers in rank order, or raise the first error among them.

        Raises:
            EngineFailedError: a rank died, its link broke, or it has not answered within trainer.step_timeout_seconds.
        """
        try:
            answers = self.ask(name, fields=fields or {}, arrays=arrays, timeout=self._timeout)
        except DeadlinePassed as error:
            raise EngineFailedError(f"the ranks failed at {name}: {error.message}") from error
        return raise_first_error(answers)

    def deal(
        self, name: str, shares: Sequence[Sequence[Array]], *, fields: dict[str, Any] | None = None
    ) -> list[RankMessage]:
        """Run a command on batches; return one answer per share: ranks that share a row have, and answer, the same."""
        size = self._config.trainer.sequence_parallel_size
        return self.call(name, fields=fields, arrays=[part for part in shares for _ in range(size)])[::size]

    def ask(
        self, name: str, *, fields: dict[str, Any], arrays: Sequence[Sequence[Array]] = (), timeout: float
    ) -> list[RankMessage]:
        """Run a command on all ranks; return the answers, errors among them, in rank order.

        Args:
            name: of the command.
            fields: the same for all ranks.
            arrays: for each rank; empty: none for anybody.
            timeout: of the children's answers, counted from the end of rank 0's part where it is here.

        Raises:
            EngineFailedError: a rank died, or its link broke.
            DeadlinePassed: a rank has not answered.
        """
        self._sequence += 1
        self.change_count += name in _CHANGING
        commands = [
            RankMessage(name=name, fields=fields, arrays=part, sequence=self._sequence)
            for part in (arrays or [()] * len(self._places))
        ]
        try:
            for link, command in zip(self.links, commands[-len(self.links) :], strict=False):
                link.send(command)
            own = [] if self.worker is None else [self.worker.handle(commands[0])]
            return own + self._collect(self._sequence, timeout)
        except BaseException as error:
            if death := self._death_after(error):
                raise EngineFailedError(death) from error
            if isinstance(error, Unavailable):  # of a link: what travels on it can no longer be told apart
                raise EngineFailedError(f"the ranks failed at {name}: {error.message}") from error
            raise

    def leave(self) -> None:
        """Leave the process group in good order, before `close`."""
        if self._death:
            raise Unavailable(self._death)
        self._closing.set()
        for link in self.links:
            link.send(RankMessage(name="close"))
        if self.worker is not None:
            self.worker.close()

    def close(self) -> None:
        """End all ranks. From any thread."""
        self._closing.set()
        for link in self.links:
            link.close()
        self._supervisor.stop(_STOP_SECONDS)
        self._scratch.remove()

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """End all ranks when the block fails; the death of one is then the reason."""
        try:
            yield
        except ConfigError:  # each rank says the same
            self.close()
            raise
        except BaseException as error:
            death = self._death_after(error)
            self.close()
            if death:
                raise Unavailable(death) from error
            raise

    def _start_children(self, name: str) -> None:
        path = self._scratch.path / "link"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(len(self._children))
            started = []
            for place in self._children:
                command = Command(
                    name=f"{name}-rank-{place.rank}",
                    argv=(sys.executable, "-m", "fourfold_trainer.ranks.main", str(path)),
                    # The child must find this package the way this process did.
                    env={
                        **rank_environment(self._config, place),
                        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
                    },
                )
                started.append(self._supervisor.start(command))
            threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()
            by_pid = self._accept(listener, {child.pid for child in started})
        self.links = [by_pid[child.pid] for child in started]
        for place, link in zip(self._children, self.links, strict=True):
            link.send(
                RankMessage(
                    name="start",
                    fields={
                        "config": self._config.model_dump(mode="json"),
                        "model_folder": str(self._model_folder),
                        "place": asdict(place),
                        "rendezvous": str(self._scratch.path / "rendezvous"),
                    },
                )
            )

    def _accept(self, listener: socket.socket, pids: set[int]) -> dict[int, RankChannel]:
        """Return the links of our children, by pid; nobody else is let in."""
        links: dict[int, RankChannel] = {}
        end = time.monotonic() + self._timeout
        listener.settimeout(_WATCH_SECONDS)
        while len(links) < len(pids):
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
                links[pid] = RankChannel(connection)
            else:
                connection.close()
        return links

    def _watch(self) -> None:
        """Wait for the first death of a child and report it."""
        while not self._closing.wait(_WATCH_SECONDS):
            if deaths := self._supervisor.deaths():
                # A rank prints no READY line: it is ready when its model is loaded.
                self._death = replace(deaths[0], was_ready=self._loaded.is_set()).explain()
                if not self._closing.is_set():
                    self._on_death(self._death)
                return

    def _collect(self, sequence: int, timeout: float) -> list[RankMessage]:
        """Return every child's answer to a command; those to earlier ones came too late and are dropped."""
        end = time.monotonic() + timeout
        answers = []
        for link in self.links:
            while (answer := link.receive(timeout=max(end - time.monotonic(), 0.0))).sequence != sequence:
                pass
            answers.append(answer)
        return answers

    def _death_after(self, error: BaseException) -> str:
        """Explain the death of a peer that may have led to `error`; empty when none died."""
        end = time.monotonic() + _BLAME_SECONDS
        while self.links and not self._death and time.monotonic() < end:
            time.sleep(_WATCH_SECONDS / 4)  # the watcher notes it
        return self._death


def raise_first_error(answers: list[RankMessage]) -> list[RankMessage]:
    """Return the answers, or raise the first error among them."""
    for answer in answers:
        if (failure := read_error(answer)) is not None:
            raise failure
    return answers


def make_worker(config: Config, model_folder: Path, place: RankPlacement, *, rendezvous: Path) -> RankWorker:
    """Load this process's rank. `rank_environment` must be set by now."""
    # Imported here, because DeepSpeed reads the environment when it is imported.
    import torch

    from fourfold_trainer.zero.models import DeepSpeedCritic, DeepSpeedPolicy
    from fourfold_trainer.zero.process_groups import join, make_exchange

    if config.trainer.device == "cpu" or config.trainer.offload != "none":  # then the update is on the CPU
        cores = len(os.sched_getaffinity(0))
        share = max(1, cores // config.trainer_processes)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "0")) or share)
    join(config, rank=place.rank, rank_count=place.rank_count, gpu=place.gpu, rendezvous=rendezvous)
    exchange = make_exchange(config, rank=place.rank)
    policy = critic = None
    torch.manual_seed(config.seed * place.rank_count + place.rank)
    if place.holds != "critic":
        policy = DeepSpeedPolicy(config, model_folder, rank=place.rank, rank_count=place.rank_count, exchange=exchange)
    if place.holds != "policy":
        source = folder.resolve(config.critic.source) if config.critic.source else model_folder
        critic = DeepSpeedCritic(config, source, rank=place.rank, gpu=place.gpu, exchange=exchange)
    return RankWorker(config, policy, critic, rank=place.rank, rank_count=place.rank_count)


def rank_environment(config: Config, place: RankPlacement) -> dict[str, str]:
    """Return the variables of a rank's process: DeepSpeed's device, and loopback for all collectives."""
    return {
        "DS_ACCELERATOR": config.trainer.device,
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.gpu),
        "WORLD_SIZE": str(place.rank_count),
        "GLOO_SOCKET_IFNAME": "lo",
        # Who sends weights to engines on other machines names a network for it.
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
        "TOKENIZERS_PARALLELISM": "false",
    }
