"""Where a weight update is."""

from __future__ import annotations

import time
from enum import Enum

from fourfold.bounds import check_number
from fourfold.errors import WrongState


class PauseMode(Enum):
    """What running samples do when an update comes."""

    WAIT = "wait"
    """They finish first."""
    ABORT = "abort"
    """They end with the tokens they have."""
    KEEP = "keep"
    """They stop, and go on under the new weights."""


class UpdatePhase(Enum):
    """The values are what people read."""

    READY = ""
    """None is open."""
    PAUSING = "stopping samples"
    PAUSED = "paused"
    RECEIVING = "receiving"
    RECEIVED = "received"
    COMMITTED = "committed, not released"
    """Sampling goes on."""
    FAILED = "failed"
    ENDING = "giving up"


class WeightUpdate:
    """The update that is open, or none."""

    def __init__(self) -> None:
        self.phase = UpdatePhase.READY
        self.version = 0
        """Its target, or the last one's."""
        self.served_before = 0
        """Version that was served until the commit."""
        self.digest = b""
        self.pause_seconds = 0.0
        """How long sampling stood still in the last one that was committed."""
        self._paused_at = 0.0
        self._since = time.monotonic()

    @property
    def is_open(self) -> bool:
        """Whether there is one."""
        return self.phase is not UpdatePhase.READY

    @property
    def seconds(self) -> float:
        """How long it has been in its phase; 0 when none is open."""
        return time.monotonic() - self._since if self.is_open else 0.0

    def enter(self, phase: UpdatePhase) -> None:
        """Go on."""
        self.phase, self._since = phase, time.monotonic()
        if phase is UpdatePhase.PAUSED:
            self._paused_at = self._since

    def end_pause(self) -> None:
        """Know that sampling goes on."""
        self.pause_seconds = time.monotonic() - self._paused_at

    def check_version(self, version: int) -> None:
        """Raise WrongState unless an update to `version` is open and has not failed."""
        if not self.is_open:
            raise WrongState(f"no update to version {version} has begun; call BeginWeights first")
        if version != self.version:
            raise WrongState(f"the update that has begun is to version {self.version}, not {version}")
        if self.phase is UpdatePhase.FAILED:
            raise WrongState(f"the update to version {version} has failed; abort it and open a new epoch")

    def check_may_begin(self, version: int, *, served: int | None) -> None:
        """Raise unless an update to `version` may begin.

        Args:
            version: new.
            served: present version; None: the weights are dirty, and any version is better.

        Raises:
            InvalidInput: it is no version.
            WrongState: another update is open, or the version is not above the served one.
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
        """Raise WrongState unless it is received, or committed in the same way."""
        if self.phase is UpdatePhase.COMMITTED and held and not hold:
            raise WrongState(f"version {self.version} is committed with hold; call ReleaseWeights")
        if self.phase not in (UpdatePhase.RECEIVED, UpdatePhase.COMMITTED):
            raise WrongState(f"version {self.version} has begun but is not received; call ReceiveWeights first")
