"""`fourfold run`: starts every service of a recipe, shows the run, and ends everything again.

recipe -> runs/<name>/config.toml -> model folder -> coordinator -> the other services
                                                         |
        report <- coordinator exits 0  <-  display  <----'   Ctrl-C, SIGTERM, a failure:
                                                             everything is stopped, exit code 130 or 1
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Final

from fourfold import config as configuration
from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold.host.disk import check_room
from fourfold.host.hardware import has_fast_bfloat16, smallest_memory, visible_gpus
from fourfold.model import folder as model_folder
from fourfold.plan.models import adapter_plan, check_sequence_parallel
from fourfold.plan.placement import check_gpu_memory
from fourfold.security.access import VIEWER, Security

from ..launch.fleet import Fleet, RunOutcome, launched_services, manual_services, serve_arguments
from ..launch.launcher import Launcher, LocalLauncher
from ..launch.placement import assign_gpus, shared_gpus
from .dashboard import Dashboard
from .summary import is_finished, report_lines
from .watch import follow

_TICK_SECONDS: Final = 0.1
_DRAWINGS_PER_SECOND: Final = 2
_LAST_STATUS_SECONDS: Final = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `fourfold run`."""
    parser.add_argument("recipe", type=Path, nargs="?", help="a TOML file, for example recipes/quickstart.toml")
    parser.add_argument("--resume", type=Path, metavar="RUN_DIR", help="go on with a run from its last checkpoint")
    parser.add_argument("--name", default="", help="name of the run's folder under runs/, default that of the recipe")
    parser.add_argument("--launcher", choices=["local", "ray"], default="local", help="where services run")
    parser.add_argument("--ray-address", default="", metavar="ADDRESS", help="a Ray cluster; default: a local one")
    parser.add_argument(
        "--listen",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="where the coordinator listens; another address than loopback needs [security]",
    )


def main(args: argparse.Namespace) -> int:
    """Run a recipe, or go on with a run; return the exit code."""
    if (args.recipe is None) == (args.resume is None):
        print("fourfold run: give a recipe, or --resume RUN_DIR", file=sys.stderr)
        return 2
    interrupt = Interrupt()
    with interrupt.installed():
        if args.resume is not None:
            run_dir, config = args.resume, _resumed_config(args.resume, args.name)
            _check_room(run_dir)
            check_sequence_parallel(config)
        else:
            config = configuration.load(args.recipe)
            _check_room(Path.cwd())
            model_folder.check(config.model.source)  # a missing model is found before a folder is made
            check_sequence_parallel(config)
            adapter_plan(config)  # and so is a layer that it does not have
            if args.launcher == "local":
                _local_gpus(config)  # and too few GPUs
            run_dir, config = make_run_dir(config, args.name or config.name)
        with _locked(run_dir):
            if args.resume is not None and is_finished(run_dir, config):
                print(f"{run_dir} is finished already. To go on with it, raise steps in {run_dir / 'config.toml'}.")
                return _print_report(run_dir)
            model_folder.resolve(config.model.source)
            launcher = _launcher(args, config, run_dir)
            return Run(args, config, run_dir, launcher, interrupt).execute()


def _check_room(folder: Path) -> None:
    if warning := check_room(folder):
        print(warning, file=sys.stderr)


