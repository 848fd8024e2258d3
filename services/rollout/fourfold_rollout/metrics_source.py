"""Exports samples, KV cache and weight updates at the rollout service's metrics endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fourfold.service.exporter import Exported, Reading, Source
from fourfold_rollout.generate.servicer import RolloutServicer
from fourfold_rollout.update.controller import WeightController

_VERSION: Final = Exported("fourfold_rollout_policy_version", "gauge", "version that new samples get")
_SAMPLES: Final = Exported(
    "fourfold_rollout_samples",
    "gauge",
    "running: in the engine; waiting: admitted, but not in the engine yet",
    ("state",),
)
_TOKENS: Final = Exported("fourfold_rollout_sampled_tokens_total", "counter", "sampled tokens, without the warm-up")
_RATE: Final = Exported(
    "fourfold_rollout_tokens_per_second", "gauge", "sampled tokens per second while samples ran, lately"
)
_KV_CACHE: Final = Exported("fourfold_rollout_kv_cache_tokens", "gauge", "size of the KV cache; 0 if it is not known")
_KV_FREE: Final = Exported("fourfold_rollout_kv_cache_free_tokens", "gauge", "tokens for which the KV cache has room")
_PHASES: Final = Exported(
    "fourfold_rollout_update_seconds_total",
    "counter",
    "seconds in each phase of weight updates; READY: in none",
    ("phase",),
)
_DIRTY: Final = Exported(
    "fourfold_rollout_weights_dirty", "gauge", "1 if the weights may be mixed and nothing is served"
)
_SLEEPING: Final = Exported("fourfold_rollout_sleeping", "gauge", "1 while memory of the engine is freed")
EXPORTED: Final = (_VERSION, _SAMPLES, _TOKENS, _RATE, _KV_CACHE, _KV_FREE, _PHASES, _DIRTY, _SLEEPING)


def rollout_source(servicer: RolloutServicer, weights: WeightController, *, kv_cache_tokens: int) -> Source:
    def read() -> Iterator[Reading]:
        load = servicer.meter.read(updating=weights.updating or weights.joining)
        yield _VERSION, weights.policy_version
        yield _SAMPLES, {"running": load.running_samples, "waiting": servicer.waiting_samples}
        yield _TOKENS, load.sampled_tokens
        yield _RATE, load.token_rate
        yield _KV_CACHE, kv_cache_tokens
        yield _KV_FREE, load.free_kv_cache_tokens
        yield _PHASES, {phase.name: seconds for phase, seconds in weights.phase_seconds.items()}
        yield _DIRTY, weights.dirty
        yield _SLEEPING, weights.sleeping

    return read
