"""Exports the samples and worker processes at the reward service's metrics endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fourfold.service.exporter import Exported, Reading, Source
from fourfold_reward.pool import WorkerPool
from fourfold_reward.protocol import ERROR_CODES
from fourfold_reward.servicer import RewardServicer

_SAMPLES: Final = Exported(
    "fourfold_reward_samples_total",
    "counter",
    "samples by outcome: SCORED, ABSTAINED, or the reason of an error",
    ("outcome",),
)
_SECONDS: Final = Exported("fourfold_reward_sample_seconds", "histogram", "time of one sample in a worker process")
_WORKERS: Final = Exported("fourfold_reward_workers", "gauge", "worker processes (reward.processes)", ("state",))
_WAITING: Final = Exported("fourfold_reward_waiting_samples", "gauge", "samples that wait for a worker process")
EXPORTED: Final = (_SAMPLES, _SECONDS, _WORKERS, _WAITING)


def reward_source(pool: WorkerPool, servicer: RewardServicer) -> Source:
    def read() -> Iterator[Reading]:
        yield _SAMPLES, {name: servicer.outcomes[name] for name in ("SCORED", "ABSTAINED", *ERROR_CODES)}
        yield _SECONDS, pool.seconds
        yield _WORKERS, {"busy": pool.busy, "idle": pool.process_count - pool.busy}
        yield _WAITING, pool.waiting_samples

    return read
