"""Starts the processes of a run in order, watches them, and restarts those that die.

    coordinator --(coordinator.address)--> rollout, trainer, reward, ..., gateway --READY--> the run trains
         |                                            | dies
         |- exit code 0: done, else: failed           '- restarted, at most retry.restarts times until a step is trained
         '- killed, or SIGTERM: restarted at the same address, so that the services find it; they keep running

A process that dies before it was ever ready ends the run: a restart would fail for the same reason.

Processes that are lost with their cluster node start again when the cluster has room; this restart is not counted.
Meanwhile the run continues, or the coordinator ends it after retry.service_wait_seconds without a service.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fourfold.config.placement import TRAINING_ROLES, gpu_places
from fourfold.config.recipe import dump, load
from fourfold.config.schema import Config
from fourfold.host.clock import SYSTEM_CLOCK, Clock
from fourfold.host.postmortem import Death
from fourfold.host.process import Command
from fourfold.rpc.channel import join_target, split_target
from fourfold.text import format_duration

from .launcher import Launcher, ServiceSpec
from .placement import split_trainer
from .run_names import ADDRESS_FILE, CONFIG_FILE, DEATH_VARIABLE

COORDINATOR: Final = "coordinator-0"
_COORDINATOR_START_SECONDS: Final = 120.0
# The coordinator itself gives up after 900 s without its services, and names those that are missing. This limit is for
# a coordinator that hangs.
READY_SECONDS: Final = 960.0
# Delay between restarts of a trainer that lacks the ranks of a lost node, for a trainer that fails at once.
_PART_LOST_SECONDS: Final = 5.0
# A coordinator that receives SIGTERM from another program drains first and exits by itself.
_ENDED_BY_SIGTERM: Final = 128 + signal.SIGTERM


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """The end of a run; `text` explains a failure."""

    done: bool
    text: str = ""


@dataclass(slots=True)
class _Slot:
    """A service and the restarts of its process. Times are of the monotonic clock."""

    spec: ServiceSpec
    restarts: int = 0  # number of restarts since a step was trained while the process was ready
    restart_at: float | None = None
    died_at: float | None = None  # time of the last death, until the process is ready again
    death: str = ""  # cause of the last death, one line
    lost: bool = False  # the process has used up its restarts
    node_lost: bool = False  # the process was lost with its node and is not ready again
    obstacle: str = ""  # the reported reason why the process is not ready
    uncertain: int = 0  # number of restarts since it was ready; the loss of a node may be the unknown cause


def services_of(config: Config, *, manual: bool = False, evaluate: bool = False) -> list[ServiceSpec]:
    """Return the services that the launcher starts besides the coordinator, the slowest to load first.

    With `manual`, return instead one service for each needed role that the recipe leaves to the user (`replicas = 0`).
    With `evaluate`, leave out services that only training needs, and number the GPUs of the others without a gap.
    """
    trainer = config.trainer
    # Prefix of the member ids, number of replicas, and a template of the service.
    kinds = [
        (pool.member_prefix, pool.replicas, _spec("rollout", 2, pool=pool.name, gpu=pool.gpu))
        for pool in config.rollout_pools
    ]
    kinds.append(("trainer", trainer.replicas, _spec("trainer", config.trainer_processes, gpu=trainer.gpu)))
    if config.needs_reference:
        kinds.append(("reference", config.reference.replicas, _spec("reference", 1, gpu=config.reference.gpu)))
    if config.agents.source != "none":
        kinds.append(("gateway", config.gateway.replicas, _spec("gateway", 1)))
        if config.environment.replicas:  # agents may be programs other than environments
            kinds.append(
                ("environment", config.environment.replicas, _spec("environment", config.environment.processes))
            )
    if config.needs_scorer:
        tables = [table for table in config.reward if not table.target]
        kinds += [
            (
                t.member_prefix,
                t.replicas,
                _spec("reward", t.processes, scorer=t.name, gpu=t.model.gpu if t.model else ""),
            )
            for t in tables
        ]
    places = gpu_places(config)
    services = [
        dataclasses.replace(spec, name=name, place=places.get(name, ()))
        for prefix, replicas, spec in kinds
        if (replicas == 0) == manual
        for name in (f"{prefix}-{index}" for index in range(replicas or 1))
    ]
    if evaluate:
        services = [service for service in services if service.role not in TRAINING_ROLES]
        used = sorted({index for service in services for index in service.place})
        return [dataclasses.replace(s, place=tuple(used.index(index) for index in s.place)) for s in services]
    nodes = config.placement.trainer_nodes
    divided = [split_trainer(s, config.trainer.ranks, nodes) if s.role == "trainer" else [s] for s in services]
    return [service for parts in divided for service in parts]


def _spec(role: str, cpus: int, *, scorer: str = "", pool: str = "", gpu: str = "") -> ServiceSpec:
    return ServiceSpec(role=role, name="", cpus=cpus, scorer=scorer, pool=pool, gpu=gpu)


def serve_arguments(service: ServiceSpec, *, run_dir: Path, coordinator: str, listen: str = "") -> list[str]:
    """Return the arguments of `fourfold` that start a service of the run in `run_dir`."""
    member_id = service.member_id
    words = ["serve", service.role, str(run_dir / CONFIG_FILE), "--member-id", member_id, "--run-dir", str(run_dir)]
    if service.ranks is not None:
        words += ["--rank", f"{service.ranks.start}-{service.ranks.stop - 1}"]
    if service.scorer:
        words += ["--scorer", service.scorer]
    if service.pool:
        words += ["--pool", service.pool]
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
        evaluate: bool = False,
        assignments: Sequence[str] = (),
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Create the fleet of the run in `run_dir`, which has config.toml; `start` starts the first process.

        `notify` receives a line for the user about each death and restart. `coordinator_listen` is host:port.
        With `evaluate`, the fleet evaluates the model of the recipe, and trains nothing. `assignments`, KEY=VALUE each,
        are those of the command line.
        """
        self.config = config
        run_dir = run_dir.absolute()
        self.address = ""  # address of the coordinator; empty until it listens
        self.survived_deaths: list[str] = []  # one line for each death that did not end the run
        self._run_dir, self._launcher, self._notify, self._clock = run_dir, launcher, notify, clock
        self._listen = coordinator_listen
        self._coordinator = _Slot(ServiceSpec(role="coordinator", name=COORDINATOR))
        self._slots = {service.name: _Slot(service) for service in services_of(config, evaluate=evaluate)}
        self._evaluate = evaluate
        self._step = 0  # highest step that the run has reached
        self._recipe = run_dir / CONFIG_FILE
        known = not assignments or dump(load(self._recipe)) == dump(config)
        self._assignments = () if known else assignments
        self._recipe_before = b"" if known else self._recipe.read_bytes()
        self._deadline: float | None = None  # by which all processes must have started
        self._listen_deadline: float | None = None  # by which a coordinator that was restarted must listen

    @property
    def assignments(self) -> Sequence[str]:
        """Return the assignments that config.toml lacks; the coordinator writes them when the run continues."""
        return self._assignments if self._assignments and self._recipe.read_bytes() == self._recipe_before else ()

    def arguments(self, service: ServiceSpec, *, coordinator: str, listen: str = "") -> list[str]:
        """Return `serve_arguments` with the assignments that config.toml does not have yet."""
        words = serve_arguments(service, run_dir=self._run_dir, coordinator=coordinator, listen=listen)
        return [*words, *(word for key in self.assignments for word in ("--set", key))]

    def start(self) -> None:
        """Start the coordinator; `tick` starts the services when it listens."""
        (self._run_dir / ADDRESS_FILE).unlink(missing_ok=True)
        self._deadline = self._clock.monotonic() + _COORDINATOR_START_SECONDS
        self._launch(self._coordinator)

    def tick(self) -> RunOutcome | None:
        """Handle what happened since the last call, without blocking; return the outcome when the run has ended."""
        for death in self._launcher.deaths():
            if (outcome := self._on_death(death)) is not None:
                return outcome
        now = self._clock.monotonic()
        for slot in (self._coordinator, *self._slots.values()):
            if slot.restart_at is not None and now >= slot.restart_at:
                slot.restart_at = None
                self._launch(slot)
            elif slot.died_at is not None and self._state(slot) == "ready":
                self._notify(f"{slot.spec.name} is ready again after {format_duration(now - slot.died_at)}")
                slot.died_at, slot.node_lost, slot.uncertain = None, False, 0
            self._tell_obstacle(slot)
        if not self.address:
            self._start_services()
        if self._listen_deadline is not None:
            if self._coordinator.died_at is None:
                self._listen_deadline = None
            elif now > self._listen_deadline:
                return self._not_listening()
        if self._deadline is not None and now > self._deadline:
            return self._on_deadline()
        return None

    def on_step(self, step: int) -> None:
        """Count restarts anew for the ready processes when `step` is further than the run has ever been.

        The limit of restarts ends a run that makes no progress. A run that makes progress may lose a process now and
        then for weeks. Training a step again after a restored checkpoint is no progress.
        """
        if step <= self._step:
            return
        self._step = step
        for slot in (self._coordinator, *self._slots.values()):
            if slot.died_at is None and not slot.lost:
                slot.restarts = 0

    def states(self) -> list[tuple[str, str]]:
        """Return name and state of each process, the coordinator first.

        States are "starting", "ready", "restarting", "waiting for a node" and "lost".
        """
        if not self.address:
            return [(COORDINATOR, "starting")]
        coordinator = "ready" if self._coordinator.died_at is None else "restarting"
        return [(COORDINATOR, coordinator), *((name, self._state(slot)) for name, slot in self._slots.items())]

    def _state(self, slot: _Slot) -> str:
        if slot.lost:
            return "lost"
        if slot.restart_at is not None:
            return "restarting"
        if slot.node_lost and not self._launcher.is_placed(slot.spec.name):
            return "waiting for a node"
        return "ready" if self._launcher.is_ready(slot.spec.name) else "starting"

    def _tell_obstacle(self, slot: _Slot) -> None:
        """Notify the user of the message of a process that cannot become ready, once for each message."""
        obstacle = self._launcher.obstacle(slot.spec.name)
        if obstacle and obstacle != slot.obstacle:
            self._notify(f"{slot.spec.name} is not ready: {obstacle}")
        slot.obstacle = obstacle

    def _start_services(self) -> None:
        path = self._run_dir / ADDRESS_FILE
        if not path.is_file():  # the coordinator does not listen yet
            return
        self.address = path.read_text(encoding="utf-8").strip()
        # A restarted coordinator listens at this address again.
        self._listen = join_target(split_target(self._listen)[0], split_target(self.address)[1])
        for slot in self._slots.values():
            self._launch(slot)
        self._deadline = self._clock.monotonic() + max(READY_SECONDS, 2 * self.config.retry.service_wait_seconds)

    def _on_deadline(self) -> RunOutcome | None:
        if not self.address:
            return self._not_listening()
        self._deadline = None
        late = [name for name, slot in self._slots.items() if self._state(slot) == "starting"]
        logs = self._run_dir / "logs"
        return RunOutcome(done=False, text=f"{', '.join(late)} not ready in time; see {logs}") if late else None

    def _not_listening(self) -> RunOutcome:
        seconds = f"{_COORDINATOR_START_SECONDS:.0f} s"
        log = self._run_dir / "logs" / f"{COORDINATOR}.log"
        return RunOutcome(done=False, text=f"{COORDINATOR} did not listen within {seconds}; see {log}")

    def _on_death(self, death: Death) -> RunOutcome | None:
        is_coordinator = death.name == COORDINATOR
        slot, now = self._coordinator if is_coordinator else self._slots[death.name], self._clock.monotonic()
        if is_coordinator and not death.signal and death.exit_code != _ENDED_BY_SIGTERM:
            if not death.exit_code:
                return RunOutcome(done=True)
            if death.was_ready:  # it ended by itself: the run cannot continue, and its log has the reason
                return RunOutcome(done=False, text=death.explain())
        slot.died_at, slot.death = now if slot.died_at is None else slot.died_at, death.brief
        died = f"{time.strftime('%H:%M:%S', time.localtime(death.time))} {death.name} died ({death.brief})"
        if death.node:
            self._on_lost_node(slot, died)
            return None
        if any(part.node_lost for part in self._other_parts(slot)):
            slot.restart_at, self._deadline = now + _PART_LOST_SECONDS, None
            self._survive(f"{died}; restarting it (log: {death.log})")
            return None
        if not death.was_ready and slot.restarts == 0:
            return RunOutcome(done=False, text=death.explain())
        if slot.restarts < self.config.retry.restarts:
            slot.restart_at = now + 2.0**slot.restarts - 1  # at once, then after 1, 3, 7 ... seconds
            slot.restarts += 1
            slot.uncertain += 1
            # The coordinator limits the wait for a restarted service, which may take longer than its first start.
            self._deadline = None
            self._survive(f"{died}; restarting it (log: {death.log})")
            return None
        slot.lost = True
        same = [other for other in self._slots.values() if other.spec.role == slot.spec.role]
        if is_coordinator or slot.spec.ranks is not None or all(other.lost for other in same):
            limit = f"It was restarted {slot.restarts} times already (retry.restarts = {self.config.retry.restarts})."
            return RunOutcome(done=False, text=f"{death.explain()}\n{limit}")
        self._survive(f"{died}; no restarts are left, the run continues without it (log: {death.log})")
        return None

    def _on_lost_node(self, slot: _Slot, died: str) -> None:
        """Restart a service that was lost with its node; it waits until the cluster has room."""
        slot.restart_at, slot.node_lost, self._deadline = self._clock.monotonic(), True, None
        for part in self._other_parts(slot):  # the loss of this node, which was not known yet, ended the process
            part.restarts, part.uncertain = part.restarts - part.uncertain, 0
        self._survive(f"{died}; it starts again when the cluster has room")

    def _other_parts(self, slot: _Slot) -> list[_Slot]:
        """Return the other processes of a trainer on several nodes."""
        if slot.spec.ranks is None:
            return []
        return [other for other in self._slots.values() if other.spec.ranks is not None and other is not slot]

    def _survive(self, line: str) -> None:
        self.survived_deaths.append(line)
        self._notify(line)

    def _launch(self, slot: _Slot) -> None:
        service, listen, coordinator, env = slot.spec, "127.0.0.1:0", self.address, dict[str, str]()
        if slot is self._coordinator:
            listen, coordinator = self._listen, ""
            if slot.death:
                env[DEATH_VARIABLE] = slot.death
                self._listen_deadline = self._clock.monotonic() + _COORDINATOR_START_SECONDS
        arguments = self.arguments(service, coordinator=coordinator, listen=listen)
        if slot is self._coordinator and self._evaluate:
            arguments.append("--evaluate")
        self._launcher.start(
            service, Command(name=service.name, argv=(sys.executable, "-m", "fourfold", *arguments), env=env)
        )
