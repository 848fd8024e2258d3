"""Launches the services of a run as Ray actors. The only module that imports Ray.

One placement group holds one bundle per service, or per set of services that share GPUs. For each service an actor in
its bundle supervises the same child process that the local launcher starts. The coordinator is a child of this process,
because it needs the run's folder. Without a cluster the launcher starts a local Ray on loopback, which ends with the
run. Ray's own ports are protected by its token authentication, which stays on.

Every node must have the folder of the run, and the one in which `fourfold run` was started, under the same paths.
Services work in the latter, as they do without Ray, so relative paths of a recipe mean the same everywhere. A service
gets the interpreter of its node, and the variables of this process that concern Fourfold and its libraries.

The actors of a lost node are lost with it. Ray moves their bundles to another node when one has room, and a new actor
waits for it. If Ray announces the loss (a preemption, or SIGTERM to `ray start --block`), services stop first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as futures_wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import ray as untyped_ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fourfold.config.placement import PlacementStrategy
from fourfold.errors import ConfigError, FourfoldError, Unavailable
from fourfold.host.hardware import gpu_environment, gpus_by_id, smallest_memory
from fourfold.host.postmortem import Death
from fourfold.host.process import Command, Supervisor
from fourfold.host.process_tree import TAGS_VARIABLE, descendants
from fourfold.rpc.channel import is_loopback

from .fleet import COORDINATOR
from .launcher import ServiceSpec
from .placement import bundles, check_cluster_fits, demand_table
from .run_names import CONFIG_FILE

ray: Any = untyped_ray  # half of its functions have no types

_PLACEMENT_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 3.5
_POLL_SECONDS: Final = 0.3
_NOTICE_SECONDS: Final = 1.0
# Services stop this long before their node leaves: they drain within 4 s, and announcements arrive up to 2 s late.
_DRAIN_SECONDS: Final = 10.0
# Variables of the driver that its services get on other machines. CUDA_VISIBLE_DEVICES and all of Ray are the node's.
_PASSED: Final = re.compile(
    r"(FOURFOLD|NCCL|GLOO|TORCH|PYTORCH|TORCHINDUCTOR|TRITON|VLLM|DS|DEEPSPEED|HF|TRANSFORMERS|TOKENIZERS|OMP|MKL|GRPC"
    r"|CUDA(?!_VISIBLE))_\w+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The place where an actor started its child, or the reason why it did not."""

    node_id: str
    node: str  # address
    error: str


class ServiceActor:
    """Supervises one child process on its node. Its methods run on the actor's main thread."""

    def __init__(self, run_dir: str, working_dir: str, env: Mapping[str, str]) -> None:
        """Start nothing yet. `env` has the variables that the child gets from the driver."""
        self._run_dir, self._working_dir, self._env = Path(run_dir), Path(working_dir), env
        if "OMP_NUM_THREADS" not in env:
            # Ray limits the threads of its workers. A service chooses its own number, as it does without Ray.
            os.environ.pop("OMP_NUM_THREADS", None)
        self._supervisor = Supervisor(self._run_dir / "logs")

    def start(self, command: Command, on_network: bool, holder: Any, indices: tuple[int, ...]) -> Started:
        """Start or restart the child; with `on_network` it listens on this node's address instead of loopback.

        `holder` is the GpuHolder of GPUs that several services share; None: Ray gave GPUs to this actor. The service
        sees only the ones at `indices`: libraries would use the others.
        """
        node = ray.util.get_node_ip_address()
        try:
            self._enter_folder(node)
            # Asked here, because the holder may be on another node since the driver called.
            gpus = _actor_gpus() if holder is None else ray.get(holder.ids.remote(), timeout=_PLACEMENT_SECONDS)
            env = {**self._env, **command.env, **gpu_environment(gpus[index] for index in indices)}
            argv = [sys.executable, *command.argv[1:]]
            if on_network:
                argv[argv.index("--listen") + 1] = f"{node}:0"
            self._supervisor.start(Command(name=command.name, argv=tuple(argv), env=env))
            error = ""
        except FourfoldError as failure:
            error = failure.message
        except ray.exceptions.RayError as failure:
            error = f"the actor that holds the shared GPUs did not answer: {failure}"
        return Started(node_id=ray.get_runtime_context().get_node_id(), node=node, error=error)

    def _enter_folder(self, node: str) -> None:
        config = self._run_dir / CONFIG_FILE
        for path, valid, title in (
            (self._working_dir, self._working_dir.is_dir(), "the folder in which `fourfold run` was started"),
            (config, config.is_file(), "the recipe in the folder of the run"),
        ):
            if not valid:
                raise ConfigError(
                    f"node {node} has no {path}, {title}; all nodes need it at this path: start the run in a folder of "
                    f"storage that they share"
                )
        os.chdir(self._working_dir)

    def poll(self) -> tuple[list[Death], bool, str]:
        """Return the deaths since the last call, whether the child is ready, and the reason if it is not."""
        supervisor, names = self._supervisor, list(self._supervisor.children)
        obstacle = next((text for text in map(supervisor.obstacle, names) if text), "")
        return supervisor.deaths(), any(map(supervisor.is_ready, names)), obstacle

    def give_notice(self) -> None:
        """Tell a ready child that its node is about to leave."""
        for child in self._supervisor.children.values():
            if child.alive and child.poll_ready():
                child.give_notice()

    def stop(self) -> None:
        self._supervisor.stop()


