"""`fourfold run`: starts every service of a recipe, shows the run, and stops all services at its end.

Several recipes run one after the other (`cli/chain.py`).

recipe -> runs/<name>/config.toml -> model folder -> coordinator -> the other services
                                                         |
      report  <-  coordinator exits 0  <-  display  <----'   Ctrl-C, SIGTERM or a failure:
                                                             stop all processes, exit code 130, 143 or 1
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

from fourfold import config as configuration
from fourfold.address import is_loopback, split_target
from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold.host.disk import check_room
from fourfold.host.hardware import has_fast_bfloat16, smallest_memory, visible_gpus
from fourfold.host.program import LAUNCH_OPTIONS, program, write_launch_options
from fourfold.install import install_command
from fourfold.model import folder as model_folder
from fourfold.plan.models import adapter_plan, check_context, check_models, check_sequence_parallel
from fourfold.plan.placement import check_gpu_memory
from fourfold.plan.preflight import check_recipe
from fourfold.security.access import VIEWER, Security

from ..launch.fleet import Fleet, RunOutcome, services_of
from ..launch.launcher import Launcher, LocalLauncher
from ..launch.placement import assign_gpus, shared_gpus
from ..launch.run_folder import (
    describe_stop,
    find_run,
    free_name,
    is_finished,
    last_progress,
    link_latest,
    locked,
    make_run_dir,
    write_stop_reason,
)
from ..launch.run_names import CONFIG_FILE, RUN_LOCK
from .chain import run_chain
from .dashboard import Dashboard, Schedule
from .summary import report_lines
from .watch import follow

_TICK_SECONDS: Final = 0.1
_REDRAWS_PER_SECOND: Final = 2
_LAST_STATUS_SECONDS: Final = 1.0
_FIRST_UNFINISHED: Final = Path()  # --resume without a folder; compared by identity, because `.` is a folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe",
        type=Path,
        nargs="*",
        help="a TOML file, for example recipes/quickstart.toml; several run in this order, and a later one may begin "
        'with the run of an earlier one (model.source = "run:NAME")',
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="RUN_DIR",
        nargs="?",
        const=_FIRST_UNFINISHED,
        help="continue a run from its last checkpoint; after recipes, without RUN_DIR: continue with the first of them "
        "that is not done",
    )
    configuration.add_set_option(parser, "trainer.learning_rate=1e-5", ", of a resumed run also in its config.toml")
    parser.add_argument("--name", default="", help="name of the run's folder under runs/, default that of the recipe")
    add_launcher_arguments(parser)


def add_launcher_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where services run."""
    parser.add_argument("--launcher", choices=["local", "ray"], help="where services run")
    parser.add_argument("--ray-address", metavar="ADDRESS", help="a Ray cluster; default: a local one")
    parser.add_argument(
        "--listen", metavar="HOST:PORT", help="address of the coordinator; one beyond loopback needs [security]"
    )
    parser.set_defaults(**LAUNCH_OPTIONS)


def main(args: argparse.Namespace) -> int:
    """Run recipes in order, or resume a run; return the exit code."""
    continues = args.resume is _FIRST_UNFINISHED
    has_folder = args.resume is not None and not continues
    if args.recipe and has_folder:
        raise ConfigError(f"--resume {args.resume}: beside recipes it takes no folder; write --resume after them")
    if not args.recipe and not has_folder:
        print("fourfold run: give recipes, or --resume RUN_DIR", file=sys.stderr)
        return 2
    signals = SignalHandler()
    with signals.installed():
        if continues or len(args.recipe) > 1:
            return run_chain(args, check=partial(_check_link, args=args), start=partial(_run_link, signals=signals))
        args.recipe = args.recipe[0] if args.recipe else None
        return _run(args, signals)


def _check_link(config: Config, file: Path, *, args: argparse.Namespace) -> Config:
    """Check a recipe of a chain as its own start will; return it with its number of steps."""
    config = _check_recipe(config, file, args)
    if args.launcher == "local":
        local_gpus(config)
    return config


def _run_link(args: argparse.Namespace, *, signals: SignalHandler) -> int:
    """Run a recipe of a chain; return the exit code, above 0 after a signal that came as the run ended."""
    return _run(args, signals) or (signals.number and 128 + signals.number)


