"""Which of an engine's memory is given up. vLLM frees all of it at once, and takes it again whole or in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fourfold.errors import CANNOT_SLEEP, InvalidInput, WrongState
from fourfold_rollout.engine import EngineDescription

WEIGHTS: Final = "weights"
KV_CACHE: Final = "kv_cache"
_TAGS: Final = (WEIGHTS, KV_CACHE)
_LEVELS: Final = (1, 2)


class SleepState:
    """The state of one engine; awake at first."""

    def __init__(self) -> None:
        self._asleep: tuple[str, ...] = ()
        self._level = 0
        self._confirmed = True
        self.lost_weights = False
        """Whether a deep sleep dropped the weights and no update has brought others."""

    @property
    def awake(self) -> bool:
        """Whether the engine has all its memory."""
        return not self._asleep

    @property
    def weights_asleep(self) -> bool:
        """Whether there is no memory for weights."""
        return WEIGHTS in self._asleep

    def check(self, level: int, description: EngineDescription) -> bool:
        """Return whether the engine has to be put to sleep: False, it sleeps like that for certain.

        Raises:
            InvalidInput: no such level.
            WrongState: it cannot sleep, or not now.
        """
        if level not in _LEVELS:
            raise InvalidInput(f"level is {level}; it must be 1 (weights wait in the host's memory) or 2 (dropped)")
        if description.device_type == "cpu":
            raise WrongState(
                "this engine runs on CPU and has no GPU memory to give up; sleep is for engines on GPUs",
                reason=CANNOT_SLEEP,
            )
        if not description.sleep_mode:
            raise WrongState("this engine cannot sleep; start it with rollout.sleep_mode = true", reason=CANNOT_SLEEP)
        if self._asleep == _TAGS and self._level == level:
            return not self._confirmed
        if self._asleep:
            raise WrongState(
                f"the engine sleeps at level {self._level} ({', '.join(self._asleep)}); wake it before it can sleep "
                f"at level {level}"
            )
        return True

    def fell_asleep(self, level: int, *, confirmed: bool) -> None:
        """Note that all memory is given up or, when the engine has not confirmed it, that it may be, now or later."""
        self._asleep, self._level, self._confirmed = _TAGS, level, confirmed
        self.lost_weights |= level > 1

    def to_wake(self, tags: Sequence[str]) -> tuple[str, ...]:
        """Return those of the tags that sleep; no tags: all.

        Raises:
            InvalidInput: no such tag.
        """
        unknown = [tag for tag in tags if tag not in _TAGS]
        if unknown:
            raise InvalidInput(f"tag {unknown[0][:40]!r} is unknown; tags are {', '.join(_TAGS)}, or none for all")
        return tuple(tag for tag in self._asleep if not tags or tag in tags)

    def woke(self, tags: Sequence[str]) -> None:
        """Note what is taken again."""
        self._asleep = tuple(tag for tag in self._asleep if tag not in tags)
