"""Runs the command `fourfold`. Imports a command's module only when that command is called.

A command is a module or an object with `add_arguments(parser)` and `main(args) -> int`, and perhaps `complete(words)`,
which returns the words of a short form in full. `plan`, `get`, `doctor`, `health`, `proto` and `serve` are here. The
distributions of the coordinator, the tools and the benchmarks register theirs by entry points of the group
`fourfold.commands`. Services register the function that `serve` calls in the group `fourfold.services`; the reward
service registers what `serve reward --list` prints in the group `fourfold.verifiers`.

Exit codes: 0 success; 1 error, with a message on stderr; 2 wrong usage; 130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import importlib.metadata
import importlib.util
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TextIO

from fourfold.errors import ConfigError, FourfoldError
from fourfold.host import proxies
from fourfold.install import find_entry, install_command
from fourfold.text import nearest_name

_MODULES: Final = {
    "plan": "fourfold.plan.report",
    "doctor": "fourfold.cli.doctor",
    "health": "fourfold.cli.health",
    "proto": "fourfold.cli.proto",
    "get": "fourfold.cli.get",
}
_COORDINATOR: Final = "fourfold-coordinator"
_TOOLS: Final = "fourfold-tools"
_DISTRIBUTIONS: Final = {"bench": "fourfold-bench", "certs": _TOOLS, "conformance": _TOOLS, "import": _TOOLS}
"""Distributions of commands; of those that are not listed, the coordinator's."""
_SERVICES: Final = {
    "rollout": "fourfold-rollout",
    "trainer": "fourfold-trainer",
    "reward": "fourfold-reward",
    "reference": "fourfold-reward[reference]",
    "gateway": "fourfold-gateway",
    "coordinator": _COORDINATOR,
    "environment": "fourfold-reward",
}
"""Distributions of services."""
_OPTION_ROLES: Final = {
    "rank": "trainer",
    "interface": "trainer",
    "evaluate": "coordinator",
    "list": "reward",
    "scorer": "reward",
    "pool": "rollout",
    "engine": "gateway",
    "gateway": "environment",
}
"""Options of `fourfold serve` that one role alone reads."""
# Of a service and its processes, unless the user has set them. Both are read when torch is loaded.
_ENVIRONMENT: Final = {
    # The services of a machine use its cores in turn: threads that spin while they wait gain nothing, and cost several
    # times the work when another process needs a core.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Healthy processes warn of addresses without a host name (c10d) and of memory policies (vLLM).
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
_HELP: Final = {
    "new": "write a recipe for your data, model and GPUs",
    "run": "start every service of a recipe and train",
    "get": "download a model or a data set of the Hugging Face Hub",
    "eval": "evaluate the model of a run, or a model folder, on held-out sets",
    "sample": "write scored answers, or pairs of them, to the training prompts as rows to train on",
    "plan": "describe a run and the memory it needs, before anything is started",
    "doctor": "check what this machine can run, and print the commands that install the rest",
    "serve": "start one service by hand, in its own terminal or on its own machine",
    "health": "ask a service whether it is ready, for probes of containers",
    "watch": "show the live display of a run",
    "view": "show runs in a browser: curves, trajectories, comparison",
    "weights": "show the weight update of a run: each participant, and what it waits for",
    "agents": "list the sessions of agents that a running run waits for, and give their tasks to others",
    "reward": "list the scorers of a running run, and replace them without a stop",
    "runs": "list the runs of a folder, and delete old ones",
    "log": "send the metrics of a run to TensorBoard, W&B, trackio or MLflow",
    "export": "write a trained model as a GGUF file, or upload it to the Hugging Face Hub",
    "chat": "chat with a model folder through a rollout service",
    "bench": "measure weight updates, sampling or whole steps on this machine",
    "import": "convert a run configuration of OpenRLHF, TRL or verl into a recipe",
    "certs": "make a private CA, certificates of members and tokens of agents, for [security]",
    "conformance": "check a service of your own against the contract: reward, rollout or gateway",
    "proto": "write the .proto files and the descriptor set, for clients in other languages",
}


class CommandModule(Protocol):
    """Interface of a command of `fourfold`; see the docstring of this module."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments to its parser."""

    def main(self, args: argparse.Namespace) -> int:
        """Run the command and return the exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, by default of this process's arguments, and print an expected error as one message."""
    _open_standard_files()
    proxies.bypass(*proxies.THIS_MACHINE)
    try:
        return _report(list(sys.argv[1:] if argv is None else argv))
    except OSError as error:
        # The error may also be of another file, or of the pipe of a child process.
        probe = "\n" if error.errno == errno.ENOSPC else ""
        if not any([_discard_if_broken(sys.stdout, 1, probe), _discard_if_broken(sys.stderr, 2)]):
            raise
        if isinstance(error, BrokenPipeError):
            return 128 + signal.SIGPIPE
        print(f"fourfold: the output cannot be written ({error.strerror})", file=sys.stderr)
        return 1


def _report(words: list[str]) -> int:
    try:
        return _dispatch(words)
    except FourfoldError as error:
        print(f"fourfold: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fourfold: interrupted", file=sys.stderr)
        return 130
    finally:  # also after --help, which raises SystemExit
        sys.stdout.flush()


def _open_standard_files() -> None:
    """Open /dev/null in place of each standard file that is closed, as by `<&-`.

    Python has None for it, and the next file or socket would get its number.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _discard_if_broken(stream: TextIO, number: int, probe: str = "") -> bool:
    """Return whether a stream cannot be written, as after `| head`; if so, discard the rest of the output.

    `probe` shows a full disk if the stream has no buffer (PYTHONUNBUFFERED): then nothing is left to be flushed.
    """
    output = select.poll()
    output.register(number, 0)
    try:
        stream.write(probe)
        stream.flush()
        broken = any(events & select.POLLERR for _, events in output.poll(0))
    except OSError:
        broken = True
    if broken:
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    return broken


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0 if words else 2
    if words[0] == "--version":
        print(f"fourfold {importlib.metadata.version('fourfold')}")
        return 0
    name, rest = words[0], words[1:]
    if name not in _HELP:
        near = nearest_name(name, _HELP)
        hint = f"did you mean `{near}`?" if near else f"commands: {', '.join(_HELP)}"
        print(f"fourfold: no command {name!r}; {hint}", file=sys.stderr)
        return 2
    try:
        command, arguments = parse(name, rest)
        return command.main(arguments)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or importlib.util.find_spec(package) is not None:
            raise
        needed = install_command(package.replace("_", "-") if package.startswith("fourfold_") else package)
        raise ConfigError(f"`{name}` needs the module {package!r}, which is not installed; {needed}") from None


def parse(name: str, words: list[str]) -> tuple[CommandModule, argparse.Namespace]:
    """Return the command `name` and its parsed arguments."""
    command = _command(name)
    complete: Callable[[list[str]], list[str]] = getattr(command, "complete", list)
    return command, _build_parser(name, command).parse_args(complete(words))


def commands() -> dict[str, str]:
    """Return every command with its help text, including those of missing distributions."""
    return dict(_HELP)


def build_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of a command.

    Raises:
        ConfigError: the distribution of the command is not installed.
    """
    return _build_parser(name, _command(name))


def _build_parser(name: str, command: CommandModule) -> argparse.ArgumentParser:
    text = _HELP.get(name, "")
    parser = argparse.ArgumentParser(prog=f"fourfold {name}", description=f"{text[:1].upper()}{text[1:]}.")
    command.add_arguments(parser)
    return parser


def _overview() -> str:
    commands = "\n".join(f"  {name:11}  {text}" for name, text in _HELP.items())
    return f"""\
usage: fourfold COMMAND ...   (fourfold COMMAND --help shows its arguments)

Post-trains language models with reinforcement learning, as four services.

{commands}

First steps: fourfold doctor; fourfold plan RECIPE.toml; fourfold run RECIPE.toml"""


def _command(name: str) -> CommandModule:
    if name == "serve":
        return _Serve()
    if name in _MODULES:
        module: Any = importlib.import_module(_MODULES[name])
        return module  # type: ignore[no-any-return]
    command: CommandModule = _load("fourfold.commands", name)
    return command


def how_to_install(role: str) -> str:
    """Return the shell command that installs a service on this machine."""
    if role == "rollout":
        from fourfold.host.hardware import machine_gpus

        return install_command(f"{_SERVICES[role]}[{'gpu' if machine_gpus() else 'cpu'}]")
    return install_command(_SERVICES[role])


def _load(group: str, name: str) -> Any:
    """Return the object that an installed distribution registered under a name."""
    is_command = group == "fourfold.commands"  # `reward` is a command of the coordinator, and a service
    if entry := find_entry(group, name):
        try:
            return entry.load()
        except ModuleNotFoundError as error:
            if is_command:
                raise  # the distribution is installed, but lacks another package
            raise ConfigError(
                f"`{name}` needs the module {error.name!r}, which is not installed; {how_to_install(name)}"
            ) from None
    how = install_command(_DISTRIBUTIONS.get(name, _COORDINATOR)) if is_command else how_to_install(name)
    raise ConfigError(f"`{name}` is not installed here; {how}")


def _ranks(text: str) -> range:
    first, dash, last = text.partition("-")
    last = last if dash else first
    if not (first.isdecimal() and last.isdecimal()) or int(last) < int(first):
        raise argparse.ArgumentTypeError(f"{text!r} names no ranks; give one, as 0, or the first and the last, as 8-15")
    return range(int(first), int(last) + 1)


class _Serve:
    """`fourfold serve ROLE RECIPE`: start one service in this process."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("role", choices=list(_SERVICES), help="the service to start")
        parser.add_argument("recipe", type=Path, nargs="?", help="TOML file, the same for all services of the run")
        from fourfold import config

        config.add_set_option(parser, "trainer.learning_rate=1e-5")
        parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="port 0: any free port")
        parser.add_argument("--coordinator", default="", metavar="HOST:PORT", help="coordinator to register with")
        parser.add_argument("--member-id", default="", help="id of this service in the run; default: ROLE-0")
        parser.add_argument(
            "--run-dir", type=Path, help="folder of the run; default: runs/NAME, with the recipe's name"
        )
        parser.add_argument("--advertise", default="", metavar="HOST", help="host name that other services connect to")
        parser.add_argument(
            "--metrics-listen", default="", metavar="HOST:PORT", help="serve metrics for Prometheus here, on loopback"
        )
        parser.add_argument(
            "--gateway", default="", metavar="HOST:PORT", help="environment only: attempt the tasks of this gateway"
        )
        parser.add_argument(
            "--engine",
            action="append",
            default=[],
            metavar="HOST:PORT",
            help="gateway only: a rollout service to use without a coordinator; may be repeated",
        )
        parser.add_argument(
            "--scorer",
            default="",
            metavar="NAME",
            help="reward only: the [[reward]] to serve; default: the first",
        )
        parser.add_argument(
            "--pool",
            default="",
            metavar="NAME",
            help="rollout only: the [[rollout.pool]] of the engine; default: the first",
        )
        parser.add_argument(
            "--rank",
            type=_ranks,
            metavar="FIRST[-LAST]",
            help="trainer only: the ranks of this machine, e.g. 8-15; other machines hold the others",
        )
        parser.add_argument(
            "--interface",
            default="",
            metavar="NAME",
            help="trainer with --rank only: network interface of the collectives; default: the one that reaches rank 0",
        )
        parser.add_argument(
            "--evaluate",
            action="store_true",
            help="coordinator only: evaluate the recipe's model on its held-out sets, and train nothing",
        )
        parser.add_argument("--list", action="store_true", help="reward only: print the built-in verifiers")

    def main(self, args: argparse.Namespace) -> int:
        from fourfold.host.imports import fast_imports
        from fourfold.host.process_tree import die_with_parent

        die_with_parent()
        if args.role != "coordinator":  # it builds no kernels, and tells commands that fit the PATH of its user
            # vLLM's GPU kernels are built by ninja, which is in this environment even if that is not activated.
            os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        for name, role in _OPTION_ROLES.items():
            if getattr(args, name) not in (None, False, "", []) and args.role != role:
                print(
                    f"fourfold serve {args.role}: --{name} is an option of `fourfold serve {role}`; remove it",
                    file=sys.stderr,
                )
                return 2
        if args.list:
            return self._list_verifiers()
        if args.recipe is None:
            print("fourfold serve: the recipe is missing; give the path of a TOML file", file=sys.stderr)
            return 2
        from fourfold import config

        settings = config.load(args.recipe, args.set)
        if not settings.steps:
            raise ConfigError(
                f"{args.recipe}: data.passes = {settings.data.passes:g}, and services need the number of steps; start "
                f"the run with `fourfold run`, which counts the rows, or set steps as `fourfold plan` prints it"
            )
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if settings.security.directory and os.environ.get("GRPC_VERBOSITY") == "ERROR":
            # A refused TLS handshake reaches no servicer. Only gRPC's core logs the reason, unless it is silenced.
            os.environ["GRPC_VERBOSITY"] = ""
        with fast_imports():
            service = _load("fourfold.services", args.role)
        from fourfold.service.lifecycle import ServeOptions

        folder = args.run_dir or Path("runs") / settings.name
        options = ServeOptions(
            role=args.role,
            recipe=args.recipe,
            config=config.fix_date(settings, folder),
            assignments=tuple(args.set),
            member_id=args.member_id or f"{args.role}-0",
            listen=args.listen,
            coordinator=args.coordinator,
            run_dir=folder if args.role in ("coordinator", "trainer") else args.run_dir,
            advertise=args.advertise,
            metrics_listen=args.metrics_listen,
            gateway=args.gateway,
            scorer=args.scorer,
            pool=args.pool,
            engines=tuple(args.engine),
            ranks=args.rank,
            interface=args.interface,
            evaluate=args.evaluate,
        )
        code: int = service(options)
        return code

    def _list_verifiers(self) -> int:
        for name, line in _load("fourfold.verifiers", "reward"):
            print(f"{name:22} {line}")
        return 0