def _run(args: argparse.Namespace, signals: SignalHandler) -> int:
    """Run one recipe, or resume one run; return the exit code."""
    if args.resume is not None:
        run_dir = find_run(args.resume)
        config = _resumed_config(run_dir, args)
        warn_of_little_room(run_dir)
        if args.set:
            config = _check_recipe(config, run_dir / CONFIG_FILE, args)
            if config.data.passes:  # services and config.toml get the number of steps, too
                args.set = [*args.set, f"steps={config.steps}"]
            _check_done(config, run_dir)
        else:
            _check_security(config, args.listen)
            check_sequence_parallel(config)
    else:
        config = configuration.load(args.recipe, args.set)
        # Check the recipe before the folder is made, so that a mistake leaves no run folder.
        warn_of_little_room(Path.cwd())
        config = _check_recipe(config, args.recipe, args)
        if args.launcher == "local":
            local_gpus(config)
        run_dir, config = make_run_dir(config, args.name or config.name)
    with locked(run_dir / RUN_LOCK, "`fourfold run`"):
        if args.resume is not None and is_finished(run_dir, config):
            passes = config.data.passes
            key, done = ("data.passes", f"{passes:g}") if passes else ("steps", config.steps)
            more = f"To train further, add --set {key}=N with an N above {done}."
            print(f"{run_dir} is finished already, with {config.steps} steps. {more}")
            return _print_report(run_dir)
        try:
            model_folder.resolve(config.model.source, config.data.chat_template)
            launcher = make_launcher(args, config, run_dir)
        except BaseException:
            if args.resume is None:  # nothing was started, so the folder has nothing to keep
                shutil.rmtree(run_dir, ignore_errors=True)
            raise
        link_latest(run_dir)
        write_launch_options(run_dir, vars(args))
        return RunCommand(args, config, run_dir, launcher, signals).execute()


def warn_of_little_room(folder: Path) -> None:
    """Warn on the console if a run in `folder` may fill the disk."""
    if warning := check_room(folder):
        print(warning, file=sys.stderr)


def _check_recipe(config: Config, recipe: Path, args: argparse.Namespace) -> Config:
    """Check the recipe before anything is started; print probable mistakes. Return it with its number of steps."""
    _check_security(config, args.listen)
    check_models(config)
    check_context(config)
    check_sequence_parallel(config)
    adapter_plan(config)
    found = check_recipe(config, recipe, args.set)
    for text in found.warnings:
        print(f"Warning: {text}.", file=sys.stderr)
    return found.config


def _check_security(config: Config, listen: str) -> None:
    """Raise ConfigError if the coordinator may not listen there, or the certificate of this command is not usable."""
    host, _ = split_target(listen)
    if Security.load(config.security, VIEWER) is None and not is_loopback(host):
        raise ConfigError(
            f"--listen {listen}: without TLS the coordinator listens on loopback only; use 127.0.0.1, or run `fourfold "
            f"certs DIR` and set security.directory"
        )


class SignalHandler:
    """Handles Ctrl-C, SIGTERM and SIGHUP: the first stops the run cleanly, the second kills it."""

    def __init__(self) -> None:
        self.number = 0  # number of the first signal; 0: none
        self.polled = False  # whether the main loop polls `number`; otherwise the handler raises KeyboardInterrupt
        self.launcher: Launcher | None = None
        self.dashboard: Dashboard | None = None

    @property
    def reason(self) -> str:
        """Return the first signal as a text for users."""
        name = signal.Signals(self.number).name
        return f"{name} (Ctrl-C)" if self.number == signal.SIGINT else name

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
        if not self.polled:
            raise KeyboardInterrupt


