"""Runs reward functions: the program of a worker process.

    service --stdin: a verifier to load, or a batch of samples--> worker --stdout: a reply to each--> service

`protocol` has the messages. The worker enters its sandbox before it loads a function. Functions run in the main thread,
where signals and asyncio work as in a script. The worker has no time limit: the service kills it if a function does not
return, and the kernel kills it if the service ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, NoReturn

from fourfold import sandbox
from fourfold.host.process_tree import die_with_parent
from fourfold.reward.function import RewardFunction, ScoreInput
from fourfold.text import MAX_ERROR, clean
from fourfold.workers import frames, inside
from fourfold_reward import loader, protocol, verifiers
from fourfold_reward.columns import parse_messages, parse_metadata, take_answer
from fourfold_reward.loader import Verifier, VerifierError
from fourfold_reward.protocol import Outcome, SampleFields, outcome_of
from fourfold_reward.verifiers import InvalidSample

_PACKAGE: Final = str(Path(__file__).parent)
_LOAD_CPU_SECONDS: Final = 120  # to import a verifier's libraries
# The limit of CPU time is of one sample. Two system calls renew it, so fast samples share it.
_CPU_REFRESH_SECONDS: Final = 0.5
# The service may give the rest of a batch to other workers after a sample of this length (`batch.STUCK_SECONDS`).
_LONG_SECONDS: Final = 0.05


def main(arguments: list[str]) -> int:
    """Answer requests of the service, `arguments[0]`, in the sandbox policy `arguments[1]` (JSON; empty: none)."""
    requests, replies, policy = inside.begin(arguments)
    worker = Worker(policy, pipes=(requests.fileno(), replies.fileno()))
    own_pid = os.getpid()
    while (request := frames.read(requests)) is not None:
        for reply in worker.answer(request, requests):
            if os.getpid() != own_pid:  # a fork by the function returned here: its reply would shift all later ones
                os._exit(0)
            replies.write(reply)
            replies.flush()  # before the next sample, which may hang
    # Threads, event loops and exit handlers of a function must not keep the process alive.
    os._exit(0)


class Worker:
    """Answers one request at a time."""

    def __init__(self, policy: sandbox.Policy | None = None, pipes: tuple[int, ...] = ()) -> None:
        """Start in the sandbox `policy` without any function. Evaluated text must not reach the descriptors `pipes`."""
        self._policy = policy
        self._pipes = pipes
        self._function: RewardFunction | None = None
        self._file = ""  # the source file of the function
        self._evaluates = False  # it runs text of a sample as code
        self._runner = asyncio.Runner()  # one loop for all samples, so that clients of async functions stay connected
        self._reported: set[str] = set()

    def answer(self, request: Mapping[str, Any], requests: BinaryIO) -> Iterator[bytes]:
        """Yield the replies to a request as frames; the texts of a batch follow in `requests`."""
        if "load" in request:
            yield frames.pack(self.load(request))
        elif "sizes" in request:
            yield from self._answer_batch(request, requests)
        # Otherwise the service wanted the end of a batch that has ended by itself.

    def _answer_batch(self, request: Mapping[str, Any], requests: BinaryIO) -> Iterator[bytes]:
        first, cpu_until = request["first"], 0.0
        began = time.monotonic()
        for number, sample in enumerate(protocol.read_batch(requests, request["sizes"]), first):
            if began >= cpu_until:
                self._allow_cpu()
                cpu_until = began + _CPU_REFRESH_SECONDS
            yield protocol.pack_outcome(number, self.score(sample))
            ended = time.monotonic()
            last = number == first + len(request["sizes"]) - 1
            if not last and ended - began > _LONG_SECONDS and _is_told_to_drop(requests, first):
                yield frames.pack({"n": number + 1, "dropped": True})
                return
            began = ended

    def _allow_cpu(self) -> None:
        if self._policy is not None:
            sandbox.allow_cpu(self._policy.cpu_seconds)

    def load(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Load a function; return its version and its inputs, or `error`. Exceptions of user code are caught here."""
        try:
            if self._policy is not None:
                sandbox.allow_cpu(_LOAD_CPU_SECONDS)
            return self._load(request)
        except VerifierError as error:
            return {"error": str(error)}
        except BaseException as error:  # user code may also raise SystemExit or KeyboardInterrupt
            return {"error": self._explain(error, request["load"]["file"])}

    def score(self, sample: SampleFields) -> Outcome:
        """Score one sample with the loaded function. Exceptions of user code end here."""
        try:
            try:
                return (self._score_in_fork if self._evaluates else self._score)(sample)
            except InvalidSample as error:
                return Outcome.error(error.reason, str(error))
        except BaseException as error:
            return Outcome.error("RAISED", self._explain(error, self._file))

    def _load(self, request: Mapping[str, Any]) -> dict[str, Any]:
        function, verifier, reads = loader.load(Verifier(**request["load"]), request["options"])
        self._function, self._file = function, _file_of(function)
        self._evaluates = bool(verifiers.find_evaluating(verifier.name, request["options"]))
        reply = {"version": verifier.version, "reads_tokens": reads.tokens, "reads_messages": reads.messages}
        return {**reply, "pure": verifiers.is_pure(verifier.name) or getattr(function, "pure", False) is True}

    def _score(self, fields: SampleFields) -> Outcome:
        metadata = parse_metadata(fields.metadata_json)
        sample = ScoreInput(
            sample_id=fields.sample_id,
            prompt=fields.prompt,
            completion=fields.completion,
            answer=fields.answer,
            answer_value=take_answer(metadata, fields.answer),
            metadata=metadata,
            messages=parse_messages(fields.messages_json),
            completion_ids=fields.completion_ids,
        )
        assert self._function is not None, "the service sends batches after a function"
        result = self._function(sample)
        if not isinstance(result, float) and inspect.isawaitable(result):
            result = self._runner.run(_wait_for(result))
        return outcome_of(result)

    def _score_in_fork(self, sample: SampleFields) -> Outcome:
        """Score one sample in a forked process.

        The verifier runs text of the sample as code, which can change anything in its process: the verifier, the pipes,
        the next sample's score. The fork ends with the sample.
        """
        reader, writer = os.pipe()
        own_pid = os.getpid()
        try:
            child = os.fork()
        except OSError as error:  # too many processes of this user, or too little memory
            os.close(reader)
            os.close(writer)
            return Outcome.error("WORKER_DIED", f"no process could be started to evaluate this sample: {error}")
        if child == 0:
            os.close(reader)
            self._run_fork(sample, writer, parent=own_pid)
        os.close(writer)
        outcome = None
        try:
            with os.fdopen(reader, "rb") as replies, contextlib.suppress(ValueError):
                reply = frames.read(replies, max_bytes=protocol.MAX_REPLY_BYTES)
                outcome = Outcome.from_json(reply) if reply is not None else None
        finally:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        return outcome or Outcome.error("WORKER_DIED", f"the process that evaluated this sample ended ({code})")

    def _run_fork(self, sample: SampleFields, writer: int, *, parent: int) -> NoReturn:
        """Score the sample, write its outcome and end this process."""
        try:
            die_with_parent(parent)
            for pipe in self._pipes:
                os.close(pipe)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # evaluated text could fill the disk through the service's log
            os.dup2(2, 1)
            if self._policy is not None:
                sandbox.enter(replace(self._policy, processes=0))
            self._evaluates = False
            with os.fdopen(writer, "wb") as replies:
                replies.write(frames.pack(self.score(sample).to_json()))
        finally:
            os._exit(1)

    def _explain(self, error: BaseException, file: str) -> str:
        """Return the type, text and place of an error; print its traceback if type or place are new."""
        place = place_of(error, file)
        report_once(error, f"reward function raised {type_name(error)} at {place}", self._reported)
        suffix, described = f" ({place})" if place else "", describe(error)
        refused = issubclass(type(error), PermissionError) or os.strerror(errno.EPERM) in described
        if refused and self._policy is not None:
            suffix += "; the sandbox may have refused this: see reward.network and reward.sandbox"
        # A long text is cut before the place, which the caller needs most.
        return clean(described, MAX_ERROR - len(suffix)) + suffix


