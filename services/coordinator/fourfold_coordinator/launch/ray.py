"""Launches the services of a run as Ray actors. The only module that imports Ray.

One placement group holds one bundle per service, or per set of services that share GPUs. For each service an actor in
its bundle supervises the same child process that the local launcher starts. The coordinator is a child of this process,
because it needs the run's folder. Without a cluster the launcher starts a local Ray on loopback, which ends with the
run. Ray's own ports are protected by its token authentication, which stays on.

The run's folder must be visible on every node under the same path (checkpoints, logs, the model).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import ray as untyped_ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fourfold.errors import ConfigError, Unavailable
from fourfold.host.hardware import gpu_environment, gpus_by_id, smallest_memory
from fourfold.host.postmortem import Death
from fourfold.host.process import Command, Supervisor
from fourfold.host.process_tree import TAGS_VARIABLE, descendants
from fourfold.rpc.channel import is_loopback

from .fleet import COORDINATOR
from .launcher import ServiceSpec
from .placement import bundles, check_cluster_fits, demand_table

ray: Any = untyped_ray  # half of its functions have no types

_PLACEMENT_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 3.5
_POLL_SECONDS: Final = 0.3


class ServiceActor:
    """Supervises one child process on its node. Its methods run on the actor's main thread."""

    def __init__(self, run_dir: str, keep_threads: bool) -> None:
        if not (Path(run_dir) / "config.toml").is_file():
            raise ConfigError(f"{run_dir} is not visible on {ray.util.get_node_ip_address()}; use a shared folder")
        if not keep_threads:
            # Ray limits the threads of its workers. A service chooses its own number, as it does without Ray.
            os.environ.pop("OMP_NUM_THREADS", None)
        self._supervisor = Supervisor(Path(run_dir) / "logs")

    def start(self, command: Command, on_network: bool, gpus: list[str] | None, indices: tuple[int, ...]) -> None:
        """Start or restart the child; with `on_network` it listens on this node's address instead of loopback.

        `gpus` are those that several services share; None: those that Ray gave to this actor. The service sees only the
        ones at `indices`: libraries would use the others.
        """
        available = _actor_gpus() if gpus is None else gpus
        env = {**command.env, **gpu_environment(available[index] for index in indices)}
        argv = list(command.argv)
        if on_network:
            argv[argv.index("--listen") + 1] = f"{ray.util.get_node_ip_address()}:0"
        self._supervisor.start(Command(name=command.name, argv=tuple(argv), env=env))

    def poll(self) -> tuple[list[Death], bool]:
        """Return the deaths since the last call, and whether the child is ready."""
        children = list(self._supervisor.children.values())
        return self._supervisor.deaths(), any(child.alive and child.poll_ready() for child in children)

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


