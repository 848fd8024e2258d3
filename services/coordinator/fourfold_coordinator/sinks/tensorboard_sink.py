"""Writes event files of TensorBoard."""

from __future__ import annotations

from tensorboardX import SummaryWriter

from .rows import MetricRow
from .sink import RunFacts, Sink


class TrackerSink(Sink):
    """Scalars with the names of fourfold/metrics.py."""

    def __init__(self, run: RunFacts) -> None:
        """Open a file; the first one of a run has the recipe as a text."""
        configured = run.config.logging.tensorboard_dir
        self._folder = str(run.sink_folder / "tensorboard") if not configured else f"{configured}/{run.config.name}"
        self._last_step = run.last_step
        self._writer = SummaryWriter(self._folder)
        if run.last_step < 0:
            indented = "\n".join(f"    {key} = {value!r}" for key, value in run.recipe().items())
            self._writer.add_text("recipe", indented, 0)

    def log(self, row: MetricRow) -> None:
        """Add the scalars of a step. A repeated step purges the old one and all later ones."""
        if row.step <= self._last_step:
            self._writer.close()
            self._writer = SummaryWriter(self._folder, purge_step=row.step)
        self._last_step = row.step
        for key, value in row.values.items():
            self._writer.add_scalar(key, value, row.step, walltime=row.time or None)
        self._writer.flush()

    def finish(self) -> None:
        """Close the file."""
        self._writer.close()
