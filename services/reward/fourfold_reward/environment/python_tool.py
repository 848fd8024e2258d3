"""The tool "builtin:python": runs code of the model in a sandboxed interpreter, one process per call.

The process has no network, starts no process, reads Python and its packages, writes nothing, and is killed at its limit
of time or of output. The result is what the code prints, and the value of its last line if that is an expression.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import os
import signal
import sys
import traceback
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fourfold import sandbox
from fourfold.host.process_tree import die_with_parent
from fourfold.text import printable

DESCRIPTION: Final[Mapping[str, str]] = {
    "name": "python",
    "description": "Runs Python code in a new interpreter. Returns what it prints, and the value of its last line.",
    "parameters_json": json.dumps(
        {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "Python code"}},
            "required": ["code"],
            "additionalProperties": False,
        }
    ),
}
MAX_OUTPUT_BYTES: Final = 16_384
MAX_CODE_BYTES: Final = 65_536
_MEMORY_BYTES: Final = 512 << 20
_REAP_SECONDS: Final = 5.0
_FILE: Final = "<code>"


class PythonTool:
    """Runs calls of the tool, at most one per core at a time."""

    def __init__(self, *, seconds: float, required: bool = False) -> None:
        """Prepare.

        Args:
            seconds: time limit of one call.
            required: fail when this machine cannot enforce the whole sandbox.
        """
        self._seconds = seconds
        # Absolute, because the interpreter starts in another folder.
        self._python_path = os.pathsep.join(str(Path(path).absolute()) for path in sys.path if path)
        self._slots = asyncio.Semaphore(os.cpu_count() or 1)
        self._policy = sandbox.Policy(
            read=sandbox.interpreter_paths(),
            write=("/dev/null",),
            memory_bytes=_MEMORY_BYTES,
            address_bytes=4 * _MEMORY_BYTES,
            cpu_seconds=int(seconds) + 2,
            open_files=64,
            required=required,
        )

    async def call(self, arguments_json: str) -> tuple[str, bool]:
        """Run the code of a call. Return the text for the model, and whether the arguments were valid."""
        try:
            arguments = json.loads(arguments_json or "{}")
            code = arguments["code"]
            if not isinstance(code, str) or set(arguments) != {"code"}:
                raise TypeError
        except (ValueError, TypeError, KeyError, RecursionError):
            return 'Error: python: the arguments must be a JSON object {"code": TEXT}', False
        data = code.encode(errors="replace")
        if len(data) > MAX_CODE_BYTES:
            return f"Error: python: the code has {len(data)} bytes; at most {MAX_CODE_BYTES} are allowed", True
        async with self._slots:
            return await self._run(data), True

    async def _run(self, code: bytes) -> str:
        environment = sandbox.environment() | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "fourfold_reward.environment.python_tool", str(os.getpid())),
            self._policy.to_json(),
            stdin=PIPE,
            stdout=PIPE,
            stderr=STDOUT,
            cwd="/",
            env=environment | {"PYTHONPATH": self._python_path},
            start_new_session=True,
        )
        output, note = bytearray(), ""
        try:
            async with asyncio.timeout(self._seconds):
                await self._exchange(process, code, output)
                note = f"[cut at {MAX_OUTPUT_BYTES} bytes]" if len(output) > MAX_OUTPUT_BYTES else ""
        except TimeoutError:
            note = f"Error: stopped after {self._seconds:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REAP_SECONDS):
                    await process.wait()
        if not note and process.returncode not in (0, 1):
            note = "Error: the interpreter was ended: it used too much memory or time, or crashed"
        text = printable(bytes(output[:MAX_OUTPUT_BYTES]).decode(errors="replace"))
        return "\n".join(filter(None, (text.rstrip("\n"), note))) or "(no output)"

    async def _exchange(self, process: Process, code: bytes, output: bytearray) -> None:
        """Send the code and collect the output, until the process ends or the output is too long."""
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(code)
            await process.stdin.drain()
        process.stdin.close()
        while len(output) <= MAX_OUTPUT_BYTES and (part := await process.stdout.read(65_536)):
            output += part
        if len(output) <= MAX_OUTPUT_BYTES:
            await process.wait()


def main(arguments: list[str]) -> int:
    """Run the code on stdin in the sandbox policy `arguments[1]` (JSON), as a child of `arguments[0]`."""
    die_with_parent(int(arguments[0]))
    code = sys.stdin.buffer.read().decode(errors="replace")
    policy = sandbox.Policy.from_json(arguments[1])
    os.environ.pop("PYTHONPATH", None)
    sys.path[:] = [path for path in sys.path if any(Path(path).is_relative_to(each) for each in policy.read)]
    sandbox.enter(policy)
    try:
        _run_code(code)
    except BaseException as error:  # everything that code of the model raises is its output
        if isinstance(error, SystemExit):
            return 0
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.filename == _FILE]
        lines = "".join(traceback.format_list(own)) + "".join(traceback.format_exception_only(error))
        sys.stdout.write(lines)
        return 1
    return 0


def _run_code(code: str) -> None:
    tree = ast.parse(code, _FILE)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(tree, _FILE, "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), _FILE, "eval"), names)
        if value is not None:
            sys.stdout.write(f"{value!r}\n")


if __name__ == "__main__":
    code = main(sys.argv[1:])
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code)
