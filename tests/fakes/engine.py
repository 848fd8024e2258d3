"""A fake engine on the event loop: it samples one token per sample when the test calls `tick`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fourfold.errors import FourfoldError, StaleEpoch, Unavailable
from fourfold_rollout.engine import (
    EngineDescription,
    EngineLoad,
    EngineSample,
    EpochTerms,
    FeedTerms,
    Finish,
    OpenReport,
    SampleOutput,
    SampleRequest,
)

VOCABULARY = 100
CONTEXT = 32
STOP_TOKEN = 99
DIGEST = b"d" * 32
SUMS = b"s" * 16


class NullSink:
    """A sink that ignores its outputs."""

    def put(self, index: int, output: SampleOutput) -> None: ...

    def boundary(self, index: int, token_count: int) -> None: ...

    def fail(self, error: FourfoldError) -> None: ...


def sample_request(**changes: Any) -> SampleRequest:
    """Return a request for one sample of a prompt of one token; its outputs are ignored."""
    values: dict[str, Any] = {
        "key": "k", "prompt_token_ids": [1], "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 30,
        "stop_token_ids": (), "seed": 0, "cache_salt": "", "streaming": True, "sink": NullSink(),
    }  # fmt: skip
    return SampleRequest(**(values | changes))


def epoch_terms(epoch: int = 1) -> EpochTerms:
    return EpochTerms(
        epoch=epoch, backend="shm", manifest=b"m", offers=(b"o",), receiver_count=1, first_receiver_index=0
    )


@dataclass(slots=True, eq=False)
class FakeSample:
    """One sample: token i is 10 + i with log-probability -(i + 1)."""

    request: SampleRequest
    versions: list[int] = field(default_factory=list)  # of the weights that really sampled each token
    keys: list[int] = field(default_factory=list)  # of the weights that computed the keys and values of each token
    given: int = 0  # tokens put into the sink
    masks: list[bool] = field(default_factory=list)  # whether a grammar forbade a token, of each token
    asked: bool = False  # put the next tokens as they come
    finish: Finish | None = None

    @property
    def tokens(self) -> int:
        return len(self.versions)

    def flush(self) -> None:
        """Put the tokens that were not put yet, or else the next ones."""
        self.asked = self.tokens == self.given
        if self.finish is None and not self.asked:
            self.put()

    def put(self) -> None:
        """Put the new tokens, and the end if the sample has ended."""
        first, self.given = self.given, self.tokens
        output = SampleOutput(
            token_ids=np.arange(10 + first, 10 + self.tokens, dtype=np.int32),
            logprobs=-np.arange(first + 1, self.tokens + 1, dtype=np.float32),
            finish=self.finish,
            constrained=np.array(self.masks[first : self.tokens], np.bool_),
        )
        self.request.sink.put(self.request.index, output)


class FakeEngine:
    """Implements `RolloutEngine`. It samples only in `tick`."""

    def __init__(self, *, kv_cache_tokens: int = 0, device_type: str = "cpu", sleep_mode: bool = False) -> None:
        self.description = EngineDescription(
            version="0.0",
            device_type="cuda" if sleep_mode else device_type,
            sleep_mode=sleep_mode,
            device_uuids=(),
            backends=("shm", "gloo"),
            worker_count=1,
            vocabulary_size=VOCABULARY,
            max_context_tokens=CONTEXT,
            kv_cache_tokens=kv_cache_tokens,
        )
        self.samples: list[FakeSample] = []
        self.batches: list[list[str]] = []  # keys of the requests of each `submit`
        self.log: list[str] = []
        self.open_error: FourfoldError | None = None
        self.receive_error: FourfoldError | None = None
        self.receive_gate = asyncio.Event()  # a test clears it to make a transfer last until it is stopped
        self.receive_gate.set()
        self.open_gate = asyncio.Event()  # a test clears it to make the senders unreachable
        self.open_gate.set()
        self.stopped_epoch = -1
        self.timeouts: dict[str, float] = {}  # the timeout of the last call of each kind, in seconds
        self.pause_seconds = 0.0
        self.paused = False
        self.loaded = 0  # version of the weights that it samples with
        self.has_old_prefixes = False  # a sample could read keys and values of earlier weights that are not its own
        self.forget_error: FourfoldError | None = None
        self.refusal = ""
        self.shift = self.after_proof = 0.0  # of all log-probabilities, now and after the proof
        self.commit_error: FourfoldError | None = None
        self.abort_is_clean = True
        self.dead: Unavailable | None = None
        self.asleep: set[str] = set()  # tags of freed memory
        self.masks: list[bool] = []  # of each token of new samples
        self.on_score: Callable[[], Awaitable[object]] | None = None  # awaited while log-probabilities are computed
        self.late: FourfoldError | None = None  # sleep and wake raise it after they have done their work

    @property
    def running(self) -> list[FakeSample]:
        """Samples that are not finished."""
        return [s for s in self.samples if s.finish is None and self.dead is None]

    @property
    def running_count(self) -> int:
        return len(self.running)

    def load(self) -> EngineLoad:
        """Count the tokens of all samples, including those of abandoned ones."""
        return EngineLoad(
            running_samples=self.running_count,
            sampled_tokens=sum(s.tokens for s in self.samples),
            held_tokens=sum(len(s.request.prompt_token_ids) + s.tokens for s in self.running),
        )

    async def submit(self, requests: Sequence[SampleRequest]) -> Sequence[EngineSample]:
        if self.dead is not None:
            raise self.dead
        self.batches.append([r.key for r in requests])
        new = [FakeSample(request, masks=self.masks) for request in requests]
        self.samples += new
        return new

    async def abandon(self, samples: Sequence[EngineSample]) -> None:
        for sample in samples:
            if isinstance(sample, FakeSample) and sample.finish is None:
                self.log.append(f"abandon {sample.request.key}")
                sample.finish = Finish.ABORTED

    async def pause(self) -> None:
        await asyncio.sleep(self.pause_seconds)
        self.log.append("pause")
        self.paused = True
        for sample in self.running:
            sample.request.sink.boundary(sample.request.index, sample.tokens)

    async def resume(self) -> None:
        self.log.append("resume")
        self.paused = False

    async def forget_prefixes(self, *, recompute: bool) -> None:
        """Note it, or raise `forget_error`."""
        assert self.paused
        if self.forget_error is not None:
            raise self.forget_error
        self.log.append("recompute" if recompute else "forget")
        self.has_old_prefixes = False
        for sample in self.running if recompute else ():
            sample.keys = [self.loaded] * sample.tokens

    async def interrupt(self) -> None:
        """End all with what they have."""
        self.log.append("interrupt")
        self.paused = self.has_old_prefixes = False
        for sample in self.running:
            self._end(sample, Finish.ABORTED)

    async def settle(self) -> None:
        await asyncio.sleep(0)
        self.log.append("settle")

    async def prompt_logprobs(self, token_ids: Sequence[int], *, first: bool = True) -> list[float]:
        self.log.append("probe" if first else "score")
        if self.on_score is not None and not first:
            await self.on_score()
        return [math.nan, *(self.shift - token / 10 for token in token_ids[1:])]

    async def prove_updates(self, *, timeout: float) -> str:
        """Return `refusal`, and go on with `after_proof` added to all log-probabilities."""
        self.log.append("prove")
        self.shift = self.after_proof
        return self.refusal

    async def open_weights(self, terms: EpochTerms, *, timeout: float) -> OpenReport:
        """Log the epoch, or raise `open_error`."""
        self.timeouts["open"] = timeout
        if self.open_error is not None:
            raise self.open_error
        await self.open_gate.wait()
        if terms.epoch <= self.stopped_epoch:
            raise StaleEpoch("stopped")
        self.log.append(f"open {terms.epoch}")
        return OpenReport(direct_tensor_count=0, reload_tensor_count=7, reload_reason="it is a fake")

    async def receive_weights(self, *, epoch: int, policy_version: int, skip_sums: bool, timeout: float) -> bytes:
        """Load the version when `receive_gate` is set, or raise `receive_error`."""
        self.timeouts["receive"] = timeout
        assert not self.running or self.paused, "weights change under running samples"
        assert "weights" not in self.asleep, "weights are written to memory that is not there"
        await self.receive_gate.wait()
        if epoch <= self.stopped_epoch:
            raise StaleEpoch("stopped")
        if self.receive_error is not None:
            raise self.receive_error
        self.loaded, self.has_old_prefixes = policy_version, bool(self.running)
        self.log.append(f"receive {policy_version}" + " without sums" * skip_sums)
        return DIGEST

    async def feed_weights(self, terms: FeedTerms, *, timeout: float) -> list[bytes]:
        self.log.append(f"feed {terms.policy_version} to {terms.receiver_count} at {terms.host}{terms.interface}")
        return [b"offer"]

    async def mark_served(self, *, epoch: int, policy_version: int) -> None:
        """Note it, or raise `commit_error`."""
        if self.commit_error is not None:
            raise self.commit_error
        self.log.append(f"commit {policy_version}")

    def abort_transfers(self, *, epoch: int) -> None:
        """End the transfer that waits."""
        self.log.append(f"stop {epoch}")
        self.stopped_epoch = max(self.stopped_epoch, epoch)
        self.receive_gate.set()
        self.open_gate.set()

    async def weight_sums(self, *, epoch: int) -> bytes:
        return SUMS

    async def sleep(self, level: int, *, timeout: float) -> None:
        self.timeouts["sleep"] = timeout
        assert not self.running
        self.log.append(f"sleep {level}")
        self.asleep = {"weights", "kv_cache"}
        if self.late is not None:
            raise self.late

    async def wake(self, tags: Sequence[str], *, timeout: float) -> None:
        """Allocate memory; like vLLM, none if a part of it is awake already."""
        self.timeouts["wake"] = timeout
        self.log.append(f"wake {' '.join(tags)}")
        if self.asleep.issuperset(tags):
            self.asleep.difference_update(tags)
        if self.late is not None:
            raise self.late

    async def abort_weights(self, *, epoch: int) -> bool:
        self.log.append(f"abort {epoch}")
        return self.abort_is_clean

    def tick(self, count: int = 1) -> None:
        """Give every running sample `count` tokens; one that reaches max_tokens ends."""
        for _ in range(0 if self.paused else count):
            for sample in self.running:
                assert not self.asleep, "it samples without memory"
                assert not self.has_old_prefixes, "its cache has prefixes of earlier weights"
                sample.versions.append(self.loaded)
                sample.keys.append(self.loaded)
                if sample.tokens >= sample.request.max_tokens:
                    sample.finish = Finish.LENGTH
                if sample.request.streaming or sample.asked or sample.finish is not None:
                    sample.asked = False
                    sample.put()

    def stop(self, sample: FakeSample) -> None:
        """End one sample as if it had drawn a stop token."""
        self._end(sample, Finish.STOP)

    def die(self, reason: str) -> None:
        """Fail everything from now on."""
        running, self.dead = self.running, Unavailable(reason, reason="ENGINE_DEAD")
        for sample in running:
            sample.request.sink.fail(self.dead)

    def _end(self, sample: FakeSample, finish: Finish) -> None:
        sample.finish = finish
        sample.put()
