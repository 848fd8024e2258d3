"""Whether services fit on a cluster, decided before anything waits for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fourfold.errors import ConfigError

from .fleet import Service


def refuse_unless_fits(services: Sequence[Service], nodes: Sequence[Mapping[str, float]]) -> None:
    """Check that each service finds a node with its CPUs and GPUs left, the largest first.

    Args:
        services: one bundle each.
        nodes: "CPU" and "GPU" of each node.

    Raises:
        ConfigError: with a table of what is asked and what is there.
    """
    left = [{"CPU": node.get("CPU", 0.0), "GPU": node.get("GPU", 0.0)} for node in nodes]
    for service in sorted(services, key=lambda s: (-s.gpus, -s.cpus)):
        fitting = [node for node in left if node["GPU"] >= service.gpus and node["CPU"] >= service.cpus]
        if not fitting:
            raise ConfigError(f"{service.name} finds no place on the cluster.\n{table(services, nodes)}")
        # The node that it fills best: large holes stay for large services.
        best = min(fitting, key=lambda node: (node["GPU"] - service.gpus, node["CPU"] - service.cpus))
        best["GPU"] -= service.gpus
        best["CPU"] -= service.cpus


def table(services: Sequence[Service], nodes: Sequence[Mapping[str, float]]) -> str:
    """Return what is asked beside what the cluster has, and what to change."""
    lines = [f"{'':24}{'CPU':>6}{'GPU':>6}"]
    lines += [f"{'asked  ' + service.name:24}{service.cpus:6d}{service.gpus:6d}" for service in services]
    lines.append(f"{'asked  together':24}{sum(s.cpus for s in services):6d}{sum(s.gpus for s in services):6d}")
    for index, node in enumerate(nodes):
        lines.append(f"{f'have   node {index}':24}{node.get('CPU', 0):6.0f}{node.get('GPU', 0):6.0f}")
    lines.append(
        "Lower rollout.replicas, rollout.gpus_per_replica, trainer.ranks or critic.ranks, or add nodes to the cluster."
    )
    return "\n".join(lines)
