"""Exports the samples and worker processes at the reward service's metrics endpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Protocol, runtime_checkable

from fourfold.host.timing import Histogram
from fourfold.service.exporter import Exported, Reading, Source
from fourfold_reward.backend import Backend
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
_TOKENS: Final = Exported(
    "fourfold_reward_judge_tokens_total", "counter", "tokens of a judge: prompt, completion", ("kind",)
)
_COST: Final = Exported("fourfold_reward_judge_cost_usd_total", "counter", "price of a judge's tokens in US dollars")
EXPORTED: Final = (_SAMPLES, _SECONDS, _WORKERS, _WAITING, _TOKENS, _COST)


@runtime_checkable
class _Timed(Protocol):
    seconds: Histogram


@runtime_checkable
class _Pool(Protocol):
    @property
    def process_count(self) -> int: ...


@runtime_checkable
class _Paid(Protocol):
    tokens: Mapping[str, int]
    cost_usd: float


def reward_source(backend: Backend, servicer: RewardServicer) -> Source:
    """Return the numbers of a service. A backend without processes, times or costs has zeros in their place."""

    def read() -> Iterator[Reading]:
        yield _SAMPLES, {name: servicer.outcomes[name] for name in ("SCORED", "ABSTAINED", *ERROR_CODES)}
        yield _SECONDS, backend.seconds if isinstance(backend, _Timed) else Histogram()
        count = backend.process_count if isinstance(backend, _Pool) else 0
        busy = min(backend.busy, count)
        yield _WORKERS, {"busy": busy, "idle": count - busy}
        yield _WAITING, backend.waiting_samples
        tokens = backend.tokens if isinstance(backend, _Paid) else {}
        yield _TOKENS, {kind: tokens.get(kind, 0) for kind in ("prompt", "completion")}
        yield _COST, backend.cost_usd if isinstance(backend, _Paid) else 0.0

    return read
