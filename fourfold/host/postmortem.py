"""Explains how a child process ended: exit code or signal, memory kill or not, and the end of its log."""

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
_MESSAGE_BYTES: Final = 64 << 10  # lines of other processes may follow the message
_MESSAGE_CHARACTERS: Final = 800  # that of a GPU without free memory names each process and key


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The end of a child process, and the end of its log."""

    name: str  # member id
    time: float  # seconds since the epoch
    exit_code: int  # 0 if a signal ended the process
    signal: int  # 0 if the process exited by itself
    oom_kills: int  # times that the kernel's out-of-memory killer struck on this machine while the process ran
    was_ready: bool
    log: str  # path of the log
    last_lines: tuple[str, ...]
    message: str = ""  # reason that the process itself logged last (`last_message`); empty if it logged none
    space: str = ""  # free space on the disks of its machine, if a disk was full (`explain_no_space`)
    node: str = ""  # of a cluster, which was lost together with the process; empty: the process died alone

    @property
    def brief(self) -> str:
        """One line: "killed by SIGKILL" or "ended with exit code 1", and the process's own reason."""
        return self._describe()

    def _describe(self, hint: str = "") -> str:
        end = f"killed by {signal_name(self.signal)}" if self.signal else f"ended with exit code {self.exit_code}"
        end = f"lost with node {self.node}" if self.node else end
        return end + hint + (f": {self.message}" if self.message else "")

    def explain(self) -> str:
        """Return several lines: name, cause and log; the end of the log, too, if the process gave no reason itself."""
        stage = "" if self.was_ready else " before it was ready"
        hint = explain_sigkill(self.oom_kills) if self.signal == signal.SIGKILL else ""
        lines = [f"{self.name} died{stage}: {self._describe(hint)}."]
        if self.message:
            lines += [f"Its log: {self.log}"]
        elif self.last_lines:
            lines += [f"Its last lines ({self.log}):", *(f"  | {line}" for line in self.last_lines)]
        else:
            lines += [f"It wrote nothing to its log ({self.log})."]
        if self.space:
            lines += [f"{self.space}."]
        return "\n".join(lines)


def explain_sigkill(oom_kills: int) -> str:
    """Return what is known about a SIGKILL, to be appended to "killed by SIGKILL"; `oom_kills` as in `Death`."""
    if oom_kills:
        return (
            ": the kernel's out-of-memory killer struck while it ran. `fourfold plan RECIPE` shows how much memory "
            "each role needs; lower batch.tokens_per_micro_batch or rollout.kv_cache_gib, or use a smaller model"
        )
    return "; its sender is unknown, and no out-of-memory kill was recorded"


def signal_name(number: int) -> str:
    """Return e.g. "SIGSEGV", or "signal 42" for a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def log_tail(log: Path, start: int = 0) -> tuple[str, ...]:
    """Return the last 30 lines of a log from byte `start` on, JSON records as text; empty if it cannot be read."""
    raw = _end_of(log, start, _TAIL_BYTES)[-_TAIL_LINES:]
    lines = [printable(part) for line in raw for part in _record_as_text(line.rstrip())]
    return tuple(lines[-_TAIL_LINES:])


def last_message(log: Path, name: str, start: int = 0) -> str:
    """Return the text after "NAME: " in the last line of a log that begins so: the reason for which a service ended.

    `fourfold.service.lifecycle` writes that line; others may follow it. The log of this process begins at byte `start`.
    """
    prefix = f"{name}: "
    found = [line for line in _end_of(log, start, _MESSAGE_BYTES) if line.startswith(prefix)]
    return clean(found[-1].removeprefix(prefix), _MESSAGE_CHARACTERS).rstrip(".") if found else ""


def _end_of(log: Path, start: int, size: int) -> list[str]:
    """Return the lines in the last `size` bytes of a log, none from before byte `start`."""
    try:
        with log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(start, end - size))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def _record_as_text(line: str) -> list[str]:
    """Return a JSON record (`fourfold.host.logs`) as time, level, message and traceback; other lines unchanged."""
    try:
        record = json.loads(line)
        text = f"{str(record['time'])[11:19]} {record['level']}: {record['message']}"
        return [*text.splitlines(), *str(record.get("traceback", "")).splitlines()]
    except (ValueError, KeyError, TypeError, RecursionError):  # a program may print thousands of brackets
        return [line]


def oom_kill_count() -> int:
    """Return how often the out-of-memory killer has struck in this cgroup; if unknown, on the whole machine."""
    for path in (*_cgroup_memory_files(), Path("/proc/vmstat")):
        with contextlib.suppress(OSError):
            if match := re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE):
                return int(match.group(1))
    return 0


def _cgroup_memory_files() -> list[Path]:
    """Return files that may have an `oom_kill` line: of cgroup versions 2 and 1, of our group and of the mounted root.

    In a container the path in /proc/self/cgroup is the host's; our group is then mounted as the root.
    """
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
