"""Runs reward functions: the program of a worker process.

    service --stdin: {"load": verifier} or {"score": sample}--> worker --stdout: one reply each--> service

The worker enters its sandbox before it loads a function. Functions run in the main thread, where signals and asyncio
work as in a script. The worker has no time limit: the service kills it if a function does not return, and the kernel
kills it if the service ends.
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
from collections.abc import Awaitable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, NoReturn

from fourfold import sandbox
from fourfold.host.process_tree import die_with_parent
from fourfold.text import MAX_ERROR, clean
from fourfold_reward import loader, protocol, verifiers
from fourfold_reward.loader import Verifier, VerifierError
from fourfold_reward.protocol import Outcome, outcome_of
from fourfold_reward.sample import RewardFunction, ScoreInput
from fourfold_reward.verifiers import InvalidSample

_PACKAGE: Final = str(Path(__file__).parent)
_LOAD_CPU_SECONDS: Final = 120  # to import a verifier's libraries


def main(arguments: list[str]) -> int:
    """Answer requests of the service, `arguments[0]`, in the sandbox policy `arguments[1]` (JSON; empty: none)."""
    die_with_parent(int(arguments[0]))
    requests, replies = take_pipes()
    sys.path.append(str(Path.cwd()))  # last, so that no file there hides an installed package
    policy = sandbox.Policy.from_json(arguments[1]) if arguments[1] else None
    if policy is not None:
        sandbox.enter(policy)
    worker = Worker(policy, pipes=(requests.fileno(), replies.fileno()))
    own_pid = os.getpid()
    while (request := protocol.read(requests)) is not None:
        reply = worker.answer(request)
        if os.getpid() != own_pid:  # a fork by the function returned here: its reply would shift all later ones
            os._exit(0)
        replies.write(protocol.pack(reply))
        replies.flush()
    # Threads, event loops and exit handlers of a function must not keep the process alive.
    os._exit(0)


class Worker:
    """Answers one request at a time."""

    def __init__(self, policy: sandbox.Policy | None = None, pipes: tuple[int, ...] = ()) -> None:
        """Start in the sandbox `policy` without any function. Evaluated text must not reach the descriptors `pipes`."""
        self._policy = policy
        self._pipes = pipes
        self._functions: dict[str, RewardFunction] = {}
        self._files: dict[str, str] = {}  # the source file of each function
        self._evaluating: set[str] = set()
        self._runner = asyncio.Runner()  # one loop for all samples, so that clients of async functions stay connected
        self._reported: set[str] = set()

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to a request. Exceptions of user code are caught here and nowhere else."""
        loading = "load" in request
        try:
            if self._policy is not None:
                sandbox.allow_cpu(_LOAD_CPU_SECONDS if loading else self._policy.cpu_seconds)
            if loading:
                return self._load(request)
            evaluating = request["verifier"] in self._evaluating
            return asdict(self._score_in_fork(request) if evaluating else self._score(request))
        except InvalidSample as error:
            return asdict(Outcome.error(error.reason, str(error)))
        except VerifierError as error:
            return {"error": str(error)}
        except BaseException as error:  # user code may also raise SystemExit or KeyboardInterrupt
            file = request["load"]["file"] if loading else self._files.get(request["verifier"], "")
            text = self._explain(error, file)
            return {"error": text} if loading else asdict(Outcome.error("RAISED", text))

    def _load(self, request: Mapping[str, Any]) -> dict[str, Any]:
        function, verifier, reads = loader.load(Verifier(**request["load"]), request["options"])
        self._functions[verifier.name] = function
        self._files[verifier.name] = _file_of(function)
        if verifiers.find_evaluating(verifier.name, request["options"]):
            self._evaluating.add(verifier.name)
        return {"version": verifier.version, "reads_tokens": reads.tokens, "reads_messages": reads.messages}

    def _score(self, request: Mapping[str, Any]) -> Outcome:
        sample = ScoreInput(
            **request["score"],
            metadata=_parse_metadata(request["metadata_json"]),
            messages=_parse_messages(request["messages_json"]),
        )
        result = self._functions[request["verifier"]](sample)
        if inspect.isawaitable(result):
            result = self._runner.run(_wait_for(result))
        return outcome_of(result)

    def _score_in_fork(self, request: Mapping[str, Any]) -> Outcome:
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
            self._run_fork(request, writer, parent=own_pid)
        os.close(writer)
        outcome = None
        try:
            with os.fdopen(reader, "rb") as replies, contextlib.suppress(ValueError):
                reply = protocol.read(replies, max_bytes=protocol.MAX_REPLY_BYTES)
                outcome = Outcome.from_json(reply) if reply is not None else None
        finally:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        return outcome or Outcome.error("WORKER_DIED", f"the process that evaluated this sample ended ({code})")

    def _run_fork(self, request: Mapping[str, Any], writer: int, *, parent: int) -> NoReturn:
        """Score the sample, write its outcome and end this process."""
        try:
            die_with_parent(parent)
            for pipe in self._pipes:
                os.close(pipe)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # evaluated text could fill the disk through the service's log
            os.dup2(2, 1)
            if self._policy is not None:
                sandbox.enter(replace(self._policy, processes=0))
            self._evaluating.clear()
            with os.fdopen(writer, "wb") as replies:
                replies.write(protocol.pack(self.answer(request)))
        finally:
            os._exit(1)

    def _explain(self, error: BaseException, file: str) -> str:
        """Return the type, text and place of an error; print its traceback if type or place are new."""
        place = place_of(error.__traceback__, file)
        kind = f"{type(error).__name__} at {place}"
        if kind not in self._reported:
            self._reported.add(kind)
            sys.stderr.write(f"reward function raised {kind} (printed once)\n")
            traceback.print_exception(error, limit=-20)
        suffix = f" ({place})" if place else ""
        refused = isinstance(error, PermissionError) or os.strerror(errno.EPERM) in str(error)
        if refused and self._policy is not None:
            suffix += "; the sandbox may have refused this: see reward.network and reward.sandbox"
        # A long text is cut before the place, which the caller needs most.
        text = clean(f"{type(error).__name__}: {error}".rstrip(": "), MAX_ERROR - len(suffix))
        return text + suffix


