"""`[placement]`: which services share GPUs, and the number of every GPU that a service gets.

    own GPUs        rollout-0: 0   rollout-1: 1   trainer-0: 2, 3   reference-0: 4
    colocated       rollout-0: 0   rollout-1: 1   trainer-0: 0, 1   reference-0: 0

Numbers are those of the run, from 0; a launcher says which GPUs they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from fourfold.config.table import Table

if TYPE_CHECKING:
    from fourfold.config.schema import Config


class PlacementConfig(Table):
    """Where the services on GPUs are. They are told apart by what `rollout`, `trainer` and `reference` ask for."""

    colocated: bool | None = Field(default=None)
    """true: rollout, trainer and reference share GPUs: rank i, the i-th GPU of the engines and reference i are on GPU
    i. false: every service has GPUs of its own. Unset: own GPUs, and shared ones where a machine has fewer."""

    def check(self, config: Config) -> None:
        """Refuse what cannot share GPUs.

        Raises:
            ValueError: value, rule, fix.
        """
        if not self.colocated:
            return
        for key, right, value, fix in (
            ("trainer.device", config.trainer.device == "cuda", f'"{config.trainer.device}"', 'set it to "cuda"'),
            ("rollout.gpus_per_replica", config.rollout.gpus_per_replica > 0, "0", "set it to at least 1"),
        ):
            if not right:
                raise ValueError(f"placement.colocated = true needs services on GPUs, and {key} = {value}; {fix}")
        if config.weights.backend == "nccl":
            raise ValueError(
                'weights.backend = "nccl" and placement.colocated = true do not go together: NCCL refuses two ranks on '
                'one GPU; set weights.backend = "auto"'
            )
        if config.rollout.kv_cache_gib is None:
            raise ValueError(
                "placement.colocated = true needs rollout.kv_cache_gib: an engine that measures how much memory is "
                "free fails when another service takes or frees some meanwhile; set it to what the trainer leaves "
                "(`fourfold plan` shows both), such as 8"
            )
        count = max(config.rollout.replicas * config.rollout.gpus_per_replica, config.trainer_processes)
        if config.reference_on_gpus and config.reference.replicas > count:
            raise ValueError(
                f"reference.replicas = {config.reference.replicas} on {count} shared GPUs puts two copies of one model "
                f"on a GPU; set it to at most {count}"
            )


def gpu_places(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the GPUs of each service that the launcher starts and that has any, by member id."""
    asked = [("rollout", config.rollout.replicas, config.rollout.gpus_per_replica)]
    if config.trainer.device == "cuda":
        asked.append(("trainer", config.trainer.replicas, config.trainer_processes))
    if config.reference_on_gpus:
        asked.append(("reference", config.reference.replicas, 1))
    places: dict[str, tuple[int, ...]] = {}
    first = 0
    for role, replicas, gpus in asked:
        if config.placement.colocated:
            first = 0
        for index in range(replicas if gpus else 0):
            places[f"{role}-{index}"] = tuple(range(first, first + gpus))
            first += gpus
    return places


def gpu_count(config: Config) -> int:
    """Return how many GPUs the services need that the launcher starts."""
    return max((place[-1] + 1 for place in gpu_places(config).values()), default=0)