class RunCommand:
    """One execution of `fourfold run`, from the first process to the last."""

    evaluate = False  # True in `fourfold eval`
    subject = "Run"

    def __init__(
        self, args: argparse.Namespace, config: Config, run_dir: Path, launcher: Launcher, signals: SignalHandler
    ) -> None:
        self._args, self._config, self._run_dir = args, config, run_dir
        self._launcher, self._signals = launcher, signals
        self._security = Security.load(config.security, VIEWER)
        schedule = None if self.evaluate else Schedule.from_config(config)
        self._dashboard = Dashboard(name=config.name, run_dir=run_dir, schedule=schedule)
        self._fleet = Fleet(
            config,
            run_dir=run_dir,
            launcher=launcher,
            notify=self._dashboard.note,
            coordinator_listen=args.listen,
            evaluate=self.evaluate,
            assignments=args.set,
        )
        signals.launcher, signals.dashboard = launcher, self._dashboard

    def execute(self) -> int:
        """Supervise the run to its end, stop all processes, and print the outcome; return the exit code."""
        outcome: RunOutcome | None = None
        print(f"{self.subject} folder: {self._run_dir}")
        try:
            with self._dashboard:
                self._signals.polled = True
                outcome = asyncio.run(self._supervise())
        finally:
            if self._signals.number:
                write_stop_reason(self._run_dir, self._signals.reason)
            self._launcher.stop()
            self._signals.polled = False
        if outcome is None:
            print(f"Stopped by {self._signals.reason}. {self.next_command()}", file=sys.stderr)
            return 128 + self._signals.number
        if outcome.done:
            return self.print_result()
        lines = [f"\nThe {self.subject.lower()} failed. {outcome.text}"]
        if self._fleet.survived_deaths:
            lines += ["Earlier failures:", *(f"  {death}" for death in self._fleet.survived_deaths)]
        self.print_failure(lines)
        return 1

    def print_result(self) -> int:
        """Print the measurements; return the exit code."""
        return _print_report(self._run_dir)

    def print_failure(self, lines: list[str]) -> None:
        """Print the cause of the failure and the next command."""
        folder = self._run_dir
        if self._args.resume is None and (folder := free_name(self._run_dir)) != self._run_dir:
            lines += [f"No step was done. Its logs are in {folder}; correct the cause, and start it again."]
        else:
            lines += [self.next_command()]
        print("\n".join(lines).replace(f"{self._run_dir}/", f"{folder}/"), file=sys.stderr)

    async def _supervise(self) -> RunOutcome | None:
        """Drive the fleet and the display until the run ends; return None after a signal."""
        self._fleet.start()
        watching: asyncio.Task[None] | None = None
        ticks, ended = 0, asyncio.Event()
        try:
            while not self._signals.number:
                if (outcome := self._fleet.tick()) is not None:
                    ended.set()
                    if watching is not None:  # the coordinator's last status may still arrive
                        await asyncio.wait({watching}, timeout=_LAST_STATUS_SECONDS)
                    return outcome
                if self._fleet.address and watching is None:
                    self._show_manual_commands()
                    watching = asyncio.create_task(
                        follow(self._fleet.address, self._security, self._dashboard, ended=ended)
                    )
                self._fleet.on_step(self._dashboard.status.step)
                if ticks % round(1 / _TICK_SECONDS / _REDRAWS_PER_SECOND) == 0:
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

    def _show_manual_commands(self) -> None:
        for service in services_of(self._config, manual=True, evaluate=self.evaluate):
            words = self._fleet.arguments(service, coordinator=self._fleet.address)
            self._dashboard.note(f"start this service yourself (replicas = 0): {program()} {shlex.join(words)}")

    def next_command(self) -> str:
        """Return the command that continues the run after a stop."""
        stop, pending = describe_stop(self._run_dir, last_progress(self._run_dir)), self._fleet.assignments
        kept = f"{self._run_dir / CONFIG_FILE} is as it was, without {', '.join(pending)}. " if pending else ""
        return f"{kept}{stop.resumption}: {stop.command}"


def make_launcher(args: argparse.Namespace, config: Config, run_dir: Path, *, evaluate: bool = False) -> Launcher:
    """Return the launcher that the command line asks for; with `evaluate`, for the services of an evaluation."""
    services = services_of(config, evaluate=evaluate)
    if args.launcher == "ray":
        try:
            from ..launch.ray import RayLauncher
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"--launcher ray needs the module {error.name!r}; {install_command('fourfold-coordinator[ray]')}"
            ) from None
        return RayLauncher(
            services,
            run_dir=run_dir,
            address=args.ray_address,
            strategy=config.placement.strategy,
            variables=[table.judge.api_key_env for table in config.reward if table.judge is not None],
            secured=bool(config.security.directory),
            coordinator_listen=args.listen,
            check_gpu=partial(_check_gpu_memory, config),
        )
    if args.ray_address:
        raise ConfigError("--ray-address is for --launcher ray; give both, or neither")
    assigned = local_gpus(config, evaluate=evaluate, warn=True)
    advice = "" if config.placement.colocated else "; rollout.gpu_memory_utilization must leave room for all"
    for gpu, names in shared_gpus(assigned).items():
        print(f"GPU {gpu} is shared by {', '.join(names)}{advice}.")
    dtypes = {pool.name: pool.dtype for pool in config.rollout_pools}
    on_cpu = [  # services that compute the model in bfloat16 on the CPU
        service.name
        for service in services
        if service.role != "reward" and not service.gpus
        if (dtypes[service.pool] if service.role == "rollout" else config.model.dtype) == "bfloat16"
    ]
    if on_cpu and not has_fast_bfloat16():
        print(
            f'dtype = "bfloat16": {", ".join(on_cpu)} will take 4 to 8 times as long as in '
            f'float32, because this processor has no AVX-512; set model.dtype, or the dtype of the pool, to "float32"',
            file=sys.stderr,
        )
    return LocalLauncher(run_dir=run_dir, gpus=assigned)


