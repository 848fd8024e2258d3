"""Weights for engines of this host without any service: one object that does what the coordinator does.

    with Publisher([WeightSender(DenseSource(model), rank=0, rank_count=1)], [llm], backend="shm") as publisher:
        publisher.publish(1)

`llm` is vLLM's `LLM`, started with
`worker_extension_cls="fourfold.weights.apply.vllm_worker.WeightWorker"`; it must not generate
meanwhile. One that serves (`AsyncLLM`) needs an object with a blocking `collective_rpc`, and is paused by what
`publish` is given as `pause`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, Self, TypeVar

from fourfold.errors import FourfoldError, InvalidInput, WrongState
from fourfold.host.scratch import Scratch
from fourfold.weights.digest import add_sums, differing_tensors, digest_of, join_names, unsummed_digest
from fourfold.weights.manifest import Manifest
from fourfold.weights.sender import SendResult
from fourfold.weights.worker_control import AbortFlag, unwrap, unwrap_same

T = TypeVar("T")

_MISMATCH: Final = "DIGEST_MISMATCH"
# What others fail of when one has failed.
_ABORTED: Final = "TRANSFER_ABORTED"


class Engine(Protocol):
    """What is needed of an engine; vLLM's `LLM` is one."""

    def collective_rpc(self, method: str, *, args: tuple[Any, ...]) -> list[Any]:
        """Call a verb in all workers; return their answers."""


class Sender(Protocol):
    """One trainer rank: a `WeightSender`, or what stands for one in another process."""

    def manifest(self) -> Manifest:
        """See `WeightSender`, here and below."""

    def make_offer(self, epoch: int, backend: str, receiver_count: int, *, timeout: float) -> bytes:
        """Start an epoch."""

    def open(self, epoch: int, *, timeout: float) -> None:
        """Meet the receivers."""

    def send(self, epoch: int, policy_version: int, *, skip_sums: bool, timeout: float) -> SendResult:
        """Send the present weights."""

    def abort(self, epoch: int) -> None:
        """End what is under way, from any thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A version that all engines serve."""

    policy_version: int
    digest: bytes
    """Of the weights (32 bytes), when they were summed up."""
    sent_bytes: int
    """By all ranks."""


class PublishFailed(Exception):
    """A version was given up; the next `publish` opens a new epoch.

    `clean`: every engine still holds the version before. Otherwise some hold a mixture: let none of them generate
    until a publish succeeds.
    """

    def __init__(self, error: Exception, *, clean: bool) -> None:
        super().__init__(f"{str(error) or type(error).__name__} (the engines are {'clean' if clean else 'dirty'})")
        self.clean = clean


