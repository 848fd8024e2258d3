"""Runs the processes of a run as children on this machine, on loopback, and deals out its GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fourfold.host.hardware import gpu_environment
from fourfold.host.postmortem import Death
from fourfold.host.process import Command, Supervisor


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """One process slot of a run."""

    role: str
    name: str
    """Member id."""
    place: tuple[int, ...] = ()
    """Its GPUs, by their numbers in the run; services with one number share that GPU."""
    cpus: int = 1
    """What a cluster scheduler sets aside; nothing is pinned."""

    @property
    def gpus(self) -> int:
        """How many it has."""
        return len(self.place)


class Launcher(Protocol):
    """Where processes run. Calls return at once, except `stop`."""

    def start(self, service: ServiceSpec, command: Command) -> None:
        """Start a process, or start it again."""

    def deaths(self) -> list[Death]:
        """Return the deaths since the last call, the first one first."""

    def is_ready(self, name: str) -> bool:
        """Return whether the process has printed its READY line."""

    def stop(self) -> None:
        """End everything within 3 seconds, descendants included."""

    def kill(self) -> None:
        """End everything now."""


class LocalLauncher:
    """A `Launcher` of child processes."""

    def __init__(self, *, run_dir: Path, gpus: Mapping[str, tuple[str, ...]]) -> None:
        """Prepare; nothing is started yet.

        Args:
            run_dir: logs go to its folder `logs`.
            gpus: what `assign_gpus` says.
        """
        self._gpus = gpus
        self._supervisor = Supervisor(run_dir / "logs")

    def start(self, service: ServiceSpec, command: Command) -> None:
        """Start a child, or start it again."""
        # A service that asks for none must not see any: libraries would move to them.
        env = {**command.env, **gpu_environment(self._gpus.get(service.name, ()))}
        self._supervisor.start(dataclasses.replace(command, env=env))

    def deaths(self) -> list[Death]:
        """Return the deaths since the last call."""
        return self._supervisor.deaths()

    def is_ready(self, name: str) -> bool:
        """Return whether the child has printed its READY line."""
        child = self._supervisor.children.get(name)
        return child is not None and child.alive and child.poll_ready()

    def stop(self) -> None:
        """End all children and their descendants."""
        self._supervisor.stop()

    def kill(self) -> None:
        """End them now."""
        self._supervisor.kill()