def leave_out_trainer(tables: dict[str, Any]) -> None:
    """Change the tables of a recipe for a run without a trainer: leave out its trackers, place and adapters."""
    tables["logging"]["sinks"] = []
    tables["placement"].pop("colocated", None)
    if tables["trainer"]["lora"]["rank"] and not tables["batch"]["rows_per_step"]:
        tables["weights"]["adapters"] = "merged"  # an engine without room for adapters is faster


def local_gpus(config: Config, *, evaluate: bool = False, warn: bool = False) -> dict[str, tuple[str, ...]]:
    """Return the ids of each service's GPUs on this machine; raise ConfigError when these are too few or too small.

    With `warn`, warn on the console if they may be too small.
    """
    placement, services = config.placement, services_of(config, evaluate=evaluate)
    for key, value, valid in (
        ("trainer_nodes", placement.trainer_nodes, evaluate or placement.trainer_nodes == 1),
        ("strategy", f'"{placement.strategy}"', placement.strategy != "strict_spread"),
    ):
        if not valid:
            raise ConfigError(
                f"placement.{key} = {value} needs several machines, and --launcher local has one; pass --launcher ray "
                f"--ray-address ADDRESS, or remove the key"
            )
    if not any(service.gpus for service in services):
        return {}
    visible = visible_gpus()
    assigned = assign_gpus(services, visible, colocated=config.placement.colocated)
    used = {gpu for ids in assigned.values() for gpu in ids}
    if (size := smallest_memory(gpu for gpu in visible if gpu.id in used)) is not None:
        (_check_gpu_memory if warn else check_gpu_memory)(config, size)
    return assigned


def _check_gpu_memory(config: Config, gpu_bytes: int) -> None:
    """Warn on the console if services that share a GPU may be too large for it; raise ConfigError if they are."""
    if warning := check_gpu_memory(config, gpu_bytes):
        print(warning, file=sys.stderr)


def _resumed_config(run_dir: Path, args: argparse.Namespace) -> Config:
    if args.name:
        raise ConfigError("--name and --resume exclude each other: a resumed run keeps its name")
    if not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(f"{run_dir}: not the folder of a run (no config.toml); give one of runs/")
    config = configuration.fix_date(configuration.load(run_dir / CONFIG_FILE, args.set), run_dir)
    if args.set and config.data.passes:
        began = configuration.load(run_dir / CONFIG_FILE).batch.rows_per_step
        if config.batch.rows_per_step != began:
            raise ConfigError(
                f"batch.rows_per_step = {config.batch.rows_per_step}: {run_dir} began with {began}, from which "
                f"data.passes counts the steps; leave it, or set steps and data.passes = 0"
            )
        if not any(text.partition("=")[0].strip() == "steps" for text in args.set):
            return config.model_copy(update={"steps": 0})  # counted again from the passes
    _check_done(config, run_dir)
    return config


def _check_done(config: Config, run_dir: Path) -> None:
    if config.steps < (done := last_progress(run_dir).step):
        key = f"data.passes = {config.data.passes:g} gives steps" if config.data.passes else "steps"
        more = "raise data.passes" if config.data.passes else f"give --set steps={done} or more"
        raise ConfigError(f"{key} = {config.steps}: {run_dir} has done {done} steps; {more}")


def _print_report(run_dir: Path) -> int:
    print("\n".join(report_lines(run_dir)))
    return 0
