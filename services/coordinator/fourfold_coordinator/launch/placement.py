"""Assigns the GPUs of one machine to services, and checks before a run starts that a cluster has room for them.

Also divides a trainer among the nodes of a cluster.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from fourfold.config.placement import PlacementStrategy
from fourfold.errors import ConfigError
from fourfold.host.hardware import Gpu

from .launcher import ServiceSpec

_LABEL_WIDTH: Final = 24
# Every Ray node with GPUs has 1 of this resource, which names their type, and a service takes as little of it as a Ray
# actor with `accelerator_type`.
_TYPE_PREFIX: Final = "accelerator_type:"
_TYPE_SHARE: Final = 0.001


def assign_gpus(
    services: Sequence[ServiceSpec], gpus: Sequence[Gpu], *, colocated: bool | None
) -> dict[str, tuple[str, ...]]:
    """Return the ids of each service's GPUs, by service.

    With `colocated = None`, services share GPUs when the machine has fewer than they ask for together. Raises
    ConfigError when the machine has too few GPUs all the same, or too few of a type.
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
    chosen = _choose(services, gpus, share=colocated is None)
    return {s.name: tuple(chosen[index].id for index in s.place) for s in services if s.gpus}


def _choose(services: Sequence[ServiceSpec], gpus: Sequence[Gpu], *, share: bool) -> dict[int, Gpu]:
    """Return a GPU of this machine for each GPU index of the run; assign the types with the fewest GPUs first."""
    fitting = {s.gpu: [gpu for gpu in gpus if is_of_type(gpu.name, s.gpu)] for s in services if s.gpus}
    chosen: dict[int, Gpu] = {}
    for kind, found in sorted(fitting.items(), key=lambda item: (not item[0], len(item[1]))):
        users = [service for service in services if service.gpus and service.gpu == kind]
        indices = sorted({index for service in users for index in service.place} - set(chosen))
        largest = max(len(set(service.place) - set(chosen)) for service in users)
        free = [gpu for gpu in found if gpu not in chosen.values()]
        if share and len(free) < largest:
            free = found
        if len(free) < (largest if share else len(indices)):
            counts = Counter(gpu.name for gpu in gpus)
            raise ConfigError(
                f"{', '.join(service.name for service in users)}: {len(indices)} GPUs of type {kind!r} are needed, and "
                f"this machine offers {', '.join(f'{count} x {name}' for name, count in counts.items())}; change `gpu` "
                f"in the recipe, or see `fourfold doctor`"
            )
        chosen |= {index: free[number % len(free)] for number, index in enumerate(indices)}
    return chosen


def is_of_type(name: str, kind: str) -> bool:
    """Return whether a GPU with this product name is of the type: "NVIDIA H100 80GB HBM3" is an "H100"."""
    return not kind or set(_words(kind)) <= set(_words(name))


def _words(text: str) -> list[str]:
    return re.split(r"[ _-]+", text)


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
    def gpu_types(self) -> list[str]:
        """Return the types of GPUs that its services ask for; a node of Ray has one."""
        return sorted({service.gpu for service in self.services} - {""})

    @property
    def resources(self) -> dict[str, float]:
        """Return what Ray must reserve: CPUs, GPUs, and a share of the type that Ray gives to each node."""
        found: dict[str, float] = {"CPU": self.cpus}
        if self.gpus:
            found["GPU"] = self.gpus
        return found | {f"{_TYPE_PREFIX}{kind}": _TYPE_SHARE for kind in self.gpu_types}

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

    Each node is its Ray resources: the numbers "CPU" and "GPU", and "accelerator_type:TYPE". Raises ConfigError with a
    table of the services' demand and the nodes.
    """
    free = [dict(node) for node in nodes]
    asked = bundles(services)
    where = "fits on no node of the cluster"
    if strategy == "strict_pack":
        asked, where = [_together(asked)], 'fit on no node of the cluster together (placement.strategy = "strict_pack")'
    elif strategy == "strict_spread":
        where = 'finds no node of its own (placement.strategy = "strict_spread")'
    # Place bundles with a GPU type first; the others may use any node.
    for bundle in sorted(asked, key=lambda b: (not b.gpu_types, -b.gpus, -b.cpus)):
        wanted = bundle.resources
        fitting = [node for node in free if all(node.get(key, 0.0) >= count for key, count in wanted.items())]
        if not fitting:
            table = demand_table(services, nodes)
            raise ConfigError(f"{bundle.name} {where}.\n{table}")
        # Best fit keeps nodes with many free GPUs for large services.
        best = min(fitting, key=lambda node: (node.get("GPU", 0.0) - bundle.gpus, node["CPU"] - bundle.cpus))
        for key, count in wanted.items():
            best[key] -= count
        if strategy == "strict_spread":
            free = [node for node in free if node is not best]


def _together(asked: Sequence[Bundle]) -> Bundle:
    return Bundle(services=tuple(service for bundle in asked for service in bundle.services))


def demand_table(services: Sequence[ServiceSpec], nodes: Sequence[Mapping[str, float]]) -> str:
    """Return a table of the services' demand and the nodes, and what to change in the recipe."""
    asked = bundles(services)
    width = max(_LABEL_WIDTH, *(len(f"asked  {bundle.name}") + 1 for bundle in asked))
    typed = any(bundle.gpu_types for bundle in asked)

    def line(label: str, cpus: float, gpus: float, types: Sequence[str] = ()) -> str:
        return f"{label:{width}}{cpus:6.0f}{gpus:6.0f}  {', '.join(types) if typed else ''}".rstrip()

    lines = [f"{'':{width}}{'CPU':>6}{'GPU':>6}{'  type' if typed else ''}"]
    lines += [line(f"asked  {bundle.name}", bundle.cpus, bundle.gpus, bundle.gpu_types) for bundle in asked]
    lines.append(line("asked  together", sum(b.cpus for b in asked), sum(b.gpus for b in asked)))
    for index, node in enumerate(nodes):
        lines.append(line(f"have   node {index}", node.get("CPU", 0), node.get("GPU", 0), _types(node)))
    lines.append(
        "Lower rollout.replicas, rollout.gpus_per_replica, trainer.ranks or critic.ranks, let services share GPUs "
        "(placement.colocated), raise placement.trainer_nodes, choose another placement.strategy, or add nodes to the "
        "cluster."
    )
    return "\n".join(lines)


def _types(node: Mapping[str, float]) -> list[str]:
    return sorted(key.removeprefix(_TYPE_PREFIX) for key in node if key.startswith(_TYPE_PREFIX))