async def _wait_for(result: Awaitable[Any]) -> Any:
    return await result  # `Runner.run` takes only coroutines, and a function may return a future


def _is_told_to_drop(requests: BinaryIO, first: int) -> bool:
    """Return whether the service has asked to end the batch that began with the sample `first`."""
    if not select.select([requests], [], [], 0)[0]:
        return False
    request = frames.read(requests)
    return request is not None and request.get("drop") == first


def describe(error: BaseException) -> str:
    """Return type and text of an exception of a user's program, whose methods may raise anything."""
    name = type_name(error)
    try:
        return f"{name}: {str.__str__(str(error))}".rstrip(": ")
    except BaseException as failure:
        return f"{name}, whose __str__ raised {type_name(failure)}"


def type_name(value: object) -> str:
    """Return the name of a class of a user's program, whose metaclass may raise anything."""
    return str(type.__dict__["__name__"].__get__(type(value)))


def report_once(error: BaseException, title: str, reported: set[str]) -> None:
    """Print a title and the traceback of an exception to stderr, if the title is new."""
    if title in reported:
        return
    reported.add(title)
    with contextlib.suppress(BaseException):  # the program may have replaced stderr, too
        sys.stderr.write(f"{title} (printed once)\n")
        traceback.print_exception(error, limit=-20)


def place_of(error: BaseException, file: str) -> str:
    """Return "file.py:line" of the innermost frame in the function's file, or else outside of this package.

    Frames inside of libraries are skipped, because users look for the error in their own code.
    """
    trace: TracebackType | None = BaseException.__dict__["__traceback__"].__get__(error)  # the class may hide it
    found = [f for f in traceback.extract_tb(trace) if not f.filename.startswith((_PACKAGE, "<"))]
    found = [f for f in found if f.filename == file] or found
    return clean(f"{Path(found[-1].filename).name}:{found[-1].lineno}", 200) if found else ""


def _file_of(function: RewardFunction) -> str:
    """Return the source file of a function or callable object; empty for C code. It may run user code, and raise."""
    inner = inspect.unwrap(function)
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    return str(code.co_filename) if code else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