class RayLauncher:
    """A `Launcher` over Ray actors."""

    def __init__(
        self,
        services: Sequence[ServiceSpec],
        *,
        run_dir: Path,
        address: str,
        secured: bool,
        coordinator_listen: str,
        check_gpu: Callable[[int], None],
    ) -> None:
        """Connect to the cluster at `address`, or start a local Ray if it is empty, and reserve room for `services`.

        `secured` says whether the recipe has a [security] table. `check_gpu` is called with the bytes of the smallest
        shared GPU, and raises ConfigError when these are too few.
        """
        self._run_dir = run_dir.resolve()
        self._bundles = bundles(services)
        self._gpu_holders: dict[int, Any] = {}  # by index of the bundle
        self._supervisor = Supervisor(self._run_dir / "logs")
        self._actors: dict[str, Any] = {}
        self._polls: dict[Any, str] = {}  # outstanding call -> name of the service
        self._polled_at: dict[str, float] = {}
        self._ready: set[str] = set()
        self._deaths: list[Death] = []
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
            check_cluster_fits(services, nodes)
            self._on_network = len(nodes) > 1
            if self._on_network:
                _check_network(len(nodes), secured=secured, coordinator_listen=coordinator_listen)
            self._group = _reserve(services, nodes)
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
        index, bundle = next((i, b) for i, b in enumerate(self._bundles) if service in b.services)
        if service.name not in self._actors:
            actor = ray.remote(ServiceActor).options(
                num_cpus=service.cpus,
                num_gpus=0 if bundle.shares else service.gpus,
                scheduling_strategy=self._strategy(index),
                max_restarts=0,
            )
            self._actors[service.name] = actor.remote(str(self._run_dir), "OMP_NUM_THREADS" in os.environ)
        # Ray waits for this reference, and passes its value to `start`.
        gpus = self._gpu_holders[index].ids.remote() if bundle.shares else None
        indices = bundle.local_indices(service)
        starting = self._actors[service.name].start.remote(command, self._on_network, gpus, indices)
        self._polls[starting] = service.name

    def _hold_gpus(self, index: int) -> Any:
        options = {"num_cpus": 0, "num_gpus": self._bundles[index].gpus, "max_restarts": -1, "max_task_retries": -1}
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

    def stop(self) -> None:
        """End every process, then the actors, the placement group and a local Ray."""
        if not ray.is_initialized():
            return
        stopping = [actor.stop.remote() for actor in self._actors.values()]
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
        ray.shutdown()
        self._ray_processes.stop(0)

    def _poll(self) -> None:
        """Collect the answers that arrived, and poll the actors whose last poll is long enough ago."""
        now = time.monotonic()
        pending = set(self._polls.values())
        for name, actor in self._actors.items():
            if name not in pending and now - self._polled_at.get(name, 0.0) >= _POLL_SECONDS:
                self._polls[actor.poll.remote()] = name
                self._polled_at[name] = now
        answered, _ = ray.wait(list(self._polls), num_returns=len(self._polls), timeout=0) if self._polls else ([], [])
        for reference in answered:
            name = self._polls.pop(reference, "")
            if not name:  # a second call of an actor whose loss was just recorded
                continue
            try:
                answer = ray.get(reference)
            except ray.exceptions.RayError as error:
                self._record_lost_actor(name, error)
                continue
            if answer is None:  # the answer of `start`
                continue
            deaths, ready = answer
            self._deaths += deaths
            self._ready = self._ready | {name} if ready else self._ready - {name}

    def _record_lost_actor(self, name: str, error: Exception) -> None:
        """Record the death of an actor as that of its child, which died with it."""
        was_ready = name in self._ready
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self._actors.pop(name))
        self._ready.discard(name)
        self._polls = {reference: other for reference, other in self._polls.items() if other != name}
        self._deaths.append(
            Death(
                name=name,
                time=time.time(),
                exit_code=0,
                signal=int(signal.SIGKILL),
                oom_kills=0,
                was_ready=was_ready,
                log=str(self._run_dir / "logs" / f"{name}.log"),
                last_lines=("its Ray actor was lost:", *str(error).strip().splitlines()[-20:]),
                message="its Ray actor was lost, possibly with its node",
            )
        )


def _connect(services: Sequence[ServiceSpec], address: str) -> None:
    options: dict[str, Any] = {
        "include_dashboard": None if address else False,
        "log_to_driver": False,
        "logging_level": logging.WARNING,
    }
    if address:
        options["address"] = address
    else:
        # "local" starts a new Ray even where files of another one remain. The CPUs are only counted: on one machine
        # the services share its cores, as they do with the local launcher.
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


def _reserve(services: Sequence[ServiceSpec], nodes: Sequence[dict[str, float]]) -> Any:
    asked = [bundle.resources for bundle in bundles(services)]
    if not asked:
        return None
    group = placement_group(asked, strategy="PACK")
    try:
        ray.get(group.ready(), timeout=_PLACEMENT_SECONDS)
    except ray.exceptions.GetTimeoutError:
        free = ray.available_resources()
        remove_placement_group(group)
        raise ConfigError(
            f"the cluster is busy: no room after {_PLACEMENT_SECONDS:.0f} s, {free.get('CPU', 0):.0f} CPUs and "
            f"{free.get('GPU', 0):.0f} GPUs are free.\n{demand_table(services, nodes)}"
        ) from None
    return group