class GpuHolder:
    """Holds the GPUs of a bundle for services that share them.

    Ray counts fractions of one GPU and not of several, so it would not place a trainer's ranks and the engines on the
    same ones. This actor reserves them and returns their ids.
    """

    def ids(self) -> list[str]:
        return _actor_gpus()

    def smallest_memory(self) -> int | None:
        """Return the bytes of the smallest of these GPUs; None when they are unknown."""
        return smallest_memory(gpus_by_id(_actor_gpus()))


def _actor_gpus() -> list[str]:
    """Return the ids of the GPUs that Ray gave to this actor, sorted numerically.

    CUDA_VISIBLE_DEVICES is no substitute: its order changes when an actor is restarted, and for an actor without GPUs
    it lists all of them.
    """
    ids = map(str, ray.get_runtime_context().get_accelerator_ids()["GPU"])
    return sorted(ids, key=lambda name: (len(name), name))


def passed_environment(environ: Mapping[str, str], variables: Sequence[str]) -> dict[str, str]:
    """Return the variables of `environ` that services get on every node: those of libraries, and the named ones."""
    return {name: value for name, value in environ.items() if name in variables or _PASSED.fullmatch(name)}


def _python_path() -> dict[str, Any]:
    """Return Ray's option that puts PYTHONPATH before that of the nodes: the actors themselves import Fourfold."""
    if not (value := os.environ.get("PYTHONPATH")):
        return {}
    paths = [str(Path(path).absolute()) for path in value.split(os.pathsep)]
    return {"runtime_env": {"env_vars": {"PYTHONPATH": os.pathsep.join([*paths, "${PYTHONPATH}"])}}}


