"""The interface between the rollout service and an inference engine, and the types that cross it.

`fourfold_rollout.vllm.engine` implements `RolloutEngine` with vLLM; tests bring a fake. `update/controller.py` ensures
that the engine samples nothing while its weights change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import numpy as np

from fourfold.address import LOOPBACK
from fourfold.arrays import Int32Array
from fourfold.errors import FourfoldError
from fourfold.sample.sampled import SampledColumns

EMPTY_IDS: Final[Int32Array] = np.empty(0, np.int32)


class Finish(Enum):
    """The reason why a sample ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The model, the limits and the options that an engine starts with."""

    folder: Path  # Hugging Face model folder
    dtype: Literal["bfloat16", "float32"]
    head_dtype: Literal["", "float32"] = ""  # dtype of the logits; empty: `dtype`
    max_context_tokens: int
    max_concurrent_samples: int
    max_batched_tokens: int
    enforce_eager: bool
    kv_cache_gib: int | None  # KV cache of each GPU; None: 1 on CPU, the rest of `gpu_memory_utilization` on GPUs
    gpus: int  # 0: CPU
    stages: int = 1  # stages of the pipeline; each has an equal part of the GPUs
    gpu_memory_utilization: float
    seed: int
    sleep_mode: bool = False  # lets the engine free its memory between steps; no effect on CPU
    quantization: str = ""  # vLLM's name of a weight format; empty: the checkpoint's own
    adapter_rank: int = 0  # rank of the LoRA adapters that updates bring; 0: updates bring whole weights
    adapter_layers: tuple[str, ...] = ()  # last parts of the names of their layers, such as q_proj
    options: Mapping[str, Any] = field(default_factory=dict)  # vLLM's options by their own names, checked at the start
    options_key: str = "rollout.vllm"  # key of the recipe, for messages
    disabled_patches: frozenset[str] = frozenset()  # disabled patches of vLLM; see vllm/patches/README.md


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleOutput(SampledColumns):
    """The n new tokens of one sample since its last output. The receiver owns the arrays."""

    finish: Finish | None = None  # set on the last output


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarConstraint:
    """A grammar that the tokens of a sample must follow."""

    kind: Literal["json_schema", "regex", "ebnf", "structural_tag_json"]
    text: str
    prefix_count: int = 0  # the last tokens of the prompt that the grammar has accepted already


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedText:
    """The parts of a completion."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[tuple[str, str], ...] = ()  # (name, arguments), as the model wrote them


