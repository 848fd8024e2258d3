"""Starts the ranks of this machine as child processes, each at the end of a Unix socket, watches them and ends them.

Children connect to a socket in a private folder. Each end carries messages of `rank_channel.py`: between rank 0 and its
own children directly, and through a call of RankService where rank 0 is on another machine.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from fourfold.errors import DeadlinePassed, Unavailable
from fourfold.host.process import Command, Supervisor
from fourfold.host.scratch import Scratch

PROGRAM: Final = ("-m", "fourfold_trainer.ranks.main")
"""Arguments of a child's interpreter; the path of the socket is the last one."""
NAME_VARIABLE: Final = "FOURFOLD_RANK_NAME"
"""Variable with the name of a child. Its log has "NAME: reason" when it ends (`fourfold.host.postmortem`)."""
WATCH_SECONDS: Final = 0.2
# A rank has nothing to finish: it exits when its channel ends.
_STOP_SECONDS: Final = 0.2
_END_SECONDS: Final = 5.0


class LocalRanks:
    """Child processes. The thread that starts them must live as long: the kernel ties a child to its thread."""

    def __init__(self, *, run_dir: Path, name: str, on_death: Callable[[str], None]) -> None:
        """Start nothing yet.

        Args:
            run_dir: the children write their logs into its folder `logs`.
            name: of the group; a part of the logs' names.
            on_death: called once, from another thread, with the reason, when a child has died before `closing` is set.
        """
        self.scratch = Scratch("ranks")
        self.loaded = threading.Event()
        """Set it when the children have loaded their models: the text about a death then differs."""
        self.closing = threading.Event()
        self.death = ""
        self._name, self._on_death = name, on_death
        self._supervisor = Supervisor(run_dir / "logs")

    def start(
        self,
        ranks: Sequence[int],
        *,
        timeout: float,
        program: Sequence[str] = PROGRAM,
        env: Mapping[str, str] | None = None,
    ) -> list[socket.socket]:
        """Start a child for each rank; return the connections in the same order.

        Args:
            timeout: seconds until all children are connected.
            program: arguments of the interpreter, without the path of the socket.
            env: variables of the children.

        Raises:
            Unavailable: a child died.
            DeadlinePassed: a child did not connect.
        """
        path = self.scratch.path / "channel"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(len(ranks))
            # The child must find this package in the way in which this process did.
            found = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
            started = [
                self._supervisor.start(
                    Command(
                        name=f"{self._name}-rank-{rank}",
                        argv=(sys.executable, *program, str(path)),
                        env={**(env or {}), **found, NAME_VARIABLE: f"{self._name}-rank-{rank}"},
                    )
                )
                for rank in ranks
            ]
            threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()
            by_pid = self._accept(listener, {child.pid for child in started}, ranks, timeout)
        return [by_pid[child.pid] for child in started]

    def wait_ended(self) -> bool:
        """Wait a moment for the children to end; return whether all of them ended with exit code 0."""
        children = list(self._supervisor.children.values())
        end = time.monotonic() + _END_SECONDS
        while any(child.alive for child in children) and time.monotonic() < end:
            time.sleep(WATCH_SECONDS / 4)
        deaths = [child.death for child in children]
        return all(death is not None and not death.signal and not death.exit_code for death in deaths)

    def close(self) -> None:
        """End all children. Any thread may call this."""
        self.closing.set()
        self._supervisor.stop(_STOP_SECONDS)
        self.scratch.remove()

    def _accept(
        self, listener: socket.socket, pids: set[int], ranks: Sequence[int], timeout: float
    ) -> dict[int, socket.socket]:
        """Return the connections of our children, by pid; refuse connections of other processes."""
        found: dict[int, socket.socket] = {}
        end = time.monotonic() + timeout
        listener.settimeout(WATCH_SECONDS)
        while len(found) < len(pids):
            if self.death:
                raise Unavailable(self.death)
            if time.monotonic() > end:
                raise DeadlinePassed(f"ranks {list(ranks)} did not start within {timeout:.0f} s")
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            pid = int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)
            if pid in pids:
                found[pid] = connection
            else:
                connection.close()
        return found

    def _watch(self) -> None:
        """Report the first death of a child, because the other ranks would wait for it in a collective."""
        while not self.closing.wait(WATCH_SECONDS):
            if deaths := self._supervisor.deaths():
                # A rank prints no READY line; it is ready when all ranks have loaded their models.
                self.death = replace(deaths[0], was_ready=self.loaded.is_set()).explain()
                if not self.closing.is_set():
                    self._on_death(self.death)
                return
