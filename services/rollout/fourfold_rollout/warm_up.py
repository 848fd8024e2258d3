"""Has an engine do once, before anybody waits for it, what its first caller would otherwise pay for.

Kernels are compiled when they are first needed: Triton's of the sampler and of the log-probabilities on GPUs, and those
of a probe. A part of it cannot be seen beforehand, so the engine samples for real: two tokens as an agent asks for
them, two with top-k and top-p, and a probe.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from fourfold.errors import DeadlinePassed, FourfoldError
from fourfold_rollout.engine import RolloutEngine, SampleOutput, SampleRequest

_log = logging.getLogger(__name__)
# With an empty cache of compiled kernels, on a machine that is busy.
_SECONDS: Final = 120.0
_PROMPT: Final = [0, 0]
_FILTERS: Final = ((1.0, 0), (0.9, 2))
"""top_p and top_k of each sample."""


async def warm_up(engine: RolloutEngine, *, timeout: float = _SECONDS) -> None:
    """Sample and probe; nothing of it stays in the engine. Nobody else may use it yet.

    Raises:
        DeadlinePassed: it has not done so in time.
        Unavailable, Internal: it cannot.
    """
    began = time.monotonic()
    try:
        async with asyncio.timeout(timeout):
            for top_p, top_k in _FILTERS:
                await _sample(engine, top_p, top_k)
            await engine.prompt_logprobs(_PROMPT)
    except TimeoutError:
        raise DeadlinePassed(
            f"the engine has not sampled its first tokens for {timeout:.0f} s, and a start allows no more; its log "
            "says what it does"
        ) from None
    _log.info("the engine's first samples took %.1f s", time.monotonic() - began)


async def _sample(engine: RolloutEngine, top_p: float, top_k: int) -> None:
    end = _End()
    request = SampleRequest(
        key=f"warm-up-{top_k}",
        prompt_token_ids=_PROMPT,
        temperature=0.9,
        top_p=top_p,
        top_k=top_k,
        max_tokens=2,
        stop_token_ids=(),
        seed=0,
        cache_salt="warm-up",
        streaming=False,
        sink=end,
    )
    await engine.submit([request])
    await end.reached


class _End:
    """A `Sink` that waits for the end of one sample."""

    def __init__(self) -> None:
        self.reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def put(self, index: int, output: SampleOutput) -> None:
        """Look whether it is the last."""
        if output.finish is not None and not self.reached.done():
            self.reached.set_result(None)

    def boundary(self, index: int, token_count: int) -> None:
        """Nothing stops the engine here."""

    def fail(self, error: FourfoldError) -> None:
        """Raise it where the end is awaited."""
        if not self.reached.done():
            self.reached.set_exception(error)
