"""Defines `[placement]`: which services share GPUs, and the numbers of the GPUs that each service gets.

    own GPUs        rollout-0: 0   rollout-1: 1   trainer-0: 2, 3   reference-0: 4   reward-0: 5
    colocated       rollout-0: 0   rollout-1: 1   trainer-0: 0, 1   reference-0: 0   reward-0: 0

The numbers count the GPUs of the run from 0. A launcher maps them to the GPUs of its machines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from pydantic import Field

from fourfold.table import Table

if TYPE_CHECKING:
    from fourfold.config.schema import Config

PlacementStrategy = Literal["pack", "spread", "strict_pack", "strict_spread"]
TRAINING_ROLES: Final = ("trainer", "reference")
"""Roles that only training needs: an evaluation neither starts these services nor waits for them."""


class PlacementConfig(Table):
    """Placement of the services on GPUs. The keys of `rollout`, `trainer` and `reference` say how many each needs."""

    colocated: bool | None = Field(default=None)
    """true: rollout, trainer, reference and reward models share GPUs: rank i, the i-th GPU of the engines and reference
    i use GPU i, and reward models take the GPUs in turn. false: every service has GPUs of its own. Unset: own GPUs, or
    shared ones on a machine with fewer GPUs."""
    trainer_nodes: int = Field(default=1, ge=1)
    """Nodes of a Ray cluster for the trainer: each holds an equal part of `trainer.ranks`. Two parts may be on one node
    that has room for both, unless `strategy` is strict_spread."""
    strategy: PlacementStrategy = "pack"
    """Nodes of a Ray cluster for the services. pack: as few as possible. spread: as many as possible. strict_pack: one
    node for all. strict_spread: one node for each. Services that share GPUs count as one."""


def gpu_places(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the GPUs of each service that the launcher starts and that needs any, by member id."""
    # Colocated groups share GPUs with each other; the services of one group never do.
    groups = [[(pool.member_prefix, pool.replicas, pool.gpus_per_replica) for pool in config.rollout_pools]]
    if config.trainer.device == "cuda":
        groups.append([("trainer", config.trainer.replicas, config.trainer_processes)])
    if config.reference_on_gpus:
        groups.append([("reference", config.reference.replicas, 1)])
    places: dict[str, tuple[int, ...]] = {}
    first = 0
    for group in groups:
        if config.placement.colocated:
            first = 0
        for prefix, replicas, gpus in group:
            for index in range(replicas if gpus else 0):
                places[f"{prefix}-{index}"] = tuple(range(first, first + gpus))
                first += gpus
    count, shared = max((place[-1] + 1 for place in places.values()), default=0), 0
    first = count
    for table, model in config.reward_models_on_gpus:
        gpus = model.gpus_per_replica
        # Blocks of so many GPUs in turn: the replicas of one model never share a GPU (see `_check_placement`).
        turn, blocks = -(-shared // gpus), max(count // gpus, 1)
        for index in range(table.replicas):
            if config.placement.colocated and not model.own_gpus:
                begin = (turn + index) % blocks * gpus
                shared = begin + gpus
            else:
                begin, first = first, first + gpus
            places[f"{table.member_prefix}-{index}"] = tuple(range(begin, begin + gpus))
    return places


def gpu_count(config: Config) -> int:
    """Return how many GPUs the services need that the launcher starts."""
    return max((place[-1] + 1 for place in gpu_places(config).values()), default=0)
