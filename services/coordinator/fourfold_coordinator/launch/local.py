"""Runs the processes of a run as children on this machine, on loopback, and deals out its GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from fourfold.errors import ConfigError
from fourfold.host.gpus import environment
from fourfold.host.postmortem import Death
from fourfold.host.process import Command, Supervisor

from .fleet import Service


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

    def start(self, service: Service, command: Command) -> None:
        """Start a child, or start it again."""
        # A service that asks for none must not see any: libraries would move to them.
        env = {**command.env, **environment(self._gpus.get(service.name, ()))}
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


def assign_gpus(
    services: Sequence[Service], gpus: Sequence[str], *, colocated: bool | None
) -> dict[str, tuple[str, ...]]:
    """Give each service its GPUs.

    Where `colocated` is None, services also share GPUs when there are fewer than all of them ask for.

    Raises:
        ConfigError: there are fewer than that needs.
    """
    for service in services:
        if service.gpus > len(gpus):
            raise ConfigError(
                f"{service.name} asks for {service.gpus} GPU{'s' if service.gpus > 1 else ''} and this machine offers "
                f"{len(gpus)}; lower rollout.gpus_per_replica, trainer.ranks or critic.ranks, set trainer.device = "
                f'"cpu", or see `fourfold doctor`'
            )
    needed = max((service.place[-1] + 1 for service in services if service.gpus), default=0)
    if colocated is not None and needed > len(gpus):
        how, fix = ("share GPUs", "lower rollout.replicas") if colocated else ("have their own", "set it to true")
        raise ConfigError(
            f"placement.colocated = {str(colocated).lower()}: services {how} and ask for {needed} GPUs, this machine "
            f"offers {len(gpus)}; {fix}, or see `fourfold doctor`"
        )
    return {s.name: tuple(gpus[number % len(gpus)] for number in s.place) for s in services if s.gpus}


def shared_gpus(assigned: dict[str, tuple[str, ...]]) -> dict[str, list[str]]:
    """Return the GPUs that several services were given, with those services."""
    users: dict[str, list[str]] = {}
    for name, ids in assigned.items():
        for gpu in ids:
            users.setdefault(gpu, []).append(name)
    return {gpu: names for gpu, names in users.items() if len(names) > 1}
