"""Declares what the service uses of the ranks besides the methods of a step: checkpoints, exports, weight transfers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from fourfold.address import LOOPBACK
from fourfold.weights.manifest import Manifest
from fourfold_trainer.engine import SentWeights, TrainerEngine


class ServedEngine(TrainerEngine, Protocol):
    """All ranks as one. Every method blocks and is called from one thread, except `abort_weights` and `close`."""

    def release_memory(self) -> None:
        """Return cached GPU memory on all ranks, for the other processes on these GPUs."""

    def save(self, folder: Path) -> None:
        """Write every rank's state into an existing folder, durably."""

    def commit(self, partial: Path, target: Path) -> None:
        """Make a complete folder of `save` the checkpoint `target` on other machines that have disks of their own."""

    def keep_checkpoints(self, folder: Path, names: Sequence[str]) -> None:
        """Remove all other checkpoints from `folder` on other machines."""

    def collect_checkpoints(self, folder: Path) -> None:
        """Give every machine the newest checkpoint of `folder` all files of which are on some machine."""

    def load(self, folder: Path) -> None:
        """Restore the files of `save`. Raises WrongState, before anything changes, when they do not fit."""

    def export(self, folder: Path, *, ema: bool = False) -> None:
        """Write the weights, or their average, as a Hugging Face model into an existing folder, durably."""

    def export_critic(self, folder: Path) -> None:
        """Write the critic as a Hugging Face classifier with one label into an existing folder, durably."""

    def manifest(self) -> Manifest:
        """Return the layout of the weights."""

    @property
    def device_uuids(self) -> tuple[bytes, ...]:
        """CUDA UUIDs of the policy's ranks, 16 bytes each, in rank order; none on CPU."""

    @property
    def backends(self) -> tuple[str, ...]:
        """Transports that every rank can send weights with, best first."""

    def make_offers(
        self,
        epoch: int,
        backend: str,
        receiver_count: int,
        *,
        group: int = 0,
        host: str = LOOPBACK,
        interface: str = "",
        timeout: float,
    ) -> list[bytes]:
        """Start an epoch (group 0), or add the next group of receivers to it; one offer per rank.

        `host` and `interface`: see `fourfold.weights.transport.locality.listen_address`.
        """

    def open_weights(self, epoch: int, *, timeout: float) -> None: ...

    def send_weights(self, epoch: int, policy_version: int, *, skip_sums: bool = False, timeout: float) -> SentWeights:
        """Send the current weights; compute the sums of every tensor unless `skip_sums`."""

    def abort_weights(self, epoch: int) -> None:
        """Abort the transfer of an epoch and close it. Any thread may call this."""

    def leave(self) -> None:
        """Leave the process group in good order, before `close`."""

    def close(self) -> None:
        """End all ranks, also in the middle of a call. Any thread may call this."""
