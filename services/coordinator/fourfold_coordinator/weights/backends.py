"""How the bytes reach each engine: from what trainer and engines say of themselves to groups with one backend each.

`auto` takes, for each engine, the first of these that goes:

    cuda_ipc   it is on the trainer's host, all its GPUs can read the ranks' memory, and every worker shares its GPU
               with a rank, or those of the epoch that do not are at most as many as the ranks: each reads all weights
    nccl       both are on GPUs, none of which they share: NCCL refuses two of its ranks on one GPU
    cuda_ipc   also with more readers, where NCCL cannot be
    shm        it is on the trainer's host
    gloo       by the network, from main memory
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fourfold.errors import NO_BACKEND, FourfoldError, WrongState
from fourfold.trainer.v1 import trainer_weight_service_pb2 as weight

from .fan_out import DescribedEngine, UpdateFailed

# In the order in which the groups of an epoch are served: the fastest first.
_ORDER: Final = ("cuda_ipc", "nccl", "shm", "gloo")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendGroup:
    """Engines that get their weights in the same way."""

    backend: str
    engines: tuple[DescribedEngine, ...]

    @property
    def receiver_count(self) -> int:
        """Workers of all its engines."""
        return sum(engine.about.worker_count for engine in self.engines)

    def first_receiver(self, engine: DescribedEngine) -> int:
        """Return the index of an engine's first worker within the group."""
        before = self.engines[: self.engines.index(engine)]
        return sum(other.about.worker_count for other in before)


def group_by_backend(
    wanted: str, trainer: weight.GetManifestResponse, engines: Sequence[DescribedEngine]
) -> list[BackendGroup]:
    """Return the engines in groups of one backend, the fastest first; within a group in the order given.

    Args:
        wanted: `weights.backend`: "auto", or the backend of all.
        trainer: what the trainer says of itself.
        engines: to be updated, at least one.

    Raises:
        UpdateFailed: names the engines that cannot be reached, and why; or the trainer, which lacks the backend.
    """
    if wanted != "auto" and wanted not in trainer.backends:
        raise UpdateFailed(
            {},
            WrongState(
                f"the trainer cannot send weights by {wanted}, only by {', '.join(trainer.backends)}; set "
                f'weights.backend = "auto", or give the trainer what {wanted} needs'
            ),
        )
    chosen: dict[str, list[DescribedEngine]] = {}
    refused: dict[tuple[str, str], FourfoldError] = {}
    ways = _Ways(trainer, engines)
    for engine in engines:
        hurdles = ways.hurdles(engine, among=chosen.get("nccl", []))
        backend = wanted if wanted != "auto" else ways.best(engine, hurdles)
        if hurdles.get(backend, ""):
            refused[engine.key] = _refusal(engine, wanted, hurdles)
        else:
            chosen.setdefault(backend, []).append(engine)
    if refused:
        raise UpdateFailed(refused)
    return [BackendGroup(backend=name, engines=tuple(chosen[name])) for name in _ORDER if name in chosen]


class _Ways:
    """What stands between the trainer and an engine, by backend."""

    def __init__(self, trainer: weight.GetManifestResponse, engines: Sequence[DescribedEngine]) -> None:
        self._trainer = trainer
        self._owned, self._reachable = set(trainer.device_uuids), set(trainer.reachable_device_uuids)
        far = [engine for engine in engines if not self._ipc_hurdle(engine)]
        self._readers = sum(len(set(engine.about.device_uuids) - self._owned) for engine in far)
        """Workers on GPUs without a rank that could read the ranks' memory."""

    def best(self, engine: DescribedEngine, hurdles: Mapping[str, str]) -> str:
        """Return the backend that `auto` takes."""
        close = self._owned.issuperset(engine.about.device_uuids) or self._readers <= len(self._trainer.device_uuids)
        if not hurdles["cuda_ipc"] and (close or hurdles["nccl"]):
            return "cuda_ipc"
        return next((name for name in ("nccl", "shm") if not hurdles[name]), "gloo")

    def hurdles(self, engine: DescribedEngine, *, among: Sequence[DescribedEngine]) -> dict[str, str]:
        """Return why each backend does not go, empty where it does; `among` are the engines that have nccl already."""
        found = {
            "cuda_ipc": self._ipc_hurdle(engine),
            "nccl": self._nccl_hurdle(engine, among),
            "shm": self._host_hurdle(engine),
            "gloo": "",
        }
        for name in found:
            if name not in self._trainer.backends:
                found[name] = "the trainer does not have it"
            elif name not in engine.about.backends:
                found[name] = f"the engine has only {', '.join(engine.about.backends) or 'none'}"
        return found

    def _host_hurdle(self, engine: DescribedEngine) -> str:
        if self._trainer.host_id and engine.about.host_id == self._trainer.host_id:
            return ""
        return "it is on another host than the trainer, or in another container"

    def _ipc_hurdle(self, engine: DescribedEngine) -> str:
        if not self._trainer.device_uuids:
            return "the trainer is not on GPUs"
        if not engine.about.device_uuids:
            return "the engine is not on GPUs"
        lost = [uuid for uuid in engine.about.device_uuids if uuid not in self._reachable]
        if lost and not self._host_hurdle(engine):
            return f"its GPU {lost[0].hex()} cannot read the memory of the trainer's GPUs (no peer access, or MIG)"
        return self._host_hurdle(engine)

    def _nccl_hurdle(self, engine: DescribedEngine, among: Sequence[DescribedEngine]) -> str:
        if not self._trainer.device_uuids:
            return "the trainer is not on GPUs"
        own = list(engine.about.device_uuids)
        if not own:
            return "the engine is not on GPUs"
        for uuid in own:
            if uuid in self._owned:
                return f"its GPU {uuid.hex()} holds a trainer rank, too: NCCL refuses two ranks on one GPU"
            others = [other.key[0] for other in among if uuid in other.about.device_uuids]
            if others:
                return f"its GPU {uuid.hex()} holds {others[0]}, too: NCCL refuses two ranks on one GPU"
        return ""


def _refusal(engine: DescribedEngine, wanted: str, hurdles: Mapping[str, str]) -> WrongState:
    who = engine.replica.member.peer
    if wanted != "auto":
        text = f'{who} cannot receive weights by {wanted}: {hurdles[wanted]}; set weights.backend = "auto"'
    else:
        every = "; ".join(f"{name}: {hurdles[name]}" for name in _ORDER)
        text = f"no way for weights from the trainer to {who} ({every})"
    return WrongState(text, reason=NO_BACKEND)