def make_run_dir(config: Config, name: str, root: Path = Path("runs")) -> tuple[Path, Config]:
    """Make runs/<name>, or <name>-2, -3 ... when it exists, and write config.toml; return both, under that name.

    Raises:
        ConfigError: the name cannot be a folder's, or the folder cannot be made.
    """
    number = 1
    while True:
        candidate = name if number == 1 else f"{name}-{number}"
        try:
            named = Config.model_validate({**config.model_dump(), "name": candidate})
        except ValueError:
            raise ConfigError(f"name = {candidate!r}: 1 to 64 characters of A-Z a-z 0-9 _ -; choose another") from None
        try:
            (root / candidate).mkdir(parents=True)
            break
        except FileExistsError:
            number += 1
        except OSError as error:
            raise ConfigError(f"{root / candidate}: cannot make the folder of the run ({error.strerror})") from None
    try:
        (root / candidate / "config.toml").write_text(configuration.dump(named), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{root / candidate}: cannot be written ({error.strerror}); make room there") from None
    return root / candidate, named


class Interrupt:
    """Ctrl-C, SIGTERM and SIGHUP: the first ends the run in order, the second at once."""

    def __init__(self) -> None:
        self.number = 0
        """The signal that came first; 0: none."""
        self.cooperative = False
        """Whether somebody looks at `number`; if not, KeyboardInterrupt is raised."""
        self.launcher: Launcher | None = None
        self.dashboard: Dashboard | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals within the block."""
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        previous = {number: signal.signal(number, self._on_signal) for number in signals}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.number:
            if self.launcher is not None:
                self.launcher.kill()
            if self.dashboard is not None:
                self.dashboard.abandon()
            os._exit(128 + number)
        self.number = number
        if not self.cooperative:
            raise KeyboardInterrupt


class Run:
    """One execution of `fourfold run`, from the first process to the last."""

    def __init__(
        self, args: argparse.Namespace, config: Config, run_dir: Path, launcher: Launcher, interrupt: Interrupt
    ) -> None:
        self._args = args
        self._config = config
        self._run_dir = run_dir
        self._launcher = launcher
        self._interrupt = interrupt
        self._security = Security.load(config.security, VIEWER)
        self._dashboard = Dashboard(name=config.name, run_dir=run_dir)
        self._fleet = Fleet(
            config, run_dir=run_dir, launcher=launcher, notify=self._dashboard.note, coordinator_listen=args.listen
        )
        interrupt.launcher, interrupt.dashboard = launcher, self._dashboard

    def execute(self) -> int:
        """Run to the end, stop everything, tell how it ended; return the exit code."""
        ending: RunOutcome | None = None
        print(f"Run folder: {self._run_dir}")
        try:
            with self._dashboard:
                self._interrupt.cooperative = True
                ending = asyncio.run(self._supervise())
        finally:
            self._launcher.stop()
            self._interrupt.cooperative = False
        if ending is None:
            name = signal.Signals(self._interrupt.number).name
            print(f"Stopped by {name}. {self._next_command()}", file=sys.stderr)
            return 128 + self._interrupt.number
        if ending.done:
            return _print_report(self._run_dir)
        print(f"\nThe run failed. {ending.text}", file=sys.stderr)
        if self._fleet.earlier:
            print("\n".join(["Before that:", *(f"  {line}" for line in self._fleet.earlier)]), file=sys.stderr)
        print(self._next_command(), file=sys.stderr)
        return 1

    async def _supervise(self) -> RunOutcome | None:
        """Tend the processes and the display until the run ends, or a signal comes (None)."""
        self._fleet.start()
        watching: asyncio.Task[None] | None = None
        ticks, over = 0, asyncio.Event()
        try:
            while not self._interrupt.number:
                if (ending := self._fleet.tick()) is not None:
                    over.set()
                    if watching is not None:  # the coordinator's last words may be on their way
                        await asyncio.wait({watching}, timeout=_LAST_STATUS_SECONDS)
                    return ending
                if self._fleet.address and watching is None:
                    self._tell_what_to_start()
                    watching = asyncio.create_task(
                        follow(self._fleet.address, self._security, self._dashboard, over=over)
                    )
                if ticks % round(1 / _TICK_SECONDS / _DRAWINGS_PER_SECOND) == 0:
                    self._dashboard.set_services(self._fleet.states())
                    self._dashboard.refresh()
                ticks += 1
                await asyncio.sleep(_TICK_SECONDS)
            return None
        finally:
            self._dashboard.set_services([])
            if watching is not None:
                watching.cancel()
                await asyncio.wait({watching}, timeout=_LAST_STATUS_SECONDS)

    def _tell_what_to_start(self) -> None:
        for service in manual_services(self._config):
            words = serve_arguments(
                service,
                recipe=self._run_dir / "config.toml",
                run_dir=self._run_dir,
                coordinator=self._fleet.address,
            )
            self._dashboard.note(f"start this by hand (replicas = 0): fourfold {' '.join(words)}")

    def _next_command(self) -> str:
        launcher = "" if self._args.launcher == "local" else f" --launcher {self._args.launcher}"
        address = f" --ray-address {self._args.ray_address}" if self._args.ray_address else ""
        if next((self._run_dir / "checkpoints").glob("step-*"), None) is not None:
            return f"To go on from the last checkpoint: fourfold run --resume {self._run_dir}{launcher}{address}"
        return (
            f"No checkpoint was written yet. To begin again: fourfold run --resume {self._run_dir}{launcher}{address}; "
            f"when the recipe was changed: fourfold run RECIPE{launcher}{address}"
        )


def _launcher(args: argparse.Namespace, config: Config, run_dir: Path) -> Launcher:
    services = launched_services(config)
    if args.launcher == "ray":
        try:
            from ..launch.ray import RayLauncher
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"--launcher ray needs the module {error.name!r}; pip install 'fourfold-coordinator[ray]'"
            ) from None
        return RayLauncher(
            services,
            run_dir=run_dir,
            address=args.ray_address,
            secured=bool(config.security.directory),
            coordinator_listen=args.listen,
            check_gpu=partial(check_gpu_memory, config),
        )
    if args.ray_address:
        raise ConfigError("--ray-address is for --launcher ray; give both, or neither")
    assigned = _local_gpus(config)
    advice = "" if config.placement.colocated else "; rollout.gpu_memory_utilization must leave room for all"
    for gpu, names in shared_gpus(assigned).items():
        print(f"GPU {gpu} is shared by {', '.join(names)}{advice}.")
    computing = [s for s in services if s.role != "reward" and not s.gpus]
    if config.model.dtype == "bfloat16" and computing and not has_fast_bfloat16():
        print(
            f'model.dtype = "bfloat16": {", ".join(s.name for s in computing)} will take 4 to 8 times as long as in '
            f'float32, because this processor has no AVX-512; set model.dtype = "float32"',
            file=sys.stderr,
        )
    return LocalLauncher(run_dir=run_dir, gpus=assigned)


def _local_gpus(config: Config) -> dict[str, tuple[str, ...]]:
    """Return the GPUs of this machine that each service gets.

    Raises:
        ConfigError: there are too few, or they are too small.
    """
    services = launched_services(config)
    if not any(service.gpus for service in services):
        return {}
    visible = visible_gpus()
    assigned = assign_gpus(services, [gpu.id for gpu in visible], colocated=config.placement.colocated)
    used = {gpu for ids in assigned.values() for gpu in ids}
    if (size := smallest_memory(gpu for gpu in visible if gpu.id in used)) is not None:
        check_gpu_memory(config, size)
    return assigned


def _resumed_config(run_dir: Path, name: str) -> Config:
    if name:
        raise ConfigError("--name and --resume exclude each other: a run that goes on keeps its name")
    if not (run_dir / "config.toml").is_file():
        raise ConfigError(f"{run_dir}: not the folder of a run (no config.toml); give one of runs/")
    return configuration.load(run_dir / "config.toml")


@contextmanager
def _locked(run_dir: Path) -> Iterator[IO[str]]:
    """Keep a second `fourfold run` out of the folder; the kernel drops the lock when we die."""
    with (run_dir / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{run_dir}: another `fourfold run` is at work in this folder; watch it, or end it first"
            ) from None
        yield file


def _print_report(run_dir: Path) -> int:
    print("\n".join(report_lines(run_dir)))
    return 0
