"""Sends a run to an MLflow tracking server or database."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from .rows import MetricRow
from .sink import RunFacts, Sink

T = TypeVar("T")

_DATABASE: Final = "mlflow.db"  # one database beside the folders of all runs
# Limits of MLflow's log-batch call.
_MAX_METRICS: Final = 1000
_MAX_PARAMS: Final = 100
_MAX_PARAM_CHARACTERS: Final = 6000
_ID_TAG: Final = "fourfold.run_id"
_UNSUITABLE: Final = re.compile(r"[^A-Za-z0-9_\-. :/]")


class TrackerSink(Sink):
    """Metrics with the names of fourfold/metrics.py; parameters with the keys of the recipe."""

    def __init__(self, run: RunFacts) -> None:
        """Find or create the experiment and the run; raises MlflowException if the server refuses."""
        logging = run.config.logging
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.folder.absolute().parent / _DATABASE}"
        self._client = MlflowClient(uri)
        experiment = self._client.get_experiment_by_name(logging.project)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(logging.project)
        found = self._client.search_runs([experiment_id], f"tags.`{_ID_TAG}` = '{run.run_id}'", max_results=1)
        if found:
            self._id: str = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        tags = {_ID_TAG: run.run_id, **dict.fromkeys(logging.tags, "true")}
        tags |= {"group": logging.group} if logging.group else {}
        self._id = self._client.create_run(experiment_id, run_name=run.config.name, tags=tags).info.run_id
        params = [Param(_key(key), str(value)[:_MAX_PARAM_CHARACTERS]) for key, value in run.recipe().items()]
        for part in _parts(params, _MAX_PARAMS):
            self._client.log_batch(self._id, params=part)
        self._client.log_batch(self._id, tags=[RunTag("fourfold.folder", str(run.folder.absolute()))])

    def log(self, row: MetricRow) -> None:
        """Log the metrics of a step; MLflow shows the newest value of a step that is sent twice."""
        milliseconds = round((row.time or time.time()) * 1000)
        metrics = [Metric(_key(key), value, milliseconds, row.step) for key, value in row.values.items()]
        for part in _parts(metrics, _MAX_METRICS):
            self._client.log_batch(self._id, metrics=part)

    def finish(self) -> None:
        """Mark the run as finished in MLflow."""
        self._client.set_terminated(self._id)


def _key(key: str) -> str:
    return _UNSUITABLE.sub("_", key)


def _parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))