class TextWork(Protocol):
    """Work on texts that may be hostile; it never blocks the event loop."""

    @property
    def tool_parser(self) -> str:
        """Name of the parser of tool calls; empty: none."""

    @property
    def reasoning_parser(self) -> str:
        """Name of the parser of reasoning; empty: none."""

    async def parse(self, text: str, tools_json: str) -> ParsedText:
        """Return the parts of a completion. Raises InvalidInput: the tools are malformed."""

    async def check_grammar(
        self, constraint: GrammarConstraint, stop_token_ids: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Check a grammar before the engine gets it. Raises InvalidInput: the grammar does not compile in time, or does
        not accept the tokens `accepted`.
        """


class SampleSink(Protocol):
    """Receives the outputs of one call's samples, on the event loop, from `submit` on. No method may block."""

    def put(self, index: int, output: SampleOutput) -> None:
        """Take the next tokens of a sample. No output follows one with `finish`.

        An output has no version: `CallOutputs.put` reads that of its tokens from `token_hold.version`.
        """

    def boundary(self, index: int, token_count: int) -> None:
        """Note that sampling is paused with `token_count` tokens sampled so far, including tokens not yet `put`.

        Later tokens may come from other weights.
        """

    def fail(self, error: FourfoldError) -> None:
        """End a sample with an error: the engine died or returned an unusable output. No output follows."""


class EngineSample(Protocol):
    """A sample in the engine."""

    def flush(self) -> None:
        """Give the sink all tokens that it lacks now; if it lacks none, the next ones as soon as they are sampled.

        Raises nothing. Does nothing after the end of the sample.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One sample to draw, with every value checked."""

    key: str  # unique among the samples in flight
    prompt_token_ids: list[int]
    temperature: float
    top_p: float
    top_k: int  # 0: all tokens
    max_tokens: int
    stop_token_ids: tuple[int, ...]  # includes the model's own
    seed: int
    cache_salt: str  # prompts share cached prefixes only under one salt: that of the weights (`RequestLease`)
    streaming: bool  # True: put tokens when they are sampled; False: at the end, and on `EngineSample.flush`
    sink: SampleSink = field(repr=False, compare=False)
    index: int = 0  # identifies the sample to its sink
    grammar: GrammarConstraint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """The constant properties of a running engine."""

    version: str
    device_type: str
    device_uuids: tuple[bytes, ...]
    backends: tuple[str, ...]  # weight transports, best first
    worker_count: int
    vocabulary_size: int
    max_context_tokens: int
    kv_cache_tokens: int  # 0: not known
    sleep_mode: bool = False
    grammar_obstacle: str = ""  # why samples cannot have a grammar; empty: they can


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The load of an engine at one moment."""

    running_samples: int
    sampled_tokens: int  # since the start, including those of running samples that were not put yet
    held_tokens: int  # prompts and sampled tokens of the running samples


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochTerms:
    """The terms of a weight epoch: the fields of OpenWeightsRequest."""

    epoch: int
    backend: str
    manifest: bytes = field(repr=False)
    offers: tuple[bytes, ...] = field(repr=False)  # opaque addresses of the senders; never logged
    receiver_count: int
    first_receiver_index: int
    host: str = LOOPBACK  # address at which the other members reach this engine
    interface: str = ""  # network interface on which it listens instead


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedTerms:
    """The late engines that this one feeds: the fields of FeedWeightsRequest."""

    epoch: int
    policy_version: int
    receiver_count: int
    host: str = LOOPBACK
    interface: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenReport:
    """The ways in which an engine applies the weights of an epoch."""

    direct_tensor_count: int  # tensors that are written in place
    reload_tensor_count: int
    reload_reason: str = ""  # reason for reloading tensors that could be written in place; empty: none are reloaded


class RolloutEngine(Protocol):
    """A running engine. Every method may raise `Unavailable` when the engine is dead."""

    @property
    def description(self) -> EngineDescription:
        """The constant properties of the engine."""

    @property
    def running_count(self) -> int:
        """The number of samples submitted and not finished."""

    def load(self) -> EngineLoad:
        """Return the present load, in one pass over the running samples."""

    async def submit(self, requests: Sequence[SampleRequest]) -> Sequence[EngineSample]:
        """Start samples. All of them join the same engine step, in this order."""

    async def abandon(self, samples: Sequence[EngineSample]) -> None:
        """End samples without further output to their sinks. Finished samples are ignored."""

    async def interrupt(self) -> None:
        """End all running samples with the tokens that they have and `Finish.ABORTED`."""

    async def settle(self) -> None:
        """Return when no engine step is in progress. No sample may be running."""

    async def pause(self) -> None:
        """Stop sampling. Running samples stay and new ones wait, until `resume` or `interrupt`.

        Returns when no step is in progress, every sampled token is put or counted, and the sink of every running
        sample has got its boundary. If it fails, sampling goes on.
        """

    async def resume(self) -> None:
        """Continue sampling after `pause`. Does not wait for the engine."""

    async def forget_prefixes(self, *, recompute: bool) -> None:
        """Between `pause` and `resume`, drop all cached prefixes, so that a sample reads only its own keys and values.

        With `recompute`, running samples lose their keys and values, too, and compute them again after `resume`.
        """

    async def prompt_logprobs(self, token_ids: Sequence[int], *, first: bool = True) -> list[float]:
        """Return the log-probability of each token given those before it, at temperature 1. The first is NaN.

        `first`: the request comes before waiting samples. Raises Unavailable: the request was interrupted.
        """

    async def prove_updates(self, *, timeout: float) -> str:
        """Test whether updates replace all weights; return the reason why later updates are refused, or an empty text.

        The engine must be idle and hold the weights of its start. Raises WrongState: the engine lost these weights.
        """

    async def open_weights(self, terms: EpochTerms, *, timeout: float) -> OpenReport:
        """Join a weight epoch.

        Raises:
            InvalidInput, WrongState: the manifest does not fit the model; nothing changed.
            StaleEpoch, DeadlinePassed, Unavailable: stopped, or a sender is unreachable; the epoch is closed.
        """

    async def receive_weights(self, *, epoch: int, policy_version: int, skip_sums: bool, timeout: float) -> bytes:
        """Receive and load a version; return its digest. No sample may run meanwhile."""

    async def feed_weights(self, terms: FeedTerms, *, timeout: float) -> list[bytes]:
        """Begin to send the served weights to late engines; return their offers. See `WeightReceiver.feed`."""

    async def mark_served(self, *, epoch: int, policy_version: int) -> None:
        """Tell the workers that the received version is served: at the commit, or with hold at the release."""

    async def abort_weights(self, *, epoch: int) -> bool:
        """Close the epoch; return whether the loaded weights are exactly those of the served version."""

    def abort_transfers(self, *, epoch: int) -> None:
        """End every wait of the workers in `epoch` and earlier epochs. Returns at once."""

    async def weight_sums(self, *, epoch: int) -> bytes:
        """Return the 16-byte sums of the tensors received last; empty if the sums were skipped."""

    async def sleep(self, level: int, *, timeout: float) -> None:
        """Free GPU memory: the KV cache, and the weights (1: copied to host memory, 2: dropped). No sample may run."""

    async def wake(self, tags: Sequence[str], *, timeout: float) -> None:
        """Allocate freed memory again: "weights", "kv_cache" or both. None of the tags may be awake."""
