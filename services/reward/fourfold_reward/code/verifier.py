"""Implements the verifier `code_tests`: finds code and tests of a sample, runs one against the other, counts.

Score = passed tests / all tests. Tests are in the row, as a list under `options.field` (default "tests") or in the
answer: texts with `assert`, or objects {"input": stdin, "output": stdout}.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import fourfold
import fourfold_reward
from fourfold.answers import without_reasoning
from fourfold.reward.function import Abstain, RewardFunction, Score, ScoreInput
from fourfold_reward.code import wire, zygote
from fourfold_reward.scores import InvalidSample
from fourfold_reward.text_rules import OptionError, check_names

CODE_TESTS: Final = "code_tests"
SECONDS: Final = "seconds"
"""Option that the service adds: wall-clock time for all tests of a sample."""
_MAX_TESTS: Final = 512
_MAX_OUTPUT: Final = 1 << 20
# Of the text or the input of a test, as JSON. The code has the rest of the frame; more code fails its tests.
_MAX_INPUT_BYTES: Final = wire.MAX_FRAME_BYTES // 2
# The sandbox shows the packages, but not the folder of a source checkout in which they are, so that an import by
# `sys.path` does not find them.
_BOOTSTRAP: Final = """
import importlib.util, runpy, sys
for folder in sys.argv[3:]:
    name = folder.rpartition("/")[2]
    spec = importlib.util.spec_from_file_location(name, folder + "/__init__.py", submodule_search_locations=[folder])
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
runpy.run_module("fourfold_reward.code.zygote", run_name="__main__", alter_sys=True)
"""
_LANGUAGES: Final = ("", "python", "python3", "py")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    field: str = "tests"
    test_seconds: float = 2.0  # of one test
    memory_mib: int = 512  # of the code
    seconds: float = 8.0  # of all tests

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> _Options:
        """Raises OptionError: an option is unknown or wrong."""
        check_names(CODE_TESTS, options, {"field", "test_seconds", "memory_mib", SECONDS})
        made = cls(**options)
        if not isinstance(made.field, str) or not made.field:
            raise OptionError(f"options.field = {made.field!r:.100}; it must be the name of a column")
        for name, least, most in (("test_seconds", 0.01, 3600), ("memory_mib", 32, 1 << 20), ("seconds", 0.01, 86400)):
            value = getattr(made, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise OptionError(f"options.{name} = {value!r:.100}; it must be a number from {least} to {most}")
        if not isinstance(made.memory_mib, int):
            raise OptionError(f"options.memory_mib = {made.memory_mib!r}; it must be a whole number of MiB")
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class _Test:
    """A text with asserts, or a program's input and output."""

    check: str | None = None
    stdin: str = ""
    stdout: str = ""


def load(options: Mapping[str, Any]) -> RewardFunction:
    """Return the verifier, and start the process that forks the runners.

    Raises:
        OptionError: an option is wrong, or this worker may not start processes.
    """
    settings = _Options.of(options)
    control = _start_zygote()

    def code_tests(sample: ScoreInput) -> Score | Abstain:
        tests = _tests_of(sample, settings.field)
        if isinstance(tests, Abstain):
            return tests
        code = extract_code(without_reasoning(sample.completion, sample.prompt))
        passed = 0
        deadline = time.monotonic() + settings.seconds
        for test in tests if code is not None else ():
            seconds = min(settings.test_seconds, deadline - time.monotonic())
            if seconds <= 0:
                break  # tests without time are not passed
            passed += _passes(control, code or "", test, seconds=seconds, memory_mib=settings.memory_mib)
        counts = {"passed": float(passed), "total": float(len(tests)), "code": float(code is not None)}
        return Score(passed / len(tests), counts)

    return code_tests


def extract_code(text: str) -> str | None:
    """Return the last fenced block of Python, or of no language; None if there is none, or if it has no end."""
    found, block, fence, indent = None, list[str](), "", 0
    wanted = False
    for line in text.split("\n"):
        stripped = line.strip()
        if not fence and stripped.startswith(("```", "~~~")):
            fence = stripped[: len(stripped) - len(stripped.lstrip(stripped[0]))]
            wanted = stripped[len(fence) :].strip().lower() in _LANGUAGES
            block, indent = [], len(line) - len(line.lstrip(" "))
        elif fence and stripped == fence:
            found = "\n".join(block) if wanted else found
            fence = ""
        elif fence:
            # A block in a list is indented as its fence.
            block.append(line[min(indent, len(line) - len(line.lstrip(" "))) :])
    cut_off = bool(fence) and wanted and any(map(str.strip, block))
    return None if cut_off else found


def _tests_of(sample: ScoreInput, field: str) -> Sequence[_Test] | Abstain:
    """Return the tests of a row; raise InvalidSample if they are malformed."""
    entries: Any = sample.metadata.get(field)
    if entries is None and not (entries := sample.answer).strip():
        return Abstain("NO_ANSWER")
    with suppress(ValueError, RecursionError, TypeError):  # TypeError: no text
        if isinstance(parsed := json.loads(entries), list | dict):
            entries = parsed
    if isinstance(entries, dict) and isinstance(inputs := entries.get("inputs"), list):  # as in APPS and TACO
        name, outputs = entries.get("fn_name"), entries.get("outputs", [])
        entries = [{"input": i, "output": o, "fn_name": name} for i, o in zip_longest(inputs, outputs)]
    if not isinstance(entries, list):
        entries = [entries]
    if not entries or len(entries) > _MAX_TESTS:
        raise InvalidSample("BAD_METADATA", f"the row has {len(entries)} tests; it must have 1 to {_MAX_TESTS}")
    return [_test_of(entry, number) for number, entry in enumerate(entries)]