def _notices() -> dict[str, float]:
    """Return the time (seconds since the epoch) at which each node leaves that is about to, by node id."""
    draining: dict[str, int] = ray._private.state.state.get_draining_nodes()  # Ray has no public function for it
    return {node_id: deadline / 1000 for node_id, deadline in draining.items()}  # 0: as soon as it is idle


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of an actor that has not been answered yet."""

    name: str  # of the service
    kind: Literal["start", "poll", "stop"]


class RayLauncher:
    """A `Launcher` over Ray actors."""

    def __init__(
        self,
        services: Sequence[ServiceSpec],
        *,
        run_dir: Path,
        address: str,
        strategy: PlacementStrategy = "pack",
        variables: Sequence[str] = (),
        secured: bool,
        coordinator_listen: str,
        check_gpu: Callable[[int], None],
    ) -> None:
        """Connect to the cluster at `address`, or start a local Ray if it is empty, and reserve room for `services`.

        `variables` are environment variables that the services need besides those of libraries. `secured` says whether
        the recipe has a [security] table. `check_gpu` is called with the bytes of the smallest shared GPU, and raises
        ConfigError when these are too few.
        """
        self._run_dir = run_dir.absolute()
        self._environment = passed_environment(os.environ, variables)
        self._bundles = bundles(services)
        self._gpu_holders: dict[int, Any] = {}  # by index of the bundle
        self._supervisor = Supervisor(self._run_dir / "logs")
        self._actors: dict[str, Any] = {}
        self._nodes: dict[str, Started] = {}  # by service; without those that wait for a node
        self._polls: dict[Any, _Call] = {}  # by reference
        self._polled_at: dict[str, float] = {}
        self._ready: set[str] = set()
        self._obstacles: dict[str, str] = {}
        self._deaths: list[Death] = []
        self._executor = ThreadPoolExecutor(1, "ray-notices")  # Ray's state is read by calls that block
        self._notices: Future[dict[str, float]] | None = None
        self._noticed_at = 0.0
        self._trainers = {service.name for service in services if service.role == "trainer"}
        self._noticed: set[str] = set()  # parts of the trainer on nodes that leave; they save checkpoints
        self._group: Any = None
        self._ray_processes = Supervisor(self._run_dir / "logs")
        self._is_local = not address
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._disconnect)  # also on Ctrl-C: a half-started Ray must not stay
            if self._is_local:
                # Some of Ray's processes outlive a driver that was killed. The guard finds them by this tag.
                os.environ[TAGS_VARIABLE] = self._ray_processes.tag
                self._ray_processes.start_guard()
            _connect(services, address)
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            check_cluster_fits(services, nodes, strategy)
            self._on_network = len(nodes) > 1
            if self._on_network:
                _check_network(len(nodes), secured=secured, coordinator_listen=coordinator_listen)
            self._group = _reserve(services, nodes, strategy)
            self._gpu_holders = {i: self._hold_gpus(i) for i, bundle in enumerate(self._bundles) if bundle.shares}
            if (size := self._smallest_shared_memory()) is not None:
                check_gpu(size)
            on_failure.pop_all()

    def start(self, service: ServiceSpec, command: Command) -> None:
        """Start or restart a process in its bundle. A lost actor is replaced."""
        if service.name == COORDINATOR:
            self._supervisor.start(dataclasses.replace(command, env={**command.env, **gpu_environment(())}))
            return
        self._ready.discard(service.name)
        self._obstacles.pop(service.name, None)
        index, bundle = next((i, b) for i, b in enumerate(self._bundles) if service in b.services)
        if service.name not in self._actors:
            actor = ray.remote(ServiceActor).options(
                num_cpus=service.cpus,
                num_gpus=0 if bundle.shares else service.gpus,
                scheduling_strategy=self._strategy(index),
                max_restarts=0,
                **_python_path(),
            )
            self._actors[service.name] = actor.remote(str(self._run_dir), str(Path.cwd()), self._environment)
        holder, indices = self._gpu_holders.get(index), bundle.local_indices(service)
        starting = self._actors[service.name].start.remote(command, self._on_network, holder, indices)
        self._polls[starting] = _Call(service.name, "start")

    def _hold_gpus(self, index: int) -> Any:
        options = {"num_cpus": 0, "num_gpus": self._bundles[index].gpus, "max_restarts": -1, "max_task_retries": -1}
        options |= _python_path()
        return ray.remote(GpuHolder).options(**options, scheduling_strategy=self._strategy(index)).remote()

    def _smallest_shared_memory(self) -> int | None:
        try:
            answers = [holder.smallest_memory.remote() for holder in self._gpu_holders.values()]
            sizes = ray.get(answers, timeout=_PLACEMENT_SECONDS)
        except ray.exceptions.RayError as error:
            raise Unavailable(f"the Ray actor that holds the shared GPUs did not start: {error}") from error
        return min((size for size in sizes if size is not None), default=None)

    def _strategy(self, index: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(placement_group=self._group, placement_group_bundle_index=index)

    def deaths(self) -> list[Death]:
        self._poll()
        deaths = [*self._supervisor.deaths(), *self._deaths]
        self._deaths = []
        return sorted(deaths, key=lambda death: death.time)

    def is_ready(self, name: str) -> bool:
        return name in self._ready or self._supervisor.is_ready(name)

    def obstacle(self, name: str) -> str:
        return self._obstacles.get(name) or self._supervisor.obstacle(name)

    def is_placed(self, name: str) -> bool:
        return name in self._nodes or name == COORDINATOR

    def stop(self) -> None:
        """End every process, then the actors, the placement group and a local Ray."""
        if not ray.is_initialized():
            return
        # An actor without a node does not answer.
        stopping = [actor.stop.remote() for name, actor in self._actors.items() if name in self._nodes]
        self._supervisor.stop()
        if stopping:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.wait(stopping, num_returns=len(stopping), timeout=_STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kill everything immediately. A killed actor takes its child with it."""
        self._supervisor.kill()
        if not ray.is_initialized():
            return
        for actor in (*self._actors.values(), *self._gpu_holders.values()):
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.kill(actor)
        if self._group is not None:
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                remove_placement_group(self._group)
        self._disconnect()

    def _disconnect(self) -> None:
        if self._is_local:
            self._ray_processes.adopt(descendants({os.getpid()}))
        if self._notices is not None:  # Ray must not shut down while its state is read
            futures_wait([self._notices], timeout=_NOTICE_SECONDS)
        self._executor.shutdown(wait=False, cancel_futures=True)
        ray.shutdown()
        self._ray_processes.stop(0)

    def _poll(self) -> None:
        """Collect the answers that arrived, and poll the actors whose last poll is long enough ago."""
        now = time.monotonic()
        pending = {call.name for call in self._polls.values()}
        for name, actor in self._actors.items():
            if name not in pending and now - self._polled_at.get(name, 0.0) >= _POLL_SECONDS:
                self._polls[actor.poll.remote()] = _Call(name, "poll")
                self._polled_at[name] = now
        answered, _ = ray.wait(list(self._polls), num_returns=len(self._polls), timeout=0) if self._polls else ([], [])
        for reference in answered:
            if (call := self._polls.pop(reference, None)) is not None:  # None: the loss of its actor was just recorded
                self._collect(call, reference)
        self._follow_notices(now)

    def _collect(self, call: _Call, reference: Any) -> None:
        """Read the answer of a call."""
        try:
            answer = ray.get(reference)
        except ray.exceptions.ActorUnavailableError as error:
            # The connection broke. Ray detects within 25 s whether node and actor live, and later calls return that.
            if call.kind == "start":  # the call may never have arrived
                self._record_lost_actor(call.name, error)
        except ray.exceptions.RayError as error:
            self._record_lost_actor(call.name, error)
        else:
            if call.kind == "poll":
                deaths, ready, self._obstacles[call.name] = answer
                self._deaths += deaths
                self._ready = self._ready | {call.name} if ready else self._ready - {call.name}
            elif call.kind == "stop":
                self._lose(call.name, self._nodes[call.name].node, message="the node is about to leave the cluster")
            elif answer.error:
                self._lose(call.name, "", message=answer.error, number=0)
            else:
                self._nodes[call.name] = answer

    def _follow_notices(self, now: float) -> None:
        """Tell the trainer of nodes that leave; stop the services on those that leave soon."""
        if self._notices is None:
            if self._nodes and now - self._noticed_at >= _NOTICE_SECONDS:
                self._notices, self._noticed_at = self._executor.submit(_notices), now
            return
        if not self._notices.done():
            return
        leaving: dict[str, float] = {}
        with contextlib.suppress(Exception):  # a private function of Ray; without it, losses are not announced
            leaving = self._notices.result()
        self._notices = None
        stopping = {call.name for call in self._polls.values() if call.kind == "stop"}
        for name, started in self._nodes.items():
            if started.node_id in leaving and name in self._trainers - self._noticed:
                self._noticed.add(name)
                self._actors[name].give_notice.remote()
            if name not in stopping and leaving.get(started.node_id, float("inf")) < time.time() + _DRAIN_SECONDS:
                self._polls[self._actors[name].stop.remote()] = _Call(name, "stop")

    def _record_lost_actor(self, name: str, error: Exception) -> None:
        """Record the death of an actor, with its node if that is lost, too."""
        lines = tuple(str(error).strip().splitlines()[-20:])
        started, node, reason = self._nodes.get(name), "", "its Ray actor was lost"
        if started is not None and (loss := _loss_of_node(started.node_id)) is not None:
            node, reason = started.node, loss
        elif started is None and "node has died" in str(error):
            node, reason = "of its Ray actor", "before the actor started"
        elif started is None:
            reason = f"its Ray actor did not start: {lines[-1] if lines else error}"
        self._lose(name, node, message=reason, lines=("its Ray actor was lost:", *lines))

    def _lose(
        self, name: str, node: str, *, message: str, lines: tuple[str, ...] = (), number: int = signal.SIGKILL
    ) -> None:
        """End an actor and record the death of its child. `node`: the node that was lost with the actor, if any."""
        was_ready = name in self._ready
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self._actors.pop(name))
        self._ready.discard(name)
        self._noticed.discard(name)
        self._nodes.pop(name, None)
        self._polls = {reference: call for reference, call in self._polls.items() if call.name != name}
        self._deaths.append(
            Death(
                name=name,
                time=time.time(),
                exit_code=0 if number else 1,
                signal=int(number),
                oom_kills=0,
                was_ready=was_ready,
                log=str(self._run_dir / "logs" / f"{name}.log"),
                last_lines=lines,
                message=message,
                node=node,
            )
        )