async def _wait_for(result: Awaitable[Any]) -> Any:
    return await result  # `Runner.run` takes only coroutines, and a function may return a future


def _parse_metadata(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidSample("BAD_METADATA", f"metadata_json is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidSample("BAD_METADATA", f"metadata_json holds a {type(value).__name__}; it must hold an object")
    return value


def _parse_messages(text: str) -> list[dict[str, Any]]:
    try:
        value = json.loads(text or "[]")
    except (ValueError, RecursionError) as error:
        raise InvalidSample("BAD_METADATA", f"prompt_messages_json is not JSON: {error}") from None
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise InvalidSample("BAD_METADATA", "prompt_messages_json must hold an array of objects")
    return value


def place_of(trace: TracebackType | None, file: str) -> str:
    """Return "file.py:line" of the innermost frame in the function's file, or else outside of this package.

    Frames inside of libraries are skipped, because users look for the error in their own code.
    """
    found = [f for f in traceback.extract_tb(trace) if not f.filename.startswith((_PACKAGE, "<"))]
    found = [f for f in found if f.filename == file] or found
    return clean(f"{Path(found[-1].filename).name}:{found[-1].lineno}", 200) if found else ""


def _file_of(function: RewardFunction) -> str:
    """Return the source file of a function or callable object; empty for C code. It may run user code, and raise."""
    inner = inspect.unwrap(function)
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    return str(code.co_filename) if code else ""


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the pipes of the service to other descriptors; print() then writes to stderr and input() reads nothing.

    C code that uses descriptors 0 and 1 cannot disturb the protocol either.
    """
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, replies


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
