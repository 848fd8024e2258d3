"""Defines the `Launcher` interface, and the launcher that runs services as child processes on this machine."""

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
    """A service process that a recipe asks for."""

    role: str
    name: str  # name of the process: the member id, except for ranks whose rank 0 is on another node
    place: tuple[int, ...] = ()  # indices of its GPUs within the run; services with the same index share that GPU
    scorer: str = ""  # for a reward service: the name of its table
    pool: str = ""  # for a rollout service: the name of its table
    gpu: str = ""  # type of its GPUs; empty: any
    cpus: int = 1  # CPUs that a cluster scheduler reserves; no process is pinned
    ranks: range | None = None  # for a trainer on several nodes: the ranks of this process
    trainer: str = ""  # member id of the trainer that has `ranks`

    @property
    def gpus(self) -> int:
        return len(self.place)

    @property
    def member_id(self) -> str:
        return self.trainer or self.name


class Launcher(Protocol):
    """Starts processes somewhere. No method blocks, except `stop`."""

    def start(self, service: ServiceSpec, command: Command) -> None:
        """Start or restart a process."""

    def deaths(self) -> list[Death]:
        """Return the deaths since the last call, ordered by time."""

    def is_ready(self, name: str) -> bool:
        """Return whether the process has printed its READY line."""

    def obstacle(self, name: str) -> str:
        """Return the printed reason why a started process is not ready; empty: none is known."""

    def is_placed(self, name: str) -> bool:
        """Return whether a machine has the process; False while a cluster has no room for it."""

    def stop(self) -> None:
        """End all processes and their descendants within 3 seconds."""

    def kill(self) -> None:
        """Kill all processes and their descendants immediately."""


class LocalLauncher:
    """A `Launcher` that starts child processes on loopback."""

    def __init__(self, *, run_dir: Path, gpus: Mapping[str, tuple[str, ...]]) -> None:
        """Create the launcher; `gpus` has each service's GPU ids, from `assign_gpus`."""
        self._gpus = gpus
        self._supervisor = Supervisor(run_dir / "logs")
        self.deaths, self.is_ready = self._supervisor.deaths, self._supervisor.is_ready
        self.obstacle = self._supervisor.obstacle
        self.stop, self.kill = self._supervisor.stop, self._supervisor.kill

    def start(self, service: ServiceSpec, command: Command) -> None:
        # A service without GPUs must see none, because libraries use every GPU that they see.
        env = {**command.env, **gpu_environment(self._gpus.get(service.name, ()))}
        self._supervisor.start(dataclasses.replace(command, env=env))

    def is_placed(self, name: str) -> bool:
        return True