def _loss_of_node(node_id: str) -> str | None:
    """Return why Ray counts a node as lost; None if the node lives."""
    state = next((node for node in ray.nodes() if node["NodeID"] == node_id), None)
    if state is not None and state["Alive"]:
        return None
    return (state or {}).get("DeathReasonMessage") or "Ray gave no reason"


def _connect(services: Sequence[ServiceSpec], address: str) -> None:
    options: dict[str, Any] = {
        "include_dashboard": None if address else False,
        "log_to_driver": False,
        "logging_level": logging.WARNING,
    }
    if address:
        options["address"] = address
    else:
        # "local" starts a new Ray even if files of an earlier one remain. The number of CPUs is nominal: the services
        # share the cores of the machine, as with the local launcher.
        cpus = max(os.cpu_count() or 1, sum(service.cpus for service in services))
        options |= {"address": "local", "num_cpus": cpus, "_node_ip_address": "127.0.0.1"}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        ray.init(**options)
    except (ConnectionError, ValueError) as error:
        raise ConfigError(f"--ray-address {address or 'local'}: cannot connect to Ray: {error}") from None
    finally:
        for number, handler in handlers.items():  # Ray replaces them
            signal.signal(number, handler)


def _check_network(nodes: int, *, secured: bool, coordinator_listen: str) -> None:
    if not secured:
        raise ConfigError(
            f"the cluster has {nodes} nodes, and services on several machines need TLS: run "
            f"`fourfold certs DIR --recipe RECIPE` and set security.directory"
        )
    if is_loopback(coordinator_listen.rpartition(":")[0]):
        raise ConfigError(
            f"the cluster has {nodes} nodes, and the coordinator listens at {coordinator_listen}; pass --listen "
            f"{ray.util.get_node_ip_address()}:0"
        )


def _reserve(services: Sequence[ServiceSpec], nodes: Sequence[dict[str, float]], strategy: PlacementStrategy) -> Any:
    asked = [bundle.resources for bundle in bundles(services)]
    if not asked:
        return None
    group = placement_group(asked, strategy=strategy.upper())
    try:
        ray.get(group.ready(), timeout=_PLACEMENT_SECONDS)
    except ray.exceptions.GetTimeoutError:
        free = ray.available_resources()
        table = demand_table(services, nodes)
        remove_placement_group(group)
        raise ConfigError(
            f"the cluster is busy: no room after {_PLACEMENT_SECONDS:.0f} s, {free.get('CPU', 0):.0f} CPUs and "
            f'{free.get("GPU", 0):.0f} GPUs are free (placement.strategy = "{strategy}").\n{table}'
        ) from None
    return group
