"""Publishes weights to the engines of one host from a script, in place of services and coordinator.

    with Publisher([WeightSender(DenseSource(model), rank=0, rank_count=1)], [llm], backend="shm") as publisher:
        publisher.publish(1)

`llm` is vLLM's `LLM`, started with `worker_extension_cls="fourfold.weights.apply.vllm_worker.WeightWorker"`. It must
not generate during an update. An engine that serves (`AsyncLLM`) needs an object with a blocking `collective_rpc`; pass
`publish` a `pause` that keeps it from sampling.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, Self, TypeVar

from fourfold.errors import CONSEQUENCES, FourfoldError, InvalidInput, WrongState
from fourfold.host.scratch import Scratch
from fourfold.weights.digest import add_sums, differing_tensors, digest_of, join_names, unsummed_digest
from fourfold.weights.manifest import Manifest
from fourfold.weights.sender import SendResult
from fourfold.weights.worker_control import AbortFlag, unwrap, unwrap_same

_T = TypeVar("_T")

_MISMATCH: Final = "DIGEST_MISMATCH"


class PublishEngine(Protocol):
    """An engine, such as vLLM's `LLM`."""

    def collective_rpc(self, method: str, *, args: tuple[Any, ...]) -> list[Any]:
        """Call a method of `WeightWorker` in all workers; return their replies."""


class PublishSender(Protocol):
    """A trainer rank: a `WeightSender`, whose documentation applies, or a proxy of one in another process."""

    def manifest(self) -> Manifest:
        """Return the layout of the weights."""

    def make_offer(self, epoch: int, backend: str, receiver_count: int, *, timeout: float) -> bytes:
        """Start an epoch and return this rank's offer."""

    def open(self, epoch: int, *, timeout: float) -> None:
        """Meet the receivers of the epoch."""

    def send(self, epoch: int, policy_version: int, *, skip_sums: bool, timeout: float) -> SendResult:
        """Send the present weights as `policy_version`."""

    def abort(self, epoch: int) -> None:
        """Abort an epoch, from any thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A version that all engines serve."""

    policy_version: int
    digest: bytes  # digest of the weights (32 bytes); empty if they were not verified
    sent_bytes: int  # bytes sent by all ranks


class PublishFailed(Exception):
    """The update was aborted; the next `publish` opens a new epoch.

    `clean`: every engine still holds the last version. Otherwise let no engine generate until a publish succeeds.
    """

    def __init__(self, error: Exception, *, clean: bool) -> None:
        super().__init__(f"{str(error) or type(error).__name__} (the engines are {'clean' if clean else 'dirty'})")
        self.clean = clean


