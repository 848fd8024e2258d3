"""The processes of a run: which a recipe asks for, in which order they start, what happens when one dies.

    coordinator --(coordinator.address)--> rollout, trainer, reward, reference --READY--> the run goes on
         |                                            | dies
         '- exits 0: done, else: failed               '- started again, at most retry.restarts times

A process that dies before it was ready for the first time is not started again: the reason is in
its log and would be the same. Nobody waits here: `tick` looks, acts and returns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fourfold.config import Config, gpu_places
from fourfold.host.clock import SYSTEM_CLOCK, Clock
from fourfold.host.postmortem import Death
from fourfold.host.process import Command
from fourfold.text import format_duration

from .launcher import Launcher, ServiceSpec

COORDINATOR: Final = "coordinator-0"
ADDRESS_FILE: Final = "coordinator.address"
_COORDINATOR_START_SECONDS: Final = 120.0
# The coordinator waits 900 s for its services and says what is missing; this is for when it cannot.
_READY_SECONDS: Final = 960.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """How a run ended."""

    done: bool
    text: str = ""
    """Why it failed, for people."""


def launched_services(config: Config) -> list[ServiceSpec]:
    """Return the services that the launcher starts, the slowest to load first; the coordinator is not among them."""
    return _services(config, by_hand=False)


def manual_services(config: Config) -> list[ServiceSpec]:
    """Return one service for each needed role of which the recipe says `replicas = 0`."""
    return _services(config, by_hand=True)


def _services(config: Config, *, by_hand: bool) -> list[ServiceSpec]:
    roles = [
        ("rollout", config.rollout.replicas, 2),
        ("trainer", config.trainer.replicas, config.trainer_processes),
        ("reward", config.reward.replicas, config.reward.processes),
    ]
    if config.needs_reference:
        roles.append(("reference", config.reference.replicas, 1))
    places, found = gpu_places(config), []
    for role, replicas, cpus in roles:
        count = (1 if by_hand else 0) if replicas == 0 else (0 if by_hand else replicas)
        names = [f"{role}-{index}" for index in range(count)]
        found += [ServiceSpec(role=role, name=name, place=places.get(name, ()), cpus=cpus) for name in names]
    return found


def serve_arguments(
    service: ServiceSpec, *, recipe: Path, run_dir: Path, coordinator: str, listen: str = ""
) -> list[str]:
    """Return the words after `fourfold` that start a service."""
    words = ["serve", service.role, str(recipe), "--member-id", service.name, "--run-dir", str(run_dir)]
    if listen:
        words += ["--listen", listen]
    if coordinator:
        words += ["--coordinator", coordinator]
    return words


class Fleet:
    """Starts and watches the processes of one run."""

    def __init__(
        self,
        config: Config,
        *,
        run_dir: Path,
        launcher: Launcher,
        notify: Callable[[str], None],
        coordinator_listen: str = "127.0.0.1:0",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Prepare; nothing is started yet.

        Args:
            config: of the run.
            run_dir: holds config.toml already.
            launcher: where processes run.
            notify: told of every restart, for people.
            coordinator_listen: host:port.
            clock: times restarts and deadlines.
        """
        self.config = config
        self.address = ""
        """Of the coordinator; empty until it listens."""
        self.earlier: list[str] = []
        """One line for each death that was survived."""
        self._run_dir = run_dir
        self._launcher = launcher
        self._notify = notify
        self._coordinator_listen = coordinator_listen
        self._clock = clock
        self._services = {service.name: service for service in launched_services(config)}
        self._restarts: dict[str, int] = {}
        self._due: dict[str, float] = {}  # when to start a dead service again
        self._lost: set[str] = set()
        self._away: dict[str, float] = {}  # when a service that is started again died
        self._deadline = 0.0

    def start(self) -> None:
        """Start the coordinator; `tick` starts the others when it listens."""
        (self._run_dir / ADDRESS_FILE).unlink(missing_ok=True)
        self._deadline = self._clock.monotonic() + _COORDINATOR_START_SECONDS
        self._launch(ServiceSpec(role="coordinator", name=COORDINATOR), listen=self._coordinator_listen)

    def tick(self) -> RunOutcome | None:
        """Look once; return how the run ended, or None while it goes on."""
        for death in self._launcher.deaths():
            if (ending := self._on_death(death)) is not None:
                return ending
        for name, due in list(self._due.items()):
            if self._clock.monotonic() >= due:
                del self._due[name]
                self._launch(self._services[name])
        self._tell_who_is_back()
        if not self.address:
            self._look_for_coordinator()
        if self._deadline and self._clock.monotonic() > self._deadline:
            return self._overdue()
        return None

    def states(self) -> list[tuple[str, str]]:
        """Return (name, "starting" | "ready" | "restarting" | "lost") of each process, the coordinator first."""
        if not self.address:
            return [(COORDINATOR, "starting")]
        return [(COORDINATOR, "ready"), *((name, self._state(name)) for name in self._services)]

    def _state(self, name: str) -> str:
        if name in self._lost:
            return "lost"
        if name in self._due:
            return "restarting"
        return "ready" if self._launcher.is_ready(name) else "starting"

    def _look_for_coordinator(self) -> None:
        path = self._run_dir / ADDRESS_FILE
        if not path.is_file():
            return
        self.address = path.read_text(encoding="utf-8").strip()
        for service in self._services.values():
            self._launch(service)
        self._deadline = self._clock.monotonic() + max(_READY_SECONDS, 2 * self.config.retry.service_wait_seconds)

    def _overdue(self) -> RunOutcome | None:
        if not self.address:
            log = self._run_dir / "logs" / f"{COORDINATOR}.log"
            seconds = f"{_COORDINATOR_START_SECONDS:.0f} s"
            return RunOutcome(
                done=False, text=f"{COORDINATOR} does not listen after {seconds}; what it does is in {log}"
            )
        late = [name for name in self._services if self._state(name) == "starting"]
        self._deadline = 0.0
        if not late:
            return None
        logs = self._run_dir / "logs"
        return RunOutcome(done=False, text=f"{', '.join(late)} not ready in time; what it does is in {logs}")

    def _on_death(self, death: Death) -> RunOutcome | None:
        if death.name == COORDINATOR:
            done = death.exit_code == 0 and death.signal == 0
            return RunOutcome(done=done, text="" if done else death.explain())
        count = self._restarts.get(death.name, 0)
        at = time.strftime("%H:%M:%S", time.localtime(death.time))
        self._away[death.name] = self._clock.monotonic()
        if not death.was_ready and count == 0:
            return RunOutcome(done=False, text=death.explain())
        if count < self.config.retry.restarts:
            self._restarts[death.name] = count + 1
            self._due[death.name] = self._clock.monotonic() + (
                2.0**count - 1
            )  # at once, then after 1, 3, 7 ... seconds
            self._deadline = 0.0  # the coordinator keeps the time from here on
            self._survived(f"{at} {death.name} died ({death.brief}); starting it again. Its log: {death.log}")
            return None
        role = self._services[death.name].role
        self._lost.add(death.name)
        if all(name in self._lost for name, service in self._services.items() if service.role == role):
            limit = f"It was started again {count} times already (retry.restarts = {self.config.retry.restarts})."
            return RunOutcome(done=False, text=f"{death.explain()}\n{limit}")
        self._survived(f"{at} {death.name} died again ({death.brief}) and is given up. Its log: {death.log}")
        return None

    def _tell_who_is_back(self) -> None:
        for name, died in list(self._away.items()):
            if name not in self._due and name not in self._lost and self._launcher.is_ready(name):
                del self._away[name]
                self._notify(f"{name} is back ({format_duration(self._clock.monotonic() - died)})")

    def _survived(self, line: str) -> None:
        self.earlier.append(line)
        self._notify(line)

    def _launch(self, service: ServiceSpec, *, listen: str = "127.0.0.1:0") -> None:
        arguments = serve_arguments(
            service,
            recipe=self._run_dir / "config.toml",
            run_dir=self._run_dir,
            coordinator=self.address,
            listen=listen,
        )
        argv = (sys.executable, "-m", "fourfold", *arguments)
        self._launcher.start(service, Command(name=service.name, argv=argv))
