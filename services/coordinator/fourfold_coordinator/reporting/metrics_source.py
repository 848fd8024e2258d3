"""Exports the state of the run at the coordinator's metrics endpoint."""

from __future__ import annotations

import asyncio
import math
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from fourfold.coordinator.v1 import run_service_pb2 as pb
from fourfold.host.clock import SYSTEM_CLOCK, Clock
from fourfold.metrics import METRICS
from fourfold.service.exporter import Exported, Reading, ReasonLabels, one_of

from ..routing.registry import ROLE_NAMES
from ..state.faults import FaultLog
from ..state.ledger import SampleCounts, SampleState, read_sample_counts
from ..state.run_board import RunBoard
from .run_totals import RunTotals

_PHASE: Final = Exported(
    "fourfold_run_phase", "gauge", "1 for the present phase (with overlap: the trainer's), else 0", ("phase",)
)
_GROUPS: Final = Exported(
    "fourfold_run_groups", "gauge", "groups between admission and training, if max_policy_lag >= 1", ("state",)
)
_LAG_LIMIT: Final = Exported(
    "fourfold_run_lag_limit", "gauge", "largest policy lag that new groups may reach; 0: no overlap"
)
_STEP: Final = Exported("fourfold_run_step", "gauge", "steps done; a restored checkpoint lowers it")
_STEPS: Final = Exported("fourfold_run_steps", "gauge", "steps of the whole run")
_VERSION: Final = Exported("fourfold_run_policy_version", "gauge", "policy version published last")
_WAITING: Final = Exported("fourfold_run_waiting", "gauge", "1 while the run waits for a service or makes no progress")
_CONDITIONS: Final = Exported(
    "fourfold_run_conditions", "gauge", "things that are wrong now; `fourfold watch` shows them"
)
_MEMBERS: Final = Exported(
    "fourfold_run_members", "gauge", "registered services by the state of their lease", ("role", "state")
)
_SAMPLES: Final = Exported(
    "fourfold_run_samples", "gauge", "samples of the run in each state of the ledger, at most 10 s old", ("state",)
)
_DROPPED: Final = Exported("fourfold_run_dropped_samples", "gauge", "DROPPED samples by reason", ("reason",))
_FAULTS: Final = Exported(
    "fourfold_run_faults_total", "counter", "failed calls and samples of services; most are tried again", ("reason",)
)
_RESTARTS: Final = Exported(
    "fourfold_run_restarts_total", "counter", "services that replaced a dead one during the run"
)
_METRIC: Final = Exported(
    "fourfold_run_metric", "gauge", "value of the last step for each metric of metrics.jsonl, in its unit", ("metric",)
)
EXPORTED: Final = (
    _PHASE, _STEP, _STEPS, _VERSION, _GROUPS, _LAG_LIMIT, _WAITING, _CONDITIONS, _MEMBERS, _SAMPLES, _DROPPED, _FAULTS,
    _RESTARTS, _METRIC,
)  # fmt: skip

_COUNT_SECONDS: Final = 10.0
_PHASES: Final = tuple(
    name.removeprefix("RUN_PHASE_") for name in dict(pb.RunPhase.items()) if "UNSPECIFIED" not in name
)
_STATES: Final = {pb.MEMBER_STATE_LIVE: "live", pb.MEMBER_STATE_SILENT: "silent"}


class RunSource:
    """Reads the state of one run where the coordinator keeps it."""

    def __init__(self, board: RunBoard, faults: FaultLog, ledger_path: Path, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.totals: RunTotals | None = None  # set when the ledger is open
        self._board, self._faults, self._ledger_path = board, faults, ledger_path
        self._counts, self._counted, self._clock = SampleCounts(), -math.inf, clock
        self._drop_reasons, self._fault_reasons = ReasonLabels(), ReasonLabels()

    async def refresh(self) -> None:
        """Count the samples in a thread and not at every scrape: a million of them take half a second."""
        if self._clock.monotonic() - self._counted < _COUNT_SECONDS:
            return
        self._counted = self._clock.monotonic()
        with suppress(sqlite3.Error):  # no ledger yet, or a busy one: keep the last counts
            self._counts = await asyncio.to_thread(read_sample_counts, self._ledger_path)

    def read(self) -> Iterator[Reading]:
        status = self._board.status
        yield _PHASE, one_of(pb.RunPhase.Name(status.phase).removeprefix("RUN_PHASE_"), _PHASES)
        yield _STEP, status.step
        yield _STEPS, status.step_count
        yield _VERSION, status.policy_version
        queue = status.queue
        groups = {"running": queue.running_groups, "ready": queue.ready_groups}
        yield _GROUPS, groups if status.HasField("queue") else {}
        yield _LAG_LIMIT, queue.lag_limit
        yield _WAITING, bool(status.waiting_for)
        yield _CONDITIONS, len(status.conditions)
        members = Counter((member.role, _STATES.get(member.state)) for member in status.members)
        yield _MEMBERS, {(r, state): members[r, state] for r in ROLE_NAMES.values() for state in _STATES.values()}
        yield _SAMPLES, {state.name: self._counts.states.get(state, 0) for state in SampleState}
        yield _DROPPED, self._drop_reasons.apply(self._counts.dropped)
        yield _FAULTS, self._fault_reasons.apply(self._faults.counts())
        yield _RESTARTS, 0 if self.totals is None else self.totals.restarts.total()
        last = status.steps[-1].metrics if status.steps else {}
        # Export only known names, because the trainer sends some of the metrics.
        yield _METRIC, {name: last[name] for name in METRICS if name in last}
