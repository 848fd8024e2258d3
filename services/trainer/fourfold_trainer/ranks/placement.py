"""Assigns ranks, GPUs and models to the processes of a trainer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold.host.network import NCCL_VARIABLE, interface_of

INTERFACE_VARIABLE: Final = "FOURFOLD_RANK_INTERFACE"
"""Environment variable with the network interface of collectives; unset: loopback."""
ADDRESS_VARIABLE: Final = "FOURFOLD_RANK_ADDRESS"
"""Environment variable with the address at which peers reach a rank; unset: that of its trainer."""
# Options of PyTorch's allocator; PyTorch still reads the second one, an older name.
_ALLOCATOR_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlacement:
    """The GPU and the models of a rank."""

    rank: int  # within its group
    rank_count: int
    holds: Literal["both", "policy", "critic"]
    gpu: int  # among those that its service sees on its machine; ignored on CPUs
    machine_ranks: int  # ranks of all groups on its machine, which share the cores


def place_ranks(config: Config, *, critic: bool, machines: Sequence[range] = ()) -> list[RankPlacement]:
    """Return the ranks of the policy's group, or of the group of a critic with ranks of its own.

    `machines` has the ranks of each machine, without gaps; none: all ranks are on one.
    """
    first = config.trainer.ranks if critic else 0
    count = config.critic.ranks if critic else config.trainer.ranks
    has_both = config.algorithm.needs_critic and not config.critic_apart
    holds: Literal["both", "policy", "critic"] = "critic" if critic else "both" if has_both else "policy"
    return [
        RankPlacement(
            rank=rank,
            rank_count=count,
            holds=holds,
            gpu=first + rank - ranks.start,
            machine_ranks=len(ranks) if machines else config.trainer_processes,
        )
        for ranks in machines or [range(count)]
        for rank in ranks
    ]


def rank_environment(config: Config, place: RankPlacement) -> dict[str, str]:
    """Return the environment variables of a rank: DeepSpeed's device, the allocator, and the network of collectives.

    Collectives use loopback, unless the ranks are on several machines.
    """
    allocator = {}
    # Micro-batches differ in size, so that a freed block often fits none of the next ones and stays reserved. Runs with
    # engines keep the default allocator: CUDA IPC cannot send memory of expandable segments.
    if not config.needs_engines and not any(map(os.environ.get, _ALLOCATOR_VARIABLES)):
        allocator = {_ALLOCATOR_VARIABLES[0]: "expandable_segments:True"}  # read by CUDA alone
    interface = os.environ.get(INTERFACE_VARIABLE) or "lo"
    return {
        "DS_ACCELERATOR": config.trainer.device,
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.gpu),
        "WORLD_SIZE": str(place.rank_count),
        "GLOO_SOCKET_IFNAME": interface,
        # Of the user, or that on which engines of other machines reach the service.
        NCCL_VARIABLE: os.environ.get(NCCL_VARIABLE) or f"={interface}",
        "TOKENIZERS_PARALLELISM": "false",
        **allocator,
    }


def collective_interface(address: str, given: str) -> str:
    """Return the network interface of collectives: the given one, or else the interface of this machine's address.

    Raises ConfigError: no interface has the address.
    """
    try:
        return given or interface_of(address)
    except ConfigError as error:
        raise ConfigError(f"{error}; name an interface with --interface") from None
