"""Scores the samples of a reward service with a reward model, in batches over all calls.

    score() --> encoding thread: texts, tokens --> PassThread: forward passes --> event loop: outcomes of each call

The queue is bounded in samples and bytes. A call that ends, at its time limit or because its caller went away, takes
its samples out of the queue. The event loop never waits for the model.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from fourfold.config import Config, RewardConfig
from fourfold.config.reward import RewardModelConfig
from fourfold.errors import ConfigError
from fourfold.host.timing import Histogram
from fourfold.install import install_command
from fourfold.model.classifier import ClassifierFolder
from fourfold.model.folder import resolve
from fourfold.workers.queue import Call, Entry
from fourfold_reward.backend import MAX_WAITING_SAMPLES, check_room
from fourfold_reward.job import Job
from fourfold_reward.protocol import Outcome
from fourfold_reward.signatures import Reads

if TYPE_CHECKING:
    from fourfold_reward.models.passes import Delivered, PassThread
    from fourfold_reward.models.texts import TextEncoder

_log = logging.getLogger(__name__)

_NEWEST_WEIGHT: Final = 0.1
# Number of samples that are encoded together: the first pass of a large call begins before its last text is encoded.
_ENCODED_AT_ONCE: Final = 128
_CLOSE_SECONDS: Final = 10.0
# A pass on a GPU takes a second or less. After this time, its kernels hang, and only another process can score.
_STUCK_SECONDS: Final = 120.0


def _log_failure(message: str) -> None:
    _log.critical("reward model failed: %s", message)


class RewardModelBackend:
    """A reward model and its queue. Use it from one event loop."""

    def __init__(
        self,
        table: RewardModelConfig,
        *,
        date: str = "",
        policy: str = "",
        on_failure: Callable[[str], None] = _log_failure,
        max_waiting_samples: int = MAX_WAITING_SAMPLES,
    ) -> None:
        """Create a scorer; `start` loads the model.

        Args:
            table: of the recipe.
            date: that its chat template writes, `data.date` of the recipe.
            policy: `model.source` of the recipe, whose tokenizer a process reward model needs.
            on_failure: called on the event loop with a message when this process cannot score any more, such as after
                an error that ends its use of the GPU. The service must then exit.
            max_waiting_samples: limit of the queue.
        """
        self.on_failure = on_failure
        self.reads = Reads()
        self.pure = True
        self.seconds = Histogram()  # of the forward pass of each sample
        self._table, self._date, self._policy = table, date, policy
        self._max_waiting = max_waiting_samples
        self._scorer = ""
        self._open_samples = self._open_bytes = 0  # of all calls
        self._mean_seconds = 0.01  # moving average of the time of a pass, divided by its samples
        self._failure = ""
        self._calls: set[Call[Outcome]] = set()
        self._encoding = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward-texts")
        self._encoder: TextEncoder | None = None
        self._thread: PassThread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def from_config(
        cls, config: Config, table: RewardConfig, *, on_failure: Callable[[str], None] = _log_failure
    ) -> RewardModelBackend:
        """Return the scorer of a table `[[reward]]` with `model`. Its folder must fit: ConfigError otherwise."""
        if table.model is None:
            raise ConfigError(f"reward {table.name!r} has no `model`; give the folder of a reward model")
        ClassifierFolder.read(table.model.source, process=table.model.kind == "process")
        return cls(table.model, date=config.data.date, policy=config.model.source, on_failure=on_failure)

    @property
    def scorer(self) -> str:
        """FOLDER@DIGEST; the digest changes with weights, tokenizer, dtype and the form of the text."""
        return self._scorer

    @property
    def busy(self) -> int:
        """Number of samples in forward passes."""
        return self._thread.running if self._thread is not None else 0

    @property
    def waiting_samples(self) -> int:
        """Number of samples without an outcome that are in no forward pass."""
        return max(self._open_samples - self.busy, 0)

    @property
    def thread(self) -> PassThread:
        """The forward passes, with their totals; known after `start`."""
        assert self._thread is not None, "start the scorer first"
        return self._thread

    async def start(self) -> None:
        """Load the model. Raises ConfigError: see `ClassifierFolder.read` and `load_passes`."""
        self._loop = asyncio.get_running_loop()
        started = time.monotonic()
        self._encoder, self._thread, self._scorer, self.reads = await asyncio.to_thread(self._load)
        _log.info("reward model ready: scorer=%s seconds=%.1f", self._scorer, time.monotonic() - started)

    async def score(self, jobs: Sequence[Job], *, timeout: float) -> list[Outcome]:
        """Score samples and return their outcomes, in order; one without an outcome after `timeout` s gets an error.

        Raises Overloaded: the queue is full, and no sample was queued.
        """
        size = check_room(
            jobs,
            waiting=self._open_samples,
            waiting_bytes=self._open_bytes,
            max_waiting=self._max_waiting,
            seconds_per_sample=self._mean_seconds,
        )
        if self._failure:
            return [Outcome.error("WORKER_DIED", self._failure) for _ in jobs]
        call = Call[Outcome](len(jobs))
        self._calls.add(call)
        self._open_samples += len(jobs)
        self._open_bytes += size
        try:
            for first in range(0, len(jobs), _ENCODED_AT_ONCE):
                self._encoding.submit(self._encode, call, jobs[first : first + _ENCODED_AT_ONCE], first)
            await asyncio.wait([call.done], timeout=timeout)
            self._check_stuck()
            return [self._too_late() if outcome is None else outcome for outcome in call.results]
        finally:  # also when the caller went away
            call.close()
            self._calls.discard(call)
            self._open_samples -= call.left
            self._open_bytes -= size
            if call.left and self._thread is not None:
                self._thread.withdraw()

    async def close(self) -> None:
        """End the threads after the running forward pass. Queued samples get no outcome."""
        self._encoding.shutdown(wait=False, cancel_futures=True)
        thread, self._thread = self._thread, None
        if thread is not None and not await asyncio.to_thread(thread.close, _CLOSE_SECONDS):
            _log.warning("forward pass still runs after %g s; its thread ends with the process", _CLOSE_SECONDS)

    def _load(self) -> tuple[TextEncoder, PassThread, str, Reads]:
        """Load the model and compute the digest of its files at the same time, so that they are read once."""
        try:
            from fourfold.model.tokenizer import Tokenizer
            from fourfold_reward.models.load import check_devices, load_passes
            from fourfold_reward.models.passes import PassThread
            from fourfold_reward.models.steps import StepEncoder
            from fourfold_reward.models.texts import TextEncoder

            importlib.import_module("tokenizers")
            importlib.import_module("jinja2")
        except ImportError as error:
            raise ConfigError(
                f"reward.model needs a package that is not installed ({error}); "
                f"{install_command('fourfold-reward[models]')}"
            ) from None
        table = self._table
        process = table.kind == "process"
        folder = ClassifierFolder.read(table.source, process=process)
        max_tokens = _max_tokens(folder, table)
        check_devices(table)
        tokenizer = Tokenizer.load(folder.path, date=self._date)
        with ThreadPoolExecutor(max_workers=1) as digests:
            decides = [table.dtype, str(table.chat), str(table.max_tokens), *([table.steps] if process else [])]
            digest = digests.submit(folder.digest, *decides)
            passes, vocabulary_size = load_passes(folder, table)
            scorer = f"{folder.path.name}@{digest.result()}"
        chat = table.chat and tokenizer.has_chat_template
        form: dict[str, Any] = {"chat": chat, "vocabulary_size": vocabulary_size, "max_tokens": max_tokens}
        encoder: TextEncoder
        if process:
            policy = Tokenizer.load(resolve(self._policy), date=self._date)
            encoder = StepEncoder(tokenizer, **form, separator=table.steps, policy=policy)
        else:
            encoder = TextEncoder(tokenizer, **form)
        thread = PassThread(
            passes, tokens_per_batch=table.tokens_per_batch, deliver=self._deliver_soon, on_failure=self._fail_soon
        )
        return encoder, thread, scorer, Reads(tokens=process, messages=chat)

    # -- the queue -----------------------------------------------------------------------------------------------------

    def _encode(self, call: Call[Outcome], jobs: Sequence[Job], first: int) -> None:
        """Encode some samples of a call, from `first` on, and queue them for passes. Runs in the encoding thread."""
        if call.closed:
            return
        assert self._encoder is not None
        try:
            encoded = self._encoder.encode(jobs)
        except Exception as error:  # a tokenizer is a program of others over texts of others
            _log.exception("texts could not be encoded: samples=%d", len(jobs))
            encoded = [Outcome.error("RAISED", f"the tokenizer failed: {type(error).__name__}: {error}")] * len(jobs)
        entries, errors = [], []
        for index, result in enumerate(encoded, first):
            if isinstance(result, Outcome):
                errors.append((index, result))
            else:
                entries.append(Entry(call, index, result))
        if errors:
            self._call_soon(self._settle, [(call, index, outcome) for index, outcome in errors], 0.0)
        thread = self._thread
        if entries and thread is not None:
            thread.put(entries)

    def _deliver_soon(self, outcomes: Delivered, seconds: float) -> None:
        """Pass the outcomes of a forward pass to the event loop. Runs in the thread of the passes."""
        self._call_soon(self._settle, [(entry.call, entry.index, outcome) for entry, outcome in outcomes], seconds)

    def _fail_soon(self, message: str) -> None:
        self._call_soon(self._fail, message)

    def _call_soon(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(function, *arguments)

    def _settle(self, outcomes: Sequence[tuple[Call[Outcome], int, Outcome]], seconds: float) -> None:
        """Give outcomes to their calls. `seconds` is the time of their forward pass, 0 if there was none."""
        if seconds:
            self._mean_seconds += _NEWEST_WEIGHT * (seconds / len(outcomes) - self._mean_seconds)
        for call, index, outcome in outcomes:
            if seconds:
                self.seconds.add(seconds)
            if call.set_result(index, outcome):
                self._open_samples -= 1

    # -- failures ------------------------------------------------------------------------------------------------------

    def _check_stuck(self) -> None:
        """Give up if a forward pass on a GPU does not end. On a CPU, a pass of a large model may take minutes."""
        since = self._thread.busy_since if self._thread is not None else None
        if self._table.device == "cuda" and since is not None and time.monotonic() - since > _STUCK_SECONDS:
            self._fail(f"a forward pass has not ended for {time.monotonic() - since:.0f} s")

    def _fail(self, message: str) -> None:
        if self._failure:
            return
        self._failure = message
        for call in self._calls:
            call.close()
        self.on_failure(message)

    def _too_late(self) -> Outcome:
        if self._failure:
            return Outcome.error("WORKER_DIED", self._failure)
        return Outcome.error(
            "TIMEOUT",
            f"not scored before the call's deadline; {self.waiting_samples} samples wait: try again, give the call "
            "more time, or raise reward.replicas",
            code="UNAVAILABLE",
        )


def _max_tokens(folder: ClassifierFolder, table: RewardModelConfig) -> int | None:
    """Return the longest text in tokens. Raises ConfigError: the recipe allows more than the model."""
    limit = folder.longest
    if limit is not None and table.max_tokens > limit:
        raise ConfigError(
            f"reward.model.max_tokens = {table.max_tokens} is more than the {limit} positions of {folder.path}; lower "
            f"it, or set 0 for the model's own limit"
        )
    return table.max_tokens or limit
