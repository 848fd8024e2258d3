"""Assigns the GPUs of one machine to services, and checks before a run starts that a cluster has room for them.

Also divides a trainer among the nodes of a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from fourfold.config.placement import PlacementStrategy
from fourfold.errors import ConfigError

from .launcher import ServiceSpec

_LABEL_WIDTH: Final = 24


def assign_gpus(
    services: Sequence[ServiceSpec], gpus: Sequence[str], *, colocated: bool | None
) -> dict[str, tuple[str, ...]]:
    """Return the ids of each service's GPUs, by service.

    With `colocated = None`, services share GPUs when the machine has fewer than they ask for together. Raises
    ConfigError when the machine has too few GPUs all the same.
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
    return {s.name: tuple(gpus[index % len(gpus)] for index in s.place) for s in services if s.gpus}


def shared_gpus(assigned: Mapping[str, tuple[str, ...]]) -> dict[str, list[str]]:
    """Return the GPUs that several services use, each with the names of these services."""
    users: dict[str, list[str]] = {}
    for name, ids in assigned.items():
        for gpu in ids:
            users.setdefault(gpu, []).append(name)
    return {gpu: names for gpu, names in users.items() if len(names) > 1}


def split_trainer(trainer: ServiceSpec, rank_count: int, nodes: int) -> list[ServiceSpec]:
    """Return one process for the equal part of the ranks that each node holds, or the trainer if there is one node.

    The process with rank 0 keeps the trainer's name. `rank_count` is a multiple of `nodes`.
    """
    if nodes == 1:
        return [trainer]
    size = rank_count // nodes
    return [
        replace(
            trainer,
            name=f"{trainer.name}-ranks-{first}-{first + size - 1}" if first else trainer.name,
            trainer=trainer.name,
            ranks=range(first, first + size),
            place=trainer.place[first : first + size],
            cpus=size,
        )
        for first in range(0, rank_count, size)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Services that must be on one node because they share GPUs; or a single service."""

    services: tuple[ServiceSpec, ...]

    @property
    def name(self) -> str:
        return ", ".join(service.name for service in self.services)

    @property
    def place(self) -> tuple[int, ...]:
        """Return the sorted GPU indices of all its services."""
        return tuple(sorted({index for service in self.services for index in service.place}))

    @property
    def gpus(self) -> int:
        return len(self.place)

    @property
    def cpus(self) -> int:
        return sum(service.cpus for service in self.services)

    @property
    def shares(self) -> bool:
        """Return whether several services use its GPUs."""
        return len(self.services) > 1

    def local_indices(self, service: ServiceSpec) -> tuple[int, ...]:
        """Return the positions of the service's GPUs in `place`."""
        return tuple(self.place.index(index) for index in service.place)


def bundles(services: Sequence[ServiceSpec]) -> list[Bundle]:
    """Group services that share GPUs, directly or through others; ordered by the first service of each group."""
    found: list[list[ServiceSpec]] = []
    for service in services:
        indices = set(service.place)
        touched = [group for group in found if any(indices & set(other.place) for other in group)]
        merged = [other for group in touched for other in group] + [service]
        if touched:
            found[found.index(touched[0])] = merged
            found = [group for group in found if group not in touched[1:]]
        else:
            found.append(merged)
    return [Bundle(services=tuple(group)) for group in found]


def check_cluster_fits(
    services: Sequence[ServiceSpec], nodes: Sequence[Mapping[str, float]], strategy: PlacementStrategy = "pack"
) -> None:
    """Check that every bundle of services fits on a node under `placement.strategy`, the largest bundle first.

    Each node is its numbers "CPU" and "GPU". Raises ConfigError with a table of the services' demand and the nodes.
    """
    free = [{"CPU": node.get("CPU", 0.0), "GPU": node.get("GPU", 0.0)} for node in nodes]
    asked = bundles(services)
    where = "fits on no node of the cluster"
    if strategy == "strict_pack":
        asked, where = [_together(asked)], "fit on no node of the cluster together"
    elif strategy == "strict_spread":
        where = "finds no node of its own"
    for bundle in sorted(asked, key=lambda b: (-b.gpus, -b.cpus)):
        fitting = [node for node in free if node["GPU"] >= bundle.gpus and node["CPU"] >= bundle.cpus]
        if not fitting:
            table = demand_table(services, nodes)
            raise ConfigError(f'placement.strategy = "{strategy}": {bundle.name} {where}.\n{table}')
        # Best fit keeps nodes with many free GPUs for large services.
        best = min(fitting, key=lambda node: (node["GPU"] - bundle.gpus, node["CPU"] - bundle.cpus))
        best["GPU"] -= bundle.gpus
        best["CPU"] -= bundle.cpus
        if strategy == "strict_spread":
            free = [node for node in free if node is not best]


def _together(asked: Sequence[Bundle]) -> Bundle:
    return Bundle(services=tuple(service for bundle in asked for service in bundle.services))


def demand_table(services: Sequence[ServiceSpec], nodes: Sequence[Mapping[str, float]]) -> str:
    """Return a table of the services' demand and the nodes, and what to change in the recipe."""
    asked = bundles(services)
    width = max(_LABEL_WIDTH, *(len(f"asked  {bundle.name}") + 1 for bundle in asked))
    lines = [f"{'':{width}}{'CPU':>6}{'GPU':>6}"]
    lines += [f"{'asked  ' + bundle.name:{width}}{bundle.cpus:6d}{bundle.gpus:6d}" for bundle in asked]
    lines.append(f"{'asked  together':{width}}{sum(b.cpus for b in asked):6d}{sum(b.gpus for b in asked):6d}")
    for index, node in enumerate(nodes):
        lines.append(f"{f'have   node {index}':{width}}{node.get('CPU', 0):6.0f}{node.get('GPU', 0):6.0f}")
    lines.append(
        "Lower rollout.replicas, rollout.gpus_per_replica, trainer.ranks or critic.ranks, let services share GPUs "
        "(placement.colocated), raise placement.trainer_nodes, choose another placement.strategy, or add nodes to the "
        "cluster."
    )
    return "\n".join(lines)
