"""The command `fourfold`. Nothing heavy is imported before a command needs it.

Each command is a module (or a class here) with `add_arguments(parser)` and `main(args) -> int`, and perhaps
`complete(words)`, which adds words that its short form leaves out.
`run`, `watch`, `weights` and `chat` come with the coordinator's distribution, `bench` with
`fourfold-bench`, the services with theirs. They register through the entry point groups `fourfold.commands`
and `fourfold.services`.

Exit codes: 0 done; 1 an error, explained on stderr; 2 wrong usage; 130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from fourfold.errors import ConfigError, FourfoldError

_HERE: Final = {
    "plan": "fourfold.plan.report",
    "doctor": "fourfold.cli.doctor",
    "certs": "fourfold.cli.certs",
}
_COORDINATOR: Final = "fourfold-coordinator"
_COMMANDS: Final = {"bench": "fourfold-bench"}
"""Distributions of commands that do not come with the coordinator's."""
_DISTRIBUTIONS: Final = {
    "rollout": "fourfold-rollout[cpu]  (on GPUs: fourfold-rollout[gpu])",
    "trainer": "fourfold-trainer",
    "reward": "fourfold-reward",
    "reference": "fourfold-reward[reference]",
    "coordinator": _COORDINATOR,
}
_STDOUT: Final = 1
_HELP: Final = {
    "run": "train: start every service of a recipe and watch it learn",
    "plan": "what a recipe means: batches and memory, as sentences and a table",
    "doctor": "what this machine can run, and the next command where it cannot",
    "serve": "one service by hand, in its own terminal or on its own machine",
    "watch": "the live display of a run that is going on",
    "weights": "how the weights of a run get to its engines: who waits for whom, since when",
    "chat": "talk to a model folder through a rollout service",
    "bench": "what this machine does: weight updates, sampling, whole steps",
    "certs": "a private CA, certificates of members and tokens of agents, for [security]",
}


class Command(Protocol):
    """What a command module offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare its arguments."""

    def main(self, args: argparse.Namespace) -> int:
        """Run it and return the exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; `argv` is what follows the program's name."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except FourfoldError as error:
        print(f"fourfold: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fourfold: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        return 128 + signal.SIGPIPE


def _reader_is_gone() -> bool:
    """Return whether nobody reads our output any more, as after `| head`; if so, let the rest of it go nowhere."""
    output = select.poll()
    output.register(_STDOUT, 0)
    if not any(events & select.POLLERR for _, events in output.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)
    return True


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0 if words else 2
    if words[0] == "--version":
        import importlib.metadata

        print(f"fourfold {importlib.metadata.version('fourfold')}")
        return 0
    name, rest = words[0], words[1:]
    if name not in _HELP:
        close = difflib.get_close_matches(name, _HELP, n=1)
        hint = f"did you mean `{close[0]}`?" if close else f"commands: {', '.join(_HELP)}"
        print(f"fourfold: no command {name!r}; {hint}", file=sys.stderr)
        return 2
    command, arguments = parse(name, rest)
    return command.main(arguments)


def parse(name: str, words: list[str]) -> tuple[Command, argparse.Namespace]:
    """Return a command, and what the words after its name mean to it."""
    command, text = _command(name), _HELP.get(name, "")
    parser = argparse.ArgumentParser(prog=f"fourfold {name}", description=f"{text[:1].upper()}{text[1:]}.")
    command.add_arguments(parser)
    complete: Callable[[list[str]], list[str]] = getattr(command, "complete", list)
    return command, parser.parse_args(complete(words))


def _overview() -> str:
    lines = [f"  {name:8}  {text}" for name, text in _HELP.items()]
    return "\n".join(
        [
            "usage: fourfold COMMAND ...   (fourfold COMMAND --help says more)",
            "",
            "Post-trains language models with reinforcement learning, as four services.",
            "",
            *lines,
            "",
            "First steps: fourfold doctor; fourfold plan RECIPE.toml; fourfold run RECIPE.toml",
        ]
    )


def _command(name: str) -> Command:
    if name == "serve":
        return _Serve()
    if name in _HERE:
        module: Any = importlib.import_module(_HERE[name])
        return module  # type: ignore[no-any-return]
    command: Command = _load("fourfold.commands", name, _COMMANDS.get(name, _COORDINATOR))
    return command


def _load(group: str, name: str, distribution: str) -> Any:
    """Return what an installed distribution registered under a name."""
    import importlib.metadata

    for entry in importlib.metadata.entry_points(group=group, name=name):
        try:
            return entry.load()
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"`{name}` needs the module {error.name!r}, which is not installed; pip install {distribution}"
            ) from None
    raise ConfigError(f"`{name}` is not installed here; pip install {distribution}")


class _Serve:
    """`fourfold serve ROLE RECIPE`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("role", choices=list(_DISTRIBUTIONS))
        parser.add_argument("recipe", type=Path, nargs="?", help="the run's TOML file: the same for all its services")
        parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="port 0: any free one")
        parser.add_argument("--coordinator", default="", metavar="HOST:PORT", help="whom to register with")
        parser.add_argument("--member-id", default="", help="name of this process in the run, default ROLE-0")
        parser.add_argument("--run-dir", type=Path, help="folder of the run, default runs/<name of the recipe>")
        parser.add_argument("--advertise", default="", metavar="HOST", help="address that others dial")
        parser.add_argument("--list", action="store_true", help="reward only: print the built-in verifiers")

    def main(self, args: argparse.Namespace) -> int:
        from fourfold.host.process_tree import die_with_parent

        die_with_parent()
        # What an environment brings (ninja, for vLLM's kernels on GPUs) is found even when nobody activated it.
        os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        if args.list:
            return self._list(args.role)
        if args.recipe is None:
            print("fourfold serve: give the recipe, a TOML file", file=sys.stderr)
            return 2
        from fourfold import config

        settings = config.load(args.recipe)
        # OpenMP reads it when torch is loaded. The services of one machine take turns on its cores: threads that spin
        # while they wait gain nothing there, and cost several times the work as soon as another process wants a core.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        if settings.security.directory and os.environ.get("GRPC_VERBOSITY") == "ERROR":
            # A refused TLS handshake reaches no servicer; gRPC's core tells the log why, unless it was silenced.
            os.environ["GRPC_VERBOSITY"] = ""
        service = _load("fourfold.services", args.role, _DISTRIBUTIONS[args.role])
        from fourfold.service.lifecycle import ServeOptions

        run_dir = args.run_dir
        if run_dir is None and args.role in ("coordinator", "trainer"):
            run_dir = Path("runs") / settings.name
        options = ServeOptions(
            role=args.role,
            recipe=args.recipe,
            config=settings,
            member_id=args.member_id or f"{args.role}-0",
            listen=args.listen,
            coordinator=args.coordinator,
            run_dir=run_dir,
            advertise=args.advertise,
        )
        code: int = service(options)
        return code

    def _list(self, role: str) -> int:
        if role != "reward":
            print(f"fourfold serve {role}: --list is for `fourfold serve reward`", file=sys.stderr)
            return 2
        service = _load("fourfold.services", role, _DISTRIBUTIONS[role])
        verifiers = importlib.import_module(service.__module__.rpartition(".")[0] + ".verifiers")
        for name, line in verifiers.describe():
            print(f"{name:22} {line}")
        return 0
