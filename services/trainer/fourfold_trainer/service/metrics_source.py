"""Exports step, version and phases at the trainer's metrics endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fourfold.service.exporter import Exported, Reading, Source, one_of
from fourfold_trainer.service.engine_thread import Phase
from fourfold_trainer.service.state import TrainerCore

_STEP: Final = Exported("fourfold_trainer_step", "gauge", "last step trained; a loaded checkpoint lowers it")
_VERSION: Final = Exported("fourfold_trainer_policy_version", "gauge", "version of the trainer's weights")
_SKIPPED: Final = Exported(
    "fourfold_trainer_skipped_steps", "gauge", "steps that changed no weights, up to the last step"
)
_CHECKPOINT: Final = Exported("fourfold_trainer_checkpoint_step", "gauge", "step of the newest checkpoint; -1 for none")
_PHASE: Final = Exported(
    "fourfold_trainer_phase", "gauge", "1 for the present activity of the engine, else 0", ("phase",)
)
_SECONDS: Final = Exported("fourfold_trainer_phase_seconds_total", "counter", "seconds in each activity", ("phase",))
_TOKENS: Final = Exported(
    "fourfold_trainer_trained_tokens_total", "counter", "tokens in the loss, of the steps of this process"
)
EXPORTED: Final = (_STEP, _VERSION, _SKIPPED, _CHECKPOINT, _PHASE, _SECONDS, _TOKENS)


def trainer_source(core: TrainerCore) -> Source:
    def read() -> Iterator[Reading]:
        status = core.status()
        yield _STEP, status.state.step
        yield _VERSION, status.state.policy_version
        yield _SKIPPED, status.state.skipped_step_count
        yield _CHECKPOINT, status.checkpoint_step
        yield _PHASE, one_of(status.phase.name, Phase.__members__)
        yield _SECONDS, {phase.name: seconds for phase, seconds in core.phase_seconds().items()}
        yield _TOKENS, core.trained_tokens

    return read