class Publisher:
    """Brings the senders' weights to engines of the same host. One thread uses it."""

    def __init__(
        self, senders: Sequence[Sender], engines: Sequence[Engine], *, backend: str, timeout: float = 60.0
    ) -> None:
        """Connect nothing yet.

        Args:
            senders: of all trainer ranks, in rank order.
            engines: that shall have the weights.
            backend: a `transport.Backend`, one that the trainer and every engine have.
            timeout: seconds for each phase of an update.

        Raises:
            InvalidInput: no sender or no engine.
        """
        if not senders or not engines:
            raise InvalidInput(f"{len(senders)} senders and {len(engines)} engines; there must be at least one of each")
        self._senders, self._engines = list(senders), list(engines)
        self._backend, self._timeout = backend, timeout
        self._manifest = senders[0].manifest()
        self._scratch = Scratch("weights-stop")
        self._stop_path = self._scratch.path / "stop"
        self._stop = AbortFlag.create(self._stop_path)
        self._threads = ThreadPoolExecutor(len(senders) + len(engines), thread_name_prefix="publish")
        # Above those of an earlier publisher of the same engines.
        self._epoch = time.time_ns() // 1_000_000
        self._open = False
        # Of the phase that runs: errors as they came, and all calls but this thread's.
        self._errors: list[Exception] = []
        self._started: list[Future[Any]] = []

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    @property
    def epoch(self) -> int:
        """The epoch opened last."""
        return self._epoch

    def open(self) -> list[dict[str, Any]]:
        """Let senders and engines meet, in a new epoch; returns what each engine says of how it takes the weights.

        Raises:
            PublishFailed: they do not fit, or did not meet.
        """
        self._epoch += 1
        self._errors, self._started = [], []
        try:
            reports = self._meet(self._epoch, self._timeout)
        except Exception as error:
            raise self._failed(error) from error
        self._open = True
        return reports

    def publish(
        self,
        policy_version: int,
        *,
        verify: bool = True,
        pause: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> Published:
        """Send the present weights to all engines and make them serve them.

        Args:
            policy_version: a number that no engine has had yet.
            verify: compare the digests of both sides.
            pause: makes what keeps the engines from sampling; entered when the senders have begun, left when the
                weights have arrived and agree, or with the error.

        Raises:
            PublishFailed: says whether the engines are as before.
        """
        if not self._open:
            self.open()
        epoch, timeout = self._epoch, self._timeout
        self._errors, self._started = [], []
        try:
            sending = self._start(
                [partial(s.send, epoch, policy_version, skip_sums=not verify, timeout=timeout) for s in self._senders]
            )
            with pause():
                digests = self._at_once(
                    [
                        partial(_verb, e, "weights_receive", epoch, policy_version, timeout, not verify)
                        for e in self._engines
                    ]
                )
                digest, sums = unsummed_digest(self._manifest, policy_version), b""
                if verify:
                    sums = add_sums(self._manifest, [sent.result().partial_sums for sent in sending])
                    digest = digest_of(self._manifest, sums)
                for engine, received in zip(self._engines, digests, strict=True):
                    if received != digest:
                        raise self._mismatch(engine, policy_version, sums)
            for engine in self._engines:
                _verb(engine, "weights_commit", epoch, policy_version)
            sent_bytes = sum(sent.result().sent_bytes for sent in sending)
        except Exception as error:
            raise self._failed(error) from error
        return Published(policy_version=policy_version, digest=digest if verify else b"", sent_bytes=sent_bytes)

    def close(self) -> None:
        """Let senders and engines go; the engines keep their weights. Any number of times."""
        if self._open:
            self._abort()
        self._threads.shutdown()
        self._scratch.remove()

    def _mismatch(self, engine: Engine, policy_version: int, sums: bytes) -> WrongState:
        """Return the error of an engine that received something else than was sent, which has these sums."""
        arrived = _verb(engine, "weights_sums", self._epoch)
        which = join_names(differing_tensors(self._manifest.to_bytes(), sums, arrived)) or "no tensor by its sums"
        return WrongState(
            f"version {policy_version} did not arrive as it was sent: {which} differs; nothing of it may be served, "
            f"publish again",
            reason=_MISMATCH,
        )

    def _meet(self, epoch: int, timeout: float) -> list[dict[str, Any]]:
        counts = [len(unwrap(engine.collective_rpc("weights_describe", args=()))) for engine in self._engines]
        total = sum(counts)
        offers = self._at_once(
            [partial(s.make_offer, epoch, self._backend, total, timeout=timeout) for s in self._senders]
        )
        fixed = ("weights_open", epoch, self._backend, self._manifest.to_bytes(), offers, total)
        meeting = self._start([partial(s.open, epoch, timeout=timeout) for s in self._senders])
        reports = self._at_once(
            [
                partial(_verb, e, *fixed, sum(counts[:index]), timeout, str(self._stop_path))
                for index, e in enumerate(self._engines)
            ]
        )
        for met in meeting:
            met.result()
        return reports

    def _start(self, calls: Sequence[Callable[[], T]]) -> list[Future[T]]:
        started = [self._threads.submit(self._or_stop_all, call) for call in calls]
        self._started += started
        return started

    def _at_once(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Make all calls at the same time, the first one here: an engine inside this process runs in one thread."""
        others = self._start(calls[1:])
        first = self._or_stop_all(calls[0])
        return [first, *(other.result() for other in others)]

    def _or_stop_all(self, call: Callable[[], T]) -> T:
        """Make a call; when it fails, end all others."""
        try:
            return call()
        except Exception as error:
            self._errors.append(error)
            self._stop_all()
            raise

    def _stop_all(self) -> None:
        self._stop.abort(self._epoch)
        for sender in self._senders:
            with suppress(FourfoldError):
                sender.abort(self._epoch)

    def _failed(self, error: Exception) -> PublishFailed:
        self._stop_all()
        wait(self._started)  # each has a deadline; an engine is asked about its state when it has answered
        causes = [e for e in (*self._errors, error) if getattr(e, "reason", "") != _ABORTED]
        return PublishFailed(next(iter(causes), error), clean=self._abort())

    def _abort(self) -> bool:
        """Close the epoch everywhere; return whether all engines hold whole, committed weights."""
        self._open, clean = False, True
        self._stop_all()
        for engine in self._engines:
            try:
                states = unwrap(engine.collective_rpc("weights_abort", args=(self._epoch,)))
            except Exception:  # whatever the engine died of, the others are asked, too
                states = []
            clean &= bool(states) and all(state == "clean" for state in states)
        return clean


def _verb(engine: Engine, method: str, *args: Any) -> Any:
    return unwrap_same(engine.collective_rpc(method, args=args))
