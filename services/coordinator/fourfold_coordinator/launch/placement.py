"""What a cluster sets aside for the services, and whether it fits, decided before anything waits for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fourfold.errors import ConfigError

from .launcher import ServiceSpec

_LABEL: Final = 24


def assign_gpus(
    services: Sequence[ServiceSpec], gpus: Sequence[str], *, colocated: bool | None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A service; or several that share GPUs, and so are on one node."""

    services: tuple[ServiceSpec, ...]

    @property
    def name(self) -> str:
        """Of all services."""
        return ", ".join(service.name for service in self.services)

    @property
    def place(self) -> tuple[int, ...]:
        """GPUs of all of them, by their numbers in the run."""
        return tuple(sorted({number for service in self.services for number in service.place}))

    @property
    def gpus(self) -> int:
        """How many they are."""
        return len(self.place)

    @property
    def cpus(self) -> int:
        """Of all services."""
        return sum(service.cpus for service in self.services)

    @property
    def shares(self) -> bool:
        """Whether services share its GPUs."""
        return len(self.services) > 1

    def places_of(self, service: ServiceSpec) -> tuple[int, ...]:
        """Return which of the bundle's GPUs are the service's: indices into `place`."""
        return tuple(self.place.index(number) for number in service.place)


def bundles(services: Sequence[ServiceSpec]) -> list[Bundle]:
    """Return the services, together with those that they share GPUs with, in order of the first of each."""
    found: list[list[ServiceSpec]] = []
    for service in services:
        mine = set(service.place)
        touched = [group for group in found if any(mine & set(other.place) for other in group)]
        merged = [other for group in touched for other in group] + [service]
        if touched:
            found[found.index(touched[0])] = merged
            found = [group for group in found if group not in touched[1:]]
        else:
            found.append(merged)
    return [Bundle(services=tuple(group)) for group in found]


def check_cluster_fits(services: Sequence[ServiceSpec], nodes: Sequence[Mapping[str, float]]) -> None:
    """Check that each bundle of services finds a node with its CPUs and GPUs left, the largest first.

    Args:
        services: all that will be started.
        nodes: "CPU" and "GPU" of each node.

    Raises:
        ConfigError: with a table of what is asked and what is there.
    """
    left = [{"CPU": node.get("CPU", 0.0), "GPU": node.get("GPU", 0.0)} for node in nodes]
    for bundle in sorted(bundles(services), key=lambda b: (-b.gpus, -b.cpus)):
        fitting = [node for node in left if node["GPU"] >= bundle.gpus and node["CPU"] >= bundle.cpus]
        if not fitting:
            raise ConfigError(f"{bundle.name} finds no place on the cluster.\n{table(services, nodes)}")
        # The node that it fills best: large holes stay for large services.
        best = min(fitting, key=lambda node: (node["GPU"] - bundle.gpus, node["CPU"] - bundle.cpus))
        best["GPU"] -= bundle.gpus
        best["CPU"] -= bundle.cpus


def table(services: Sequence[ServiceSpec], nodes: Sequence[Mapping[str, float]]) -> str:
    """Return what is asked beside what the cluster has, and what to change."""
    asked = bundles(services)
    width = max(_LABEL, *(len(f"asked  {bundle.name}") + 1 for bundle in asked))
    lines = [f"{'':{width}}{'CPU':>6}{'GPU':>6}"]
    lines += [f"{'asked  ' + bundle.name:{width}}{bundle.cpus:6d}{bundle.gpus:6d}" for bundle in asked]
    lines.append(f"{'asked  together':{width}}{sum(b.cpus for b in asked):6d}{sum(b.gpus for b in asked):6d}")
    for index, node in enumerate(nodes):
        lines.append(f"{f'have   node {index}':{width}}{node.get('CPU', 0):6.0f}{node.get('GPU', 0):6.0f}")
    lines.append(
        "Lower rollout.replicas, rollout.gpus_per_replica, trainer.ranks or critic.ranks, let services share GPUs "
        "(placement.colocated), or add nodes to the cluster."
    )
    return "\n".join(lines)
