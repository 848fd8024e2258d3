"""What the service needs of an engine. vLLM's implementation is `fourfold_rollout.vllm.engine`; tests bring a fake.

The servicer hands over samples, one by one or several at once, each with the sink that takes its
outputs; the weight state machine (`weights.py`) makes sure that nothing is sampled while weights change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import numpy as np

from fourfold.arrays import Float32Array, Int32Array
from fourfold.errors import FourfoldError

EMPTY_IDS: Final[Int32Array] = np.empty(0, np.int32)


class Finish(Enum):
    """Why a sample ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What to start."""

    folder: Path
    """Hugging Face model folder."""
    dtype: Literal["bfloat16", "float32"]
    max_context_tokens: int
    max_concurrent_samples: int
    max_batched_tokens: int
    enforce_eager: bool
    kv_cache_gib: int | None
    """On each GPU; None: 1 on CPU, and what `gpu_memory_utilization` leaves on GPUs."""
    gpus: int
    """0: CPU."""
    gpu_memory_utilization: float
    seed: int
    sleep_mode: bool = False
    """Memory that can be given up while nobody samples; no effect on CPU."""
    quantization: str = ""
    """vLLM's name of a way to hold the weights; empty: as they come."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the engine itself, by its own names; checked when it starts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleOutput:
    """New tokens of one sample since its last output.

    n tokens; the arrays are of nobody else.
    """

    token_ids: Int32Array  # [n]
    logprobs: Float32Array  # [n]
    """Natural log, of the distribution that was sampled from (temperature, top-p and top-k applied)."""
    finish: Finish | None = None
    """Set on the last output."""

    def __add__(self, later: SampleOutput) -> SampleOutput:
        return SampleOutput(
            token_ids=np.concatenate([self.token_ids, later.token_ids]),
            logprobs=np.concatenate([self.logprobs, later.logprobs]),
            finish=later.finish,
        )


class SampleSink(Protocol):
    """Takes the outputs of some samples. Called on the event loop, from the moment of `submit`; never waits."""

    def put(self, index: int, output: SampleOutput) -> None:
        """Take the next tokens of a sample; after one with `finish` none comes."""
        ...

    def boundary(self, index: int, token_count: int) -> None:
        """Know that sampling stands still, and a sample has `token_count` tokens, `put` or not.

        The ones after them may come from other weights.
        """
        ...

    def fail(self, error: FourfoldError) -> None:
        """Know that a sample gets nothing any more: the engine died, or gave what cannot be used."""
        ...


class EngineSample(Protocol):
    """A sample in the engine."""

    @property
    def request(self) -> SampleRequest:
        """What was asked for."""
        ...

    def give(self) -> None:
        """`put` what is sampled and not put yet; if nothing is, the next tokens as they come, once.

        Raises nothing; does nothing after the end.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One sample to draw. Everything is checked already."""

    key: str
    """Unique among the samples in flight."""
    prompt_token_ids: list[int]
    temperature: float
    top_p: float
    top_k: int
    """0: all tokens."""
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    """All of them, the model's own included."""
    seed: int
    cache_salt: str
    """Prompts share cached prefixes only under one salt: that of the weights (`Lease.cache_salt`)."""
    streaming: bool
    """Give tokens as they come; otherwise at the end, but for those that `Sample.give` asks for."""
    sink: SampleSink = field(repr=False, compare=False)
    """Takes the outputs."""
    index: int = 0
    """Tells the sink's samples apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """What never changes while an engine lives."""

    version: str
    device_type: str
    device_uuids: tuple[bytes, ...]
    backends: tuple[str, ...]
    """Weight transports, best first."""
    worker_count: int
    vocabulary_size: int
    max_context_tokens: int
    kv_cache_tokens: int
    """Tokens that the KV cache holds; 0: not known."""
    sleep_mode: bool = False
    """Whether it can sleep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What an engine holds at a moment."""

    running_samples: int
    sampled_tokens: int
    """Since the start, those of running samples that are not handed over yet included."""
    held_tokens: int
    """Of the running samples: prompts and what is sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochTerms:
    """What an engine joins a weight epoch with; the fields are those of OpenWeightsRequest."""

    epoch: int
    backend: str
    manifest: bytes = field(repr=False)
    offers: tuple[bytes, ...] = field(repr=False)
    """Opaque, never logged."""
    receiver_count: int
    first_receiver_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenReport:
    """How an engine will apply weights."""

    direct_tensor_count: int
    """Tensors that are written in place."""
    reload_tensor_count: int
    reload_reason: str = ""
    """Why tensors are reloaded that the device could write in place; empty: none is."""


class RolloutEngine(Protocol):
    """An engine that runs. Every method may raise `Unavailable` when it is dead."""

    @property
    def description(self) -> EngineDescription:
        """What it is."""
        ...

    @property
    def running_count(self) -> int:
        """Samples submitted and not finished."""
        ...

    def load(self) -> EngineLoad:
        """Return what it holds now: one pass over the running samples."""
        ...

    async def submit(self, requests: Sequence[SampleRequest]) -> Sequence[EngineSample]:
        """Start samples; all of them join the same engine step, in this order."""
        ...

    async def abandon(self, samples: Sequence[EngineSample]) -> None:
        """End samples that nobody wants any more; finished ones are left alone. Their sinks take nothing more."""
        ...

    async def interrupt(self) -> None:
        """End all running samples with the tokens they have, `Finish.ABORTED`."""
        ...

    async def settle(self) -> None:
        """Return when no step is under way any more. Nothing may be running."""
        ...

    async def pause(self) -> None:
        """Stop sampling where it stands. Running samples stay, and new ones wait, until `resume` or `interrupt`.

        Returns when no step is under way, everything that is sampled is `put` or counted, and the sink of every
        running sample knows the boundary. When it fails, sampling goes on.
        """
        ...

    async def resume(self) -> None:
        """Go on after `pause`; returns at once."""
        ...

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of each token after the ones before it, at temperature 1; the first is NaN."""
        ...

    async def open_weights(self, terms: EpochTerms, *, timeout: float) -> OpenReport:
        """Join an epoch.

        Raises:
            InvalidInput, WrongState: it does not fit; nothing changed.
            StaleEpoch, DeadlinePassed, Unavailable: it was stopped, or the senders cannot be met; the epoch is closed.
        """
        ...

    async def receive_weights(self, *, epoch: int, policy_version: int, skip_sums: bool, timeout: float) -> bytes:
        """Receive and load a version; return its digest. Nothing may be sampled meanwhile."""
        ...

    async def commit_weights(self, *, epoch: int, policy_version: int) -> None:
        """Note that the received version is served now."""
        ...

    async def abort_weights(self, *, epoch: int) -> bool:
        """Close the epoch; return whether the weights are whole and the served version's."""
        ...

    def stop_transfers(self, *, epoch: int) -> None:
        """End at once what the workers wait for in `epoch` and those before it. Nothing is waited for."""
        ...

    async def weight_sums(self, *, epoch: int) -> bytes:
        """Return the sums of every tensor that was received last, 16 bytes each; none when they were skipped."""
        ...

    async def sleep(self, level: int, *, timeout: float) -> None:
        """Give memory up: the KV cache, and the weights, which wait in the host's memory (1) or are lost (2).

        Nothing may be running.
        """
        ...

    async def wake(self, tags: Sequence[str], *, timeout: float) -> None:
        """Take memory again: "weights", "kv_cache" or both; none that is awake."""
        ...
