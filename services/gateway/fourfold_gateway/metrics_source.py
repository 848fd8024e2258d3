"""Exports sessions, turns and engines at the gateway's metrics endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fourfold.service.exporter import Exported, Reading, Source
from fourfold_gateway.core import GatewayCore
from fourfold_gateway.engines import EnginePool

_OPEN: Final = Exported("fourfold_gateway_sessions", "gauge", "open sessions, and closed ones that wait for the run")
_ENDED: Final = Exported(
    "fourfold_gateway_ended_sessions_total", "counter", "settled sessions, with state and reason", ("reason",)
)
_TURNS: Final = Exported("fourfold_gateway_turns_total", "counter", "finished turns, each sample counted")
_TOKENS: Final = Exported("fourfold_gateway_tokens_total", "counter", "sampled tokens of finished turns")
_ENGINES: Final = Exported("fourfold_gateway_engines", "gauge", "engines that can get calls")
_FAILURES: Final = Exported("fourfold_gateway_engine_failures_total", "counter", "calls that failed in an engine")
_CONTINUED: Final = Exported(
    "fourfold_gateway_continued_samples_total", "counter", "samples that were continued after an engine ended them"
)
EXPORTED: Final = (_OPEN, _ENDED, _TURNS, _TOKENS, _ENGINES, _FAILURES, _CONTINUED)


def gateway_source(core: GatewayCore, engines: EnginePool) -> Source:
    """Return the source of the gateway's metrics."""

    def read() -> Iterator[Reading]:
        yield _OPEN, len(core.sessions.live)
        yield _ENDED, dict(core.sessions.ended)
        yield _TURNS, core.generator.turns
        yield _TOKENS, core.generator.tokens
        yield _ENGINES, len(engines.usable)
        yield _FAILURES, engines.failures
        yield _CONTINUED, engines.continuations

    return read