class Publisher:
    """Publishes weights to engines of the same host. Use it from one thread."""

    def __init__(
        self, senders: Sequence[PublishSender], engines: Sequence[PublishEngine], *, backend: str, timeout: float = 60.0
    ) -> None:
        """Prepare for updates; `open` or the first `publish` connects.

        Args:
            senders: all trainer ranks, in rank order.
            engines: the engines that receive the weights.
            backend: a `transport.base.Backend` that the trainer and every engine support.
            timeout: for each phase of an update, in seconds.
        """
        if not senders or not engines:
            raise InvalidInput(f"{len(senders)} senders and {len(engines)} engines; there must be at least one of each")
        self._senders, self._engines = list(senders), list(engines)
        self._backend, self._timeout = backend, timeout
        self._manifest = senders[0].manifest()
        self._scratch = Scratch("weights-abort")
        self._abort_path = self._scratch.path / "abort-flag"
        self._abort_flag = AbortFlag.create(self._abort_path)
        self._threads = ThreadPoolExecutor(len(senders) + len(engines), thread_name_prefix="publish")
        # Epochs only grow, so start above those of an earlier publisher of the same engines.
        self._epoch = time.time_ns() // 1_000_000
        self._open = False
        # The errors of the present phase in order of time, and its calls in other threads.
        self._errors: list[Exception] = []
        self._started: list[Future[Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def epoch(self) -> int:
        return self._epoch

    def open(self) -> list[dict[str, Any]]:
        """Connect senders and engines in a new epoch; return the reply of each engine to `weights_open`.

        Raises PublishFailed: the weights do not fit an engine, or senders and engines did not meet.
        """
        self._epoch += 1
        with self._phase():
            reports = self._meet(self._epoch, self._timeout)
        self._open = True
        return reports

    def publish(
        self,
        policy_version: int,
        *,
        verify: bool = True,
        pause: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> Published:
        """Send the present weights to all engines and commit them.

        Args:
            policy_version: a number that no engine has had yet.
            verify: compare the digests of both sides.
            pause: returns a context manager that keeps the engines from sampling. It is entered when the senders have
                begun, and left when the weights have arrived and agree, or with the error.

        Raises:
            PublishFailed: its `clean` shows whether the engines still hold the last version.
        """
        if not self._open:
            self.open()
        epoch, timeout = self._epoch, self._timeout
        with self._phase():
            sending = self._start(
                [partial(s.send, epoch, policy_version, skip_sums=not verify, timeout=timeout) for s in self._senders]
            )
            with pause():
                digests = self._at_once(
                    [
                        partial(_call, e, "weights_receive", epoch, policy_version, timeout, not verify)
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
                _call(engine, "weights_commit", epoch, policy_version)
            sent_bytes = sum(sent.result().sent_bytes for sent in sending)
        return Published(policy_version=policy_version, digest=digest if verify else b"", sent_bytes=sent_bytes)

    def close(self) -> None:
        """Disconnect senders and engines; the engines keep their weights. Any number of times."""
        if self._open:
            self._abort()
        self._threads.shutdown()
        self._scratch.remove()

    def _mismatch(self, engine: PublishEngine, policy_version: int, sums: bytes) -> WrongState:
        """Return the error of an engine whose digest differs from the digest of `sums`, which were sent."""
        arrived = _call(engine, "weights_sums", self._epoch)
        which = join_names(differing_tensors(self._manifest.to_bytes(), sums, arrived)) or "no single tensor"
        return WrongState(
            f"version {policy_version} did not arrive as it was sent: {which} differs; nothing of it may be served, "
            f"publish again",
            reason=_MISMATCH,
        )

    def _meet(self, epoch: int, timeout: float) -> list[dict[str, Any]]:
        # An engine proves once that updates replace all its weights; one reply comes from each worker.
        counts = [len(unwrap(engine.collective_rpc("weights_prove", args=()))) for engine in self._engines]
        total = sum(counts)
        offers = self._at_once(
            [partial(s.make_offer, epoch, self._backend, total, timeout=timeout) for s in self._senders]
        )
        fixed = ("weights_open", epoch, self._backend, self._manifest.to_bytes(), offers, total)
        meeting = self._start([partial(s.open, epoch, timeout=timeout) for s in self._senders])
        reports = self._at_once(
            [
                partial(_call, e, *fixed, sum(counts[:index]), timeout, str(self._abort_path))
                for index, e in enumerate(self._engines)
            ]
        )
        for met in meeting:
            met.result()
        return reports

    def _start(self, calls: Sequence[Callable[[], _T]]) -> list[Future[_T]]:
        started = [self._threads.submit(self._or_abort_all, call) for call in calls]
        self._started += started
        return started

    def _at_once(self, calls: Sequence[Callable[[], _T]]) -> list[_T]:
        """Make all calls at once. The first runs in this thread: vLLM's in-process engine must not change threads."""
        others = self._start(calls[1:])
        first = self._or_abort_all(calls[0])
        return [first, *(other.result() for other in others)]

    def _or_abort_all(self, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except Exception as error:  # senders and engines are the caller's objects and may raise anything
            self._errors.append(error)
            self._abort_transfers()
            raise

    def _abort_transfers(self) -> None:
        self._abort_flag.abort(self._epoch)
        for sender in self._senders:
            with suppress(FourfoldError):
                sender.abort(self._epoch)

    @contextmanager
    def _phase(self) -> Iterator[None]:
        """Abort everywhere if the phase fails, and raise PublishFailed with the error that came first."""
        self._errors, self._started = [], []
        try:
            yield
        except Exception as error:
            self._abort_transfers()
            wait(self._started)  # each call has a deadline, and an engine's state is known only after its call
            causes = [e for e in (*self._errors, error) if getattr(e, "reason", "") not in CONSEQUENCES]
            raise PublishFailed(next(iter(causes), error), clean=self._abort()) from error

    def _abort(self) -> bool:
        """Close the epoch everywhere; return whether all engines hold the last committed version."""
        self._open, clean = False, True
        self._abort_transfers()
        for engine in self._engines:
            try:
                states = unwrap(engine.collective_rpc("weights_abort", args=(self._epoch,)))
            except Exception:  # after any error of an engine, abort the others, too
                states = []
            clean &= bool(states) and all(state == "clean" for state in states)
        return clean


def _call(engine: PublishEngine, method: str, *args: Any) -> Any:
    return unwrap_same(engine.collective_rpc(method, args=args))
