"""The states of a weight update and of the weight epochs of one engine, and the checks that guard them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from enum import Enum
from typing import Final

from fourfold.bounds import check_number
from fourfold.errors import FourfoldError, InvalidInput, StaleEpoch, WrongState
from fourfold.host.timing import PhaseSeconds
from fourfold_rollout.engine import EpochTerms, OpenReport, RolloutEngine


class UpdatePhase(Enum):
    """The phase of the open update. The values are shown to users (`DescribeEngine.update_phase`)."""

    READY = ""  # no update is open
    PAUSING = "stopping samples"
    PAUSED = "paused"
    RECEIVING = "receiving"
    RECEIVED = "received"
    COMMITTED = "committed, not released"  # sampling goes on
    FAILED = "failed"
    ENDING = "giving up"


# The table at the top of controller.py names the cause of each transition; a test compares both.
TRANSITIONS: Final[Mapping[UpdatePhase, frozenset[UpdatePhase]]] = {
    UpdatePhase.READY: frozenset({UpdatePhase.PAUSING}),
    UpdatePhase.PAUSING: frozenset({UpdatePhase.PAUSED, UpdatePhase.READY}),
    UpdatePhase.PAUSED: frozenset({UpdatePhase.RECEIVING, UpdatePhase.ENDING}),
    UpdatePhase.RECEIVING: frozenset({UpdatePhase.RECEIVED, UpdatePhase.FAILED}),
    UpdatePhase.RECEIVED: frozenset({UpdatePhase.COMMITTED, UpdatePhase.ENDING}),
    UpdatePhase.COMMITTED: frozenset({UpdatePhase.READY, UpdatePhase.ENDING}),
    UpdatePhase.FAILED: frozenset({UpdatePhase.ENDING}),
    UpdatePhase.ENDING: frozenset({UpdatePhase.READY}),
}


class WeightUpdate:
    """The open update, or none."""

    def __init__(self) -> None:
        self.phase = UpdatePhase.READY
        self.version = 0  # the target of the open or the last update
        self.served_before = 0  # the version served until the commit
        self.digest = b""
        self._paused_at = 0.0
        self._since = time.monotonic()
        self.phase_seconds = PhaseSeconds(self.phase)

    @property
    def is_open(self) -> bool:
        return self.phase is not UpdatePhase.READY

    @property
    def seconds(self) -> float:
        """The time since the present phase began; 0 without an open update."""
        return time.monotonic() - self._since if self.is_open else 0.0

    def enter(self, phase: UpdatePhase) -> None:
        """Go to the next phase. Raises RuntimeError: `TRANSITIONS` has no such transition; a bug of the controller."""
        if phase not in TRANSITIONS[self.phase]:
            raise RuntimeError(f"an update cannot go from {self.phase.name} to {phase.name}")
        self.phase, self._since = phase, time.monotonic()
        self.phase_seconds.enter(phase)
        if phase is UpdatePhase.PAUSED:
            self._paused_at = self._since

    @property
    def pause_seconds(self) -> float:
        """The time since the open update stopped sampling."""
        return time.monotonic() - self._paused_at

    def check_version(self, version: int) -> None:
        """Raise WrongState unless an update to `version` is open and has not failed."""
        if not self.is_open:
            raise WrongState(f"no update to version {version} has begun; call BeginWeights first")
        if version != self.version:
            raise WrongState(f"the update that has begun is to version {self.version}, not {version}")
        if self.phase is UpdatePhase.FAILED:
            raise WrongState(f"the update to version {version} has failed; abort it and open a new epoch")

    def check_may_begin(self, version: int, *, served: int | None) -> None:
        """Check that an update to `version` may begin: no other is open, and the version is above the `served` one.

        `served` is None if the weights are dirty; any version may replace them.
        """
        check_number(version, "policy_version")
        if self.phase is UpdatePhase.COMMITTED:
            raise WrongState(
                f"version {self.version} is committed but not released; release or abort it before version {version} "
                f"can begin"
            )
        if self.is_open:
            raise WrongState(
                f"an update to version {self.version} is open ({self.phase.value}); abort it before version {version} "
                f"can begin"
            )
        if served is not None and version <= served:
            raise WrongState(
                f"policy_version {version} is not above the served version {served}; versions never go back: publish "
                f"under a higher one"
            )

    def check_may_commit(self, *, held: bool, hold: bool) -> None:
        """Raise WrongState unless the version is received, or committed with the same `hold`."""
        if self.phase is UpdatePhase.COMMITTED and held and not hold:
            raise WrongState(f"version {self.version} is committed with hold; call ReleaseWeights")
        if self.phase not in (UpdatePhase.RECEIVED, UpdatePhase.COMMITTED):
            raise WrongState(f"version {self.version} has begun but is not received; call ReceiveWeights first")


class WeightEpochs:
    """The epochs (sessions of the engine's workers with the trainer). Numbers only grow; at most one is open."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.open: int | None = None
        self.last = -1
        self.joining: int | None = None  # the epoch that the workers are joining
        self._engine = engine

    def check_new(self, epoch: int) -> None:
        """Raise StaleEpoch unless `epoch` is above all earlier ones."""
        if epoch <= self.last:
            raise StaleEpoch(f"epoch {epoch} is not above the last one, {self.last}; use a higher one")

    def check(self, epoch: int) -> None:
        """Raise StaleEpoch unless `epoch` is the open one."""
        if epoch != self.open:
            raise StaleEpoch(f"epoch {epoch} is not open; the open one is {'none' if self.open is None else self.open}")

    async def join(self, terms: EpochTerms, timeout: float) -> OpenReport:
        """Open an epoch; see `RolloutEngine.open_weights` for the errors."""
        self.joining = terms.epoch
        try:
            report = await self._engine.open_weights(terms, timeout=timeout)
        except (InvalidInput, WrongState):
            raise  # the workers refused before they left the old epoch, which stays open
        except FourfoldError:
            self.open, self.last = None, terms.epoch
            raise
        finally:
            self.joining = None
        self.open = self.last = terms.epoch
        return report

    def stop(self, epoch: int | None) -> None:
        """End every wait of the workers in `epoch` if it is open or being joined."""
        if epoch is not None and epoch in (self.open, self.joining):
            self._engine.abort_transfers(epoch=epoch)

    async def leave(self) -> bool:
        """Close the open epoch; return whether the workers hold exactly the served weights. False without one."""
        epoch, self.open = self.open, None
        return epoch is not None and await self._engine.abort_weights(epoch=epoch)
