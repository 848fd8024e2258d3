"""Starts the ranks of one process group, sends each command to all of them, watches them, and ends them.

    engine thread            rank 1                         rank 2 ...
    -------------            ------                         ------
    send command  ---------> reader thread -> queue
    run it here              main thread runs it            (collectives join all ranks)
      send batches  -------> reader thread -> queue         (when rank 0 reads its own ones)
    receive answers <------- send answer

Rank 0 of the policy is in this process. All ranks of a critic with GPUs of its own are children, because a process can
be in only one process group of DeepSpeed. Ranks on other machines attach to this process (`remote_ranks.py`). Without
such ranks, nothing here listens on a network, and gloo and NCCL are bound to loopback.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final, TypeAlias

from fourfold.config import Config
from fourfold.errors import ConfigError, DeadlinePassed, FourfoldError, Unavailable
from fourfold_trainer.batches import Array, MicroBatch, to_arrays
from fourfold_trainer.engine import EngineFailedError
from fourfold_trainer.ranks.loading import make_worker
from fourfold_trainer.ranks.local_ranks import PROGRAM, WATCH_SECONDS, LocalRanks
from fourfold_trainer.ranks.placement import RankPlacement
from fourfold_trainer.ranks.rank_channel import BATCH, RankChannel, RankMessage
from fourfold_trainer.ranks.rank_worker import RankWorker, read_error
from fourfold_trainer.ranks.remote_ranks import AttachedRanks, RemoteRanks
from fourfold_trainer.zero.rendezvous_store import file_rendezvous

Shares: TypeAlias = Sequence[Sequence[MicroBatch]]
"""The micro-batches of each rank."""

# A rank has its next micro-batch when it ends one.
_BATCHES_AHEAD: Final = 1
# A peer that died is often the cause of an error on this rank. Wait this long for the watcher to report its death.
_BLAME_SECONDS: Final = 2.0
# Commands that change weights, optimizers or gradients.
_CHANGING: Final = frozenset(
    {
        "update_policy",
        "update_critic",
        "keep_gradient",
        "compare_gradient",
        "forward_backward",
        "optim_step",
        "discard_gradient",
        "restore",
    }
)
# Errors that the death of a peer can cause: of the channel, and of collectives (torch raises RuntimeError).
_PEER_ERRORS: Final = (FourfoldError, RuntimeError, OSError)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherMachines:
    """The ranks of a group that are on other machines, and where all ranks of the group meet."""

    remote: RemoteRanks
    held: int  # ranks of this machine
    attached: Sequence[AttachedRanks]  # at least one, in order; all of them after this machine's
    store_address: str  # address of the process group's store, which every machine reaches

    @property
    def machines(self) -> list[range]:
        """Return the ranks of each machine, those of this one first.

        The numbers have no gaps: if a machine is missing, later ranks have lower numbers here.
        """
        found = [range(self.held)]
        for machine in self.attached:
            found.append(range(found[-1].stop, found[-1].stop + len(machine.ranks)))
        return found

    @property
    def connections(self) -> dict[int, socket.socket]:
        """Return the engine's end of each rank's stream."""
        ends = [end for machine in self.attached for _, end in sorted(machine.engine_ends.items())]
        return dict(enumerate(ends, self.held))


class RankProcesses:
    """All ranks of one group. One thread at a time uses it; always the same one if rank 0 is in this process."""

    # Arguments of a child's interpreter; the path of the socket is the last one.
    _program: ClassVar[tuple[str, ...]] = PROGRAM

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
        others: OtherMachines | None = None,
    ) -> None:
        """Start the children. Call `load_local_rank` next if there is one, then `wait_loaded`.

        Args:
            model_folder: of the policy, a Hugging Face causal LM.
            places: of all ranks, in order.
            has_local_rank: rank 0 is in this process.
            run_dir: the children write their logs into its folder `logs`.
            name: of the group; a part of the logs' names.
            on_death: called once, from another thread, with the reason, when a child has died.
            others: of the ranks that are on other machines.
        """
        self._config, self._model_folder, self._run_dir = config, model_folder, run_dir
        self._places = places
        self._timeout = config.trainer.step_timeout_seconds
        self._local = LocalRanks(run_dir=run_dir, name=name, on_death=on_death)
        self._remote = None if others is None else others.remote
        self._store_address = file_rendezvous(self._local.scratch.path) if others is None else others.store_address
        self.worker: RankWorker | None = None  # rank 0, if it is in this process
        self.channels: list[RankChannel] = []  # to the other ranks
        self.change_count = 0  # number of commands that have begun to change models
        self._sequence = 0
        away = {} if others is None else others.connections
        children = [place for place in places[has_local_rank:] if place.rank not in away]
        with self._starting():
            if children:
                ranks = [place.rank for place in children]
                self._connect(children, self._local.start(ranks, timeout=self._timeout, program=self._program))
            self._connect([place for place in places if place.rank in away], list(away.values()))

    def load_local_rank(self) -> None:
        """Load the models of rank 0 in this process, while the other ranks load theirs."""
        with self._starting():
            self.worker = make_worker(
                self._config,
                self._model_folder,
                self._places[0],
                store_address=self._store_address,
                run_dir=self._run_dir,
            )

    def wait_loaded(self) -> None:
        """Wait until the other ranks have loaded their models. Raises FourfoldError if a rank cannot start."""
        with self._starting():
            self._collect(0, self._timeout)
        self._local.loaded.set()

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
        self._stop_watching()
        for channel in self.channels:
            channel.send(RankMessage(name="close"))
        if self.worker is not None:
            self.worker.close()

    def close(self) -> None:
        """End all ranks. Any thread may call this."""
        self._stop_watching()
        for channel in self.channels:
            channel.close()
        self._local.close()

    @property
    def _death(self) -> str:
        """Return why a rank has died, or an empty string."""
        return self._local.death or (self._remote.death if self._remote is not None else "")

    def _stop_watching(self) -> None:
        self._local.closing.set()
        if self._remote is not None:
            self._remote.close()

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

    def _connect(self, places: Sequence[RankPlacement], connections: Sequence[socket.socket]) -> None:
        """Let ranks begin to load."""
        start = {
            "config": self._config.model_dump(mode="json"),
            "model_folder": str(self._model_folder),
            "store_address": self._store_address,
            "run_dir": str(self._run_dir),
        }
        for place, connection in zip(places, connections, strict=True):
            self.channels.append(channel := RankChannel(connection))
            channel.send(RankMessage(name="start", fields={**start, "place": asdict(place)}))

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
            time.sleep(WATCH_SECONDS / 4)
        return self._death


class SharedBatches:
    """Rank 0's micro-batches, as arrays. The other ranks get theirs when rank 0 reads its own, one ahead of it.

    Together they would take four times the memory of the samples, in rank 0 and in the other ranks.
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
        """Send the rest that rank 0 did not read after an error. Raises Unavailable if a channel broke before."""
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
