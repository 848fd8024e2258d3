"""Runs the processes of a run as children on this machine, on loopback, and deals out its GPUs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from fourfold.errors import ConfigError
from fourfold.postmortem import Death
from fourfold.process import Command, Supervisor

from .fleet import Service


class LocalLauncher:
    """A `Launcher` of child processes."""

    def __init__(self, services: Sequence[Service], *, run_dir: Path, gpus: Sequence[str]) -> None:
        """Deal out the GPUs; nothing is started yet.

        Args:
            services: all that will be started.
            run_dir: logs go to its folder `logs`.
            gpus: ids for CUDA_VISIBLE_DEVICES that may be used.

        Raises:
            ConfigError: a service asks for more GPUs than there are.
        """
        self._gpus = assign_gpus(services, gpus)
        self._has_gpus = bool(gpus)
        self._supervisor = Supervisor(run_dir / "logs")

    def start(self, service: Service, command: Command) -> None:
        """Start a child, or start it again."""
        if self._has_gpus:
            # A service that asks for none must not see any: libraries would move to them.
            env = {**command.env, "CUDA_VISIBLE_DEVICES": ",".join(self._gpus.get(service.name, ()))}
            command = dataclasses.replace(command, env=env)
        self._supervisor.start(command)

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


def visible_gpus(count: int) -> list[str]:
    """Return the ids of the GPUs that this process may use: those of CUDA_VISIBLE_DEVICES, else all `count`."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [part.strip() for part in named.split(",") if part.strip()]
    return [str(index) for index in range(count)]


def assign_gpus(services: Sequence[Service], gpus: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Give each service its GPUs, in order; services share when there are fewer than all of them ask for.

    Raises:
        ConfigError: one service alone asks for more than there are.
    """
    assigned: dict[str, tuple[str, ...]] = {}
    position = 0
    for service in services:
        if service.gpus > len(gpus):
            raise ConfigError(
                f"{service.name} asks for {service.gpus} GPUs and this machine offers {len(gpus)}; lower "
                f"rollout.gpus_per_replica, trainer.ranks or critic.ranks, set trainer.device = `cpu`, or see "
                f"`fourfold doctor`"
            )
        if service.gpus:
            assigned[service.name] = tuple(gpus[(position + i) % len(gpus)] for i in range(service.gpus))
            position += service.gpus
    return assigned


def shared_gpus(assigned: dict[str, tuple[str, ...]]) -> dict[str, list[str]]:
    """Return the GPUs that several services were given, with those services."""
    users: dict[str, list[str]] = {}
    for name, ids in assigned.items():
        for gpu in ids:
            users.setdefault(gpu, []).append(name)
    return {gpu: names for gpu, names in users.items() if len(names) > 1}
