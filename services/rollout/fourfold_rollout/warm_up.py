"""Prepares the engine before the service is ready: compiles all kernels, and proves that weight updates work.

Kernels are compiled at their first use: on GPUs Triton's kernels of the sampler and of the log-probabilities, and those
of a probe. vLLM has no list of them. So the engine draws two tokens without top-k and top-p and two with them, and
computes the log-probabilities of a prompt.

The proof overwrites the weights and loads them again by a weight update (`fourfold.weights.apply.proof`). Its workers
compare tensors; here the log-probabilities of a prompt show that the engine also computes with them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import numpy as np

from fourfold.errors import DeadlinePassed, FourfoldError
from fourfold.weights.worker_control import not_proven
from fourfold_rollout.engine import RolloutEngine, SampleOutput, SampleRequest

_log = logging.getLogger(__name__)
# Enough for a busy machine with an empty cache of compiled kernels.
_TIMEOUT_SECONDS: Final = 120.0
_PROMPT: Final = [0, 0]
_PROBE: Final = [0, 1, 2, 3]
# A proof takes about as long as loading the model, for which vLLM has no limit either.
_PROOF_SECONDS: Final = 3600.0
# In nats. The weights are the same bit for bit; kernels that add in any order may round otherwise.
_ROUNDING: Final = 0.01
_FILTERS: Final = ((1.0, 0), (0.9, 2))  # (top_p, top_k) of each sample


async def warm_up(engine: RolloutEngine, *, timeout: float = _TIMEOUT_SECONDS) -> None:
    """Sample and probe. Call it before the engine serves any request. Raises DeadlinePassed."""
    began = time.monotonic()
    async with _limited("its warm-up", timeout):
        for top_p, top_k in _FILTERS:
            await _sample(engine, top_p, top_k)
        await engine.prompt_logprobs(_PROMPT)
    _log.info("Engine warmed up", extra={"seconds": round(time.monotonic() - began, 1)})


async def prove_updates(
    engine: RolloutEngine, *, timeout: float = _PROOF_SECONDS, probe_timeout: float = _TIMEOUT_SECONDS
) -> None:
    """Prove that weight updates replace all weights in use. The engine must not serve requests yet.

    If the model cannot be updated, the engine serves its present weights and refuses updates with the reason.

    Raises:
        DeadlinePassed: the proof, or a probe before or after it, did not end in time.
        WrongState: an update left stale values, and the engine has lost its weights.
    """
    began = time.monotonic()
    async with _limited("a probe before the proof of updates", probe_timeout):
        before = await engine.prompt_logprobs(_PROBE)
    refusal = await engine.prove_updates(timeout=timeout)
    async with _limited("a probe after the proof of updates", probe_timeout):
        after = await engine.prompt_logprobs(_PROBE)
    difference = float(np.abs(np.subtract(before, after)[1:]).max())
    if not difference <= _ROUNDING:  # true for NaN, too
        raise not_proven(
            f"after an update with the same weights its log-probabilities of a prompt differ by {difference:.3g} nats"
        )
    if refusal:
        _log.warning("Weight updates will be refused. reason=%s", refusal)
    else:
        _log.info("Weight updates proven", extra={"seconds": round(time.monotonic() - began, 1)})


@asynccontextmanager
async def _limited(what: str, seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise DeadlinePassed(
            f"the engine did not finish {what} in {seconds:.0f} s, the limit for a start; see the engine's log"
        ) from None


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
    """The sink of one sample; `reached` is done when the sample has ended."""

    def __init__(self) -> None:
        self.reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def put(self, index: int, output: SampleOutput) -> None:
        if output.finish is not None and not self.reached.done():
            self.reached.set_result(None)

    def boundary(self, index: int, token_count: int) -> None:
        """Ignored: nothing pauses the engine during the warm-up."""

    def fail(self, error: FourfoldError) -> None:
        if not self.reached.done():
            self.reached.set_exception(error)
