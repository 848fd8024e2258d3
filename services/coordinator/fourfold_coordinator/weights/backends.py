"""Chooses the transport of each engine (CUDA IPC, NCCL, shared memory or gloo) and groups engines by it.

`weights.backend = "auto"` takes the first of these that can work:

    cuda_ipc   same host, every worker's GPU can read the ranks' memory, and all workers of the engine are on GPUs of
               ranks, or no more workers than ranks are on other GPUs (each of them reads all weights)
    nccl       trainer and engine are on GPUs and share none; on two hosts both are known by addresses of one network
    cuda_ipc   same host and readable memory, with more workers than ranks, where NCCL cannot work
    shm        same host
    gloo       any host, through main memory and the network; both are known by addresses of one network

The engines of a gloo group are a chain: each passes the weights on to the next. Those of a host are neighbours, so that
the weights cross the network once per host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fourfold.errors import NO_BACKEND, FourfoldError, WrongState
from fourfold.rpc.channel import is_loopback, split_target
from fourfold.trainer.v1 import trainer_weight_service_pb2 as weight

from ..routing.replica import Replica
from .fan_out import DescribedEngine, UpdateFailed

# Fastest first; the trainer sends to the groups of an epoch in this order.
_ORDER: Final = ("cuda_ipc", "nccl", "shm", "gloo")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendGroup:
    """Engines that receive their weights through the same backend."""

    backend: str
    engines: tuple[DescribedEngine, ...]

    @property
    def receiver_count(self) -> int:
        """Return the number of workers of all engines in the group."""
        return sum(engine.about.worker_count for engine in self.engines)

    def first_receiver(self, engine: DescribedEngine) -> int:
        """Return the index of an engine's first worker within the group."""
        before = self.engines[: self.engines.index(engine)]
        return sum(other.about.worker_count for other in before)


def host_of(replica: Replica) -> str:
    """Return the host name or address by which a service is known."""
    return split_target(replica.member.target)[0]


def group_by_backend(
    wanted: str, trainer: weight.GetManifestResponse, engines: Sequence[DescribedEngine], *, host: str, interface: str
) -> list[BackendGroup]:
    """Choose a backend for each engine (`wanted`: that of the recipe); return one group per backend, the fastest first.

    `host`: by which the trainer is known. `interface`: that of the recipe.

    Raises UpdateFailed with each engine that no allowed backend reaches, or with the trainer, when it lacks `wanted`.
    """
    if wanted != "auto" and wanted not in trainer.backends:
        raise UpdateFailed(
            {},
            WrongState(
                f"the trainer cannot send weights by {wanted}, only by {', '.join(trainer.backends)}; set "
                f'weights.backend = "auto", or install on the trainer what {wanted} needs'
            ),
        )
    chosen: dict[str, list[DescribedEngine]] = {}
    refused: dict[tuple[str, str], FourfoldError] = {}
    rules = _BackendRules(trainer, engines, host="" if interface else host)
    for engine in engines:
        obstacles = rules.obstacles(engine, nccl_engines=chosen.get("nccl", []))
        backend = wanted if wanted != "auto" else rules.best(engine, obstacles)
        if obstacles.get(backend, ""):
            refused[engine.key] = _refusal(engine, wanted, obstacles)
        else:
            chosen.setdefault(backend, []).append(engine)
    if refused:
        raise UpdateFailed(refused)
    if "gloo" in chosen:
        chosen["gloo"].sort(key=lambda engine: (engine.about.host_id != trainer.host_id, engine.about.host_id))
    return [BackendGroup(backend=name, engines=tuple(chosen[name])) for name in _ORDER if name in chosen]


