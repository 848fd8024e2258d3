"""Sends a run to Weights & Biases, or keeps it offline for `wandb sync`."""

from __future__ import annotations

import os
from typing import Literal

import wandb

from .rows import MetricRow
from .sink import RunFacts, Sink


class TrackerSink(Sink):
    """Metrics over the axis `step`, so that a repeated step is accepted, too."""

    def __init__(self, run: RunFacts) -> None:
        """Start the run; raises wandb.Error after the time limit of the library."""
        logging = run.config.logging
        run.sink_folder.mkdir(exist_ok=True)
        self._run = wandb.init(
            project=logging.project,
            entity=logging.wandb_entity or None,
            group=logging.group or None,
            tags=tuple(logging.tags) or None,
            name=run.config.name,
            id=run.run_id,
            resume="allow",
            dir=str(run.sink_folder),
            mode=_mode(),
            config=dict(run.recipe()),
            # This process does not train, so its console, code and machine say nothing about the run.
            settings=wandb.Settings(console="off", disable_code=True, disable_git=True, x_disable_stats=True),
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, row: MetricRow) -> None:
        """Log the metrics of a step."""
        times = {"_timestamp": row.time} if row.time else {}
        self._run.log({**row.values, **times, "step": row.step})

    def finish(self) -> None:
        """Wait for the upload, and for W&B's process, which writes the last part of an offline run when it ends."""
        self._run.finish()
        wandb.teardown()


def _mode() -> Literal["online", "offline"] | None:
    """Return the mode; None: that of the variable WANDB_MODE."""
    if os.environ.get("WANDB_MODE"):
        return None
    return "online" if wandb.login(prompt=False) else "offline"
