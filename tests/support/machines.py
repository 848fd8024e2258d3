"""Two machines in network namespaces of this one: own loopback, host name, /tmp, shared memory and working folder.

    machine "a" 10.77.0.1 <--veth--> machine "b" 10.77.0.2

It needs root, and `ip` of iproute2; `missing()` tells what is missing.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fourfold.host.process_tree import descendants

ROOT: Final = Path(__file__).parents[2]
NETWORK: Final = "10.77.0"
# Runs in a new mount namespace: folders of this test's own in the place of /tmp and /dev/shm. What the interpreter and
# the checkout need stays visible if it is in /tmp.
_ENTER: Final = """
set -e
hostname "$1"; own=$2; shift 2
mount --make-rprivate /
for kept in "$FOURFOLD_KEPT_1" "$FOURFOLD_KEPT_2" "$FOURFOLD_SHARED"; do
  case "$kept" in /tmp/*) mkdir -p "$own/tmp/${kept#/tmp/}"; mount --rbind "$kept" "$own/tmp/${kept#/tmp/}";; esac
done
mount --rbind "$own/tmp" /tmp
mount -t tmpfs -o size=2g tmpfs /dev/shm
cd /tmp/work
exec "$@"
"""


def missing() -> str:
    """Return what this machine lacks for two machines; empty if they can be made."""
    if os.geteuid():
        return "root, for network namespaces"
    for program in ("ip", "unshare", "nsenter", "mount", "hostname"):
        if shutil.which(program) is None:
            return f"the program {program}"
    probe = subprocess.run(["unshare", "--net", "--mount", "--uts", "--ipc", "true"], capture_output=True, check=False)
    return "" if probe.returncode == 0 else f"namespaces: {probe.stderr.decode(errors='replace').strip()}"


@dataclass
class Machine:
    """One machine. `folder` is its working folder, /tmp/work inside."""

    name: str
    address: str
    namespace: str
    own: Path  # what it has in the place of /tmp is own/tmp
    shared: Path | None = None  # folder that both machines see under this path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.own / "tmp" / "work"

    def start(self, name: str, words: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a program in the working folder; its output is `output(name)`."""
        enter = ["ip", "netns", "exec", self.namespace, "unshare", "--mount", "--uts", "--ipc"]
        environment = {
            **os.environ,
            "FOURFOLD_KEPT_1": str(ROOT),
            "FOURFOLD_KEPT_2": sys.prefix,
            "FOURFOLD_SHARED": str(self.shared or ""),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            **(env or {}),
        }
        with (self.own / f"{name}.out").open("ab") as file:
            self.processes[name] = subprocess.Popen(
                [*enter, "sh", "-c", _ENTER, "enter", self.name, str(self.own), *words],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True, env=environment,
            )  # fmt: skip
        return self.processes[name]

    def fourfold(self, name: str, line: str) -> subprocess.Popen[bytes]:
        """Start a command of Fourfold."""
        return self.start(name, [sys.executable, "-m", "fourfold", *line.split()])

    def output(self, name: str) -> str:
        return (self.own / f"{name}.out").read_text(errors="replace")

    def kill(self, name: str | None = None) -> None:
        """Kill a program, or all of this machine, and all that they started."""
        chosen = [process for key, process in self.processes.items() if name in (None, key)]
        own = {process.pid for process in chosen if process.poll() is None}
        for pid in own | descendants(own):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in chosen:
            process.wait(20)

    def programs(self) -> dict[int, str]:
        """Return the pids and command lines of all processes of this machine."""
        done = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False)
        lines = {}
        for pid in done.stdout.split():
            with suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                lines[int(pid)] = line
        return {pid: line for pid, line in lines.items() if line}


@contextmanager
def two_machines(folder: Path, *, shared: Path | None = None) -> Iterator[tuple[Machine, Machine]]:
    """Make two machines that reach each other, and both see the folder `shared`; end and remove them afterwards."""
    made = []
    tag = f"ff{os.getpid() % 100000}"
    try:
        for number, name in enumerate(("a", "b"), 1):
            machine = Machine(f"host-{name}", f"{NETWORK}.{number}", f"{tag}{name}", folder / f"host-{name}", shared)
            machine.folder.mkdir(parents=True)
            _ip("netns", "add", machine.namespace)
            made.append(machine)
        first, second = made
        pair = ("link", "add", f"{tag}v", "netns", first.namespace, "type", "veth")
        _ip(*pair, "peer", "name", f"{tag}w", "netns", second.namespace)
        for machine, device in ((first, f"{tag}v"), (second, f"{tag}w")):
            inside = ("-n", machine.namespace)
            _ip(*inside, "address", "add", f"{machine.address}/24", "dev", device)
            _ip(*inside, "link", "set", device, "up")
            _ip(*inside, "link", "set", "lo", "up")
        yield first, second
    finally:
        for machine in made:
            machine.kill()
            for pid in subprocess.run(
                ["ip", "netns", "pids", machine.namespace], capture_output=True, text=True, check=False
            ).stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _ip("netns", "delete", machine.namespace)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
