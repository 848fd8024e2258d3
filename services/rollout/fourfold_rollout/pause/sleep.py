"""Records which memory of an engine is freed. vLLM frees all of it at once and allocates it again whole or in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fourfold.errors import CANNOT_SLEEP, InvalidInput, WrongState
from fourfold_rollout.engine import EngineDescription

_WEIGHTS: Final = "weights"
_TAGS: Final = (_WEIGHTS, "kv_cache")
_LEVELS: Final = (1, 2)


class SleepState:
    """The freed memory of one engine; none at first."""

    def __init__(self) -> None:
        self._asleep: tuple[str, ...] = ()
        self._level = 0
        self._confirmed = True
        self.lost_weights = False  # a sleep of level 2 dropped the weights, and no update has replaced them

    @property
    def awake(self) -> bool:
        return not self._asleep

    @property
    def weights_asleep(self) -> bool:
        return _WEIGHTS in self._asleep

    def check(self, level: int, description: EngineDescription) -> bool:
        """Return whether the engine must be asked to sleep; False if it confirmed a sleep of this level.

        Raises InvalidInput: no such level. Raises WrongState: the engine cannot sleep, or sleeps at another level.
        """
        if level not in _LEVELS:
            raise InvalidInput(f"level is {level}; it must be 1 (weights wait in the host's memory) or 2 (dropped)")
        if description.device_type == "cpu":
            raise WrongState(
                "this engine runs on CPU and has no GPU memory to free; call SleepEngine only on GPU engines",
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
        """Record a sleep. An unconfirmed sleep may have happened or may still happen."""
        self._asleep, self._level, self._confirmed = _TAGS, level, confirmed
        self.lost_weights |= level > 1

    def to_wake(self, tags: Sequence[str]) -> tuple[str, ...]:
        """Return those of `tags` that are asleep; without tags, all that are. Raises InvalidInput: no such tag."""
        unknown = [tag for tag in tags if tag not in _TAGS]
        if unknown:
            raise InvalidInput(f"tag {unknown[0][:40]!r} is unknown; tags are {', '.join(_TAGS)}, or none for all")
        return tuple(tag for tag in self._asleep if not tags or tag in tags)

    def woke(self, tag: str) -> None:
        self._asleep = tuple(other for other in self._asleep if other != tag)
