"""How a process ended, told to people: exit code or signal, out of memory or not, and its last words."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fourfold.text import clean, printable

_TAIL_LINES: Final = 30
_TAIL_BYTES: Final = 16 << 10
_SAID_BYTES: Final = 64 << 10  # a cause may be followed by the last lines of another process
_SAID_CHARACTERS: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """How a child ended, and what it said last."""

    name: str
    time: float
    """Seconds since the epoch."""
    exit_code: int
    """0 when it was a signal."""
    signal: int
    """0 when it exited by itself."""
    oom_kills: int
    """Times the kernel's out-of-memory killer struck here while the child ran."""
    was_ready: bool
    log: str
    last_lines: tuple[str, ...]
    said: str = ""
    """Why, in its own last words (`said`); empty when it said nothing."""

    @property
    def brief(self) -> str:
        """One line: "killed by SIGKILL" or "ended with exit code 1", and its own last words."""
        return self._end + self._words

    @property
    def cause(self) -> str:
        """The same, with what is known of a SIGKILL."""
        return self._end + (why_killed(self.oom_kills) if self.signal == signal.SIGKILL else "") + self._words

    @property
    def _end(self) -> str:
        return f"killed by {signal_name(self.signal)}" if self.signal else f"ended with exit code {self.exit_code}"

    @property
    def _words(self) -> str:
        return f": {self.said}" if self.said else ""

    def explain(self) -> str:
        """Several lines for people: name, cause, the end of the log, where the log is."""
        stage = "" if self.was_ready else " before it was ready"
        lines = [f"{self.name} died{stage}: {self.cause}."]
        if self.last_lines:
            lines += [f"Its last lines ({self.log}):", *(f"  | {line}" for line in self.last_lines)]
        else:
            lines += [f"It wrote nothing to its log ({self.log})."]
        return "\n".join(lines)


def why_killed(oom_kills: int) -> str:
    """Return what is known of a SIGKILL, to be put after the words that name it.

    Args:
        oom_kills: times the kernel's out-of-memory killer struck here while the process ran.
    """
    if oom_kills:
        return (
            ": the kernel's out-of-memory killer struck while it ran. `fourfold plan RECIPE` shows what each role "
            "needs; batch.tokens_per_micro_batch, rollout.kv_cache_gib and a smaller model lower it"
        )
    return ", by somebody's kill -9 or by a memory limit that cannot be seen from here"


def signal_name(number: int) -> str:
    """Return e.g. "SIGSEGV"; "signal 42" for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def tail(log: Path, start: int = 0) -> tuple[str, ...]:
    """Return the last 30 lines of a log from byte `start` on, for people; empty when it cannot be read."""
    raw = _end_of(log, start, _TAIL_BYTES)[-_TAIL_LINES:]
    lines = [printable(part) for line in raw for part in _readable(line.rstrip())]
    return tuple(lines[-_TAIL_LINES:])


def said(log: Path, name: str, start: int = 0) -> str:
    """Return why a service ended, in its own words: what follows "NAME: " in the last such line of its log.

    Args:
        log: of the service; `fourfold.service.lifecycle` writes that line on stderr, perhaps with more lines after it.
        name: member id.
        start: byte at which the log of this process begins.
    """
    beginning = f"{name}: "
    words = [line for line in _end_of(log, start, _SAID_BYTES) if line.startswith(beginning)]
    return clean(words[-1].removeprefix(beginning), _SAID_CHARACTERS).rstrip(".") if words else ""


def _end_of(log: Path, start: int, size: int) -> list[str]:
    """Return the lines in the last `size` bytes of a log, none from before `start`."""
    try:
        with log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(start, end - size))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def _readable(line: str) -> list[str]:
    """Return a JSON log record (`fourfold.host.logs`) as clock, level, message and traceback, other lines unchanged."""
    try:
        record = json.loads(line)
        text = f"{str(record['time'])[11:19]} {record['level']}: {record['message']}"
        return [*text.splitlines(), *str(record.get("traceback", "")).splitlines()]
    except (ValueError, KeyError, TypeError):
        return [line]


def oom_kill_count() -> int:
    """Return how often the out-of-memory killer has struck in this cgroup; on this machine where that is not told."""
    for path in (*_cgroup_memory_files(), Path("/proc/vmstat")):
        with contextlib.suppress(OSError):
            if match := re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE):
                return int(match.group(1))
    return 0


def _cgroup_memory_files() -> list[Path]:
    """Return the files with an `oom_kill` line, of cgroup version 2 and 1, at our group and at the mounted root."""
    files = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers:
                root, name = Path("/sys/fs/cgroup"), "memory.events"
            elif "memory" in controllers.split(","):
                root, name = Path("/sys/fs/cgroup/memory"), "memory.oom_control"
            else:
                continue
            files += [root / group.lstrip("/") / name, root / name]
    return files
