"""Defines the place at which a run continues."""

from __future__ import annotations

from dataclasses import dataclass

from .samples import SampleGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPosition:
    """Where a run continues."""

    step: int  # steps done
    next_position: int  # of the first prompt that was never drawn
    open_positions: tuple[int, ...] = ()  # of prompts that were drawn, and are neither trained nor dropped for good
    groups: tuple[SampleGroup, ...] = ()  # READY ones, at some of `open_positions`
    trainer_kept: bool = False  # the trainer kept its weights