def _test_of(entry: object, number: int) -> _Test:
    if isinstance(entry, str):
        try:
            tree = ast.parse(entry)
            compile(tree, "<test>", "exec")
        except (SyntaxError, ValueError, RecursionError) as error:
            raise InvalidSample("BAD_METADATA", f"test {number} is no Python: {error}") from None
        if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
            raise InvalidSample("BAD_METADATA", f"test {number} asserts nothing: {entry[:80]!r}")
        if (size := len(json.dumps(entry))) > _MAX_INPUT_BYTES:
            raise InvalidSample("BAD_METADATA", f"test {number} has {size} bytes; it may have {_MAX_INPUT_BYTES}")
        return _Test(check=entry)
    if isinstance(entry, Mapping) and isinstance(entry.get("output"), str):
        stdin = entry.get("input", "")
        kind = str(entry.get("type") or entry.get("testtype") or "stdin")
        if isinstance(stdin, str) and not entry.get("fn_name") and kind.startswith("stdin"):
            if (size := len(json.dumps(stdin))) > _MAX_INPUT_BYTES or len(entry["output"]) > _MAX_OUTPUT:
                raise InvalidSample(
                    "BAD_METADATA",
                    f"test {number} has an input of {size} bytes and an output of {len(entry['output'])} characters; "
                    f"{_MAX_INPUT_BYTES} and {_MAX_OUTPUT} may be: shorten it",
                )
            return _Test(stdin=stdin, stdout=entry["output"])
    raise InvalidSample(
        "BAD_METADATA",
        f"test {number} is {entry!r:.80}; it must be a text with an assert, or of a program, "
        f'{{"input": TEXT, "output": TEXT}}',
    )


def _passes(control: socket.socket, code: str, test: _Test, *, seconds: float, memory_mib: int) -> bool:
    """Run one test in new processes.

    The time of the test begins when they are in their sandboxes. At its end they are killed. Raises RuntimeError: they
    did not enter their sandboxes; the code is not at fault.
    """
    request = {"mode": "program", "seconds": seconds, "memory_mib": memory_mib}
    with ExitStack() as stack:
        ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
        sockets = [theirs]
        if test.check is not None:
            request["mode"] = "functions"
            sockets += (stack.enter_context(end) for end in socket.socketpair())
        socket.send_fds(control, [json.dumps(request).encode()], [each.fileno() for each in sockets])
        for each in sockets:
            each.close()
        try:
            return _verdict(ours, code, test, seconds=seconds)
        finally:
            control.send(zygote.STOP)


def _verdict(connection: socket.socket, code: str, test: _Test, *, seconds: float) -> bool:
    """Return whether the code passes the test in the processes that were asked for."""
    latest = time.monotonic() + zygote.START_SECONDS
    try:
        if test.check is not None:
            wire.send(connection, {"test": test.check}, deadline=latest)
        wire.send(connection, {"code": code, "stdin": test.stdin}, deadline=latest)
        wire.wait_until_ready(connection, deadline=latest)
    except wire.TooLargeError:
        return False
    except wire.WireError as error:
        raise RuntimeError(
            f"the process of a test was not in its sandbox within {zygote.START_SECONDS:g} s, or it ended "
            f"before ({error}); this says nothing about the code: look for a lack of memory or processes"
        ) from None
    deadline = time.monotonic() + seconds
    try:
        if test.check is None:
            return _same_text(_output(connection, deadline), test.stdout) and time.monotonic() < deadline
        return wire.receive(connection, deadline=deadline).get("passed") is True
    except wire.WireError:  # too much output, or nothing until the deadline
        return False


def _output(connection: socket.socket, deadline: float) -> str:
    """Return what a program writes until it ends. Raises WireError: it writes too much, or does not end."""
    parts, size = list[bytes](), 0
    while True:
        try:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            part = connection.recv(1 << 16)
        except ConnectionResetError:  # the program ended with unread input
            part = b""
        except OSError as error:
            raise wire.WireError(str(error)) from None
        if not part:
            return b"".join(parts).decode(errors="replace")
        size += len(part)
        if size > _MAX_OUTPUT:
            raise wire.WireError(f"the program wrote more than {_MAX_OUTPUT} bytes")
        parts.append(part)


def _same_text(first: str, second: str) -> bool:
    """Compare lines, without spaces at their ends and without empty lines at the end."""
    lines = [[line.rstrip() for line in text.rstrip().splitlines()] for text in (first, second)]
    return lines[0] == lines[1]


def _start_zygote() -> socket.socket:
    """Start the process that forks the runners, and return the socket to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    packages = (str(Path(package.__file__ or "").parent) for package in (fourfold, fourfold_reward))
    command = [sys.executable, "-P", "-c", _BOOTSTRAP, str(os.getpid()), str(theirs.fileno()), *packages]
    variables = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
    try:
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
    except PermissionError:
        raise OptionError("it starts processes, which needs reward.evaluate_text = true") from None
    finally:
        theirs.close()
    ours.settimeout(zygote.START_SECONDS)
    try:
        ready = ours.recv(16)
    except TimeoutError:
        ready = b""
    if ready != b"ready":
        process.kill()
        raise OptionError("the process that starts the code did not start; its errors are in the service's log")
    ours.settimeout(zygote.START_SECONDS)
    _end_with(process)
    return ours


def _end_with(process: subprocess.Popen[bytes]) -> None:
    """End this worker if the zygote ends, so that the service starts another one."""

    def on_child(number: int, frame: object) -> None:
        if process.poll() is not None:
            os._exit(70)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, on_child)
