"""Records the Python stacks of running processes with py-spy.

py-spy reads the memory of the processes, so that the measured code needs no hook. A profile is FOLDER/NAME.folded:
one line per stack with its count, which speedscope and flamegraph.pl read; the first frames are processes and threads.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from fourfold.errors import ConfigError, DeadlinePassed, Unavailable
from fourfold.install import install_command

_RATE: Final = 100  # stacks per second
_WRITE_SECONDS: Final = 120.0
_START_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.01
_STARTED: Final = b"Sampling process"
_PTRACE_SCOPE: Final = Path("/proc/sys/kernel/yama/ptrace_scope")
# The processes keep running while they are read: to stop all threads of an engine a hundred times a second would
# change what is measured. Idle threads show what a process waits for.
_RECORD: Final = ("record", "--format", "raw", "--rate", str(_RATE), "--subprocesses", "--threads", "--idle")


class Profile:
    """A recording of a process and its descendants."""

    def __init__(self, folder: Path) -> None:
        """Prepare a recording into `folder`, which exists.

        Raises:
            ConfigError: py-spy is not installed, or the kernel does not let it read other processes.
        """
        self._folder = folder.absolute()
        self._py_spy = find_py_spy()
        self._recorder: subprocess.Popen[bytes] | None = None
        check_permission(self._py_spy)

    def begin(self, name: str, pid: int) -> None:
        """Start to record process `pid` and its descendants, also those that it starts later."""
        self._log = self._folder / f"{name}.log"
        output = self._folder / f"{name}.folded"
        command = (self._py_spy, *_RECORD, "--nonblocking", "--pid", str(pid), "--output", str(output))
        with self._log.open("wb") as log:
            self._recorder = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        # Before this line py-spy has no handler of SIGINT, and `end` would kill it without a profile.
        deadline = time.monotonic() + _START_SECONDS
        while _STARTED not in self._log.read_bytes() and self._recorder.poll() is None:
            if time.monotonic() > deadline:
                raise DeadlinePassed(f"py-spy did not start in {_START_SECONDS:.0f} s; its log is {self._log}")
            time.sleep(_POLL_SECONDS)

    def end(self) -> None:
        """Stop to record, and return when the profile is written. Raises Unavailable if py-spy failed."""
        assert self._recorder is not None, "begin first"
        self._recorder.send_signal(signal.SIGINT)
        try:
            code = self._recorder.wait(_WRITE_SECONDS)
        except subprocess.TimeoutExpired:
            self._recorder.kill()
            code = self._recorder.wait()
        if code:
            raise Unavailable(f"py-spy ended with exit code {code}; its log is {self._log}")


def find_py_spy() -> Path:
    """Return the program. Raises ConfigError if it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    if found := beside if beside.exists() else shutil.which("py-spy"):
        return Path(found)
    raise ConfigError(f"--profile needs py-spy, which is not installed; {install_command('py-spy>=0.4,<0.5')}")


def check_permission(py_spy: Path) -> None:
    """Raise ConfigError unless the kernel lets py-spy read a process of this user, which is started for the check."""
    code = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as target:
        assert target.stdout is not None
        target.stdout.readline()  # now the interpreter is there to be read
        command = (py_spy, "dump", "--nonblocking", "--pid", str(target.pid))
        done = subprocess.run(command, capture_output=True, text=True, timeout=_START_SECONDS, check=False)
    if done.returncode:
        scope = _PTRACE_SCOPE.read_text(encoding="utf-8").strip() if _PTRACE_SCOPE.exists() else "not set"
        reason = (done.stderr.strip().splitlines() or ["no message"])[0]
        raise ConfigError(
            f"--profile: py-spy cannot read another process ({reason}; kernel.yama.ptrace_scope is {scope}, and py-spy "
            "needs 0 or CAP_SYS_PTRACE); run as root, start the container with --cap-add SYS_PTRACE, or "
            "`sudo sysctl kernel.yama.ptrace_scope=0`"
        )
