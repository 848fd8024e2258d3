"""Keeps the ranks of other machines, in rank 0's process: checks who may attach, and holds and ends their byte streams.

    machine with ranks 8-15 --AttachRanks--> service loop --socket pairs--> engine thread (RankChannel for each rank)

The engine thread waits until all ranks are attached, or until there are enough of them and the time is up. From then on
the end of one stream ends the engine, and machines that attach later are noted and wait.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from fourfold.errors import DeadlinePassed, PermissionDenied, Unavailable, WrongState
from fourfold.trainer.v1 import rank_service_pb2 as pb

_SECRET_BYTES: Final = 32
# A machine that waits asks again every second.
_CALL_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttachedRanks:
    """The ranks of one machine, and this process's two ends of each stream."""

    ranks: range
    host: str  # name of the machine
    host_id: str
    streams: dict[int, socket.socket]  # by rank, for the service loop; not blocking
    engine_ends: dict[int, socket.socket]  # by rank, for `RankChannel`

    @property
    def title(self) -> str:
        return f"{describe(self.ranks)} on {self.host}"


class RemoteRanks:
    """The ranks [held, rank_count) of a trainer whose process with rank 0 holds the ranks below. Thread-safe."""

    def __init__(
        self,
        held: int,
        rank_count: int,
        *,
        least: int = 0,
        unit: int = 1,
        version: str,
        model_sha256: bytes,
        on_death: Callable[[str], None],
    ) -> None:
        """Expect the ranks.

        Args:
            least: fewest ranks, `held` ones included, that do without the others; 0: all are needed.
            unit: the number of ranks must be a multiple of it.
            version, model_sha256: of this process; a machine with others is refused.
            on_death: called once, with the reason, when a stream has ended of the ranks that `wait` returned.
        """
        self.secret = secrets.token_bytes(_SECRET_BYTES)
        self.death = ""
        self._held, self._rank_count, self._least, self._unit = held, rank_count, least or rank_count, unit
        self._version, self._model_sha256, self._on_death = version, model_sha256, on_death
        self._attached: list[AttachedRanks] = []
        self._group: list[AttachedRanks] | None = None  # the result of `wait`
        self._waiting: dict[range, float] = {}  # machines that came later, by time of their last call (monotonic)
        self._changed = threading.Condition()
        self._closed = False
        self.on_close: list[Callable[[], object]] = []
        """Called when rank 0 begins to end in good order, from any thread."""

    def attach(self, hello: pb.RanksHello) -> AttachedRanks:
        """Attach the ranks of a machine.

        Raises:
            PermissionDenied: the secret is not that of this process.
            WrongState: version or model differ, or the ranks are not free.
        """
        if not hmac.compare_digest(hello.secret, self.secret):
            raise PermissionDenied("the secret is not that of this rank 0; ask the coordinator for the present one")
        ranks = range(hello.first_rank, hello.last_rank + 1)
        with self._changed:
            self._check(hello, ranks)
            pairs = {rank: socket.socketpair() for rank in ranks}
            for stream, _ in pairs.values():
                stream.setblocking(False)
            attached = AttachedRanks(
                ranks=ranks,
                host=hello.host,
                host_id=hello.host_id,
                streams={rank: pair[0] for rank, pair in pairs.items()},
                engine_ends={rank: pair[1] for rank, pair in pairs.items()},
            )
            self._attached.append(attached)
            self._changed.notify_all()
        return attached

    def detach(self, attached: AttachedRanks, reason: str) -> None:
        """End the streams of a machine; `reason` is for users."""
        with self._changed:
            used = attached in (self._group or ())
            self._attached.remove(attached)
            first = used and not self.death and not self._closed
            if first:
                self.death = f"{attached.title}: {reason}"
            self._changed.notify_all()
        # The other ends belong to the engine when it has them: another thread may use them now.
        for stream in (*attached.streams.values(), *(() if used else attached.engine_ends.values())):
            stream.close()
        if first:
            self._on_death(self.death)

    def wait(self, *, timeout: float) -> list[AttachedRanks]:
        """Return the machines that train, ordered by rank: all of them, or, if ranks are missing, the attached ones.

        Raises:
            DeadlinePassed: too few are there after `timeout` seconds.
            Unavailable: `close` was called.
        """
        end = time.monotonic() + timeout
        with self._changed:
            while self._missing() and (left := end - time.monotonic()) > 0:
                if self._closed:
                    raise Unavailable("the trainer is stopped while it waits for ranks")
                self._changed.wait(left)
            ordered = sorted(self._attached, key=lambda machine: machine.ranks.start)
            group = [ordered[index] for index in self._most([len(machine.ranks) for machine in ordered])]
            if (count := self._count(group)) < self._least or count % self._unit:
                fewest = "" if self._least == self._rank_count else f", and trainer.min_ranks = {self._least}"
                raise DeadlinePassed(
                    f"ranks {', '.join(map(str, self._missing()))} did not attach within trainer.attach_seconds = "
                    f"{timeout:g}{fewest}; start them with `fourfold serve trainer RECIPE --rank FIRST-LAST "
                    f"--coordinator HOST:PORT`, and look at the logs of those that run"
                )
            self._group = group
            unused = [attached for attached in self._attached if attached not in group]
        for attached in unused:  # the end of their streams ends their calls; they ask again and wait
            for stream in attached.engine_ends.values():
                stream.close()
        return group

    def wait_for_death(self, *, timeout: float) -> bool:
        """Return whether a machine of the group is lost, after at most `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self.death) or self._closed or self._group is None, timeout)
            return bool(self.death)

    @property
    def title(self) -> str:
        """Return the ranks that train, for users."""
        return ", ".join([describe(range(self._held)), *(describe(machine.ranks) for machine in self._group or ())])

    @property
    def can_grow(self) -> bool:
        """Return whether the waiting machines would allow training with more ranks."""
        with self._changed:
            newest = time.monotonic() - _CALL_SECONDS
            waiting = [len(ranks) for ranks, called in self._waiting.items() if called > newest]
            sizes = [*(len(machine.ranks) for machine in self._group or ()), *waiting]
            found = self._held + sum(sizes[index] for index in self._most(sizes))
            return self._group is not None and found > self._count(self._group)

    def end(self, reason: str) -> None:
        """End the group as the loss of a machine does: its machines wait for the next rank 0."""
        with self._changed:
            self.death = self.death or reason

    def close(self) -> None:
        """Let `wait` return; later ends of streams are no deaths."""
        with self._changed:
            calls, self._closed = [] if self._closed or self.death else list(self.on_close), True
            self._changed.notify_all()
        for call in calls:
            call()

    def _count(self, group: Sequence[AttachedRanks]) -> int:
        return self._held + sum(len(attached.ranks) for attached in group)

    def _most(self, sizes: Sequence[int]) -> list[int]:
        """Return the indices of the machines with the most ranks whose number fits; `sizes` are ranks of each."""
        best: dict[int, list[int]] = {self._held % self._unit: []}  # by remainder
        for index, size in enumerate(sizes):
            for remainder, chosen in list(best.items()):
                after, longer = (remainder + size) % self._unit, [*chosen, index]
                if after not in best or sum(sizes[i] for i in longer) > sum(sizes[i] for i in best[after]):
                    best[after] = longer
        return best.get(0, [])

    def _missing(self) -> list[int]:
        there = {rank for attached in self._attached for rank in attached.ranks}
        return [rank for rank in range(self._held, self._rank_count) if rank not in there]

    def _check(self, hello: pb.RanksHello, ranks: range) -> None:
        if self._closed or self.death:
            raise WrongState("this rank 0 is ending; ask the coordinator for the next one", reason="ENDING")
        if hello.version != self._version:
            raise WrongState(
                f"the ranks have Fourfold {hello.version!r:.40}, rank 0 has {self._version!r}; install the same version"
            )
        if hello.model_sha256 != self._model_sha256:
            raise WrongState(
                "the ranks have another model than rank 0: names or sizes of its files, or its config.json, differ; "
                "copy the model folder"
            )
        if not ranks or ranks.start < self._held or ranks.stop > self._rank_count:
            raise WrongState(
                f"{describe(ranks)} do not fit: rank 0's machine holds {describe(range(self._held))}, and "
                f"trainer.ranks = {self._rank_count}; give the other ranks to the other machines"
            )
        if taken := sorted(set(ranks) - set(self._missing())):
            raise WrongState(f"rank {taken[0]} is attached already; each rank is started once", reason="RANK_TAKEN")
        if self._group is not None:
            self._waiting[ranks] = time.monotonic()
            raise WrongState(
                f"{self.title} train without {describe(ranks)}, which are taken in after the next checkpoint",
                reason="LATER",
            )


def describe(ranks: range) -> str:
    """Return "rank 8" or "ranks 8-15"."""
    return f"rank {ranks.start}" if len(ranks) == 1 else f"ranks {ranks.start}-{ranks.stop - 1}"
