"""Starts the processes that follow a run, restarts dead ones, and lets them finish at the end of the run.

There is one process for each sink, and one for the index of the samples, which `fourfold view` searches.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path
from typing import Final

from fourfold.config import Config
from fourfold.host.process_tree import PARENT_PID_VARIABLE

from ..state.run_board import RunBoard
from ..state.samples import SAMPLES_FILE
from .sink import INDEX

log = logging.getLogger("fourfold.coordinator")

_MODULE: Final = "fourfold_coordinator.sinks.process"
_RESTART_SECONDS: Final = (1.0, 5.0, 30.0, 120.0)
"""Waits before the restarts of a process; the last one is used for all further restarts."""
# `fourfold view` itself indexes this number of bytes in a second.
_INDEXED_BYTES: Final = 8 << 20
_INDEX_SECONDS: Final = 5.0
_FINISH_SECONDS: Final = 20.0
"""Time limit for a process to send the rest at the end of a run."""
_REAP_SECONDS: Final = 5.0


class SinkProcesses:
    """The processes that follow a run. The failure of one is only a condition on the run board."""

    def __init__(self, config: Config, folder: Path, board: RunBoard) -> None:
        self._names, self._folder, self._board = config.logging.sinks, folder, board
        self._ending, self._ended = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        """Keep all processes running until `finish`; a cancellation kills them."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep_index())
                for name in self._names:
                    group.create_task(self._keep(name))
        except Exception:  # an error of this class must not end the run either
            log.exception("sinks are not supervised any more; `fourfold log` sends what is missing")
            self._ended.set()
            await self._ending.wait()
        finally:
            self._ended.set()

    async def finish(self) -> None:
        """Let the processes send the rest and end; return when they have, after at most 30 s.

        A process that is not done after 20 s is killed.
        """
        self._ending.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FINISH_SECONDS + 2 * _REAP_SECONDS):
                await self._ended.wait()

    async def _keep_index(self) -> None:
        """Start the index process when there is much to index."""
        while not self._ending.is_set():
            if _size(self._folder / SAMPLES_FILE) > _INDEXED_BYTES:
                return await self._keep(INDEX)
            await self._wait_for_end(_INDEX_SECONDS)

    async def _keep(self, name: str) -> None:
        deaths = 0
        while not self._ending.is_set():
            try:
                cause = await self._follow(name)
            except OSError as error:  # a full disk, or too many processes
                cause = f"its process cannot be started ({error})"
            if not cause:
                self._board.resolve_condition(_subject(name))
                return
            seconds = _RESTART_SECONDS[min(deaths, len(_RESTART_SECONDS) - 1)]
            deaths += 1
            log.warning("sink failed: name=%s cause=%s restart_in=%g", name, cause, seconds)
            self._board.report_condition(_subject(name), f"{cause}; the run goes on. {self._advice(name)}")
            await self._wait_for_end(seconds)

    async def _wait_for_end(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ending.wait()

    async def _follow(self, name: str) -> str:
        """Run the process once; return why it failed, or an empty text. Raises OSError: it cannot be started."""
        path = self._folder / "logs" / f"sink-{name}.log"
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", _MODULE, str(self._folder), name),
                stdin=PIPE,
                stdout=DEVNULL,
                stderr=output,
                env={**os.environ, PARENT_PID_VARIABLE: str(os.getpid())},
            )
        try:
            return await self._wait(process, name, path)
        finally:
            await _kill(process)

    async def _wait(self, process: Process, name: str, log_path: Path) -> str:
        ended = asyncio.create_task(process.wait())
        ending = asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait({ended, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                assert process.stdin is not None
                process.stdin.close()
                await asyncio.wait({ended}, timeout=_FINISH_SECONDS)
            if not ended.done():
                log.warning("sink did not finish in %g s: name=%s; %s", _FINISH_SECONDS, name, self._advice(name))
                return ""
            if ended.result() == 0 and self._ending.is_set():
                return ""
            return f"{_last_line(log_path)} (exit code {ended.result()}, {log_path})"
        finally:
            ended.cancel()
            ending.cancel()

    def _advice(self, name: str) -> str:
        if name == INDEX:
            return "`fourfold view` makes an index of its own."
        return f"Send what is missing with: fourfold log {shlex.quote(str(self._folder))} {name}"


async def _kill(process: Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REAP_SECONDS):
                await process.wait()


def _subject(name: str) -> str:
    return f"sink {name}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:500] if lines else "it wrote no error"