class _BackendRules:
    """Decides which backends work between one trainer and an engine."""

    def __init__(self, trainer: weight.GetManifestResponse, engines: Sequence[DescribedEngine], *, host: str) -> None:
        """`host`: by which the trainer is known; empty: the recipe names an interface."""
        self._trainer, self._host = trainer, host
        self._trainer_gpus, self._readable_gpus = set(trainer.device_uuids), set(trainer.reachable_device_uuids)
        readers = [engine for engine in engines if not self._ipc_obstacle(engine)]
        # Workers that could read the ranks' memory from a GPU without a rank.
        self._remote_readers = sum(len(set(engine.about.device_uuids) - self._trainer_gpus) for engine in readers)

    def best(self, engine: DescribedEngine, obstacles: Mapping[str, str]) -> str:
        """Return the backend that "auto" takes."""
        on_rank_gpus = self._trainer_gpus.issuperset(engine.about.device_uuids)
        # Each remote reader pulls all weights from every rank; with more readers than ranks NCCL's broadcast is faster.
        ipc_is_fast = on_rank_gpus or self._remote_readers <= len(self._trainer.device_uuids)
        if not obstacles["cuda_ipc"] and (ipc_is_fast or obstacles["nccl"]):
            return "cuda_ipc"
        return next((name for name in ("nccl", "shm") if not obstacles[name]), "gloo")

    def obstacles(self, engine: DescribedEngine, *, nccl_engines: Sequence[DescribedEngine]) -> dict[str, str]:
        """Return, for each backend, why it cannot work; empty when it can. `nccl_engines` use NCCL already."""
        found = {
            "cuda_ipc": self._ipc_obstacle(engine),
            "nccl": self._nccl_obstacle(engine, nccl_engines),
            "shm": self._host_obstacle(engine),
            "gloo": self._network_obstacle(engine),
        }
        for name in found:
            if name not in self._trainer.backends:
                found[name] = "the trainer does not support it"
            elif name not in engine.about.backends:
                found[name] = f"the engine supports {', '.join(engine.about.backends) or 'no backend'}"
        return found

    def _host_obstacle(self, engine: DescribedEngine) -> str:
        if self._trainer.host_id and engine.about.host_id == self._trainer.host_id:
            return ""
        return "it is on another host than the trainer, or in another container"

    def _network_obstacle(self, engine: DescribedEngine) -> str:
        host = host_of(engine.replica)
        if not self._host or not self._host_obstacle(engine) or is_loopback(host) == is_loopback(self._host):
            return ""
        local, remote = ("the trainer", host) if is_loopback(self._host) else ("it", self._host)
        return (
            f"{local} is known by a loopback address, which {remote} does not reach: start every service with "
            f"--advertise HOST, or set weights.interface"
        )

    def _gpu_obstacle(self, engine: DescribedEngine) -> str:
        if not self._trainer.device_uuids:
            return "the trainer is not on GPUs"
        return "" if engine.about.device_uuids else "the engine is not on GPUs"

    def _ipc_obstacle(self, engine: DescribedEngine) -> str:
        if obstacle := self._gpu_obstacle(engine) or self._host_obstacle(engine):
            return obstacle
        unreadable = [uuid for uuid in engine.about.device_uuids if uuid not in self._readable_gpus]
        if not unreadable:
            return ""
        return f"its GPU {unreadable[0].hex()} cannot read the memory of the trainer's GPUs (no peer access, or MIG)"

    def _nccl_obstacle(self, engine: DescribedEngine, nccl_engines: Sequence[DescribedEngine]) -> str:
        if obstacle := self._gpu_obstacle(engine) or self._network_obstacle(engine):
            return obstacle
        for uuid in engine.about.device_uuids:
            if uuid in self._trainer_gpus:
                return f"its GPU {uuid.hex()} holds a trainer rank, too: NCCL refuses two ranks on one GPU"
            others = [other.name for other in nccl_engines if uuid in other.about.device_uuids]
            if others:
                return f"its GPU {uuid.hex()} holds {others[0]}, too: NCCL refuses two ranks on one GPU"
        return ""


def _refusal(engine: DescribedEngine, wanted: str, obstacles: Mapping[str, str]) -> WrongState:
    peer = engine.replica.member.peer
    if wanted != "auto":
        text = f'{peer} cannot receive weights by {wanted}: {obstacles[wanted]}; set weights.backend = "auto"'
    else:
        reasons = "; ".join(f"{name}: {obstacles[name]}" for name in _ORDER)
        text = f"no backend carries weights from the trainer to {peer} ({reasons})"
    return WrongState(text, reason=NO_BACKEND)
