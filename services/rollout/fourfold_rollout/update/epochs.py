"""The sessions of an engine's workers with the trainer. Their numbers only grow, and one is open at most."""

from __future__ import annotations

from fourfold.errors import FourfoldError, InvalidInput, StaleEpoch, WrongState
from fourfold_rollout.engine import EpochTerms, OpenReport, RolloutEngine


class WeightEpochs:
    """Of one engine."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.open: int | None = None
        self.last = -1
        self.joining: int | None = None
        """The one that the workers join just now."""
        self._engine = engine

    def check_new(self, epoch: int) -> None:
        """Raise StaleEpoch unless it is above all earlier ones."""
        if epoch <= self.last:
            raise StaleEpoch(f"epoch {epoch} is not above the last one, {self.last}; use a higher one")

    def check(self, epoch: int) -> None:
        """Raise StaleEpoch unless it is the open one."""
        if epoch != self.open:
            raise StaleEpoch(f"epoch {epoch} is not open; the open one is {'none' if self.open is None else self.open}")

    async def join(self, terms: EpochTerms, timeout: float) -> OpenReport:
        """Open one; raises what `Engine.open_weights` raises."""
        self.joining = terms.epoch
        try:
            report = await self._engine.open_weights(terms, timeout=timeout)
        except (InvalidInput, WrongState):
            raise  # the old one stays open
        except FourfoldError:
            self.open, self.last = None, terms.epoch
            raise
        finally:
            self.joining = None
        self.open = self.last = terms.epoch
        return report

    def stop(self, epoch: int | None) -> None:
        """End what the workers wait for in an epoch that is open or being joined; others are left alone."""
        if epoch is not None and epoch in (self.open, self.joining):
            self._engine.stop_transfers(epoch=epoch)

    async def leave(self) -> bool:
        """Close the open one; return whether the workers say that the weights are whole and those that are served."""
        epoch, self.open = self.open, None
        return epoch is not None and await self._engine.abort_weights(epoch=epoch)
