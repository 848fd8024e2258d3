"""Reads the components of scores, and defines the error of a sample that cannot be scored."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from fourfold.text import MAX_COMPONENTS, is_metric_name

MAX_FLOAT32: Final = (2 - 2**-23) * 2.0**127
"""Largest number of the wire format."""


def components_of(entries: Mapping[Any, Any], most: int = MAX_COMPONENTS) -> dict[str, float]:
    """Return the entries that can be components: finite numbers under the name of a metric, the first `most`."""
    found: dict[str, float] = {}
    for name, raw in entries.items():
        if isinstance(name, str) and is_metric_name(name) and not isinstance(raw, str | bytes) and len(found) < most:
            with suppress(TypeError, ValueError, OverflowError, RuntimeError):  # no number, or a tensor of several
                if abs(number := float(raw)) <= MAX_FLOAT32:
                    found[name] = number
    return found


class InvalidSample(Exception):
    """A sample that the function cannot score. `reason` is the error reason of its outcome."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
