"""The worker process: loads reward functions and runs them, one sample at a time, in its main thread.

    service --stdin: {"load": verifier} or {"score": sample}--> worker --stdout: one reply each--> service

Before it loads anything, it enters the sandbox that its second argument describes. A verifier that runs text of a
sample as code does so in a fork, which ends with the sample: the text can change neither the verifier nor the pipes.

It knows no gRPC and no time limit: the service kills it when a function does not return, and
the kernel kills it when the service dies. Functions run in the main thread, where signals and
asyncio work as in a script. What they print goes to stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, NoReturn

from fourfold import sandbox
from fourfold.host.process_tree import die_with_parent
from fourfold.text import clean
from fourfold_reward import frames, loader, verifiers
from fourfold_reward.loader import Verifier, VerifierError
from fourfold_reward.outcome import MAX_MESSAGE_CHARACTERS, Outcome, from_result
from fourfold_reward.sample import RewardFunction, ScoreInput
from fourfold_reward.verifiers import BadMetadata, NotOffered

_HERE: Final = str(Path(__file__).parent)
# CPU time for importing a verifier's libraries.
_LOAD_CPU_SECONDS: Final = 120


def main(arguments: list[str]) -> int:
    """Serve the process that started this one until it closes the pipe or dies."""
    die_with_parent(int(arguments[0]))
    requests, replies = _take_pipes()
    sys.path.append(str(Path.cwd()))  # last, so that nothing there hides an installed package
    policy = sandbox.Policy.from_json(arguments[1]) if arguments[1] else None
    if policy is not None:
        sandbox.enter(policy)
    worker = Worker(policy, pipes=(requests.fileno(), replies.fileno()))
    own = os.getpid()
    while (request := frames.read(requests)) is not None:
        reply = worker.answer(request)
        if os.getpid() != own:  # the function forked, and this is the child: a second reply would shift all scores
            os._exit(0)
        frames.write(replies, reply)
    # What a function left behind (threads, loops, exit handlers) must not keep the process.
    os._exit(0)


class Worker:
    """Answers one request after another."""

    def __init__(self, policy: sandbox.Policy | None = None, pipes: tuple[int, ...] = ()) -> None:
        """Start without any function.

        Args:
            policy: of the sandbox that this process has entered; None when it is in none.
            pipes: descriptors that no text of a sample may reach.
        """
        self._policy = policy
        self._pipes = pipes
        self._evaluating: set[str] = set()
        self._functions: dict[str, RewardFunction] = {}
        self._files: dict[str, str] = {}  # in which they are written
        self._runner = asyncio.Runner()  # one loop for the worker's life: clients of async functions stay connected
        self._reported: set[str] = set()

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to a request. The one place where anything that user code raises is caught."""
        loading = "load" in request
        try:
            if self._policy is not None:
                sandbox.allow_cpu(_LOAD_CPU_SECONDS if loading else self._policy.cpu_seconds)
            if loading:
                return self._load(request)
            apart = request["verifier"] in self._evaluating
            return (self._score_apart(request) if apart else self._score(request)).to_json()
        except BadMetadata as error:
            return Outcome.error("BAD_METADATA", str(error)).to_json()
        except NotOffered as error:
            return Outcome.error("NOT_FOUND", str(error)).to_json()
        except VerifierError as error:
            return {"error": str(error)}
        except BaseException as error:  # user code may raise SystemExit or KeyboardInterrupt, too
            file = request["load"]["file"] if loading else self._files.get(request["verifier"], "")
            text = self._explain(error, file)
            return {"error": text} if loading else Outcome.error("RAISED", text).to_json()

    def _load(self, request: Mapping[str, Any]) -> dict[str, Any]:
        function, verifier = loader.load(Verifier.from_json(request["load"]), request["options"])
        self._functions[verifier.name] = function
        if verifiers.may_evaluate_text(verifier.name, request["options"]):
            self._evaluating.add(verifier.name)
        self._files[verifier.name] = _file_of(function)
        return {"version": verifier.version}

    def _score(self, request: Mapping[str, Any]) -> Outcome:
        sample = ScoreInput(**request["score"], metadata=_metadata(request["metadata_json"]))
        result = self._functions[request["verifier"]](sample)
        if inspect.isawaitable(result):
            result = self._runner.run(_await(result))
        return from_result(result)

    def _score_apart(self, request: Mapping[str, Any]) -> Outcome:
        """Score a sample in a process of its own."""
        reader, writer = os.pipe()
        own = os.getpid()
        try:
            child = os.fork()
        except OSError as error:  # the limit on the user's processes, or no memory
            os.close(reader)
            os.close(writer)
            return Outcome.error("WORKER_DIED", f"no process could be started to evaluate this sample: {error}")
        if child == 0:
            os.close(reader)
            self._end_with_outcome(request, writer, parent=own)
        os.close(writer)
        outcome = None
        try:
            with os.fdopen(reader, "rb") as replies, contextlib.suppress(ValueError):
                reply = frames.read(replies, most=frames.MAX_REPLY_BYTES)
                outcome = Outcome.from_json(reply) if reply is not None else None
        finally:
            os.kill(child, signal.SIGKILL)  # its reply is all that is needed of it
            _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        return outcome or Outcome.error("WORKER_DIED", f"the process that evaluated this sample ended ({code})")

    def _end_with_outcome(self, request: Mapping[str, Any], writer: int, *, parent: int) -> NoReturn:
        """Write the outcome of a sample as the last act of this process."""
        try:
            die_with_parent(parent)
            for pipe in self._pipes:
                os.close(pipe)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the text could fill the disk with the service's log
            os.dup2(2, 1)
            if self._policy is not None:
                sandbox.enter(replace(self._policy, processes=0))
            self._evaluating.clear()
            with os.fdopen(writer, "wb") as replies:
                frames.write(replies, self.answer(request))
        finally:
            os._exit(1)

    def _explain(self, error: BaseException, file: str) -> str:
        """Return type, text and place of an error; print its traceback when it is a new one.

        The text is cut before the place: a caller needs the place most.
        """
        place = _place(error.__traceback__, file)
        kind = f"{type(error).__name__} at {place}"
        if kind not in self._reported:
            self._reported.add(kind)
            sys.stderr.write(f"a reward function raised; this is printed once for each {kind}\n")
            traceback.print_exception(error, limit=-20)
        suffix = f" ({place})" if place else ""
        if self._policy is not None and _was_refused(error):
            suffix += "; the sandbox may have refused this: see reward.network and reward.sandbox"
        text = clean(f"{type(error).__name__}: {error}".rstrip(": "), MAX_MESSAGE_CHARACTERS - len(suffix))
        return text + suffix


async def _await(result: Any) -> Any:
    return await result


def _metadata(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise BadMetadata(f"metadata_json is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadMetadata(f"metadata_json holds a {type(value).__name__}; it must hold an object")
    return value


def _was_refused(error: BaseException) -> bool:
    return isinstance(error, PermissionError) or os.strerror(errno.EPERM) in str(error)


def _place(trace: TracebackType | None, file: str) -> str:
    """Return "file.py:line" of the innermost frame in the function's own file, or else outside of this package.

    What a library raises deep inside of itself tells its user little.
    """
    found = [f for f in traceback.extract_tb(trace) if not f.filename.startswith((_HERE, "<"))]
    found = [f for f in found if f.filename == file] or found
    return clean(f"{Path(found[-1].filename).name}:{found[-1].lineno}", 200) if found else ""


def _file_of(function: RewardFunction) -> str:
    """Return the file that a function, or a callable object, is written in; empty where it is written in C."""
    inner = inspect.unwrap(function)
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    return str(code.co_filename) if code else ""


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the protocol off descriptors 0 and 1, out of reach of print() and input(), in Python and in C."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, replies


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
