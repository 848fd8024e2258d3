"""The worker process: loads reward functions and runs them, one sample at a time, in its main thread.

    service --stdin: {"load": verifier} or {"score": sample}--> worker --stdout: one reply each--> service

It knows no gRPC and no time limit: the service kills it when a function does not return, and
the kernel kills it when the service dies. Functions run in the main thread, where signals and
asyncio work as in a script. What they print goes to stderr.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final

from fourfold.text import clean
from fourfold_reward import frames, loader
from fourfold_reward.loader import Verifier, VerifierError
from fourfold_reward.outcome import MAX_MESSAGE_CHARACTERS, Outcome, from_result
from fourfold_reward.sample import RewardFunction, ScoreInput
from fourfold_reward.verifiers import BadMetadata

_PR_SET_PDEATHSIG: Final = 1
_HERE: Final = str(Path(__file__).parent)


def main(arguments: list[str]) -> int:
    """Serve the process that started this one until it closes the pipe or dies."""
    _die_with(parent=int(arguments[0]))
    requests, replies = _take_pipes()
    sys.path.append(str(Path.cwd()))  # last, so that nothing there hides an installed package
    worker = Worker()
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

    def __init__(self) -> None:
        """Start without any function."""
        self._functions: dict[str, RewardFunction] = {}
        self._files: dict[str, str] = {}  # in which they are written
        self._runner = asyncio.Runner()  # one loop for the worker's life: clients of async functions stay connected
        self._reported: set[str] = set()

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to a request. The one place where anything that user code raises is caught."""
        loading = "load" in request
        try:
            return self._load(request) if loading else self._score(request).to_json()
        except BadMetadata as error:
            return Outcome.error("BAD_METADATA", str(error)).to_json()
        except VerifierError as error:
            return {"error": str(error)}
        except BaseException as error:  # user code may raise SystemExit or KeyboardInterrupt, too
            file = request["load"]["file"] if loading else self._files.get(request["verifier"], "")
            text = self._explain(error, file)
            return {"error": text} if loading else Outcome.error("RAISED", text).to_json()

    def _load(self, request: Mapping[str, Any]) -> dict[str, Any]:
        function, verifier = loader.load(Verifier.from_json(request["load"]), request["options"])
        self._functions[verifier.name] = function
        self._files[verifier.name] = _file_of(function)
        return {"version": verifier.version}

    def _score(self, request: Mapping[str, Any]) -> Outcome:
        sample = ScoreInput(**request["score"], metadata=_metadata(request["metadata_json"]))
        result = self._functions[request["verifier"]](sample)
        if inspect.isawaitable(result):
            result = self._runner.run(_await(result))
        return from_result(result)

    def _explain(self, error: BaseException, file: str) -> str:
        """Return type, text and place of an error; print its traceback when it is a new one.

        The text is cut before the place: a caller needs that most.
        """
        place = _place(error.__traceback__, file)
        kind = f"{type(error).__name__} at {place}"
        if kind not in self._reported:
            self._reported.add(kind)
            sys.stderr.write(f"a reward function raised; this is printed once for each {kind}\n")
            traceback.print_exception(error, limit=-20)
        suffix = f" ({place})" if place else ""
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


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
