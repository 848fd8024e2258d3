"""Sends a run to trackio: a local database, shown by `trackio show`, or a server that its variables name."""

from __future__ import annotations

import trackio

from .rows import MetricRow
from .sink import RunFacts, Sink


class TrackerSink(Sink):
    """Metrics with the names of fourfold/metrics.py."""

    def __init__(self, run: RunFacts) -> None:
        """Start the run under its name and id."""
        logging = run.config.logging
        self._run = trackio.init(
            project=logging.project,
            name=f"{run.config.name}-{run.run_id}",
            group=logging.group or None,
            config=dict(run.recipe()),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, row: MetricRow) -> None:
        """Log the metrics of a step."""
        self._run.log(row.values, step=row.step)

    def finish(self) -> None:
        """Write buffered metrics."""
        self._run.finish()
